"""The one table that says what becomes of a host before a change: phase x failure -> outcome."""

from __future__ import annotations

from typing import Literal

from fleetfix.errors import FailureKind
from fleetfix.events import Outcome

Phase = Literal["connect", "plan"]
"""connect: opening the session. plan: all that is asked of the host, the lease last, before a change."""

_BEFORE: dict[FailureKind, Outcome] = {
    "unreachable": "unreachable",
    "auth": "unreachable",
    "host_key": "unreachable",
    "timed_out": "unreachable",
    "no_python": "blocked",
    "sudo": "blocked",
    "disabled": "blocked",
    "blocked": "blocked",
    "stale_plan": "blocked",
    "no_space": "blocked",
    "lease_held": "busy",
    "unfinished": "unfinished",
    "cancelled": "cancelled",
}

_WHILE_PLANNING: dict[FailureKind, Outcome] = {**_BEFORE, "hung": "blocked", "timed_out": "blocked"}

_TABLE: dict[Phase, dict[FailureKind, Outcome]] = {
    "connect": _BEFORE,
    "plan": _WHILE_PLANNING,
}


def outcome_of(phase: Phase, kind: FailureKind) -> Outcome:
    """The outcome of a host whose first failure is of this kind, in this phase."""
    return _TABLE[phase].get(kind, "failed")
