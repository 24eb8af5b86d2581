"""Conduct `resume`: what is left of a run, bound as it was, on hosts as they are reached today."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fleetfix.cli import config, consent, secret_sources
from fleetfix.cli.applying import still_expected
from fleetfix.cli.conduct import Manner, bind, driver, machine, operator, with_room
from fleetfix.cli.driving import drive
from fleetfix.cli.known import begun_elsewhere, find_run, known_state
from fleetfix.cli.places import jumps_of, lasting_name, load_inventory
from fleetfix.cli.show import Show
from fleetfix.cli.state_dir import state_dir
from fleetfix.cli.tripped import refuse_while_tripped
from fleetfix.cohorts import neighbours
from fleetfix.commands import Json
from fleetfix.engine.elsewhere import ask_hosts
from fleetfix.engine.fleetrun import Request
from fleetfix.engine.rollout import stops
from fleetfix.errors import JournalError, PlaybookError, UsageError
from fleetfix.events import Record, RunResumed, RunStarted
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host, Inventory
from fleetfix.journal import Journal
from fleetfix.playbook import Playbook, read
from fleetfix.policy import Policy
from fleetfix.state import RunState, after, to_take_up
from fleetfix.views.summary import last_line


@dataclass(frozen=True)
class Resumption:
    """A resume as the command line asks for it."""

    run: str
    hosts: tuple[str, ...] | None = None
    inventory: str | None = None
    secrets: tuple[str, ...] = ()
    reason: str = ""
    yes: bool = False
    yes_hosts: int | None = None
    json: bool = False
    plain: bool = False
    take_over: bool = False
    lock_wait: float = 0.0
    detach: bool = False
    """It goes on in a process of its own."""


@dataclass(frozen=True)
class Bound:
    """What a run began with, and keeps."""

    playbook: Playbook
    settings: Mapping[str, Json]
    policy: Policy


def resume(order: Resumption) -> int:
    """Take a run up again; returns its exit code."""
    with Journal.open(state_dir()) as journal:
        run = find_run(journal, order.run, order.hosts)
        with journal.drive(run):
            ready = _prepare(run, journal, order)
            if isinstance(ready, int):
                return ready
            if not order.detach:
                return _resume(ready, journal, order)
    from fleetfix.cli.detached import begin

    manner = Manner(json=order.json, plain=order.plain)
    return begin(ready.request, manner, ask_above=ready.ask_above, known=ready.known, since=ready.since)


@dataclass(frozen=True)
class _Ready:
    """All that is needed to go on with a run."""

    request: Request
    known: RunState
    since: int
    """The last record that `known` is folded from."""
    ask_above: int | None


def _prepare(run: str, journal: Journal, order: Resumption) -> _Ready | int:
    """Read and bind what is left of a run; the exit code where nothing is left."""
    since = journal.last_seq(run)
    known = known_state(journal, run)
    if known.started is None or begun_elsewhere(known):
        request, known = _from_its_hosts(run, order), RunState(run=run)
    else:
        _refuse_what_has_no_end(known)
        names = _left(known, order)
        if not names and known.ended_with is not None:
            return _nothing_left(known, order)
        _refuse_where_it_would_halt(known, names)
        request = _from_the_journal(known, known.started, names, order)
        expected = still_expected(journal, known.started)
        request = replace(request, expected=expected, plan=known.started.plan)
    refuse_while_tripped(journal, request)
    request = with_room(request)
    above = config.load().confirm_above
    hosts = HostSet(host.name for host in request.hosts)
    asked = request.may_change and consent.required(
        f"resume run {run}", hosts, yes=order.yes, yes_hosts=order.yes_hosts, above=above
    )
    return _Ready(request, known, since, above if asked else None)


def _resume(ready: _Ready, journal: Journal, order: Resumption) -> int:
    show = Show(json=order.json, plain=order.plain)
    try:
        state = asyncio.run(
            drive(ready.request, journal, show, ask_above=ready.ask_above, known=ready.known)
        )
    finally:
        show.close()
    return show.end(state)


def _refuse_what_has_no_end(known: RunState) -> None:
    assert known.started is not None
    if known.started.dry:
        raise UsageError(f"run {known.run} is a dry run: nothing of it can be resumed", hint="fleetfix run")
    if known.started.command:
        raise UsageError(f"run {known.run} is a command of exec: it cannot be resumed", hint="run it again")


def _left(known: RunState, order: Resumption) -> HostSet:
    """The hosts that can be taken up, of those that are named."""
    left = HostSet(to_take_up(known))
    if order.hosts is None:
        return left
    assert known.started is not None
    inventory = load_inventory(order.inventory or known.started.inventory)
    named = HostSet(host.name for host in inventory.select(order.hosts))
    strange = named - HostSet(known.hosts)
    if strange:
        raise UsageError(f"run {known.run} has no {strange}", hint=f"it has {HostSet(known.hosts)}")
    ended = named - left
    if ended:
        outcomes = ", ".join(sorted({str(known.hosts[name].outcome) for name in ended}))
        raise UsageError(
            f"on {ended} nothing of run {known.run} is left to do ({outcomes})",
            hint=f"--hosts '{left}' has something left" if left else "a new run begins anew",
        )
    return named


def _nothing_left(known: RunState, order: Resumption) -> int:
    code = known.ended_with
    assert code is not None
    if not order.json:
        print("nothing to resume: every host has come to its end")
        print(last_line(known, code))
    return code


def _refuse_where_it_would_halt(known: RunState, names: HostSet) -> None:
    """Why no further host could begin stands in the journal: no host has to be asked for that."""
    assert known.started is not None
    resumed = RunResumed(operator="", controller="", hosts=tuple(names))
    copy = replace(known, hosts=dict(known.hosts))
    then = after(copy, Record(run=known.run, seq=0, at=0.0, event=resumed))
    stop = stops(then, known.started.policy)
    if stop is not None and names and not any(then.hosts[name].started for name in names):
        raise UsageError(
            f"run {known.run} would halt at once, as before: {stop.reason}",
            hint=f"a new run begins anew: fleetfix run {known.started.playbook}",
        )


def _from_the_journal(known: RunState, started: RunStarted, names: HostSet, order: Resumption) -> Request:
    """The run as it was asked for; its playbook is the one it began with, whatever the file says now."""
    playbook = read(started.text, started.source)
    _say_where_edited(started)
    if playbook.digest != started.digest:
        raise PlaybookError(
            f"a fabfile of {started.source} is another one than when run {known.run} began",
            hint=f"put it back as it was, or fleetfix release {known.run}",
        )
    inventory = load_inventory(order.inventory or started.inventory)
    hosts = inventory.select(str(names)) if names else ()
    bound = Bound(playbook, started.settings, started.policy)
    return _request(known.run, bound, hosts, inventory, started.inventory, order)


def _say_where_edited(started: RunStarted) -> None:
    try:
        text = Path(started.source).read_bytes()
    except OSError:
        return
    if text != started.text.encode():
        print(
            f"{started.source} was edited since: the run goes on with the text that it began with",
            file=sys.stderr,
        )


def _from_its_hosts(run: str, order: Resumption) -> Request:
    """The run as its hosts keep it: another machine began it."""
    if order.hosts is None:
        hint = "name its hosts: --hosts PATTERN"
        raise JournalError(f"this journal does not have what run {run} began with", hint=hint)
    inventory = load_inventory(order.inventory)
    hosts = inventory.select(order.hosts)
    secret_sources.hold_become_password(hosts)
    kept = asyncio.run(
        ask_hosts(
            run,
            hosts,
            operator=operator(),
            controller=socket.gethostname(),
            driver=driver(),
            take_over=order.take_over,
        )
    )
    if kept.at_work is not None:
        raise JournalError(kept.at_work.message, hint=kept.at_work.hint)
    if kept.bound is None:
        names = HostSet(host.name for host in hosts)
        raise JournalError(
            f"no host of {names} that answers keeps anything of run {run}",
            hint="it never began there, or was swept: a new run begins anew",
        )
    playbook = read(kept.bound.text, kept.bound.source)
    _refuse_functions_of_hosts(run, playbook)
    bound = Bound(playbook, kept.bound.settings, kept.bound.policy)
    return _request(run, bound, hosts, inventory, lasting_name(inventory), order)


def _refuse_functions_of_hosts(run: str, playbook: Playbook) -> None:
    """What is called on this machine is not for a host to say: it could name any fabfile that is here."""
    named = sorted({str(step.params["file"]) for step in playbook.steps if step.kind == "fabric"})
    if named:
        raise PlaybookError(
            f"run {run} calls functions of {', '.join(named)} here, and this journal does not know the run",
            hint="resume it on the machine that began it, or begin a new run",
        )


def _request(
    run: str, bound: Bound, hosts: tuple[Host, ...], inventory: Inventory, named: str, order: Resumption
) -> Request:
    """What goes on: as it was bound, over hosts as they are reached now, asked for from here."""
    secret_sources.hold(order.secrets, bound.playbook)
    secret_sources.hold_become_password(hosts)
    request = Request(
        run=run,
        playbook=bound.playbook,
        hosts=hosts,
        steps=bind(bound.playbook, hosts, bound.settings, inventory),
        policy=bound.policy,
        inventory=named,
        settings=bound.settings,
        dry=False,
        operator=operator(),
        controller=socket.gethostname(),
        reason=order.reason,
        others=neighbours(inventory.hosts.values(), hosts),
        jumps=jumps_of(hosts),
        machine=machine(),
        driver=driver(),
        take_over=order.take_over,
        lock_wait=order.lock_wait,
    )
    return secret_sources.sealed(request)
