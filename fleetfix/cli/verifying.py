"""Conduct `runs --verify`: whether the journal is as it was written, by its chain and by hosts' ledgers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from fleetfix.chain import Misfit, Verified
from fleetfix.cli.conduct import operator
from fleetfix.cli.places import load_inventory
from fleetfix.cli.secret_sources import hold_become_password
from fleetfix.cli.state_dir import state_dir
from fleetfix.domain.ledger import Ledger
from fleetfix.errors import Failure
from fleetfix.journal import Journal
from fleetfix.views.history import misfit_text, verified_text
from fleetfix.views.neutral import one_line

LINES = 1000
"""The last lines of each host's ledger that are compared."""


@dataclass(frozen=True)
class Order:
    """A verification as the command line asks for it."""

    run: str | None = None
    hosts: tuple[str, ...] | None = None
    inventory: str | None = None
    json: bool = False


def verify(order: Order) -> int:
    """Go over the records of one run, or of all; returns the exit code."""
    kept, asked = _ledgers(order)
    with Journal.open(state_dir()) as journal:
        runs = (journal.find(order.run),) if order.run else journal.every_run()
        found = [journal.verify(run) for run in runs]
        gone = journal.verify_links()
        misfits = [one.misfit for one in found if one.misfit is not None]
        misfits += [gone] if gone is not None else []
        misfits += _compare(journal, kept, runs[0] if order.run else None)
    silent = {host: told for host, told in kept.items() if isinstance(told, Failure)}
    if order.json:
        _as_json(found, misfits, silent)
    else:
        for misfit in misfits:
            print(misfit_text(misfit))
        for host, failure in silent.items():
            print(one_line(f"{host}: its ledger was not read: {str(failure).removeprefix(f'{host}: ')}"))
        print(verified_text(found, misfits))
    return 2 if misfits and asked != 130 else asked


def _ledgers(order: Order) -> tuple[Mapping[str, Ledger | Failure], int]:
    """What the hosts that are named keep of runs, or why they do not tell; and the exit code of asking."""
    if order.hosts is None:
        return {}, 0
    from fleetfix.cli.ledger_reading import ask, exit_code

    hosts = load_inventory(order.inventory).select(order.hosts)
    hold_become_password(hosts)
    found = asyncio.run(ask(hosts, last=LINES))
    missing = Failure(kind="cancelled", message="it was not asked: interrupted")
    return {host.name: found.get(host.name, missing) for host in hosts}, exit_code(hosts, found)


def _compare(journal: Journal, kept: Mapping[str, Ledger | Failure], only: str | None) -> Iterator[Misfit]:
    """What hosts keep of a run that does not fit what stands here; each run is told once a host."""
    here = frozenset(journal.every_run())
    me, machine = operator(), socket.gethostname()
    for host, ledger in kept.items():
        told: set[str] = set()
        for line in ledger.lines if isinstance(ledger, Ledger) else ():
            if line.run in told or (only is not None and line.run != only):
                continue
            if line.run in here:
                why = f"{host} keeps a head of it ({line.anchor[:20]}…) that no record here has"
                wrong = bool(line.anchor) and not journal.fits(line.run, line.anchor)
            else:
                why = f"{host} has it as yours from this machine: it is gone, or in another state folder"
                wrong = bool(line.run) and (line.operator, line.controller) == (me, machine)
            if wrong:
                told.add(line.run)
                yield Misfit(line.run, None, why)


def _as_json(found: list[Verified], misfits: list[Misfit], silent: Mapping[str, Failure]) -> None:
    for one in found:
        print(json.dumps(asdict(one)))
    own = {id(one.misfit) for one in found}
    for misfit in misfits:
        if id(misfit) not in own:
            print(json.dumps({"run": misfit.run, "misfit": asdict(misfit)}))
    for host, failure in silent.items():
        print(json.dumps({"host": host, "failure": failure.model_dump()}))
