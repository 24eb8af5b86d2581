"""One conversation with one host: drives probes against a session and answers what the journal knows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fleetfix.action import Measurement, Probe, Reads, Replies
from fleetfix.commands import Completed, Read
from fleetfix.errors import Failure, HostError
from fleetfix.runs import BreakerRow
from fleetfix.session import Session


class Baselines(Protocol):
    """The rates that jobs have proven in earlier runs."""

    def baseline(self, job: str) -> Measurement | None:
        """The last proven rate of a job, by its key."""


class Memory(Baselines, Protocol):
    """What the controller remembers from earlier runs, and keeps of this one for people to read."""

    def tripped(self, inventory: str) -> BreakerRow | None:
        """The trip that holds runs on this inventory back, of this run or another; None where none does."""

    def keep_evidence(self, run: str, host: str, step: str, files: Mapping[str, bytes]) -> str:
        """Keep files of a host durably, and say in which folder. Raises JournalError."""


@dataclass
class Line:
    """A session, with the reads that the controller answers itself."""

    session: Session
    memory: Baselines
    before: Measurement | None = None
    """What a record-only measurement of this run found on this host."""
    _live: dict[str, tuple[Probe[Any], Reads]] = field(default_factory=dict)

    async def ask(self, step: str, probe: Probe[Any]) -> Any:
        """Answer one probe until it returns its facts. Raises the HostError that it raises."""
        answer = (await self.ask_all({step: probe}))[step]
        if isinstance(answer, HostError):
            raise answer
        return answer

    async def ask_all(self, probes: Mapping[str, Probe[Any]]) -> dict[str, Any]:
        """Answer many probes in step: all their next reads go in one frame.

        A probe that cannot make facts of the answers leaves its HostError in the place of facts.
        """
        answers: dict[str, Any] = {}
        asked: dict[str, Reads] = {}
        for step, probe in probes.items():
            _advance(step, probe, None, asked, answers)
        while asked:
            replies = await self._answer(asked)
            waiting, asked = asked, {}
            for step in waiting:
                _advance(step, probes[step], replies[step], asked, answers)
        return answers

    async def _answer(self, asked: Mapping[str, Reads]) -> dict[str, Replies]:
        reads = [read for each in asked.values() for read in each]
        remote = list({_identity(read): read for read in reads if not _own(read)}.values())
        known: dict[str, Completed] = {}
        if remote:
            step = next(iter(asked)) if len(asked) == 1 else ""
            replies = await self.session.read(step, remote)
            known = {_identity(read): reply for read, reply in zip(remote, replies, strict=True)}
        return {
            step: tuple(self._own_answer(read) if _own(read) else known[_identity(read)] for read in each)
            for step, each in asked.items()
        }

    def _own_answer(self, read: Read) -> Completed:
        match read.function:
            case "journal.baseline":
                found = self.memory.baseline(str(read.args.get("job", "")))
            case "journal.before":
                found = self.before
            case "controller.clock":
                return Completed(value=time.time())
            case _:
                message = f"the controller has no answer for {read.function}"
                return Completed(exit=None, failure=Failure(kind="bug", message=message))
        return Completed(value=found.model_dump() if found else None)


def in_time(probe: Probe[Any], seconds: float | None) -> Probe[Any]:
    """The probe of a step that has so many seconds: none of its questions may take longer."""
    if seconds is None:
        return (yield from probe)
    try:
        reads = next(probe)
        while True:
            most = (read.model_copy(update={"timeout": min(read.timeout, seconds)}) for read in reads)
            reads = probe.send((yield tuple(most)))
    except StopIteration as done:
        return done.value


def _advance(
    step: str,
    probe: Probe[Any],
    replies: Replies | None,
    asked: dict[str, Reads],
    answers: dict[str, Any],
) -> None:
    try:
        asked[step] = next(probe) if replies is None else probe.send(replies)
    except StopIteration as done:
        answers[step] = done.value
    except HostError as error:
        answers[step] = error
    except Exception as error:  # noqa: BLE001 - one action's mistake is one host's `bug`, never the fleet's end
        kind = type(error).__name__
        answers[step] = HostError(
            Failure(kind="bug", message=f"{step} could not read the answers: {kind}: {error}")
        )


def _own(read: Read) -> bool:
    return read.module in ("journal", "controller")


def _identity(read: Read) -> str:
    return read.model_dump_json()
