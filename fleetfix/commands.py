"""The words spoken to a host: Read, Call, Change, and the answer, Completed.

A command is a value. It names a function of a host module (`fleetfix/remote/`), its arguments and a
deadline in seconds; it never holds code. Waiting and rebooting are behaviour of the engine, not
commands.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from fleetfix.errors import Failure

Json = Any
"""Anything that `json` can write. What crosses the wire is checked at its ends, not by types."""

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-z_]+\.[a-z_]+$")]

Risk = Literal["reversible", "compensable", "irreversible"]
"""reversible: undo brings back every byte. compensable: undo brings back an equal state (a job
relaunched). irreversible: nothing brings it back; evidence is taken first."""

RISK_ORDER: dict[Risk, int] = {"reversible": 0, "compensable": 1, "irreversible": 2}

Altered = Literal["environment", "job", "caches", "parts", "files"]
"""What a change alters, for the steps after it that foresee their own plan from it."""


class Value(BaseModel):
    """A frozen, strict model: equal when its fields are, wrong fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Call(Value):
    """One function of a host module, e.g. `wheels.repair`, with a deadline in seconds."""

    function: FunctionName
    args: dict[str, Json] = Field(default_factory=dict)
    timeout: float = Field(default=60.0, gt=0)

    @property
    def module(self) -> str:
        return self.function.partition(".")[0]


class Read(Call):
    """A call of a function that its module marks read-only; the host refuses any other."""


class Change(Value):
    """One thing to do on a host, how to undo it, and what it risks.

    The unit of the runner: sent whole, recorded whole before it begins, finished and recorded even
    when the controller is lost. `do` runs in order and stops at the first error. `undo` must be
    right after a kill at any point of `do`, and a no-op where `do` did nothing. `commit` drops what
    only undo needs; it runs when the run has ended well on this host.

    `key` and `parts` are the identity that a plan announces: at its turn a step may make only
    changes whose `key` and every one of whose `parts` were announced, at no higher risk.
    """

    key: str
    parts: tuple[str, ...] = ()
    summary: str
    before: str = ""
    after: str = ""
    do: tuple[Call, ...]
    undo: tuple[Call, ...] = ()
    commit: tuple[Call, ...] = ()
    risk: Risk
    alters: tuple[Altered, ...] = ()
    fetch_bytes: int = 0
    """Bytes that this change brings to the host."""

    def announces(self) -> frozenset[str]:
        """The items that a plan holding this change has announced."""
        return frozenset({self.key, *(f"{self.key}/{part}" for part in self.parts)})


class Completed(Value):
    """The answer to a call. A non-zero exit is an answer, not an exception.

    `value` is what the function returned. `failure` is set where the function refused, timed out,
    was ended or broke. `in_doubt` says that it began and nothing tells how it ended.
    """

    value: Json = None
    exit: int | None = 0
    stdout: str = ""
    stderr: str = ""
    cut: bool = False
    seconds: float = 0.0
    failure: Failure | None = None
    in_doubt: bool = False

    @property
    def ok(self) -> bool:
        return self.failure is None and not self.in_doubt and self.exit == 0
