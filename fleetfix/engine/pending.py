"""Which steps of a host have something to do: decided from the survey, before anything changes.

A step is pending when its plan is not empty (or is blocked: it would have to act and may not) and
its own conditions are predicted true. `when_changed` asks whether one of the earlier steps named is
pending, `when_pending` whether one of the later ones is. What earlier steps will do is foreseen by
the actions themselves, from the plans of the steps that are pending, until nothing moves any more.

Checks are not judged here, with one exception: a check that a `when_pending` names, that no pending
step stands before, and that fails on the host as it is, counts as pending: it needs something done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetfix.action import Action, Check, Plan, Verdict
from fleetfix.commands import Change
from fleetfix.playbook import Step


@dataclass(frozen=True)
class Foreseen:
    """What is predicted of one step. An action has a plan; a check has a verdict, or none yet."""

    step: Step
    pending: bool
    plan: Plan
    verdict: Verdict | None = None


@dataclass(frozen=True)
class _Said:
    """What is known of steps beside the facts of the host: see `foresee`."""

    changed: frozenset[str]
    spent: frozenset[str]
    wanted: frozenset[str]


def foresee(
    steps: Sequence[Step],
    facts: Mapping[str, Any],
    *,
    changed: frozenset[str] = frozenset(),
    spent: frozenset[str] = frozenset(),
    wanted: frozenset[str] = frozenset(),
) -> tuple[Foreseen, ...]:
    """Predict every step from facts by step id. A step without facts is a check not asked yet.

    Of a run that is taken up again: `changed` are steps that have changed something already, `spent`
    those whose one time by their author's word is over. The conditions of `wanted` steps hold whatever
    the host itself says: others of its cohort want them.
    """
    said = _Said(changed, spent, wanted)
    pending = _settle(steps, facts, frozenset(), said)
    failing = _failing_checks(steps, facts, pending)
    if failing:
        pending = _settle(steps, facts, failing, said)
    plans = _plans(steps, facts, pending)
    return tuple(
        Foreseen(step, step.id in pending, plans[step.id], _verdict(step, steps, facts, pending))
        for step in steps
    )


def _settle(
    steps: Sequence[Step], facts: Mapping[str, Any], failing: frozenset[str], said: _Said
) -> frozenset[str]:
    pending = frozenset(step.id for step in steps) - said.spent
    # Plans only shrink when a step they were foreseen from turns out not to be pending.
    for _ in range(len(steps) + 1):
        plans = _plans(steps, facts, pending)
        found = _pending(steps, plans, failing, said) - said.spent
        if found == pending:
            break
        pending = found
    return pending


def _plans(steps: Sequence[Step], facts: Mapping[str, Any], pending: frozenset[str]) -> dict[str, Plan]:
    plans: dict[str, Plan] = {}
    planned: dict[str, tuple[Change, ...]] = {}
    for step in steps:
        plan = Plan()
        if isinstance(step.act, Action) and step.id in facts:
            plan = step.act.foresee(facts[step.id], planned)
        plans[step.id] = plan
        planned[step.id] = plan.changes if step.id in pending else ()
    return plans


def _pending(
    steps: Sequence[Step], plans: Mapping[str, Plan], failing: frozenset[str], said: _Said
) -> frozenset[str]:
    acts = {step.id: bool(plans[step.id].changes or plans[step.id].blocked) for step in steps}
    acts.update(dict.fromkeys(failing, True))
    by_id = {step.id: step for step in steps}
    known: dict[str, bool] = {}

    def holds(id: str) -> bool:
        if id not in known:
            known[id] = False  # a step that asks for itself through others is not pending by that
            step = by_id[id]
            caused = bool(said.changed & set(step.when_changed)) or _any(step.when_changed, holds)
            own = caused and _any(step.when_pending, holds)
            known[id] = acts[id] and (own or id in said.wanted)
        return known[id]

    return frozenset(step.id for step in steps if holds(step.id))


def _any(ids: tuple[str, ...], holds: Callable[[str], bool]) -> bool:
    return not ids or any(holds(id) for id in ids)


def _failing_checks(
    steps: Sequence[Step], facts: Mapping[str, Any], pending: frozenset[str]
) -> frozenset[str]:
    wanted = {id for step in steps for id in step.when_pending}
    return frozenset(
        step.id
        for step in steps
        if step.id in wanted
        and (verdict := _verdict(step, steps, facts, pending)) is not None
        and verdict.result == "fail"
    )


def _verdict(
    step: Step, steps: Sequence[Step], facts: Mapping[str, Any], pending: frozenset[str]
) -> Verdict | None:
    """The verdict on a host as it is, where no pending step stands before the check."""
    if not isinstance(step.act, Check) or step.id not in facts or step.when_changed:
        return None
    for earlier in steps:
        if earlier.id == step.id:
            break
        if earlier.id in pending and isinstance(earlier.act, Action):
            return None
    return step.act.judge(facts[step.id])
