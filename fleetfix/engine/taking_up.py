"""A host whose run is taken up again: what it says of itself comes before any new question."""

from __future__ import annotations

from typing import Any

from fleetfix.engine.ends import Ends
from fleetfix.engine.reconcile import behind, corrections
from fleetfix.engine.rollback import lost_records
from fleetfix.engine.visit import Visit
from fleetfix.errors import Failure, HostError
from fleetfix.events import HostPlanned, HostStarted, StepPlanned
from fleetfix.playbook import Step
from fleetfix.session import Past, Session
from fleetfix.steps import recalled

LOOK_AGAIN = 1.0
"""Seconds between two looks at a change that an earlier session has left running."""


async def take_up(visit: Visit, ends: Ends) -> bool:
    """Make the state say what the host says; False where nothing is left to plan. Raises HostError.

    The steps are those that the host keeps, where the run had begun there: an inventory that was edited
    since changes nothing for it.
    """
    session = visit.line.session
    visit.formed = _formed(visit, await session.recall("cohort"))
    past = await _settled(visit, session)
    kept = await session.recall("bound")
    if (lost := await lost_records(session, visit.host.name, past, visit.context.recorder)) is not None:
        ends.finish("in_doubt", lost.message, lost, visit.state.step)
        return False
    if kept is not None:
        visit.steps, planned = _kept(kept)
        visit.wave = str(kept.get("wave", ""))
        if not visit.state.started:
            _tell_beginning(visit, planned)
    for event in corrections(visit.state, past):
        visit.context.recorder.record(event)
    visit.behind = behind(visit.steps, past)
    if visit.state.going_back:
        visit.say("", "goes on going back")
        visit.context.recorder.record(HostPlanned(host=visit.host.name, pending=True))
    return not visit.state.going_back


def _formed(visit: Visit, note: Any) -> tuple[str, tuple[str, ...]] | None:
    """The cohort that the journal, or else the host itself, says it went in."""
    cohorts = visit.context.recorder.state.cohorts
    name = cohorts.get(visit.host.name)
    if name is not None:
        return name, tuple(host for host, its in cohorts.items() if its == name)
    if not isinstance(note, dict) or not isinstance(note.get("hosts"), list):
        return None
    return str(note.get("name", "a cohort")), tuple(map(str, note["hosts"]))


async def _settled(visit: Visit, session: Session) -> tuple[Past, ...]:
    """The host's log, once nothing of the run is being done there any more."""
    told: set[str] = set()
    while True:
        past = await session.past()
        running = [one for one in past if one.state == "begun"]
        if not running or visit.context.interrupts.times:
            return past
        for one in running:
            if one.id not in told:
                told.add(one.id)
                visit.say(one.step, f"still runs there, and is waited for: {one.summary}")
        await visit.context.pause(LOOK_AGAIN)


def _tell_beginning(visit: Visit, planned: list[StepPlanned]) -> None:
    """What another machine's journal has of this host's turn: what was planned, and that it began."""
    for one in planned:
        visit.context.recorder.record(one)
    visit.context.recorder.record(HostStarted(host=visit.host.name))


def _kept(kept: Any) -> tuple[tuple[Step, ...], list[StepPlanned]]:
    """The steps, and their plans from before the host was touched, as its note has them."""
    try:
        planned = [StepPlanned.model_validate(one) for one in kept.get("planned", ())]
        return recalled(kept["steps"]), planned
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"the steps of the run that are kept on this host cannot be read: {error}"
        hint = "a newer fleetfix began it: go on with that version"
        raise HostError(Failure(kind="bug", message=message.splitlines()[0], hint=hint)) from error
