"""The first words between controller and runner, and the last: silence."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from fleetfix import protocol
from fleetfix.commands import Read
from fleetfix.conversation import Contact, Conversation, Password, Receiver, Wire
from fleetfix.errors import Failure, HostError
from fleetfix.inventory import Host
from fleetfix.session import Opening, Purpose, Timers


async def never(command: str, receiver: Receiver) -> Wire:
    del command, receiver
    await asyncio.sleep(3600)
    raise AssertionError


async def give_up() -> None:
    """Begin a connection, lose patience, and then hear that it ended."""
    contact = Contact("gpu01", protocol.Start("ab", None, False), Password(None), print, print)
    with contextlib.suppress(HostError):
        await contact.greet(never, 0.01)
    contact.ended("the connection closed")


async def test_a_connection_that_was_given_up_ends_without_a_word() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    await give_up()
    await asyncio.sleep(0)  # until the loop has let go of it too
    gc.collect()
    assert told == []


# -- the password for sudo --------------------------------------------------------------------------


class Sudo:
    """A host whose sudo asks for the password and then does as it was told to."""

    def __init__(self, says: Callable[[protocol.Start], tuple[bytes, bytes]] | None) -> None:
        self.start = protocol.Start("ab", None, become=True)
        self.got: list[bytes] = []
        self._says = says
        self._receiver: Receiver | None = None

    async def connect(self, command: str, receiver: Receiver) -> Wire:
        del command
        self._receiver = receiver
        receiver.data(b"fleetfix-try-ab:/usr/bin/python3\n")
        prompt = self.start.prompt.encode()
        receiver.errors(prompt[:7])  # in two pieces, as a network may deliver it
        receiver.errors(prompt[7:])
        return self

    def send(self, data: bytes) -> None:
        if not self.got and self._says is not None and self._receiver is not None:
            out, errors = self._says(self.start)
            self._receiver.errors(errors)
            self._receiver.data(out)
        self.got.append(data)

    async def close(self) -> None:
        return None


def takes(start: protocol.Start) -> tuple[bytes, bytes]:
    return f"fleetfix/{protocol.PROTOCOL}/{start.nonce}/50990320\n".encode(), b""


def refuses(start: protocol.Start) -> tuple[bytes, bytes]:
    return b"", b"Sorry, try again.\n" + start.prompt.encode()


async def greeted(name: str, host: Sudo, password: Password, within: float = 0.2) -> Failure | None:
    contact = Contact(name, host.start, password, print, print)
    try:
        await contact.greet(host.connect, within)
    except HostError as error:
        return error.failure
    return None


async def test_a_host_whose_sudo_hangs_keeps_no_other_from_the_password() -> None:
    password = Password("correct horse")
    hosts = [Sudo(None), *(Sudo(takes) for _ in range(3))]
    ends = await asyncio.gather(*(greeted(f"gpu0{n}", host, password) for n, host in enumerate(hosts)))
    assert [end and end.kind for end in ends] == ["sudo", None, None, None]
    assert ends[0] is not None
    assert "after it got the password" in ends[0].message


async def test_a_password_that_one_host_refuses_is_sent_to_no_other() -> None:
    password = Password("battery staple")
    hosts = [Sudo(refuses) for _ in range(10)]
    ends = await asyncio.gather(*(greeted(f"gpu0{n}", host, password) for n, host in enumerate(hosts)))
    assert [end and end.kind for end in ends] == ["sudo"] * 10
    assert sum(bool(host.got) for host in hosts) == 1
    assert all(end and "gpu00 has refused it" in end.message for end in ends[1:])


async def test_a_password_of_which_two_hosts_say_nothing_is_sent_to_no_third() -> None:
    password = Password("battery staple")
    hosts = [Sudo(None) for _ in range(5)]
    ends = await asyncio.gather(
        *(greeted(f"gpu0{n}", host, password, 0.05) for n, host in enumerate(hosts))
    )
    assert [end and end.kind for end in ends] == ["sudo"] * 5
    assert sum(bool(host.got) for host in hosts) == 2
    assert ends[4] is not None
    assert "gpu00 and gpu01 had it" in ends[4].message


class SilentAfter:
    """A wire to a runner that answers so many pings, and then falls silent without a word."""

    def __init__(self, receiver: Receiver, answers: int) -> None:
        self.answers = answers
        self.unanswered = 0
        self._receiver = receiver
        self._sent = bytearray()
        self._greeted = False

    def send(self, data: bytes) -> None:
        if not self._greeted:  # the runner's source
            self._greeted = True
            return
        self._sent += data
        while len(self._sent) >= 4:
            size = int.from_bytes(self._sent[:4], "big")
            if len(self._sent) < 4 + size:
                return
            frame = json.loads(bytes(self._sent[4 : 4 + size]))
            del self._sent[: 4 + size]
            self._take(frame)

    def _take(self, frame: dict[str, Any]) -> None:
        if frame["op"] == "hello":
            self._answer({"n": frame["n"], "reply": HELLO})
        elif frame["op"] == "ping" and self.answers:
            self.answers -= 1
            self._answer({"pong": frame["t"]})
        elif frame["op"] == "ping":
            self.unanswered += 1

    def _answer(self, frame: dict[str, Any]) -> None:
        asyncio.get_running_loop().call_soon(self._receiver.data, protocol.encode(frame))

    async def close(self) -> None:
        pass


HELLO = {
    **dict.fromkeys(("user", "hostname", "boot_id", "machine_id", "home"), "x"),
    "python": "3.11.0",
    "uid": 0,
    "now": 0.0,
}


@pytest.mark.parametrize("answers", [0, 3])
async def test_silence_is_noticed_before_more_than_three_pings_are_without_an_answer(answers: int) -> None:
    wires: list[SilentAfter] = []

    async def connect(command: str, receiver: Receiver) -> SilentAfter:
        (nonce,) = re.findall(r"fleetfix/\d+/([0-9a-f]+)/ ", command)
        wires.append(SilentAfter(receiver, answers))
        marker = f"fleetfix/{protocol.PROTOCOL}/{nonce}/123\n"
        asyncio.get_running_loop().call_soon(receiver.data, marker.encode())
        return wires[-1]

    timers = Timers(ping=0.2, silence=0.6, reconnect_within=0.0)
    assert timers.silence / timers.ping == pytest.approx(Timers().silence / Timers().ping)
    purpose = Purpose(run="r1", playbook="p", dry=True, operator="o", controller="c")
    session = await Conversation.open(
        Host(name="gpu01", address="gpu01"), purpose, Opening(timers=timers), connect
    )
    try:
        with pytest.raises(HostError, match="nothing was heard for"):
            await session.read("s", [Read(function="facts.nothing")])
    finally:
        await session.close()
    assert wires[0].answers == 0
    assert wires[0].unanswered <= 3
