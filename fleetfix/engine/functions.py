"""A session of a host on which functions of the author's work from the controller.

The host records a change begun, holds its lock, and waits; the function runs here; the host is told how
it ended and records that. So what holds for every change holds for it: at most once, or in doubt.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from fleetfix.actions.fabric import CHECK, HOLD, Fabric, key_of
from fleetfix.commands import Change, Completed, Ended, Execute, Json, Read
from fleetfix.errors import Failure, HostError
from fleetfix.inventory import Host
from fleetfix.playbook import Step
from fleetfix.session import Feed, HostInfo, Past, Session, Take, Waits

SOON = 0.05
STILL = 20.0
"""Seconds between two words to the host that the function still works."""


@dataclass(frozen=True)
class Asked:
    """A function to call: of which file, with which arguments, for at most so many seconds."""

    file: str
    sha256: str
    function: str
    args: Mapping[str, Json]
    seconds: float

    @classmethod
    def of(cls, args: Mapping[str, Json]) -> Asked:
        return cls(
            file=str(args["file"]),
            sha256=str(args["sha256"]),
            function=str(args["function"]),
            args=dict(args["args"]),
            seconds=float(args["seconds"]),
        )


class Functions(Protocol):
    """Calls functions of fabfiles, each in a process of its own that ends when the call is cancelled."""

    async def call(self, host: Host, asked: Asked) -> Completed:
        """Call a function with a connection to a host. An exception of it is exit 1, told in stderr."""
        ...


def keys_of(steps: Iterable[Step]) -> frozenset[str]:
    """The keys of the changes that these steps make by functions."""
    return frozenset(step.act.key for step in steps if isinstance(step.act, Fabric))


def with_functions(session: Session, host: Host, keys: frozenset[str]) -> WithFunctions:
    """The session, for steps with these keys; what is called is shared by all hosts of this event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _of_loop:
        _of_loop[loop] = importlib.import_module("fleetfix.transports.fabfiles").Fabfiles()
    return WithFunctions(session, host, _of_loop[loop], keys)


_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Functions] = WeakKeyDictionary()


