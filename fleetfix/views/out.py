"""A stream that never holds the run up: lines are written by a thread, and a reader may leave.

A terminal stopped by ^S or a full pipe would else stop the event loop, and with it the signs of life
that keep every host's runner waiting for us. When the reader is gone, the run goes on unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import TextIO

from fleetfix.views.fit import fit

CLOSE_SECONDS = 5.0


class Out:
    """Writes lines to a stream, in order, from its own thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: queue.SimpleQueue[str | Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._writing = False

    def line(self, text: str) -> None:
        """Write a line soon."""
        self.words(fit(text, self._stream) + "\n")

    def whole(self, line: str) -> None:
        """Write a line for programs soon: in one piece, however wide the terminal is."""
        self.words(f"{line}\n")

    def words(self, text: str) -> None:
        """Write a part of a line soon."""
        self._put(text)

    async def drained(self) -> None:
        """Wait until all of it is written: who has more to say than the reader takes waits here."""
        loop = asyncio.get_running_loop()
        written = loop.create_future()
        self._put(lambda: loop.call_soon_threadsafe(_set, written))
        await written

    def _put(self, what: str | Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, daemon=True)
            self._thread.start()
        self._lines.put(what)

    @property
    def idle(self) -> bool:
        """Whether all that was given is written: the reader keeps up."""
        return self._lines.empty() and not self._writing

    def close(self) -> None:
        """Wait until everything is written, a stuck reader for a few seconds only."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(CLOSE_SECONDS)
            self._thread = None

    def _write(self) -> None:
        gone = False
        while (what := self._lines.get()) is not None:
            self._writing = True
            text = what if isinstance(what, str) else ""
            gone = gone or not _wrote(self._stream, text, flush=not text or self._lines.empty())
            if not isinstance(what, str):
                with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                    what()
            self._writing = False
        if not gone:
            _wrote(self._stream, "", flush=True)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _wrote(stream: TextIO, text: str, *, flush: bool) -> bool:
    try:
        stream.write(text)
        if flush:
            stream.flush()
    except (OSError, ValueError):  # ValueError: the stream was closed under us
        _to_nowhere(stream)
        return False
    return True


def _to_nowhere(stream: TextIO) -> None:
    """Let what is still buffered go nowhere, so that Python's own flush at exit says nothing."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
