"""One step on one host, at its turn: probe, compare with what was announced, apply, verify."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

from fleetfix.action import Action, AnyAction, AnyCheck, Check, Measurement, Plan, Verdict
from fleetfix.commands import RISK_ORDER, Change, Completed
from fleetfix.engine import evidence
from fleetfix.engine.context import RunContext, SafePoint
from fleetfix.engine.line import Line
from fleetfix.engine.member import SETTLE, Member
from fleetfix.errors import NO_WAY_IN, Failure, HostError
from fleetfix.events import (
    ChangeFinished,
    ChangeShown,
    ChangeStarted,
    HostSaid,
    StepResult,
    StepStarted,
    StepWaited,
)
from fleetfix.playbook import Step
from fleetfix.sealed import names_in
from fleetfix.state import HostState


@dataclass(frozen=True)
class StepEnd:
    """How a step ended on a host."""

    result: StepResult
    reason: str = ""
    failure: Failure | None = None
    measured: Measurement | None = None
    proven: bool = False
    unsound: bool = False
    """A check of proof found the work itself wrong: an ordinary failure, not a lack of proof."""


def shown(change: Change) -> ChangeShown:
    """A change as events hold it."""
    return ChangeShown(
        key=change.key,
        parts=change.parts,
        summary=change.summary,
        before=change.before,
        after=change.after,
        risk=change.risk,
        job=change.job,
        fetch_bytes=change.fetch_bytes,
        checkpoint_ages=change.checkpoint_ages,
        secrets=tuple(sorted(set(names_in([call.args for call in change.undo])))),
    )


def unannounced(plan: Plan, announced: Plan) -> str | None:
    """What a plan holds that the announced one did not, or at a higher risk; None when nothing."""
    known = frozenset().union(*(change.announces() for change in announced.changes))
    risks = {change.key: RISK_ORDER[change.risk] for change in announced.changes}
    for change in plan.changes:
        new = change.announces() - known
        if new:
            return f"now it would also {change.summary} ({', '.join(sorted(new)[:3])})"
        if RISK_ORDER[change.risk] > risks[change.key]:
            return f"{change.summary} is {change.risk} now"
    return None


@dataclass
class StepRun:
    """One step, on one host, in one run."""

    context: RunContext
    host: str
    line: Line
    step: Step
    announced: Plan
    member: Member | None = None
    """The host as one of its cohort."""
    cut_short: bool = False
    """A change of it is in doubt: it began, and ended with the host or with its process."""

    async def run(self) -> StepEnd:
        """Run the step with its retries. Raises HostError when the session is lost."""
        end = StepEnd("skipped")
        first = self._state.attempts.get(self.step.id, 0) + 1
        for attempt in range(first, first + self.step.retries + 1):
            self.context.recorder.record(StepStarted(host=self.host, step=self.step.id, attempt=attempt))
            end = await self._attempt(attempt)
            if end.result not in ("failed", "unknown") or attempt == first + self.step.retries:
                break
            await self._pause(self.step.delay)
        return end

    @property
    def _state(self) -> HostState:
        return self.context.recorder.state.hosts[self.host]

    async def _pause(self, seconds: float) -> None:
        """Wait, unless the operator asked to stop and the host may. Raises SafePoint."""
        if not self.context.may_stop(self.host):
            await self.context.pause(seconds)
        if self.context.may_stop(self.host):
            raise SafePoint

    async def _attempt(self, attempt: int) -> StepEnd:
        if isinstance(self.step.act, Action):
            return await self._reach(self.step.act, attempt)
        assert isinstance(self.step.act, Check)
        return await self._judge(self.step.act)

    # -- actions ------------------------------------------------------------------------------

    async def _reach(self, action: AnyAction, attempt: int) -> StepEnd:
        try:
            plan = action.plan(await self.line.ask(self.step.id, action.probe()))
        except HostError as error:
            if error.failure.kind in NO_WAY_IN:
                raise
            result: StepResult = "failed" if error.failure.kind == "bug" else "blocked"
            return StepEnd(result, error.failure.message, error.failure)
        for note in plan.notes:
            self._say(note)
        if plan.blocked:
            return StepEnd("blocked", plan.blocked, Failure(kind="blocked", message=plan.blocked))
        if not plan.changes:
            # What an attempt that was cut short has done, the journal and the host know.
            earlier = [shown.summary for shown in self._state.changes_of(self.step.id).values()]
            if earlier:
                return StepEnd("changed", "; ".join(earlier))
            return self._made_by_another() or StepEnd("ok")
        surprise = unannounced(plan, self.announced)
        if surprise:
            message = f"the host is no longer as planned: {surprise}"
            return StepEnd("failed", message, Failure(kind="stale_plan", message=message))
        own = plan.model_copy(update={"changes": self._own(plan)})
        lacking = await evidence.keep_before(self.context, self.line, self.host, self.step, own)
        if lacking is not None:
            return StepEnd("blocked", lacking.message, lacking)
        failure = await self._apply(action, own, attempt)
        if failure is not None:
            return StepEnd("failed", failure.message, failure)
        return await self._verify(action, plan)

    def _own(self, plan: Plan) -> tuple[Change, ...]:
        """The changes that this host makes: what is shared, one of its cohort makes for all."""
        return plan.changes if self.member is None else self.member.own(plan)

    def _made_by_another(self) -> StepEnd | None:
        """How a step ends that another member of the cohort has done."""
        makers = "" if self.member is None else self.member.makers(self.announced)
        return StepEnd("changed", f"made once for all, by {makers}") if makers else None

    async def _apply(self, action: AnyAction, plan: Plan, attempt: int) -> Failure | None:
        base, number = f"{self.context.request.run}/{self.step.id}/{attempt}", 0
        for change in plan.changes:
            together = self.member is not None and self.member.together(self.step, change)
            for one in (change.prepare, change) if together else (change,):
                if one is None:
                    continue
                at_once = together and one is change
                completed = await self._in_turn(f"{base}/{number}", one, together=at_once)
                number += 1
                # A change in doubt is neither a success nor an error: the verification tells which,
                # where there is one.
                self.cut_short = self.cut_short or completed.in_doubt
                if completed.in_doubt and not action.converges:
                    return in_doubt((one.summary,))
                if not completed.ok and not completed.in_doubt:
                    return completed.why(one.summary)
        return None

    async def _in_turn(self, id: str, change: Change, *, together: bool) -> Completed:
        """Make a change; where all of a cohort make it at one moment, when all are ready."""
        if not together or self.member is None:
            return await self._change(id, change)
        await self.member.ready(self.step)
        # What all do at one moment needs no slot: one would wait for another's, which waits for it.
        return await self._change(id, change.model_copy(update={"waits": True}))

    async def _change(self, id: str, change: Change) -> Completed:
        recorder = self.context.recorder
        recorder.record(ChangeStarted(host=self.host, step=self.step.id, change=id, shown=shown(change)))
        await recorder.durable()
        completed = await self._send(id, change)
        recorder.record(
            ChangeFinished(
                host=self.host,
                step=self.step.id,
                change=id,
                ok=completed.ok,
                failure=None if completed.ok or completed.in_doubt else completed.why(change.summary),
                exit=completed.exit,
                stdout=completed.stdout,
                stderr=completed.stderr,
                cut=completed.cut,
                seconds=completed.seconds,
            )
        )
        return completed

    async def _send(self, id: str, change: Change) -> Completed:
        """Make the change; a host that refuses it answers like one where it failed."""
        try:
            async with self.context.slots.given_back() if change.waits else nullcontext():
                return await self.line.session.change(id, self.step.id, change)
        except HostError as error:
            if error.failure.kind in NO_WAY_IN | {"lease_held"}:
                raise  # also where another controller has taken over: nothing more is to be done from here
            return Completed(exit=None, failure=error.failure)

    async def _verify(self, action: AnyAction, plan: Plan) -> StepEnd:
        """Probe again until nothing is left to do, within the step's time."""
        done = "; ".join(change.summary for change in plan.changes)
        if not action.converges:
            return StepEnd("changed", done)
        within = self.step.within or 0.0
        if self.member is not None and self.member.makers(plan):
            within = max(within, SETTLE)
        until = self.context.now() + within
        while True:
            left, failure = await self._left(action)
            if failure is None:
                return StepEnd("changed", done)
            if self.member is not None:
                self.member.unit.check()
            if self.context.now() >= until:
                return StepEnd("failed", left, failure)
            await self._pause(self.step.every)

    async def _left(self, action: AnyAction) -> tuple[str, Failure | None]:
        try:
            plan = action.plan(await self.line.ask(self.step.id, action.probe()))
        except HostError as error:
            if error.failure.kind in NO_WAY_IN:
                raise
            message = f"done, and not verified: {error.failure.message}"
            return message, Failure(kind="verify_unknown", message=message)
        if plan.blocked:
            message = f"done, and not verified: {plan.blocked}"
            return message, Failure(kind="verify_unknown", message=message)
        if plan.changes:
            how = "cut short" if self.cut_short else "done"
            message = f"{how}, and still to do: {plan.changes[0].summary}"
            return message, Failure(kind="verify_failed", message=message)
        return "", None

    # -- checks -------------------------------------------------------------------------------

    async def _judge(self, check: AnyCheck) -> StepEnd:
        until = self.context.now() + (self.step.within or 0.0)
        passes, said = 0, ""
        while True:
            verdict = await self._verdict(check)
            if self.member is not None and verdict.result != "pass":
                self.member.unit.check()
            passes = passes + 1 if verdict.result == "pass" else 0
            if verdict.result == "skipped" or passes >= self.step.consecutive:
                return await self._kept(verdict) or _judged(check, verdict)
            late = self.context.now() >= until
            if verdict.result != "pass" and (late or verdict.final):
                return _judged(check, verdict)
            if verdict.result != "pass" and verdict.reason != said:
                said = verdict.reason
                self.context.recorder.record(StepWaited(host=self.host, step=self.step.id, reason=said))
            await self._pause(self.step.every)

    async def _kept(self, verdict: Verdict) -> StepEnd | None:
        """Keep what the check has collected; an end where that fails."""
        if not verdict.exhibits:
            return None
        failure = await evidence.keep(self.context, self.host, self.step.id, verdict.exhibits)
        return None if failure is None else StepEnd("failed", failure.message, failure)

    async def _verdict(self, check: AnyCheck) -> Verdict:
        try:
            return check.judge(await self.line.ask(self.step.id, check.probe()))
        except HostError as error:
            if error.failure.kind in NO_WAY_IN:
                raise
            return Verdict(result="unknown", reason=error.failure.message)

    def _say(self, text: str) -> None:
        self.context.recorder.record(HostSaid(host=self.host, step=self.step.id, text=text))


def _judged(check: AnyCheck, verdict: Verdict) -> StepEnd:
    match verdict.result:
        case "pass":
            proven = verdict.measured is not None and check.makes_baseline
            return StepEnd("ok", verdict.reason, measured=verdict.measured, proven=proven)
        case "skipped":
            return StepEnd("skipped", verdict.reason, measured=verdict.measured)
        case "fail":
            failure = Failure(kind="verify_failed", message=verdict.reason)
            return StepEnd("failed", verdict.reason, failure, verdict.measured, unsound=verdict.unsound)
        case "unknown":
            failure = Failure(kind="verify_unknown", message=verdict.reason)
            return StepEnd("unknown", verdict.reason, failure, verdict.measured)


def in_doubt(summaries: Iterable[str]) -> Failure:
    """The failure of what has begun, may have been done, and is not repeated unasked."""
    what = "; ".join(summaries)
    message = f"nothing tells whether this was done, and it is not repeated unasked: {what}"
    return Failure(kind="in_doubt", message=message, hint="look at the host")
