"""A session: one host spoken to for the time of a run, and the promises it keeps.

`open_session` picks the transport that the host names. A session is opened for a `Purpose`; nothing is
written on the host before `acquire`, and nothing at all where the purpose is a dry run. Everything
that fails on the way to the host, or is refused by it, is a `HostError` with its failure class; what a
function answered, its own refusal included, is a `Completed`.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from pydantic import Field, StringConstraints

from fleetfix.commands import Change, Completed, Ended, Execute, Json, Read, Risk, Value
from fleetfix.errors import Bug, Failure, HostError

if TYPE_CHECKING:
    from fleetfix.inventory import Host

Progress = Callable[[str, str], None]
"""Told a step id and one line of text while a call of that step runs."""

Stream = Literal["out", "err"]

Take = Callable[[Stream, bytes], Awaitable[None]]
"""Takes a piece of a command's output. The host sends no more than a few pieces ahead of it."""

Feed = Callable[[int, int], bytes]
"""Gives at most so many bytes of a command's input, from an offset on; none at its end. Never waits."""


RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_@=:,+][A-Za-z0-9._@=:,+-]{0,119}$")]
"""A run as hosts know it. It stands in commands that people copy: nothing in it is a shell's."""

HostTime = Annotated[float, Field(ge=0, lt=2.5e11, allow_inf_nan=False)]
"""Seconds since the epoch by the host's clock, before the year 9892."""


class Claim(Value):
    """A host's note that a run has unfinished business there; it survives reboots.

    `open` says in words what is open, one item a change; `since` is the host's time, ISO 8601, UTC. A
    session is told the claims of others behind which something is open, and its own run's always.
    """

    run: RunName
    operator: str
    controller: str
    since: str
    open: tuple[str, ...] = ()


class Lease(Value):
    """Who may write to the host now; a host tells only of one that counts. `expires` is in seconds since
    the epoch by the host's clock, and may be over: while who has it lives, it counts.

    `epoch` counts up at each acquisition on that host: an owner with an older one is refused.
    """

    run: RunName
    operator: str
    controller: str
    reason: str = ""
    since: str
    expires: HostTime
    epoch: int
    boot_id: str
    driver: str = ""
    at_work: bool = False
    """The session that has it lives, and its controller is at the other end."""


class HostInfo(Value):
    """What the host said of itself when the session was opened.

    `home` is where fleetfix keeps its records there; `durable` is False where a reboot makes them
    unknown. `disabled` is the text of the host's own kill switch, None where it is not set. `now` is
    the host's clock, in seconds since the epoch.
    """

    python: str
    uid: int
    user: str
    hostname: str
    boot_id: str
    machine_id: str
    now: HostTime
    home: str
    durable: bool = True
    disabled: str | None = None
    claims: tuple[Claim, ...] = ()
    lease: Lease | None = None
    sweep_due: bool = False
    """What was kept here for a while, or the records of old runs, may be due to go."""


PastState = Literal["begun", "done", "failed", "in_doubt", "undone", "undo_failed"]
"""begun: its lock is held, it runs now. done: every call answered well. failed: a call did not, the
rest was not called. in_doubt: it began, nothing runs, and nothing tells how it ended."""


class Past(Value):
    """One change of this run, as the host's own log tells it. `at` is when it began, host's clock."""

    id: str
    step: str
    summary: str
    risk: Risk
    state: PastState
    at: HostTime
    completed: Completed | None = None
    key: str = ""
    job: Literal["", "captures", "stops", "starts"] = ""
    secrets: tuple[str, ...] = ()
    """The names of those that its undo needs."""


class Waits(Value):
    """A call on the host that waits for the controller to do what it asks for; `token` names this one."""

    token: str
    asked: dict[str, Json]


class Purpose(Value):
    """What a session is opened for, and by whom.

    `driver` names the one place on the controller from which the run is driven, which lets one process
    at a time drive it: a newer session from there supersedes the older one at once. A session from
    anywhere else is refused while the older one is at work, unless it is told to `take_over`.
    """

    run: str
    playbook: str
    dry: bool
    operator: str
    controller: str
    reason: str = ""
    driver: str = ""
    take_over: bool = False


