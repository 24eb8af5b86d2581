"""The operator's ssh agent: one connection to it serves all hosts, one request at a time.

An agent answers one after another whatever it is asked at once, and has a bound of its own on
connections: a fleet that asked it host by host would find it full. One that does not answer is passed
over, as one without keys, and is said where a host then lets nobody in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import asyncssh

ANSWERS_WITHIN = 10.0
"""Seconds for one answer of the agent; it may be asking its user for a yes, or for a touch."""
NOT_ASKED_FOR = 30.0
"""Seconds in which an agent that gave no answer is not asked again: each host would wait anew."""

_T = TypeVar("_T")


class Agent(asyncssh.SSHAgentClient):
    """An agent at one path. Whoever is cancelled leaves no half answer behind for the next."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.trouble = ""
        """Why it is of no use now."""
        self._path = path
        self._turn = asyncio.Lock()
        self._hung_at: float | None = None

    async def get_keys(self, identities: Sequence[bytes] | None = None) -> Sequence[asyncssh.SSHKeyPair]:
        """The keys it has, of those that are named. Raises ValueError where it has none to give."""
        return await self._asked(lambda: super(Agent, self).get_keys(identities))

    async def sign(self, key_blob: bytes, data: bytes, flags: int = 0) -> bytes:
        """Sign with one of its keys. Raises ValueError."""
        return await self._asked(lambda: super(Agent, self).sign(key_blob, data, flags))

    async def _asked(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        async with self._turn:
            if self._hung_at is not None and time.monotonic() - self._hung_at < NOT_ASKED_FOR:
                raise ValueError(self.trouble)
            try:
                async with asyncio.timeout(ANSWERS_WITHIN):
                    answer = await ask()
            except TimeoutError:
                self._hung_at = time.monotonic()
                self.trouble = f"the ssh agent at {self._path} does not answer"
                self.close()
                self._reader = self._writer = None
                raise ValueError(self.trouble) from None
            except asyncio.CancelledError:
                self.close()
                self._reader = self._writer = None
                raise
            self._hung_at, self.trouble = None, ""
            return answer


_agents: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Agent]] = WeakKeyDictionary()


def agent_at(path: str) -> Agent:
    """The one client of this event loop for an agent."""
    agents = _agents.setdefault(asyncio.get_running_loop(), {})
    if path not in agents:
        agents[path] = Agent(path)
    return agents[path]
