"""`--detach`: the run goes on in a process of its own, once its plan is agreed to.

The new process drives the run from its first moment; the one at the terminal follows the journal, asks,
hands the answer over and leaves. Where it ends before it has answered, the answer is no.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fleetfix.cli import consent
from fleetfix.cli.conduct import Manner
from fleetfix.cli.driving import drive, with_work
from fleetfix.cli.following import Follower
from fleetfix.cli.show import Show
from fleetfix.cli.state_dir import state_dir
from fleetfix.cli.tripped import refuse_while_tripped
from fleetfix.engine.fleetrun import Request
from fleetfix.engine.rollout import surveying
from fleetfix.errors import JournalError, UsageError
from fleetfix.folders import make_private
from fleetfix.journal import Journal
from fleetfix.state import RunState

ASKS, YES = b"?", b"y"


def begin(
    request: Request,
    manner: Manner,
    *,
    ask_above: int | None,
    known: RunState | None = None,
    since: int = 0,
) -> int:
    """Begin a run in a process of its own, or take one up again from `known`, folded from the records up to
    `since`; returns once it goes on by itself, or has ended."""
    if request.dry:
        raise UsageError("a dry run changes nothing and ends soon", hint="leave out --detach")
    with Journal.open(state_dir()) as journal:
        refuse_while_tripped(journal, request)
    log = _log(request.run)
    run = _Run(request, manner, log, log.stat().st_size, known, since)
    asks, questions = os.pipe()
    answers, answer = os.pipe()
    if _forked():
        os.close(asks)
        os.close(answer)
        _drive(run, questions, answers if ask_above is not None else None)
    os.close(questions)
    os.close(answers)
    try:
        with Journal.open(state_dir()) as journal:
            return _Terminal(run, journal).follow(asks, answer, ask_above)
    finally:
        os.close(asks)
        with contextlib.suppress(OSError):
            os.close(answer)


@dataclass(frozen=True)
class _Run:
    """What both processes know of the run before they part."""

    request: Request
    manner: Manner
    log: Path
    logged: int
    """Bytes in the log before: a run that is taken up may have been detached before."""
    known: RunState | None
    since: int


def _log(run: str) -> Path:
    """What the run prints goes here; nobody else may read it."""
    folder = state_dir() / "detached"
    make_private(folder)
    path = folder / f"{run}.log"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    return path


# -- the process that drives the run ----------------------------------------------------------------


def _forked() -> bool:
    """Fork twice, so that the new process has no terminal and never gets one. True in that process."""
    sys.stdout.flush()
    sys.stderr.flush()
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    return True


def _drive(run: _Run, questions: int, answers: int | None) -> NoReturn:
    """Drive the run to its end, and end this process with its exit code."""
    code = 70
    try:
        _turn_away_from_the_terminal(run.log)
        code = _to_its_end(run, questions, answers)
    except BaseException as error:  # noqa: BLE001 - this process has no other place that could tell
        from fleetfix.cli.trouble import tell

        code = tell(error)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)


def _turn_away_from_the_terminal(log: Path) -> None:
    nowhere = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    there = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    for number, place in ((0, nowhere), (1, there), (2, there)):
        os.dup2(place, number)
    os.close(nowhere)
    os.close(there)


def _to_its_end(run: _Run, questions: int, answers: int | None) -> int:
    request = run.request

    async def agreed(state: RunState) -> bool:
        del state
        assert answers is not None
        os.write(questions, ASKS)
        return await _answer(answers) == YES

    with Journal.open(state_dir()) as journal, journal.drive(request.run):
        if journal.last_seq(request.run) != run.since:
            raise JournalError(
                f"run {request.run} was driven by another process meanwhile",
                hint=f"fleetfix show {request.run}",
            )
        show = Show(json=False, diff=run.manner.diff, plain=True)
        try:
            consented = None if answers is None else agreed
            state = asyncio.run(drive(request, journal, show, consented=consented, known=run.known))
        finally:
            show.close()
    return show.end(state)


async def _answer(answers: int) -> bytes:
    """What the process at the terminal says; nothing where it is gone."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(answers, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(answers)
    return os.read(answers, 1)


# -- the process at the terminal --------------------------------------------------------------------


class _Terminal:
    """Follows the run until it needs nobody any more."""

    def __init__(self, run: _Run, journal: Journal) -> None:
        manner = run.manner
        self._run = run.request.run
        self._json = manner.json
        self._journal = journal
        self._log = run.log
        self._logged = run.logged
        self._show = Show(json=False, diff=manner.diff, plain=True)
        views = () if manner.json else self._show.views()
        self._follower = Follower(journal, self._run, views, known=run.known, since=run.since)
        self._said = b""
        self._gone = False

    def follow(self, asks: int, answer: int, ask_above: int | None) -> int:
        """Follow, ask and hand over; returns the exit code."""
        try:
            asyncio.run(self._follower.until(lambda: self._settled(asks, asking=ask_above is not None)))
            if self._said == ASKS and ask_above is not None:
                agreed = self._agreed(ask_above)
                os.write(answer, YES if agreed else b"n")
                if not agreed:
                    return self._to_the_end()
            elif self._gone:
                return self._to_the_end()
            return self._leave()
        finally:
            self._show.close()

    def _settled(self, asks: int, *, asking: bool) -> bool:
        """Whether the run asks now, goes on by itself, or has ended."""
        if not self._said and select.select([asks], [], [], 0)[0]:
            self._said = os.read(asks, 1)
            self._gone = not self._said
        state = self._follower.state
        if self._gone:
            return True
        if self._said == ASKS:
            return self._follower.heard and not surveying(state)
        return not asking and self._follower.heard

    def _agreed(self, above: int) -> bool:
        state = self._follower.state
        question = consent.Question("go on with", with_work(state), above=above)
        consent.forget_typed()
        self._show.question(state, question.text)
        self._show.close()
        try:
            return question.agreed(sys.stdin.readline())
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return False

    def _to_the_end(self) -> int:
        """The run ends at once, or has ended already."""
        state = asyncio.run(self._follower.until(lambda: not self._journal.driven(self._run)))
        self._show.close()
        if self._follower.heard and state.exit is not None:
            if self._json:
                self._tell(process=None, exit=state.exit)
                return state.exit
            return self._show.end(state)
        said = self._log.read_bytes()[self._logged :]
        print(said.decode(errors="replace"), file=sys.stderr, end="")
        return 1

    def _leave(self) -> int:
        process = self._journal.driver(self._run)
        if self._json:
            self._tell(process=process, exit=None)
            return 0
        print(f"run {self._run} goes on by itself, as process {process}")
        print(f"follow it: fleetfix watch {self._run}")
        print(f"interrupt it: fleetfix stop {self._run}")
        return 0

    def _tell(self, **how: int | None) -> None:
        print(json.dumps({"run": self._run, "log": str(self._log), **how}))
