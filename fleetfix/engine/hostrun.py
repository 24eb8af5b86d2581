"""One host through one run: survey, then mend or check, and back again where it goes wrong.

Whatever happens in here, the host ends with exactly one `HostFinished`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from fleetfix.action import Action, Check, Plan
from fleetfix.commands import Json
from fleetfix.engine.awaiting import wait_for_others
from fleetfix.engine.context import RunContext, SafePoint
from fleetfix.engine.ends import Ends
from fleetfix.engine.joint import Joint
from fleetfix.engine.member import Member
from fleetfix.engine.phases import StepEnd, StepRun, in_doubt
from fleetfix.engine.rollback import late, steps_of
from fleetfix.engine.rollout import Trip, stops
from fleetfix.engine.survey import end_dry, still_as_planned, survey
from fleetfix.engine.unit import BarrierBroken, Unit
from fleetfix.engine.visit import Visit
from fleetfix.errors import Failure, HostError
from fleetfix.events import GOOD, BreakerTripped, HostStarted, RunHalted, StepFinished, StepWaited
from fleetfix.inventory import Host
from fleetfix.order import wave_of
from fleetfix.playbook import Step
from fleetfix.session import Session
from fleetfix.steps import kept as kept_steps

ANSWERS_WITHIN = 2.0
"""Seconds after the first interrupt in which a host may still answer what the survey asks it."""

FAILED = ("failed", "unknown", "blocked")
CHOSEN = {"rollback": "go back", "leave": "stop"}


def _passed_over(step: Step, end: StepEnd) -> bool:
    """Whether the steps go on although this one did not end well."""
    if _is_of_others(end):
        return False
    unproven = isinstance(step.act, Check) and step.act.unproven and not end.unsound
    return unproven or step.on_failure == "continue"


def _is_of_others(end: StepEnd) -> bool:
    """Whether a step ended because another member of the cohort did not go on."""
    return end.failure is not None and end.failure.kind == "cohort"


def _broken(broken: BarrierBroken) -> StepEnd:
    """How a step ends that another member of the cohort has broken."""
    return StepEnd("blocked", str(broken), Failure(kind="cohort", message=str(broken)))


class HostRun:
    """The turns of one host in one run."""

    def __init__(
        self, context: RunContext, host: Host, steps: tuple[Step, ...], *, resumed: bool = False
    ) -> None:
        self._context = context
        self._visit = Visit(context, host, steps, resumed=resumed)
        self._ends = Ends(self._visit)

    @property
    def visit(self) -> Visit:
        """What the run has in hand on the host."""
        return self._visit

    def join(self, unit: Unit, joint: Joint) -> None:
        """Be one of a cohort from now on."""
        visit = self._visit

        def say(step: str, text: str) -> None:
            self._context.recorder.record(StepWaited(host=visit.host.name, step=step, reason=text))

        visit.member = Member(unit, joint, visit.host, say)

    async def survey(self) -> None:
        """Plan every step before anything changes. After an interrupt no further host is connected to."""
        async with self._turn():
            if self._context.interrupts.times and not self._visit.state.started:
                return self._ends.finish("not_started", "interrupted")
            try:
                async with self._cut_by_interrupt():
                    await survey(self._visit, self._ends)
            except HostError as error:
                self._ends.give_up(error.failure, "plan" if self._visit.connected else "connect")
        return None

    @asynccontextmanager
    async def _cut_by_interrupt(self) -> AsyncIterator[None]:
        """End what is asked of a host soon after an interrupt, however long it would take to answer, where
        the run has nothing in hand there: the host ends it when the session is closed."""
        loop, stop = (
            asyncio.get_running_loop(),
            asyncio.ensure_future(self._context.interrupts.more_than(0)),
        )
        over = False
        try:
            async with asyncio.timeout(None) as time:

                def cut(stopped: asyncio.Future[None]) -> None:
                    # Called a moment after the interrupt: by then the answers may be there.
                    if not (over or stopped.cancelled() or time.expired() or self._visit.state.started):
                        time.reschedule(loop.time() + ANSWERS_WITHIN)

                stop.add_done_callback(cut)
                try:
                    yield
                finally:
                    over = True
        except TimeoutError:
            if not time.expired():
                raise
            if self._visit.is_open:
                self._ends.finish("not_started", "interrupted")
        finally:
            stop.cancel()

    def end_plan(self) -> None:
        """End a host of a dry run: it was planned, and so were all others."""
        end_dry(self._visit, self._ends)

    def refuse(self, message: str, hint: str = "") -> None:
        """End a host that was planned, and that may not be worked on as this run is."""
        self.not_begun(Failure(kind="blocked", message=message, hint=hint))

    def not_begun(self, failure: Failure, step: str = "") -> None:
        """End a host that was planned, where nothing may be done."""
        self._ends.not_begun(failure, step)

    async def check(self) -> None:
        """Judge the checks of a host that has nothing to do; nothing is touched."""
        async with self._turn():
            try:
                await self._go_through(checks_only=True)
            except HostError as error:
                self._ends.give_up(error.failure, "plan")

    async def mend(self) -> None:
        """Take the host's turn: every step in order, and back again where that is the way."""
        async with self._turn():
            with self._membership():
                if not self._visit.state.started:
                    why_not = self._why_not_begin()
                    while why_not is None and await self._context.network_is_back():
                        why_not = self._why_not_begin()
                    if why_not is not None:
                        return self._ends.finish("not_started", why_not)
                    self._context.recorder.record(HostStarted(host=self._visit.host.name))
                try:
                    await self._mend()
                except HostError as error:
                    self._ends.lost(error.failure)
        return None

    @contextmanager
    def _membership(self) -> Iterator[None]:
        """Tell the others of the cohort when the host has ended, whichever way."""
        visit = self._visit
        try:
            yield
        finally:
            finished = visit.state.finished
            if visit.member is not None:
                well = finished is not None and finished.outcome in (*GOOD, "unproven")
                why = finished.reason if finished is not None else "it was ended"
                left = steps_of(visit.state.changes)
                visit.member.over(why, left, visit.state.stopping, well=well)

    async def close(self) -> None:
        """Close the session."""
        await self._visit.close()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Hold a slot; when cancelled, end what runs on the host; close a finished host's session."""
        async with self._context.slots.taken():
            try:
                yield
            except asyncio.CancelledError:
                await self._ends.cancelled()
                raise
        if not self._visit.is_open or (self._context.request.dry and not self._visit.may_be_asked):
            await self.close()

    def _why_not_begin(self) -> str | None:
        """Why this host may not be begun any more. Whoever finds that the run is to halt says so.

        Of a cohort all are begun where one was: without the others it would go back.
        """
        state, member = self._context.recorder.state, self._visit.member
        if member is not None and member.unit.begun:
            return None
        stop = stops(state, self._context.request.policy)
        if isinstance(stop, Trip):
            self._context.recorder.record(BreakerTripped(reason=stop.reason))
        elif stop is not None and not state.interrupted and state.halted is None:
            self._context.recorder.record(RunHalted(reason=stop.reason))
        if state.interrupted:
            return "interrupted"
        if member is not None and stop is None:
            member.unit.begun = True
        return None if stop is None else stop.reason

    async def _mend(self) -> None:
        session = await self._visit.connect()
        if self._visit.state.going_back:
            # An undo takes the lease itself, also where the host's kill switch refuses everything new.
            self._visit.acquired = True
            return await self._go_on_going_back()
        try:
            stale = await self._take(session)
            self._visit.acquired = True
            if stale is not None:
                await session.end("blocked", keep_claim=False, commit=False)
                return self._ends.not_begun(stale, "")
            await session.note("bound", self._bound())
            if self._visit.member is not None:
                await session.note("cohort", self._visit.member.note())
        except HostError as error:
            return self._ends.give_up(error.failure, "plan")
        await self._go_through(checks_only=False)
        return None

    async def _take(self, session: Session) -> Failure | None:
        """Take lease and claim; where another run was waited for, why the plan holds no more."""
        try:
            await session.acquire()
        except HostError as error:
            if error.failure.kind != "lease_held" or not await wait_for_others(self._visit):
                raise
        else:
            return None
        await session.acquire()
        return await still_as_planned(self._visit)

    async def _go_on_going_back(self) -> None:
        """Undo what is left to undo; what had gone wrong first stays the host's error."""
        state = self._visit.state
        if self._visit.member is not None:
            self._visit.member.fails("it goes back", back=True)
        cut_short = Failure(kind="cancelled", message="the run was cut short while it went back here")
        await self._ends.roll_back(state.first_failure or cut_short, state.step)

    def _bound(self) -> Json:
        """What another machine needs to go on with this run on this host."""
        playbook = self._context.request.playbook
        return {
            "v": 1,
            "playbook": playbook.name,
            "digest": playbook.digest,
            "text": playbook.text,
            "source": playbook.source,
            "settings": dict(self._context.request.settings),
            "wave": wave_of(self._context.recorder.state, self._visit.host.name),
            "policy": self._context.request.policy.model_dump(mode="json"),
            "steps": kept_steps(self._visit.steps),
            "planned": [
                step.before.model_dump(mode="json")
                for step in self._visit.state.steps.values()
                if step.before is not None and step.before.pending
            ],
        }

    # -- the steps ----------------------------------------------------------------------------

    async def _go_through(self, *, checks_only: bool) -> None:
        """Run the steps in order until one fails for good, then end the host."""
        kept: tuple[Step, StepEnd] | None = None
        anew = False
        for step in self._visit.steps:
            end = await self._pass(step, checks_only, anew=anew)
            if end is None:
                return None
            anew = anew or (end.result == "changed" and isinstance(step.act, Action))
            if end.result not in FAILED:
                continue
            kept = kept or (step, end)
            if not _passed_over(step, end):
                return await self._fail(step, end, kept)
        return await self._arrive(kept)

    async def _pass(self, step: Step, checks_only: bool, *, anew: bool) -> StepEnd | None:
        """Take a step where it is the host's turn; in a cohort, with the others.

        None where the operator asked to stop, and the host has its end.
        """
        member = self._visit.member
        end: StepEnd | None = StepEnd("skipped")
        try:
            if member is not None:
                await member.enter(step)
            if self._its_turn(step, checks_only) and (anew or not self._visit.had_its_turn(step)):
                end = await self._to_its_end(step)
            gone = end is None or (end.result in FAILED and not _passed_over(step, end))
            if member is not None and not gone:
                await member.leave(step)
        except BarrierBroken as broken:
            return _broken(broken)
        return end

    async def _arrive(self, kept: tuple[Step, StepEnd] | None) -> None:
        """Be through; of a cohort none ends before all are through."""
        if self._visit.member is not None:
            try:
                await self._visit.member.arrive()
            except BarrierBroken as broken:
                step, end = self._visit.steps[-1], _broken(broken)
                return await self._fail(step, end, kept or (step, end))
        return await self._ends.went_through(kept)

    async def _fail(self, step: Step, end: StepEnd, first: tuple[Step, StepEnd]) -> None:
        """Go no further; of a cohort nobody does, and all go back where one does."""
        member = self._visit.member
        if member is None:
            return await self._ends.failed(step, end, first)
        back = member.fails(end.reason, back=step.on_failure == "rollback")
        if not back and _is_of_others(end) and self._context.interrupts.times:
            return await self._ends.left(step.id)
        return await self._ends.failed(step, end, first, back=back)

    def _its_turn(self, step: Step, checks_only: bool) -> bool:
        if step.elsewhere or (checks_only and isinstance(step.act, Action)):
            return False
        if self._visit.member is not None and self._visit.member.skips(step):
            return False
        changed = self._visit.anybody_has_changed if step.barrier else self._visit.has_changed
        if step.when_changed and not changed(step.when_changed):
            return False
        return not (
            step.when_pending and isinstance(step.act, Action) and not self._visit.foreseen[step.id].pending
        )

    async def _to_its_end(self, step: Step) -> StepEnd | None:
        """Run a step; None where the operator asked to stop, and the host has its end."""
        while True:
            if self._context.may_stop(self._visit.host.name) and not await self._goes_on(step):
                return None
            try:
                return await self._step(step)
            except SafePoint:
                continue

    async def _goes_on(self, step: Step) -> bool:
        """Wait at this safe point for what the operator decides; False where the host has its end."""
        async with self._context.slots.given_back():
            choice = await self._context.interrupts.chosen()
        if choice == "finish":
            return True
        if self._visit.member is not None:
            self._visit.member.fails(f"the operator asked to {CHOSEN[choice]}", back=choice == "rollback")
        if choice == "rollback" and self._visit.state.changes:
            asked = Failure(kind="cancelled", message="the operator asked to go back")
            await self._ends.roll_back(asked, step.id)
        else:
            await self._ends.left(step.id)
        return False

    async def _step(self, step: Step) -> StepEnd:
        began = self._context.clock.now()
        foreseen, line = self._visit.foreseen[step.id], self._visit.line
        announced = foreseen.plan if foreseen.pending else Plan()
        turn = StepRun(self._context, self._visit.host.name, line, step, announced, self._visit.member)
        try:
            async with self._context.network.deadline(step.timeout):
                end = self._spent(step) or await turn.run()
        except TimeoutError:
            end = await self._late(step)
        except BarrierBroken as broken:
            end = _broken(broken)
        if end.measured is not None and not end.proven:
            line.before = end.measured
        self._context.recorder.record(
            StepFinished(
                host=self._visit.host.name,
                step=step.id,
                result=end.result,
                reason=end.reason,
                failure=end.failure,
                measured=end.measured,
                proven=end.proven,
                seconds=self._context.clock.now() - began,
            )
        )
        return end

    def _spent(self, step: Step) -> StepEnd | None:
        """How a step ended that nothing verifies and that had its one time; it is not repeated unasked."""
        if not self._visit.resumed or step.id not in self._visit.spent:
            return None
        state = self._visit.state
        changes = state.changes_of(step.id)
        said = "; ".join(shown.summary for shown in changes.values())
        if changes.keys() <= state.done:
            return StepEnd("changed", said)
        if changes.keys() & state.failed:
            return StepEnd("failed", said, Failure(kind="command", message=f"it had failed: {said}"))
        failure = in_doubt(shown.summary for shown in changes.values())
        return StepEnd("failed", failure.message, failure)

    async def _late(self, step: Step) -> StepEnd:
        doing = self._visit.state.doing
        failure = await late(
            self._visit.line.session, step.timeout or 0.0, f", at: {doing}" if doing else ""
        )
        return StepEnd("failed", failure.message, failure)
