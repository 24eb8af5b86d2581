"""Runs as they are named and listed."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from datetime import datetime

_LETTERS = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: none of them is taken for another when read aloud."""


def new_run_id(playbook: str, at: datetime) -> str:
    """Name a run `YYYYMMDD-HHMMSS-playbook-xxxx`; in UTC, so that ids sort by time everywhere."""
    slug = re.sub(r"[^a-z0-9]+", "-", playbook.lower()).strip("-")[:40].strip("-") or "playbook"
    end = "".join(secrets.choice(_LETTERS) for _ in range(4))
    return f"{at:%Y%m%d-%H%M%S}-{slug}-{end}"


@dataclass(frozen=True)
class RunRow:
    """One run as a list shows it. `exit` is None where it did not finish; `driven` says that a
    fleetfix of this controller drives it now."""

    run: str
    playbook: str
    began: float
    ended: float | None
    exit: int | None
    dry: bool
    hosts: tuple[str, ...]
    operator: str
    controller: str
    reason: str
    driven: bool = False
    outcomes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BreakerRow:
    """One trip of an inventory's breaker: by which run and why; and who reset it, where somebody did.

    Times are seconds since the epoch; `reset` is None while it holds runs back.
    """

    inventory: str
    tripped: float
    run: str
    reason: str
    reset: float | None = None
    reset_by: str = ""
    reset_reason: str = ""
