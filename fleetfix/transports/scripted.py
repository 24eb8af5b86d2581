"""Hosts that exist only in a test: rules, a world that changes, a log as a real host keeps it, faults.

    fleet = Fleet({"gpu01": ScriptedHost({"job": "running"})})
    host = fleet["gpu01"]
    host.on("wheels.audit", {"kept": []})                        # a value …
    host.on("procs.stop", lambda args, world: world.update(job=None))   # … or what happens
    with fleet:                                                  # Host(transport="scripted") reaches it
        session = await open_session(Host(name="gpu01", transport="scripted"), purpose)

The log, the claim and the lease live in the `ScriptedHost`, so they outlast a session as they do on a
real host. Ids, undo, lease and claim mean what they mean there: the contract suite runs against both.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fleetfix.commands import Call, Change, Completed, Execute, Json
from fleetfix.errors import Failure, FailureKind, HostError
from fleetfix.session import (
    Claim,
    Lease,
    Opening,
    PastState,
    Purpose,
    Session,
    Stream,
    Take,
)
from fleetfix.transports.scripted_session import ScriptedSession

if TYPE_CHECKING:
    from fleetfix.inventory import Host

T = TypeVar("T")

World = dict[str, Any]
Rule = Json | Callable[[dict[str, Json], World], Any]
"""A value, a Completed, a Failure, or a function of (args, world), async or not, that gives one of them."""

Program = Callable[[Execute, bytes, Take], Awaitable[int]]
"""What a command does: of (command, all its input, where its output goes), its exit code, negative for a
signal."""

Way = Literal["read", "do", "undo", "commit"]


@dataclass(frozen=True)
class Executed:
    """One function that ran: for which change (None for reads), and in which way."""

    way: Way
    function: str
    args: Mapping[str, Json]
    step: str
    id: str | None = None


@dataclass
class Entry:
    """One change in the host's log."""

    id: str
    step: str
    change: Change
    at: float
    state: PastState = "begun"
    completed: Completed | None = None
    undone: Completed | None = None
    task: asyncio.Task[Completed] | None = None
    """What makes it, or undoes it, now. It is the host's: a session that is lost leaves it."""
    ended: bool = False
    """It is being ended, as somebody asked."""

    committed: bool = False

    @property
    def running(self) -> asyncio.Task[Completed] | None:
        """What makes or undoes it, if it still does."""
        return self.task if self.task is not None and not self.task.done() else None


@dataclass
class Loss:
    """The connection is lost around the Nth change that the host is asked for."""

    when: Literal["before", "during", "after"]
    change: int
    calls: int
    back: bool


