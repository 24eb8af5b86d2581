"""A session with the runner on a host: greets it, asks, waits, and comes back when the line breaks.

Everything over a `Wire`, which is one process on a connection; `transports/` makes those. Each request
is kept until it is answered, so that it can be asked again on a new connection: ids make that safe.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import itertools
import math
import random
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from fleetfix import protocol, replies, secret_values
from fleetfix.commands import Call, Change, Completed, Ended, Execute, Json, Read
from fleetfix.errors import Failure, HostError
from fleetfix.greeting import ALLOW, Said
from fleetfix.redaction import needles_of
from fleetfix.session import Feed, HostInfo, Opening, Past, Purpose, Stream, Take, Waits, host_error

if TYPE_CHECKING:
    from fleetfix.inventory import Host

ERRORS_KEPT = 4096
SAYS = 50
"""Lines a second that a host may say; more are dropped."""
MOST_ITEMS = 10_000
MOST_OF_ITEMS = 16 << 20
"""Bytes that all items of one answer may have."""
UNASKED = 4 << 20
UNASKED_A_SECOND = 1 << 20
"""Bytes that a host may send that answer nothing, at once and in each second; a runner never comes near."""
LEAST = 1024
"""Bytes that the smallest frame counts as: to take it costs time too."""
WRITES = frozenset({"acquire", "change", "undo", "note", "end", "commit", "release"})
AT_ONCE = 8
MARGIN = 30.0
"""Seconds that an answer may take beyond the deadlines that the host keeps."""
AHEAD = 256 * 1024
"""Bytes of input that are sent to a command before it has taken any; a host sends no more output ahead."""
UNSETTLED = 2
"""So many hosts may have had the password for sudo and never said whether it is right: one that hangs
keeps no other from it, and a wrong one is not tried on a fleet."""
NOT_AGAIN = "give the right one: --secret become=prompt, or FLEETFIX_BECOME_PASSWORD"
REFUSED = Failure(kind="sudo", message="sudo refused the password", hint=NOT_AGAIN)
PATIENCE = 60.0
"""Seconds that a change of a lost session may take on the host before the next one goes on."""
BOOKKEEPING = PATIENCE + 60.0
"""Seconds that a host may take to look into its records, or to write there."""
SWEEPING = 300.0
UNDOING = 2 * 3600.0
"""Seconds that the calls of an undo or of a commit may take; only the host's log knows their deadlines."""
DRIPS = 4
"""Times the silence we bear in which bytes may come that make no frame."""
LONGEST_PAUSE = 5.0
"""Seconds between two tries to come back while somebody waits for an answer, at most."""
RESTFUL = 30.0
"""Seconds between two tries to come back while nobody waits for an answer."""


class Receiver(Protocol):
    """What a wire tells: bytes as they come, and the end."""

    def data(self, data: bytes) -> None: ...

    def errors(self, data: bytes) -> None: ...

    def ended(self, why: str, *, dropped: bool = False) -> None:
        """`dropped` where the connection broke, and the process itself said nothing of an end."""
        ...


class Wire(Protocol):
    """One process on a host, its input here."""

    def send(self, data: bytes) -> None:
        """Queue bytes for its input; what cannot be sent any more is dropped, `ended` tells."""
        ...

    async def close(self) -> None:
        """Hang up, without harm to what the process has in hand."""
        ...


Connect = Callable[[str, Receiver], Awaitable[Wire]]
"""Starts a command on the host. Raises HostError; may take longer than it should, so callers limit it."""


# -- sudo ---------------------------------------------------------------------------------------------


class Password:
    """The password for sudo, that no second host sees before one has taken it, or after one refused."""

    def __init__(self, text: str | None) -> None:
        self.text = text
        self._refused_by = ""
        self._unsettled: list[str] = []
        """Hosts that had it, and have not said whether it is right."""
        self._proven = False
        self._first = asyncio.Lock()

    async def use(self, host: str) -> str:
        """The password, once it may be sent to this host. Raises HostError(sudo)."""
        if self.text is None:
            raise _sudo(f"{host}: sudo wants a password", ALLOW)
        if not self._proven:
            await self._first.acquire()
            if self._proven:
                self._first.release()
        if why := self._why_not():
            self._release()
            raise _sudo(f"{host}: sudo wants a password, and {why}: it is not sent again", NOT_AGAIN)
        return self.text

    def _why_not(self) -> str:
        if self._refused_by:
            return f"{self._refused_by} has refused it"
        if len(self._unsettled) >= UNSETTLED and not self._proven:
            return f"{' and '.join(self._unsettled)} had it and never said whether it is right"
        return ""

    def accepted(self) -> None:
        """A host took it."""
        self._proven = True
        self._release()

    def given_up(self, host: str, *, refused: bool) -> None:
        """A host refused it, or went away before it said anything."""
        if refused:
            self._refused_by = self._refused_by or host
        elif not self._proven:
            self._unsettled.append(host)
        self._release()

    def _release(self) -> None:
        if self._first.locked():
            self._first.release()


