"""Form the cohorts of a run when every host is planned, and plan the members of each together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fleetfix.cohorts import SHARED, Cohort, Ties, declared_cohort, form, shared_paths, within
from fleetfix.commands import Read
from fleetfix.engine.context import RunContext
from fleetfix.engine.hostrun import HostRun
from fleetfix.engine.joint import Joint, Part, plan_jointly, unlike
from fleetfix.engine.survey import stale_since_saved, step_planned, what_stands_against
from fleetfix.engine.visit import Visit
from fleetfix.errors import Failure, HostError
from fleetfix.events import GOOD, CohortFormed, HostPlanned
from fleetfix.state import RunState


async def assemble(context: RunContext, runs: Mapping[str, HostRun]) -> dict[str, Joint]:
    """Form the cohorts of a run; the joint plan of each host that is in one.

    A cohort of which not all can take part is blocked as a whole, where it has anything to do.
    """
    state = context.recorder.state
    visits = {name: run.visit for name, run in runs.items()}
    # Also a host that has no note of it yet went with those that have.
    formed = {host: one.formed[0] for one in visits.values() if one.formed for host in one.formed[1]}
    ties = {name: tied for name, visit in visits.items() if (tied := _ties(visit, formed.get(name)))}
    for name, visit in visits.items():
        if (why := _not_taken_up(state, visit, visits)) and state.hosts[name].is_open:
            runs[name].refuse(why)
            ties.pop(name, None)
    elsewhere = await _users_elsewhere(state, visits, ties)
    joints: dict[str, Joint] = {}
    for cohort in form(ties, context.request.others):
        members = {name: visits[name] for name in cohort.hosts}
        if not any(state.hosts[name].pending for name in cohort.hosts):
            continue
        used = next((elsewhere[what] for what, _ in _touched(ties, cohort) if what in elsewhere), "")
        joint = _joint(context, cohort, members, used)
        if isinstance(joint, Failure):
            for name in cohort.hosts:
                if state.hosts[name].is_open:
                    runs[name].not_begun(joint)
            continue
        if len(cohort.hosts) > 1:
            if not any(name in state.cohorts for name in cohort.hosts):
                context.recorder.record(CohortFormed(name=cohort.name, hosts=cohort.hosts, why=cohort.why))
            joints |= dict.fromkeys(cohort.hosts, joint)
    for name in ties:
        if name not in joints and state.hosts[name].is_open and state.hosts[name].pending:
            _look_at_alone(runs[name], ties[name], elsewhere)
    return joints


def _look_at_alone(run: HostRun, ties: Ties, elsewhere: Mapping[str, str]) -> None:
    """A host that might have been in a cohort and is in none: what was left to ask of it."""
    if used := next((elsewhere[what] for what, _ in ties.touched if what in elsewhere), ""):
        run.refuse(used)
    elif (stale := stale_since_saved(run.visit)) is not None:
        run.not_begun(*stale)


def _ties(visit: Visit, formed: str | None) -> Ties:
    """What ties a host: also one that could not be asked is where the inventory, or this run, put it."""
    if formed is not None:  # before the run was cut short: the job may be stopped by now
        return Ties(declared=formed, touched=visit.ties.touched, formed=True)
    if visit.ties or visit.connected or visit.state.pending is not None:
        return visit.ties
    return replace(visit.ties, declared=declared_cohort(visit.host))


def _touched(ties: Mapping[str, Ties], cohort: Cohort) -> Iterator[tuple[str, str]]:
    for name in cohort.hosts:
        for what, _ in ties[name].touched:
            yield what, name


def _joint(context: RunContext, cohort: Cohort, members: Mapping[str, Visit], used: str) -> Joint | Failure:
    """The joint plan, made each member's own; or why there is none."""
    state = context.recorder.state
    why = cohort.absent or _not_taking_part(state, cohort) or used
    if not why and context.request.policy.cohort == "none":
        why = f"{cohort.why}, and the policy says `cohort: none`"
    if why:
        return Failure(kind="blocked", message=why)
    joint = plan_jointly(
        cohort,
        {name: _part(visit) for name, visit in members.items()},
    )
    if joint.blocked:
        return Failure(kind="blocked", message=joint.blocked)
    on = {name: visit for name, visit in members.items() if not visit.state.going_back}
    for name, visit in on.items():
        changed = unlike(visit.foreseen, joint.foreseen[name])
        visit.foreseen = dict(joint.foreseen[name])
        for id in changed:
            context.recorder.record(step_planned(name, visit.foreseen[id], None))
        if changed and visit.pending != state.hosts[name].pending:
            context.recorder.record(HostPlanned(host=name, pending=visit.pending))
    for name, visit in on.items():
        against = what_stands_against(visit, {}) or stale_since_saved(visit)
        if against is not None:
            message = f"{cohort.why}, and on {name}: {against[0].message}"
            return against[0].model_copy(update={"message": message})
    return joint


