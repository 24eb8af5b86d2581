"""What the operator's signals mean to a run: once, go to a safe point; twice, end now."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEAVES_AT = 3
"""After this many the next one ends fleetfix itself, whatever hosts still do."""


@contextmanager
def heard(interrupt: Callable[[str], int]) -> Iterator[None]:
    """Give signals to `interrupt` while a run goes on; it answers how many there were."""
    loop = asyncio.get_running_loop()

    def hear(number: signal.Signals) -> None:
        if interrupt(number.name) >= LEAVES_AT:
            _forget(loop)

    for number in SIGNALS:
        loop.add_signal_handler(number, hear, number)
    try:
        yield
    finally:
        _forget(loop)


def _forget(loop: asyncio.AbstractEventLoop) -> None:
    for number in SIGNALS:
        loop.remove_signal_handler(number)
