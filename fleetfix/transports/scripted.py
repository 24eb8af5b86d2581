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
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fleetfix.commands import Call, Change, Completed, Json, Read
from fleetfix.errors import Failure, FailureKind, HostError
from fleetfix.session import (
    Claim,
    HostInfo,
    Lease,
    Opening,
    Past,
    PastState,
    Purpose,
    Session,
    unfinished_hint,
)

if TYPE_CHECKING:
    from fleetfix.inventory import Host

T = TypeVar("T")

World = dict[str, Any]
Rule = Json | Callable[[dict[str, Json], World], Any]
"""A value, a Completed, a Failure, or a function of (args, world), async or not, that gives one of them."""

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
    running: asyncio.Event | None = None


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
        self.executed: list[Executed] = []
        self.log: dict[str, Entry] = {}
        self.notes: dict[str, Json] = {}
        self.claims: dict[str, Claim] = {}
        self.lease: Lease | None = None
        self.ended: list[tuple[str, str]] = []
        """(run, outcome) of each `end`."""
        self.said: list[tuple[str, str]] = []
        self.disabled: str | None = None
        self.clock = 1_760_000_000.0
        """The host's clock; moves only when a test moves it."""
        self.boots = 1
        self.opened = 0
        self.changes_asked = 0
        self._refusal: Failure | None = None
        self._losses: list[Loss] = []
        self._gates: dict[str, asyncio.Event] = {}
        self._delays: dict[str, float] = {}
        self._sessions: list[ScriptedSession] = []
        self._epoch = 0

    # -- rules ------------------------------------------------------------------------------------

    def on(self, function: str, rule: Rule) -> ScriptedHost:
        """Say what a function answers or does. Later rules replace earlier ones."""
        self.rules[function] = rule
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

    def vanish(self) -> None:
        """Lose every open session now and take no connection until `accept`."""
        self.refuse("unreachable", "no route to host")
        self.drop()

    def drop(self) -> None:
        """Lose every open session now; new ones are taken."""
        for session in list(self._sessions):
            session.lose()

    def reboot(self) -> None:
        """Drop the sessions and come back with another boot id; what ran is in doubt."""
        self.boots += 1
        self.drop()
        for entry in self.log.values():
            if entry.state == "begun":
                entry.state, entry.running = "in_doubt", None

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

    def claim(self, purpose: Purpose, open_: Sequence[str]) -> None:
        """Write down what a run has open here."""
        self.claims[purpose.run] = Claim(
            run=purpose.run,
            operator=purpose.operator,
            controller=purpose.controller,
            since=self.now(),
            open=tuple(open_),
        )

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


