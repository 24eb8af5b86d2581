"""What all hosts of a run share: the request, the recorder, the slots, the clock, the interrupts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from fleetfix.action import Action
from fleetfix.commands import Json
from fleetfix.engine.line import Memory
from fleetfix.engine.network import Network
from fleetfix.inventory import Host
from fleetfix.playbook import Playbook, Step
from fleetfix.policy import Policy
from fleetfix.recorder import Recorder
from fleetfix.session import Purpose, Session, Watch


@dataclass(frozen=True)
class Request:
    """A run that was asked for: everything is bound before any connection."""

    run: str
    playbook: Playbook
    hosts: tuple[Host, ...]
    steps: Mapping[str, tuple[Step, ...]]
    """The steps bound to each host, by its name."""
    policy: Policy
    inventory: str
    settings: Mapping[str, Json]
    dry: bool
    operator: str
    controller: str
    reason: str = ""
    expected: Mapping[str, frozenset[str]] | None = None
    """What a saved plan announced, by host: where a new plan differs, nothing is changed."""
    boots: Mapping[str, str] = field(default_factory=dict)
    """The boot ids that the saved plan saw, by host."""
    plan: str = ""
    """The dry run that the saved plan came from."""
    others: tuple[Host, ...] = ()
    """Hosts of the inventory that are not in this run, and may be tied to some that are."""
    machine: str = ""
    """The controller's own machine, as events name one; empty where it does not know."""

    jumps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The jump hosts on the way to hosts, by their names, where the ssh configuration has them."""
    driver: str = ""
    take_over: bool = False
    """The run may be taken away from another controller that is at work on it."""
    lock_wait: float = 0.0
    """Seconds to wait at most, on each host, for another run that has its lease."""

    @property
    def may_change(self) -> bool:
        """Whether a step could change a host: checks alone never do."""
        if self.dry:
            return False
        return any(
            isinstance(step.act, Action) and not step.elsewhere
            for steps in self.steps.values()
            for step in steps
        )

    def purpose(self) -> Purpose:
        return Purpose(
            run=self.run,
            playbook=self.playbook.name,
            dry=self.dry,
            operator=self.operator,
            controller=self.controller,
            reason=self.reason,
            driver=self.driver,
            take_over=self.take_over,
        )


SAFE_WITHIN = 300.0
"""Seconds after the first interrupt in which a host whose job is stopped goes on, to start it again."""

Choice = Literal["finish", "rollback", "leave"]
"""What is to become of the hosts that an interrupt has brought to their safe points."""


class SafePoint(Exception):
    """The operator asked to stop, and the host is where it may: a wait ends here, undecided."""


class Interrupts:
    """How often the operator asked to stop. Once: go to a safe point, begin no more. Twice: end now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.times = 0
        self.signal = ""
        self.since = 0.0
        """When the first one came."""
        self.choice: Choice | None = None
        self.parked = 0
        """Hosts that wait at their safe points for the choice."""
        self._clock = clock
        self._changed = asyncio.Event()

    def interrupt(self, signal: str) -> int:
        """Note one more; says how many there were."""
        self.times += 1
        self.signal = signal
        if self.times == 1:
            self.since = self._clock()
        self._changed.set()
        return self.times

    async def more_than(self, times: int) -> None:
        """Wait until there were more than so many."""
        await self._until(lambda: self.times > times)

    async def all_parked(self, hosts: int) -> None:
        """Wait until, after an interrupt, so many hosts are at their safe points or wait for one there."""
        await self._until(lambda: self.times > 0 and self.parked >= hosts)

    async def chosen(self) -> Choice:
        """Wait at a safe point for what is to become of the host."""
        with self.parking():
            await self._until(lambda: self.choice is not None)
        assert self.choice is not None
        return self.choice

    @contextmanager
    def parking(self) -> Iterator[None]:
        """Count a host as one that does not move by itself: it waits for the choice, or for another."""
        self.parked += 1
        self._changed.set()
        try:
            yield
        finally:
            self.parked -= 1

    def choose(self, choice: Choice) -> None:
        """Say what is to become of the hosts at their safe points; it counts for all of this run."""
        self.choice = choice
        self._changed.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()


class Clock(Protocol):
    """Time as the engine sees it; tests move it by hand."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class OpenSession(Protocol):
    """How a session to a host is opened; `session.open_session` outside of tests."""

    def __call__(
        self,
        host: Host,
        purpose: Purpose,
        *,
        progress: Callable[[str, str], None],
        watch: Watch | None = None,
    ) -> Awaitable[Session]: ...


@dataclass
class Slots:
    """At most `forks` hosts are talked to at once; one that waits gives its place back."""

    forks: int
    _free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.forks)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        async with self._free:
            yield

    @asynccontextmanager
    async def given_back(self) -> AsyncIterator[None]:
        self._free.release()
        try:
            yield
        finally:
            await self._free.acquire()


@dataclass(frozen=True)
class RunContext:
    """The surroundings of every host of one run."""

    request: Request
    recorder: Recorder
    memory: Memory
    interrupts: Interrupts
    open_session: OpenSession
    slots: Slots
    clock: Clock
    network: Network

    def now(self) -> float:
        """Seconds that a `within` is measured in; they stand still while the network is lost."""
        return self.network.now()

    async def rest(self, seconds: float) -> None:
        """Wait without holding a slot, whatever the operator asks meanwhile."""
        async with self.slots.given_back():
            await self.clock.sleep(seconds)

    async def network_is_back(self) -> bool:
        """Wait, without holding a slot, for the controller's network. False where it is not lost, where it
        was given up, and where the operator asks to stop."""
        network = self.network
        if not network.lost or network.given_up or self.interrupts.times:
            return False
        async with self.slots.given_back():
            back = asyncio.ensure_future(network.is_back())
            stopped = asyncio.ensure_future(self.interrupts.more_than(0))
            try:
                await asyncio.wait({back, stopped}, return_when=asyncio.FIRST_COMPLETED)
                return back.done() and back.result()
            finally:
                back.cancel()
                stopped.cancel()

    def may_stop(self, host: str) -> bool:
        """Whether the operator asked to stop, and this host is where it may: its job is not stopped."""
        interrupts = self.interrupts
        if not interrupts.times or interrupts.choice is not None:
            return False
        late = self.clock.now() - interrupts.since >= SAFE_WITHIN
        return late or not self.recorder.state.hosts[host].job_stopped

    async def pause(self, seconds: float) -> None:
        """Wait without holding a slot, at most until the operator asks (once more) to stop."""
        async with self.slots.given_back():
            asleep = asyncio.ensure_future(self.clock.sleep(seconds))
            stopped = asyncio.ensure_future(self.interrupts.more_than(self.interrupts.times))
            try:
                await asyncio.wait({asleep, stopped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                asleep.cancel()
                stopped.cancel()
