"""What a run looks like now, folded from its events; equal histories give equal states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import assert_never

from fleetfix.action import Measurement
from fleetfix.errors import NO_WAY_IN, Failure
from fleetfix.events import (
    GOOD,
    BreakerTripped,
    ChangeFinished,
    ChangeFound,
    ChangeShown,
    ChangeStarted,
    ChangeUndone,
    CohortFormed,
    CommandEnded,
    ConnectionDropped,
    ConnectionReturned,
    EvidenceKept,
    HostCommitted,
    HostConnected,
    HostFinished,
    HostLost,
    HostNotUndone,
    HostPlanned,
    HostReleased,
    HostSaid,
    HostStarted,
    LeaseAwaited,
    NetworkLost,
    NetworkReturned,
    Outcome,
    Record,
    RollbackFinished,
    RollbackStarted,
    RunFinished,
    RunHalted,
    RunInterrupted,
    RunResumed,
    RunRolledBack,
    RunStarted,
    SoakStarted,
    StepFinished,
    StepPlanned,
    StepStarted,
    StepWaited,
    WaveStarted,
)


@dataclass(frozen=True)
class StepState:
    """One step on one host: what was planned, and how it ended."""

    planned: StepPlanned | None = None
    before: StepPlanned | None = None
    """The plan from before the host was touched: undone means that this is to be done again."""
    result: str | None = None
    reason: str = ""
    failure: Failure | None = None
    measured: Measurement | None = None
    proven: bool = False


@dataclass(frozen=True)
class HostState:
    """One host: where it is in the run, and its one final outcome."""

    name: str
    connected: bool = False
    away: str = ""
    """Why its connection is down now, while it is tried again."""
    user: str = ""
    """Whom the run is there, by the host's own word."""
    durable: bool = True
    boot_id: str = ""
    machine: str = ""
    """Which machine it is, by its own word; two names may mean one."""
    pending: bool | None = None
    """None until it is planned."""
    awaits: str = ""
    """The run that has its lease, while it is waited for that one to end; it is planned after that."""
    started: bool = False
    step: str = ""
    """The step it is in, or was in last."""
    doing: str = ""
    steps: dict[str, StepState] = field(default_factory=dict)
    changes: dict[str, ChangeShown] = field(default_factory=dict)
    """Every change begun and not undone, by id, oldest first."""
    done: frozenset[str] = frozenset()
    """The ids of those that are known to have ended well."""
    failed: frozenset[str] = frozenset()
    """The ids of those that are known to have failed; of the others nothing is known yet, or for good."""
    undone: frozenset[str] = frozenset()
    not_back: frozenset[str] = frozenset()
    """The ids of those that stand because an undo of them failed."""
    unheard: frozenset[str] = frozenset()
    """The ids of those that may be undone: the host was lost while it was asked to undo them."""
    attempts: dict[str, int] = field(default_factory=dict)
    """The highest attempt at a step whose number is used up, by step id."""
    going_back: bool = False
    """It has begun to go back, or is to: there is no way forward from here in this run."""
    first_failure: Failure | None = None
    command: CommandEnded | None = None
    """How a command of `exec` ended."""
    finished: HostFinished | None = None
    evidence: tuple[EvidenceKept, ...] = ()
    lost: bool = False
    """The run has lost it, and it was not reached again."""
    lost_by_controller: bool = False
    """Its session went with the controller's network: that counts against nobody."""
    committed: bool = False
    released: bool = False
    not_undone: Failure | None = None
    """Why a later rollback left it as it was."""

    @property
    def outcome(self) -> Outcome | None:
        return self.finished.outcome if self.finished else None

    @property
    def is_open(self) -> bool:
        """Whether it has not had its final word yet."""
        return self.finished is None

    @property
    def midway(self) -> bool:
        """Whether it was begun, and has not had its final word yet."""
        return self.started and self.finished is None

    @property
    def without_its_job(self) -> bool:
        """Whether its training was left stopped: by its last word, or without one by its changes."""
        return self.job_stopped if self.finished is None else self.finished.job_stopped

    @property
    def start_in_flight(self) -> bool:
        """Whether a start was begun of which nothing tells how it ended."""
        known = self.done | self.failed
        return any(shown.job == "starts" and id not in known for id, shown in self.changes.items())

    @property
    def job_stopped(self) -> bool:
        """Whether the last thing done to the host's training that stands is to have stopped it."""
        stands = [
            shown.job for id, shown in self.changes.items() if shown.job and not self._vain(id, shown)
        ]
        if stands and stands[-1] == "captures":
            return self._ended_since_captured
        return bool(stands) and stands[-1] == "stops"

    @property
    def stopping(self) -> frozenset[str]:
        """The steps with a change that stands and may have stopped the host's training."""
        return frozenset(step_of(id) for id, shown in self.changes.items() if shown.job == "stops")

    @property
    def _ended_since_captured(self) -> bool:
        """Whether a stop was undone and the capture, by which its job is started again, was not."""
        captured = {step_of(id): id for id, shown in self.changes.items() if shown.job == "captures"}
        ended = any(_order(id) > _order(captured.get(step_of(id), id)) for id in self.undone)
        return ended or not self.not_back.isdisjoint(captured.values())

    def _vain(self, id: str, shown: ChangeShown) -> bool:
        """A start that did not end well started nothing, and one that may be undone may run no more; a
        stop may have stopped something."""
        return shown.job == "starts" and (id not in self.done or id in self.unheard)

    def changes_of(self, step: str) -> dict[str, ChangeShown]:
        """The changes of one step that were begun and not undone."""
        return {id: shown for id, shown in self.changes.items() if step_of(id) == step}

    def has_changed(self, step: str) -> bool:
        """Whether a step has changed something here, as far as journal and host tell."""
        ended = self.steps.get(step, StepState()).result == "changed"
        return ended or any(id in self.done for id in self.changes_of(step))

    def in_step(self, step: str, **changes: object) -> HostState:
        state = replace(self.steps.get(step, StepState()), **changes)  # type: ignore[arg-type]
        return replace(self, steps={**self.steps, step: state})


