"""One command of the operator's over a fleet: every host ends with one result, and is told of as it ends.

There is no plan, no order and no way back: this is what `ssh` in a loop is used for, with nothing lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fleetfix import __version__
from fleetfix.commands import Ended, Execute, hint_of_exit, said_of_exit
from fleetfix.engine.context import Interrupts, OpenSession
from fleetfix.engine.outcomes import outcome_of
from fleetfix.errors import Failure, HostError, JournalError
from fleetfix.events import (
    CommandEnded,
    HostConnected,
    HostFinished,
    HostStarted,
    Outcome,
    RunFinished,
    RunInterrupted,
    RunStarted,
)
from fleetfix.inventory import Host
from fleetfix.policy import Policy
from fleetfix.recorder import Recorder
from fleetfix.session import Feed, Purpose, Session, Stream, open_session
from fleetfix.state import RunState, exit_code

PLAYBOOK = "exec"
"""What stands in the journal in place of a playbook's name."""

CANCEL_SECONDS = 30.0
"""How long a host may take to prove that a command has ended."""

HostTake = Callable[[str, Stream, bytes], Awaitable[None]]
"""Takes a piece of one host's output; that host is slowed down until it returns."""


@dataclass(frozen=True)
class CommandRequest:
    """A command that was asked for. `said` is the command in words, without secrets, for the journal."""

    run: str
    command: Execute
    said: str
    hosts: tuple[Host, ...]
    inventory: str
    operator: str
    controller: str
    forks: int = 64
    reason: str = ""
    feed: Feed | None = None


async def run_command(
    request: CommandRequest,
    recorder: Recorder,
    take: HostTake,
    *,
    interrupts: Interrupts,
    opener: OpenSession = open_session,
) -> RunState:
    """Run a command on every host, `forks` of them at a time. Raises JournalError.

    Interrupted once, no host begins any more, what runs is ended and seen gone. Twice: nothing is waited
    for, and each host ends its command by itself as it finds the connection closed.
    """
    recorder.record(_started(request))
    await recorder.durable()
    fleet = _Commands(request, recorder, take, interrupts, opener)
    tasks = [asyncio.ensure_future(fleet.run(host)) for host in request.hosts]
    watch = asyncio.ensure_future(fleet.watch(tasks))
    try:
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, JournalError):
                raise ended
    finally:
        watch.cancel()
        for task in tasks:
            task.cancel()
    recorder.record(RunFinished(exit=exit_code(recorder.state)))
    await recorder.durable()
    return recorder.state


def _started(request: CommandRequest) -> RunStarted:
    return RunStarted(
        playbook=PLAYBOOK,
        source="the command line",
        digest="",
        inventory=request.inventory,
        hosts=tuple(host.name for host in request.hosts),
        steps=(),
        policy=Policy(forks=request.forks),
        operator=request.operator,
        controller=request.controller,
        version=__version__,
        reason=request.reason,
        command=request.said,
    )


