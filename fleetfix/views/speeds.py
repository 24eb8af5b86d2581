"""What jobs were measured at, before and after: by host, or folded where hosts are many."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from fleetfix.action import Measurement
from fleetfix.events import GOOD
from fleetfix.hostset import HostSet
from fleetfix.state import HostState, RunState
from fleetfix.views.amounts import rate, unit
from fleetfix.views.grouping import counted

SPEEDS = 4
"""Lines of measured speeds; where hosts differ more they are folded into one median and its range."""


@dataclass(frozen=True)
class Speed:
    """The first and the last rate of a host; an untouched one has one rate, neither before nor after."""

    before: Measurement | None
    after: Measurement | None
    touched: bool = True

    @property
    def sides(self) -> tuple[Measurement | None, Measurement | None]:
        return self.before, self.after

    @property
    def kind(self) -> tuple[str | None, str | None, bool]:
        scopes = [one.scope if one else None for one in self.sides]
        return scopes[0], scopes[1], self.touched


def speeds(state: RunState) -> Iterator[str]:
    """The speeds of a run, hosts of equal ones folded; a line each, few lines in all."""
    measured = {host.name: measured_on(state, host) for host in state.hosts.values()}
    found = {name: one for name, one in measured.items() if one is not None}
    rows: dict[str, list[str]] = {}
    for name, one in found.items():
        rows.setdefault(_said(one), []).append(name)
    if len(rows) > SPEEDS:
        rows = _folded(found)
    for text, names in rows.items():
        yield f"{'speed':<16} {counted(HostSet(names))}: {text}"


def measured_on(state: RunState, host: HostState) -> Speed | None:
    """The first and the last rate that was measured; None where none was."""
    order = [step for step, _ in state.started.steps] if state.started else list(host.steps)
    steps = [host.steps[step] for step in order if step in host.steps]
    found = [(at, step.measured) for at, step in enumerate(steps) if step.measured is not None]
    if not found or host.outcome == "rolled_back":
        # Rolled back it is as before: what was measured in between says nothing of what is now.
        return None
    if host.outcome in GOOD and host.outcome != "changed":
        return Speed(None, found[-1][1], touched=False)
    if len(found) > 1:
        return Speed(found[0][1], found[-1][1])
    at, only = found[0]
    after = any(step.result == "changed" for step in steps[:at])
    return Speed(None, only) if after else Speed(only, None)


def _said(speed: Speed) -> str:
    before, after = speed.sides
    if before is None or after is None:
        one = before or after
        assert one is not None
        when = " after" if after else " before, nothing measured after"
        return f"{rate(one.rate)} {unit(one)}" + (when if speed.touched else "")
    if before.scope != after.scope:
        sides = f"{rate(before.rate)} {unit(before)} before, {rate(after.rate)} {unit(after)} after"
        return f"{sides}: not comparable"
    return f"{rate(before.rate)} → {rate(after.rate)} {unit(after)}"


def _folded(found: dict[str, Speed]) -> dict[str, list[str]]:
    """Fold rows by scope: the median of each side, and the range of the later one."""
    rows: dict[str, list[str]] = {}
    kinds: dict[tuple[str | None, str | None, bool], list[str]] = {}
    for name, speed in found.items():
        kinds.setdefault(speed.kind, []).append(name)
    for (_, _, touched), names in kinds.items():
        sides = [[one for name in names if (one := found[name].sides[side]) is not None] for side in (0, 1)]
        middle = Speed(_median(sides[0]), _median(sides[1]), touched)
        last = sides[1] or sides[0]
        low, high = (rate(extreme(one.rate for one in last)) for extreme in (min, max))
        rows[f"{_said(middle)}, median of {len(names)} ({low} to {high})"] = names
    return rows


def _median(side: list[Measurement]) -> Measurement | None:
    if not side:
        return None
    middle = statistics.median_low(one.rate for one in side)
    return next(one for one in side if one.rate == middle)
