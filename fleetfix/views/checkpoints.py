"""What stopping training costs: how long ago the jobs of a plan saved."""

from __future__ import annotations

from collections.abc import Iterable

from fleetfix.events import ChangeShown
from fleetfix.hostset import HostSet
from fleetfix.views.amounts import ago
from fleetfix.views.grouping import counted
from fleetfix.views.neutral import one_line


def said_of_change(change: ChangeShown) -> str:
    """A change in one line, with the age of the last checkpoint of what it stops."""
    ages = change.checkpoint_ages
    if not ages:
        return one_line(change.summary)
    which = "last checkpoint" if len(ages) == 1 else "oldest last checkpoint"
    return f"{one_line(change.summary)}, {which} {ago(max(ages))} ago"


def oldest(changes: Iterable[tuple[str, ChangeShown]]) -> str:
    """Which of the hosts whose jobs are stopped lose most; empty where no job is stopped."""
    stopping = [
        (host, change) for host, change in changes if change.job == "stops" or change.checkpoint_ages
    ]
    known = [(max(change.checkpoint_ages), host) for host, change in stopping if change.checkpoint_ages]
    unknown = HostSet(host for host, change in stopping if not change.checkpoint_ages)
    if not known:
        return f"last checkpoint: known of no job that is stopped, {counted(unknown)}" if unknown else ""
    age, host = max(known, key=lambda one: one[0])
    rest = f"; not known on {counted(unknown)}" if unknown else ""
    return f"oldest last checkpoint: {ago(age)} ago, on {host}{rest}"
