"""Every error that fleetfix raises, and what each one means for the exit code.

FleetfixError                  one line and a hint; never a traceback
├── UsageError                 1   the command line does not make sense
├── DocumentError              1   a YAML file is wrong; carries every complaint of the file
├── PatternError               1   a host pattern is wrong; carries the place
├── InventoryError             1   hosts are missing, unknown or doubtful
├── PlaybookError              1   a playbook cannot be bound to its hosts
├── PlanError                  1   a saved plan cannot be used
├── JournalError               1   the journal cannot be read or written
├── LabError                   1   the lab cannot be made here
├── HostError                  2   one host: carries a Failure (4 when unreachable)
├── BreakerError               3   an earlier run tripped the breaker, and nobody has reset it
└── Bug                        70  fleetfix broke a promise of its own
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

FailureKind = Literal[
    "unreachable",  # no connection, or it was lost and did not come back
    "auth",  # the host refused every key and certificate
    "host_key",  # the host shows another key than the one known
    "no_python",  # no Python 3.8 or newer at the places looked at, or one that does not begin
    "sudo",  # sudo wants a password, refuses it or the user, or is not there
    "lease_held",  # another run writes to this host now
    "unfinished",  # another run left work open on this host
    "disabled",  # the host's own kill switch is set
    "timed_out",  # it ran past its deadline and was ended
    "hung",  # it ran past its deadline and cannot be ended
    "no_space",  # a file system is full
    "command",  # a command or function answered with an error
    "verify_failed",  # the change was made and the goal is not reached
    "verify_unknown",  # the change was made and nothing proves the goal
    "in_doubt",  # nothing tells whether, or how far, it was done
    "stale_plan",  # the host is no longer as the plan said
    "blocked",  # the host says why nothing may be done
    "cohort",  # another member of its cohort did not go on
    "cancelled",  # ended because the operator asked for it
    "bug",  # fleetfix broke a promise of its own
]

NO_WAY_IN: frozenset[FailureKind] = frozenset({"unreachable", "auth", "host_key", "no_python", "sudo"})
"""Failures on the way to a host. Where a session met one while it was coming back, it is over."""


class Failure(BaseModel):
    """Why something did not end well: the class of it, one line, and what to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FailureKind
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class FleetfixError(Exception):
    """The root: a message of one line, a hint, and the exit code it leads to."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class UsageError(FleetfixError):
    """The command line does not make sense."""


class PatternError(FleetfixError):
    """A host pattern is wrong; `pattern` and `column` (from 0) say where."""

    def __init__(self, message: str, *, pattern: str, column: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.pattern = pattern
        self.column = column

    def __str__(self) -> str:
        return f"{self.message}\n  {self.pattern}\n  {' ' * self.column}^"


class DocumentError(FleetfixError):
    """A YAML file is wrong; `complaints` holds each as `file:line: message`."""

    def __init__(self, complaints: tuple[str, ...], *, hint: str = "") -> None:
        super().__init__("\n".join(complaints), hint=hint)
        self.complaints = complaints


class InventoryError(FleetfixError):
    """Hosts are missing, unknown or doubtful."""


class PlaybookError(FleetfixError):
    """A playbook cannot be found, or cannot be bound to its hosts."""


class PlanError(FleetfixError):
    """A saved plan is broken, too old, or no longer what it was bound to."""


class JournalError(FleetfixError):
    """The journal cannot be read or written."""


class LabError(FleetfixError):
    """The lab cannot be made here."""


class HostError(FleetfixError):
    """Something failed on one host; the engine turns it into that host's outcome."""

    exit_code: ClassVar[int] = 2

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, hint=failure.hint)
        self.failure = failure


class BreakerError(FleetfixError):
    """An earlier run tripped the breaker of this inventory, and nobody has reset it."""

    exit_code: ClassVar[int] = 3


class Bug(FleetfixError):
    """fleetfix broke a promise of its own."""

    exit_code: ClassVar[int] = 70
