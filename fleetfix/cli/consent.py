"""The operator's word before anything is changed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
from collections.abc import Awaitable
from typing import TypeVar

from fleetfix.errors import UsageError
from fleetfix.hostset import HostSet
from fleetfix.views.amounts import count
from fleetfix.views.grouping import fold

Word = TypeVar("Word", bound=str)


def at_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def required(
    what: str, hosts: HostSet, *, yes: bool, yes_hosts: int | None, above: int, or_else: str = ""
) -> bool:
    """Whether the operator is still to be asked; UsageError where nobody is there to say yes.

    Above so many hosts `--yes` alone is not enough: their number must be given or typed. `or_else` says
    what may be done without a yes.
    """
    if yes_hosts is not None:
        _require_number(yes_hosts, hosts)
        return False
    if len(hosts) > above and (yes or not at_terminal()):
        raise UsageError(
            f"{what} would go to {len(hosts)} hosts: {fold(hosts)}",
            hint=f"say that you mean it: --yes-hosts {len(hosts)}",
        )
    if not yes and not at_terminal():
        raise UsageError(
            f"{what} on {count(len(hosts), 'host')} needs a yes, and nobody is at a terminal to say it",
            hint=f"--yes, or {or_else}" if or_else else "--yes",
        )
    return not yes


def _require_number(given: int, hosts: HostSet) -> None:
    if given != len(hosts):
        raise UsageError(
            f"--yes-hosts {given}, but {count(len(hosts), 'host')} would be reached: {fold(hosts)}",
            hint="look at the selection again",
        )


class Question:
    """One question on some hosts: yes or no, or their number where they are many."""

    def __init__(self, what: str, hosts: HostSet, *, above: int) -> None:
        self._number = str(len(hosts)) if len(hosts) > above else ""
        end = "type the number of hosts: " if self._number else "[y/N] "
        self.text = f"{what} {count(len(hosts), 'host')} {fold(hosts)}? {end}"

    def agreed(self, answer: str) -> bool:
        said = answer.strip().lower()
        return said == self._number if self._number else said in ("y", "yes")


def ask(question: Question) -> bool:
    """Ask at the terminal, and wait for the answer."""
    forget_typed()
    print(question.text, end="", file=sys.stderr, flush=True)
    return question.agreed(sys.stdin.readline())


def confirmed(text: str) -> bool:
    """Ask a question that is not about hosts; only yes is yes."""
    forget_typed()
    print(f"{text} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def answered(question: Question, interrupted: Awaitable[object]) -> bool:
    """Wait for the answer while the event loop goes on; an interrupt says no."""
    said = await _unless(interrupted)
    return said is not None and question.agreed(said)


async def chosen(words: tuple[Word, ...], interrupted: Awaitable[object]) -> Word | None:
    """Wait for one of these words, or the beginning of one; None for anything else, and an interrupt."""
    said = (await _unless(interrupted) or "").strip().lower()
    return next((word for word in words if said and word.startswith(said)), None)


async def _unless(interrupted: Awaitable[object]) -> str | None:
    """What is typed; None where it is interrupted first."""
    answer = asyncio.ensure_future(_typed())
    stop = asyncio.ensure_future(interrupted)
    try:
        await asyncio.wait({answer, stop}, return_when=asyncio.FIRST_COMPLETED)
        return None if stop.done() else answer.result()
    finally:
        answer.cancel()
        stop.cancel()


async def _typed() -> str:
    """One line from the terminal, read where it is there: a thread that waits could not be ended."""
    loop = asyncio.get_running_loop()
    number = sys.stdin.fileno()
    ready = asyncio.Event()
    loop.add_reader(number, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(number)
    return os.read(number, 4096).decode(errors="replace")


def forget_typed() -> None:
    """What was typed before the question was asked is no answer to it."""
    with contextlib.suppress(OSError, ValueError, termios.error):
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
