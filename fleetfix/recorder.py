"""From event to journal to state to views: the one way in which a run becomes known.

An event is folded into the state at once, because the next decision needs it; it is shown only once
it is durable. What must not happen before its event is on disk waits for `durable()`. Commits are
grouped: all that came while one commit ran goes into the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fleetfix import secret_values
from fleetfix.errors import JournalError
from fleetfix.events import Event, Record, without_secrets
from fleetfix.state import RunState, after


class Store(Protocol):
    """Where records are kept for good: `append` returns once they are durable."""

    def append(self, records: Sequence[Record]) -> None: ...

    def head(self, run: str) -> str:
        """The head of the chain over a run's records, as hosts keep it; empty where there is none."""


class View(Protocol):
    """A reader of the stream."""

    def see(self, record: Record, state: RunState) -> None: ...


class Recorder:
    """Takes the events of one run, in order, from one event loop."""

    def __init__(
        self,
        run: str,
        store: Store,
        views: Sequence[View] = (),
        *,
        state: RunState | None = None,
        seq: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run = run
        self.state = state or RunState(run=run)
        self._store = store
        self._views = views
        self._seq = seq
        self._clock = clock
        self._waiting: list[Record] = []
        self._writer: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    def record(self, event: Event) -> None:
        """Take an event: in the state now, durable and shown soon."""
        if self._error is not None:
            raise self._error
        self._seq += 1
        if (mask := secret_values.mask()) is not None:
            event = without_secrets(event, mask)
        record = Record(run=self.run, seq=self._seq, at=self._clock(), event=event)
        self.state = after(self.state, record)
        self._waiting.append(record)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def durable(self) -> None:
        """Wait until every event taken so far is on disk. Raises what the journal raised."""
        while self._writer is not None and not self._writer.done():
            await asyncio.shield(self._writer)
        if self._error is not None:
            raise self._error

    async def anchor(self) -> str:
        """The head of the chain over every event taken so far, for a host to keep; empty where the journal
        does not tell."""
        try:
            await self.durable()
            return await asyncio.to_thread(self._store.head, self.run)
        except JournalError:
            return ""  # who records next hears of it; the host comes to its end all the same

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._store.append, batch)
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing may go on without a journal
                self._error = error
                return
            for record in batch:
                for view in self._views:
                    view.see(record, self.state)
