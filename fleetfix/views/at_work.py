"""Who is at work on what and since when: what a run is waited for with, on a screen and in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fleetfix.events import (
    HostConnected,
    HostFinished,
    HostPlanned,
    HostStarted,
    Record,
    RollbackStarted,
    StepStarted,
)
from fleetfix.hostset import HostSet
from fleetfix.state import HostState, RunState
from fleetfix.views.amounts import count, duration
from fleetfix.views.grouping import fold, group
from fleetfix.views.neutral import one_line

FEW = 3
"""So many hosts that hold all others up are named."""


class Since:
    """Since when each host is at what it is at now."""

    def __init__(self) -> None:
        self.began: float | None = None
        """When the first record was seen: a run that is taken up again began before."""
        self._at: dict[str, float] = {}

    def see(self, record: Record) -> None:
        """Take one more record in."""
        self.began = record.at if self.began is None else self.began
        match record.event:
            case HostConnected(host=host) | HostStarted(host=host) | StepStarted(host=host):
                self._at[host] = record.at
            case RollbackStarted(host=host):
                self._at[host] = record.at
            case HostPlanned(host=host) | HostFinished(host=host):
                self._at.pop(host, None)
            case _:
                pass

    def of(self, host: str) -> float | None:
        """When it began what it does now; None where it does nothing."""
        return self._at.get(host)


@dataclass(frozen=True)
class Row:
    """A host at work: what on, since when, and whether it needs an eye kept on it."""

    host: str
    step: str
    doing: str
    since: float
    urgent: bool

    @property
    def text(self) -> str:
        return f"{self.step:<10} {self.doing}".rstrip()


def rows(state: RunState, since: Since) -> list[Row]:
    """Hosts that are being talked to, those in trouble and then the slowest first."""
    found = [row for host in state.hosts.values() if (row := _row(host, since)) is not None]
    return sorted(found, key=lambda row: (not row.urgent, row.since))


def _row(host: HostState, since: Since) -> Row | None:
    if host.finished is not None:
        return None
    at = since.of(host.name)
    if host.pending is None:
        step = "planning" if host.connected else "connecting"
        return Row(host.name, step, "", at if at is not None else since.began or 0.0, False)
    if at is None:
        return None
    urgent = host.going_back or host.first_failure is not None
    step = "going back" if host.going_back else host.step or "begins"
    return Row(host.name, step, "" if host.doing == "going back" else one_line(host.doing), at, urgent)


def folded(found: list[Row], room: int) -> Iterator[tuple[HostSet, Row]]:
    """Hosts that do alike together, with the row of the most pressing one, in the order of the rows."""
    equal: dict[str, list[Row]] = {}
    for row in found:
        equal.setdefault(f"{row.urgent}\t{row.step}\t{row.doing}", []).append(row)
    alike = {same[0].host: same for same in equal.values()}
    groups = group(((same[0].host, text) for text, same in equal.items()), most=room)
    place = {row.host: number for number, row in enumerate(found)}
    first = {id(one): min(one.hosts, key=place.__getitem__) for one in groups}
    for one in sorted(groups, key=lambda one: place[first[id(one)]]):
        members = HostSet(row.host for host in one.hosts for row in alike[host])
        yield members, replace(alike[first[id(one)]][0], doing=one.text.split("\t")[2])


def whole(seconds: float) -> str:
    """A time in whole seconds."""
    return duration(max(round(seconds), 0)).replace(".0", "")


def waited_for(state: RunState, since: Since, now: float) -> str:
    """Who is waited for, at which step, doing what and for how long; empty where it is nobody."""
    shown = list(folded(rows(state, since), FEW))
    told = [
        f"{fold(hosts, 40)} ({row.step}, {whole(now - row.since)}{f': {row.doing}' if row.doing else ''})"
        for hosts, row in shown[:FEW]
    ]
    left = sum(len(hosts) for hosts, _ in shown[FEW:])
    if left:
        told.append(count(left, "more host"))
    return f"waits for {', '.join(told)}" if told else ""
