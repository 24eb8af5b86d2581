"""What the members of a cohort do together: one plan of several, decided before anything changes. Pure.

A step that is a barrier is everybody's where it is anybody's. What members share is changed by one of
them. One member is mended before the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleetfix.action import Action
from fleetfix.cohorts import Cohort, shared_of
from fleetfix.commands import Change
from fleetfix.engine.pending import Foreseen, foresee
from fleetfix.inventory import Host
from fleetfix.playbook import Step


@dataclass(frozen=True)
class Part:
    """One member as the survey found it: its facts by step id, and what was foreseen for it alone."""

    host: Host
    steps: tuple[Step, ...]
    facts: Mapping[str, Any]
    foreseen: Mapping[str, Foreseen]
    changed: frozenset[str] = frozenset()
    spent: frozenset[str] = frozenset()
    """Of a run that is taken up again: see `foresee`."""

    def foresee(self, wanted: frozenset[str]) -> tuple[Foreseen, ...]:
        """What is foreseen where these steps are wanted by others."""
        return foresee(self.steps, self.facts, changed=self.changed, spent=self.spent, wanted=wanted)


@dataclass(frozen=True)
class Joint:
    """The joint plan of a cohort."""

    cohort: Cohort
    steps: tuple[str, ...]
    """The ids of all steps, in order."""
    lead: str
    """The member that is mended first."""
    makers: Mapping[str, str]
    """Who changes each thing that is shared."""
    barriers: frozenset[str]
    meetings: frozenset[str]
    """The steps that change what is shared: all come there before, and none goes on until it is done."""
    wanted: frozenset[str]
    """The barrier steps that are pending on any member, and so on all."""
    mends: frozenset[str]
    """The steps that change something on the lead."""
    foreseen: Mapping[str, Mapping[str, Foreseen]] = field(default_factory=dict)
    """What is foreseen for each member now."""
    blocked: str = ""
    """Why it cannot be carried out."""

    def maker(self, host: Host, change: Change) -> str:
        """Who makes a change for this host, where it is another member; else empty."""
        makers = (self.makers.get(what, host.name) for what, _ in shared_of(host, change))
        return next((name for name in makers if name != host.name), "")

    def next_stop(self, step: str) -> str | None:
        """The next step after this one at which members wait for one another; None: the end."""
        after = self.steps[self.steps.index(step) + 1 :]
        return next((id for id in after if id in self.barriers or id in self.meetings), None)

    def mended_first(self, step: str) -> bool:
        """Whether from this step on, up to the next stop, the lead goes before the others."""
        place = self.steps.index(step)
        if not any(id in self.barriers for id in self.steps[:place]):
            return False
        stop = self.next_stop(step)
        span = self.steps[place : None if stop is None else self.steps.index(stop)]
        return bool(self.mends & set(span))


def plan_jointly(cohort: Cohort, parts: Mapping[str, Part]) -> Joint:
    """Plan for all members what any of them needs."""
    foreseen, wanted = _wanted_by_any(parts)
    lead = max(parts, key=lambda name: (_work(parts[name].foreseen), -cohort.hosts.index(name)))
    makers = _makers(cohort, parts, foreseen, lead)
    steps = next(iter(parts.values())).steps
    joint = Joint(
        cohort=cohort,
        steps=tuple(step.id for step in steps),
        lead=lead,
        makers=makers,
        barriers=frozenset(step.id for step in steps if step.barrier),
        meetings=_meetings(cohort, parts, foreseen),
        wanted=wanted,
        mends=frozenset(
            id
            for id, one in foreseen[lead].items()
            if one.pending
            and one.plan.changes
            and isinstance(one.step.act, Action)
            and not one.step.barrier
        ),
        blocked=_no_barrier(cohort, foreseen),
    )
    told = {
        name: {id: _told(joint, parts[name], one, id in wanted) for id, one in mine.items()}
        for name, mine in foreseen.items()
    }
    return replace(joint, foreseen=told)


def _wanted_by_any(
    parts: Mapping[str, Part],
) -> tuple[dict[str, dict[str, Foreseen]], frozenset[str]]:
    """What is foreseen for each where a barrier step is everybody's; and those steps."""
    wanted: frozenset[str] = frozenset()
    while True:
        foreseen = {
            name: {one.step.id: one for one in part.foresee(wanted)} for name, part in parts.items()
        }
        found = frozenset(
            id for mine in foreseen.values() for id, one in mine.items() if one.step.barrier and one.pending
        )
        if found <= wanted:
            return foreseen, wanted
        wanted |= found


def _work(foreseen: Mapping[str, Foreseen]) -> int:
    return sum(len(one.plan.changes) for one in foreseen.values() if one.pending)


def _makers(
    cohort: Cohort, parts: Mapping[str, Part], foreseen: Mapping[str, Mapping[str, Foreseen]], lead: str
) -> dict[str, str]:
    makers: dict[str, str] = {}
    for name in (lead, *cohort.hosts):
        for one in foreseen.get(name, {}).values():
            for change in one.plan.changes if one.pending else ():
                for what, _ in shared_of(parts[name].host, change):
                    if what in cohort.shared:
                        makers.setdefault(what, name)
    return makers


def _meetings(
    cohort: Cohort, parts: Mapping[str, Part], foreseen: Mapping[str, Mapping[str, Foreseen]]
) -> frozenset[str]:
    return frozenset(
        id
        for name, mine in foreseen.items()
        for id, one in mine.items()
        for change in (one.plan.changes if one.pending else ())
        if not serves_one(change)
        and any(what in cohort.shared for what, _ in shared_of(parts[name].host, change))
    )


def serves_one(change: Change) -> bool:
    """Whether a change is of use only to the host that makes it: the parts of a repair."""
    return change.alters == ("parts",)


def _no_barrier(cohort: Cohort, foreseen: Mapping[str, Mapping[str, Foreseen]]) -> str:
    if not cohort.spans and not cohort.declared:
        return ""
    for mine in foreseen.values():
        for id, one in mine.items():
            together = one.pending and any(change.together for change in one.plan.changes)
            if together and not one.step.barrier:
                return f"{cohort.why}: step {id} needs `barrier: true`, so that all go at one moment"
    return ""


def _told(joint: Joint, part: Part, one: Foreseen, wanted: bool) -> Foreseen:
    """What is foreseen of a step, with what others have to do with it; parts that another fetches go."""
    if not one.pending:
        return one
    notes = list(one.plan.notes)
    makers = sorted({joint.maker(part.host, change) for change in one.plan.changes} - {""})
    if makers and all(serves_one(change) for change in one.plan.changes):
        return replace(one, pending=False)
    if makers:
        notes.append(f"made once for all, by {', '.join(makers)}")
    own = part.foreseen[one.step.id]
    if wanted and not own.pending:
        notes.append(f"only because {joint.cohort.why}")
    return replace(one, plan=one.plan.model_copy(update={"notes": tuple(notes)}))


def unlike(before: Mapping[str, Foreseen], now: Mapping[str, Foreseen]) -> Sequence[str]:
    """The steps of which something else is foreseen now."""
    return [id for id, one in now.items() if one != before.get(id)]
