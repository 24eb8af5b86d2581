"""One host through one run: survey, then mend or check, and back again where it goes wrong.

Whatever happens in here, the host ends with exactly one `HostFinished`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fleetfix.action import Action, Check, Plan
from fleetfix.commands import Json
from fleetfix.engine.context import RunContext, SafePoint
from fleetfix.engine.ends import Ends
from fleetfix.engine.phases import StepEnd, StepRun, in_doubt
from fleetfix.engine.reconcile import FINISHED
from fleetfix.engine.rollout import Trip, stops
from fleetfix.engine.survey import end_dry, survey
from fleetfix.engine.visit import Visit
from fleetfix.errors import Failure, HostError
from fleetfix.events import BreakerTripped, HostStarted, RunHalted, StepFinished
from fleetfix.inventory import Host
from fleetfix.playbook import Step
from fleetfix.steps import kept as kept_steps

FAILED = ("failed", "unknown", "blocked")


class HostRun:
    """The turns of one host in one run."""

    def __init__(
        self, context: RunContext, host: Host, steps: tuple[Step, ...], *, resumed: bool = False
    ) -> None:
        self._context = context
        self._visit = Visit(context, host, steps, resumed=resumed)
        self._ends = Ends(self._visit)

    async def survey(self) -> None:
        """Plan every step before anything changes."""
        async with self._turn():
            try:
                await survey(self._visit, self._ends)
            except HostError as error:
                self._ends.give_up(error.failure, "plan" if self._visit.connected else "connect")

    def end_plan(self) -> None:
        """End a host of a dry run: it was planned, and so were all others."""
        end_dry(self._visit, self._ends)

    def refuse(self, message: str, hint: str = "") -> None:
        """End a host that was planned, and that may not be worked on as this run is."""
        self._ends.not_begun(Failure(kind="blocked", message=message, hint=hint), "")

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
        if self._context.request.dry or not self._visit.is_open:
            await self.close()

    def _why_not_begin(self) -> str | None:
        """Why this host may not be begun any more. Whoever finds that the run is to halt says so."""
        state = self._context.recorder.state
        stop = stops(state, self._context.request.policy)
        if isinstance(stop, Trip):
            self._context.recorder.record(BreakerTripped(reason=stop.reason))
        elif stop is not None and not state.interrupted and state.halted is None:
            self._context.recorder.record(RunHalted(reason=stop.reason))
        if state.interrupted:
            return "interrupted"
        return None if stop is None else stop.reason

    async def _mend(self) -> None:
        session = await self._visit.connect()
        if self._visit.state.going_back:
            # An undo takes the lease itself, also where the host's kill switch refuses everything new.
            self._visit.acquired = True
            return await self._go_on_going_back()
        try:
            await session.acquire()
            self._visit.acquired = True
            await session.note("bound", self._bound())
        except HostError as error:
            return self._ends.give_up(error.failure, "plan")
        await self._go_through(checks_only=False)
        return None

    async def _go_on_going_back(self) -> None:
        """Undo what is left to undo; what had gone wrong first stays the host's error."""
        state = self._visit.state
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
            if not self._its_turn(step, checks_only) or (not anew and self._had_its_turn(step)):
                continue
            end = await self._to_its_end(step)
            if end is None:
                return None
            anew = anew or (end.result == "changed" and isinstance(step.act, Action))
            if end.result not in FAILED:
                continue
            kept = kept or (step, end)
            if isinstance(step.act, Check) and step.act.unproven and not end.unsound:
                continue
            if step.on_failure != "continue":
                return await self._ends.failed(step, end, kept)
        return await self._ends.went_through(kept)

    def _its_turn(self, step: Step, checks_only: bool) -> bool:
        if step.elsewhere or (checks_only and isinstance(step.act, Action)):
            return False
        if step.when_changed and not self._visit.has_changed(step.when_changed):
            return False
        return not (
            step.when_pending and isinstance(step.act, Action) and not self._visit.foreseen[step.id].pending
        )

    def _had_its_turn(self, step: Step) -> bool:
        """Whether a step ended well before the run was taken up, and nothing is to be done again.

        A check that passed counts while nothing before it changes anew.
        """
        if not self._visit.resumed or self._visit.foreseen[step.id].pending:
            return False
        ended = self._visit.state.steps.get(step.id)
        return step.id in self._visit.behind or (ended is not None and ended.result in FINISHED)

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
        if choice == "rollback" and self._visit.state.changes:
            asked = Failure(kind="cancelled", message="the operator asked to go back")
            await self._ends.roll_back(asked, step.id)
        else:
            await self._ends.left()
        return False

    async def _step(self, step: Step) -> StepEnd:
        began = self._context.clock.now()
        foreseen, line = self._visit.foreseen[step.id], self._visit.line
        announced = foreseen.plan if foreseen.pending else Plan()
        turn = StepRun(self._context, self._visit.host.name, line, step, announced)
        try:
            async with self._context.network.deadline(step.timeout):
                end = self._spent(step) or await turn.run()
        except TimeoutError:
            end = await self._late(step)
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
        stuck = await self._visit.line.session.cancel()
        message = f"not done within {step.timeout:g} s"
        if stuck:
            message += f"; cannot be ended: {', '.join(stuck)}"
        failure = Failure(kind="hung" if stuck else "timed_out", message=message)
        return StepEnd("failed", message, failure)