def _order(change: str) -> tuple[int, int]:
    attempt, number = change.split("/")[-2:]
    return int(attempt), int(number)


def step_of(change: str) -> str:
    """The step that a change belongs to, by its id `RUN/STEP/ATTEMPT/N`."""
    return change.split("/")[1]


@dataclass(frozen=True)
class RunState:
    """The run as a whole."""

    run: str = ""
    started: RunStarted | None = None
    began_at: float = 0.0
    ended_at: float | None = None
    hosts: dict[str, HostState] = field(default_factory=dict)
    cohorts: dict[str, str] = field(default_factory=dict)
    """The cohort of each host that is in one."""
    waves: tuple[WaveStarted, ...] = ()
    paused: bool = False
    """The controller's network is lost: nothing is begun until it is back."""
    paused_seconds: float = 0.0
    """How long the run waited for it, in all."""
    halted: str | None = None
    tripped: str | None = None
    """Why the breaker tripped in this run; it is halted then, too."""
    taken_up: tuple[str, ...] = ()
    """The hosts with which the run went on when it was last taken up again."""
    waves_before: int = 0
    """How many waves were called before that."""
    settled: frozenset[str] = frozenset()
    """Hosts that ended before somebody reset the breaker and took the run up again without them."""
    interrupted: int = 0
    exit: int | None = None
    rolled_back_exit: int | None = None
    """How a later `fleetfix rollback` of this run ended."""
    going_back: bool = False
    """A later `fleetfix rollback` has begun on a host, and has not come to its end."""

    @property
    def ended_with(self) -> int | None:
        """The exit code of the last that was done with it; None while that has not come to its end."""
        if self.going_back:
            return None
        return self.exit if self.rolled_back_exit is None else self.rolled_back_exit

    def count(self, *outcomes: Outcome) -> int:
        return sum(1 for host in self.hosts.values() if host.outcome in outcomes)


def goes_on(state: RunState) -> bool:
    """Whether a run was taken up again and has not come to its end since."""
    return bool(state.taken_up) and state.exit is None


def to_take_up(state: RunState) -> tuple[str, ...]:
    """The hosts of a run that can be taken up again: all but those that ended well, or went back.

    One that had nothing to do goes along where others of its cohort are taken up: they go as one.
    """
    left = {
        name
        for name, host in state.hosts.items()
        if not (host.committed or host.released) and (host.is_open or not _settled(host))
    }
    cohorts = {state.cohorts[name] for name in left if name in state.cohorts}
    along = {
        name for name, its in state.cohorts.items() if its in cohorts and not state.hosts[name].started
    }
    return tuple(name for name in state.hosts if name in left or name in along)


def _settled(host: HostState) -> bool:
    """Whether there is neither a way on nor a way back to finish."""
    if host.outcome == "failed":
        return host.going_back  # what could be undone is undone
    return host.outcome in GOOD or host.outcome == "rolled_back"


def fold(records: Iterable[Record], state: RunState | None = None) -> RunState:
    """Fold records, in order, onto a state."""
    return reduce(after, records, state or RunState())