class ScriptedHost:
    """One host: its world, its rules, its log, its faults."""

    def __init__(self, world: World | None = None, *, rules: Mapping[str, Rule] | None = None) -> None:
        self.world: World = {} if world is None else world
        self.rules: dict[str, Rule] = dict(rules or {})
        self.program: Program | None = None
        self.commands: list[Execute] = []
        """The commands of an operator's that ran here, in order."""
        self.executed: list[Executed] = []
        self.log: dict[str, Entry] = {}
        self.notes: dict[str, Json] = {}
        self.lease: Lease | None = None
        self.ended: list[tuple[str, str]] = []
        self.anchors: list[tuple[str, str]] = []
        """What its ledger keeps of the controller's journal, by run, as runs end here."""
        """(run, outcome) of each `end`."""
        self.said: list[tuple[str, str]] = []
        self.gone: dict[str, str] = {}
        """What the undo of a step needs and is not there any more, by step id."""
        self.disabled: str | None = None
        self.clock = 1_760_000_000.0
        """The host's clock; moves only when a test moves it."""
        self.machine = ""
        """Its machine id, where a test gives it one that is not its name's."""
        self.boots = 1
        self.opened = 0
        self.changes_asked = 0
        self._refusal: Failure | None = None
        self._losses: list[Loss] = []
        self._gates: dict[str, asyncio.Event] = {}
        self._delays: dict[str, float] = {}
        self._sessions: list[ScriptedSession] = []
        self._epoch = 0
        self._claimed: dict[str, tuple[Purpose, str, tuple[str, ...]]] = {}
        self.turn = asyncio.Lock()
        self.line = asyncio.Event()
        """Set while the line to the host is whole."""
        self.line.set()

    # -- rules ------------------------------------------------------------------------------------

    def on(self, function: str, rule: Rule) -> ScriptedHost:
        """Say what a function answers or does. Later rules replace earlier ones."""
        self.rules[function] = rule
        return self

    def executes(self, *output: tuple[Stream, bytes], exit: int = 0) -> ScriptedHost:
        """Say what every command of an operator's prints, and how it ends."""

        async def program(command: Execute, stdin: bytes, take: Take) -> int:
            del command, stdin
            for stream, data in output:
                await take(stream, data)
            return exit

        self.program = program
        return self

    def runs(self, way: Way | None = None) -> list[str]:
        """The functions that ran, in order; of one way only where it is given."""
        return [one.function for one in self.executed if way is None or one.way == way]

    def writes(self, id: str | None = None) -> int:
        """How many times a do call ran, for one change or for all."""
        return sum(1 for one in self.executed if one.way == "do" and id in (None, one.id))

    @property
    def writes_by_id(self) -> Counter[str]:
        """How many do calls ran for each change."""
        return Counter(one.id for one in self.executed if one.way == "do" and one.id is not None)

    # -- faults -----------------------------------------------------------------------------------

    def refuse(
        self, kind: FailureKind = "unreachable", message: str = "connection refused"
    ) -> ScriptedHost:
        """Refuse every connection from now on, until `accept`."""
        self._refusal = Failure(kind=kind, message=message)
        return self

    def accept(self) -> ScriptedHost:
        """Take connections again."""
        self._refusal = None
        return self

    def lose(
        self,
        *,
        before: int | None = None,
        during: int | None = None,
        after: int | None = None,
        calls: int = 1,
        back: bool = True,
    ) -> ScriptedHost:
        """Lose the connection around the Nth change from the start, counted from 1.

        before: nothing of it began. during: it was killed after `calls` do calls, so it is in doubt.
        after: it was done and recorded, and the answer was lost. Without `back` the host is gone.
        """
        for when, change in (("before", before), ("during", during), ("after", after)):
            if change is not None:
                self._losses.append(Loss(when, change, calls, back))  # type: ignore[arg-type]
        return self

    def cut(self) -> None:
        """Cut the line: sessions wait, and try to come back, until `splice` or until they are lost."""
        self.line.clear()
        for session in list(self._sessions):
            session.cut()

    def splice(self) -> None:
        """Put the line together again: sessions are back, and what waited goes on."""
        self.line.set()
        for session in list(self._sessions):
            session.splice()

    def vanish(self, kind: FailureKind = "unreachable", message: str = "no route to host") -> None:
        """Lose every open session now and take no connection until `accept`; `kind` says why not."""
        self.refuse(kind, message)
        self.drop(kind)

    def drop(self, kind: FailureKind = "unreachable") -> None:
        """Lose every open session now; new ones are taken."""
        for session in list(self._sessions):
            session.lose(kind)

    def reboot(self) -> None:
        """Drop the sessions and come back with another boot id; what ran is in doubt."""
        self.boots += 1
        self.drop()
        for entry in self.log.values():
            if entry.running is not None:
                entry.running.cancel()
            if entry.state == "begun":
                entry.state = "in_doubt"

    def late(self, function: str, seconds: float) -> ScriptedHost:
        """Answer a function only after that long, by the event loop's clock."""
        self._delays[function] = seconds
        return self

    def gate(self, function: str) -> asyncio.Event:
        """Hold every call of a function until the returned event is set; never set, it never answers."""
        return self._gates.setdefault(function, asyncio.Event())

    def garbage(self, function: str) -> ScriptedHost:
        """Answer a function with what no host module would."""
        return self.on(function, {"\x1b[31m": ["\u0000", {"unexpected": 1e308}]})

    # -- what a session needs -----------------------------------------------------------------------

    def open(self, name: str, purpose: Purpose, opening: Opening) -> ScriptedSession:
        """Take a connection, or refuse it as the fault says."""
        if self._refusal is not None:
            raise HostError(self._refusal)
        if not self.line.is_set():
            raise HostError(Failure(kind="unreachable", message=f"{name}: no route to host"))
        self.opened += 1
        session = ScriptedSession(self, name, purpose, opening)
        self._sessions.append(session)
        return session

    def forget(self, session: ScriptedSession) -> None:
        """Let go of a session that was closed or lost."""
        if session in self._sessions:
            self._sessions.remove(session)

    def loss(self, when: str) -> Loss | None:
        """The loss that is due at this change, once."""
        for loss in self._losses:
            if loss.when == when and loss.change == self.changes_asked:
                self._losses.remove(loss)
                return loss
        return None

    def now(self) -> str:
        """The host's clock as ISO 8601."""
        return datetime.fromtimestamp(self.clock, timezone.utc).isoformat()

    def claim(self, purpose: Purpose, open_: Sequence[str] = ()) -> None:
        """Write down that a run has business here, until `end` takes it back.

        What is open is told by its changes in the log; `open_` adds to that, for a test's own story.
        """
        self._claimed.setdefault(purpose.run, (purpose, self.now(), tuple(open_)))

    def unclaim(self, run: str) -> None:
        """Forget the claim of a run."""
        self._claimed.pop(run, None)

    @property
    def claims(self) -> dict[str, Claim]:
        """The claims behind which something is open, by run."""
        return {run: claim for run in self._claimed if (claim := self._claim_of(run)).open}

    def claims_told_to(self, run: str) -> list[Claim]:
        """The claims a session is told: those of others with something open, and its own run's."""
        return [claim for one in self._claimed if (claim := self._claim_of(one)).open or one == run]

    def _claim_of(self, run: str) -> Claim:
        purpose, since, told = self._claimed[run]
        log = self.changes_of(run)
        back = any(one.state in ("undone", "undo_failed") for one in log)
        open_ = [
            f"{one.state}: {one.change.summary}"
            for one in log
            if one.state != "undone" and (back or not one.committed)
        ]
        return Claim(
            run=run,
            operator=purpose.operator,
            controller=purpose.controller,
            since=since,
            open=(*told, *open_),
        )

    def unsettled(self, run: str) -> list[str]:
        """What of a run only going on, or going back, can settle."""
        log = self.changes_of(run)
        open_ = [
            f"{one.state}: {one.change.summary}"
            for one in log
            if one.state in ("begun", "in_doubt", "undo_failed")
        ]
        jobs = [
            one.change.job
            for one in log
            if one.change.job
            and one.state != "undone"
            and (one.change.job == "stops" or one.state == "done")
        ]
        ended = any(one.change.job == "stops" and one.state == "undone" for one in log)
        if jobs and (jobs[-1] == "stops" or (jobs[-1] == "captures" and ended)):
            open_.insert(0, "the job that it stopped does not run again, and would be forgotten")
        return open_

    def has_been_written_to_by(self, run: str) -> bool:
        """Whether a run has taken this host, ever."""
        return run in self._claimed or bool(self.changes_of(run))

    def begin(self, id: str, step: str, change: Change) -> Entry:
        """Record that a change begins."""
        entry = self.log[id] = Entry(id, step, change, self.clock)
        return entry

    def changes_of(self, run: str) -> list[Entry]:
        """A run's changes in the log, oldest first."""
        return [one for one in self.log.values() if one.id.startswith(run + "/")]

    @property
    def current_lease(self) -> Lease | None:
        """The lease that counts now; None where there is none, or its time is over."""
        return self.lease if self.lease is not None and self.lease.expires > self.clock else None

    def grant(self, purpose: Purpose) -> Lease:
        """Hand out the lease with the next epoch."""
        self._epoch += 1
        self.lease = Lease(
            run=purpose.run,
            operator=purpose.operator,
            controller=purpose.controller,
            reason=purpose.reason,
            since=self.now(),
            expires=self.clock + 120,
            epoch=self._epoch,
            boot_id=f"boot-{self.boots}",
            driver=purpose.driver,
            at_work=True,
        )
        return self.lease

    async def execute(self, way: Way, call: Call, step: str, id: str | None = None) -> Completed:
        """Run one function by its rule."""
        await self._wait(call.function)
        self.executed.append(Executed(way, call.function, copy.deepcopy(call.args), step, id))
        rule = self.rules.get(call.function, Failure(kind="bug", message=f"no rule for {call.function}"))
        try:
            answer = rule(copy.deepcopy(call.args), self.world) if callable(rule) else rule
            if inspect.isawaitable(answer):
                answer = await answer
        except HostError as error:
            answer = error.failure
        if isinstance(answer, Failure):
            return Completed(exit=None, failure=answer)
        return answer if isinstance(answer, Completed) else Completed(value=copy.deepcopy(answer))

    async def _wait(self, function: str) -> None:
        if function in self._delays:
            await asyncio.sleep(self._delays[function])
        if function in self._gates:
            await self._gates[function].wait()


