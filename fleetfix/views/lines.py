"""Plain progress lines: one line an event that tells something, on stderr.

A host that is lost or has gone back is told of when it ends, which follows at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from fleetfix.events import (
    GOOD,
    BreakerTripped,
    ChangeFinished,
    ChangeFound,
    ChangeStarted,
    ChangeUndone,
    CohortFormed,
    ConnectionDropped,
    ConnectionReturned,
    Event,
    EvidenceKept,
    HostCommitted,
    HostFinished,
    HostNotUndone,
    HostPlanned,
    HostReleased,
    HostSaid,
    LeaseAwaited,
    NetworkLost,
    NetworkReturned,
    Record,
    RollbackStarted,
    RunHalted,
    RunInterrupted,
    RunResumed,
    RunStarted,
    SoakStarted,
    StepFinished,
    StepStarted,
    StepWaited,
    WaveStarted,
)
from fleetfix.hostset import HostSet
from fleetfix.state import HostState, RunState
from fleetfix.views.amounts import count, duration
from fleetfix.views.at_work import Since, waited_for
from fleetfix.views.grouping import counted
from fleetfix.views.neutral import one_line
from fleetfix.views.out import Out
from fleetfix.views.paint import PLAIN, Paint
from fleetfix.views.plan import plan_text, said_of, why_ended

LOOKS_EVERY = 5.0
QUIET = 30.0
"""Seconds without a line after which it is said who is waited for."""

WAIT_LINES_EVERY = 10.0
"""Seconds between two lines that say that the same step of the same host still waits."""

SAID_A_SECOND = 20
"""Lines of one host's own words that are shown in a second; the journal has them all."""


def line_of(record: Record, state: RunState, paint: Paint = PLAIN) -> str | None:
    """The line that tells an event, None where it is not worth one."""
    event = record.event
    match event:
        case RunStarted():
            dry = " (dry run: nothing is changed)" if event.dry else ""
            return f"run {record.run}: {event.playbook} on {counted(HostSet(event.hosts))}{dry}"
        case RunResumed():
            return f"run {record.run} goes on with {counted(HostSet(event.hosts))}"
        case CohortFormed():
            return f"{counted(HostSet(event.hosts))} go as one: {one_line(event.why)}"
        case WaveStarted():
            return paint("strong", f"{event.name}: {counted(HostSet(event.hosts))}")
        case RunHalted():
            end = "nothing was changed" if not state.waves else "no further host is started"
            return paint("bad", f"halted: {one_line(event.reason)}; {end}")
        case BreakerTripped():
            end = "no run changes hosts of this inventory until the breaker is reset"
            return paint("bad", f"the breaker tripped: {one_line(event.reason)}; {end}")
        case SoakStarted():
            return paint("faint", f"{event.wave} soaks for {duration(event.seconds)}")
        case NetworkLost():
            said = f"{event.dropped} of {event.open} sessions dropped at once: this machine's own network"
            return paint("warn", f"{said}; nothing is begun until they are back")
        case NetworkReturned():
            return f"the network is back after {duration(event.seconds)}"
        case RunInterrupted():
            return paint("warn", interrupted(event.signal, event.times))
        case _:
            return _of_host(event, state, paint)


def _of_host(event: Event, state: RunState, paint: Paint) -> str | None:
    match event:
        case EvidenceKept() | StepFinished(result="ok") if state.hosts[event.host].pending is False:
            # Of a fleet most hosts are well: the summary says so of all of them, in one line.
            return None
        case HostFinished():
            return _finished(event, state, paint)
        case HostCommitted() | HostReleased():
            return f"{event.host} {settled(event)}"
        case HostNotUndone():
            return f"{event.host} {paint('bad', 'left as it is')}: {one_line(str(event.failure))}"
        case EvidenceKept():
            return f"{event.host} {event.step}: evidence kept in {one_line(event.folder)}"
        case RollbackStarted():
            return f"{event.host} {paint('warn', 'going back')}: {one_line(event.reason)}"
        case ConnectionDropped():
            return (
                f"{event.host} {paint('warn', 'connection dropped')}: {one_line(event.reason)}; tried again"
            )
        case ConnectionReturned():
            return f"{event.host} {returned(event)}"
        case LeaseAwaited():
            return f"{event.host} {paint('warn', 'waits')}: {awaited(event)}"
        case ChangeUndone():
            return _undone(event, paint)
        case ChangeFound():
            return f"{event.host} {event.step}: {found(event)}"
        case (
            StepStarted() | StepWaited() | ChangeStarted() | ChangeFinished() | StepFinished() | HostSaid()
        ):
            words = _in_step(event, paint, touched=bool(state.hosts[event.host].changes))
            where = f"{event.host} {event.step}".rstrip()
            return f"{where}: {words}" if words else None
        case _:
            return None


