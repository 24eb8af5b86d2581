"""compile_caches: what was compiled against libraries that are gone is out of the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints, field_validator

from fleetfix.action import Action, Plan, Planned, Probe
from fleetfix.commands import Call, Change, Read, Value
from fleetfix.domain import caches
from fleetfix.domain.caches import Found, Toolchain, Whose
from fleetfix.spelling import hint_for

AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00]*[^/\x00]$")]


class CacheFacts(Value):
    """The caches that are there, and what decides their fate."""

    whose: Whose
    by: str
    """What says whose caches these are: the job's environment, or somebody's defaults."""
    changed: float | None
    """When the environment last changed, seconds of the host's clock."""
    no_environment: str | None = None
    toolchain: Toolchain
    found: tuple[Found, ...] = ()
    job: int | None = None
    """The pid of the job that runs now."""
    elsewhere: bool = False
    """The running job has mounts of its own (a container, PrivateTmp): its /tmp is not this one."""


class CompileCaches(Action[CacheFacts]):
    """Move stale compile caches aside; they are deleted when the run has ended well."""

    kind: ClassVar[str] = "compile_caches"
    modules: ClassVar[tuple[str, ...]] = ("caches", "aside")

    of: str | None = None
    """The step whose stopped job says, by its environment, where the caches are."""
    which: Literal["stale", "all"] = "stale"
    venv: str = "of-job"
    """The environment whose last change makes older caches stale."""
    cuda: str | None = None
    """The CUDA major that stays: caches holding libraries of another one are stale at any age."""
    names: tuple[str, ...] | None = None
    """Only these kinds of cache; null is all that are known."""
    also: tuple[AbsolutePath, ...] = ()
    """Folders that are compile caches too."""
    toolchain: Literal["check", "ignore"] = "check"
    """`check` refuses to clear what could not be compiled again here."""
    timeout: Annotated[float, Field(gt=0)] = 240.0

    @field_validator("cuda", mode="before")
    @classmethod
    def _major_only(cls, value: object) -> object:
        return None if value is None else str(value).partition(".")[0]

    @field_validator("names")
    @classmethod
    def _known(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in names or ():
            if name not in caches.BY_NAME:
                known = ", ".join(caches.BY_NAME)
                raise ValueError(f"no such cache: {name}; {hint_for(name, caches.BY_NAME) or known}")
        return names

    def probe(self) -> Probe[CacheFacts]:
        args = {
            "caches": caches.questions(self.names),
            "of": self.of,
            "venv": self.venv,
            "also": list(self.also),
            "stands_on": list(caches.STANDS_ON),
            "stands_not_on": list(caches.STANDS_NOT_ON),
        }
        (reply,) = yield (Read(function="caches.find", args=args, timeout=self.timeout),)
        value = reply.answer()
        whose = {name: value["whose"][name] for name in ("uid", "name", "home")}
        return CacheFacts(
            whose=Whose(**whose, environment=value["environment"]["path"]),
            by=value["whose"]["by"],
            changed=value["environment"]["changed"],
            no_environment=value["environment"]["none"],
            toolchain=Toolchain.model_validate(value["toolchain"]),
            found=tuple(Found.model_validate(each) for each in value["found"]),
            job=value["job"],
            elsewhere=value["elsewhere"],
        )

    def plan(self, facts: CacheFacts) -> Plan:
        return self._decide(facts, foreseen=False, job_will_stop=False, nested=False)

    def foresee(self, facts: CacheFacts, planned: Planned) -> Plan:
        altered = {what for changes in planned.values() for change in changes for what in change.alters}
        # What is inside a cache is announced by itself: at its turn it may be all that is stale.
        return self._decide(
            facts, foreseen="environment" in altered, job_will_stop="job" in altered, nested=True
        )

    def _decide(self, facts: CacheFacts, *, foreseen: bool, job_will_stop: bool, nested: bool) -> Plan:
        condemned = self._condemned(facts, foreseen, nested=nested)
        for found, _ in condemned:
            blocked = (
                caches.refusal(found, facts.whose)
                or caches.in_use(found, job_will_stop=job_will_stop)
                or self._lacking(found, facts.toolchain)
            )
            if blocked:
                return Plan(blocked=blocked, notes=tuple(self._notes(facts)))
        changes = [_set_aside(found, why, facts.whose) for found, why in condemned]
        dead = self._dead_locks(facts, () if nested else condemned)
        # A lock hurts the next start and not the job that runs: it alone is no reason to stop one.
        if facts.job is None or foreseen or condemned:
            changes += [_unlock(lock, found, facts.whose) for lock, found in dead]
            return Plan(changes=tuple(changes), notes=tuple(self._notes(facts)))
        return Plan(
            changes=tuple(changes), notes=(*self._notes(facts), *(_lock_note(lock) for lock, _ in dead))
        )

    def _dead_locks(
        self, facts: CacheFacts, condemned: Sequence[tuple[Found, str]]
    ) -> list[tuple[str, Found]]:
        chosen = [found.real for found, _ in condemned]
        return [
            (lock, found)
            for found in facts.found
            if caches.refusal(found, facts.whose) is None
            for lock in found.locks
            if not any(caches.within(lock, real) for real in chosen)
        ]

    def _condemned(self, facts: CacheFacts, foreseen: bool, *, nested: bool) -> list[tuple[Found, str]]:
        reasons: dict[str, str] = {}
        for found in facts.found:
            why = caches.staleness(found, facts.changed, self.cuda, foreseen=foreseen)
            if why is None and self.which == "all" and found.files:
                why = "all were asked for"
            if why is not None:
                reasons.setdefault(found.real, why)
        by_path = {found.real: found for found in facts.found if found.real in reasons}
        chosen = by_path.values() if nested else caches.outermost(by_path.values())
        return [(found, reasons[found.real]) for found in chosen]

    def _lacking(self, found: Found, toolchain: Toolchain) -> str | None:
        if self.toolchain == "ignore":
            return None
        lacking = caches.lacking(found, toolchain)
        return f"{lacking}; install it, or say `toolchain: ignore`" if lacking else None

    def _notes(self, facts: CacheFacts) -> Iterator[str]:
        if self.which == "stale" and facts.no_environment:
            yield f"the age of caches is not judged: {facts.no_environment}"
        if facts.elsewhere:
            yield "the job has mounts of its own (a container or PrivateTmp): caches in there are not seen"
        for found in facts.found:
            if not found.complete:
                yield f"{found.name} cache {found.real} is large: only {found.files:,} files were looked at"


def _set_aside(found: Found, why: str, whose: Whose) -> Change:
    args = {"path": found.real, "uid": whose.uid}
    files = "1 file" if found.files == 1 else f"{found.files:,} files"
    size = f"{files}, {caches.spelled_size(found.bytes)}"
    return Change(
        key=f"cache:{found.real}",
        summary=f"clear the {found.name} cache {found.real} ({size}; {why})",
        before=f"{found.real}: {size}",
        after=f"{found.real}: none",
        do=(Call(function="aside.move", args=args, timeout=60.0),),
        undo=(Call(function="aside.put_back", args=args, timeout=600.0),),
        commit=(Call(function="aside.drop", args=args, timeout=600.0),),
        risk="reversible",
        alters=("caches",),
        folders=(found.folder,) if found.folder else (),
    )


def _unlock(lock: str, found: Found, whose: Whose) -> Change:
    args = {"path": lock, "uid": whose.uid}
    return Change(
        key=f"lock:{lock}",
        summary=f"remove the dead lock {lock}: its holder is gone, and every start would wait for it",
        before=f"{lock}: held by nobody",
        after=f"{lock}: none",
        do=(Call(function="aside.move", args=args, timeout=60.0),),
        undo=(Call(function="aside.put_back", args=args, timeout=60.0),),
        commit=(Call(function="aside.drop", args=args, timeout=60.0),),
        risk="reversible",
        alters=("caches",),
        folders=(found.folder,) if found.folder else (),
    )


def _lock_note(lock: str) -> str:
    return f"the dead lock {lock} would make the job's next start wait for ever"