class Fleet:
    """Scripted hosts by name. Inside `with`, `Host(transport="scripted")` reaches them."""

    def __init__(self, hosts: Mapping[str, ScriptedHost] | Sequence[str]) -> None:
        named = hosts if isinstance(hosts, Mapping) else {name: ScriptedHost() for name in hosts}
        self.hosts: dict[str, ScriptedHost] = dict(named)

    def __getitem__(self, name: str) -> ScriptedHost:
        return self.hosts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.hosts)

    def on(self, function: str, rule: Rule) -> Fleet:
        """Give every host the same rule. A callable is called with each host's own world."""
        for host in self.hosts.values():
            host.on(function, rule)
        return self

    async def open(self, host: Host, purpose: Purpose, opening: Opening | None = None) -> Session:
        """Open a session on the host of that name."""
        found = self.hosts.get(host.name)
        if found is None:
            raise HostError(Failure(kind="unreachable", message=f"{host.name}: no such scripted host"))
        return found.open(host.name, purpose, opening or Opening())

    def __enter__(self) -> Fleet:
        _fleets.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _fleets.remove(self)


_fleets: list[Fleet] = []


async def open_session(host: Host, purpose: Purpose, opening: Opening) -> Session:
    """Open a session on the innermost fleet that is in use."""
    if not _fleets:
        raise HostError(Failure(kind="unreachable", message=f"{host.name}: no scripted fleet is in use"))
    return await _fleets[-1].open(host, purpose, opening)
