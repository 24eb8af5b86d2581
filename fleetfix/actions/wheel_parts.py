"""wheel_parts: every byte that a repair of the environment needs is on the host, checked, beforehand."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, StringConstraints

from fleetfix.action import Action, Plan, Probe
from fleetfix.commands import Call, Change, Completed, Json, Read, Value
from fleetfix.domain.cure import Cure, cure
from fleetfix.domain.wheels import Audit, Cuda, Dist

Venv = Annotated[str, StringConstraints(pattern=r"^(of-job|/.+)$")]
"""`of-job`, or the absolute path of a virtual environment."""

CudaMajor = Annotated[Cuda, BeforeValidator(lambda value: str(value).partition(".")[0])]
"""The CUDA that stays, "12" or "13"."""

AUDIT_SECONDS = 600.0
STAGE_SECONDS = 3600.0
MIB = 1 << 20


class Part(Value):
    """What one package lacks, and where it can come from."""

    info: str
    files: int
    bytes: int
    lack: int
    staged: bool
    source: str | None = None
    tried: tuple[str, ...] = ()
    first: str | None = None


class WheelFacts(Value):
    """The audit of an environment, and where the bytes to mend it are."""

    audit: Audit
    parts: tuple[Part, ...] = ()
    free: int = 0
    """Bytes free in the file system of the environment."""
    room: int = 0
    """Bytes free where parts are staged."""
    stuck: str | None = None
    """Why what is to be changed cannot be, whatever parts there are."""
    failure: str | None = None


def audit_read(venv: str, purge: tuple[str, ...]) -> Read:
    """The read that brings an Audit; equal for equal arguments, so it is sent once."""
    args = {"venv": venv, "purge": list(purge)}
    return Read(function="wheels.audit", args=args, timeout=AUDIT_SECONDS)


def audit_of(reply: Completed) -> tuple[Audit, str | None]:
    """The Audit in a reply, and why there is none."""
    if not reply.ok or reply.value is None:
        return Audit(none="the audit gave no answer"), str(reply.failure or "the audit gave no answer")
    return Audit.read(reply.value), None


def look(
    venv: str, cuda: Cuda, purge: tuple[str, ...], wheelhouse: str | None, *, quick: bool
) -> Probe[WheelFacts]:
    """Audit an environment and, where something is to be mended, ask where its bytes are."""
    (reply,) = yield (audit_read(venv, purge),)
    audit, failure = audit_of(reply)
    found = cure(audit, cuda, purge)
    if failure or found.blocked or found.empty:
        return WheelFacts(audit=audit, failure=failure)
    args = {**targets(venv, found), "wheelhouse": wheelhouse, "quick": quick}
    (reply,) = yield (Read(function="parts.find", args=args, timeout=AUDIT_SECONDS),)
    if not reply.ok or reply.value is None:
        return WheelFacts(audit=audit, failure=str(reply.failure or "the search for parts gave no answer"))
    parts = tuple(Part.model_validate(one) for one in reply.value["parts"])
    told = {key: reply.value[key] for key in ("free", "room", "stuck")}
    return WheelFacts(audit=audit, parts=parts, **told)


def targets(venv: str, found: Cure) -> dict[str, Json]:
    """The arguments that name what is mended and what goes."""
    return {
        "venv": venv,
        "repair": [dist.info for dist in found.repair],
        "purge": [dist.info for dist in found.remove],
    }


class WheelParts(Action[WheelFacts]):
    """Stage, while training runs, what `cuda_wheels` will put back."""

    kind: ClassVar[str] = "wheel_parts"
    modules: ClassVar[tuple[str, ...]] = ("wheels", "parts")

    venv: Venv
    cuda: CudaMajor
    purge: tuple[str, ...] = ()
    wheelhouse: str | None = None
    """A folder on the host, or an http(s) address, that holds wheels."""

    def probe(self) -> Probe[WheelFacts]:
        """Audit the environment and find a source for each lost file."""
        return look(self.venv, self.cuda, self.purge, self.wheelhouse, quick=False)

    def plan(self, facts: WheelFacts) -> Plan:
        """Stage what is not staged; blocked where one package has no source, or there is no room."""
        found = cure(facts.audit, self.cuda, self.purge)
        blocked = facts.failure or found.blocked or facts.stuck
        if blocked:
            return Plan(blocked=blocked)
        lack = [part for part in facts.parts if not part.staged]
        if not lack:
            return Plan()
        names = {dist.info: dist for dist in found.repair}
        blocked = _no_source(lack, names) or _no_room(facts, lack)
        if blocked:
            return Plan(blocked=blocked)
        return Plan(changes=(self._change(facts, found, lack, names),))

    def _change(self, facts: WheelFacts, found: Cure, lack: list[Part], names: dict[str, Dist]) -> Change:
        size = sum(part.lack for part in lack)
        path = facts.audit.env.path if facts.audit.env else self.venv
        args = {**targets(self.venv, found), "wheelhouse": self.wheelhouse}
        return Change(
            key=f"parts:{path}",
            parts=tuple(f"stage:{names[part.info].pin}" for part in lack),
            summary=f"stage {_mib(size)} for {_count(len(lack), 'package')}",
            after="\n".join(f"{names[part.info].label} from {part.source}" for part in lack),
            do=(Call(function="parts.stage", args=args, timeout=STAGE_SECONDS),),
            undo=(Call(function="parts.unstage", timeout=300.0),),
            commit=(Call(function="parts.unstage", timeout=300.0),),
            risk="reversible",
            alters=("parts",),
            fetch_bytes=size,
            folders=facts.audit.env.folders if facts.audit.env else (),
        )


def _no_source(lack: list[Part], names: dict[str, Dist]) -> str | None:
    for part in lack:
        if part.source is None:
            looked = (
                f"{', '.join(part.tried)} cannot serve it" if part.tried else "no cache or index has it"
            )
            return (
                f"no source for {names[part.info].label}: {part.files} files such as {part.first}; {looked}"
                " (name a `wheelhouse` with this very wheel, or let the host reach its package index)"
            )
    return None


def _no_room(facts: WheelFacts, lack: list[Part]) -> str | None:
    size = sum(part.lack for part in lack) + 16 * MIB
    if facts.room < size:
        return f"no room for the parts: {_mib(size)} needed, {_mib(facts.room)} free in the state folder"
    return None


def _mib(size: int) -> str:
    return f"{max(round(size / MIB), 1)} MiB" if size else "0 MiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
