"""Ending what a run holds on its hosts, later: commit makes it lasting, release gives it up as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fleetfix.engine.context import OpenSession
from fleetfix.engine.functions import with_functions
from fleetfix.engine.rollback import lost_records
from fleetfix.errors import Failure, HostError, JournalError
from fleetfix.events import (
    HostCommitted,
    HostConnected,
    HostFinished,
    HostReleased,
    HostSaid,
    RunFinished,
    RunRolledBack,
)
from fleetfix.inventory import Host
from fleetfix.recorder import Recorder
from fleetfix.session import Purpose, Session, open_session
from fleetfix.state import exit_code, to_take_up


@dataclass(frozen=True)
class Settling:
    """What one command does on the hosts of a run, and who asks for it."""

    purpose: Purpose
    hosts: tuple[Host, ...]
    recorder: Recorder
    forks: int = 64
    opener: OpenSession = open_session

    async def commit(self) -> int:
        """Drop what only undo needs, and end the claim; says the exit code. Raises JournalError."""
        return await self._on_all(self._commit)

    async def release(self) -> int:
        """End the claim and leave all as it is; says the exit code. Raises JournalError."""
        return await self._on_all(self._release)

    async def _on_all(self, settle: Callable[[Host, Session], Awaitable[None]]) -> int:
        slots = asyncio.Semaphore(self.forks)
        failures: list[Failure] = []

        async def one(host: Host) -> None:
            async with slots:
                failure = await self._on_one(host, settle)
            if failure is not None:
                failures.append(failure)
                why = str(failure).removeprefix(f"{host.name}: ")
                self.recorder.record(HostSaid(host=host.name, step="", text=f"not done: {why}"))

        try:
            async with asyncio.TaskGroup() as group:
                for host in self.hosts:
                    group.create_task(one(host))
        except* JournalError as errors:
            raise errors.exceptions[0] from None
        await self.recorder.durable()
        if not failures:
            return 0
        return 4 if all(failure.kind == "unreachable" for failure in failures) else 2

    async def _on_one(
        self, host: Host, settle: Callable[[Host, Session], Awaitable[None]]
    ) -> Failure | None:
        def progress(step: str, text: str) -> None:
            self.recorder.record(HostSaid(host=host.name, step=step, text=text))

        try:
            opened = await self.opener(host, self.purpose, progress=progress)
        except HostError as error:
            return error.failure
        # A call that waits there for a controller which is gone is not waited for.
        session = with_functions(opened, host, frozenset())
        try:
            info = session.info
            self.recorder.record(HostConnected(host=host.name, user=info.user, python=info.python))
            await settle(host, session)
        except HostError as error:
            return error.failure
        finally:
            await session.close()
        return None

    async def _commit(self, host: Host, session: Session) -> None:
        past = await session.past()
        if (lost := await lost_records(session, host.name, past, self.recorder)) is not None:
            raise HostError(lost)
        if past and all(one.state == "undone" for one in past):
            said = "nothing is left to commit: the run went back here"
            self.recorder.record(HostSaid(host=host.name, step="", text=said))
            return
        await session.commit()
        self.recorder.record(
            HostCommitted(
                host=host.name,
                operator=self.purpose.operator,
                controller=self.purpose.controller,
                reason=self.purpose.reason,
            )
        )

    async def _release(self, host: Host, session: Session) -> None:
        past = await session.past()
        left = [f"{one.state}: {one.summary}" for one in past if one.state != "undone"]
        if (lost := await lost_records(session, host.name, past, self.recorder)) is not None:
            left.append(f"{lost.kind}: {lost.message}")
        await session.release()
        self.recorder.record(
            HostReleased(
                host=host.name,
                operator=self.purpose.operator,
                controller=self.purpose.controller,
                reason=self.purpose.reason,
                left=tuple(left),
            )
        )


def end_where_all_have_ended(recorder: Recorder) -> None:
    """A run that was cut short has come to its end once nothing of it is held on any host."""
    state = recorder.state
    for name, host in state.hosts.items():
        if host.is_open and (host.released or host.committed):
            recorder.record(
                HostFinished(
                    host=name,
                    outcome="cancelled",
                    reason="released as it was" if host.released else "committed as it was",
                    touched=host.started,
                    job_stopped=host.job_stopped,
                )
            )
    if state.going_back and not to_take_up(state):
        recorder.record(RunRolledBack(exit=exit_code(state)))
    if state.exit is None and not any(host.is_open for host in recorder.state.hosts.values()):
        recorder.record(RunFinished(exit=exit_code(recorder.state)))
