"""Going back: every change begun is undone, newest first, past failures, and then proven undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetfix.action import Action
from fleetfix.engine.context import RunContext
from fleetfix.engine.line import Line
from fleetfix.engine.pending import Foreseen, foresee
from fleetfix.errors import Failure, HostError
from fleetfix.events import ChangeUndone
from fleetfix.playbook import Step
from fleetfix.recorder import Recorder
from fleetfix.session import Past, Session

SETTLE = 30.0
"""Seconds that a host may take, after the last undo, until it looks as it did before: a relaunched
job has to load its libraries first."""


async def undo_all(session: Session, host: str, recorder: Recorder) -> list[Failure]:
    """Undo what the host's own log says was begun in this run; every error is kept, none stops it."""
    errors: list[Failure] = []
    for past in reversed(await session.past()):
        if past.state == "undone":
            continue
        failure = await _undo(session, past)
        if failure is not None:
            errors.append(failure)
        recorder.record(
            ChangeUndone(
                host=host,
                step=past.step,
                change=past.id,
                summary=past.summary,
                ok=failure is None,
                failure=failure,
            )
        )
    return errors


async def _undo(session: Session, past: Past) -> Failure | None:
    completed = await session.undo(past.id)
    if completed.ok:
        return None
    if completed.failure is not None:
        return completed.failure
    return Failure(kind="command", message=f"undo of {past.summary}: exit {completed.exit}")


async def verify_as_before(
    context: RunContext, line: Line, steps: Sequence[Step], before: Mapping[str, Foreseen]
) -> list[Failure]:
    """Plan again, until everything that was to be done before is to be done again."""
    until = context.clock.now() + SETTLE
    while True:
        missing = await _no_longer_planned(line, steps, before)
        if not missing or context.clock.now() >= until:
            break
        await context.clock.sleep(0.5)
    if not missing:
        return []
    message = f"undone, but not as before: {', '.join(sorted(missing)[:3])}"
    return [Failure(kind="verify_failed", message=message)]


async def _no_longer_planned(
    line: Line, steps: Sequence[Step], before: Mapping[str, Foreseen]
) -> frozenset[str]:
    acting = [step for step in steps if isinstance(step.act, Action)]
    facts = await line.ask_all({step.id: step.act.probe() for step in acting})
    known = {id: got for id, got in facts.items() if not isinstance(got, HostError)}
    now = {one.step.id: one for one in foresee(steps, known)}
    return frozenset(
        f"{id}: {item}"
        for id, one in before.items()
        if one.pending
        for item in _items(one) - _items(now[id])
    )


def _items(one: Foreseen) -> frozenset[str]:
    return frozenset().union(*(change.announces() for change in one.plan.changes))
