"""What a host is asked before anything changes, and what is told of the answers."""

from __future__ import annotations

from fleetfix.action import Action, Check
from fleetfix.engine.pending import Foreseen
from fleetfix.engine.phases import shown
from fleetfix.errors import Failure, HostError
from fleetfix.events import StepPlanned
from fleetfix.playbook import Step
from fleetfix.session import HostInfo


def is_asked(step: Step) -> bool:
    """Whether the survey asks a step. A check of what an earlier step did has nothing to look at yet:
    to ask it would, for one, import torch beside the training that still runs."""
    return not step.elsewhere and (isinstance(step.act, Action) or not step.when_changed)


def refuse_where_taken(info: HostInfo, run: str, host: str) -> None:
    """Raise for a host that another run left half done, or changes now: it is no ground for a plan."""
    lease = info.lease
    if lease is not None and lease.run != run and lease.expires > info.now:
        message = f"run {lease.run} of {lease.operator} on {lease.controller} writes here now"
        raise HostError(Failure(kind="lease_held", message=message, hint="wait until it has ended"))
    for claim in info.claims:
        if claim.run != run:
            what = "; ".join(claim.open) or "work left open"
            message = f"run {claim.run} by {claim.operator} is unfinished here: {what}"
            hint = f"fleetfix rollback {claim.run} --hosts {host}"
            raise HostError(Failure(kind="unfinished", message=message, hint=hint))


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
    )