class WithFunctions:
    """A session, with the functions that its changes, their undo and its checks call."""

    def __init__(self, session: Session, host: Host, functions: Functions, keys: frozenset[str]) -> None:
        self._session = session
        self._host = host
        self._functions = functions
        self._keys = keys
        self._calls: set[asyncio.Task[Completed]] = set()
        self._held: set[str] = set()
        """Changes of the past that a function made."""
        self._mine: set[str] = set()
        """Changes whose functions are called, or undone, by this session now."""
        self._gone: set[str] = set()
        """Tokens of calls that waited for a controller that is gone; they end soon."""

    # -- what functions have a part in ------------------------------------------------------------

    async def read(self, step: str, reads: Sequence[Read]) -> tuple[Completed, ...]:
        checks = {
            number: self._call(Asked.of(one.args))
            for number, one in enumerate(reads)
            if one.function == CHECK
        }
        rest = [one for one in reads if one.function != CHECK]
        try:
            replies = iter(await self._session.read(step, rest) if rest else ())
            return tuple(
                [
                    await checks[number] if number in checks else next(replies)
                    for number in range(len(reads))
                ]
            )
        finally:
            await _end(*checks.values())

    async def change(self, id: str, step: str, change: Change) -> Completed:
        asked = next((call.args for call in change.do if call.function == HOLD), None)
        if asked is None or await self._is_past(id):
            return await self._session.change(id, step, change)
        return await self._beside(id, self._session.change(id, step, change), Asked.of(asked))

    async def undo(self, id: str) -> Completed:
        if id not in self._held:
            return await self._session.undo(id)
        return await self._beside(id, self._session.undo(id), None)

    async def past(self) -> tuple[Past, ...]:
        """As the host tells it. A change that still waits there waits for a controller that is gone."""
        past = await self._session.past()
        held = [one for one in past if one.key.startswith("fabric:")]
        self._held = {one.id for one in held}
        for one in held:
            if one.state == "begun" and one.id not in self._mine:
                await self._give_up(one.id)
        return past

    async def cancel(self) -> tuple[str, ...]:
        await _end(*self._calls)
        return await self._session.cancel()

    async def close(self) -> None:
        await _end(*self._calls)
        await self._session.close()

    async def _is_past(self, id: str) -> bool:
        """Whether the host knows the change."""
        return any(one.id == id for one in await self.past())

    async def _give_up(self, id: str) -> None:
        """Say that nobody calls the function any more, where no other controller is at work on the host."""
        try:
            waits = await self._session.waiting(id)
            if waits is not None:
                self._gone.add(waits.token)
                await self._session.tell(id, waits.token, {"gone": True})
        except HostError as error:
            if error.failure.kind not in ("lease_held", "unfinished", "blocked", "disabled"):
                raise

    async def _beside(
        self, id: str, recorded: Coroutine[Any, Any, Completed], asked: Asked | None
    ) -> Completed:
        """Have the host record it, and call the function while the host waits."""
        record = asyncio.ensure_future(recorded)
        self._mine.add(id)
        call: asyncio.Task[Completed] | None = None
        still: asyncio.Future[None] | None = None
        try:
            waits = await self._waits(id, record)
            if waits is not None:
                token = waits.token
                wanted = asked or self._believed(waits.asked)
                if isinstance(wanted, Failure):
                    await self._session.tell(id, token, {"failure": wanted.model_dump()})
                    return await record
                call = self._call(wanted)
                still = asyncio.ensure_future(self._still(id, token))
                await asyncio.wait({record, call, still}, return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    await self._session.tell(id, token, _word(call.result()))
            return await record
        finally:
            self._mine.discard(id)
            for one in (record, still):
                if one is not None:
                    one.cancel()
            if call is not None:
                await _end(call)

    async def _waits(self, id: str, record: asyncio.Future[Completed]) -> Waits | None:
        """What the host waits for; None where it has made its record without."""
        while not record.done():
            asking = asyncio.ensure_future(self._session.waiting(id))
            try:
                both: set[asyncio.Future[Any]] = {record, asking}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                waits = asking.result() if asking.done() else None
                if waits is not None and waits.token not in self._gone:
                    return waits
            finally:
                asking.cancel()
            # It was asked before the record was asked for: another question goes before that one.
            await asyncio.wait({record}, timeout=SOON)
        return None

    def _believed(self, asked: Mapping[str, Json]) -> Asked | Failure:
        """What the host says is its undo, where a step of the playbook that this machine has says so too.

        A host must not choose what is called here: not the file, nor the function, nor its arguments.
        """
        if key_of(asked) in self._keys and asked.get("function") == asked.get("undo"):
            return Asked.of(asked)
        what = f"{asked.get('undo')} of {asked.get('file')} (sha256 {str(asked.get('sha256'))[:12]})"
        return Failure(
            kind="blocked",
            message=f"its undo is {what}, which no step of the run has as this machine knows it",
            hint="go back from the machine that began the run, with the file as it was",
        )

    async def _still(self, id: str, token: str) -> None:
        while True:
            await asyncio.sleep(STILL)
            await self._session.tell(id, token, None)

    def _call(self, asked: Asked) -> asyncio.Task[Completed]:
        call = asyncio.ensure_future(self._functions.call(self._host, asked))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    # -- what they have no part in ------------------------------------------------------------------

    @property
    def info(self) -> HostInfo:
        return self._session.info

    async def acquire(self) -> None:
        await self._session.acquire()

    async def await_lease(self, seconds: float) -> None:
        await self._session.await_lease(seconds)

    async def waiting(self, id: str) -> Waits | None:
        return await self._session.waiting(id)

    async def tell(self, id: str, token: str, word: Json) -> None:
        await self._session.tell(id, token, word)

    async def lacking(self) -> tuple[str, ...]:
        return await self._session.lacking()

    async def note(self, name: str, value: Json) -> None:
        await self._session.note(name, value)

    async def recall(self, name: str) -> Json:
        return await self._session.recall(name)

    async def end(self, outcome: str, *, keep_claim: bool, commit: bool, anchor: str = "") -> None:
        await self._session.end(outcome, keep_claim=keep_claim, commit=commit, anchor=anchor)

    async def commit(self) -> None:
        await self._session.commit()

    async def release(self) -> None:
        await self._session.release()

    async def execute(self, command: Execute, take: Take, feed: Feed | None = None) -> Ended:
        return await self._session.execute(command, take, feed)


def _word(completed: Completed) -> dict[str, Json]:
    """How a function ended, for the host's record."""
    if completed.failure is not None:
        return {"failure": completed.failure.model_dump()}
    return {
        "exit": completed.exit,
        "stdout": completed.stdout,
        "stderr": completed.stderr,
        "cut": completed.cut,
    }


async def _end(*calls: asyncio.Task[Completed]) -> None:
    """Cancel calls, and wait until their processes have ended."""
    for call in calls:
        call.cancel()
    if calls:
        await asyncio.wait(calls)
