"""Conduct `inspect` from its order to its exit code."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

from fleetfix.cli.conduct import operator
from fleetfix.cli.descriptors import room_for
from fleetfix.cli.places import lasting_name, load_inventory
from fleetfix.cli.secret_sources import hold_become_password
from fleetfix.cli.signals import heard
from fleetfix.domain.conditions import Condition
from fleetfix.engine.context import Interrupts
from fleetfix.engine.inspect import Inspected, inspect
from fleetfix.errors import Failure, UsageError
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.library import available
from fleetfix.policy import Policy
from fleetfix.runs import new_run_id
from fleetfix.session import HostInfo, Purpose, unfinished_hint
from fleetfix.views.amounts import count
from fleetfix.views.fit import fit
from fleetfix.views.grouping import counted
from fleetfix.views.inspect import Seen, inspect_json, inspect_text
from fleetfix.views.out import Out
from fleetfix.views.paint import Paint

PROGRESS_SECONDS = 10.0


@dataclass(frozen=True)
class Order:
    """A look as the command line asks for it."""

    hosts: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    inventory: str | None = None
    environments: tuple[str, ...] = ()
    forks: int | None = None
    json: bool = False


def conduct(order: Order) -> int:
    """Look, and show what was seen; returns the exit code."""
    for one in order.environments:
        if one != "of-job" and not one.startswith("/"):
            raise UsageError(f"--env {one!r} is neither of-job nor an absolute path")
    inventory = load_inventory(order.inventory)
    hosts = inventory.select(order.hosts, order.exclude)
    hold_become_password(hosts)
    show = Show(order, hosts)
    try:
        interrupted = asyncio.run(_look(order, hosts, show))
    finally:
        show.close()
    if not order.json:
        named = "" if order.inventory is None else lasting_name(inventory)
        show.end(named)
    return 130 if interrupted else exit_code(show.seen)


def exit_code(seen: list[Seen]) -> int:
    """0 where nothing is wrong, 2 where something is or an environment was not audited, 4 where hosts
    could only not be reached."""
    kinds = {one.failure.kind for one in seen if one.failure is not None}
    if any(one.wrong or one.unaudited for one in seen) or kinds - {"unreachable", "auth", "host_key"}:
        return 2
    return 4 if kinds else 0


async def _look(order: Order, hosts: tuple[Host, ...], show: Show) -> bool:
    """Look at all hosts; says whether the operator ended it before."""
    purpose = Purpose(
        run=new_run_id("inspect", datetime.now(UTC)),
        playbook="inspect",
        dry=True,
        operator=operator(),
        controller=socket.gethostname(),
    )
    interrupts = Interrupts()
    looking = asyncio.ensure_future(
        inspect(
            hosts,
            purpose,
            show.told,
            environments=order.environments,
            forks=room_for(hosts, order.forks or Policy().forks, kept=False),
        )
    )
    stopped = asyncio.ensure_future(interrupts.more_than(0))
    progress = asyncio.ensure_future(show.progress())
    with heard(interrupts.interrupt):
        await asyncio.wait({looking, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopped, progress, looking):
            task.cancel()
        await asyncio.wait({looking})
    if interrupts.times:
        show.not_looked_at("it was not looked at: interrupted")
        return True
    looking.result()
    return False


class Show:
    """What `inspect` shows: one screen at the end, or JSON as it comes."""

    def __init__(self, order: Order, hosts: tuple[Host, ...]) -> None:
        self.seen: list[Seen] = []
        self._names = [host.name for host in hosts]
        self._json = order.json
        self._out = Out(sys.stdout)
        self._errors = Out(sys.stderr)

    def told(self, one: Inspected) -> None:
        """Take in one host."""
        found = _left_there(one.info, one.host) if one.info is not None else ()
        seen = Seen(one.host, one.facts, one.failure, tuple(found), one.audits)
        self.seen.append(seen)
        if self._json:
            self._out.whole(inspect_json(seen))

    def not_looked_at(self, why: str) -> None:
        """Take in all hosts that are left."""
        known = {one.host for one in self.seen}
        failure = Failure(kind="cancelled", message=why)
        for name in self._names:
            if name not in known:
                self.told(Inspected(name, failure=failure))

    async def progress(self) -> None:
        """Say from time to time who has not answered."""
        while not self._json:
            await asyncio.sleep(PROGRESS_SECONDS)
            left = HostSet(set(self._names) - {one.host for one in self.seen})
            done = f"{len(self.seen)} of {count(len(self._names), 'host')}"
            self._errors.line(f"looked at {done}; not yet: {counted(left)}")

    def close(self) -> None:
        self._out.close()
        self._errors.close()

    def end(self, inventory: str) -> None:
        """Show the fleet."""
        order = {name: place for place, name in enumerate(self._names)}
        seen = sorted(self.seen, key=lambda one: order[one.host])
        paint = Paint.for_stream(sys.stdout, os.environ)
        text = inspect_text(seen, inventory=inventory, playbooks=available(), paint=paint)
        print(fit(text, sys.stdout))


def _left_there(info: HostInfo, host: str) -> list[Condition]:
    """What fleetfix itself has on a host: unfinished runs, one that writes now, the kill switch."""
    found = []
    writing = info.lease.run if info.lease is not None else None
    for claim in info.claims:
        if claim.run == writing:
            continue  # it is at work: nothing is left there yet
        what = "; ".join(claim.open) or "work left open"
        text = f"run {claim.run} by {claim.operator} on {claim.controller} is unfinished here: {what}"
        found.append(Condition(text=text, help=unfinished_hint(claim.run)))
    if info.lease is not None and writing is not None:
        text = f"run {info.lease.run} of {info.lease.operator} on {info.lease.controller} writes here now"
        found.append(Condition(text=text, help="wait until it has ended"))
    if info.disabled is not None:
        text = f"fleetfix is switched off here: {info.disabled}"
        found.append(Condition(text=text, help="remove /etc/fleetfix/DISABLED there"))
    if not info.durable:
        found.append(Condition(text=f"fleetfix can keep no lasting records here, only in {info.home}"))
    return found
