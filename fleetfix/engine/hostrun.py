"""One host through one run: survey, then mend or check, and back again where it goes wrong.

Whatever happens in here, the host ends with exactly one `HostFinished`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fleetfix.action import Action, Check, Plan
from fleetfix.commands import Json
from fleetfix.engine.context import RunContext
from fleetfix.engine.line import Line
from fleetfix.engine.outcomes import Phase, outcome_of
from fleetfix.engine.pending import Foreseen, foresee
from fleetfix.engine.phases import StepEnd, StepRun
from fleetfix.engine.rollback import WentBack, undo_all, verify_as_before
from fleetfix.engine.rollout import why_not_begin
from fleetfix.engine.survey import is_asked, refuse_where_taken, step_planned
from fleetfix.errors import Failure, HostError
from fleetfix.events import (
    HostConnected,
    HostFinished,
    HostLost,
    HostPlanned,
    HostSaid,
    HostStarted,
    Outcome,
    RollbackFinished,
    RollbackStarted,
    RunHalted,
    StepFinished,
)
from fleetfix.inventory import Host
from fleetfix.playbook import Step
from fleetfix.session import Session
from fleetfix.state import HostState

CANCEL_SECONDS = 30.0
"""How long a host may take to end what runs on it, before the operator is told that it did not answer."""

FAILED = ("failed", "unknown", "blocked")


@dataclass
class HostRun:
    """The conversation of one run with one host."""

    context: RunContext
    host: Host
    steps: tuple[Step, ...]
    _line: Line | None = None
    _foreseen: dict[str, Foreseen] = field(default_factory=dict)
    _acquired: bool = False
    _job_seen: bool = False
    """The job that a stop was to end was seen to run after all."""

    # -- survey -------------------------------------------------------------------------------

    async def survey(self) -> None:
        """Plan every step before anything changes."""
        async with self._turn():
            try:
                await self._survey()
            except HostError as error:
                self._give_up(error.failure, "connect" if self._line is None else "plan")

    async def _survey(self) -> None:
        session = await self._connect()
        refuse_where_taken(session.info, self.context.request.run, self.host.name)
        line = self._line
        assert line is not None
        facts = await line.ask_all({step.id: step.act.probe() for step in self.steps if is_asked(step)})
        errors = {id: got.failure for id, got in facts.items() if isinstance(got, HostError)}
        known = {id: got for id, got in facts.items() if id not in errors}
        for one in foresee(self.steps, known):
            self._foreseen[one.step.id] = one
            if one.step.elsewhere:
                continue
            self.context.recorder.record(step_planned(self.host.name, one, errors.get(one.step.id)))
        self._finish_planning(errors)

    async def _connect(self) -> Session:
        purpose = self.context.request.purpose()
        session = await self.context.open_session(self.host, purpose, progress=self._progress)
        self._line = Line(session, self.context.memory)
        info = session.info
        self.context.recorder.record(
            HostConnected(
                host=self.host.name,
                user=info.user,
                python=info.python,
                boot_id=info.boot_id,
                machine_id=info.machine_id,
                durable=info.durable,
            )
        )
        if not info.durable and not self.context.request.dry:
            self._say("", f"records go to {info.home}: a reboot would make what was done here unknown")
        return session

    def _finish_planning(self, errors: dict[str, Failure]) -> None:
        for step in self.steps:
            one = self._foreseen[step.id]
            if isinstance(step.act, Action) and step.id in errors:
                failure = errors[step.id]
                return self._finish(outcome_of("plan", failure.kind), failure.message, failure, step.id)
            if one.pending and one.plan.blocked:
                failure = Failure(kind="blocked", message=one.plan.blocked)
                return self._finish("blocked", one.plan.blocked, failure, step.id)
        pending = self._pending()
        assert self._line is not None
        disabled = self._line.session.info.disabled
        if pending and disabled is not None:
            message = f"fleetfix is switched off on this host: {disabled}"
            failure = Failure(kind="disabled", message=message, hint="remove /etc/fleetfix/DISABLED there")
            return self._finish("blocked", message, failure)
        self.context.recorder.record(HostPlanned(host=self.host.name, pending=pending))
        if self.context.request.dry:
            failing = [one.verdict for one in self._foreseen.values() if one.verdict]
            reasons = [verdict.reason for verdict in failing if verdict.result == "fail"]
            self._finish("pending" if pending else "ok", "" if pending or not reasons else reasons[0])
        return None

    def _pending(self) -> bool:
        return any(one.pending and one.plan.changes for one in self._foreseen.values())

    async def check(self) -> None:
        """Judge the checks of a host that has nothing to do; nothing is touched."""
        async with self._turn():
            try:
                await self._go_through(checks_only=True)
            except HostError as error:
                self._give_up(error.failure, "plan")

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Hold a slot; when cancelled, end what runs on the host; close a finished host's session."""
        async with self.context.slots.taken():
            try:
                yield
            except asyncio.CancelledError:
                await self._cancelled()
                raise
        if not self._host_state_open():
            await self.close()

    # -- mend ---------------------------------------------------------------------------------

    async def mend(self) -> None:
        """Take the host's turn: every step in order, and back again where that is the way."""
        async with self._turn():
            why_not = self._why_not_begin()
            if why_not is not None:
                return self._finish("not_started", why_not)
            self.context.recorder.record(HostStarted(host=self.host.name))
            try:
                await self._mend()
            except HostError as error:
                self._lost(error.failure)
        return None

    def _why_not_begin(self) -> str | None:
        """Why this host may not be begun any more. Whoever finds that the run is to halt says so."""
        state = self.context.recorder.state
        why_not = why_not_begin(state, self.context.request.policy)
        if why_not is not None and not state.interrupted and state.halted is None:
            self.context.recorder.record(RunHalted(reason=why_not))
        return why_not

    async def _mend(self) -> None:
        if self._line is None:
            await self._connect()
        assert self._line is not None
        try:
            await self._line.session.acquire()
            self._acquired = True
            await self._line.session.note("bound", self._bound())
        except HostError as error:
            return self._give_up(error.failure, "plan")
        await self._go_through(checks_only=False)
        return None

    async def _go_through(self, *, checks_only: bool) -> None:
        """Run the steps in order until one fails for good, then end the host."""
        kept: tuple[Step, StepEnd] | None = None
        for step in self.steps:
            if not self._its_turn(step, checks_only):
                continue
            end = await self._step(step)
            if end.result not in FAILED:
                continue
            kept = kept or (step, end)
            if isinstance(step.act, Check) and step.act.unproven and not end.unsound:
                continue
            if step.on_failure != "continue":
                return await self._failed(step, end, kept)
        return await self._went_through(kept)

    def _bound(self) -> Json:
        """What another machine needs to go on with this run on this host."""
        playbook = self.context.request.playbook
        return {
            "v": 1,
            "playbook": playbook.name,
            "digest": playbook.digest,
            "text": playbook.text,
            "policy": self.context.request.policy.model_dump(mode="json"),
            "steps": [
                {"kind": step.act.kind, **step.model_dump(mode="json", by_alias=True)}
                for step in self.steps
            ],
        }

    def _its_turn(self, step: Step, checks_only: bool) -> bool:
        if step.elsewhere or (checks_only and isinstance(step.act, Action)):
            return False
        if step.when_changed and not self._has_changed(step.when_changed):
            return False
        return not (
            step.when_pending and isinstance(step.act, Action) and not self._foreseen[step.id].pending
        )

    async def _step(self, step: Step) -> StepEnd:
        assert self._line is not None
        began = self.context.clock.now()
        announced = self._foreseen[step.id].plan if self._foreseen[step.id].pending else Plan()
        turn = StepRun(self.context, self.host.name, self._line, step, announced)
        try:
            async with asyncio.timeout(step.timeout):
                end = await turn.run()
        except TimeoutError:
            end = await self._late(step)
        if end.measured is not None and not end.proven:
            self._line.before = end.measured
        self.context.recorder.record(
            StepFinished(
                host=self.host.name,
                step=step.id,
                result=end.result,
                reason=end.reason,
                failure=end.failure,
                measured=end.measured,
                proven=end.proven,
                seconds=self.context.clock.now() - began,
            )
        )
        return end

    async def _late(self, step: Step) -> StepEnd:
        assert self._line is not None
        stuck = await self._line.session.cancel()
        message = f"not done within {step.timeout:g} s"
        if stuck:
            message += f"; cannot be ended: {', '.join(stuck)}"
        failure = Failure(kind="hung" if stuck else "timed_out", message=message)
        return StepEnd("failed", message, failure)

    @property
    def _stops(self) -> set[str]:
        """The steps that were to stop a job."""
        changes = {id: one.plan.changes for id, one in self._foreseen.items()}
        return {id for id, plan in changes.items() if any(change.job == "stops" for change in plan)}

    # -- ends ---------------------------------------------------------------------------------

    async def _went_through(self, kept: tuple[Step, StepEnd] | None) -> None:
        if kept is None:
            well: Outcome = "changed" if self._has_changed(self._foreseen) else "ok"
            await self._end_session(well, commit=True)
            return self._finish(well)
        step, end = kept
        unproven = isinstance(step.act, Check) and step.act.unproven
        outcome: Outcome = "unproven" if unproven else "failed"
        await self._end_session(outcome, commit=False)
        return self._finish(outcome, end.reason, end.failure, step.id)

    async def _failed(self, step: Step, end: StepEnd, first: tuple[Step, StepEnd]) -> None:
        failure = first[1].failure or Failure(kind="command", message=first[1].reason)
        if step.on_failure == "rollback" and self._state().changes:
            return await self._roll_back(failure, first[0].id)
        outcome: Outcome = "failed"
        if not self._state().changes and end.result == "blocked":
            outcome = "blocked"
        await self._end_session(outcome, commit=False)
        return self._finish(outcome, failure.message, failure, first[0].id)

    async def _roll_back(self, failure: Failure, step: str) -> None:
        """Undo every change begun, newest first; the first error stays the host's error."""
        assert self._line is not None
        recorder = self.context.recorder
        recorder.record(RollbackStarted(host=self.host.name, reason=failure.message))
        await recorder.durable()
        went = await undo_all(self._line.session, self.host.name, recorder)
        await self._see_whether_the_job_runs()
        if went.outcome == "rolled_back":
            went.errors += await verify_as_before(
                self.context, self._line, self.host.name, self.steps, self._foreseen
            )
        recorder.record(went.finished(self.host.name))
        await self._end_session(went.outcome, commit=False, keep_claim=bool(went.errors) or None)
        return self._finish(went.outcome, _and_back(failure, went), failure, step)

    def _lost(self, failure: Failure) -> None:
        """The session broke and did not come back while the host was being mended."""
        first = self._state().first_failure or failure
        self.context.recorder.record(HostLost(host=self.host.name, failure=failure))
        if not self._state().changes:
            return self._finish("failed" if self._acquired else "unreachable", failure.message, first)
        self.context.recorder.record(RollbackFinished(host=self.host.name, result="rollback_pending"))
        return self._finish("rollback_pending", failure.message, first)

    async def _cancelled(self) -> None:
        """End what runs on the host, and say what is left open there."""
        stuck: tuple[str, ...] = ()
        if self._line is not None:
            try:
                async with asyncio.timeout(CANCEL_SECONDS):
                    stuck = await self._line.session.cancel()
                    await self._see_whether_the_job_runs()
                    await self._end_session(
                        "cancelled", commit=False, keep_claim=bool(self._state().changes)
                    )
            except (HostError, TimeoutError):
                stuck = ("what runs there: the host does not answer",)
        reason = f"cannot be ended: {', '.join(stuck)}" if stuck else ""
        failure = Failure(kind="cancelled", message=reason or "ended by the operator")
        if self._host_state_open():
            self._finish("cancelled", reason, failure)
        await self.close()

    async def _see_whether_the_job_runs(self) -> None:
        """A stop that was cut short may have stopped nothing: the host tells, the log cannot."""
        if self._line is None or not self._state().job_stopped:
            return
        for step in self.steps:
            if isinstance(step.act, Action) and step.id in self._stops:
                plan = step.act.plan(await self._line.ask(step.id, step.act.probe()))
                self._job_seen = any(change.job == "stops" for change in plan.changes)

    async def _end_session(self, outcome: str, *, commit: bool, keep_claim: bool | None = None) -> None:
        if self._line is None or not self._acquired:
            return
        keep = self._job_stopped() if keep_claim is None else keep_claim
        await self._line.session.end(outcome, keep_claim=keep, commit=commit)

    def _give_up(self, failure: Failure, phase: Phase) -> None:
        if failure.kind in ("unreachable", "auth", "host_key"):
            self.context.recorder.record(HostLost(host=self.host.name, failure=failure))
        if self._host_state_open():
            self._finish(outcome_of(phase, failure.kind), failure.message, failure)

    def _finish(
        self, outcome: Outcome, reason: str = "", failure: Failure | None = None, step: str = ""
    ) -> None:
        settled = outcome in ("changed", "unproven", "rolled_back", "ok", "pending")
        self.context.recorder.record(
            HostFinished(
                host=self.host.name,
                outcome=outcome,
                reason=reason,
                failure=failure,
                step=step,
                touched=self._acquired,
                job_stopped=self._job_stopped(),
                open=() if settled else tuple(shown.summary for shown in self._state().changes.values()),
            )
        )

    def _has_changed(self, steps: Iterable[str]) -> bool:
        """Whether one of these steps has changed something here."""
        ended = self._state().steps
        return any(ended[id].result == "changed" for id in steps if id in ended)

    def _job_stopped(self) -> bool:
        return self._state().job_stopped and not self._job_seen

    def _state(self) -> HostState:
        return self.context.recorder.state.hosts[self.host.name]

    def _host_state_open(self) -> bool:
        return self._state().finished is None

    def _progress(self, step: str, text: str) -> None:
        self._say(step, text)

    def _say(self, step: str, text: str) -> None:
        self.context.recorder.record(HostSaid(host=self.host.name, step=step, text=text))

    async def close(self) -> None:
        """Close the session; what the host still holds of it ends with it."""
        if self._line is not None:
            line, self._line = self._line, None
            await line.session.close()


def _and_back(first: Failure, went: WentBack) -> str:
    """The first error, and what came of going back where that did not go well."""
    if went.errors:
        return f"{first.message}; and going back failed: {went.errors[0].message}"
    return f"{first.message}; {went.failure.message}" if went.failure else first.message
