"""What a host is asked before anything changes, and what is told of the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetfix.action import Action, Check, Probe
from fleetfix.cohorts import ties_of, undeclared, why_undeclared
from fleetfix.engine.awaiting import of_another, wait_for_others
from fleetfix.engine.ends import Ends
from fleetfix.engine.line import in_time
from fleetfix.engine.pending import Foreseen, foresee
from fleetfix.engine.phases import shown
from fleetfix.engine.taking_up import take_up
from fleetfix.engine.visit import Visit
from fleetfix.errors import Failure, HostError
from fleetfix.events import HostPlanned, StepPlanned
from fleetfix.playbook import Step
from fleetfix.saved_plan import difference
from fleetfix.session import HostInfo, Purpose, at_work_elsewhere, held_by, unfinished_hint


async def survey(visit: Visit, ends: Ends) -> None:
    """Plan every step of a host; a host that can go no further has its end. Raises HostError.

    A host that no step is for is not even connected to.
    """
    if all(step.elsewhere for step in visit.steps):
        return ends.finish("skipped", "no step of this playbook is for this host")
    session = await visit.connect()
    if of_another(session, visit.context.request.run) and await wait_for_others(visit):
        visit.say("", "the other run has ended here: it is planned now")
    if not visit.is_open:
        return None  # it got its end while it was waited
    refuse_where_taken(session.info, visit.context.request.purpose(), visit.host.name)
    if visit.resumed and not await take_up(visit, ends):
        return None
    facts = await visit.line.ask_all(_questions(visit))
    errors = {id: got.failure for id, got in facts.items() if isinstance(got, HostError)}
    known = {id: got for id, got in facts.items() if id not in errors}
    for one in foresee(visit.steps, known, changed=visit.changed, spent=visit.spent):
        visit.foreseen[one.step.id] = one
        if not one.step.elsewhere:
            visit.context.recorder.record(step_planned(visit.host.name, one, errors.get(one.step.id)))
    if visit.resumed and visit.state.started:
        visit.say("", _where_it_goes_on(visit))
    visit.ties = ties_of(visit.host, ((one.pending, one.plan) for one in visit.foreseen.values()))
    visit.facts = known if visit.ties or visit.formed else {}
    stands_against = what_stands_against(visit, errors)
    if stands_against is None and not visit.ties:
        stands_against = stale_since_saved(visit)  # of others it is asked when all are planned together
    if stands_against is not None:
        return ends.not_begun(*stands_against)
    visit.context.recorder.record(HostPlanned(host=visit.host.name, pending=visit.pending))
    return None


def _questions(visit: Visit) -> dict[str, Probe[Any]]:
    return {step.id: in_time(step.act.probe(), step.timeout) for step in visit.steps if is_asked(step)}


def _where_it_goes_on(visit: Visit) -> str:
    left = [step.id for step in visit.steps if not step.elsewhere and not visit.had_its_turn(step)]
    return f"goes on at {left[0]}" if left else "has had all its steps"


def what_stands_against(visit: Visit, errors: Mapping[str, Failure]) -> tuple[Failure, str] | None:
    """Why nothing may be done here, and the step that says so."""
    for step in visit.steps:
        one = visit.foreseen[step.id]
        if isinstance(step.act, Action) and step.id in errors:
            return errors[step.id], step.id
        if one.pending and one.plan.blocked:
            return Failure(kind="blocked", message=one.plan.blocked), step.id
        for change in one.plan.changes if one.pending else ():
            if (folder := undeclared(visit.host, change)) is not None:
                return Failure(kind="blocked", message=why_undeclared(folder)), step.id
    if visit.pending and visit.disabled is not None:
        message = f"fleetfix is switched off on this host: {visit.disabled}"
        return Failure(kind="disabled", message=message, hint="remove /etc/fleetfix/DISABLED there"), ""
    return None


def stale_since_saved(visit: Visit) -> tuple[Failure, str] | None:
    """Why the host is no longer as the saved plan says that is applied; None where it is, or none is."""
    request, name = visit.context.request, visit.host.name
    if request.expected is None or visit.state.started or not visit.pending:
        # A host that the run has touched is taken up again: what is left there is less than was planned.
        return None
    saw, boot = request.boots.get(name, ""), visit.state.boot_id
    if saw and boot and saw != boot:
        why: str | None = "it was restarted"
    else:
        pending = {id: one.plan.changes for id, one in visit.foreseen.items() if one.pending}
        now = {id: tuple(shown(change) for change in changes) for id, changes in pending.items()}
        why = difference(request.expected.get(name, frozenset()), now)
    if why is None:
        return None
    message = f"the host changed since the plan: {why}"
    return Failure(kind="stale_plan", message=message, hint="plan it anew"), ""


async def still_as_planned(visit: Visit) -> Failure | None:
    """Why a plan does not hold that another run has worked under; None where it does. Raises HostError."""
    facts = await visit.line.ask_all(_questions(visit))
    known = {id: got for id, got in facts.items() if not isinstance(got, HostError)}
    now = foresee(visit.steps, known, changed=visit.changed, spent=visit.spent)
    then = visit.foreseen
    alike = all(_announces(one) == _announces(then[one.step.id]) for one in now)
    if alike and visit.member is None:
        return None
    message = "another run was at work here since it was planned, and left another state"
    return Failure(kind="stale_plan", message=message, hint="run it anew")


def _announces(one: Foreseen) -> frozenset[str]:
    if not one.pending:
        return frozenset()
    return frozenset().union(*(change.announces() for change in one.plan.changes))


def end_dry(visit: Visit, ends: Ends) -> None:
    """A dry run has no more to do here: it says what would be."""
    failing = [one.verdict for one in visit.foreseen.values() if one.verdict]
    reasons = [verdict.reason for verdict in failing if verdict.result == "fail"]
    pending = visit.pending
    ends.finish("pending" if pending else "ok", "" if pending or not reasons else reasons[0])


def is_asked(step: Step) -> bool:
    """Whether the survey asks a step. A check of what an earlier step did has nothing to look at yet:
    to ask it would, for one, import torch beside the training that still runs."""
    if isinstance(step.act, Check) and not step.act.surveyed:
        return False
    return not step.elsewhere and (isinstance(step.act, Action) or not step.when_changed)


def refuse_where_taken(info: HostInfo, purpose: Purpose, host: str) -> None:
    """Raise for a host that another run left half done, or changes now: it is no ground for a plan."""
    lease, run = info.lease, purpose.run
    if (failure := at_work_elsewhere(info, purpose)) is not None:
        raise HostError(failure)
    if lease is not None and lease.run != run:
        raise HostError(held_by(lease))
    for claim in info.claims:
        if claim.run != run:
            what = "; ".join(claim.open) or "work left open"
            message = f"run {claim.run} by {claim.operator} is unfinished here: {what}"
            raise HostError(
                Failure(kind="unfinished", message=message, hint=unfinished_hint(claim.run, host))
            )


def step_planned(host: str, one: Foreseen, error: Failure | None) -> StepPlanned:
    """The event of one planned step. `error` is why its questions had no answer, if they had none."""
    verdict, reason = ("will be checked" if isinstance(one.step.act, Check) else None), ""
    if one.verdict is not None:
        verdict, reason = one.verdict.result, one.verdict.reason
    blocked = one.plan.blocked if one.pending else None
    if error is not None and isinstance(one.step.act, Action):
        blocked = error.message
    return StepPlanned(
        host=host,
        step=one.step.id,
        pending=one.pending,
        changes=tuple(shown(change) for change in one.plan.changes) if one.pending else (),
        blocked=blocked,
        notes=one.plan.notes,
        verdict=verdict,
        reason=reason,
        own_check=isinstance(one.step.act, Action) and one.step.act.own_check,
        by_word=isinstance(one.step.act, Action) and one.pending and not one.step.act.converges,
    )
