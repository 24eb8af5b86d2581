"""Conduct `ledger` from its order to its exit code."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from fleetfix.cli.conduct import operator
from fleetfix.cli.descriptors import room_for
from fleetfix.cli.places import load_inventory
from fleetfix.cli.secret_sources import hold_become_password
from fleetfix.cli.signals import heard
from fleetfix.domain.ledger import Ledger, as_json
from fleetfix.engine.context import Interrupts
from fleetfix.engine.ledger import read_ledgers
from fleetfix.errors import Failure
from fleetfix.inventory import Host
from fleetfix.policy import Policy
from fleetfix.runs import new_run_id
from fleetfix.session import Purpose
from fleetfix.views.ledger import ledger_text
from fleetfix.views.out import Out


@dataclass(frozen=True)
class Order:
    """A look into ledgers as the command line asks for it."""

    hosts: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    inventory: str | None = None
    last: int = 50
    forks: int | None = None
    json: bool = False


def conduct(order: Order) -> int:
    """Read, and show; returns the exit code: 2 where a host told nothing, 4 where it was not reached."""
    hosts = load_inventory(order.inventory).select(order.hosts, order.exclude)
    hold_become_password(hosts)
    found = asyncio.run(ask(hosts, last=order.last, forks=order.forks))
    out = Out(sys.stdout)
    missing = Failure(kind="cancelled", message="it was not looked at: interrupted")
    try:
        for host in hosts:
            told = found.get(host.name, missing)
            if order.json:
                for line in _json_lines(host.name, told):
                    out.whole(line)
            else:
                out.line(ledger_text(host.name, told))
    finally:
        out.close()
    return exit_code(hosts, found)


def exit_code(hosts: Sequence[Host], found: Mapping[str, Ledger | Failure]) -> int:
    """The exit code of what hosts told: 130 where some were not asked any more."""
    if len(found) < len(hosts):
        return 130
    kinds = {one.kind for one in found.values() if isinstance(one, Failure)}
    if kinds - {"unreachable", "auth", "host_key"}:
        return 2
    return 4 if kinds else 0


def _json_lines(host: str, told: Ledger | Failure) -> list[str]:
    if isinstance(told, Failure):
        return [json.dumps({"host": host, "failure": told.model_dump()})]
    return [json.dumps(as_json(host, line)) for line in told.lines]


async def ask(
    hosts: tuple[Host, ...], *, last: int, forks: int | None = None
) -> dict[str, Ledger | Failure]:
    """What each host told; those are missing that were not asked before the operator ended it."""
    purpose = Purpose(
        run=new_run_id("ledger", datetime.now(UTC)),
        playbook="ledger",
        dry=True,
        operator=operator(),
        controller=socket.gethostname(),
    )
    found: dict[str, Ledger | Failure] = {}
    interrupts = Interrupts()
    forks = room_for(hosts, forks or Policy().forks, kept=False)
    reading = asyncio.ensure_future(read_ledgers(hosts, purpose, found.__setitem__, last=last, forks=forks))
    stopped = asyncio.ensure_future(interrupts.more_than(0))
    with heard(interrupts.interrupt):
        await asyncio.wait({reading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopped, reading):
            task.cancel()
        await asyncio.wait({reading})
    if not reading.cancelled():
        reading.result()
    return found
