"""What a run looks like now, folded from its events; equal histories give equal states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import assert_never

from fleetfix.action import Measurement
from fleetfix.errors import Failure
from fleetfix.events import (
    GOOD,
    BreakerTripped,
    ChangeFinished,
    ChangeShown,
    ChangeStarted,
    ChangeUndone,
    CohortFormed,
    CommandEnded,
    EvidenceKept,
    HostConnected,
    HostFinished,
    HostLost,
    HostPlanned,
    HostSaid,
    HostStarted,
    NetworkLost,
    NetworkReturned,
    Outcome,
    Record,
    RollbackFinished,
    RollbackStarted,
    RunFinished,
    RunHalted,
    RunInterrupted,
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
    durable: bool = True
    boot_id: str = ""
    machine: str = ""
    """Which machine it is, by its own word; two names may mean one."""
    pending: bool | None = None
    """None until it is planned."""
    started: bool = False
    step: str = ""
    """The step it is in, or was in last."""
    doing: str = ""
    steps: dict[str, StepState] = field(default_factory=dict)
    changes: dict[str, ChangeShown] = field(default_factory=dict)
    """Every change begun and not undone, by id, oldest first."""
    failed: frozenset[str] = frozenset()
    """The ids of those that did not end well."""
    rolling_back: bool = False
    first_failure: Failure | None = None
    command: CommandEnded | None = None
    """How a command of `exec` ended."""
    finished: HostFinished | None = None
    evidence: tuple[EvidenceKept, ...] = ()
    lost_by_controller: bool = False
    """Its session went with the controller's network: that counts against nobody."""

    @property
    def outcome(self) -> Outcome | None:
        return self.finished.outcome if self.finished else None

    @property
    def job_stopped(self) -> bool:
        """Whether the last thing done to the host's training that stands is to have stopped it."""
        stands = [
            shown.job for id, shown in self.changes.items() if shown.job and not self._vain(id, shown)
        ]
        return bool(stands) and stands[-1] == "stops"

    def _vain(self, id: str, shown: ChangeShown) -> bool:
        """A start that failed started nothing; a stop that failed may have stopped something."""
        return shown.job == "starts" and id in self.failed

    def in_step(self, step: str, **changes: object) -> HostState:
        state = replace(self.steps.get(step, StepState()), **changes)  # type: ignore[arg-type]
        return replace(self, steps={**self.steps, step: state})


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
    halted: str | None = None
    tripped: str | None = None
    """Why the breaker tripped in this run; it is halted then, too."""
    interrupted: int = 0
    exit: int | None = None
    rolled_back_exit: int | None = None
    """How a later `fleetfix rollback` of this run ended."""

    def count(self, *outcomes: Outcome) -> int:
        return sum(1 for host in self.hosts.values() if host.outcome in outcomes)


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
        case WaveStarted():
            return replace(state, waves=(*state.waves, event))
        case SoakStarted():
            return state
        case NetworkLost() | NetworkReturned():
            return replace(state, paused=isinstance(event, NetworkLost))
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
            return replace(state, rolled_back_exit=event.exit)
        case _:
            host = _host_after(state.hosts.get(event.host, HostState(event.host)), event)
            # Copying the mapping for each event would make a run of n hosts cost n squared: the state
            # is handed on, never kept, so its mapping is.
            state.hosts[event.host] = host
            return state


HostEvent = (
    HostConnected
    | HostLost
    | StepPlanned
    | HostPlanned
    | HostStarted
    | StepStarted
    | EvidenceKept
    | StepWaited
    | ChangeStarted
    | ChangeFinished
    | StepFinished
    | HostSaid
    | CommandEnded
    | RollbackStarted
    | ChangeUndone
    | RollbackFinished
    | HostFinished
)


def _host_after(host: HostState, event: HostEvent) -> HostState:
    match event:
        case HostConnected():
            return replace(
                host,
                connected=True,
                durable=event.durable,
                boot_id=event.boot_id,
                machine=event.machine,
            )
        case HostLost():
            return replace(
                host,
                connected=False,
                first_failure=host.first_failure or event.failure,
                lost_by_controller=event.by_controller,
            )
        case StepPlanned():
            return host.in_step(event.step, planned=event)
        case HostPlanned():
            return replace(host, pending=event.pending)
        case HostStarted():
            return replace(host, started=True)
        case StepStarted():
            return replace(host, step=event.step, doing="")
        case EvidenceKept():
            return replace(host, evidence=(*host.evidence, event))
        case StepWaited() | HostSaid():
            return replace(host, doing=event.reason if isinstance(event, StepWaited) else event.text)
        case ChangeStarted():
            changes = {**host.changes, event.change: event.shown}
            return replace(host, changes=changes, doing=event.shown.summary)
        case ChangeFinished():
            failed = host.failed if event.ok else host.failed | {event.change}
            return replace(host, failed=failed, first_failure=host.first_failure or event.failure)
        case StepFinished():
            return _step_finished(host, event)
        case CommandEnded():
            return replace(host, command=event, first_failure=host.first_failure or event.failure)
        case RollbackStarted() | RollbackFinished():
            back = isinstance(event, RollbackStarted)
            return replace(host, rolling_back=back, doing="going back" if back else host.doing)
        case ChangeUndone():
            left = {id: shown for id, shown in host.changes.items() if id != event.change or not event.ok}
            return replace(host, changes=left)
        case HostFinished():
            return replace(host, finished=event, doing="")
    assert_never(event)


def _step_finished(host: HostState, event: StepFinished) -> HostState:
    host = host.in_step(
        event.step,
        result=event.result,
        reason=event.reason,
        failure=event.failure,
        measured=event.measured,
        proven=event.proven,
    )
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
