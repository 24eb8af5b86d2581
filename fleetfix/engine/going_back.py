"""Going back over a whole run, later: by what the hosts themselves recorded, from any machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fleetfix.commands import Json
from fleetfix.engine.awaiting import awaited, of_another
from fleetfix.engine.breaker import rollback_failed
from fleetfix.engine.company import Company
from fleetfix.engine.context import OpenSession, RealClock, Slots
from fleetfix.engine.functions import keys_of, with_functions
from fleetfix.engine.network import Network, Watched
from fleetfix.engine.rollback import and_back, undo_all
from fleetfix.errors import NO_WAY_IN, Failure, HostError, JournalError
from fleetfix.events import (
    BreakerTripped,
    HostCommitted,
    HostConnected,
    HostFinished,
    HostNotUndone,
    HostSaid,
    Outcome,
    RollbackStarted,
    RunRolledBack,
)
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.playbook import Step
from fleetfix.recorder import Recorder
from fleetfix.session import Purpose, Session, at_work_elsewhere, held_by, open_session
from fleetfix.state import HostState, RunState

COMMITTED = "the run was committed here: nothing is kept to undo it with"


async def roll_back(
    run: str,
    playbook: str,
    hosts: tuple[Host, ...],
    recorder: Recorder,
    *,
    operator: str,
    controller: str,
    reason: str = "",
    driver: str = "",
    take_over: bool = False,
    forks: int = 64,
    lock_wait: float = 0.0,
    known: RunState | None = None,
    steps: Mapping[str, tuple[Step, ...]] | None = None,
    opener: OpenSession = open_session,
) -> RunState:
    """Undo a run on these hosts, by what the hosts themselves recorded; needs no playbook.

    But for functions of a fabfile: what they undo is undone only as one of these `steps` says, by host.

    Where another run has a host it is waited for that one, `lock_wait` seconds at most.
    When it is cancelled, each host that has not gone back is `rollback_pending`, and the exit is 130.
    `known` is the run as the journal knows it: which hosts went together. Else the hosts tell.
    """
    purpose = Purpose(
        run=run,
        playbook=playbook,
        dry=False,
        operator=operator,
        controller=controller,
        reason=reason,
        driver=driver,
        take_over=take_over,
    )
    slots = Slots(forks)
    names = frozenset(host.name for host in hosts)
    company = Company(known or RunState(), lambda: recorder.state, names, slots)

    keys = {host.name: keys_of((steps or {}).get(host.name, ())) for host in hosts}
    ways = [
        _WayBack(host, purpose, recorder, opener, company, lock_wait, keys[host.name]) for host in hosts
    ]

    async def one(way: _WayBack) -> None:
        async with slots.taken():
            try:
                await way.go()
            finally:
                company.over(way.host.name, reached=way.reached)

    async def all_of_them() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for way in ways:
                    group.create_task(one(way))
        except* JournalError as errors:
            raise errors.exceptions[0] from None

    try:
        await all_of_them()
    except asyncio.CancelledError:
        return await _left_there(recorder, [way for way in ways if not way.over])
    if (reason_to_trip := rollback_failed(recorder.state)) is not None:
        recorder.record(BreakerTripped(reason=reason_to_trip))
    recorder.record(RunRolledBack(exit=_exit_after_rollback(recorder.state, ways)))
    await recorder.durable()
    return recorder.state


async def _left_there(recorder: Recorder, ways: Sequence[_WayBack]) -> RunState:
    """End a way back that the operator left: what a host undoes just now it undoes to its end."""
    for way in ways:
        way.leave()
    recorder.record(RunRolledBack(exit=130))
    await recorder.durable()
    return recorder.state


@dataclass
class _WayBack:
    """One host's way back, from the first connection to its word."""

    host: Host
    purpose: Purpose
    recorder: Recorder
    opener: OpenSession
    company: Company
    lock_wait: float
    keys: frozenset[str]
    """Of the changes that functions of a fabfile made, as this machine knows them."""
    reached: bool = False
    """The host was reached, and nobody else is at work there."""
    failure: Failure | None = None
    """Why it is not back, by this attempt."""
    over: bool = False
    """It has gone as far as it could."""

    def leave(self) -> None:
        """End it before it has come to its end, as the operator asked."""
        why = Failure(kind="cancelled", message="interrupted while it was going back")
        self._finish("rollback_pending", why)

    async def go(self) -> None:
        """Go as far as it is possible; the host has its word then."""
        await self._as_far_as_possible()
        self.over = True

    async def _as_far_as_possible(self) -> None:

        def progress(step: str, text: str) -> None:
            del step, text

        # Told of like a run's; whose network it is need not be known: a way back blames nobody.
        watch = Watched(Network(RealClock()), self.recorder, self.host.name, local=True)
        try:
            opened = await self.opener(self.host, self.purpose, progress=progress, watch=watch)
            session = with_functions(opened, self.host, self.keys)
        except HostError as error:
            return self._finish("rollback_pending", error.failure)
        self.reached = True
        try:
            await self._go(session)
        except HostError as error:
            if error.failure.kind == "lease_held":
                self.reached = False
                return self._finish("busy", error.failure)
            self.reached = error.failure.kind not in NO_WAY_IN | {"timed_out"}
            outcome: Outcome = "rollback_failed" if self.reached else "rollback_pending"
            self._finish(outcome, error.failure)
        finally:
            await session.close()
        return None

    async def _go(self, session: Session) -> None:
        host, recorder, company = self.host.name, self.recorder, self.company
        info = session.info
        recorder.record(HostConnected(host=host, user=info.user, python=info.python))
        if (failure := at_work_elsewhere(info, self.purpose)) is not None:
            self.reached = False
            return self._finish("busy", failure)
        if (by := await session.recall("committed")) is not None:
            return _refuse_committed(self.host, by, recorder)
        claimed = any(claim.run == self.purpose.run for claim in info.claims)
        known = recorder.state.hosts[host].changes
        if not claimed and not known and all(past.state == "undone" for past in await session.past()):
            return _nothing_to_undo(self.host, recorder)
        if (lease := of_another(session, self.purpose.run)) is not None and self.lock_wait:
            recorder.record(awaited(host, lease, self.lock_wait))
            async with company.slots.given_back():
                await session.await_lease(self.lock_wait)
            lease = of_another(session, self.purpose.run)
        if lease is not None:
            self.reached = False
            return self._finish("busy", held_by(lease))
        note = None if company.known else await session.recall("cohort")
        cohort = company.cohort_of(host, note)
        if absent := company.absent(cohort):
            return self._not_without(absent)
        if why := await self._what_is_lacking(session, cohort):
            return self._left_as_it_is(why)
        # An undo takes the lease itself, also where the host's kill switch refuses everything new.
        recorder.record(RollbackStarted(host=host, reason=self.purpose.reason or "asked for"))
        await recorder.durable()
        if cohort:
            in_turn = company.in_turn(host, cohort, note, _saying(self.host, recorder))
            # What members do at one moment needs no slot: one would wait for another's.
            async with company.slots.given_back():
                went = await undo_all(session, host, recorder, in_turn)
        else:
            went = await undo_all(session, host, recorder)
        anchor = await recorder.anchor()
        await session.end(went.outcome, keep_claim=went.open, commit=False, anchor=anchor)
        recorder.record(went.finished(host))
        return self._finish(went.outcome, went.failure)

    async def _what_is_lacking(self, session: Session, cohort: tuple[str, ...]) -> Failure | None:
        """Why nothing is undone: some of it cannot be, here or on another of its cohort, and half of a way
        back would be worse than none."""
        try:
            lacking = await session.lacking()
        except HostError as error:
            if error.failure.kind in NO_WAY_IN:
                raise
            lacking = ()  # the undo itself tells
        own = f"cannot be undone any more: {'; '.join(lacking[:3])}" if lacking else ""
        why = await self.company.agreed(self.host.name, cohort, own) if cohort else own
        hint = f"fleetfix release {self.purpose.run} gives it up as it is"
        return Failure(kind="blocked", message=why, hint=hint) if why else None

    def _not_without(self, absent: HostSet) -> None:
        """Hosts of a cohort go back together: undone on one of them alone, the job would run on none."""
        message = f"{absent} is of its cohort and goes back with it: select {absent} too (--hosts)"
        self._left_as_it_is(Failure(kind="cohort", message=message))

    def _left_as_it_is(self, why: Failure) -> None:
        """Undo nothing here; how the run ended on the host stays its word."""
        self.recorder.record(HostNotUndone(host=self.host.name, failure=why))
        self.failure = why
        if self.recorder.state.hosts[self.host.name].finished is None:
            self._finish("rollback_pending", why)

    def _finish(self, outcome: Outcome, failure: Failure | None) -> None:
        """Say what came of it; what had gone wrong on the host first stays its error."""
        self.failure = failure
        state = self.recorder.state.hosts[self.host.name]
        ended = state.finished
        first = _first_failure(state, outcome) or failure
        failed = outcome == "rollback_failed"
        self.recorder.record(
            HostFinished(
                host=state.name,
                outcome=outcome,
                reason="" if first is None else and_back(first, failure, failed=failed),
                failure=first,
                step=ended.step if ended is not None and ended.failure else "",
                touched=True,
                job_stopped=state.job_stopped,
                open=tuple(shown.summary for shown in state.changes.values()),
            )
        )


