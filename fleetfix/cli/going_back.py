"""Conduct a rollback: which hosts a run touched, how they are reached today, and back."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fleetfix import secret_values
from fleetfix.cli import config, consent, secret_sources
from fleetfix.cli.conduct import bind, driver, operator
from fleetfix.cli.descriptors import room_for
from fleetfix.cli.known import find_run, known_state, started_elsewhere, touched_hosts
from fleetfix.cli.places import load_inventory
from fleetfix.cli.show import Show
from fleetfix.cli.signals import heard
from fleetfix.cli.state_dir import state_dir
from fleetfix.engine.going_back import roll_back
from fleetfix.errors import FleetfixError, PlaybookError, UsageError
from fleetfix.events import ChangeShown
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.journal import Journal
from fleetfix.playbook import Step, read
from fleetfix.recorder import Recorder
from fleetfix.state import HostState, RunState
from fleetfix.views.fit import fit
from fleetfix.views.grouping import counted, group
from fleetfix.views.neutral import one_line


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
    take_over: bool = False
    secrets: tuple[str, ...] = ()
    lock_wait: float = 0.0


def go_back(order: Return) -> int:
    """Undo a run on the hosts it touched; returns the exit code."""
    with Journal.open(state_dir()) as journal:
        run = find_run(journal, order.run, order.hosts)
        # Held before it is read: what another process does with the run meanwhile would not be known.
        with journal.drive(run):
            known = known_state(journal, run)
            hosts = touched_hosts(known, order.hosts, order.inventory, "undo")
            _refuse_committed(known, hosts)
            _hold_secrets(known, hosts, order)
            steps = _steps(known, hosts, order.inventory)
            if not order.yes:
                _ask(run, known, hosts)
            show = Show(json=order.json, plain=order.plain)
            try:
                state = asyncio.run(_roll_back(run, known, hosts, steps, journal, order, show))
            finally:
                show.close()
    return show.end(state)


def _refuse_committed(known: RunState, hosts: tuple[Host, ...]) -> None:
    """What was committed has nothing left to go back with, and nothing of it is touched."""
    committed = HostSet(host.name for host in hosts if known.hosts and known.hosts[host.name].committed)
    if committed:
        left = HostSet(host.name for host in hosts) - committed
        raise UsageError(
            f"run {known.run} was committed on {committed}: nothing is kept to undo it with",
            hint=f"--hosts '{left}' leaves them out" if left else "fleetfix show tells by whom",
        )


def _hold_secrets(known: RunState, hosts: tuple[Host, ...], order: Return) -> None:
    """Read what undo needs before anything is undone, as this journal knows it; a host tells the rest."""
    given = secret_sources.parse(order.secrets)
    needed = {name for host in hosts for change in _changes(known, host.name) for name in change.secrets}
    if missing := sorted(needed - given.keys()):
        raise UsageError(
            f"to undo run {known.run} takes secrets that are not given: {', '.join(missing)}",
            hint=" ".join(f"--secret {name}=SOURCE" for name in missing),
        )
    secret_sources.hold_given(given)
    secret_sources.hold_become_password(hosts)
    if given:
        _confine_secrets(known, hosts, order.inventory)


def _confine_secrets(known: RunState, hosts: tuple[Host, ...], inventory: str | None) -> None:
    """Give each host the secrets of its own steps and changes, as when the run went there."""
    started = known.started
    if started is None or not started.text:
        return  # another machine began it: its hosts alone know their steps
    try:
        everywhere = load_inventory(inventory or started.inventory)
        bound = bind(read(started.text, started.source), hosts, started.settings, everywhere)
    except FleetfixError:
        return  # it cannot be bound as it was: that is no reason not to go back
    own = {host: secret_sources.used_by(steps) for host, steps in bound.items()}
    undone = {host: {name for one in _changes(known, host) for name in one.secrets} for host in own}
    secret_values.confine({host: names | undone[host] for host, names in own.items()})


def _ask(run: str, known: RunState, hosts: tuple[Host, ...]) -> None:
    """Ask at a terminal: going back may stop training. Elsewhere the run's id says enough."""
    if not consent.at_terminal():
        return
    done = [
        (host.name, change.summary) for host in hosts for change in reversed(_changes(known, host.name))
    ]
    for one in group(done):
        print(fit(f"{counted(one.hosts)}: undo: {one_line(one.text)}", sys.stderr), file=sys.stderr)
    for line in _ended(known, hosts):
        print(fit(line, sys.stderr), file=sys.stderr)
    names = HostSet(host.name for host in hosts)
    question = consent.Question(f"undo run {run} on", names, above=config.load().confirm_above)
    if not consent.ask(question):
        raise UsageError("not confirmed; nothing was done")


def _ended(known: RunState, hosts: tuple[Host, ...]) -> Iterator[str]:
    """What going back means for the training that the run has started."""
    jobs = {host.name: {change.job for change in _changes(known, host.name)} for host in hosts}
    started = {name: its for name, its in jobs.items() if "starts" in its}
    again = HostSet(name for name, its in started.items() if its & {"stops", "captures"})
    for names, then in (
        (again, "is started again as it ran before"),
        (HostSet(started) - again, "nothing is started in its place"),
    ):
        if names:
            yield f"{counted(names)}: the job that the run started is ended, and {then}"


async def _roll_back(
    run: str,
    known: RunState,
    hosts: tuple[Host, ...],
    steps: Mapping[str, tuple[Step, ...]],
    journal: Journal,
    order: Return,
    show: Show,
) -> RunState:
    started = known.started or started_elsewhere(run, hosts, order.inventory, order.reason)
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
            known=known,
            steps=steps,
            operator=operator(),
            controller=socket.gethostname(),
            reason=order.reason,
            driver=driver(),
            take_over=order.take_over,
            forks=room_for(hosts, order.forks, kept=False),
            lock_wait=order.lock_wait,
        )
    )
    with heard(_Signals(work, show).interrupt):
        async with show.kept_fresh():
            return await work


def _steps(
    known: RunState, hosts: tuple[Host, ...], inventory: str | None
) -> Mapping[str, tuple[Step, ...]]:
    """The steps of a run that calls functions of fabfiles. PlaybookError where one is another now."""
    started = known.started
    if started is None or "fabric" not in started.text:
        return {}
    playbook = read(started.text, started.source)
    if playbook.digest != started.digest:
        raise PlaybookError(
            f"a fabfile of {started.source} is another one than when run {known.run} began",
            hint=f"put it back as it was, or fleetfix release {known.run}",
        )
    return bind(playbook, hosts, started.settings, load_inventory(inventory or started.inventory))


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


def _changes(known: RunState, host: str) -> list[ChangeShown]:
    return list(known.hosts[host].changes.values()) if host in known.hosts else []
