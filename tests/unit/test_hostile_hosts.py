"""A host that sends what no runner does: it ends with a failure class, soon, and at no cost to others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.commands import Call, Change, Completed, Execute, Read
from fleetfix.conversation import Conversation, Receiver
from fleetfix.errors import HostError
from fleetfix.inventory import Host
from fleetfix.session import Opening, Purpose, Timers

HOST = Host(name="gpu01", address="127.0.0.1")
PURPOSE = Purpose(run="r", playbook="p", dry=False, operator="o", controller="c")
SAID = ("python", "user", "hostname", "boot_id", "machine_id", "home")
HELLO = {**dict.fromkeys(SAID, "x"), "uid": 0, "now": 1.0}
READS = (Read(function="a.b"), Read(function="a.c"))
CHANGE = Change(key="k", summary="s", do=(Call(function="a.b"),), risk="reversible")

Frame = dict[str, Any]
Answer = Callable[[Frame], Iterator[Frame | bytes]]


def framed(frame: Frame | bytes) -> bytes:
    if isinstance(frame, bytes):
        return frame
    body = json.dumps(frame).encode()
    return struct.pack(">I", len(body)) + body


class Peer:
    """What answers instead of a runner, until it is hung up on."""

    def __init__(self, receiver: Receiver, answer: Answer) -> None:
        self.receiver = receiver
        self.sent = 0
        self._answer = answer
        self._came = b""
        self._core = True
        self._tasks: list[asyncio.Task[None]] = []

    def send(self, data: bytes) -> None:
        if self._core:
            self._core = False
            return
        self._came += data
        while len(self._came) >= 4 and len(self._came) >= 4 + struct.unpack_from(">I", self._came)[0]:
            size = struct.unpack_from(">I", self._came)[0]
            frame, self._came = json.loads(self._came[4 : 4 + size]), self._came[4 + size :]
            self._tasks.append(asyncio.ensure_future(self._talk(frame)))

    async def _talk(self, frame: Frame) -> None:
        for part in self._answer(frame):
            data = framed(part)
            self.sent += len(data)
            self.receiver.data(data)
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()


def greeting(command: str) -> bytes:
    found = re.search(r"fleetfix/1/[0-9a-f]+/", command)
    assert found is not None
    return found[0].encode() + b"51055856\n"


@contextlib.asynccontextmanager
async def session(
    answer: Answer, first: Callable[[bytes], bytes] = lambda marker: marker, **opening: Any
) -> AsyncIterator[tuple[Conversation, list[Peer]]]:
    """A session with a peer; nothing that the event loop would only log may happen."""
    odd: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: odd.append(context))
    peers: list[Peer] = []

    async def connect(command: str, receiver: Receiver) -> Peer:
        peers.append(Peer(receiver, answer))
        loop.call_soon(receiver.data, first(greeting(command)))
        return peers[-1]

    how = Opening(**{"timers": Timers(reconnect_within=0), **opening})
    talk = None
    try:
        talk = await Conversation.open(HOST, PURPOSE, how, connect)
        yield talk, peers
    finally:
        if talk is not None:
            await talk.close()
        await asyncio.sleep(0)
        assert odd == []


def forging(op: str, forge: Answer) -> Answer:
    """A peer that is honest up to one request."""

    def answer(frame: Frame) -> Iterator[Frame | bytes]:
        if frame["op"] == op:
            yield from forge(frame)
        elif frame["op"] == "hello":
            yield {"n": frame["n"], "reply": HELLO}
        elif frame["op"] == "modules":
            yield {"n": frame["n"], "reply": ["shell"]}

    return answer


async def _take(stream: str, data: bytes) -> None:
    assert stream in ("out", "err")
    assert isinstance(data, bytes)


ASKED: dict[str, Callable[[Conversation], Any]] = {
    "read": lambda talk: talk.read("s", READS),
    "acquire": lambda talk: talk.acquire(),
    "change": lambda talk: talk.change("r/s/1/1", "s", CHANGE),
    "undo": lambda talk: talk.undo("r/s/1/1"),
    "past": lambda talk: talk.past(),
    "note": lambda talk: talk.note("a", 1),
    "recall": lambda talk: talk.recall("a"),
    "modules": lambda talk: talk.commit(),
    "end": lambda talk: talk.end("ok", keep_claim=False, commit=True),
    "commit": lambda talk: talk.commit(),
    "release": lambda talk: talk.release(),
    "cancel": lambda talk: talk.cancel(),
    "execute": lambda talk: talk.execute(
        Execute(argv=("a",), fed=True), _take, lambda at, most: b"x" * most
    ),
}

WORDS = (
    "kind message hint exit value stdout failure seconds id step summary risk state at completed run open "
    "claims lease now hostname"
)
words = st.sampled_from(WORDS.split())
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]), max_size=8)
    | st.sampled_from([10**40, 10**400, "\ud800", "\x1b[2J", "command", "done", "reversible", 1e308, []])
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)
names = st.sampled_from(["n", "i", "reply", "error", "item", "say", "step", "chunk", "of", "want", "pong"])
forged = st.lists(st.tuples(st.booleans(), st.dictionaries(names, values, max_size=4)), max_size=4)


@given(st.sampled_from(sorted(ASKED)), forged)
async def test_whatever_is_answered_is_an_answer_or_a_failure(op: str, frames: list[Any]) -> None:
    def forge(frame: Frame) -> Iterator[Frame | bytes]:
        for addressed, forgery in frames:
            yield {**forgery, "n": frame["n"]} if addressed else forgery
        yield b"\x00\x00\x00\x01?"  # and then nonsense, so that nothing is waited for

    said: list[str] = []
    progress = lambda step, text: said.extend((step, text))  # noqa: E731
    async with session(forging(op, forge), progress=progress) as (talk, _):
        try:
            answer = await ASKED[op](talk)
        except HostError as error:
            json.dumps(error.failure.model_dump(), ensure_ascii=False).encode()
        else:
            if op == "read":
                assert [type(one) for one in answer] == [Completed, Completed]
            elif op in ("change", "undo"):
                assert type(answer) is Completed
    assert all(text.isprintable() for text in said)


@given(values)
async def test_a_host_may_say_anything_of_itself(info: Any) -> None:
    said = {**HELLO, **info} if isinstance(info, dict) else info
    answer = forging("hello", lambda frame: iter([{"n": frame["n"], "reply": said}]))
    with contextlib.suppress(HostError):
        async with session(answer) as (talk, _):
            talk.info.model_dump_json()


@pytest.mark.parametrize(
    "name", ["$(reboot)", "a; b", "a\nb", "a b", "-x", "../x", "a" * 200, "\x1b[2J", "", 7, None]
)
@pytest.mark.parametrize("of", ["claims", "lease"])
async def test_a_run_that_a_host_names_is_nothing_to_a_shell(of: str, name: Any) -> None:
    note = {"run": name, "operator": "o", "controller": "c", "since": "now"}
    lease = {**note, "expires": 2.0, "epoch": 1, "boot_id": "b"}
    said = {**HELLO, of: [note] if of == "claims" else lease}
    with pytest.raises(HostError, match="no answer"):
        async with session(forging("hello", lambda frame: iter([{"n": frame["n"], "reply": said}]))):
            pass


async def test_a_runner_that_greets_and_says_nothing_more_has_the_time_to_connect_and_no_more() -> None:
    nothing = forging("hello", lambda _: iter(()))
    with pytest.raises(HostError, match="Python began there") as caught:
        async with asyncio.timeout(30), session(nothing, timers=Timers(), connect_timeout=0.1):
            pass
    assert caught.value.failure.kind == "unreachable"


# -- floods -----------------------------------------------------------------------------------------


def endless(frame: Frame, size: int = 0) -> Iterator[Frame]:
    while True:
        yield {**frame, "pad": "x" * size}


FLOODS: dict[str, Callable[[int], Iterator[Frame | bytes]]] = {
    "signs of life": lambda n: endless({"pong": 1}),
    "progress": lambda n: endless({"say": "x", "step": "s"}, 500_000),
    "answers to nothing": lambda n: endless({"n": 10**6, "reply": 1}, 500_000),
    "the same answer": lambda n: endless({"n": n, "i": 0, "reply": {}}),
    "answers out of range": lambda n: endless({"n": n, "i": 7, "reply": {}}),
    "items of a list": lambda n: endless({"n": n, "item": {}}),
    "output of no command": lambda n: endless({"n": n, "of": "out", "chunk": "eA=="}, 1000),
}


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("op", ["read", "past", "cancel"])
async def test_what_nobody_asked_for_ends_the_session(op: str, flood: str) -> None:
    async with session(forging(op, lambda frame: FLOODS[flood](frame["n"]))) as (talk, peers):
        with pytest.raises(HostError) as ended:
            await ASKED[op](talk)
    assert ended.value.failure.kind in ("bug", "unreachable")
    assert peers[0].sent < 24 << 20


async def test_input_is_sent_only_as_it_is_passed_on() -> None:
    """A host that asks for more than it got, without taking any, gets no file into our memory."""
    fed: list[int] = []

    def feed(at: int, most: int) -> bytes:
        fed.append(most)
        return b"x" * most

    def greedy(frame: Frame) -> Iterator[Frame]:
        for _ in range(1000):
            yield {"n": frame["n"], "want": 256 * 1024 + 1}
        yield {"n": frame["n"], "reply": {"exit": 0}}

    async with session(forging("execute", greedy)) as (talk, _):
        await talk.execute(Execute(argv=("a",), fed=True), _take, feed)
    assert sum(fed) <= 256 * 1024


# -- the first words ----------------------------------------------------------------------------------


@given(st.binary(max_size=40))
async def test_nonsense_after_the_greeting_is_told_at_once(data: bytes) -> None:
    """Not after the time that an answer may take: nobody would wait for one any more."""
    nonsense = b"\xff" * 4 + data
    with pytest.raises(HostError) as ended:
        async with asyncio.timeout(10), session(forging("", None), lambda marker: marker + nonsense):  # type: ignore[arg-type]
            pass
    assert ended.value.failure.kind == "bug"


@pytest.mark.parametrize("noise", [b"x" * 70_000, b"\x1b[2J" * 20_000, b"fleetfix/1/" * 7000])
async def test_a_shell_that_never_stops_talking_is_given_up(noise: bytes) -> None:
    with pytest.raises(HostError) as ended:
        async with session(forging("", None), lambda marker: noise):  # type: ignore[arg-type]
            pass
    assert ended.value.failure.kind == "unreachable"
    assert ended.value.failure.message.isprintable()


async def test_bytes_that_never_make_a_frame_are_no_signs_of_life() -> None:
    dripping: list[asyncio.Task[None]] = []

    async def drip(receiver: Receiver) -> None:
        receiver.data(b"\x00\x0f\x00\x00{")
        while True:
            await asyncio.sleep(0.005)
            receiver.data(b" ")

    def answer(frame: Frame) -> Iterator[Frame]:
        if frame["op"] == "hello":
            yield {"n": frame["n"], "reply": HELLO}
        elif frame["op"] == "read":
            dripping.append(asyncio.ensure_future(drip(peers[0].receiver)))

    timers = Timers(ping=0.02, silence=0.05, reconnect_within=0)
    async with session(answer, timers=timers) as (talk, peers):
        with pytest.raises(HostError, match="nothing whole was heard"):
            await talk.read("s", READS)
        dripping[0].cancel()
