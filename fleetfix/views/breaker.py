"""Breakers as people read them: what holds runs back, and what once did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fleetfix.runs import BreakerRow
from fleetfix.views.amounts import when
from fleetfix.views.neutral import one_line
from fleetfix.views.paint import PLAIN, Paint

LATEST = 5
"""Trips that were reset are shown so many; the JSON has all of them."""


def breakers_text(rows: Sequence[BreakerRow], paint: Paint = PLAIN) -> str:
    """Write trips, those that hold runs back first."""
    holding = [row for row in rows if row.reset is None]
    over = [row for row in rows if row.reset is not None]
    lines = [line for row in holding for line in _trip(row, paint)] or ["no breaker is tripped"]
    lines += [line for row in over[:LATEST] for line in _trip(row, paint)]
    return "\n".join(lines)


def _trip(row: BreakerRow, paint: Paint) -> Iterator[str]:
    word = paint("bad", "tripped") if row.reset is None else "was tripped"
    name = one_line(row.inventory) or "?"
    yield f"{name}: {word} {when(row.tripped)} by run {row.run}: {one_line(row.reason)}"
    if row.reset is None:
        yield f"  when you have looked: fleetfix breaker reset -i '{name}' --reason TEXT"
    else:
        yield f"  reset {when(row.reset)} by {one_line(row.reset_by)}: {one_line(row.reset_reason)}"