class Session(Protocol):
    """One host, spoken to. Calls may overlap; a change waits for the one before it.

    Where the connection is lost, a session tries to come back and to ask again, which ids make safe: for
    a while where a call waits for it, and then each pending call raises `HostError(unreachable)`; for as
    long as it is open where none does. A host that has lost its records of the run meanwhile refuses
    what would write: nothing there tells any more what was done (in_doubt).
    """

    @property
    def info(self) -> HostInfo:
        """What the host said of itself; `acquire` brings it up to date."""
        ...

    async def read(self, step: str, reads: Sequence[Read]) -> tuple[Completed, ...]:
        """Answer reads, in their order, in one round trip; equal reads are asked once."""
        ...

    async def acquire(self) -> None:
        """Take lease and claim, before the first write. Again it is a no-op.

        Raises HostError: lease_held (by another run, or by another controller at work on this one),
        unfinished, disabled.
        """
        ...

    async def await_lease(self, seconds: float) -> None:
        """Wait until no other run has the lease, at most so many seconds; nothing is taken or written.

        `info` is up to date then.
        """
        ...

    async def change(self, id: str, step: str, change: Change) -> Completed:
        """Make a change at most once. The id is `RUN/STEP/ATTEMPT/N`.

        Asked again it answers as recorded, waits for it where it still runs, or answers `in_doubt`.
        Raises HostError: disabled, lease_held (superseded), bug (the id was used for another change).
        """
        ...

    async def undo(self, id: str) -> Completed:
        """Replay the undo of a change from the host's own log; a second time it answers as recorded."""
        ...

    async def waiting(self, id: str) -> Waits | None:
        """What a call of this change, or of its undo, waits for the controller to do.

        None where none waits. A change that is asked for at the same time is waited for.
        """
        ...

    async def tell(self, id: str, token: str, word: Json) -> None:
        """Say to a call that waits how what it waits for ended; None: that it still goes on.

        Raises HostError: lease_held.
        """
        ...

    async def past(self) -> tuple[Past, ...]:
        """Tell this run's changes on this host, oldest first."""
        ...

    async def lacking(self) -> tuple[str, ...]:
        """Why this run cannot be taken back here any more: one line for each change of which something that
        undo needs is gone. Nothing is changed."""
        ...

    async def note(self, name: str, value: Json) -> None:
        """Keep a value beside this run's records on the host, for whoever resumes it."""
        ...

    async def recall(self, name: str) -> Json:
        """What `note` kept under this name for this run, or None."""
        ...

    async def end(self, outcome: str, *, keep_claim: bool, commit: bool, anchor: str = "") -> None:
        """Record how the run ended here and let go of the lease, and of the claim unless it is kept.

        With `commit` the commit calls of every change that is done are made first. `anchor` is the head of
        the controller's journal, in hexadecimal; the host's ledger keeps it beside the end.
        """
        ...

    async def commit(self) -> None:
        """Make lasting what this run did: drop all that undo would need, holds kept for a while included,
        and end the claim. Nothing of the run is undone from then on: `recall("committed")` tells.

        Raises HostError: unfinished (in doubt, or a job is stopped), lease_held.
        """
        ...

    async def release(self) -> None:
        """Give up claim and lease of this run, and nothing else. Raises HostError: lease_held."""
        ...

    async def execute(self, command: Execute, take: Take, feed: Feed | None = None) -> Ended:
        """Run a command of the operator's, its output as it comes. It is never asked for twice.

        No lease or claim is taken. When the session is lost or closed, the host ends it. Raises HostError:
        unreachable (lost while it ran), disabled, blocked (a dry session).
        """
        ...

    async def cancel(self) -> tuple[str, ...]:
        """End the whole process tree of every running call; name the pids that cannot end."""
        ...

    async def close(self) -> None:
        """Hang up. What runs on the host is left to the host: reads end, a change finishes."""
        ...


@dataclass(frozen=True)
class Timers:
    """Seconds that both ends keep to; the same for every host of a run."""

    ping: float = 15.0
    silence: float = 45.0
    """How long the controller bears to hear nothing before it holds the connection for lost."""
    orphaned: float = 60.0
    """How long the host bears to hear nothing before it ends itself."""
    reconnect_within: float = 120.0
    """How long a lost connection is tried again for somebody who waits for an answer."""


CONNECT_TIMEOUT = 15.0
"""Seconds until a host that does not answer is unreachable, where nothing says otherwise."""
LEFT_OVER = 0.3