def _not_taken_up(state: RunState, visit: Visit, visits: Mapping[str, Visit]) -> str:
    """Why a host that is taken up again cannot go on: not all that it went with are here.

    Where one of them was begun and has ended well, all were through: no other is needed any more.
    """
    for other in visit.formed[1] if visit.formed is not None else ():
        if other not in visits:
            ended = state.hosts[other].finished if other in state.hosts else None
            well = ended is not None and ended.outcome in (*GOOD, "unproven")
            if well and state.hosts[other].started:
                continue
            said = f" ({ended.outcome})" if ended is not None else ""
            return (
                f"it went as one with {other}, which is not taken up with it{said}: "
                "take up all of them, or go back with fleetfix rollback"
            )
    return ""


def _part(visit: Visit) -> Part:
    return Part(visit.host, visit.steps, visit.facts, dict(visit.foreseen), visit.changed, visit.spent)


def _not_taking_part(state: RunState, cohort: Cohort) -> str:
    for name in cohort.hosts:
        finished = state.hosts[name].finished
        if finished is not None:
            return f"{cohort.why}, and {name} is {finished.outcome}: {finished.reason}"
    return ""


# -- what is shared is used elsewhere ---------------------------------------------------------------


async def _users_elsewhere(
    state: RunState, visits: Mapping[str, Visit], ties: Mapping[str, Ties]
) -> dict[str, str]:
    """{what is shared: why it is not changed} where a host uses it that changes nothing of it itself."""
    touching: dict[str, set[str]] = {}
    paths: dict[str, str] = {}
    for name, one in ties.items():
        for what, folder in one.touched:
            touching.setdefault(what, set()).add(name)
            paths[what] = folder.path
    asked = [
        (what, name, place)
        for what, names in touching.items()
        for name, visit in visits.items()
        if name not in names
        for place in _places_of(visit, what)
    ]
    answers = await asyncio.gather(*(_use(state, visits[name], place) for _, name, place in asked))
    found: dict[str, str] = {}
    for (what, name, _), use in zip(asked, answers, strict=True):
        if use:
            found.setdefault(what, f"{name} shares {paths[what]} (`{SHARED}`), and {use}")
    return found


def _places_of(visit: Visit, what: str) -> Iterator[str]:
    """Where what is shared lies on a host."""
    for path, source in shared_paths(visit.host).items():
        if within(what, source):
            yield path.rstrip("/") + what[len(source.rstrip("/")) :]
        elif within(source, what):  # it has a part of it mounted
            yield path


async def _use(state: RunState, visit: Visit, path: str) -> str:
    if not visit.connected:
        finished = state.hosts[visit.host.name].finished
        return f"it is {finished.outcome}" if finished is not None else "it could not be asked"
    try:
        read = Read(function="environments.users", args={"path": path}, timeout=60.0)
        (reply,) = await visit.line.session.read("", [read])
        users = reply.answer()
    except HostError as error:
        return f"it cannot say who uses it: {error.failure.message}"
    return f"{users[0]} uses it there" if users else ""
