"""How a host ends: every way leads to exactly one `HostFinished`."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

from fleetfix.action import Check
from fleetfix.engine.member import Member
from fleetfix.engine.outcomes import Phase, outcome_of
from fleetfix.engine.phases import StepEnd
from fleetfix.engine.rollback import WentBack, and_back, undo_all, verify_as_before
from fleetfix.engine.visit import Visit
from fleetfix.errors import Failure, FailureKind, HostError
from fleetfix.events import HostFinished, HostLost, Outcome, RollbackFinished, RollbackStarted
from fleetfix.playbook import Step

SILENT = "what runs there: the host does not answer"
CANCEL_SECONDS = 30.0
"""How long a host may take to end what runs on it, before the operator is told that it did not answer."""


@dataclass
class Ends:
    """The ends that one host may come to."""

    visit: Visit

    async def went_through(self, kept: tuple[Step, StepEnd] | None) -> None:
        """Every step had its turn; `kept` is the first that did not end well and was passed over."""
        if kept is None:
            well: Outcome = "changed" if self.visit.has_changed(self.visit.foreseen) else "ok"
            # What a playbook that went well leaves stopped is stopped because it was asked for.
            await self._end_session(well, commit=True, keep_claim=False)
            return self.finish(well)
        step, end = kept
        unproven = isinstance(step.act, Check) and step.act.unproven
        outcome: Outcome = "unproven" if unproven else "failed"
        await self._end_session(outcome, commit=False)
        return self.finish(outcome, end.reason, end.failure, step.id)

    async def failed(
        self, step: Step, end: StepEnd, first: tuple[Step, StepEnd], *, back: bool | None = None
    ) -> None:
        """A step failed for good; the first failure of the host is what it is remembered by.

        `back` says whether it is undone, whatever the step says.
        """
        failure = first[1].failure or Failure(kind="command", message=first[1].reason)
        if end.failure is not None and end.failure.kind == "in_doubt":
            return await self._in_doubt(end.failure, step)
        undo = step.on_failure == "rollback" if back is None else back
        if undo and self.visit.state.changes:
            return await self.roll_back(failure, first[0].id)
        outcome: Outcome = "failed"
        if not self.visit.state.changes and end.result == "blocked":
            outcome = "blocked"
        await self._end_session(outcome, commit=False)
        return self.finish(outcome, failure.message, failure, first[0].id)

    async def _in_doubt(self, failure: Failure, step: Step) -> None:
        """Nobody can say how it ended: neither on nor back without somebody who has looked."""
        run, host = self.visit.context.request.run, self.visit.host.name
        hint = f"look there; then fleetfix rollback, or release, {run} --hosts {host}"
        await self._end_session("in_doubt", commit=False, keep_claim=True)
        self.finish("in_doubt", failure.message, failure.model_copy(update={"hint": hint}), step.id)

    async def left(self, before: str) -> None:
        """The operator asked to stop, and the host is at its safe point before a step: it is left there."""
        await self._end_session("cancelled", commit=False, keep_claim=bool(self.visit.state.changes))
        failure = Failure(kind="cancelled", message=f"left at a safe point, before {before}")
        self.finish("cancelled", failure.message, failure)

    async def roll_back(self, failure: Failure, step: str) -> None:
        """Undo every change begun, newest first; the first error stays the host's error."""
        visit = self.visit
        recorder, host = visit.context.recorder, visit.host.name
        recorder.record(RollbackStarted(host=host, reason=failure.message))
        await recorder.durable()
        if visit.member is None:
            went = await undo_all(visit.line.session, host, recorder, deadline=self._deadline)
        else:
            went = await self._undo_with_others(visit.member)
        await visit.see_whether_the_job_runs()
        if went.outcome == "rolled_back":
            wanted = frozenset() if visit.member is None else visit.member.joint.wanted
            went.errors += await verify_as_before(visit.context, visit.line, host, visit.steps, wanted)
        recorder.record(went.finished(host))
        await self._end_session(went.outcome, commit=False, keep_claim=went.open or None)
        reason = and_back(failure, went.failure, failed=bool(went.errors))
        return self.finish(went.outcome, reason, failure, step)

    async def _undo_with_others(self, member: Member) -> WentBack:
        """Undo step by step with the other members of the cohort; all are started again at one moment."""
        visit = self.visit
        async with member.without_slot():
            return await undo_all(
                visit.line.session,
                visit.host.name,
                visit.context.recorder,
                member.back,
                deadline=self._deadline,
            )

    def _deadline(self, step: str) -> AbstractAsyncContextManager[float]:
        """The time that a step has bounds each undo of it too."""
        seconds = next((one.timeout for one in self.visit.steps if one.id == step), None)
        return self.visit.context.network.deadline(seconds)

    def lost(self, failure: Failure) -> None:
        """The session broke and did not come back while the host was being mended."""
        visit = self.visit
        if failure.kind == "lease_held":
            return self._taken_over(failure)
        first = visit.state.first_failure or failure
        by_controller = visit.context.network.lost
        visit.context.recorder.record(
            HostLost(host=visit.host.name, failure=failure, by_controller=by_controller)
        )
        if not visit.state.changes and by_controller:
            return self.finish("not_started", failure.message, first)
        if not visit.state.changes:
            return self.finish("failed" if visit.acquired else "unreachable", failure.message, first)
        visit.context.recorder.record(RollbackFinished(host=visit.host.name, result="rollback_pending"))
        return self.finish("rollback_pending", failure.message, first)

    def _taken_over(self, failure: Failure) -> None:
        """Another controller goes on with the host: how it ends there is for that one to say."""
        self.finish("busy", failure.message, failure)

    async def cancelled(self) -> None:
        """End what runs on the host, and say what is left open there."""
        visit = self.visit
        stuck: tuple[str, ...] = (SILENT,) if visit.connected else ()
        if visit.connected:
            with suppress(HostError, TimeoutError):
                async with asyncio.timeout(CANCEL_SECONDS):
                    stuck = await visit.line.session.cancel()
                    await visit.see_whether_the_job_runs()
                    await self._end_session("cancelled", commit=False, keep_claim=bool(visit.state.changes))
        if visit.is_open:
            self._finish_cancelled(stuck)
        await visit.close()

    def _finish_cancelled(self, stuck: tuple[str, ...]) -> None:
        """Say the final word of a host that the operator cut short; `stuck` is what could not be ended."""
        reason, first = (
            f"cannot be ended: {', '.join(stuck)}" if stuck else "",
            self.visit.state.first_failure,
        )
        said = reason or "ended by the operator"
        if self.visit.state.going_back and first is not None:
            return self.finish("cancelled", f"{first.message}; {said} while it went back", first)
        kind: FailureKind = "hung" if stuck and stuck != (SILENT,) else "cancelled"
        return self.finish("cancelled", reason, Failure(kind=kind, message=said))

    def not_begun(self, failure: Failure, step: str) -> None:
        """The survey found why nothing may be done; what the run had done here before stays as it is."""
        if self.visit.state.changes and failure.kind != "lease_held":
            return self.finish("failed", failure.message, failure, step)
        return self.finish(outcome_of("plan", failure.kind), failure.message, failure, step)

    def give_up(self, failure: Failure, phase: Phase) -> None:
        """Nothing is done here now; where the run had changed something before, that is still open."""
        if failure.kind in ("unreachable", "auth", "host_key"):
            by_controller = failure.kind == "unreachable" and self.visit.context.network.lost
            self.visit.context.recorder.record(
                HostLost(host=self.visit.host.name, failure=failure, by_controller=by_controller)
            )
        if not self.visit.is_open:
            return
        state, outcome = self.visit.state, outcome_of(phase, failure.kind)
        if failure.kind == "lease_held":
            outcome = "busy"  # whoever has the host knows better than this journal what is open there
        elif state.going_back:
            outcome = "rollback_pending"
        elif state.changes:
            outcome = "failed"
        elif state.lost_by_controller:
            outcome = "not_started"
        self.finish(outcome, failure.message, failure)

    def finish(
        self, outcome: Outcome, reason: str = "", failure: Failure | None = None, step: str = ""
    ) -> None:
        """Say the final word."""
        visit = self.visit
        settled = outcome in ("changed", "unproven", "rolled_back", "ok", "pending")
        visit.context.recorder.record(
            HostFinished(
                host=visit.host.name,
                outcome=outcome,
                reason=reason,
                failure=failure,
                step=step,
                touched=visit.acquired,
                job_stopped=visit.job_stopped,
                open=() if settled else tuple(shown.summary for shown in visit.state.changes.values()),
            )
        )

    async def _end_session(self, outcome: str, *, commit: bool, keep_claim: bool | None = None) -> None:
        if not self.visit.connected or not self.visit.acquired:
            return
        keep = self.visit.job_stopped if keep_claim is None else keep_claim
        anchor = await self.visit.context.recorder.anchor()
        await self.visit.line.session.end(outcome, keep_claim=keep, commit=commit, anchor=anchor)
