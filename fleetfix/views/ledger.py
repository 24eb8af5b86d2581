"""The ledger of a host as people read it: run by run, each change with how it stands."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fleetfix.domain.ledger import Deed, Ledger, Line, deeds
from fleetfix.errors import Failure
from fleetfix.views.amounts import count, when
from fleetfix.views.neutral import one_line


def ledger_text(host: str, found: Ledger | Failure) -> str:
    """One host's ledger, oldest first."""
    return "\n".join([f"{host}:", *(f"  {line}" for line in _lines(host, found))])


def _lines(host: str, found: Ledger | Failure) -> Iterator[str]:
    if isinstance(found, Failure):
        yield one_line(str(found).removeprefix(f"{host}: "))
        return
    if not found.lines:
        yield "nothing was changed here by fleetfix, or its ledger was removed"
    if found.more:
        yield "… (there is more: -n)"
    run = ""
    for one in deeds(found.lines):
        line = one.began if isinstance(one, Deed) else one
        if line.run and line.run != run:
            run = line.run
            yield _heading(line)
        yield f"  {_clock(line.t)}  {_said(one)}"
    if found.torn:
        yield f"{count(found.torn, 'line')} could not be read"


def _heading(line: Line) -> str:
    why = f": {line.reason}" if line.reason else ""
    return one_line(f"{when(line.t)}  {line.run} by {line.operator} on {line.controller}{why}")


def _said(one: Deed | Line) -> str:
    if isinstance(one, Line):
        if one.kind == "dropped":
            return f"{one_line(one.lines)} older lines were dropped"
        return one_line(f"the run ended here: {one.outcome}" if one.kind == "ended" else one.kind)
    since = one.ended[-1].t - one.began.t if one.ended else 0.0
    later = f" ({_clock(one.ended[-1].t)})" if since >= 1.0 else ""
    state = "begun, and nothing tells how it ended" if one.state == "begun" else one.state + later
    return one_line(f"{one.began.step}: {one.began.summary}: {state}")


def _clock(at: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "--:--:--"
