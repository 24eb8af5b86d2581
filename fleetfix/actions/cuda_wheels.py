"""cuda_wheels: one CUDA in the environment, and every file of it as its package says."""

from __future__ import annotations

from typing import ClassVar

from fleetfix.action import Action, Plan, Planned, Probe
from fleetfix.actions.wheel_parts import CudaMajor, Venv, WheelFacts, look, targets
from fleetfix.commands import Call, Change
from fleetfix.domain.cure import Cure, cure
from fleetfix.domain.wheels import Dist

REPAIR_SECONDS = 3600.0
MIB = 1 << 20


class CudaWheels(Action[WheelFacts]):
    """Put back what staying packages lost, byte by byte, then remove the packages of the other CUDA."""

    kind: ClassVar[str] = "cuda_wheels"
    modules: ClassVar[tuple[str, ...]] = ("wheels", "parts")

    venv: Venv
    cuda: CudaMajor
    purge: tuple[str, ...] = ()

    def probe(self) -> Probe[WheelFacts]:
        """Audit the environment, and ask whether the parts of this run are staged."""
        return look(self.venv, self.cuda, self.purge, None, quick=True)

    def plan(self, facts: WheelFacts) -> Plan:
        """One change per environment; blocked where a part is not staged, or a job uses it still."""
        return self._plan(facts, staged=all(part.staged for part in facts.parts), stopped=False)

    def foresee(self, facts: WheelFacts, planned: Planned) -> Plan:
        """An earlier step that brings parts makes them staged; one that stops the job frees the rest."""
        earlier = [change for changes in planned.values() for change in changes]
        brings = any("parts" in change.alters for change in earlier)
        stops = any(change.job == "stops" for change in earlier)
        return self._plan(facts, staged=brings or all(part.staged for part in facts.parts), stopped=stops)

    def _plan(self, facts: WheelFacts, *, staged: bool, stopped: bool) -> Plan:
        found = cure(facts.audit, self.cuda, self.purge)
        if facts.failure or found.blocked:
            return Plan(blocked=facts.failure or found.blocked, notes=found.notes)
        if found.empty:
            return Plan(notes=found.notes)
        blocked = _no_room(facts) if staged else _not_staged(facts, found)
        blocked = facts.stuck or blocked or _others(facts) or (None if stopped else _in_use(facts))
        if blocked:
            return Plan(blocked=blocked, notes=found.notes)
        return Plan(changes=(self._change(facts, found),), notes=found.notes)

    def _change(self, facts: WheelFacts, found: Cure) -> Change:
        path = facts.audit.env.path if facts.audit.env else self.venv
        mended = {one.info: one for one in facts.parts}
        args = {**targets(self.venv, found), "records": _records(found)}
        return Change(
            key=f"wheels:{path}",
            parts=(
                *(f"repair:{dist.pin}" for dist in found.repair),
                *(f"remove:{dist.pin}" for dist in found.remove),
            ),
            summary=summary_of(found, sum(part.files for part in mended.values())),
            before="\n".join(sorted(_line(dist) for dist in (*found.repair, *found.remove))),
            after="\n".join(sorted(dist.label for dist in found.repair)),
            do=(Call(function="wheels.repair", args=args, timeout=REPAIR_SECONDS),),
            undo=(Call(function="wheels.restore", timeout=REPAIR_SECONDS),),
            commit=(Call(function="wheels.settle", timeout=300.0),),
            risk="reversible",
            alters=("environment",),
            folders=facts.audit.env.folders if facts.audit.env else (),
        )


def summary_of(found: Cure, files: int) -> str:
    """What a cure does, e.g. `repair 86 files of 4 packages, remove 17 packages`."""
    said = []
    if found.repair:
        said.append(f"repair {_count(files, 'file')} of {_count(len(found.repair), 'package')}")
    if found.remove:
        said.append(f"remove {_count(len(found.remove), 'package')}")
    return ", ".join(said)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _line(dist: Dist) -> str:
    damaged = dist.missing + sum(group.files for group in dist.overwritten)
    return f"{dist.label} ({_count(damaged, 'file')} damaged)" if damaged else dist.label


def _records(found: Cure) -> dict[str, str]:
    return {dist.info: dist.record for dist in (*found.repair, *found.remove) if dist.record}


def _not_staged(facts: WheelFacts, found: Cure) -> str:
    lacking = {part.info for part in facts.parts if not part.staged}
    names = ", ".join(dist.label for dist in found.repair if dist.info in lacking)
    return (
        f"the bytes to mend {names} are not on this host (a `wheel_parts` step before this one brings them)"
    )


def _in_use(facts: WheelFacts) -> str | None:
    env = facts.audit.env
    if env is None or not env.used_by:
        return None
    return f"{env.used_by[0]} uses {env.path} (a `gpu_processes` step before this one stops it)"


def _others(facts: WheelFacts) -> str | None:
    """Who goes on using the environment whatever GPU job is stopped."""
    env = facts.audit.env
    if env is None or not env.others:
        return None
    more = f" and {len(env.others) - 1} more" if len(env.others) > 1 else ""
    return f"{env.others[0]}{more} uses {env.path} without a GPU: end that first"


def _no_room(facts: WheelFacts) -> str | None:
    size = sum(part.bytes for part in facts.parts)
    if facts.parts and facts.free < size + 16 * MIB:
        path = facts.audit.env.path if facts.audit.env else "the environment"
        return f"no room in {path}: {size // MIB + 16} MiB needed, {facts.free // MIB} MiB free"
    return None
