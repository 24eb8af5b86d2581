"""Conduct a rollback: which hosts a run touched, how they are reached today, and back."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import time
from dataclasses import dataclass

from fleetfix.cli import config, consent
from fleetfix.cli.conduct import operator
from fleetfix.cli.places import load_inventory
from fleetfix.cli.show import Show
from fleetfix.cli.signals import heard
from fleetfix.cli.state_dir import state_dir
from fleetfix.engine.going_back import roll_back
from fleetfix.errors import JournalError, UsageError
from fleetfix.events import ChangeShown, RunStarted
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.journal import Journal
from fleetfix.policy import Policy
from fleetfix.recorder import Recorder
from fleetfix.state import HostState, RunState, fold
from fleetfix.views.fit import fit
from fleetfix.views.grouping import counted, group
from fleetfix.views.neutral import one_line

WHOLE_ID = re.compile(r"\d{8}-\d{6}-(?P<playbook>[a-z0-9-]+)-[0-9a-z]{4}")


@dataclass(frozen=True)
class Return:
    """A rollback as the command line asks for it."""

    run: str
    hosts: tuple[str, ...] | None
    inventory: str | None
    forks: int
    reason: str
    json: bool
    yes: bool = False
    plain: bool = False


def go_back(order: Return) -> int:
    """Undo a run on the hosts it touched; returns the exit code."""
    with Journal.open(state_dir()) as journal:
        run, known = _known(journal, order)
        hosts = _hosts(known, order)
        if not order.yes:
            _ask(run, known, hosts)
        with journal.drive(run):
            show = Show(json=order.json, plain=order.plain)
            try:
                state = asyncio.run(_roll_back(run, known, hosts, journal, order, show))
            finally:
                show.close()
    return show.end(state)


def _known(journal: Journal, order: Return) -> tuple[str, RunState]:
    """The run as the journal knows it. A run of another machine is known to its hosts alone."""
    try:
        run = journal.find(order.run, dry=False)
    except JournalError as error:
        if not WHOLE_ID.fullmatch(order.run):
            raise
        if order.hosts is None:
            hint = "name the hosts that it touched: --hosts PATTERN"
            raise JournalError(f"run {order.run} is not in this journal", hint=hint) from error
        return order.run, RunState(run=order.run)
    return run, fold(journal.records(run))


def _hosts(known: RunState, order: Return) -> tuple[Host, ...]:
    touched = HostSet(host.name for host in known.hosts.values() if host.started)
    if known.started is not None and not touched:
        raise UsageError(f"run {known.run} touched no host: there is nothing to undo")
    recorded = known.started.inventory if known.started else None
    inventory = load_inventory(order.inventory or recorded)
    chosen = inventory.select(order.hosts if order.hosts is not None else str(touched))
    strange = HostSet(host.name for host in chosen) - touched
    if known.started is not None and strange:
        raise UsageError(f"run {known.run} did not touch {strange}", hint=f"it touched {touched}")
    return chosen


def _ask(run: str, known: RunState, hosts: tuple[Host, ...]) -> None:
    """Ask at a terminal: going back may stop training. Elsewhere the run's id says enough."""
    if not consent.at_terminal():
        return
    done = [
        (host.name, change.summary) for host in hosts for change in reversed(_changes(known, host.name))
    ]
    for one in group(done):
        print(fit(f"{counted(one.hosts)}: undo: {one_line(one.text)}", sys.stderr), file=sys.stderr)
    names = HostSet(host.name for host in hosts)
    question = consent.Question(f"undo run {run} on", names, above=config.load().confirm_above)
    if not consent.ask(question):
        raise UsageError("not confirmed; nothing was done")


async def _roll_back(
    run: str, known: RunState, hosts: tuple[Host, ...], journal: Journal, order: Return, show: Show
) -> RunState:
    started = known.started or _started_elsewhere(run, hosts, order)
    # What is shown is this way back: its hosts, its time. How the run itself ended stands until it is
    # undone, and what it has open there is what the host is asked about.
    state = RunState(
        run=run,
        started=started,
        began_at=time.time(),
        hosts={
            host.name: known.hosts.get(host.name) or HostState(host.name, started=True) for host in hosts
        },
    )
    recorder = Recorder(run, journal, show.views(), state=state, seq=journal.last_seq(run))
    if known.started is None:
        recorder.record(started)
    work = asyncio.ensure_future(
        roll_back(
            run,
            started.playbook,
            hosts,
            recorder,
            operator=operator(),
            controller=socket.gethostname(),
            reason=order.reason,
            forks=order.forks,
        )
    )
    with heard(_Signals(work, show).interrupt):
        async with show.kept_fresh():
            return await work


class _Signals:
    """A way back is not left half done at the first sign; at the second it is."""

    def __init__(self, work: asyncio.Future[RunState], show: Show) -> None:
        self._work = work
        self._show = show
        self._times = 0

    def interrupt(self, signal: str) -> int:
        self._times += 1
        if self._times == 1:
            self._show.say(
                f"{signal}: going back goes on, it is the way to a safe state; once more to leave now"
            )
        else:
            self._work.cancel()
        return self._times


def _started_elsewhere(run: str, hosts: tuple[Host, ...], order: Return) -> RunStarted:
    match = WHOLE_ID.fullmatch(run)
    return RunStarted(
        playbook=match["playbook"] if match else "unknown",
        source="another machine's journal",
        digest="",
        inventory=order.inventory or "",
        hosts=tuple(host.name for host in hosts),
        steps=(),
        policy=Policy(),
        operator=operator(),
        controller=socket.gethostname(),
        version="",
        reason=order.reason,
    )


def _changes(known: RunState, host: str) -> list[ChangeShown]:
    return list(known.hosts[host].changes.values()) if host in known.hosts else []
