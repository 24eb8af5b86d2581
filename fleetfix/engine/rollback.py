"""Going back: every change begun is undone, newest first, and then proven undone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace

from fleetfix.action import Action
from fleetfix.commands import Completed
from fleetfix.engine.context import RunContext
from fleetfix.engine.line import Line, in_time
from fleetfix.engine.pending import Foreseen, foresee
from fleetfix.engine.reconcile import corrections, forgotten, never_begun, open_by_claim
from fleetfix.errors import NO_WAY_IN, Failure, HostError
from fleetfix.events import ChangeUndone, HostSaid, Outcome, RollbackFinished
from fleetfix.playbook import Step
from fleetfix.recorder import Recorder
from fleetfix.secret_values import held
from fleetfix.session import Past, Session
from fleetfix.state import HostState

SETTLE = 30.0
"""Seconds that a host may take, after the last undo, until it looks as it did before: a relaunched
job has to load its libraries first."""


@dataclass
class WentBack:
    """What came of undoing: errors that may be gone at another try, and what nothing can undo."""

    errors: list[Failure] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    waits: Failure | None = None
    """Why the rest is not undone now: another host has to be there for it."""

    @property
    def outcome(self) -> Outcome:
        """What becomes of the host. Where something cannot be undone, no other try would help."""
        if self.errors:
            return "rollback_failed"
        if self.waits is not None:
            return "rollback_pending"
        return "failed" if self.left else "rolled_back"

    @property
    def open(self) -> bool:
        """Whether another try is due."""
        return bool(self.errors) or self.waits is not None

    @property
    def failure(self) -> Failure | None:
        """Why the host is not as it was; None where it is."""
        if self.errors:
            return self.errors[0]
        if self.waits is not None:
            return self.waits
        if self.left:
            return Failure(kind="command", message=f"cannot be undone: {'; '.join(self.left)}")
        return None

    def finished(self, host: str) -> RollbackFinished:
        """The event that ends the way back."""
        match self.outcome:
            case "rolled_back" | "rollback_pending" as result:
                return RollbackFinished(host=host, result=result)
            case _:
                return RollbackFinished(host=host, result="rollback_failed")


def and_back(first: Failure, failure: Failure | None, *, failed: bool) -> str:
    """A host's first error, and why it is not as it was, where it is not."""
    if failure is None or failure == first:
        return first.message
    return f"{first.message}; {'and going back failed: ' if failed else ''}{failure.message}"


InTurn = Callable[[str, bool, bool], Awaitable[Failure | None]]
"""(step, whether its captures are next, whether it may have stopped a job here): waits until the other
members of the cohort are as far back, and says why the step is not to be undone now."""


def steps_of(changes: Iterable[str]) -> frozenset[str]:
    """The steps that made these changes; an id is `RUN/STEP/ATTEMPT/N`."""
    return frozenset(id.split("/")[-3] for id in changes)


Deadline = Callable[[str], AbstractAsyncContextManager[float]]
"""The time that each undo of a step has: raises TimeoutError after it, and gives its seconds."""


def unbounded(step: str) -> AbstractAsyncContextManager[float]:
    """As long as the calls of an undo may take: the host keeps that."""
    del step
    return nullcontext(0.0)


async def undo_all(
    session: Session,
    host: str,
    recorder: Recorder,
    in_turn: InTurn | None = None,
    *,
    deadline: Deadline = unbounded,
) -> WentBack:
    """Undo what the host's own log says was begun in this run, newest first.

    An error is kept and does not stop the rest, with one exception: an undo that is `blocked` has done
    nothing and can be asked again, so nothing older is undone before it. What is irreversible, or was
    recorded where a reboot made it unknown, is said and never counted as undone.
    """
    past = await session.past()
    lost = await lost_records(session, host, past, recorder)
    went = WentBack(errors=[lost] if lost is not None else [])
    absent = never_begun(recorder.state.hosts[host], {one.id for one in past}) if not went.errors else ()
    # A job that spans hosts may have ended here because it was stopped on another: see below.
    late = [event for event in absent if in_turn is not None and event.shown.job == "stops"]
    for event in absent:
        if event not in late:
            recorder.record(event)
    known = recorder.state.hosts[host].changes
    turn = ("", False)
    went.waits = _lacks_secrets(past)
    for one in reversed(past) if went.waits is None else ():
        if one.state == "undone":
            if one.id in known:  # from another machine: what the journal holds to be open is not
                _tell(host, one, None, recorder)
            continue
        if in_turn is not None and turn != (one.step, one.job == "captures"):
            turn = (one.step, one.job == "captures")
            went.waits = await in_turn(*turn, any(p.job == "stops" for p in past if p.step == one.step))
            if went.waits is not None:
                break
        try:
            failure = _cannot(one) or await _undo(session, host, one, recorder, deadline)
        except HostError as error:
            if error.failure.kind in NO_WAY_IN:
                _tell(host, one, error.failure, recorder)  # asked for, and not heard of
            raise
        _tell(host, one, failure, recorder)
        if _cannot(one):
            went.left.append(one.summary)
        elif failure is not None:
            went.errors.append(failure)
            if failure.kind == "blocked":
                break
    captured = {one.step for one in past if one.job == "captures"}
    for event in late if not went.open else ():
        if event.step in captured:  # what was captured runs: it never ended, or was started again
            recorder.record(event)
    if went.open:
        _tell_open(host, past, recorder)
    return went


