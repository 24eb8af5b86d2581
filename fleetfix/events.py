"""Every event of a run: what happened, in the past tense, appended and never changed.

Views, the journal, resume and the exit code are readers of this one stream. A kind and its fields
are frozen once released: fields are added with defaults, never renamed. `VERSION` grows when a reader
of an older version would misread a record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, TypeAdapter

from fleetfix.action import Measurement
from fleetfix.commands import Json, Risk, Value
from fleetfix.errors import Failure
from fleetfix.policy import Policy

if TYPE_CHECKING:
    from fleetfix.redaction import Mask

VERSION = 1

Outcome = Literal[
    "ok",  # nothing needed doing, and every check passed
    "changed",  # mended, verified, proven
    "pending",  # a dry run: something would be done
    "skipped",  # the playbook has nothing for this host
    "blocked",  # the host says why nothing may be done; nothing was changed
    "busy",  # the host may not be disturbed now; nothing was changed
    "unfinished",  # another run left work open here; nothing was changed
    "unreachable",  # no connection before anything was changed
    "failed",  # it went wrong, and was left where it stopped
    "unproven",  # mended and sound, but its speed is not proven
    "in_doubt",  # nothing tells whether a change was made
    "rolled_back",  # it went wrong, and every change was undone
    "rollback_failed",  # it went wrong, and so did going back
    "rollback_pending",  # it went wrong, and the host was lost before going back
    "cancelled",  # ended because the operator asked for it
    "not_started",  # never its turn
]

GOOD: frozenset[Outcome] = frozenset({"ok", "changed", "pending", "skipped"})
StepResult = Literal["ok", "changed", "skipped", "failed", "unknown", "blocked"]

FoundState = Literal["begun", "done", "failed", "in_doubt", "undone", "undo_failed", "absent"]
"""What a host knows of a change when its run is taken up again; absent: it was never begun there."""


def one_machine(machine_id: str, boot_id: str) -> str:
    """Name a machine while it runs, whatever its names: clones share a machine id, but no boot. Empty
    where it does not tell both."""
    return f"{machine_id}/{boot_id}" if machine_id and boot_id else ""


class ChangeShown(Value):
    """A change as it is shown and recorded: all of it but the calls."""

    key: str
    parts: tuple[str, ...] = ()
    summary: str
    before: str = ""
    after: str = ""
    risk: Risk
    job: Literal["", "captures", "stops", "starts"] = ""
    fetch_bytes: int = 0
    checkpoint_ages: tuple[float, ...] = ()
    """Seconds since the last checkpoint of each job that it stops, where that is known."""
    secrets: tuple[str, ...] = ()
    """The names of those that its undo needs."""

    def announces(self) -> frozenset[str]:
        """The items that a plan holding this change has announced."""
        return frozenset({self.key, *(f"{self.key}/{part}" for part in self.parts)})


class RunStarted(Value):
    kind: Literal["run_started"] = "run_started"
    playbook: str
    source: str
    digest: str
    inventory: str
    hosts: tuple[str, ...]
    steps: tuple[tuple[str, str], ...]
    """(id, name) of each step, in order."""
    settings: dict[str, Json] = Field(default_factory=dict)
    policy: Policy
    operator: str
    controller: str
    version: str
    dry: bool = False
    reason: str = ""
    only: dict[str, str] = Field(default_factory=dict)
    """The hosts of the run, folded, that a step counts on, by step id, where it is not all of them."""
    plan: str = ""
    """The dry run whose saved plan this run applies."""
    strata: dict[str, str] = Field(default_factory=dict)
    """Host by host, the values by which the policy divides the fleet: `sku=h100`."""
    last: dict[str, str] = Field(default_factory=dict)
    """Hosts that go after all others, each with the reason."""
    controller_machine: str = ""
    """The controller's own machine, as `machine` names one; empty where it does not know."""
    command: str = ""
    """What `exec` runs, in words and without secrets; empty for a playbook."""
    text: str = ""
    """The playbook itself, so that the run goes on with what it began with. Empty in older journals."""
    secrets: tuple[str, ...] = ()
    """The names of those that the playbook uses: to go on takes them again."""


class RunResumed(Value):
    """The run goes on: its hosts that had not ended well, or not at all, are taken up again."""

    kind: Literal["run_resumed"] = "run_resumed"
    operator: str
    controller: str
    hosts: tuple[str, ...]
    reason: str = ""


class HostConnected(Value):
    kind: Literal["host_connected"] = "host_connected"
    host: str
    user: str
    python: str
    boot_id: str = ""
    machine_id: str = ""
    durable: bool = True

    @property
    def machine(self) -> str:
        return one_machine(self.machine_id, self.boot_id)


class ConnectionDropped(Value):
    """The connection to a host broke, or fell silent; it is tried again."""

    kind: Literal["connection_dropped"] = "connection_dropped"
    host: str
    reason: str