class _Commands:
    """What all hosts of one command share."""

    def __init__(
        self,
        request: CommandRequest,
        recorder: Recorder,
        take: HostTake,
        interrupts: Interrupts,
        opener: OpenSession,
    ) -> None:
        self._request = request
        self._recorder = recorder
        self._take = take
        self._interrupts = interrupts
        self._open = opener
        self._slots = asyncio.Semaphore(request.forks)

    async def watch(self, tasks: list[asyncio.Task[None]]) -> None:
        """Note each interrupt; the second one ends what the first one waits for."""
        seen = 0
        while True:
            await self._interrupts.more_than(seen)
            seen = self._interrupts.times
            self._recorder.record(RunInterrupted(signal=self._interrupts.signal, times=seen))
            if seen > 1:
                for task in tasks:
                    task.cancel()

    async def run(self, host: Host) -> None:
        """Take one host to its one result, whatever happens."""
        try:
            async with self._slots:
                if not self._interrupts.times:
                    await self._connect_and_run(host)
        except asyncio.CancelledError:
            self._finish(host, "cancelled", _cancelled("it was not waited for"))
        except HostError as error:
            self._finish(host, outcome_of("connect", error.failure.kind), error.failure)
        except JournalError:
            raise
        except Exception as error:  # noqa: BLE001 - one host's trouble is never the others' end
            failure = Failure(kind="bug", message=f"{type(error).__name__}: {error}")
            self._finish(host, "failed", failure)
        if self._recorder.state.hosts[host.name].finished is None:
            self._finish(host, "cancelled", _cancelled("it was not begun"))

    async def _connect_and_run(self, host: Host) -> None:
        opening = asyncio.ensure_future(self._open(host, self._purpose(), progress=_unheard))
        session = await self._unless_interrupted(opening)
        if session is None:
            return
        try:
            info = session.info
            self._recorder.record(HostConnected(host=host.name, user=info.user, python=info.python))
            self._recorder.record(HostStarted(host=host.name))
            # What is run leaves no trace on the host: that it was, stands here before it is.
            await self._recorder.durable()
            await self._run(host, session)
        finally:
            await session.close()

    async def _unless_interrupted(self, opening: asyncio.Future[Session]) -> Session | None:
        stop = asyncio.ensure_future(self._interrupts.more_than(0))
        try:
            both: set[asyncio.Future[Any]] = {opening, stop}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            return opening.result() if opening.done() else None
        finally:
            stop.cancel()
            opening.cancel()

    async def _run(self, host: Host, session: Session) -> None:
        counts = {"out": 0, "err": 0}

        async def take(stream: Stream, data: bytes) -> None:
            counts[stream] += len(data)
            await self._take(host.name, stream, data)

        command = self._request.command
        running = asyncio.ensure_future(session.execute(command, take, self._request.feed))
        stopping = asyncio.ensure_future(self._stopped(session))
        lost: Failure | None = None
        try:
            both: set[asyncio.Future[Any]] = {running, stopping}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            ended = await self._last_word(running, stopping)
        except HostError as error:
            if error.failure.kind in ("disabled", "blocked"):
                raise
            lost, ended = error.failure, Ended(failure=error.failure)
        finally:
            running.cancel()
            stopping.cancel()
        self._recorder.record(
            CommandEnded(
                host=host.name,
                exit=ended.exit,
                failure=ended.failure,
                stdout_bytes=counts["out"],
                stderr_bytes=counts["err"],
                seconds=ended.seconds,
            )
        )
        outcome, failure = _result(ended, lost)
        self._finish(host, outcome, failure, touched=True)

    async def _stopped(self, session: Session) -> tuple[str, ...]:
        """Wait for an interrupt, then end what runs; names what cannot be ended."""
        await self._interrupts.more_than(0)
        async with asyncio.timeout(CANCEL_SECONDS):
            return await session.cancel()

    async def _last_word(
        self, running: asyncio.Future[Ended], stopping: asyncio.Future[tuple[str, ...]]
    ) -> Ended:
        """How the command ended; where it was cancelled, whether all of it is gone."""
        if running.done():
            return running.result()
        try:
            left = await stopping
        except TimeoutError:
            return Ended(failure=Failure(kind="hung", message="the host does not say whether it has ended"))
        if left:
            return Ended(failure=Failure(kind="hung", message=f"it cannot be ended: {', '.join(left)}"))
        # What it printed last may still wait for a reader that does not read.
        await asyncio.wait({running}, timeout=1.0)
        return running.result() if running.done() else Ended(failure=_cancelled("it was ended as asked"))

    def _purpose(self) -> Purpose:
        return Purpose(
            run=self._request.run,
            playbook=PLAYBOOK,
            dry=False,
            operator=self._request.operator,
            controller=self._request.controller,
            reason=self._request.reason,
        )

    def _finish(
        self, host: Host, outcome: Outcome, failure: Failure | None, *, touched: bool = False
    ) -> None:
        if self._recorder.state.hosts[host.name].finished is None:
            reason = failure.message if failure else ""
            self._recorder.record(
                HostFinished(
                    host=host.name, outcome=outcome, reason=reason, failure=failure, touched=touched
                )
            )


def _result(ended: Ended, lost: Failure | None) -> tuple[Outcome, Failure | None]:
    if lost is not None and lost.kind == "unreachable":
        message = f"{lost.message}; nothing tells how far the command came"
        return "in_doubt", lost.model_copy(update={"message": message})
    if lost is None and ended.failure is not None and ended.failure.kind == "command":
        # Its keeper was killed, by the command itself or for memory.
        message = f"{ended.failure.message}; nothing tells how far it came"
        return "in_doubt", ended.failure.model_copy(update={"message": message})
    if ended.failure is not None:
        return ("cancelled" if ended.failure.kind == "cancelled" else "failed"), ended.failure
    if ended.exit == 0:
        return "ok", None
    code = ended.exit or 0
    return "failed", Failure(kind="command", message=said_of_exit(code), hint=hint_of_exit(code))


def _cancelled(why: str) -> Failure:
    return Failure(kind="cancelled", message=why)


def _unheard(step: str, text: str) -> None:
    del step, text
