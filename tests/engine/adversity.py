"""Runs over scripted hosts to which anything happens at any moment, and what must hold all the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetfix.commands import Call, Completed
from fleetfix.engine.context import Interrupts
from fleetfix.engine.going_back import roll_back
from fleetfix.engine.network import GIVEN_UP_AFTER
from fleetfix.engine.settling import Settling
from fleetfix.errors import Failure, JournalError
from fleetfix.events import GOOD, Record
from fleetfix.order import CANARY
from fleetfix.playbook import Step
from fleetfix.policy import Policy, Share
from fleetfix.recorder import Recorder
from fleetfix.session import Lease, Purpose
from fleetfix.state import HostState, RunState, after, exit_code, fold, to_take_up
from fleetfix.transports.scripted import Fleet, ScriptedHost
from tests.engine.toys import HandClock, Shelf, play, request, resume

RUN = "20260101-000000-toy-aaaa"
AGAIN = "20260102-000000-toy-cccc"

HANGS = 60.0
"""Seconds after which a run that stands still is held to stand still for ever."""

AT_ONE_HOST = (
    "dropped",  # its sessions break; it can be reached again
    "vanished",  # it cannot be reached either
    "rebooted",
    "forgot",  # rebooted, and its records were where a reboot makes them unknown
    "asked too early",  # the connection breaks before its next change
    "killed before",  # in its next change, before it did anything
    "killed after",  # in its next change, after it did all
    "unheard",  # its next change is done, and the answer is lost
    "fails",  # changes fail there
    "sticks",  # undo fails there
    "dark",  # the lamp goes out: the last check fails
    "taken",  # another run writes there
    "disabled",  # its kill switch is set
)
EVERYWHERE = ("killed", "interrupted", "network", "journal")
KINDS = (*AT_ONE_HOST, *EVERYWHERE)


LONG = 0.02
"""Real seconds that a long wait takes here; a short one takes none."""


class Clock(HandClock):
    """Time that passes at once, but for long waits: meanwhile something may happen."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        if seconds >= GIVEN_UP_AFTER:
            await asyncio.sleep(LONG)


@dataclass(frozen=True)
class Fault:
    """What happens, and when: moments are calls on hosts, connections and records, counted from 1."""

    at: int
    kind: str
    host: int = 0


@dataclass(frozen=True)
class Round:
    """One command about the run, and what happens meanwhile."""

    way: str
    """`resume` or `rollback`."""
    faults: tuple[Fault, ...] = ()
    machine: int = 0
    """The machine that it is given on; each has a journal of its own."""
    healed: bool = True
    """What happened before has been mended, but for what cannot be."""


