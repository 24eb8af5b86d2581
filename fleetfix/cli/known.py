"""The run that a later command is about: as this journal knows it, or as its id and hosts tell."""

from __future__ import annotations

import re
import socket

from fleetfix.cli.conduct import operator
from fleetfix.cli.places import lasting_name, load_inventory
from fleetfix.errors import JournalError, UsageError
from fleetfix.events import RunStarted
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.journal import Journal
from fleetfix.policy import Policy
from fleetfix.state import RunState, fold

WHOLE_ID = re.compile(r"\d{8}-\d{6}-(?P<playbook>[a-z0-9-]+)-[0-9a-z]{4}")


def find_run(journal: Journal, text: str, hosts: tuple[str, ...] | None) -> str:
    """Find a run by its id, the beginning of one, or `last`. One that this journal does not have is
    known to its hosts alone: by its whole id, and where `hosts` names them."""
    try:
        return journal.find(text, dry=False)
    except JournalError as error:
        if not WHOLE_ID.fullmatch(text):
            raise
        if hosts is None:
            hint = "name the hosts that it touched: --hosts PATTERN"
            raise JournalError(f"run {text} is not in this journal", hint=hint) from error
        return text


def known_state(journal: Journal, run: str) -> RunState:
    """What this journal has of a run; nothing where another machine began it."""
    return fold(journal.records(run), RunState(run=run))


def begun_elsewhere(known: RunState) -> bool:
    """Whether this journal does not have what the run began with: its hosts alone tell."""
    started = known.started
    return started is None or not (started.text or started.dry or started.command)


def touched_hosts(
    known: RunState, hosts: tuple[str, ...] | None, inventory: str | None, purpose: str
) -> tuple[Host, ...]:
    """The hosts that a run touched, or those of them that are named. `purpose`: what for, `undo`."""
    if begun_elsewhere(known) and hosts is not None:
        return load_inventory(inventory or (known.started.inventory if known.started else None)).select(
            hosts
        )
    touched = HostSet(host.name for host in known.hosts.values() if host.started)
    if known.started is not None and not touched:
        hint = "name the hosts that it touched: --hosts PATTERN" if begun_elsewhere(known) else ""
        raise UsageError(f"run {known.run} touched no host: there is nothing to {purpose}", hint=hint)
    recorded = known.started.inventory if known.started else None
    chosen = load_inventory(inventory or recorded).select(hosts if hosts is not None else str(touched))
    strange = HostSet(host.name for host in chosen) - touched
    if known.started is not None and strange:
        raise UsageError(f"run {known.run} did not touch {strange}", hint=f"it touched {touched}")
    return chosen


def started_elsewhere(run: str, hosts: tuple[Host, ...], inventory: str | None, reason: str) -> RunStarted:
    """What stands in this journal of a run that another machine began."""
    match = WHOLE_ID.fullmatch(run)
    return RunStarted(
        playbook=match["playbook"] if match else "unknown",
        source="another machine's journal",
        digest="",
        inventory=lasting_name(load_inventory(inventory)),
        hosts=tuple(host.name for host in hosts),
        steps=(),
        policy=Policy(),
        operator=operator(),
        controller=socket.gethostname(),
        version="",
        reason=reason,
    )