class ScriptedSession:
    """A session on a scripted host; it keeps the promises of `Session`."""

    def __init__(self, host: ScriptedHost, name: str, purpose: Purpose, opening: Opening) -> None:
        self._host = host
        self._name = name
        self._purpose = purpose
        self._progress = opening.progress
        self._epoch: int | None = None
        self._lost = False
        self._running: set[asyncio.Task[Any]] = set()
        self._turn = asyncio.Lock()
        self._ending = False

    @property
    def info(self) -> HostInfo:
        host = self._host
        return HostInfo(
            python="3.11.0",
            uid=0,
            user="root",
            hostname=self._name,
            boot_id=f"boot-{host.boots}",
            machine_id=f"machine-{self._name}",
            now=host.clock,
            home="/var/lib/fleetfix",
            disabled=host.disabled,
            claims=tuple(host.claims.values()),
            lease=host.lease,
        )

    async def read(self, step: str, reads: Sequence[Read]) -> tuple[Completed, ...]:
        asked = {(one.function, repr(sorted(one.args.items()))): one for one in reads}
        answers = dict(
            zip(asked, await self._within(self._read_all(step, list(asked.values()))), strict=True)
        )
        return tuple(answers[one.function, repr(sorted(one.args.items()))] for one in reads)

    async def acquire(self) -> None:
        await self._within(self._acquire())

    async def change(self, id: str, step: str, change: Change) -> Completed:
        return await self._within(self._change(id, step, change))

    async def undo(self, id: str) -> Completed:
        return await self._within(self._undo(id))

    async def past(self) -> tuple[Past, ...]:
        self._check_line()
        prefix = self._purpose.run + "/"
        return tuple(
            Past(
                id=entry.id,
                step=entry.step,
                summary=entry.change.summary,
                risk=entry.change.risk,
                state=entry.state,
                at=entry.at,
                completed=entry.completed,
            )
            for entry in self._host.log.values()
            if entry.id.startswith(prefix)
        )

    async def note(self, name: str, value: Json) -> None:
        self._check_line()
        self._check_wet()
        self._host.notes[f"{self._purpose.run}/{name}"] = copy.deepcopy(value)

    async def recall(self, name: str) -> Json:
        self._check_line()
        return copy.deepcopy(self._host.notes.get(f"{self._purpose.run}/{name}"))

    async def end(self, outcome: str, *, keep_claim: bool, commit: bool) -> None:
        await self._within(self._end(outcome, keep_claim, commit))

    async def cancel(self) -> tuple[str, ...]:
        self._ending = True
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._ending = False
        return ()

    async def close(self) -> None:
        self._host.forget(self)
        self._lost = True
        if self._host.lease is not None and self._host.lease.epoch == self._epoch:
            self._host.lease = None

    def lose(self) -> None:
        """Break the connection: what waits for an answer gets `unreachable`."""
        self._host.forget(self)
        self._lost = True
        for task in list(self._running):
            task.cancel()

    # -- the work, under a task that a loss or a cancel can end -------------------------------------

    async def _within(self, work: Coroutine[Any, Any, T]) -> T:
        if self._lost:
            work.close()
            raise _unreachable(self._name)
        task = asyncio.ensure_future(work)
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._lost and task.done():
                raise _unreachable(self._name) from None
            task.cancel()
            raise
        finally:
            self._running.discard(task)

    async def _execute(self, way: Way, call: Call, step: str, id: str | None = None) -> Completed:
        if self._ending:
            return _cancelled()
        try:
            return await self._host.execute(way, call, step, id)
        except asyncio.CancelledError:
            if self._ending:
                return _cancelled()
            raise

    async def _read_all(self, step: str, reads: Sequence[Read]) -> list[Completed]:
        return [await self._execute("read", one, step) for one in reads]

    async def _acquire(self) -> None:
        self._check_wet()
        host, run = self._host, self._purpose.run
        _check_enabled(host)
        self._check_lease()
        for claim in host.claims.values():
            if claim.run != run:
                raise _unfinished(claim)
        if self._epoch is None:
            self._epoch = host.grant(self._purpose).epoch
            self._claim_open()

    async def _change(self, id: str, step: str, change: Change) -> Completed:
        self._check_wet()
        async with self._turn:
            host = self._host
            host.changes_asked += 1
            self._lose_if(host.loss("before"))
            known = host.log.get(id)
            if known is not None:
                return await self._again(known, change)
            _check_enabled(host)
            await self._acquire()
            self._check_fence()
            entry = host.log[id] = Entry(id, step, change, host.clock, running=asyncio.Event())
            self._claim_open()
            completed = await self._do(entry)
            self._lose_if(host.loss("after"))
            return completed

    async def _do(self, entry: Entry) -> Completed:
        killed = self._host.loss("during")
        completed = Completed()
        try:
            for number, call in enumerate(entry.change.do):
                if killed is not None and number >= killed.calls:
                    break
                completed = await self._execute("do", call, entry.step, entry.id)
                if not completed.ok:
                    break
        except asyncio.CancelledError:
            self._doubt(entry)
            raise
        if killed is not None:
            self._doubt(entry)
            self._lose_if(killed)
        self._record(entry, completed)
        return completed

    def _record(self, entry: Entry, completed: Completed) -> None:
        entry.completed = completed
        entry.state = "done" if completed.ok else "failed"
        self._set(entry)
        self._claim_open()

    def _doubt(self, entry: Entry) -> None:
        entry.state = "in_doubt"
        self._set(entry)
        self._claim_open()

    @staticmethod
    def _set(entry: Entry) -> None:
        if entry.running is not None:
            entry.running.set()
            entry.running = None

    async def _again(self, entry: Entry, change: Change) -> Completed:
        if entry.change != change:
            raise HostError(Failure(kind="bug", message=f"the id {entry.id} was used for another change"))
        if entry.running is not None:
            await entry.running.wait()
        if entry.completed is not None:
            return entry.completed
        return Completed(exit=None, in_doubt=True)

    async def _undo(self, id: str) -> Completed:
        self._check_wet()
        entry = self._host.log.get(id)
        if entry is None:
            raise HostError(Failure(kind="bug", message=f"nothing is recorded under {id}"))
        if entry.running is not None:
            await entry.running.wait()
        if entry.state == "undone" and entry.undone is not None:
            return entry.undone
        await self._acquire()
        self._check_fence()
        completed = Completed()
        for call in entry.change.undo:
            completed = await self._execute("undo", call, entry.step, id)
            if not completed.ok:
                break
        entry.undone = completed
        entry.state = "undone" if completed.ok else "undo_failed"
        self._claim_open()
        return completed

    async def _end(self, outcome: str, keep_claim: bool, commit: bool) -> None:
        host, run = self._host, self._purpose.run
        self._check_wet()
        self._check_lease()
        for entry in self._own():
            if commit and entry.state == "done":
                for call in entry.change.commit:
                    await self._execute("commit", call, entry.step, entry.id)
        host.ended.append((run, outcome))
        if not keep_claim:
            host.claims.pop(run, None)
        if host.lease is not None and host.lease.run == run:
            host.lease = None
        self._epoch = None

    # -- what is refused ----------------------------------------------------------------------------

    def _own(self) -> Iterator[Entry]:
        return (one for one in self._host.log.values() if one.id.startswith(self._purpose.run + "/"))

    def _claim_open(self) -> None:
        opened = [f"{one.state}: {one.change.summary}" for one in self._own() if one.state != "undone"]
        self._host.claim(self._purpose, opened)

    def _lose_if(self, loss: Loss | None) -> None:
        if loss is None:
            return
        if not loss.back:
            self._host.refuse("unreachable", "no route to host")
        self._lost = True
        self._host.forget(self)
        raise _unreachable(self._name)

    def _check_line(self) -> None:
        if self._lost:
            raise _unreachable(self._name)

    def _check_wet(self) -> None:
        if self._purpose.dry:
            raise HostError(
                Failure(kind="blocked", message="this session is a dry run: the host changes nothing")
            )

    def _check_lease(self) -> None:
        lease = self._host.lease
        if lease is not None and lease.run != self._purpose.run and lease.expires > self._host.clock:
            raise _lease_held(lease)

    def _check_fence(self) -> None:
        lease = self._host.lease
        if lease is None or lease.epoch != self._epoch:
            raise HostError(
                Failure(
                    kind="lease_held",
                    message="a newer session of this run has taken over on this host",
                    hint="let that one finish",
                )
            )


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


def _unreachable(name: str) -> HostError:
    return HostError(Failure(kind="unreachable", message=f"{name}: the connection was lost"))


def _cancelled() -> Completed:
    return Completed(exit=None, failure=Failure(kind="cancelled", message="ended as asked"))


def _check_enabled(host: ScriptedHost) -> None:
    if host.disabled is not None:
        raise HostError(
            Failure(
                kind="disabled",
                message=f"fleetfix is switched off on this host: {host.disabled}",
                hint="remove /etc/fleetfix/DISABLED there",
            )
        )


def _lease_held(lease: Lease) -> HostError:
    why = f" ({lease.reason})" if lease.reason else ""
    return HostError(
        Failure(
            kind="lease_held",
            message=f"run {lease.run} of {lease.operator} on {lease.controller}"
            f" writes here since {lease.since}{why}",
            hint="wait until it has ended",
        )
    )


def _unfinished(claim: Claim) -> HostError:
    items = ", ".join(claim.open) or "nothing recorded"
    return HostError(
        Failure(
            kind="unfinished",
            message=f"run {claim.run} of {claim.operator} left work open here since {claim.since}: {items}",
            hint=unfinished_hint(claim.run),
        )
    )
