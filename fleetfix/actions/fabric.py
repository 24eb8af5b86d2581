"""fabric: a function of the author's own fabfile, which works on the host from the controller."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import PurePath
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from fleetfix.action import Action, Plan, Probe
from fleetfix.commands import Call, Change, Json, Read, Seconds, Value
from fleetfix.complaints import like
from fleetfix.domain.masking import masked

Function = Annotated[str, *like(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a function of the fabfile")]

CHECK = "fabfile.check"
"""Asked of the controller itself: calls a function and answers with what it returned."""
HOLD = "fabfile.hold"
UNDO = "fabfile.undo"
"""On the host, these wait while the function works, and record how it ended."""
SLACK = 120.0
"""Seconds that the host waits longer for a function than the controller lets it run."""


class FabricFacts(Value):
    """What the author's check returned; None where there is none, or where it did not say."""

    fine: bool | None = None
    trouble: str = ""


class Fabric(Action[FabricFacts]):
    """Call a function of your fabfile on the controller, with a Fabric connection to the host.

    It is called as `do(c, **args)`. `check`, called in the same way, returns True where there is nothing to
    do and False where there is; after `do` it must return True. `undo` takes back what `do` has done, also
    where that was cut short.
    """

    kind: ClassVar[str] = "fabric"
    modules: ClassVar[tuple[str, ...]] = ("fabfile",)

    file: Annotated[str, Field(min_length=1)]
    """The fabfile, relative to the playbook. Nobody else may be able to write to it, or to its folder."""
    do: Function
    check: Function | None = None
    undo: Function | None = None
    args: dict[Function, Json] = Field(default_factory=dict)
    """Arguments by name, the same for all three functions."""
    always: bool = False
    """Call it without a check, each time: nothing verifies it, and it is never repeated unasked."""
    timeout: Annotated[Seconds, Field(gt=0)] = 3600.0
    """How long a function may take."""
    sha256: Annotated[str, *like(r"[0-9a-f]{64}", "64 hexadecimal digits")] | None = None
    """What the file must be; null takes it as it is when the playbook is read."""

    @model_validator(mode="after")
    def _verified_or_by_word(self) -> Fabric:
        if self.check is None and not self.always:
            raise ValueError(
                "nothing says when this is needed or whether it worked: "
                "give `check` (True: nothing to do), or say `always: true`"
            )
        if self.check is not None and self.always:
            raise ValueError("`always: true` and `check` contradict each other: leave one out")
        return self

    @property
    def converges(self) -> bool:
        return not self.always

    @property
    def own_check(self) -> bool:
        return self.check is not None

    def probe(self) -> Probe[FabricFacts]:
        if self.check is None:
            return FabricFacts()
        (reply,) = yield (Read(function=CHECK, args=self._asked(self.check), timeout=self.timeout),)
        if reply.failure is not None or reply.in_doubt:
            reply.answer()
        if reply.exit != 0:
            said = reply.stderr.strip().splitlines()
            return FabricFacts(trouble=said[-1] if said else f"exit {reply.exit}")
        if not isinstance(reply.value, bool):
            what = f"{self.check} returned {shown(reply.value)}"
            return FabricFacts(trouble=f"{what}: a check returns True (nothing to do) or False")
        return FabricFacts(fine=reply.value)

    def plan(self, facts: FabricFacts) -> Plan:
        if facts.trouble:
            return Plan(blocked=f"its check gives no answer: {facts.trouble}")
        return Plan() if facts.fine else Plan(changes=(self._change(),))

    @property
    def key(self) -> str:
        """The key of its change."""
        return key_of(self._asked(self.do))

    def _change(self) -> Change:
        word = "call" if self.check is not None else "call, by the author's word,"
        asked, back = self._asked(self.do), self.undo and self._asked(self.undo)
        return Change(
            key=self.key,
            summary=f"{word} `{self._in_words()}`",
            do=(Call(function=HOLD, args=asked, timeout=self.timeout + SLACK),),
            undo=(Call(function=UNDO, args=back, timeout=self.timeout + SLACK),) if back else (),
            risk="compensable" if self.undo else "irreversible",
        )

    def _asked(self, function: str) -> dict[str, Json]:
        return {
            "file": self.file,
            "sha256": self.sha256 or "",
            "do": self.do,
            "undo": self.undo or "",
            "function": function,
            "args": self.args,
            "seconds": self.timeout,
        }

    def _in_words(self) -> str:
        given = ", ".join(f"{name}={shown(value)}" for name, value in self.args.items())
        words = masked(f"{PurePath(self.file).name}: {self.do}({given})")
        return words if len(words) <= 100 else f"{words[:98]} …"


def key_of(asked: Mapping[str, Any]) -> str:
    """The identity of a change, from what it asks for or what its undo asks for: only `function` differs.

    A host that is asked to undo says what its undo is. It is believed where a step of the playbook, as
    this machine has it, has this key.
    """
    same = [asked.get(name) for name in ("file", "sha256", "do", "undo", "args", "seconds")]
    return f"fabric:{sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]}"


def shown(value: Json) -> str:
    """A value in a message: short, and as Python writes it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:38]} …"
