"""How many logins one server is asked for at once.

A server drops some of a crowd before they have logged in (MaxStartups: from the tenth on, where nothing
else is said). So a few are let in at a time, fewer once some were dropped, and more again later.
"""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

AT_ONCE = 8
"""Below the ten from which an OpenSSH server begins to drop connections."""


class Pace:
    """The logins under way at one server."""

    def __init__(self) -> None:
        self._limit: float = AT_ONCE
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> Place:
        """Wait for a place."""
        if self._inside < int(self._limit) and not self._waiting:
            self._inside += 1
            return Place(self)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.left()
            else:
                self._waiting.remove(turn)
            raise
        return Place(self)

    def dropped(self) -> None:
        """The server let somebody go: half as many at once."""
        self._limit = max(1.0, self._limit / 2)

    def welcomed(self) -> None:
        """Somebody has logged in."""
        self._limit = min(float(AT_ONCE), self._limit + 1 / AT_ONCE)

    def left(self) -> None:
        """A place is free; the next ones that fit get theirs."""
        self._inside -= 1
        while self._waiting and self._inside < int(self._limit):
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside += 1
                turn.set_result(None)


class Place:
    """A place among those who log in, until it is left; leaving twice is leaving once."""

    def __init__(self, pace: Pace) -> None:
        self._pace: Pace | None = pace

    @property
    def is_left(self) -> bool:
        return self._pace is None

    def leave(self) -> None:
        """Make room for the next."""
        pace, self._pace = self._pace, None
        if pace is not None:
            pace.left()


_paces: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[object, Pace]] = WeakKeyDictionary()


def pace_of(server: object) -> Pace:
    """The pace of this event loop for one server, by whatever names it."""
    return _paces.setdefault(asyncio.get_running_loop(), {}).setdefault(server, Pace())
