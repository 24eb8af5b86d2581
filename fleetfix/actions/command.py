"""command: a program of the author's own, with its arguments, and no shell between."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, ClassVar

from pydantic import Field, PrivateAttr, StringConstraints, model_validator

from fleetfix.action import Action, Plan, Probe
from fleetfix.commands import Call, Change, Completed, Read, Value
from fleetfix.domain.masking import masked
from fleetfix.sealed import Confidential, Sealed, in_arguments

Argv = Annotated[tuple[str, ...], Field(min_length=1)]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class CheckFacts(Value):
    """What the author's check answered; None where there is none."""

    check: Completed | None = None


class ByWord(Action[CheckFacts]):
    """Something to run by its author's word: with a check that says when it is needed, or `always`.

    A check's exit 0 means that there is nothing to do; any other exit means that there is. After the
    run the check must say 0.
    """

    modules: ClassVar[tuple[str, ...]] = ("shell",)
    confidential: ClassVar[frozenset[str]] = frozenset({"env", "stdin"})

    always: bool = False
    """Run without a check, each time: nothing verifies it, and it is never repeated unasked."""
    stdin: Confidential = ""
    """Given to the command, not to its check or undo. Secrets may stand in it: no process list shows it."""
    env: dict[Variable, Confidential] = Field(default_factory=dict)
    """Variables of the command's environment, of its check and its undo too. Secrets may stand in them."""
    cwd: Annotated[str, StringConstraints(pattern=r"^/")] = "/"
    timeout: Annotated[float, Field(gt=0)] = 3600.0
    _user: str | None = PrivateAttr(default=None)

    def acting_as(self, user: str) -> ByWord:
        acting = self.model_copy()
        acting._user = user
        return acting

    def to_run(self) -> tuple[str, ...]:
        """The program and its arguments."""
        raise NotImplementedError

    def to_check(self) -> tuple[str, ...] | None:
        """What says by exit 0 that there is nothing to do."""
        raise NotImplementedError

    def to_undo(self) -> tuple[str, ...] | None:
        """What takes it back."""
        raise NotImplementedError

    def in_words(self) -> str:
        """What is run, in one line."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _verified_or_by_word(self) -> ByWord:
        if self.to_check() is None and not self.always:
            raise ValueError(
                "nothing says when this is needed or whether it worked: "
                "give `check` (exit 0: nothing to do), or say `always: true`"
            )
        if self.to_check() is not None and self.always:
            raise ValueError("`always: true` and `check` contradict each other: leave one out")
        return self

    @property
    def converges(self) -> bool:
        return not self.always

    @property
    def own_check(self) -> bool:
        return self.to_check() is not None

    def probe(self) -> Probe[CheckFacts]:
        argv = self.to_check()
        if argv is None and self._user is not None:
            (reply,) = yield (Read(function="shell.account", args={"user": self._user}),)
            reply.answer()
        if argv is None:
            return CheckFacts()
        args = self._args(argv, stdin="")
        (reply,) = yield (Read(function="shell.check", args=args, timeout=min(self.timeout, 300.0)),)
        if reply.failure is not None or reply.in_doubt:
            reply.answer()
        return CheckFacts(check=reply.model_copy(update={"seconds": 0.0}))

    def plan(self, facts: CheckFacts) -> Plan:
        if facts.check is None:
            return Plan(changes=(self._change(),))
        if facts.check.exit is None:
            return Plan(blocked=f"the check of `{self.in_words()}` did not end in time")
        return Plan() if facts.check.exit == 0 else Plan(changes=(self._change(),))

    def _change(self) -> Change:
        argv, undo = self.to_run(), self.to_undo()
        whose = [self._user] if self._user is not None else []
        digest = sha256("\0".join([*argv, *whose]).encode()).hexdigest()[:12]
        word = "run" if self.to_check() is not None else "run, by the author's word,"
        return Change(
            key=f"{self.kind}:{digest}",
            summary=" ".join([f"{word} `{self.in_words()}`", *(f"as {user}" for user in whose)]),
            do=(Call(function="shell.run", args=self._args(argv, self.stdin), timeout=self.timeout),),
            undo=()
            if undo is None
            else (Call(function="shell.undo", args=self._args(undo, stdin=""), timeout=self.timeout),),
            risk="irreversible" if undo is None else "compensable",
        )

    def _args(self, argv: Sequence[str], stdin: str | Sealed) -> dict[str, object]:
        as_whom = {} if self._user is None else {"user": self._user}
        env = {name: in_arguments(value) for name, value in self.env.items()}
        return {"argv": list(argv), "env": env, "stdin": in_arguments(stdin), "cwd": self.cwd, **as_whom}


class Command(ByWord):
    """Run a program; its arguments reach it as they are written."""

    kind: ClassVar[str] = "command"

    argv: Argv
    check: Argv | None = None
    undo: Argv | None = None

    def to_run(self) -> tuple[str, ...]:
        return self.argv

    def to_check(self) -> tuple[str, ...] | None:
        return self.check

    def to_undo(self) -> tuple[str, ...] | None:
        return self.undo

    def in_words(self) -> str:
        from shlex import join

        return shortened(join(self.argv))


def shortened(text: str, most: int = 72) -> str:
    """The first line of a text that says something, without secrets, cut where it is long."""
    text = masked(text)
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith("#")]
    first = said[0] if said else text.strip()
    return first if len(said) <= 1 and len(first) <= most else f"{first[: most - 2]} …"