def after(state: RunState, record: Record) -> RunState:
    """The state after one more record."""
    event = record.event
    match event:
        case RunStarted():
            hosts = {name: HostState(name) for name in event.hosts}
            return replace(state, run=record.run, started=event, began_at=record.at, hosts=hosts)
        case CohortFormed():
            return replace(state, cohorts=state.cohorts | dict.fromkeys(event.hosts, event.name))
        case RunResumed():
            return _resumed(state, event)
        case WaveStarted():
            return replace(state, waves=(*state.waves, event))
        case SoakStarted():
            return state
        case NetworkLost():
            return replace(state, paused=True)
        case NetworkReturned():
            return replace(state, paused=False, paused_seconds=state.paused_seconds + event.seconds)
        case RunHalted():
            return replace(state, halted=state.halted or event.reason, paused=False)
        case BreakerTripped():
            return replace(
                state, halted=state.halted or event.reason, tripped=state.tripped or event.reason
            )
        case RunInterrupted():
            return replace(state, interrupted=max(state.interrupted, event.times))
        case RunFinished():
            return replace(state, exit=event.exit, ended_at=record.at)
        case RunRolledBack():
            return replace(state, rolled_back_exit=event.exit, going_back=False)
        case _:
            if isinstance(event, RollbackStarted) and state.ended_with is not None:
                state = replace(state, going_back=True)
            host = _host_after(state.hosts.get(event.host, HostState(event.host)), event)
            # Copying the mapping for each event would make a run of n hosts cost n squared: the state
            # is handed on, never kept, so its mapping is.
            state.hosts[event.host] = host
            return state


def _resumed(state: RunState, event: RunResumed) -> RunState:
    ended = {name for name, host in state.hosts.items() if not host.is_open} - set(event.hosts)
    for name in event.hosts:
        state.hosts[name] = _taken_up(state.hosts.get(name, HostState(name)))
    return replace(
        state,
        taken_up=event.hosts,
        waves_before=len(state.waves),
        halted=None,
        tripped=None,
        settled=state.settled | ended if state.tripped is not None else state.settled,
        paused=False,
        interrupted=0,
        exit=None,
        ended_at=None,
        rolled_back_exit=None,
        going_back=False,
    )


HostEvent = (
    HostConnected
    | ConnectionDropped
    | ConnectionReturned
    | HostLost
    | LeaseAwaited
    | StepPlanned
    | HostPlanned
    | HostStarted
    | StepStarted
    | EvidenceKept
    | StepWaited
    | ChangeStarted
    | ChangeFinished
    | ChangeFound
    | StepFinished
    | HostSaid
    | CommandEnded
    | RollbackStarted
    | ChangeUndone
    | RollbackFinished
    | HostFinished
    | HostCommitted
    | HostReleased
    | HostNotUndone
)


def _host_after(host: HostState, event: HostEvent) -> HostState:
    match event:
        case HostConnected():
            return replace(
                host,
                connected=True,
                lost=False,
                user=event.user,
                durable=event.durable,
                boot_id=event.boot_id,
                machine=event.machine,
            )
        case ConnectionDropped() | ConnectionReturned():
            return _connection_after(host, event)
        case HostLost():
            return replace(
                host,
                connected=False,
                lost=True,
                away="",
                first_failure=host.first_failure or event.failure,
                lost_by_controller=event.by_controller,
            )
        case StepPlanned():
            before = {} if host.started else {"before": event}
            return host.in_step(event.step, planned=event, **before)
        case LeaseAwaited():
            return replace(host, awaits=event.run, doing=f"waits for run {event.run} to end here")
        case HostPlanned():
            return replace(host, pending=event.pending, awaits="")
        case HostStarted():
            return replace(host, started=True)
        case StepStarted():
            return replace(host, step=event.step, doing="")
        case EvidenceKept():
            return replace(host, evidence=(*host.evidence, event))
        case StepWaited() | HostSaid():
            return replace(host, doing=event.reason if isinstance(event, StepWaited) else event.text)
        case ChangeStarted() | ChangeFinished() | ChangeFound() | ChangeUndone():
            return _change_after(host, event)
        case StepFinished():
            return _step_finished(host, event)
        case CommandEnded():
            return replace(host, command=event, first_failure=host.first_failure or event.failure)
        case RollbackStarted() | RollbackFinished():
            return _going_back(host, event)
        case HostFinished() | HostCommitted() | HostReleased() | HostNotUndone():
            return _word_on(host, event)
    assert_never(event)


def _going_back(host: HostState, event: RollbackStarted | RollbackFinished) -> HostState:
    if isinstance(event, RollbackFinished):
        return replace(host, going_back=True)
    # Where it was released it is held again; where it had ended, it is open until it has a new word.
    return replace(
        host,
        going_back=True,
        doing="going back",
        released=False,
        not_undone=None,
        finished=_no_longer(host.finished),
    )


def _connection_after(host: HostState, event: ConnectionDropped | ConnectionReturned) -> HostState:
    match event:
        case ConnectionDropped():
            return replace(host, away=event.reason)
        case ConnectionReturned():
            return replace(
                host,
                away="",
                boot_id=event.boot_id or host.boot_id,
                machine=event.machine or host.machine,
            )


