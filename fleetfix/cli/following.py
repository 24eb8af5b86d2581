"""Follow a run by its journal, whoever drives it, and tell its driver to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator

from fleetfix.cli.show import Show
from fleetfix.cli.state_dir import state_dir
from fleetfix.errors import UsageError
from fleetfix.journal import Journal
from fleetfix.recorder import View
from fleetfix.state import RunState, after, fold
from fleetfix.views.command import command_summary
from fleetfix.views.fit import fit
from fleetfix.views.summary import unfinished_text

LOOK_EVERY = 0.2
"""Seconds between two looks into the journal."""

LEFT_MIDWAY = 2
"""The exit code of a watch whose run has lost its controller."""


class Follower:
    """Reads a run from the journal, record by record, and shows each to the views."""

    def __init__(
        self,
        journal: Journal,
        run: str,
        views: tuple[View, ...],
        *,
        known: RunState | None = None,
        since: int = 0,
    ) -> None:
        """Follow from the beginning, or from `known`, which is folded from the records up to `since`."""
        self.state = known or RunState(run=run)
        self._journal = journal
        self._run = run
        self._views = views
        self._since = self._seq = since

    @property
    def heard(self) -> bool:
        """Whether there was anything new."""
        return self._seq > self._since

    def catch_up(self) -> None:
        """Take in what is there."""
        for record in self._journal.records(self._run, after=self._seq):
            self._seq = record.seq
            self.state = after(self.state, record)
            for view in self._views:
                view.see(record, self.state)

    async def until(self, over: Callable[[], bool]) -> RunState:
        """Follow until it is over, and take in all that came up to then."""
        while True:
            # Asked before the journal is read: what came last is read all the same.
            last = over()
            self.catch_up()
            if last:
                return self.state
            await asyncio.sleep(LOOK_EVERY)


def watch(text: str, *, plain: bool, json: bool) -> int:
    """Follow a run to its end; returns its exit code."""
    with Journal.open(state_dir()) as journal:
        run = journal.find(text)
        show = Show(json=json, plain=plain)
        follower = Follower(journal, run, show.views())
        try:
            state = asyncio.run(_watch(follower, show, lambda: not journal.driven(run)))
        except KeyboardInterrupt:
            show.close()
            print(f"the run goes on: fleetfix watch {run}, fleetfix stop {run}", file=sys.stderr)
            return 130
        finally:
            show.close()
    if state.ended_with is not None:
        return show.end(state)
    if not json:
        was_command = state.started is not None and state.started.command
        text = command_summary(state, None) if was_command else unfinished_text(state)
        print(fit(text, sys.stdout))
    return LEFT_MIDWAY


async def _watch(follower: Follower, show: Show, over: Callable[[], bool]) -> RunState:
    async with show.kept_fresh():
        return await follower.until(over)


def stop(text: str) -> None:
    """Interrupt the process that drives a run."""
    with Journal.open(state_dir()) as journal:
        run = journal.find(text)
        process = journal.driver(run)
        state = fold(journal.records(run))
        if process is None:
            raise UsageError(f"no process of this machine drives run {run}", hint=f"fleetfix show {run}")
    try:
        os.kill(process, signal.SIGINT)
    except PermissionError:
        raise UsageError(
            f"run {run} is driven by process {process} of another user", hint="ask that user, or be root"
        ) from None
    except ProcessLookupError:
        raise UsageError(f"run {run} has just ended", hint=f"fleetfix show {run}") from None
    for line in _said_of_stop(run, process, state):
        print(line)


def _said_of_stop(run: str, process: int, state: RunState) -> Iterator[str]:
    """What one more signal means to a run; to a way back, or a commit, a run that has ended."""
    follow = f"follow it: fleetfix watch {run}"
    if state.exit is not None:
        yield f"process {process} is told to stop; it goes back, or settles what the run did"
        yield follow
    elif not state.interrupted:
        yield f"process {process} is told to stop: hosts at work go to a safe point, no other is started"
        yield f"{follow}; cancel it at once: fleetfix stop {run} again"
    elif state.interrupted == 1:
        yield f"process {process} is told again: everything that runs is cancelled, its processes are ended"
        yield follow
    else:
        yield f"process {process} is ended at once; hosts end what they have in hand by themselves"
        yield f"then: fleetfix show {run}"
