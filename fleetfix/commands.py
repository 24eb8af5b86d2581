"""The words spoken to a host: Read, Call, Change, and the answer, Completed.

A command is a value. It names a function of a host module (`fleetfix/remote/`), its arguments and a
deadline in seconds; it never holds code. Waiting and rebooting are behaviour of the engine, not
commands.
"""

from __future__ import annotations

import re
import signal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from fleetfix.errors import Failure, FailureKind, HostError

Json = Any
"""Anything that `json` can write. What crosses the wire is checked at its ends, not by types."""

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-z_]+\.[a-z_]+$")]

Risk = Literal["reversible", "compensable", "irreversible"]
"""reversible: undo brings back every byte. compensable: undo brings back an equal state (a job
relaunched). irreversible: nothing brings it back; evidence is taken first."""

RISK_ORDER: dict[Risk, int] = {"reversible": 0, "compensable": 1, "irreversible": 2}

Altered = Literal["environment", "job", "caches", "parts", "files"]
"""What a change alters, for the steps after it that foresee their own plan from it."""

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {letter: (1000**power, 1024**power) for power, letter in enumerate("KMGTP", start=1)}


def read_seconds(value: object) -> float:
    """Read `90`, `1.5`, `"60s"`, `"5m"`, `"1h"`, `"2d"`, `"1h30m"` or `"250ms"` as seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    text = str(value).strip()
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if isinstance(value, str) and re.fullmatch(r"(\d+(\.\d+)?(ms|s|m|h|d)\s*)+", text):
        parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    raise ValueError("a time such as 60s, 5m, 1h, or a number of seconds")


def read_bytes(value: object) -> int:
    """Read `67108864`, `"64MiB"`, `"2GB"` or `"1.5G"` as bytes; `K M G T P` alone count by 1024."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGTP])(iB|B)?|B)?", str(value).strip())
    if isinstance(value, str) and match:
        number, letter, suffix = match.groups()
        factor = 1 if letter is None else _SIZES[letter][suffix != "B"]
        return round(float(number) * factor)
    raise ValueError("a size such as 64MiB, 2GB, or a number of bytes")


Seconds = Annotated[
    float,
    BeforeValidator(read_seconds, json_schema_input_type=float | str),
    Field(ge=0, allow_inf_nan=False),
]
"""A time in seconds, written `60s`, `5m`, `1h` or as a number."""

Bytes = Annotated[int, BeforeValidator(read_bytes, json_schema_input_type=int | str), Field(ge=0)]
"""A size in bytes, written `64MiB`, `2GB` or as a number."""


ExitCode = Annotated[int, Field(ge=-1024, le=2**32)]
Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]


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


class Folder(Value):
    """A folder that a change alters, and the file system it lies on."""

    path: str
    filesystem: str = ""
    source: str = ""
    """What is mounted there, e.g. `nas01:/export`; two hosts that mount one source share it."""
    inside: str = ""
    """The folder's path within that."""


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
    job: Literal["", "captures", "stops", "starts"] = ""
    """What it does to the host's training: one stopped and not started again heads every summary. To undo
    what `captures` it starts what ended since: a job that spans hosts ends on all where one is stopped."""
    checkpoint_ages: tuple[float, ...] = ()
    """Seconds since the last checkpoint of each job that it stops, where that is known. It is shown and
    nothing more: the same change is older at its turn."""
    fetch_bytes: int = 0
    """Bytes that this change brings to the host."""
    waits: bool = False
    """Its time passes in waiting on the host, for a grace, say: another host is talked to meanwhile."""
    folders: tuple[Folder, ...] = ()
    """What it alters that other hosts may have mounted too: where they have, it is made once for all."""
    together: bool = False
    """In a cohort, made by all members at one moment: a job that spans hosts is started on all or none."""
    prepare: Change | None = None
    """What each member of a cohort makes before any of them makes this one."""

    def announces(self) -> frozenset[str]:
        """The items that a plan holding this change has announced."""
        return frozenset({self.key, *(f"{self.key}/{part}" for part in self.parts)})


class Completed(Value):
    """The answer to a call. A non-zero exit is an answer, not an exception.

    `value` is what the function returned. `failure` is set where the function refused, timed out,
    was ended or broke. `in_doubt` says that it began and nothing tells how it ended.
    """

    value: Json = None
    exit: ExitCode | None = 0
    stdout: str = ""
    stderr: str = ""
    cut: bool = False
    seconds: Duration = 0.0
    failure: Failure | None = None
    in_doubt: bool = False

    @property
    def ok(self) -> bool:
        return self.failure is None and not self.in_doubt and self.exit == 0

    def answer(self) -> Json:
        """The value of a call that ended well. Raises HostError where it did not."""
        if self.ok:
            return self.value
        message = "the call began, and nothing tells how it ended" if self.in_doubt else f"exit {self.exit}"
        raise HostError(self.failure or Failure(kind="command", message=message))

    def why(self, what: str) -> Failure:
        """Why a call did not go well. `what` was to be done, in words."""
        if self.failure is not None:
            return self.failure
        said = self.stderr.strip() or self.stdout.strip()
        last = said.splitlines()[-1] if said else "it said nothing"
        kind: FailureKind = "no_space" if _NO_SPACE.search(said) else "command"
        message = f"{what}: exit {self.exit}: {last}"
        return Failure(kind=kind, message=message, hint=hint_of_exit(self.exit or 0))


_NO_SPACE = re.compile(r"(No space left on device|Disk quota exceeded)\W*$", re.MULTILINE)
"""How programs say it under LC_ALL=C, at the end of a line."""

HOST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs are looked for on a host, whatever its users have set."""


def hint_of_exit(code: int) -> str:
    """What an exit code says of its own, as shells use it."""
    match code:
        case 126:
            return "not executable, or on a file system mounted noexec: name its interpreter before it"
        case 127:
            return f"not found in PATH, which is {HOST_PATH}: name the program by its whole path"
        case _:
            return ""


class Execute(Value):
    """A command of the operator's own, run as it is said: no plan, no record on the host, no undo.

    `argv` are the program and its arguments, or, with `script`, the script's arguments: the script is
    run by the program that its first line names, by `/bin/sh` where it names none. `fed` says that input
    is given; its stdin is closed otherwise. Without a `timeout` (seconds) it may take as long as it likes.
    """

    argv: tuple[str, ...] = ()
    script: bytes | None = None
    fed: bool = False
    timeout: Annotated[float, Field(gt=0)] | None = None
    secrets: tuple[str, ...] = ()
    """The secrets of the session that it finds in its environment, each under its own name."""


class Ended(Value):
    """How such a command ended: its exit code, negative for a signal, None where `failure` says why."""

    exit: ExitCode | None = None
    seconds: Duration = 0.0
    failure: Failure | None = None


def said_of_exit(code: int) -> str:
    """Say an exit code as people do: `exit 3`, or `killed by SIGKILL` for a negative one."""
    if code >= 0:
        return f"exit {code}"
    known = -code in signal.valid_signals()
    return f"killed by {signal.Signals(-code).name}" if known else f"killed by signal {-code}"
