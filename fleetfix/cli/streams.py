"""stdin, stdout and stderr that are always there and never end a run.

A stream may be closed from the start (`>&-`), its reader may leave (`| head -1`) and its disk may be full.
What cannot be written then goes nowhere; a run goes on to its end and keeps its exit code.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any, TextIO

from fleetfix.secret_values import masked


class Lasting(io.FileIO):
    """A descriptor for writing that takes everything; `lost` is the error after which nothing arrives."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        while self.lost is None:
            try:
                written = super().write(data)
            except OSError as error:
                self.lost = error
                break
            if written is not None:
                return written
            # Somebody who shares the terminal or pipe with us has made it non-blocking.
            select.select([], [self.fileno()], [])
        return memoryview(data).nbytes


class Masking(io.TextIOWrapper):
    """Text for people and programs, without the secrets of this process."""

    def write(self, text: str) -> int:
        super().write(masked(text))
        return len(text)


def take() -> None:
    """Put streams in place that stand all this; the first thing that a command does."""
    _fill_closed()
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - it lives as long as the process
    sys.stdout = _lasting(1, sys.stdout, line_buffering=os.isatty(1))
    sys.stderr = _lasting(2, sys.stderr, line_buffering=True)


def _fill_closed() -> None:
    """Open /dev/null where a stream is closed, lest the journal or a connection get its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)


def _lasting(number: int, before: TextIO | None, *, line_buffering: bool) -> TextIO:
    encoding = "utf-8"
    if before is not None:
        encoding = before.encoding
        with contextlib.suppress(OSError, ValueError):
            before.flush()
    buffer = io.BufferedWriter(Lasting(number, "w", closefd=False))
    # A terminal that cannot show a character never ends a run.
    return Masking(buffer, encoding=encoding, errors="backslashreplace", line_buffering=line_buffering)


def lost() -> str:
    """Why stdout could not be written to, or nothing; a reader that has left wanted no more."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = raw.lost if isinstance(raw, Lasting) else None
    return "" if error is None or error.errno == errno.EPIPE else os.strerror(error.errno or 0).lower()


def left() -> bool:
    """Whether whoever read stdout has left, and wants no more; a full disk is no such word."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, Lasting) and raw.lost is not None and raw.lost.errno == errno.EPIPE
