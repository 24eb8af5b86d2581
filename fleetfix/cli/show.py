"""What a run shows: progress on stderr and its result on stdout, or JSON lines on stdout alone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator

from fleetfix.recorder import View
from fleetfix.state import RunState
from fleetfix.views.command import command_summary
from fleetfix.views.fit import fit
from fleetfix.views.json_lines import JsonLines
from fleetfix.views.lines import Lines
from fleetfix.views.live import SMALLEST, Live
from fleetfix.views.out import Out
from fleetfix.views.paint import Paint
from fleetfix.views.plan import plan_text
from fleetfix.views.summary import last_line, summary_text


class Show:
    """The streams of one command that works on hosts."""

    def __init__(self, *, json: bool, diff: bool = False, plain: bool = False) -> None:
        self._json = json
        self._diff = diff
        self._errors = Out(sys.stderr)
        self._out = Out(sys.stdout) if json else self._errors
        paint = Paint.for_stream(sys.stderr, os.environ)
        self._live = None
        if not json and not plain and _can_be_drawn_on():
            self._live = Live(self._errors, _size, paint, diff=diff)
        self._lines = Lines(self._errors, paint, diff=diff)

    def views(self) -> tuple[View, ...]:
        return (JsonLines(self._out),) if self._json else (self._live or self._lines,)

    @contextlib.asynccontextmanager
    async def kept_fresh(self) -> AsyncIterator[None]:
        """Keep the view going between events: JSON has none of its own."""
        if self._json:
            yield
            return
        async with (self._live or self._lines).kept_fresh():
            yield

    def question(self, state: RunState, text: str) -> None:
        """Show the plan, and a question on it that is answered on the same line."""
        (self._live or self._lines).plan(state)
        if self._live is None:
            self._errors.line("")
        else:
            self._live.pause()
        self._errors.words(text)

    def ask(self, text: str) -> None:
        """Show a question that is answered on the same line."""
        if self._live is not None:
            self._live.pause()
        self._errors.words(text)

    def answered(self, agreed: bool) -> None:
        """The question of before was answered."""
        if not agreed:
            self.say("")  # ^C leaves the cursor behind the question
        if self._live is not None:
            self._live.go_on()

    def say(self, text: str) -> None:
        """Say a line that is no event; JSON has no place for it."""
        if self._json:
            return
        if self._live is not None:
            self._live.above(text)
        else:
            self._errors.line(text)

    def close(self) -> None:
        self._out.close()
        self._errors.close()

    def end(self, state: RunState, saved: str = "") -> int:
        """Show the result, and where its plan was `saved`; returns the run's exit code."""
        code = 70 if state.ended_with is None else state.ended_with
        if not self._json:
            print(fit(self._result(state, code, saved), sys.stdout))
        return code

    def _result(self, state: RunState, code: int, saved: str) -> str:
        paint = Paint.for_stream(sys.stdout, os.environ)
        if state.started is not None and state.started.command:
            return command_summary(state, code, paint)
        if state.started is not None and state.started.dry:
            plan = plan_text(state, diff=self._diff, paint=paint)
            said = f"nothing was changed\n{saved}" if saved else "nothing was changed"
            return f"{plan}\n\n{said}\n{last_line(state, code, paint=paint)}"
        return summary_text(state, code, paint=paint)


def _can_be_drawn_on() -> bool:
    """Whether stderr is a terminal whose cursor can be moved, and large enough."""
    if os.environ.get("TERM", "dumb") == "dumb" or not sys.stderr.isatty():
        return False
    size = _size()
    return size.columns >= SMALLEST[0] and size.lines >= SMALLEST[1]


def _size() -> os.terminal_size:
    try:
        return os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):
        return os.terminal_size((80, 24))