def _first_failure(state: HostState, outcome: Outcome) -> Failure | None:
    """What had gone wrong on a host first. Once it is back, what stood in the way back is over."""
    ended = state.finished
    return state.first_failure if ended is None or outcome == "rolled_back" else ended.failure


def _saying(host: Host, recorder: Recorder) -> Callable[[str, str], None]:
    def say(step: str, text: str) -> None:
        recorder.record(HostSaid(host=host.name, step=step, text=text))

    return say


def _refuse_committed(host: Host, by: Json, recorder: Recorder) -> None:
    who = {name: str(by.get(name, "")) for name in ("operator", "controller", "reason")}
    recorder.record(HostSaid(host=host.name, step="", text=COMMITTED))
    recorder.record(HostCommitted(host=host.name, **who))
    if recorder.state.hosts[host.name].is_open:
        recorder.record(HostFinished(host=host.name, outcome="cancelled", reason=COMMITTED))


def _nothing_to_undo(host: Host, recorder: Recorder) -> None:
    """How the run ended there stays as it is; a host that it never ended on gets its one word."""
    recorder.record(HostSaid(host=host.name, step="", text="nothing to undo"))
    if recorder.state.hosts[host.name].finished is None:
        recorder.record(HostFinished(host=host.name, outcome="skipped", reason="nothing to undo"))


def _exit_after_rollback(state: RunState, ways: Sequence[_WayBack]) -> int:
    """0 when nothing of the run is left on any host, 4 when the others could only not be reached."""
    bad = [way for way in ways if not _is_back(state.hosts[way.host.name])]
    if not bad:
        return 0
    return 4 if all(way.failure and way.failure.kind == "unreachable" for way in bad) else 2


def _is_back(host: HostState) -> bool:
    """Whether a host is as it was before the run, as far as its own log tells."""
    if host.changes or host.committed:
        return False
    return host.outcome not in ("rollback_pending", "rollback_failed", "busy")