class ConnectionReturned(Value):
    """The host answers again, and what was asked of it is asked again: nothing is done a second time."""

    kind: Literal["connection_returned"] = "connection_returned"
    host: str
    seconds: float
    """How long it was away."""
    boot_id: str = ""
    machine_id: str = ""
    restarted: bool = False
    """It has booted since: what was under way there has ended somewhere, and is looked at again."""

    @property
    def machine(self) -> str:
        return one_machine(self.machine_id, self.boot_id)


class HostLost(Value):
    kind: Literal["host_lost"] = "host_lost"
    host: str
    failure: Failure
    by_controller: bool = False
    """It was the controller's network that was lost, and not this host."""


class LeaseAwaited(Value):
    """Another run has the host's lease; this one waits until that has ended, and plans the host then."""

    kind: Literal["lease_awaited"] = "lease_awaited"
    host: str
    run: str
    operator: str
    controller: str
    since: str
    """When the other run took the host, by the host's clock, ISO 8601."""
    reason: str = ""
    seconds: float = 0.0
    """How long it is waited at most."""


class StepPlanned(Value):
    """What a step would do on a host, before anything changed. A check has a `verdict` or none."""

    kind: Literal["step_planned"] = "step_planned"
    host: str
    step: str
    pending: bool
    changes: tuple[ChangeShown, ...] = ()
    blocked: str | None = None
    notes: tuple[str, ...] = ()
    verdict: str | None = None
    reason: str = ""
    own_check: bool = False
    """A program of the author's own was asked what is to be done: nothing proves that it only looks."""
    by_word: bool = False
    """Nothing will verify what the changes do; they are made by the author's word."""


class HostPlanned(Value):
    """All steps of a host are planned: whether anything is pending there."""

    kind: Literal["host_planned"] = "host_planned"
    host: str
    pending: bool


class CohortFormed(Value):
    """Hosts that go together: one unit of canary, batch and rollback. Recorded before the first wave."""

    kind: Literal["cohort_formed"] = "cohort_formed"
    name: str
    hosts: tuple[str, ...]
    why: str = ""


class WaveStarted(Value):
    kind: Literal["wave_started"] = "wave_started"
    name: str
    """`canary`, or `batch 2`."""
    hosts: tuple[str, ...]


class HostStarted(Value):
    """The host's turn began: from here on the run has touched it."""

    kind: Literal["host_started"] = "host_started"
    host: str


class StepStarted(Value):
    kind: Literal["step_started"] = "step_started"
    host: str
    step: str
    attempt: int = 1


class EvidenceFile(Value):
    """One file of evidence on the controller."""

    name: str
    bytes: int
    sha256: str


class EvidenceKept(Value):
    """What a host said of itself is kept on the controller, durably, before the step goes on."""

    kind: Literal["evidence_kept"] = "evidence_kept"
    host: str
    step: str
    folder: str
    files: tuple[EvidenceFile, ...] = ()
    cut: tuple[str, ...] = ()
    """Items of which only a part is kept."""
    missing: tuple[str, ...] = ()
    """Items that should be there and gave no answer, each with its reason."""
    lacking: tuple[str, ...] = ()
    """Items that this host does not have, each with its reason."""


class StepWaited(Value):
    """A check did not hold yet and is asked again within its time."""

    kind: Literal["step_waited"] = "step_waited"
    host: str
    step: str
    reason: str


class ChangeStarted(Value):
    """Durable in the journal before the change is sent."""

    kind: Literal["change_started"] = "change_started"
    host: str
    step: str
    change: str
    """`RUN/STEP/ATTEMPT/N`, the id on the host too."""
    shown: ChangeShown


class ChangeFinished(Value):
    kind: Literal["change_finished"] = "change_finished"
    host: str
    step: str
    change: str
    ok: bool
    failure: Failure | None = None
    exit: int | None = None
    stdout: str = ""
    stderr: str = ""
    cut: bool = False
    seconds: float = 0.0


class ChangeFound(Value):
    """What the host's own log says of a change, where it says more than this journal, or otherwise."""

    kind: Literal["change_found"] = "change_found"
    host: str
    step: str
    change: str
    state: FoundState
    shown: ChangeShown


class StepFinished(Value):
    kind: Literal["step_finished"] = "step_finished"
    host: str
    step: str
    result: StepResult
    reason: str = ""
    failure: Failure | None = None
    measured: Measurement | None = None
    proven: bool = False
    """A measurement that passed a judgement: it becomes the job's baseline."""
    seconds: float = 0.0


class HostSaid(Value):
    """A line from a host while it works, or something found and left alone."""

    kind: Literal["host_said"] = "host_said"
    host: str
    step: str
    text: str


class CommandEnded(Value):
    """A command of `exec` has ended. What it printed is nobody's business but the operator's: only its
    length is kept."""

    kind: Literal["command_ended"] = "command_ended"
    host: str
    exit: int | None = None
    """Negative for a signal; None where `failure` says why there is none."""
    failure: Failure | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    seconds: float = 0.0


class RollbackStarted(Value):
    kind: Literal["rollback_started"] = "rollback_started"
    host: str
    reason: str