_passwords: WeakKeyDictionary[asyncio.AbstractEventLoop, Password] = WeakKeyDictionary()


def password_of_run() -> Password:
    """The one password object of this event loop, of what this process was given."""
    loop = asyncio.get_running_loop()
    if loop not in _passwords:
        _passwords[loop] = Password(secret_values.become_password())
    return _passwords[loop]


def _sudo(message: str, hint: str = "") -> HostError:
    return HostError(Failure(kind="sudo", message=message, hint=hint))


# -- one started runner -------------------------------------------------------------------------------


class Dropped(HostError):
    """The connection broke before the runner had begun: nothing was asked, so all can be asked again."""


class Contact:
    """One runner, from the start command to the end of its channel."""

    def __init__(
        self,
        host: str,
        start: protocol.Start,
        password: Password,
        on_frame: Callable[[dict[str, Json], int], bool],
        on_lost: Callable[[HostError], None],
    ) -> None:
        self.wire: Wire | None = None
        self.heard = time.monotonic()
        self.understood = self.heard
        """When the last whole frame came."""
        self.lost: HostError | None = None
        self._host = host
        self._start = start
        self._password = password
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._decoder = protocol.Decoder()
        self._unasked = Unasked(host)
        self._noise = bytearray()
        self._errors = bytearray()
        self._wired = asyncio.Event()
        self._time: asyncio.Timeout | None = None
        self._asked = 0
        """How often sudo has asked for a password."""
        self._sent_password = False
        """It has one, and has not said whether it is right."""
        self.password_given: tuple[str, ...] = ()
        """The password for sudo, where sudo has asked for it here."""
        self._sender: asyncio.Task[None] | None = None
        self._over = False

    async def greet(self, connect: Connect, within: float) -> None:
        """Start the runner and wait for its marker, so many seconds at most. Raises HostError.

        The time in which another host proves the password for sudo does not count.
        """
        try:
            async with asyncio.timeout(within) as self._time:
                self.wire = await connect(self._start.command(), self)
                self._wired.set()
                await self._greeted
            self.wire.send(protocol.core())
        except TimeoutError:
            await self._give_up()
            raise self._named(self._why_late(within)) from None
        except BaseException:
            await self._give_up()
            raise

    async def _give_up(self) -> None:
        self._settle_password(refused=False)
        await self.close()

    def _why_late(self, within: float) -> Failure:
        if self.wire is None:
            return Failure(kind="unreachable", message=f"no answer within {within:.0f} s")
        return self._said.why_late(within, answered=bool(self.password_given))

    async def close(self) -> None:
        """Hang up."""
        self._over = True
        if self._sender is not None:
            self._sender.cancel()
        if self.wire is not None:
            await self.wire.close()

    def send(self, frame: dict[str, Json]) -> None:
        """Send one frame, if there is still someone to send it to."""
        if self.wire is not None and not self._over:
            self.wire.send(protocol.encode(frame))

    # -- what the wire tells ----------------------------------------------------------------------

    def data(self, data: bytes) -> None:
        """Skip noise up to the marker, then take frames."""
        self.heard = time.monotonic()
        if not self._greeted.done():
            self._noise += data
            data = self._skip_noise()
        if not data or self._over:
            return
        try:
            for frame in self._decoder.feed(data):
                self.understood = self.heard
                if not self._on_frame(frame, self._decoder.size):
                    self._unasked.count(self._decoder.size)
                if self._over:
                    return
        except HostError as error:
            self._lose(error)
        except Exception as error:  # noqa: BLE001 - whatever one host sends, it is never the others' end
            what = f"what it sent could not be taken: {type(error).__name__}: {error}"
            self._lose(host_error("bug", f"{self._host}: {what}"))

    def _skip_noise(self) -> bytes:
        match = self._start.marker.search(self._noise)
        if match is not None:
            rest = bytes(self._noise[match.end() :])
            self._greeted.set_result(None)
            if self._sent_password:
                self._password.accepted()
                self._sent_password = False
            return rest
        if (none := self._said.why_none()) is not None:
            self._fail(none)
        elif len(self._noise) > protocol.NOISE:
            self._fail(self._said.why_noisy())
        return b""

    @property
    def _said(self) -> Said:
        return Said(self._start, bytes(self._noise), bytes(self._errors))

    def errors(self, data: bytes) -> None:
        """Keep the tail of what is said beside the frames, and answer sudo's prompt."""
        if self._over:
            return
        try:
            self._unasked.count(len(data))
        except HostError as error:
            self._fail_with(error)
            self._lose(error)
            return
        prompt = self._start.prompt.encode()
        before = bytes(self._errors[-len(prompt) + 1 :])
        self._errors += data
        del self._errors[:-ERRORS_KEPT]
        if self._start.become and not self._greeted.done() and (new := (before + data).count(prompt)):
            self._asked += new
            self._hear_prompt()

    def _hear_prompt(self) -> None:
        if self._asked > 1:
            self._settle_password(refused=True)
            self._fail(REFUSED)
        else:
            self._sender = asyncio.ensure_future(self._answer_sudo())

    async def _answer_sudo(self) -> None:
        left = self._hold_time()
        try:
            text = await self._password.use(self._host)
        except HostError as error:
            self._fail_with(error)
            return
        finally:
            self._let_time_go(left)
        self._sent_password = True
        self.password_given = (text,)
        await self._wired.wait()
        assert self.wire is not None
        self.wire.send(text.encode() + b"\n")

    def _hold_time(self) -> float | None:
        """Stop the time to greet; says how many seconds are left of it."""
        if self._time is None or self._time.expired() or (when := self._time.when()) is None:
            return None
        self._time.reschedule(None)
        return when - asyncio.get_running_loop().time()

    def _let_time_go(self, left: float | None) -> None:
        if self._time is not None and left is not None:
            self._time.reschedule(asyncio.get_running_loop().time() + left)

    def ended(self, why: str, *, dropped: bool = False) -> None:
        """The channel is closed."""
        said = self._said
        if not self._greeted.done():
            wrong = self._sent_password and said.password_was_wrong
            self._settle_password(refused=wrong)
            if dropped and not wrong:
                message = f"{self._host}: the connection broke before a runner began ({why})"
                # A password that was on its way when it broke is not sent once more unasked.
                error = HostError if self.password_given else Dropped
                self._fail_with(error(Failure(kind="unreachable", message=message)))
                return
            self._fail(REFUSED if wrong else said.why_ended(why))
            return
        self._settle_password(refused=False)
        tail = protocol.readable(bytes(self._errors).replace(self._start.prompt.encode(), b""))
        broke = b"Traceback (most recent call last)" in self._errors
        kind, what = ("bug", "the runner broke") if broke else ("unreachable", "the connection was lost")
        self._lose(host_error(kind, f"{self._host}: {what} ({why})" + (f": {tail}" if tail else "")))

    def _settle_password(self, *, refused: bool) -> None:
        if self._sent_password:
            self._sent_password = False
            self._password.given_up(self._host, refused=refused)

    def _named(self, failure: Failure) -> HostError:
        message = f"{self._host}: {failure.message}"
        return HostError(failure.model_copy(update={"message": message}))

    def _fail(self, failure: Failure) -> None:
        self._fail_with(self._named(failure))

    def _fail_with(self, error: HostError) -> None:
        if not self._greeted.done():
            self._greeted.set_exception(error)
            self._greeted.exception()  # who waited may have given up: then it is nobody's

    def _lose(self, error: HostError) -> None:
        if not self._over:
            self._over, self.lost = True, error
            self._on_lost(error)


