"""What the operator's signals mean to a run: once, go to a safe point; twice, end now."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEAVES_AT = 2
"""After this many the next one ends fleetfix itself at once, whatever hosts still do."""


@contextmanager
def heard(interrupt: Callable[[str], int]) -> Iterator[None]:
    """Give signals to `interrupt` while a run goes on; it answers how many there were."""
    loop = asyncio.get_running_loop()
    were = {number: signal.getsignal(number) for number in SIGNALS}

    def hear(number: signal.Signals) -> None:
        if interrupt(number.name) >= LEAVES_AT:
            _forget(loop)
            for one in SIGNALS:
                signal.signal(one, signal.SIG_DFL)

    for number in SIGNALS:
        loop.add_signal_handler(number, hear, number)
    try:
        yield
    finally:
        _forget(loop)
        for number, before in were.items():
            signal.signal(number, before)


def _forget(loop: asyncio.AbstractEventLoop) -> None:
    for number in SIGNALS:
        loop.remove_signal_handler(number)
