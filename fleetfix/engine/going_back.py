"""Going back over a whole run, later: by what the hosts themselves recorded, from any machine."""

from __future__ import annotations

import asyncio

from fleetfix.commands import Json
from fleetfix.engine.breaker import rollback_failed
from fleetfix.engine.context import OpenSession
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
from fleetfix.inventory import Host
from fleetfix.recorder import Recorder
from fleetfix.session import Purpose, open_session
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
    forks: int = 64,
    opener: OpenSession = open_session,
) -> RunState:
    """Undo a run on these hosts, by what the hosts themselves recorded; needs no playbook."""
    purpose = Purpose(
        run=run, playbook=playbook, dry=False, operator=operator, controller=controller, reason=reason
    )
    slots = asyncio.Semaphore(forks)

    async def one(host: Host) -> None:
        async with slots:
            await _roll_back_host(host, purpose, recorder, opener)

    try:
        async with asyncio.TaskGroup() as group:
            for host in hosts:
                group.create_task(one(host))
    except* JournalError as errors:
        raise errors.exceptions[0] from None
    if (reason_to_trip := rollback_failed(recorder.state)) is not None:
        recorder.record(BreakerTripped(reason=reason_to_trip))
    recorder.record(RunRolledBack(exit=_exit_after_rollback(recorder.state, hosts)))
    await recorder.durable()
    return recorder.state


async def _roll_back_host(host: Host, purpose: Purpose, recorder: Recorder, opener: OpenSession) -> None:
    def progress(step: str, text: str) -> None:
        del step, text

    try:
        session = await opener(host, purpose, progress=progress)
    except HostError as error:
        recorder.record(
            HostFinished(
                host=host.name,
                outcome="rollback_pending",
                reason=error.failure.message,
                failure=error.failure,
            )
        )
        return
    try:
        info = session.info
        recorder.record(HostConnected(host=host.name, user=info.user, python=info.python))
        if (by := await session.recall("committed")) is not None:
            _refuse_committed(host, by, recorder)
            return
        claimed = any(claim.run == purpose.run for claim in info.claims)
        known = recorder.state.hosts[host.name].changes
        if not claimed and not known and all(past.state == "undone" for past in await session.past()):
            _nothing_to_undo(host, recorder)
            return
        # An undo takes the lease itself, also where the host's kill switch refuses everything new.
        recorder.record(RollbackStarted(host=host.name, reason=purpose.reason or "asked for"))
        await recorder.durable()
        went = await undo_all(session, host.name, recorder)
        await session.end(went.outcome, keep_claim=bool(went.errors), commit=False)
        recorder.record(went.finished(host.name))
        _finish_rollback(host, recorder, went.outcome, went.failure)
    except HostError as error:
        lost = error.failure.kind in NO_WAY_IN | {"timed_out"}
        _finish_rollback(host, recorder, "rollback_pending" if lost else "rollback_failed", error.failure)
    finally:
        await session.close()


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
    return host.outcome not in ("rollback_pending", "rollback_failed")