class Unasked:
    """Counts what a host sends beside its answers: signs of life, words of progress, late answers."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._left = float(UNASKED)
        self._at = time.monotonic()

    def count(self, size: int) -> None:
        """Count so many bytes. Raises HostError where they are more than any runner sends."""
        now = time.monotonic()
        self._left = min(self._left + (now - self._at) * UNASKED_A_SECOND, UNASKED) - max(size, LEAST)
        self._at = now
        if self._left < 0:
            message = f"{self._host}: the host sends without end what nobody asked for"
            raise HostError(Failure(kind="bug", message=message, hint=protocol.NOT_OURS))


# -- the session ----------------------------------------------------------------------------------------


@dataclass
class Pending:
    """A request until it is answered."""

    frame: dict[str, Json]
    modules: tuple[str, ...]
    future: asyncio.Future[Any]
    slots: list[Completed | None] = field(default_factory=list)
    items: list[Json] = field(default_factory=list)
    size: int = 0
    """Bytes of all items that have come."""
    timeout: asyncio.Timeout | None = None
    left: float | None = None
    """Seconds of its time that were left when the line was lost, while it is."""
    streamed: Streamed | None = None
    """Of a command whose output is on its way; it is asked for once, on one connection."""


class Streamed:
    """What has come of a command and is not taken yet, and what it may still be fed."""

    def __init__(self, feed: Feed | None) -> None:
        self._come: deque[tuple[Stream, bytearray]] = deque()
        self._news = asyncio.Event()
        self._ended = False
        self._feed = feed
        self._offset = 0
        self._held = 0
        self._given = 0
        """Bytes of input that were sent and that the host has not said to have passed on."""

    def hear(self, host: str, frame: dict[str, Json]) -> None:
        """Keep a piece of output. Raises HostError for what no runner sends."""
        stream, text = frame.get("of"), frame["chunk"]
        try:
            data = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error):
            data = b""
        self._held += len(data)
        if not data or stream not in ("out", "err") or self._held > 2 * AHEAD:
            message = f"{host}: the host sent what is no output of a command"
            raise HostError(Failure(kind="bug", message=message))
        # A command may print byte by byte, and more than anybody takes: pieces are kept as one.
        if self._come and self._come[-1][0] == stream:
            self._come[-1][1].extend(data)
        else:
            self._come.append((stream, bytearray(data)))
        self._news.set()

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        self._news.set()

    async def next(self) -> tuple[Stream, bytes] | None:
        """The next piece of output, waited for; None at the end."""
        while not self._come:
            if self._ended:
                return None
            self._news.clear()
            await self._news.wait()
        stream, data = self._come.popleft()
        return stream, bytes(data)

    def taken(self, count: int) -> dict[str, Json]:
        """So much was taken: the frame that makes room for as much on the host."""
        self._held -= count
        return {"op": "taken", "bytes": count}

    def wants(self, count: Json) -> dict[str, Json] | None:
        """The host has passed so much on and has room for as much: the frame that fills it, if any."""
        if not isinstance(count, int) or not 0 < count <= self._given:
            return None
        self._given -= count
        return self.next_input(count)

    def next_input(self, wanted: int) -> dict[str, Json] | None:
        """The next piece of input as a frame; None once all of it is sent."""
        if self._feed is None:
            return None
        data = self._feed(self._offset, wanted)
        self._offset += len(data)
        self._given += len(data)
        ended = len(data) < wanted
        if ended:
            self._feed = None
        return {"op": "feed", "data": base64.b64encode(data).decode(), "end": ended}


class Conversation:
    """A session over a wire; it keeps the promises of `fleetfix.session.Session`."""

    def __init__(self, host: Host, purpose: Purpose, opening: Opening, connect: Connect) -> None:
        self._host = host
        self._purpose = purpose
        self._opening = opening
        self._connect = connect
        self._sources = protocol.Sources(opening.modules)
        self._contact: Contact | None = None
        self._broken: Contact | None = None
        """The one before, until it is hung up."""
        self._sent: set[str] = set()
        """Digests of the sources that this contact has."""
        self._pending: dict[int, Pending] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead: HostError | None = None
        self._info: HostInfo | None = None
        self._said: list[float] = []
        self._took_over = not purpose.take_over
        self._wrote = False
        """The host has records of this run, written for this session."""
        self._wanted = asyncio.Event()
        """Set while somebody waits for an answer and there is no line."""
        self._dropped_at = 0.0
        self._greeting: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, host: Host, purpose: Purpose, opening: Opening, connect: Connect) -> Conversation:
        """Greet the runner and hear what the host is. Raises HostError."""
        self = cls(host, purpose, opening, connect)
        try:
            self._contact = await self._greet_first()
            self._info = replies.info(await self._request({"op": "hello"}, limit=opening.connect_timeout))
        except BaseException:
            await self.close()
            raise
        self._go(self._keep_alive())
        return self

    @property
    def info(self) -> HostInfo:
        assert self._info is not None
        return self._info

    async def read(self, step: str, reads: Sequence[Read]) -> tuple[Completed, ...]:
        if not reads:
            return ()
        asked = list({_identity(one): one for one in reads}.values())
        frame = {"op": "read", "step": step, "reads": [one.model_dump() for one in asked]}
        turns = math.ceil(len(asked) / AT_ONCE)
        limit = max(one.timeout for one in asked) * turns + MARGIN
        answers = replies.many(await self._request(frame, asked, limit=limit, slots=len(asked)), len(asked))
        known = dict(zip(map(_identity, asked), answers, strict=True))
        return tuple(known[_identity(one)] for one in reads)

    async def acquire(self) -> None:
        sweep = self.info.sweep_due
        calls = (Call(function="retention.sweep"),) if sweep else ()
        limit = BOOKKEEPING + (SWEEPING if sweep else 0)
        frame = {"op": "acquire", "sweep": sweep}
        self._info = replies.info(await self._request(frame, calls, limit=limit))

    async def await_lease(self, seconds: float) -> None:
        frame = {"op": "await_lease", "seconds": seconds}
        self._info = replies.info(await self._request(frame, limit=seconds + BOOKKEEPING))

    async def change(self, id: str, step: str, change: Change) -> Completed:
        calls = (*change.do, *change.undo, *change.commit)
        frame = {
            "op": "change",
            "id": id,
            "step": step,
            "change": change.model_dump(exclude={"prepare", "folders"}),
        }
        limit = 2 * sum(one.timeout for one in change.do) + PATIENCE + MARGIN
        return replies.completed(await self._request(frame, calls, limit=limit))

    async def undo(self, id: str) -> Completed:
        frame = {"op": "undo", "id": id}
        calls = await self._recorded_calls()
        return replies.completed(await self._request(frame, calls, limit=UNDOING))

    async def waiting(self, id: str) -> Waits | None:
        return replies.waits(await self._request({"op": "waiting", "id": id}, (_WAITING,)))

    async def tell(self, id: str, token: str, word: Json) -> None:
        await self._request({"op": "tell", "id": id, "token": token, "word": word}, (_WAITING,))

    async def past(self) -> tuple[Past, ...]:
        return replies.past(await self._request({"op": "past"}, limit=BOOKKEEPING))

    async def lacking(self) -> tuple[str, ...]:
        frame = {"op": "read", "step": "", "reads": [_LACKING.model_dump()]}
        calls = [*await self._recorded_calls(), _LACKING]
        (answer,) = replies.many(
            await self._request(frame, calls, limit=_LACKING.timeout + MARGIN, slots=1), 1
        )
        return replies.texts(answer.answer())

    async def note(self, name: str, value: Json) -> None:
        await self._request({"op": "note", "name": name, "value": value}, limit=BOOKKEEPING)

    async def recall(self, name: str) -> Json:
        return await self._request({"op": "recall", "name": name}, limit=BOOKKEEPING)

    async def end(self, outcome: str, *, keep_claim: bool, commit: bool, anchor: str = "") -> None:
        frame = {
            "op": "end",
            "outcome": outcome,
            "keep_claim": keep_claim,
            "commit": commit,
            "anchor": anchor,
        }
        await self._request(frame, await self._recorded_calls() if commit else (), limit=UNDOING)

    async def execute(self, command: Execute, take: Take, feed: Feed | None = None) -> Ended:
        script = command.script
        frame = {
            "op": "execute",
            "argv": list(command.argv),
            "script": None if script is None else base64.b64encode(script).decode(),
            "fed": feed is not None,
            "timeout": command.timeout,
            "secrets": list(command.secrets),
        }
        streamed = Streamed(feed)
        asking = asyncio.ensure_future(self._request(frame, (_STREAMING,), streamed=streamed))
        # All output of a command comes before its end, in order.
        asking.add_done_callback(lambda _: streamed.end())
        try:
            while (piece := await streamed.next()) is not None:
                await take(*piece)
                self._send_to(streamed, streamed.taken(len(piece[1])))
            return replies.ended(await asking)
        finally:
            asking.cancel()

    async def commit(self) -> None:
        calls = [*await self._recorded_calls(), Call(function="holds.drop_of_run")]
        await self._request({"op": "commit"}, calls, limit=UNDOING)

    async def release(self) -> None:
        await self._request({"op": "release"}, limit=BOOKKEEPING)

    async def cancel(self) -> tuple[str, ...]:
        return replies.texts(await self._request({"op": "cancel"}, limit=BOOKKEEPING))

    async def close(self) -> None:
        if self._dead is None:
            self._die(_unreachable(self._host.name, "the session was closed"))
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for contact in (self._contact, self._broken):
            if contact is not None:
                await contact.close()

    # -- requests -----------------------------------------------------------------------------------

    async def _request(
        self,
        frame: dict[str, Json],
        calls: Iterable[Call] = (),
        *,
        limit: float | None = None,
        slots: int = 0,
        streamed: Streamed | None = None,
    ) -> Any:
        if self._dead is not None:
            raise self._dead
        n = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        modules = tuple({one.module: None for one in calls})
        pending = Pending({**frame, "n": n}, modules, future, [None] * slots, streamed=streamed)
        if streamed is not None and self._contact is None:
            raise _unreachable(self._host.name, "the connection is lost; the command was not begun")
        self._pending[n] = pending
        self._post(pending)
        if streamed is not None and (piece := streamed.next_input(AHEAD)):
            self._send_to(streamed, piece)
        if limit is not None and self._info is not None:
            limit += self._opening.timers.reconnect_within
        try:
            async with self._limit(limit, frame) as pending.timeout:
                if self._contact is None:
                    self._hold_deadline(pending)
                    self._wanted.set()
                answer = await future
                if frame["op"] in WRITES:
                    self._took_over = self._wrote = True
                return answer
        finally:
            self._pending.pop(n, None)

    @contextlib.asynccontextmanager
    async def _limit(self, seconds: float | None, frame: dict[str, Json]) -> Any:
        try:
            async with asyncio.timeout(seconds) as timeout:
                yield timeout
        except TimeoutError:
            if self._info is None:
                why = f"Python began there, and has said nothing more within {seconds:.0f} s"
                raise _unreachable(self._host.name, why) from None
            message = f"{self._host.name}: no answer to {frame['op']} within {seconds:.0f} s"
            raise host_error("timed_out", message) from None

    def _post(self, pending: Pending) -> None:
        """Send a request and the sources it needs, if there is a contact; else it waits for the next."""
        contact = self._contact
        if contact is None:
            return
        self._teach(contact, pending.modules)
        contact.send(pending.frame)

    def _teach(self, contact: Contact, modules: Iterable[str]) -> None:
        """Send the sources of these host modules that this contact does not have."""
        needed = self._sources.needed(modules).values()
        new = [one for one in needed if one.digest not in self._sent]
        if new:
            self._sent |= {one.digest for one in new}
            contact.send({"op": "sources", "modules": {one.name: one.packed for one in new}})

    def _send_to(self, streamed: Streamed, frame: dict[str, Json]) -> None:
        """Send what goes to a running command, if it still runs."""
        for n, pending in self._pending.items():
            if pending.streamed is streamed and self._contact is not None:
                self._contact.send({**frame, "of": n})

    async def _recorded_calls(self) -> list[Call]:
        """Calls as the host's log holds them: their modules are needed before they are replayed."""
        return list(replies.modules(await self._request({"op": "modules"}, limit=BOOKKEEPING)))

    def _on_frame(self, frame: dict[str, Json], size: int) -> bool:
        """Take a frame; says whether it answers something."""
        if "say" in frame:
            self._hear(frame)
            return False
        number = frame.get("n")
        pending = self._pending.get(number) if isinstance(number, int) else None
        if pending is None or pending.future.done():
            return False
        try:
            return self._answer(pending, frame, size)
        except HostError as error:
            pending.future.set_exception(error)
            return True

    def _answer(self, pending: Pending, frame: dict[str, Json], size: int) -> bool:
        """Take a part of an answer; says whether it is one that was still due. Raises HostError."""
        if "error" in frame:
            raise replies.refusal(self._host.name, frame["error"])
        if pending.streamed is not None and "reply" not in frame:
            return self._hear_command(pending.streamed, frame)
        many = bool(pending.frame["op"] == "past")
        if "item" in frame:
            if not many:
                return False
            pending.items.append(frame["item"])
            pending.size += size
            if len(pending.items) > MOST_ITEMS or pending.size > MOST_OF_ITEMS:
                raise _unreachable(self._host.name, "its answer has no end")
            return True
        if "reply" not in frame:
            return False
        if "i" in frame:
            return self._fill(pending, frame["i"], frame["reply"])
        pending.future.set_result(pending.items if many else frame["reply"])
        return True

    def _hear_command(self, streamed: Streamed, frame: dict[str, Json]) -> bool:
        if "chunk" in frame:
            streamed.hear(self._host.name, frame)
            return True
        piece = streamed.wants(frame.get("want"))
        if piece is None:
            return False
        self._send_to(streamed, piece)
        return True

    @staticmethod
    def _fill(pending: Pending, i: Json, reply: Json) -> bool:
        slots = pending.slots
        if not isinstance(i, int) or not 0 <= i < len(slots) or slots[i] is not None:
            return False
        slots[i] = replies.completed(reply)
        if None not in slots:
            pending.future.set_result(slots)
        return True

    def _hear(self, frame: dict[str, Json]) -> None:
        now = time.monotonic()
        self._said = [at for at in self._said if now - at < 1.0]
        if self._opening.progress is not None and len(self._said) < SAYS:
            self._said.append(now)
            step, text = (
                str(frame[name]).encode("utf-8", "backslashreplace") if name in frame else b""
                for name in ("step", "say")
            )
            self._opening.progress(protocol.readable(step), protocol.readable(text))

    # -- the line -----------------------------------------------------------------------------------

    async def _greet_first(self) -> Contact:
        """Greet a runner, in the time to connect; where the connection breaks on the way, another one."""
        until = time.monotonic() + self._opening.connect_timeout
        pauses = iter(_pauses())
        while True:
            try:
                return await self._greet(max(until - time.monotonic(), 0.0))
            except Dropped:
                pause = next(pauses)
                if time.monotonic() + pause > until:
                    raise
                await asyncio.sleep(pause)

    async def _greet(self, within: float) -> Contact:
        start = protocol.Start(secrets.token_hex(4), self._host.python, self._host.become)
        contact: Contact | None = None

        def lost(error: HostError) -> None:
            if self._contact is contact:
                self._lost(error)

        contact = Contact(self._host.name, start, password_of_run(), self._on_frame, lost)
        await contact.greet(self._connect, within)
        if contact.lost is not None:
            raise contact.lost  # with its first words, before anybody could be told
        self._sent = set()
        # A run is taken away once: where somebody takes it away from here, no lost line takes it back.
        reason = secret_values.masked(self._purpose.reason)
        purpose = self._purpose.model_copy(update={"take_over": not self._took_over, "reason": reason})
        contact.send(
            {
                "op": "greet",
                "v": protocol.PROTOCOL,
                "purpose": purpose.model_dump(),
                "orphaned": self._opening.timers.orphaned,
                "root": self._opening.root,
                "again": self._wrote,
            }
        )
        self._confide(contact)
        return contact

    def _confide(self, contact: Contact) -> None:
        """Give the host the secrets of the run, and what it is to mask: they are in its memory alone."""
        given = self._opening.secrets
        values = secret_values.held_for(self._host.name) if given is None else given
        hidden = (*values.values(), *contact.password_given)
        if needles := needles_of(hidden):
            self._teach(contact, (_REDACTION,))
            contact.send({"op": "secrets", "values": dict(values), "needles": needles})

    async def _keep_alive(self) -> None:
        """Ping while there is a line, whatever the session is used for: what lies between sees that it is
        in use, the host knows that somebody is there, and silence is noticed when its time is over."""
        timers = self._opening.timers
        ping_at = time.monotonic() + timers.ping
        while True:
            contact = self._contact
            lost_at = math.inf if contact is None else contact.heard + timers.silence
            await asyncio.sleep(max(min(ping_at, lost_at) - time.monotonic(), 0.0))
            now, contact = time.monotonic(), self._contact
            if contact is None:
                ping_at = max(ping_at, now + timers.ping)
                continue
            silent, dripping = now - contact.heard, now - contact.understood
            if silent >= timers.silence:
                self._lost(_unreachable(self._host.name, f"nothing was heard for {silent:.0f} s"))
            elif dripping > DRIPS * timers.silence:
                self._lost(_unreachable(self._host.name, f"nothing whole was heard for {dripping:.0f} s"))
            elif now >= ping_at:
                ping_at = now + timers.ping
                contact.send({"op": "ping", "t": now})

    def _lost(self, error: HostError) -> None:
        if self._dead is not None or self._contact is None:
            return
        if error.failure.kind != "unreachable":
            self._die(error)  # what broke would break again
            self._go(_hang_up(self._contact))  # and may go on sending until somebody closes the session
            return
        old = self._broken = self._contact
        self._contact = None
        self._dropped_at = time.monotonic()
        if self._greeting is not None:
            self._greeting.cancel()
        for pending in self._pending.values():
            if pending.streamed is not None and not pending.future.done():
                pending.future.set_exception(error)  # to ask again would be to run it twice
        self._hold_deadlines()
        self._go(self._come_back(old, error))
        if self._opening.watch is not None:
            self._opening.watch.dropped(error.failure)

    async def _come_back(self, old: Contact, error: HostError) -> None:
        """Try to reach the host again, and ask again what was not answered.

        The time for that runs while somebody waits for an answer. A session that nobody needs now is
        tried on, however long it takes: whoever needs it then finds it whole, or has at least one try.
        """
        await _hang_up(old)
        self._broken = None
        timers, watch = self._opening.timers, self._opening.watch
        until: float | None = None
        for pause in _pauses(RESTFUL):
            now = time.monotonic()
            patience = watch.patience() if watch is not None else "usual"
            if patience == "more":
                # Its own time begins when whoever watches has no more of it than that.
                until = now + max(timers.reconnect_within, self._opening.connect_timeout)
            elif not self._waited_for:
                until = None
            elif until is None:
                at_least = min(timers.reconnect_within, self._opening.connect_timeout)
                until = max(self._dropped_at + timers.reconnect_within, now + at_least)
            left = math.inf if until is None else until - now
            if left <= 0 or patience == "none":
                break
            try:
                contact = await self._greet(min(left, self._opening.connect_timeout))
            except HostError as again:
                if again.failure.kind != "unreachable":
                    error = again
                    break
                await self._rest(pause, until)
                continue
            await self._go_on_with(contact)
            return
        self._die(error)

    @property
    def _waited_for(self) -> bool:
        """Whether somebody waits for an answer, but for this session itself."""
        return any(
            not one.future.done() and (self._info is None or one.frame["op"] != "hello")
            for one in self._pending.values()
        )

    async def _rest(self, pause: float, until: float | None) -> None:
        """Pause between two tries; one that nobody waits for is cut short when somebody does."""
        if until is not None:
            await asyncio.sleep(min(pause, LONGEST_PAUSE, max(until - time.monotonic(), 0)))
            return
        self._wanted.clear()
        if self._waited_for:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._wanted.wait()

    async def _go_on_with(self, contact: Contact) -> None:
        """Go on with a new runner: ask first what the host is now, then again what is unanswered."""
        unanswered = [one for _, one in sorted(self._pending.items()) if not one.future.done()]
        self._contact = contact
        if self._info is not None:
            self._greeting = self._go(self._returned(self._info))
            await asyncio.sleep(0)  # its question goes out
        for pending in unanswered:
            pending.items.clear()
            self._post(pending)
        if self._contact is contact:
            self._let_deadlines_go()

    async def _returned(self, before: HostInfo) -> None:
        """Learn whether the host was restarted meanwhile, and tell whoever watches that it is back."""
        away = time.monotonic() - self._dropped_at
        with contextlib.suppress(HostError):  # lost again, and tried again
            self._info = replies.info(
                await self._request({"op": "hello"}, limit=self._opening.connect_timeout)
            )
            if self._opening.watch is not None:
                restarted = before.boot_id != self._info.boot_id
                self._opening.watch.returned(self._info, away, restarted=restarted)

    def _hold_deadlines(self) -> None:
        """The time in which there is no line is nobody's; how long that may be has a bound of its own."""
        for pending in self._pending.values():
            self._hold_deadline(pending)

    @staticmethod
    def _hold_deadline(pending: Pending) -> None:
        timeout = pending.timeout
        if timeout is not None and not timeout.expired() and (when := timeout.when()) is not None:
            pending.left = when - asyncio.get_running_loop().time()
            timeout.reschedule(None)

    def _let_deadlines_go(self) -> None:
        now = asyncio.get_running_loop().time()
        for pending in self._pending.values():
            if pending.timeout is not None and pending.left is not None:
                pending.timeout.reschedule(now + pending.left)
                pending.left = None

    def _die(self, error: HostError) -> None:
        self._dead = error
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(error)

    def _go(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _hang_up(contact: Contact) -> None:
    with contextlib.suppress(Exception):
        await contact.close()


_REDACTION = "redaction"
"""The host module that knows what to do with secrets, sent with the first of them."""

_STREAMING = Call(function="streaming.execute")
_LACKING = Read(function="undoable.lacking", timeout=60.0)
"""Names the host module that runs commands, so that it is sent with the first of them."""

_WAITING = Call(function="fabfile.hold")
"""Names the host module whose calls wait for what the controller does."""


def _identity(read: Read) -> str:
    return read.model_dump_json()


def _pauses(longest: float = LONGEST_PAUSE) -> Iterable[float]:
    """How long to wait between attempts: growing, and never the same for two sessions."""
    for attempt in itertools.count():
        yield min(0.2 * 2 ** min(attempt, 8), longest) * random.uniform(0.5, 1.5)


def _unreachable(host: str, why: str) -> HostError:
    return HostError(Failure(kind="unreachable", message=f"{host}: {why}"))
