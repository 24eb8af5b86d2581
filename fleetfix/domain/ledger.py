"""The ledger of a host: what was changed there, by whom, when and why, as the host tells it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from fleetfix.commands import Completed, Read, Value
from fleetfix.errors import Failure, HostError

Text = Annotated[str, BeforeValidator(lambda value: value if isinstance(value, str) else "")]


class Line(Value):
    """One line. `t` is when it was written, in seconds since the epoch by the host's clock.

    `kind` is `begun`, `done`, `failed`, `undone`, `undo_failed` or `committed` of a change; `ended` of a
    run, with its outcome and the head of the controller's journal (`anchor`); `dropped` of old `lines`.
    """

    model_config = ConfigDict(extra="ignore")

    t: float = Field(ge=0, le=1e11)
    kind: Text = ""
    run: Text = ""
    playbook: Text = ""
    operator: Text = ""
    controller: Text = ""
    reason: Text = ""
    change: Text = ""
    step: Text = ""
    summary: Text = ""
    risk: Text = ""
    outcome: Text = ""
    anchor: Text = ""
    lines: Text = ""


class Ledger(Value):
    """The last lines of a host's ledger, oldest first."""

    lines: tuple[Line, ...] = ()
    more: bool = False
    """There are older ones."""
    torn: int = Field(default=0, ge=0)
    """Lines that cannot be read, such as one that a crash has cut short."""


def question(last: int) -> Read:
    """Ask for the last lines."""
    return Read(function="ledger_lines.last", args={"count": last}, timeout=60.0)


def understood(reply: Completed) -> Ledger:
    """What a host answered. Raises HostError."""
    try:
        return Ledger.model_validate(reply.answer())
    except ValidationError:
        raise HostError(Failure(kind="bug", message="the host answered with what is no ledger")) from None


@dataclass
class Deed:
    """One change as people ask for it: when it began and all that became of it since."""

    began: Line
    ended: tuple[Line, ...] = ()

    @property
    def state(self) -> str:
        """How it stands; `begun` where nothing tells how it ended."""
        return self.ended[-1].kind if self.ended else "begun"


def deeds(lines: Iterable[Line]) -> Iterator[Deed | Line]:
    """The lines of each change as one, where it began; the others as they are, in their order."""
    found: list[Deed | Line] = []
    known: dict[str, Deed] = {}
    for line in lines:
        if not line.change:
            found.append(line)
        elif line.change in known:
            known[line.change].ended += (line,)
        else:
            # Where its beginning was dropped, or is not among the last lines, its end stands for it.
            known[line.change] = Deed(line, () if line.kind == "begun" else (line,))
            found.append(known[line.change])
    return iter(found)


def as_json(host: str, line: Line) -> dict[str, Any]:
    """One line, without what is not said in it."""
    said = {name: value for name, value in line.model_dump().items() if value != ""}
    return {"host": host, **said}
