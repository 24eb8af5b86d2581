"""Whose network it is: where many sessions drop at once it is the controller's own, and no host's fault.

While it is lost nothing is begun, sessions try on past their own time, and what is measured in time
stands still: a step's deadline, a `within`. It ends when enough sessions are back, or is given up.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from fleetfix.errors import Failure, JournalError
from fleetfix.events import ConnectionDropped, ConnectionReturned
from fleetfix.recorder import Recorder
from fleetfix.session import HostInfo, Patience

WINDOW = 60.0
"""Sessions that drop within so many seconds have dropped at once."""

AT_LEAST = 3
"""Fewer sessions than this say nothing about a network."""

GIVEN_UP_AFTER = 15 * 60.0
"""Seconds that a run waits for the network of its controller."""


class Clock(Protocol):
    """What of `context.Clock` is needed here."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True)
class Loss:
    """So many sessions dropped, of those that were open."""

    dropped: int
    open: int


def so_many(open_: int) -> int:
    """How many sessions must be gone at once for it to be the controller's network."""
    return max(AT_LEAST, math.ceil(open_ / 2))


def dropped_at_once(drops: Iterable[float], now: float) -> int:
    """How many of these moments lie within the window that ends now."""
    return sum(now - at <= WINDOW for at in drops)


class Network:
    """Hears of every session of a run, and decides whose network is lost."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: set[str] = set()
        self._down: dict[str, float] = {}
        self._lost_at: float | None = None
        self._stood_still = 0.0
        self._held: dict[asyncio.Timeout, float | None] = {}
        self._bound: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self.loss: Loss | None = None
        """The loss that lasts now, or that was given up; None while all is well."""
        self.given_up = False
        self.away = 0.0
        """Seconds that the last loss took, once it is over."""
        self.changes = 0

    @property
    def lost(self) -> bool:
        """Whether the controller's network is lost, or was given up."""
        return self.loss is not None

    def now(self) -> float:
        """The run's own time: it stands still while the network is lost."""
        away = 0.0 if self._lost_at is None else self._clock.now() - self._lost_at
        return self._clock.now() - away - self._stood_still

    async def changed_after(self, times: int) -> None:
        """Wait until it was lost, back or given up more than so many times."""
        while self.changes <= times:
            self._changed.clear()
            await self._changed.wait()

    async def is_back(self) -> bool:
        """Wait until a loss is over. False where there is none, or where it was given up."""
        if not self.lost:
            return False
        await self._over.wait()
        return not self.given_up

    @asynccontextmanager
    async def deadline(self, seconds: float | None) -> AsyncIterator[float]:
        """Raise TimeoutError after so many seconds in which the network was there; gives those seconds."""
        async with asyncio.timeout(seconds) as timeout:
            self._held[timeout] = None
            if self.lost and not self.given_up:
                self._hold(timeout)
            try:
                yield seconds or 0.0
            finally:
                del self._held[timeout]

    def close(self) -> None:
        """Nothing more is waited for."""
        if self._bound is not None:
            self._bound.cancel()

    # -- what sessions tell -------------------------------------------------------------------

    def opened(self, host: str) -> None:
        self._open.add(host)

    def closed(self, host: str) -> None:
        self._open.discard(host)
        self._down.pop(host, None)
        self._look()

    def dropped(self, host: str) -> None:
        self._down[host] = self._clock.now()
        self._look()

    def returned(self, host: str) -> None:
        self._down.pop(host, None)
        self._look()

    def patience(self) -> Patience:
        if self.given_up:
            return "none"
        return "more" if self.lost else "usual"

    # -- whose network it is ------------------------------------------------------------------

    def _look(self) -> None:
        if self.given_up:
            return
        now, enough = self._clock.now(), so_many(len(self._open))
        if not self.lost and dropped_at_once(self._down.values(), now) >= enough:
            self._lose(Loss(len(self._down), len(self._open)), now)
        elif self.lost and len(self._down) < enough:
            self._return(now)

    def _lose(self, loss: Loss, now: float) -> None:
        self.loss, self._lost_at = loss, now
        self._over.clear()
        for timeout in self._held:
            self._hold(timeout)
        self._bound = asyncio.ensure_future(self._give_up())
        self._tell()

    def _return(self, now: float) -> None:
        assert self._lost_at is not None
        self.away = now - self._lost_at
        self._stood_still += self.away
        self._end()
        self.loss = None
        self._over.set()
        self._tell()

    async def _give_up(self) -> None:
        await self._clock.sleep(GIVEN_UP_AFTER)
        self.given_up, self._bound = True, None
        self._end()
        self._over.set()
        self._tell()

    def _tell(self) -> None:
        self.changes += 1
        self._changed.set()

    def _end(self) -> None:
        self._lost_at = None
        if self._bound is not None:
            self._bound.cancel()
            self._bound = None
        loop = asyncio.get_running_loop()
        for timeout, left in self._held.items():
            if left is not None:
                timeout.reschedule(loop.time() + left)
                self._held[timeout] = None

    def _hold(self, timeout: asyncio.Timeout) -> None:
        when = timeout.when()
        if when is not None and not timeout.expired():
            self._held[timeout] = when - asyncio.get_running_loop().time()
            timeout.reschedule(None)


@dataclass(frozen=True)
class Watched:
    """One session's connection, as its transport tells of it. One on this very machine uses no network."""

    network: Network
    recorder: Recorder
    host: str
    local: bool = False

    def dropped(self, failure: Failure) -> None:
        reason = failure.message.removeprefix(f"{self.host}: ")
        self._record(ConnectionDropped(host=self.host, reason=reason))
        if not self.local:
            self.network.dropped(self.host)

    def returned(self, info: HostInfo, seconds: float, *, restarted: bool) -> None:
        self._record(
            ConnectionReturned(
                host=self.host,
                seconds=seconds,
                boot_id=info.boot_id,
                machine_id=info.machine_id,
                restarted=restarted,
            )
        )
        if not self.local:
            self.network.returned(self.host)

    def _record(self, event: ConnectionDropped | ConnectionReturned) -> None:
        # Whoever waits for the host hears of a journal that fails; whoever tells of the line does not.
        with suppress(JournalError):
            self.recorder.record(event)

    def patience(self) -> Patience:
        return "usual" if self.local else self.network.patience()
