"""The faults of a soak, and how often each is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trouble:
    """One kind of fault: how often it is taken, and for how long it lasts, in seconds."""

    name: str
    weight: int
    lasts: tuple[float, float] = (0.0, 0.0)


TROUBLES = (
    Trouble("vanish", 4, (1, 40)),
    Trouble("freeze", 4, (1, 70)),
    Trouble("refuse", 4, (1, 30)),
    Trouble("drop", 8),
    Trouble("slow", 3, (2, 15)),
    Trouble("full_disk", 3, (1, 20)),
    Trouble("read_only", 2, (1, 20)),
    Trouble("disabled", 1, (2, 10)),
    Trouble("kill_runner", 6),
    Trouble("reboot", 3),
    Trouble("controller_killed", 3),
    Trouble("controller_interrupted", 1),
    Trouble("controller_interrupted_twice", 1),
    Trouble("controller_terminated", 1),
    Trouble("controller_stopped", 1, (1, 20)),
)

ENDS_CHANGES = ("kill_runner", "reboot", "full_disk", "read_only")
"""After these a change may have begun and not ended: one that converges is begun once more, rightly."""
