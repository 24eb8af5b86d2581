"""Conduct `commit` and `release`: what ends the hold that a run has on its hosts."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fleetfix.cli import config, consent, secret_sources
from fleetfix.cli.conduct import driver, operator
from fleetfix.cli.descriptors import room_for
from fleetfix.cli.known import find_run, known_state, started_elsewhere, touched_hosts
from fleetfix.cli.show import Show
from fleetfix.cli.state_dir import state_dir
from fleetfix.engine.settling import Settling, end_where_all_have_ended
from fleetfix.errors import UsageError
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.journal import Journal
from fleetfix.policy import Policy
from fleetfix.recorder import Recorder
from fleetfix.session import Purpose
from fleetfix.state import RunState
from fleetfix.views.fit import fit
from fleetfix.views.grouping import counted, group
from fleetfix.views.neutral import one_line

Way = Literal["commit", "release"]


@dataclass(frozen=True)
class Order:
    """A commit or a release as the command line asks for it."""

    way: Way
    run: str
    hosts: tuple[str, ...] | None
    inventory: str | None
    reason: str
    json: bool
    yes: bool
    take_over: bool = False


def settle(order: Order) -> int:
    """End what a run holds on its hosts; returns the exit code."""
    with Journal.open(state_dir()) as journal:
        run = find_run(journal, order.run, order.hosts)
        with journal.drive(run):
            known = known_state(journal, run)
            hosts = touched_hosts(known, order.hosts, order.inventory, order.way)
            secret_sources.hold_become_password(hosts)
            if not order.yes:
                _ask(order.way, known, hosts)
            show = Show(json=order.json, plain=True)
            try:
                code = asyncio.run(_settle(run, known, hosts, journal, order, show))
            finally:
                show.close()
    return code


async def _settle(
    run: str, known: RunState, hosts: tuple[Host, ...], journal: Journal, order: Order, show: Show
) -> int:
    recorder = Recorder(run, journal, show.views(), state=known, seq=journal.last_seq(run))
    if known.started is None:
        recorder.record(started_elsewhere(run, hosts, order.inventory, order.reason))
    started = recorder.state.started
    settling = Settling(
        purpose=Purpose(
            run=run,
            playbook=started.playbook if started else "",
            dry=False,
            operator=operator(),
            controller=socket.gethostname(),
            reason=order.reason,
            driver=driver(),
            take_over=order.take_over,
        ),
        hosts=hosts,
        recorder=recorder,
        forks=room_for(hosts, Policy().forks, kept=False),
    )
    code = await (settling.commit() if order.way == "commit" else settling.release())
    end_where_all_have_ended(recorder)
    await recorder.durable()
    return code


def _ask(way: Way, known: RunState, hosts: tuple[Host, ...]) -> None:
    """Ask at a terminal, with what it means. Elsewhere the run's id says enough."""
    if not consent.at_terminal():
        return
    for line in _meaning(way, known, hosts):
        print(fit(line, sys.stderr), file=sys.stderr)
    names = HostSet(host.name for host in hosts)
    question = consent.Question(f"{way} run {known.run} on", names, above=config.load().confirm_above)
    if not consent.ask(question):
        raise UsageError("not confirmed; nothing was done")


def _meaning(way: Way, known: RunState, hosts: tuple[Host, ...]) -> Iterator[str]:
    states = [known.hosts[host.name] for host in hosts if host.name in known.hosts]
    done = [(host.name, shown.summary) for host in states for shown in host.changes.values()]
    for one in group(done):
        yield f"{counted(one.hosts)}: stays: {one_line(one.text)}"
    if way == "commit":
        yield "what only undo needs is dropped: there is no way back then"
        return
    stopped = HostSet(host.name for host in states if host.without_its_job)
    if stopped:
        yield f"the job that was stopped stays stopped: {counted(stopped)}"
    yield "nothing is undone, and other runs may change these hosts then"