class ChangeUndone(Value):
    kind: Literal["change_undone"] = "change_undone"
    host: str
    step: str
    change: str
    summary: str
    ok: bool
    failure: Failure | None = None


class RollbackFinished(Value):
    kind: Literal["rollback_finished"] = "rollback_finished"
    host: str
    result: Literal["rolled_back", "rollback_failed", "rollback_pending"]


class HostFinished(Value):
    """The one final word on a host in this run."""

    kind: Literal["host_finished"] = "host_finished"
    host: str
    outcome: Outcome
    reason: str = ""
    failure: Failure | None = None
    """The first error, kept through any rollback."""
    step: str = ""
    touched: bool = False
    job_stopped: bool = False
    """A job was stopped by this run and is not running again."""
    open: tuple[str, ...] = ()
    """What is left open on the host: it refuses other runs until resumed, rolled back or released."""


class RunHalted(Value):
    """No further host is started."""

    kind: Literal["run_halted"] = "run_halted"
    reason: str


class BreakerTripped(Value):
    """Something went wrong that other hosts would suffer too: no run may change hosts of this inventory
    until somebody has looked and reset the breaker. The run itself is halted by it."""

    kind: Literal["breaker_tripped"] = "breaker_tripped"
    reason: str


class SoakStarted(Value):
    """The hosts of the wave before have ended, and are left alone for a while before the next begins."""

    kind: Literal["soak_started"] = "soak_started"
    wave: str
    """The wave that soaks."""
    seconds: float


class NetworkLost(Value):
    """So many of the open sessions dropped at once that it is the controller's network. Nothing is begun
    until they are back."""

    kind: Literal["network_lost"] = "network_lost"
    dropped: int
    open: int


class NetworkReturned(Value):
    """Enough sessions are back: the run goes on. `seconds` is how long it was paused."""

    kind: Literal["network_returned"] = "network_returned"
    seconds: float


class RunInterrupted(Value):
    kind: Literal["run_interrupted"] = "run_interrupted"
    signal: str
    times: int


class RunFinished(Value):
    kind: Literal["run_finished"] = "run_finished"
    exit: int


class HostCommitted(Value):
    """What only undo needed was dropped on the host: what the run did there stays."""

    kind: Literal["host_committed"] = "host_committed"
    host: str
    operator: str
    controller: str
    reason: str = ""


class HostReleased(Value):
    """The run gave the host up without undoing: other runs may go there again."""

    kind: Literal["host_released"] = "host_released"
    host: str
    operator: str
    controller: str
    reason: str = ""
    left: tuple[str, ...] = ()
    """What stays there as the run left it."""


class HostNotUndone(Value):
    """A later rollback has undone nothing on a host: not all can be undone. Its outcome stays."""

    kind: Literal["host_not_undone"] = "host_not_undone"
    host: str
    failure: Failure


class RunRolledBack(Value):
    """`fleetfix rollback` went over hosts of the run; `exit` is that command's, not the run's."""

    kind: Literal["run_rolled_back"] = "run_rolled_back"
    exit: int


Event = Annotated[
    RunStarted
    | RunResumed
    | HostConnected
    | ConnectionDropped
    | ConnectionReturned
    | HostLost
    | LeaseAwaited
    | StepPlanned
    | HostPlanned
    | CohortFormed
    | WaveStarted
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
    | RunHalted
    | BreakerTripped
    | SoakStarted
    | NetworkLost
    | NetworkReturned
    | RunInterrupted
    | RunFinished
    | RunRolledBack,
    Field(discriminator="kind"),
]

EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class Record(Value):
    """An event with its place in the run. `at` is the controller's time, seconds since the epoch."""

    v: int = VERSION
    run: str
    seq: int
    at: float
    event: Event


_NAMES = frozenset(
    {
        *(
            "kind",
            "host",
            "hosts",
            "step",
            "steps",
            "only",
            "change",
            "key",
            "parts",
            "risk",
            "job",
            "state",
        ),
        *(
            "outcome",
            "result",
            "run",
            "plan",
            "digest",
            "boot_id",
            "machine_id",
            "controller_machine",
            "name",
        ),
        *("strata", "last", "policy", "scope", "measured", "sha256", "inventory", "secrets", "wave"),
    }
)
"""Fields by which things are known again, chosen here or by the playbook: no secret may stand in them."""

_AS_GIVEN = frozenset({"text", "settings", "source"})
"""What a run began with, and must go on with: where a secret stands in it the run does not begin."""


def without_secrets(event: Event, mask: Mask) -> Event:
    """The event with every secret masked in what it tells."""
    if not mask.finds(event.model_dump_json()):
        return event
    spared = _NAMES | _AS_GIVEN if isinstance(event, RunStarted) else _NAMES
    return EVENT.validate_python(_masked(event.model_dump(mode="json"), mask, spared))


def _masked(value: Json, mask: Mask, spared: frozenset[str]) -> Json:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        return {key: item if key in spared else _masked(item, mask, spared) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, mask, spared) for item in value]
    return value