@dataclass
class Adversity:
    """A fleet, a playbook, and everything that happens."""

    fleet: Fleet
    steps: Sequence[Step]
    policy: Policy
    alone: bool = True
    """No host is in a cohort: each is bound by `forks` alone."""
    shelves: dict[int, Shelf] = field(default_factory=dict)
    moments: int = 0
    killed: bool = False
    fired: list[Fault] = field(default_factory=list)
    forgot: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    """What was seen meanwhile that must not be."""

    def __post_init__(self) -> None:
        self.names = tuple(self.fleet)
        self.was = {name: dict(self.fleet[name].world) for name in self.names}
        self._forks = self.policy.forks
        self._due: list[Fault] = []
        self._interrupts = Interrupts()
        self._playing: asyncio.Future[Any] | None = None
        self._talked_to: Counter[str] = Counter()
        self._undone: set[tuple[str, str]] = set()
        self.broken: dict[str, set[str]] = {name: set() for name in self.names}
        for name in self.names:
            self._listen(name, self.fleet[name])

    # -- what happens ---------------------------------------------------------------------------

    def _listen(self, name: str, host: ScriptedHost) -> None:
        execute, opened = host.execute, host.open

        async def watched(way: Any, call: Call, step: str, id: str | None = None) -> Completed:
            self._moment()
            self._talked_to[name] += 1
            self._bound_by_forks()
            try:
                await asyncio.sleep(0)
                if way == "do" and "fails" in self.broken[name]:
                    return Completed(exit=None, failure=Failure(kind="command", message="no, it says"))
                if way == "undo" and "sticks" in self.broken[name]:
                    return Completed(exit=None, failure=Failure(kind="command", message="it sticks"))
                self._once(name, way, call, id)
                done = await execute(way, call, step, id)
                if way == "undo" and done.ok and id is not None:
                    self._undone.add((name, id))
                return done
            finally:
                self._talked_to[name] -= 1

        def connected(*words: Any) -> Any:
            self._moment()
            return opened(*words)

        host.execute = watched  # type: ignore[method-assign]
        host.open = connected  # type: ignore[method-assign]

    def _moment(self) -> None:
        self.moments += 1
        while self._due and self._due[0].at <= self.moments:
            fault = self._due.pop(0)
            self.fired.append(fault)
            if fault.kind in EVERYWHERE:
                self._happens_to_all(fault.kind, fault.host)
            else:
                self._happens(fault.kind, self.names[fault.host % len(self.names)])

    def _happens_to_all(self, kind: str, choice: int) -> None:
        if kind == "killed":
            self.killed = True
            for name in self.names:
                self.fleet[name].drop()
            if self._playing is not None:
                self._playing.cancel()
        elif kind == "interrupted":
            self._interrupts.interrupt("SIGINT")
        elif kind == "journal":
            self._broken_journal = True
        else:
            for name in self.names:
                self.fleet[name].cut()
            loop, back = asyncio.get_running_loop(), choice % 2 == 0
            loop.call_later(0.01 if back else 2 * LONG, self._network_ends, back)

    def _network_ends(self, back: bool) -> None:
        """It is there again, or every session has tried for long enough."""
        for name in self.names:
            host = self.fleet[name]
            if back:
                host.splice()
            elif not host.line.is_set():
                host.vanish()

    def _happens(self, kind: str, name: str) -> None:
        host = self.fleet[name]
        nth = host.changes_asked + 1
        match kind:
            case "dropped":
                host.drop()
            case "vanished":
                host.vanish()
            case "rebooted":
                host.reboot()
            case "forgot":
                host.reboot()
                host.log.clear()
                host.notes.clear()
                host.unclaim(RUN)
                self.forgot.add(name)
            case "asked too early":
                host.lose(before=nth)
            case "killed before":
                host.lose(during=nth, calls=0)
            case "killed after":
                host.lose(during=nth, calls=1)
            case "unheard":
                host.lose(after=nth)
            case "fails" | "sticks":
                self.broken[name].add(kind)
            case "dark":
                host.world["lamp"] = False
            case "taken":
                host.lease = _of_another(host)
            case "disabled":
                host.disabled = "hands off"

    def heal(self) -> None:
        """Mend what can be mended: what a host forgot, it forgot."""
        for name in self.names:
            host = self.fleet[name]
            host.accept().splice()
            host.disabled = None
            host.world["lamp"] = True
            host._losses.clear()
            if host.lease is not None and host.lease.run != RUN:
                host.lease = None
            self.broken[name].clear()

    # -- what is counted meanwhile --------------------------------------------------------------

    def _once(self, name: str, way: str, call: Call, id: str | None) -> None:
        """No change is made twice, nothing is set that is set already, and nothing is undone twice."""
        host = self.fleet[name]
        if way == "do":
            # What was forgotten, ids included, is looked at anew by whoever begins with an empty journal.
            if host.writes_by_id[str(id)] and name not in self.forgot:
                self.wrong.append(f"{id} was made twice on {name}")
            if call.function == "toy.set" and host.world.get(str(call.args["name"])) == call.args["to"]:
                self.wrong.append(f"{id} on {name} does what was done")
        if way == "undo" and (name, str(id)) in self._undone:
            self.wrong.append(f"{id} was undone twice on {name}")

    def _bound_by_forks(self) -> None:
        busy = [name for name, calls in self._talked_to.items() if calls]
        if self.alone and not self.fired and len(busy) > self._forks:
            self.wrong.append(f"{busy} at once")

    # -- commands -------------------------------------------------------------------------------

    async def run(self, faults: Sequence[Fault] = ()) -> None:
        """The run itself, on the first machine."""
        await self._command(Round("run", tuple(faults)))

    async def go_on(self, round_: Round) -> None:
        """Another command about it."""
        if round_.healed:
            self.heal()
        await self._command(round_)

    async def _command(self, round_: Round) -> None:
        shelf = self.shelves.setdefault(round_.machine, Shelf())
        before = len(shelf.records)
        self._begun = {name for name in self.names if f"{RUN}/bound" in self.fleet[name].notes}
        self.moments, self.killed, self.fired, self._broken_journal = 0, False, [], False
        self._due = sorted(round_.faults, key=lambda fault: fault.at)
        self._interrupts = Interrupts()
        append = Shelf.append

        def keep(records: Sequence[Record]) -> None:
            for record in records:
                if self.killed:
                    return
                if self._broken_journal:
                    raise JournalError("the disk is full")
                append(shelf, [record])
                self._moment()

        shelf.append = keep  # type: ignore[method-assign]
        work = self._work(round_, shelf)
        if work is None:
            return
        self._playing = asyncio.ensure_future(work)
        state: RunState | None = None
        with contextlib.suppress(asyncio.CancelledError, JournalError):
            try:
                async with asyncio.timeout(HANGS):
                    state = await self._playing
            except TimeoutError:
                raise AssertionError("the run does not end") from None
        for _ in range(30):
            await asyncio.sleep(0)
        self._due = []
        await self._settled()
        shelf.append = lambda records: append(shelf, records)  # type: ignore[method-assign]
        self._look_at(shelf, before, state, round_)

    def _work(self, round_: Round, shelf: Shelf) -> Any:
        asked = {"policy": self.policy, "interrupts": self._interrupts, "clock": Clock()}
        if round_.way == "run":
            return self._run(shelf, asked)
        state = fold(shelf.records)
        if round_.way == "rollback":
            return self.roll_back(shelf)
        names = to_take_up(state) if state.started is not None else self.names
        if not names:
            return None
        return resume(self.fleet, self.steps, shelf, hosts=names, **asked)

    async def _run(self, shelf: Shelf, asked: dict[str, Any]) -> RunState:
        state, _ = await play(self.fleet, self.steps, shelf=shelf, **asked)
        return state

    async def roll_back(self, shelf: Shelf) -> RunState:
        """As `fleetfix rollback` does it: of the hosts that the journal has begun, or of all."""
        known = fold(shelf.records)
        names = [name for name, host in known.hosts.items() if host.started]
        if known.started is None:
            names = list(self.names)
        asked = request(names, self.steps) if names else None
        state = RunState(
            run=RUN,
            started=known.started,
            hosts={name: known.hosts.get(name) or HostState(name, started=True) for name in names},
        )
        recorder = Recorder(RUN, shelf, clock=lambda: 0.0, state=state, seq=len(shelf.records))
        with self.fleet:
            return await roll_back(
                RUN,
                "toy",
                asked.hosts if asked is not None else (),
                recorder,
                operator="ann",
                controller="here",
                forks=self.policy.forks,
                known=known,
            )

    async def release(self) -> None:
        """As `fleetfix release --hosts` does it, on all hosts."""
        purpose = Purpose(run=RUN, playbook="toy", dry=False, operator="ann", controller="here")
        recorder = Recorder(RUN, Shelf(), clock=lambda: 0.0)
        with self.fleet:
            await Settling(purpose, request(self.names, self.steps).hosts, recorder).release()

    def all_told(self) -> None:
        """Whatever was mended, and taken up as often as it helps: a host is well, or it says why not."""
        state = fold(self.shelves[0].records)
        for name, host in state.hosts.items():
            end = host.finished
            assert end is not None
            well = end.outcome in GOOD or end.outcome == "rolled_back"
            assert well or end.reason or state.halted, f"{name} is {end.outcome}"

    async def anew(self) -> None:
        """A new run finds nothing in its way, mends what is left, and after it there is nothing to do."""
        lenient = Policy(canary=0, max_failures=Share.parse("100%"), forks=64)
        for name in self.names:
            assert self.fleet[name].claims == {}, name
        self._forks = lenient.forks
        for name in self.names if self.forgot and not self.alone else ():
            # What started the job again is forgotten: whoever looked has started it by hand.
            self.fleet[name].world["job"] = "running"
        state, _ = await play(self.fleet, self.steps, policy=lenient, run=AGAIN)
        assert not self.wrong
        said = {
            name: (host.outcome, host.finished.reason)
            for name, host in state.hosts.items()
            if host.finished
        }
        assert {outcome for outcome, _ in said.values()} <= {"ok", "changed"}, said
        again, _ = await play(self.fleet, self.steps, policy=lenient, run=AGAIN[:-1] + "d", dry=True)
        found = {
            name: [s for s, one in host.steps.items() if one.planned and one.planned.pending]
            for name, host in again.hosts.items()
        }
        for name in self.names:
            assert set(found[name]) <= {"bell"}, found
            assert self.fleet[name].claims == {}, name
            assert self.fleet[name].world.get("job") in (True, "running"), name

    async def _settled(self) -> None:
        """What hosts were doing when the controller died, they do to its end."""
        for name in self.names:
            for entry in self.fleet[name].log.values():
                if entry.running is not None:
                    await asyncio.gather(entry.running, return_exceptions=True)

    # -- what must hold after each --------------------------------------------------------------

    def _look_at(self, shelf: Shelf, before: int, state: RunState | None, round_: Round) -> None:
        assert not self.wrong
        folded = fold(shelf.records)
        told = shelf.records[before:]
        self._canary_first(shelf.records[:before], told)
        ends = Counter(record.event.host for record in told if record.event.kind == "host_finished")
        assert not ends or max(ends.values()) == 1, f"more than one word: {ends}"
        if state is None:
            return
        if round_.way != "rollback":
            assert folded == state, "the journal alone tells the same"
            assert all(host.finished is not None for host in state.hosts.values())
            assert state.exit == exit_code(state)
            went_back = state.count("rolled_back", "rollback_failed", "rollback_pending")
            assert not went_back or state.exit != 0, "rolled back is no success"
        for name in ends:  # of others another machine may know better by now
            self._end_of(name, state.hosts[name])
        if not self.alone:
            self._job_of_all(state)

    def _job_of_all(self, state: RunState) -> None:
        """Where the one job of all hosts does not run, whoever was told to stop it says so."""
        asleep = [name for name in self.names if self.fleet[name].world["job"] == "stopped"]
        if (
            not asleep
            or self.forgot
            or not all(host.finished and host.connected for host in state.hosts.values())
        ):
            return
        said = [name for name, host in state.hosts.items() if host.finished and host.finished.job_stopped]
        assert said, f"the job of {asleep} does not run, and nobody says so"
        assert any(RUN in self.fleet[name].claims for name in said), "and nobody has a claim"

    def _end_of(self, name: str, host: HostState) -> None:
        scripted = self.fleet[name]
        if host.finished is None or name in self.forgot:
            return
        outcome, end = host.finished.outcome, host.finished
        assert end.failure is None or end.failure.kind != "bug", end.failure
        known = host.started or host.connected
        if self.alone and scripted.world.get("job") is False and known:
            assert end.job_stopped, f"{name} is {outcome}, without its job, and nobody says so"
            assert RUN in scripted.claims, f"{name} is {outcome}, without its job, and has no claim"
        if outcome == "rolled_back":
            now = {key: value for key, value in scripted.world.items() if key != "lamp"}
            was = {key: value for key, value in self.was[name].items() if key != "lamp"}
            assert now | {"captured": 0} == was | {"captured": 0}, f"{name} is rolled_back"
            assert scripted.claims == {}, f"{name} is rolled_back"
        if outcome in ("changed", "ok"):
            assert scripted.claims == {}, f"{name} is {outcome}"

    def _canary_first(self, before: Sequence[Record], told: Sequence[Record]) -> None:
        """No host is begun before the canary has ended well; after a halt none is begun."""
        state = fold(before)
        for record in told:
            event = record.event
            if event.kind == "host_started" and event.host not in self._begun:
                first = next((wave for wave in state.waves if wave.name == CANARY), None)
                for name in first.hosts if first is not None and event.host not in first.hosts else ():
                    assert state.hosts[name].outcome in GOOD, f"{event.host} before {name}"
                if self.alone:
                    assert state.halted is None, f"{event.host} after a halt"
            state = after(state, record)


def _of_another(host: ScriptedHost) -> Lease:
    return Lease(
        run="20260101-000000-other-bbbb",
        operator="bob",
        controller="there",
        since=host.now(),
        expires=host.clock + 120,
        epoch=10_000,
        boot_id=f"boot-{host.boots}",
    )