def returned(event: ConnectionReturned) -> str:
    """That a host answers again, and what that means for what was under way."""
    back = f"answers again after {duration(event.seconds)}"
    if not event.restarted:
        return back
    return f"{back}: it was restarted meanwhile; what was under way there is looked at again"


def awaited(event: LeaseAwaited) -> str:
    """Which other run is waited for, and how long at most."""
    why = f" ({event.reason})" if event.reason else ""
    who = one_line(f"run {event.run} of {event.operator} on {event.controller} writes there{why}")
    return f"{who}; it is waited for, {duration(event.seconds)} at most"


def found(event: ChangeFound) -> str:
    """What a host says of a change when its run is taken up again."""
    said = {"absent": "was never begun there", "begun": "is being done there", "in_doubt": "is in doubt"}
    return f"the host says: {said.get(event.state, f'is {event.state}')}: {one_line(event.shown.summary)}"


def settled(event: HostCommitted | HostReleased) -> str:
    """That a run was given up on a host, or made lasting there, and what that leaves."""
    if isinstance(event, HostCommitted):
        return "committed: what the run did there stays, what only undo needed is dropped"
    left = "; ".join(one_line(item) for item in event.left)
    return "released: " + (f"left as it is: {left}" if left else "nothing was open there")


def interrupted(signal: str, times: int) -> str:
    """What happens after the operator's first, or second, sign to end."""
    if times > 1:
        return f"{signal} again: everything that runs is cancelled now, and its processes are ended"
    return f"{signal}: hosts at work go to a safe point, no other is started; once more to cancel at once"


def _finished(event: HostFinished, state: RunState, paint: Paint) -> str | None:
    host = state.hosts[event.host]
    if state.started is not None and state.started.dry:
        return None  # the plan tells of it, folded, as soon as the others have answered
    if event.outcome == "not_started" or (event.outcome in GOOD and not event.touched):
        return None
    why = (one_line(event.reason) if event.outcome in GOOD else said_of(host)).removeprefix(
        f"{event.host}: "
    )
    stopped = paint("bad", " JOB STOPPED, NOT RESTARTED") if event.job_stopped else ""
    return f"{event.host} {paint.outcome(event.outcome)}{f': {why}' if why else ''}{stopped}"


def _undone(event: ChangeUndone, paint: Paint) -> str:
    where = f"{event.host} {event.step}: "
    if event.ok:
        return f"{where}undone: {one_line(event.summary)}"
    why = f": {one_line(str(event.failure))}" if event.failure else ""
    return f"{where}{paint('bad', 'NOT undone')}: {one_line(event.summary)}{why}"


def _in_step(
    event: StepStarted | StepWaited | ChangeStarted | ChangeFinished | StepFinished | HostSaid,
    paint: Paint,
    *,
    touched: bool,
) -> str | None:
    match event:
        case StepStarted():
            return f"attempt {event.attempt}" if event.attempt > 1 else None
        case StepWaited():
            return paint("faint", f"waits: {one_line(event.reason)}")
        case HostSaid():
            return one_line(event.text)
        case ChangeStarted():
            return one_line(event.shown.summary)
        case ChangeFinished():
            why = one_line(str(event.failure)) if event.failure else f"exit {event.exit}"
            return None if event.ok else f"{paint('bad', 'failed')}: {why}"
        case StepFinished():
            return _ended(event, paint, touched=touched)