def _tell_open(host: str, past: Sequence[Past], recorder: Recorder) -> None:
    """What stands, from another machine: the journal there does not know it."""
    state = recorder.state.hosts[host]
    told = {*state.changes, *state.undone}
    found = corrections(replace(state, changes={}), (one for one in past if one.id not in told))
    for event in found:
        if event.state != "undone":
            recorder.record(event)


def _lacks_secrets(past: Sequence[Past]) -> Failure | None:
    """Why nothing is undone yet: some of it takes secrets that nobody has given."""
    needed = {name for one in past if one.state != "undone" for name in one.secrets}
    missing = sorted(needed - held().keys())
    if not missing:
        return None
    hint = " ".join(f"--secret {name}=SOURCE" for name in missing)
    return Failure(kind="blocked", message=f"to undo this takes secrets: {', '.join(missing)}", hint=hint)


async def lost_records(
    session: Session, host: str, past: Sequence[Past], recorder: Recorder
) -> Failure | None:
    """Why the host's own log does not tell all that this run began there; None where it does."""
    kept = await session.recall("bound") is not None
    run = recorder.run
    failure = forgotten(recorder.state.hosts[host], past, open_by_claim(session, run), kept=kept)
    if failure is None:
        return None
    hint = f"look at the host by hand, then fleetfix release {run} --hosts {host}"
    return failure.model_copy(update={"hint": hint})


def _cannot(past: Past) -> Failure | None:
    if past.risk != "irreversible":
        return None
    return Failure(kind="command", message=f"{past.summary}: cannot be undone, left as it is")


async def late(session: Session, seconds: float, what: str) -> Failure:
    """End what has had its time, and say whether it has ended. Raises HostError where the host is lost."""
    message, hint = f"not done within {seconds:g} s{what}", ""
    try:
        stuck = await session.cancel()
    except HostError as error:
        if error.failure.kind != "timed_out":
            raise
        stuck = ("the host does not say what",)
    if stuck:
        message += f"; cannot be ended: {', '.join(stuck)}"
        hint = "it waits in the kernel, and ends with what it waits for, or with a reboot"
    return Failure(kind="hung" if stuck else "timed_out", message=message, hint=hint)


async def _undo(
    session: Session, host: str, past: Past, recorder: Recorder, deadline: Deadline
) -> Failure | None:
    """Undo one change. Raises HostError only where the host is lost."""
    seconds = 0.0
    try:
        async with deadline(past.step) as seconds:
            completed = await session.undo(past.id)
    except TimeoutError:
        return await late(session, seconds, f": undo of {past.summary}")
    except HostError as error:
        if error.failure.kind in NO_WAY_IN | {"lease_held", "unfinished"}:
            raise
        return error.failure
    if isinstance(completed.value, dict) and "note" in completed.value:
        recorder.record(HostSaid(host=host, step=past.step, text=str(completed.value["note"])))
    return _failure_of(past, completed)


def _failure_of(past: Past, completed: Completed) -> Failure | None:
    if completed.ok:
        return None
    return completed.why(f"undo of {past.summary}")


def _tell(host: str, past: Past, failure: Failure | None, recorder: Recorder) -> None:
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


async def verify_as_before(
    context: RunContext,
    line: Line,
    host: str,
    steps: Sequence[Step],
    wanted: frozenset[str] = frozenset(),
) -> list[Failure]:
    """Plan again, until everything that was to be done before is to be done again.

    `wanted` are the steps that were to be done because others of the cohort needed them.
    Where a plan is blocked now, by a disk that is full, say, there is nothing to compare with: that is
    said, and each undo has looked at its own bytes.
    """
    before = _announced(context.recorder.state.hosts[host])
    until = context.now() + SETTLE
    while True:
        now = await _plan_again(line, steps, wanted)
        missing = _no_longer_planned(before, now)
        if not missing or context.now() >= until:
            break
        await context.rest(0.5)
    if not missing:
        return []
    blocked = [f"{one.step.id}: {one.plan.blocked}" for one in now.values() if one.plan.blocked]
    if blocked:
        text = f"undone; a new plan cannot be compared with the old one: {blocked[0]}"
        context.recorder.record(HostSaid(host=host, step="", text=text))
        return []
    message = f"undone, but not as before: {', '.join(sorted(missing)[:3])}"
    return [Failure(kind="verify_failed", message=message)]


async def _plan_again(line: Line, steps: Sequence[Step], wanted: frozenset[str]) -> dict[str, Foreseen]:
    acting = [step for step in steps if isinstance(step.act, Action) and not step.elsewhere]
    facts = await line.ask_all({step.id: in_time(step.act.probe(), step.timeout) for step in acting})
    known = {id: got for id, got in facts.items() if not isinstance(got, HostError)}
    return {one.step.id: one for one in foresee(steps, known, wanted=wanted)}


def _announced(host: HostState) -> dict[str, frozenset[str]]:
    """What was to be done by each step before the host was touched, as its plan announced it."""
    plans = {id: step.before for id, step in host.steps.items() if step.before is not None}
    return {
        id: frozenset().union(*(change.announces() for change in plan.changes))
        for id, plan in plans.items()
        if plan.pending
    }


def _no_longer_planned(before: Mapping[str, frozenset[str]], now: Mapping[str, Foreseen]) -> frozenset[str]:
    return frozenset(
        f"{id}: {item}" for id, items in before.items() for item in items - _items(now.get(id))
    )


def _items(one: Foreseen | None) -> frozenset[str]:
    if one is None:
        return frozenset()
    return frozenset().union(*(change.announces() for change in one.plan.changes))
