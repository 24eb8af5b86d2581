"""Decide which packages of an environment go, which stay, and whose files are put back.

Four of the CUDA-13 wheels own the same paths as their CUDA-12 twins, with other bytes: removing them
by name deletes files of the twins, and every package list stays green. So a cure names both: what
goes, and whose files must be put back (sgl-project/sglang#31035, vllm-project/vllm#42801).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetfix.commands import Value
from fleetfix.domain.requirements import normal
from fleetfix.domain.wheels import BY_NAME, Audit, Cuda, Dist, Evidence, classify


class Cure(Value):
    """What is to be done to an environment: who goes, who is mended, who is spared and why."""

    blocked: str | None = None
    remove: tuple[Dist, ...] = ()
    repair: tuple[Dist, ...] = ()
    files: int = 0
    """Files to put back."""
    notes: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    """What is not as it should be and not mended by this; whether it stays is for who mends to say."""

    @property
    def empty(self) -> bool:
        return self.blocked is None and not self.remove and not self.repair


def cure(audit: Audit, keep: Cuda, purge: Iterable[str] = ()) -> Cure:
    """Plan: every package made for the other CUDA goes, every staying one is as its RECORD says."""
    blocked = _no_place(audit) or _torch_goes(audit, keep)
    if blocked:
        return Cure(blocked=blocked)
    audit = audit.model_copy(update={"dists": tuple(_living(audit, keep))})
    going, left = _candidates(audit, keep, frozenset(map(normal, purge)))
    spared = _spared(audit, going)
    going = {info: dist for info, dist in going.items() if info not in spared}
    reasons = {**left, **spared}
    staying = [dist for dist in audit.dists if dist.info not in going]
    mend = tuple(dist for dist in staying if _to_mend(dist, going, keep))
    stays = {info: f"{audit_label(audit, info)} stays: {why}" for info, why in sorted(reasons.items())}
    doubtful = [
        f"{audit_label(audit, info)}: {why}" for info, why in sorted(reasons.items()) if info in left
    ]
    lost = _found_and_left(audit, staying, mend, going)
    return Cure(
        blocked=_must_choose(audit, going, reasons, keep)
        or _unprovable(going.values())
        or _without_record(staying, keep),
        remove=tuple(going.values()),
        repair=mend,
        files=sum(lost_files(dist, going) for dist in mend),
        notes=(*stays.values(), *lost, *_told(audit, going)),
        findings=(*doubtful, *lost),
    )


def _living(audit: Audit, keep: Cuda) -> list[Dist]:
    """All but what pip left behind as `~x` of packages that are not of the other CUDA."""
    found = []
    for dist in audit.dists:
        evidence = classify(dist)
        if not _renamed(dist) or (evidence is not None and evidence.cuda != keep):
            found.append(dist)
    return found


def _renamed(dist: Dist) -> bool:
    return dist.info.rpartition("/")[2].startswith("~")


def audit_label(audit: Audit, info: str) -> str:
    """`name version` of a package by its dist-info."""
    return next((dist.label for dist in audit.dists if dist.info == info), info)


def _no_place(audit: Audit) -> str | None:
    if audit.env is None:
        return f"{audit.none} ({audit.hint})" if audit.hint else audit.none or "no environment"
    advice = {
        "container": "it belongs to a container image: mend the image and start the container again",
        "conda": "conda manages it: use conda or pixi there, or name a virtual environment",
        "system": "it is the system's own Python: use the system's package manager",
    }
    if audit.env.kind != "venv":
        return f"{audit.env.path}: {advice.get(audit.env.kind, 'it is no virtual environment')}"
    if not audit.rights:
        return f"{audit.env.path} belongs to {audit.env.user or audit.env.uid} (use become: true)"
    return None


def _torch_goes(audit: Audit, keep: Cuda) -> str | None:
    if audit.torch is None or audit.env is None:
        return None
    made_for = audit.torch.cuda
    if made_for is None and not audit.torch.said:
        own = next((found for found in map(classify, _named(audit, "torch")) if found), None)
        made_for = own.cuda if own else None
    if made_for is None or made_for.partition(".")[0] == keep:
        return None
    return (
        f"torch {audit.torch.version} in {audit.env.path} is itself built for CUDA {made_for}, "
        f"not CUDA {keep} (set `cuda` to the one that stays)"
    )


def _named(audit: Audit, name: str) -> list[Dist]:
    return [dist for dist in audit.dists if normal(dist.name) == name]


def _candidates(audit: Audit, keep: Cuda, listed: frozenset[str]) -> tuple[dict[str, Dist], dict[str, str]]:
    """The packages that would go, and {dist-info: why} of those that stay although one might ask."""
    going: dict[str, Dist] = {}
    left: dict[str, str] = {}
    for dist in audit.dists:
        evidence = classify(dist)
        ours = evidence is not None and evidence.cuda == keep
        if normal(dist.name) in listed:
            if ours:
                left[dist.info] = f"it is built for CUDA {keep}, though listed in `purge`"
            else:
                going[dist.info] = dist
        elif evidence is not None and not ours:
            why = _asked_for(dist, evidence)
            if why is None:
                going[dist.info] = dist
            else:
                left[dist.info] = (
                    f"built for CUDA {evidence.cuda}, but {why}; list it in `purge` to remove it"
                )
    return going, left


def _asked_for(dist: Dist, evidence: Evidence) -> str | None:
    if interrupted(dist):
        return None
    if dist.direct:
        return "it was installed from a place of its own"
    if dist.requested:
        return "somebody asked for it by name"
    if evidence.proof not in BY_NAME:
        return f"only its {evidence.proof} say so"
    return None


def _spared(audit: Audit, going: Mapping[str, Dist]) -> dict[str, str]:
    """{dist-info: reason} of candidates that staying packages require, directly or through others."""
    facts = _marker_facts(audit)
    named: dict[str, list[Dist]] = {}
    for dist in audit.dists:
        named.setdefault(normal(dist.name), []).append(dist)
    extras: dict[str, frozenset[str]] = {}
    spared: dict[str, str] = {}
    # Every staying package stands in the queue once, and again whenever it is asked for more extras.
    queue = [dist for dist in audit.dists if dist.info not in going]
    while queue:
        owner = queue.pop()
        active = extras.get(owner.info, frozenset())
        for need in owner.needed_by_itself:
            if not need.holds(facts, active):
                continue
            for dist in named.get(need.name, ()):
                known = extras.get(dist.info, frozenset())
                fresh = dist.info in going and dist.info not in spared
                if fresh:
                    spared[dist.info] = f"{owner.label} requires it"
                if fresh or not need.extras <= known:
                    extras[dist.info] = known | need.extras
                    queue.append(dist)
    return spared


def _marker_facts(audit: Audit) -> dict[str, str]:
    return {
        "python_version": audit.python,
        "platform_machine": audit.machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def _must_choose(
    audit: Audit, going: Mapping[str, Dist], reasons: Mapping[str, str], keep: Cuda
) -> str | None:
    """A package of the other CUDA cannot stay where it shares different bytes with one that stays."""
    staying = [(dist, classify(dist)) for dist in audit.dists if dist.info not in going]
    wrong = [dist for dist, found in staying if found is not None and found.cuda != keep]
    for dist in wrong:
        for other in (one for one, _ in staying if one not in wrong and one.info in dist.shares):
            why = reasons.get(dist.info, "").partition(";")[0]
            return (
                f"{dist.label} and {other.label} claim {dist.shares[other.info]} files with other bytes, "
                f"and the first would stay: {why}; choose, and list what goes in `purge`"
            )
    return _twice(audit, going, keep)


def _twice(audit: Audit, going: Mapping[str, Dist], keep: Cuda) -> str | None:
    """One package installed in two versions at once: nothing says which one is meant."""
    seen: dict[str, Dist] = {}
    for dist in audit.dists:
        evidence = classify(dist)
        if dist.info in going or evidence is None or evidence.cuda != keep:
            continue
        other = seen.setdefault(normal(dist.name), dist)
        if other is not dist and other.shares:
            return f"{other.label} and {dist.version} are both installed: reinstall the one that is meant"
    return None


def _unprovable(going: Iterable[Dist]) -> str | None:
    for dist in going:
        if dist.record is None:
            return (
                f"{dist.label} has no RECORD, its removal was interrupted: nothing says what it owns "
                "(install this version again with --no-deps, then run this again)"
            )
        if dist.installer == "conda":
            return f"{dist.label} was installed by conda: remove it with conda or pixi"
        if dist.outside:
            return f"{dist.label} claims {dist.outside} files outside of the environment"
    return None


def _without_record(staying: Iterable[Dist], keep: Cuda) -> str | None:
    for dist in staying:
        evidence = classify(dist)
        ours = normal(dist.name) == "torch" or (evidence is not None and evidence.cuda == keep)
        if ours and (dist.record is None or dist.borrowed):
            return (
                f"{dist.label} stays and has no RECORD, its removal was interrupted: install this version "
                "again with --force-reinstall --no-deps, then run this again"
            )
    return None


def _to_mend(dist: Dist, going: Mapping[str, Dist], keep: Cuda) -> bool:
    """Whether a staying package lost files to those who go, or lacks what makes it work."""
    if dist.record is None:
        return False
    if _taken(dist, going):
        return True
    evidence = classify(dist)
    ours = normal(dist.name) == "torch" or (evidence is not None and evidence.cuda == keep)
    return bool(dist.missing_libraries or (ours and dist.missing))


def _taken(dist: Dist, going: Mapping[str, Dist]) -> int:
    return sum(group.files for group in dist.overwritten if any(info in going for info in group.by))


def lost_files(dist: Dist, going: Mapping[str, Dist]) -> int:
    """How many files of a staying package have to be put back."""
    return dist.missing + _taken(dist, going)


def interrupted(dist: Dist) -> bool:
    """Whether a removal of it began: uv removed its RECORD, or pip renamed its dist-info to `~x`."""
    return dist.borrowed or _renamed(dist)


def _found_and_left(
    audit: Audit, staying: Iterable[Dist], mend: tuple[Dist, ...], going: Mapping[str, Dist]
) -> list[str]:
    notes = []
    for dist in staying:
        if dist.altered:
            some = f", such as {dist.samples[0]}" if dist.samples else ""
            notes.append(f"{dist.label}: {dist.altered} files locally modified{some}; left as they are")
        if dist.missing and dist not in mend:
            notes.append(f"{dist.label}: {dist.missing} files missing; left as it is")
        other = sum(group.files for group in dist.overwritten) - _taken(dist, going)
        if other and dist.record is not None:
            notes.append(f"{dist.label}: {other} files hold the bytes of another staying package")
    notes += [f"{name} is left over from an interrupted removal" for name in audit.leftovers]
    return notes


def _told(audit: Audit, going: Mapping[str, Dist]) -> list[str]:
    halves = (dist for dist in going.values() if interrupted(dist))
    notes = [f"{dist.label}: its removal was interrupted and is finished" for dist in halves]
    if audit.gathered:
        notes.append(f"{audit.gathered} packages that do not speak of CUDA are told as one")
    notes += [f"{name} was installed without a RECORD and cannot be judged" for name in audit.eggs]
    return notes


# -- what is wrong now ------------------------------------------------------------------------------


def unsound(audit: Audit, keep: Cuda) -> str | None:
    """Why an environment is not sound for this CUDA, in one line; None when every touched file is right."""
    found = cure(audit, keep)
    if found.blocked:
        return found.blocked
    if found.repair:
        names = ", ".join(dist.label for dist in found.repair)
        return f"{found.files} files are not as their packages say: {names}"
    if found.remove:
        return f"packages of the other CUDA: {', '.join(dist.label for dist in found.remove)}"
    return None
