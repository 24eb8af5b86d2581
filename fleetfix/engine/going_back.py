"""Going back over a whole run, later: by what the hosts themselves recorded, from any machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fleetfix.commands import Json
from fleetfix.engine.awaiting import awaited, of_another
from fleetfix.engine.breaker import rollback_failed
from fleetfix.engine.company import Company
from fleetfix.engine.context import OpenSession, Slots
from fleetfix.engine.rollback import undo_all
from fleetfix.errors import NO_WAY_IN, Failure, HostError, JournalError
from fleetfix.events import (
    BreakerTripped,
    HostCommitted,
    HostConnected,
    HostFinished,
    HostSaid,
    Outcome,
    RollbackStarted,
    RunRolledBack,
)
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.recorder import Recorder
from fleetfix.session import Purpose, at_work_elsewhere, held_by, open_session
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
    opener: OpenSession = open_session,
) -> RunState:
    """Undo a run on these hosts, by what the hosts themselves recorded; needs no playbook.

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
    over: set[str] = set()
    slots = Slots(forks)
    names = frozenset(host.name for host in hosts)
    company = Company(known or RunState(), lambda: recorder.state, names, slots)

    async def one(host: Host) -> None:
        async with slots.taken():
            reached = False
            try:
                reached = await _roll_back_host(host, purpose, recorder, opener, company, lock_wait)
                over.add(host.name)
            finally:
                company.over(host.name, reached=reached)

    async def all_of_them() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for host in hosts:
                    group.create_task(one(host))
        except* JournalError as errors:
            raise errors.exceptions[0] from None

    try:
        await all_of_them()
    except asyncio.CancelledError:
        return await _left_there(recorder, [host for host in hosts if host.name not in over])
    if (reason_to_trip := rollback_failed(recorder.state)) is not None:
        recorder.record(BreakerTripped(reason=reason_to_trip))
    recorder.record(RunRolledBack(exit=_exit_after_rollback(recorder.state, hosts)))
    await recorder.durable()
    return recorder.state


async def _left_there(recorder: Recorder, hosts: Sequence[Host]) -> RunState:
    """End a way back that the operator left: what a host undoes just now it undoes to its end."""
    why = Failure(kind="cancelled", message="interrupted while it was going back")
    for host in hosts:
        _finish_rollback(host, recorder, "rollback_pending", why)
    recorder.record(RunRolledBack(exit=130))
    await recorder.durable()
    return recorder.state


async def _roll_back_host(
    host: Host,
    purpose: Purpose,
    recorder: Recorder,
    opener: OpenSession,
    company: Company,
    lock_wait: float,
) -> bool:
    """Whether the host was reached, and nobody else is at work there."""

    def progress(step: str, text: str) -> None:
        del step, text

    try:
        session = await opener(host, purpose, progress=progress)
    except HostError as error:
        _finish_rollback(host, recorder, "rollback_pending", error.failure)
        return False
    try:
        info = session.info
        recorder.record(HostConnected(host=host.name, user=info.user, python=info.python))
        if (failure := at_work_elsewhere(info, purpose)) is not None:
            _finish_rollback(host, recorder, "busy", failure)
            return False
        if (by := await session.recall("committed")) is not None:
            _refuse_committed(host, by, recorder)
            return True
        claimed = any(claim.run == purpose.run for claim in info.claims)
        known = recorder.state.hosts[host.name].changes
        if not claimed and not known and all(past.state == "undone" for past in await session.past()):
            _nothing_to_undo(host, recorder)
            return True
        if (lease := of_another(session, purpose.run)) is not None and lock_wait:
            recorder.record(awaited(host.name, lease, lock_wait))
            async with company.slots.given_back():
                await session.await_lease(lock_wait)
            lease = of_another(session, purpose.run)
        if lease is not None:
            _finish_rollback(host, recorder, "busy", held_by(lease))
            return False
        note = None if company.known else await session.recall("cohort")
        cohort = company.cohort_of(host.name, note)
        if absent := company.absent(cohort):
            _not_without(host, absent, recorder)
            return True
        # An undo takes the lease itself, also where the host's kill switch refuses everything new.
        recorder.record(RollbackStarted(host=host.name, reason=purpose.reason or "asked for"))
        await recorder.durable()
        if cohort:
            in_turn = company.in_turn(host.name, cohort, note, _saying(host, recorder))
            # What members do at one moment needs no slot: one would wait for another's.
            async with company.slots.given_back():
                went = await undo_all(session, host.name, recorder, in_turn)
        else:
            went = await undo_all(session, host.name, recorder)
        anchor = await recorder.anchor()
        await session.end(went.outcome, keep_claim=went.open, commit=False, anchor=anchor)
        recorder.record(went.finished(host.name))
        _finish_rollback(host, recorder, went.outcome, went.failure)
    except HostError as error:
        if error.failure.kind == "lease_held":
            _finish_rollback(host, recorder, "busy", error.failure)
            return False
        lost = error.failure.kind in NO_WAY_IN | {"timed_out"}
        _finish_rollback(host, recorder, "rollback_pending" if lost else "rollback_failed", error.failure)
        return not lost
    finally:
        await session.close()
    return True


def _saying(host: Host, recorder: Recorder) -> Callable[[str, str], None]:
    def say(step: str, text: str) -> None:
        recorder.record(HostSaid(host=host.name, step=step, text=text))

    return say


def _not_without(host: Host, absent: HostSet, recorder: Recorder) -> None:
    """Hosts of a cohort go back together: undone on one of them alone, the job would run on none."""
    message = f"{absent} is of its cohort and goes back with it: select {absent} too (--hosts)"
    recorder.record(HostSaid(host=host.name, step="", text=f"left as it is: {message}"))
    if recorder.state.hosts[host.name].finished is None:
        failure = Failure(kind="cohort", message=message)
        _finish_rollback(host, recorder, "rollback_pending", failure)


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


def _finish_rollback(host: Host, recorder: Recorder, outcome: Outcome, failure: Failure | None) -> None:
    recorder.record(
        HostFinished(
            host=host.name,
            outcome=outcome,
            reason=failure.message if failure else "",
            failure=failure,
            touched=True,
            job_stopped=recorder.state.hosts[host.name].job_stopped,
            open=tuple(shown.summary for shown in recorder.state.hosts[host.name].changes.values()),
        )
    )


def _exit_after_rollback(state: RunState, hosts: tuple[Host, ...]) -> int:
    """0 when nothing of the run is left on any host, 4 when the others could only not be reached."""
    bad = [state.hosts[host.name] for host in hosts if not _is_back(state.hosts[host.name])]
    if not bad:
        return 0
    ends = [host.finished for host in bad]
    lost = all(end is not None and end.failure and end.failure.kind == "unreachable" for end in ends)
    return 4 if lost else 2


def _is_back(host: HostState) -> bool:
    """Whether a host is as it was before the run, as far as its own log tells."""
    if host.changes or host.committed:
        return False
    return host.outcome not in ("rollback_pending", "rollback_failed", "busy")