def _ended(event: StepFinished, paint: Paint, *, touched: bool) -> str | None:
    reason = why_ended(event, touched=touched)
    if event.result == "skipped" or (event.result == "ok" and not reason):
        return None
    if event.result == "changed":
        reason = ""  # what was changed was told when it began
    took = f" ({duration(event.seconds)})" if event.seconds >= 1 else ""
    return paint.outcome(event.result) + (f": {reason}" if reason else "") + took


class Teller:
    """Knows what was told already, and what is said too often."""

    def __init__(self) -> None:
        self._waited: dict[tuple[str, str], float] = {}
        self._said: dict[str, tuple[int, int]] = {}
        self._failed: dict[tuple[str, str], str] = {}

    def too_much(self, record: Record) -> bool:
        """Whether a record is not worth a line, after those before it."""
        event = record.event
        if isinstance(event, ChangeFinished) and event.failure:
            self._failed[event.host, event.step] = event.failure.message
        if isinstance(event, StepFinished) and event.result == "failed" and event.failure:
            # Told already when its change failed.
            return self._failed.get((event.host, event.step)) == event.failure.message
        if isinstance(event, StepWaited):
            key = (event.host, event.step)
            if record.at - self._waited.get(key, 0.0) < WAIT_LINES_EVERY:
                return True
            self._waited[key] = record.at
        if isinstance(event, HostSaid):
            second, lines = self._said.get(event.host, (0, 0))
            lines = lines + 1 if second == int(record.at) else 1
            self._said[event.host] = (int(record.at), lines)
            return lines > SAID_A_SECOND
        return False


class Lines:
    """Writes progress lines; the folded plan before the first host is touched."""

    def __init__(
        self,
        out: Out,
        paint: Paint = PLAIN,
        *,
        diff: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._out = out
        self._clock = clock
        self._state = RunState()
        self._since = Since()
        self._line_at = clock()
        self._paint = paint
        self._diff = diff
        self._teller = Teller()
        self._planned = 0
        self._given_up = 0
        self._told_at = 0.0
        self._plan_shown = False

    def plan(self, state: RunState) -> None:
        """Show the folded plan; once, whoever asks first."""
        if not self._plan_shown:
            self._plan_shown = True
            self._line(plan_text(state, diff=self._diff, paint=self._paint))

    def _line(self, text: str) -> None:
        self._line_at = self._clock()
        self._out.line(text)

    def still(self) -> None:
        """Say who is waited for, where nothing was said for a while: a pipe has no screen."""
        now = self._clock()
        if now - self._line_at >= QUIET and (text := waited_for(self._state, self._since, now)):
            self._line(self._paint("faint", text))

    @contextlib.asynccontextmanager
    async def kept_fresh(self) -> AsyncIterator[None]:
        """Say now and then who is waited for, while the run goes on."""
        telling = asyncio.ensure_future(self._tell_on())
        try:
            yield
        finally:
            telling.cancel()

    async def _tell_on(self) -> None:
        while True:
            await asyncio.sleep(LOOKS_EVERY)
            self.still()

    def see(self, record: Record, state: RunState) -> None:
        event = record.event
        self._state = state
        self._since.see(record)
        if isinstance(event, WaveStarted):
            self.plan(state)
        if isinstance(event, RunStarted | RunResumed):
            self._told_at = record.at
        if isinstance(event, HostPlanned):
            self._planned += 1
            self._progress(record, state)
        elif isinstance(event, HostFinished) and _gave_up(state.hosts[event.host]):
            self._given_up += 1
            self._progress(record, state)
        if not self._teller.too_much(record) and (line := line_of(record, state, self._paint)):
            self._line(line)

    def _progress(self, record: Record, state: RunState) -> None:
        if record.at - self._told_at < WAIT_LINES_EVERY:
            return
        self._told_at = record.at
        given_up = f", {self._given_up} given up" if self._given_up else ""
        self._line(f"planned {self._planned} of {count(len(state.hosts), 'host')}{given_up}")


def _gave_up(host: HostState) -> bool:
    """Whether a host has ended without a plan. One that goes back needs none."""
    return host.pending is None and not host.going_back