def _change_after(
    host: HostState, event: ChangeStarted | ChangeFinished | ChangeFound | ChangeUndone
) -> HostState:
    match event:
        case ChangeStarted():
            changes = {**host.changes, event.change: event.shown}
            host = replace(host, changes=changes, doing=event.shown.summary)
            return _attempted(host, event.change)
        case ChangeFinished():
            host = replace(host, first_failure=host.first_failure or event.failure)
            return _ended(host, event.change, "done" if event.ok else "failed" if event.failure else "")
        case ChangeFound():
            return _change_found(host, event)
        case ChangeUndone():
            unheard = host.unheard - {event.change}
            if event.ok:
                return _undone(replace(host, unheard=unheard), event.change)
            if event.failure is not None and event.failure.kind in NO_WAY_IN:
                unheard |= {event.change}
            return replace(host, not_back=host.not_back | {event.change}, unheard=unheard)


def _word_on(
    host: HostState, event: HostFinished | HostCommitted | HostReleased | HostNotUndone
) -> HostState:
    host = replace(host, not_undone=None)
    match event:
        case HostNotUndone():
            return replace(host, not_undone=event.failure, doing="")
        case HostFinished():
            back = event.outcome in ("rollback_pending", "rollback_failed")
            host = replace(host, finished=event, doing="", away="", awaits="")
            return replace(host, going_back=host.going_back or back)
        case HostCommitted():
            return replace(host, committed=True)
        case HostReleased():
            return replace(host, released=True)


def _no_longer(finished: HostFinished | None) -> HostFinished | None:
    """The word on a host that ended before it went back: until it has a new one, the way back is open."""
    return None if finished is None else finished.model_copy(update={"outcome": "rollback_pending"})


def _taken_up(host: HostState) -> HostState:
    """A host at the moment when its run goes on: what was done there stays, its end does not."""
    return replace(
        host,
        finished=None,
        pending=None,
        awaits="",
        connected=False,
        doing="",
        lost=False,
        lost_by_controller=False,
        first_failure=host.first_failure if host.going_back else None,
    )


def _attempted(host: HostState, change: str) -> HostState:
    step, attempt = step_of(change), int(change.split("/")[2])
    return replace(host, attempts={**host.attempts, step: max(attempt, host.attempts.get(step, 0))})


def _ended(host: HostState, change: str, ended: str) -> HostState:
    """Note how a change ended; one in doubt is among neither the done nor the failed."""
    done, failed = host.done - {change}, host.failed - {change}
    return replace(
        host,
        done=done | {change} if ended == "done" else done,
        failed=failed | {change} if ended == "failed" else failed,
    )


def _undone(host: HostState, change: str) -> HostState:
    return replace(_without(host, change), undone=host.undone | {change})


def _without(host: HostState, change: str) -> HostState:
    return replace(host, changes={id: shown for id, shown in host.changes.items() if id != change})


def _change_found(host: HostState, event: ChangeFound) -> HostState:
    host = _attempted(host, event.change)
    if event.state == "undone":
        return replace(_undone(host, event.change), going_back=True)
    if event.state == "absent":
        return _without(host, event.change)
    host = replace(host, changes={**host.changes, event.change: event.shown})
    if event.state == "undo_failed":
        return replace(host, going_back=True)
    return _ended(host, event.change, event.state)


def _step_finished(host: HostState, event: StepFinished) -> HostState:
    host = host.in_step(
        event.step,
        result=event.result,
        reason=event.reason,
        failure=event.failure,
        measured=event.measured,
        proven=event.proven,
    )
    if event.result in ("ok", "changed"):
        # What was in doubt was looked at: the step is as it should be. So a start that was cut short, and
        # failed by its own word, has started the job all the same.
        well = {
            id
            for id, shown in host.changes_of(event.step).items()
            if id not in host.failed or shown.job == "starts"
        }
        host = replace(host, done=host.done | well, failed=host.failed - well)
    return replace(host, first_failure=host.first_failure or event.failure)


def exit_code(state: RunState, *, detailed: bool = False) -> int:
    """The exit code of a run: 130 > 3 > 2 > 4 > 6 > 0 (70 and 1 never get this far).

    With `detailed`, a plan that found changes is 6 where it would be 0.
    """
    outcomes = {host.outcome or "not_started" for host in state.hosts.values()}
    if state.interrupted:
        return 130
    if state.halted:
        return 3
    bad = outcomes - GOOD
    if bad - {"unreachable", "not_started"}:
        return 2
    if bad:
        return 4 if "unreachable" in bad else 2
    return 6 if detailed and "pending" in outcomes else 0
