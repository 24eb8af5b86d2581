"""A run as it goes, on one screen whatever the number of hosts: who is at work, on what, since when.

Drawn at most four times a second, only where something has changed, and never for more than a
twentieth of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from fleetfix.events import (
    Record,
    RunInterrupted,
    RunResumed,
    RunStarted,
    SoakStarted,
    WaveStarted,
)
from fleetfix.hostset import HostSet
from fleetfix.state import RunState
from fleetfix.views import at_work
from fleetfix.views.amounts import count
from fleetfix.views.at_work import FEW, Row, Since, folded, whole
from fleetfix.views.grouping import counted, fold
from fleetfix.views.lines import Teller, interrupted, line_of
from fleetfix.views.neutral import one_line
from fleetfix.views.out import Out
from fleetfix.views.paint import PLAIN, Paint
from fleetfix.views.plan import plan_text
from fleetfix.views.region import Region, clipped, spread
from fleetfix.views.summary import tally

EVERY = 0.25
"""Seconds between two drawings, at least."""

SHARE = 20
"""Drawing may take this part of the time: after a slow one the next comes later."""

SMALLEST = (40, 10)
"""Columns and rows of a terminal on which a screen makes sense."""

LATELY = 8
"""Recent events that are shown where there is room for more hosts too."""


@dataclass
class Watched:
    """What is known of a run beside its state: since when each host is at work on what, what came last."""

    state: RunState = field(default_factory=RunState)
    since: Since = field(default_factory=Since)
    lately: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=100))
    interrupted: str = ""
    soak: tuple[str, float] | None = None
    """The wave that is left alone before the next begins, and until when."""
    hosts: str = ""
    """All hosts of the run, folded."""
    _teller: Teller = field(default_factory=Teller)

    def see(self, record: Record, state: RunState, paint: Paint = PLAIN) -> None:
        """Take one more record in."""
        self.state = state
        event = record.event
        self.since.see(record)
        if not self.hosts and state.started is not None:
            self.hosts = counted(HostSet(state.started.hosts))
        match event:
            case SoakStarted():
                self.soak = (event.wave, record.at + event.seconds)
            case WaveStarted():
                self.soak = None
            case RunInterrupted():
                self.interrupted = interrupted(event.signal, event.times)
        if not isinstance(event, RunStarted | RunResumed) and not self._teller.too_much(record):
            line = line_of(record, state, paint)
            if line:
                self.lately.append((record.at, line))


# -- the screen -------------------------------------------------------------------------------------


def screen(watched: Watched, now: float, width: int, height: int, paint: Paint = PLAIN) -> list[str]:
    """The lines of the screen; never more than `height`, none wider than `width`."""
    started = watched.state.started
    if started is None:
        return []
    rows = at_work.rows(watched.state, watched.since)
    lines = [*_head(watched, started, rows, now, width, paint)]
    room = height - len(lines)
    lately = min(len(watched.lately), max(min(LATELY, room - len(rows) - 2), room // 3 - 1, 0))
    lines += _at_work(rows, now, width, room - (lately + 1 if lately else 0), paint)
    if lately:
        lines.append("")
        lines += [f"{paint('faint', _clock(at))} {line}" for at, line in list(watched.lately)[-lately:]]
    return [clipped(line, width) for line in lines[:height]]


def _head(
    watched: Watched, started: RunStarted, rows: list[Row], now: float, width: int, paint: Paint
) -> Iterator[str]:
    state = watched.state
    took = whole(now - (watched.since.began or now))
    dry = " (dry run)" if started.dry else ""
    yield spread(f"{paint('strong', started.playbook)} on {watched.hosts}{dry}", took, width)
    ended = sum(1 for host in state.hosts.values() if host.finished is not None)
    yield _progress(state, ended, width, paint)
    yield _counts(state, rows, paint)
    if watched.interrupted:
        yield paint("warn", watched.interrupted)
    if state.halted:
        yield paint("bad", f"halted: {one_line(state.halted)}")
    if state.paused:
        yield paint("bad", "the controller's own network is lost: nothing is begun until it is back")
    if watched.soak and watched.soak[1] > now and not rows:
        wave, until = watched.soak
        yield f"{wave} soaks: {whole(until - now)} until the next batch"
    if why := _held_up(state, rows, now):
        yield paint("warn", why)


def _progress(state: RunState, ended: int, width: int, paint: Paint) -> str:
    surveyed = sum(1 for host in state.hosts.values() if host.pending is not None or host.finished)
    total = len(state.hosts)
    if surveyed < total and not state.waves:
        return f"planning     {_bar(surveyed, total, width, paint)} {surveyed} of {total} planned"
    stage = state.waves[-1].name if state.waves else "planned"
    return f"{stage:<12} {_bar(ended, total, width, paint)} {ended} of {total} ended"


def _bar(done: int, total: int, width: int, paint: Paint) -> str:
    cells = max(min(width - 40, 40), 8)
    full = cells * done // total if total else cells
    return paint("good", "━" * full) + paint("faint", "─" * (cells - full))


def _counts(state: RunState, rows: list[Row], paint: Paint) -> str:
    outcomes: Counter[str] = Counter(h.outcome for h in state.hosts.values() if h.outcome is not None)
    words = [tally(dict(outcomes), paint)] if outcomes else []
    if rows:
        words.append(f"{len(rows)} at work")
    coming = len(state.hosts) - outcomes.total() - len(rows)
    if coming:
        words.append(f"{coming} to come")
    return " · ".join(words)


def _held_up(state: RunState, rows: list[Row], now: float) -> str:
    """Who keeps all others waiting, where it is only a few."""
    if not rows or len(rows) > FEW:
        return ""
    if state.waves:
        wave = state.waves[-1]
        what, members = wave.name, set(wave.hosts)
    else:
        what, members = "the plan", set(state.hosts)
    late = [row for row in rows if row.host in members]
    if len(late) != len(rows) or len(members) <= len(late) or _waiting(state, members, late):
        return ""
    who = ", ".join(f"{row.host} ({row.step}, {_age(row, now)})" for row in late)
    return f"{what} waits for {who}"


def _waiting(state: RunState, members: set[str], late: list[Row]) -> bool:
    """Whether others than these are still to come; then nobody is held up by them alone."""
    known = {row.host for row in late}
    return any(
        state.hosts[name].finished is None and (state.waves or state.hosts[name].pending is None)
        for name in members - known
        if name in state.hosts
    )


def _at_work(rows: list[Row], now: float, width: int, room: int, paint: Paint) -> Iterator[str]:
    if not rows or room < 2:
        return
    yield ""
    room -= 1
    names = max(len(row.host) for row in rows)
    if len(rows) <= room:
        for row in rows:
            yield _line(f"{row.host:<{names}}", row, now, width, paint)
        return
    groups = list(folded(rows, room))
    shown = groups if len(groups) <= room else groups[: room - 1]
    labels = [fold(hosts, max(width // 4, 20)) for hosts, _ in shown]
    names = max(len(label) for label in labels)
    for label, (_, row) in zip(labels, shown, strict=True):
        yield _line(f"{label:<{names}}", row, now, width, paint)
    if len(shown) < len(groups):
        left = HostSet(host for hosts, _ in groups[len(shown) :] for host in hosts)
        yield f"… and {count(len(left), 'more host')}: {fold(left, 40)}"


def _line(label: str, row: Row, now: float, width: int, paint: Paint) -> str:
    step = paint("bad" if row.urgent else "strong", f"{row.step:<10}")
    return spread(f"{label}  {step} {row.doing}", _age(row, now), width)


def _age(row: Row, now: float) -> str:
    return whole(now - row.since)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


# -- the view ---------------------------------------------------------------------------------------


class Live:
    """Draws the screen at the foot of a terminal while a run goes on."""

    def __init__(
        self,
        out: Out,
        size: Callable[[], os.terminal_size],
        paint: Paint = PLAIN,
        *,
        diff: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._out = out
        self._size = size
        self._paint = paint
        self._diff = diff
        self._clock = clock
        self._watched = Watched()
        self._region = Region(out)
        self._plan_shown = False
        self._dirty = False
        self._drawn_at = 0
        self._not_before = 0.0
        self._paused = False

    def see(self, record: Record, state: RunState) -> None:
        self._watched.see(record, state, self._paint)
        self._dirty = True
        if isinstance(record.event, RunStarted | RunResumed) and (
            line := line_of(record, state, self._paint)
        ):
            self.above(line)
        if isinstance(record.event, WaveStarted):
            self.plan(state)

    def plan(self, state: RunState) -> None:
        """Show the folded plan; once, whoever asks first."""
        if not self._plan_shown:
            self._plan_shown = True
            self.above(f"{plan_text(state, diff=self._diff, paint=self._paint)}\n")

    def above(self, text: str) -> None:
        """Write a line that stays, above the screen."""
        self._region.clear(self._size().columns)
        self._out.line(text)
        self._dirty = True

    def pause(self) -> None:
        """Take the screen away until `go_on`: somebody is asked something."""
        self._region.clear(self._size().columns)
        self._paused = True

    def go_on(self) -> None:
        self._paused = False
        self._dirty = True

    def refresh(self) -> None:
        """Draw, where something has changed or a second has passed, and the terminal keeps up."""
        now = self._clock()
        if self._paused or not self._out.idle or time.monotonic() < self._not_before:
            return
        if not self._dirty and int(now) == self._drawn_at:
            return
        began = time.thread_time()
        size = self._size()
        self._region.draw(
            screen(self._watched, now, size.columns - 1, size.lines - 1, self._paint), size.columns
        )
        self._dirty, self._drawn_at = False, int(now)
        self._not_before = time.monotonic() + (time.thread_time() - began) * SHARE

    @contextlib.asynccontextmanager
    async def kept_fresh(self) -> AsyncIterator[None]:
        """Draw now and then while the run goes on; take the screen away when it has ended."""
        drawing = asyncio.ensure_future(self._draw_on())
        try:
            yield
        finally:
            drawing.cancel()
            self.pause()

    async def _draw_on(self) -> None:
        while True:
            self.refresh()
            await asyncio.sleep(EVERY)