@dataclass(frozen=True)
class Opening:
    """How a session is opened, beyond host and purpose.

    `modules` are sources of host modules that are not fleetfix's own, by module name. `host_keys` is
    "ask-nothing" strict, or accepts keys of hosts never seen. `root` is put before each path that the
    runner itself keeps records at; only tests set it.
    """

    connect_timeout: float = CONNECT_TIMEOUT
    usual_timeout: bool = False
    """Nobody has asked for that connect timeout: the ssh configuration may say another."""
    progress: Progress | None = None
    timers: Timers = field(default_factory=Timers)
    modules: Mapping[str, str] = field(default_factory=dict)
    host_keys: Literal["strict", "accept_new"] | None = None
    root: str = ""
    watch: Watch | None = None
    secrets: Mapping[str, str] | None = field(default=None, repr=False)
    """Values by name, for the placeholders in arguments; they are sent once, and kept in memory there.
    None: those that this process holds for the host."""

    @property
    def time_to_connect(self) -> float:
        """The connect timeout, less what a transport needs to say what it has waited for: after that,
        whoever waits for the runner gives up, and can only say for how long."""
        timeout = self.connect_timeout
        return timeout - min(max(timeout / 25, LEFT_OVER), timeout / 3)


Patience = Literal["usual", "more", "none"]
"""usual: as long as the session's own time says. more: on, and its own time begins anew after that.
none: no longer at all."""


class Watch(Protocol):
    """Hears when a session's connection drops and when it is back, and says how long it is tried again."""

    def dropped(self, failure: Failure) -> None: ...

    def returned(self, info: HostInfo, seconds: float, *, restarted: bool) -> None:
        """The host answers again, after so long; `restarted` where it has booted since: what was under way
        there has ended in between."""
        ...

    def patience(self) -> Patience: ...


Opener = Callable[["Host", Purpose, Opening], Awaitable[Session]]

_OPENERS = {
    "asyncssh": "fleetfix.transports.asyncssh_wire",
    "fabric": "fleetfix.transports.fabric_wire",
    "local": "fleetfix.transports.local",
    "scripted": "fleetfix.transports.scripted",
}
"""Where each transport's `open_session(host, purpose, opening)` is. Imported only where a host needs it."""


async def open_session(
    host: Host,
    purpose: Purpose,
    *,
    connect_timeout: float | None = None,
    progress: Progress | None = None,
    timers: Timers | None = None,
    modules: Mapping[str, str] | None = None,
    host_keys: Literal["strict", "accept_new"] | None = None,
    root: str = "",
    watch: Watch | None = None,
) -> Session:
    """Open a session on a host over the transport it names.

    Raises HostError: unreachable, auth, host_key, no_python, sudo.
    """
    asked = connect_timeout or host.connect_timeout
    opening = Opening(
        connect_timeout=asked or CONNECT_TIMEOUT,
        usual_timeout=asked is None,
        progress=progress,
        timers=timers or Timers(),
        modules=modules or {},
        host_keys=host_keys,
        root=root,
        watch=watch,
    )
    name = _OPENERS.get(host.transport)
    if name is None:
        raise Bug(f"no transport is called {host.transport!r}")
    opener: Opener = importlib.import_module(name).open_session
    return await opener(host, purpose, opening)


def at_work_elsewhere(info: HostInfo, purpose: Purpose) -> Failure | None:
    """Why this session may not write: another controller is at work on this very run here."""
    lease = info.lease
    if lease is None or lease.run != purpose.run or not lease.at_work or purpose.take_over:
        return None
    if (lease.controller, lease.driver) == (purpose.controller, purpose.driver):
        return None
    return held_by(lease, f"fleetfix stop {lease.run} there; --take-over takes the run away from it")


def held_by(lease: Lease, hint: str = "wait until it has ended, or say --lock-wait 10m") -> Failure:
    """Who writes to the host, since when and why."""
    who = (
        f"run {lease.run} of {lease.operator} on {lease.controller} writes to this host since {lease.since}"
    )
    why = f" ({lease.reason})" if lease.reason else ""
    return Failure(kind="lease_held", message=who + why, hint=hint)


def host_error(kind: str, message: str, hint: str = "") -> HostError:
    """Make a HostError from a failure class that came over the wire; an unknown class is a bug."""
    try:
        failure = Failure.model_validate({"kind": kind, "message": message, "hint": hint})
    except ValueError:
        failure = Failure(
            kind="bug", message=f"the host answered with a failure of class {kind!r}: {message}"
        )
    return HostError(failure)


def unfinished_hint(run: str, host: str = "") -> str:
    """The commands that settle what a run left open on a host: go on, go back, or give it up."""
    return f"fleetfix resume, rollback or release {run}" + (f" --hosts {host}" if host else "")
