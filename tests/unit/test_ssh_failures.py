"""Every exception that asyncssh can raise has a failure class."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import asyncssh
import pytest

from fleetfix.errors import Failure, HostError
from fleetfix.inventory import Host
from fleetfix.session import Opening, Purpose
from fleetfix.transports.asyncssh_wire import open_session
from fleetfix.transports.name_lookup import dial, look_up
from fleetfix.transports.pace import AT_ONCE, Pace
from fleetfix.transports.ssh_failures import failure_of
from fleetfix.transports.ssh_login import TROUBLE


def exceptions() -> Iterator[type[Exception]]:
    """Every exception class of asyncssh's modules."""
    seen = set()
    for module in pkgutil.iter_modules(asyncssh.__path__):
        try:
            found = importlib.import_module(f"asyncssh.{module.name}")
        except ImportError:
            continue  # stands on a package that is not here, so nothing of it can be raised
        for _, one in inspect.getmembers(found, inspect.isclass):
            if issubclass(one, Exception) and one.__module__.startswith("asyncssh") and one not in seen:
                seen.add(one)
                yield one


@pytest.mark.parametrize("kind", list(exceptions()), ids=lambda one: one.__qualname__)
def test_each_has_a_class_and_a_line(kind: type[Exception]) -> None:
    error = kind.__new__(kind)
    Exception.__init__(error, "what it says")
    failure = failure_of(error, "gpu01")
    assert failure.kind in ("unreachable", "auth", "host_key")
    assert failure.message.startswith("gpu01: ")
    assert "\n" not in failure.message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (asyncssh.PermissionDenied("no"), "auth"),
        (asyncssh.HostKeyNotVerifiable("no"), "host_key"),
        (asyncssh.ConnectionLost("gone"), "unreachable"),
        (asyncssh.ChannelOpenError(1, "open failed"), "unreachable"),
        (ConnectionRefusedError(111, "Connection refused"), "unreachable"),
        (socket.gaierror(-2, "Name or service not known"), "unreachable"),
        (TimeoutError(), "unreachable"),
    ],
)
def test_the_common_ones_are_told_apart(error: Exception, kind: str) -> None:
    assert failure_of(error, "gpu01").kind == kind


REFUSED = "[Errno 111] Connect call failed ('10.0.0.1', 22)"


@pytest.mark.parametrize(
    "said",
    [REFUSED, f"Multiple exceptions: {REFUSED}, {REFUSED}"],
)
def test_a_refused_connection_is_said_as_people_say_it(said: str) -> None:
    number, _, text = said.partition("] ")
    error = OSError(111, text) if number == "[Errno 111" else OSError(said)
    assert failure_of(error, "gpu01").message == "gpu01: connection refused"


def test_a_slow_name_server_keeps_no_other_host_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(64)

    def slow(*_: object, **__: object) -> list[object]:
        together.wait(20)  # until all are being looked up
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    async def all_at_once() -> list[Failure]:
        hosts = [Host(name=f"gpu{number:02}", address=f"gpu{number:02}.invalid") for number in range(64)]
        purpose = Purpose(run="r", playbook="p", dry=True, operator="op", controller="desk")
        found = await asyncio.gather(
            *(open_session(host, purpose, Opening()) for host in hosts), return_exceptions=True
        )
        return [error.failure for error in found if isinstance(error, HostError)]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    failures = asyncio.run(all_at_once())
    assert [failure.message.partition(": ")[2] for failure in failures] == ["no such name"] * 64


NEVER_RAISED = {
    "PasswordChangeRequired",  # raised to clients that give passwords
    "ChannelListenError",  # of forwarded ports
    "BreakReceived",  # these four are what a server's process reads
    "SignalReceived",
    "SoftEOFReceived",
    "TerminalSizeChanged",
}


@pytest.mark.parametrize("kind", list(exceptions()), ids=lambda one: one.__qualname__)
def test_each_is_looked_for_where_a_connection_is_made(kind: type[Exception]) -> None:
    assert issubclass(kind, TROUBLE) or kind.__name__ in NEVER_RAISED


async def test_a_name_server_that_says_try_again_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def busy(name: str, *_: object, **__: object) -> list[object]:
        asked.append(name)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [("found",)]

    monkeypatch.setattr(socket, "getaddrinfo", busy)
    monkeypatch.setattr(random, "uniform", lambda *_: 0.0)
    assert await look_up("gpu01") == [("found",)]
    assert asked == ["gpu01"] * 3


HANGS = """
import asyncio, socket, threading
from fleetfix.transports.name_lookup import look_up
socket.getaddrinfo = lambda *_, **__: threading.Event().wait()
async def main():
    async with asyncio.timeout(0.1):
        await look_up("gpu01")
try:
    asyncio.run(main())
except TimeoutError:
    print("given up")
"""


def test_a_name_server_that_hangs_holds_up_no_end() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "given up\n")


async def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_server(("127.0.0.1", 0)) as closed,
    ):
        there, gone = listening.getsockname(), closed.getsockname()
        closed.close()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in (gone, there)]
        made = await dial(found, None, 5.0)
        assert made.getpeername() == there
        made.close()
        with pytest.raises(ConnectionRefusedError):
            await dial(found[:1], None, 5.0)


# -- how many log in at once --------------------------------------------------------------------------


async def test_a_server_that_drops_a_crowd_is_asked_by_fewer_and_later_by_more_again() -> None:
    pace = Pace()
    inside = [await pace.enter() for _ in range(AT_ONCE)]
    waiting = [asyncio.ensure_future(pace.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(one.done() for one in waiting)
    pace.dropped()
    for place in inside[: AT_ONCE // 2]:
        place.leave()
        place.leave()
    await asyncio.sleep(0)
    assert not any(one.done() for one in waiting), "half as many are let in"
    waiting.pop(1).cancel()
    inside[-1].leave()
    await asyncio.sleep(0)
    assert [one.done() for one in waiting] == [True, False]
    for _ in range(AT_ONCE * AT_ONCE):
        pace.welcomed()
    inside[-2].leave()
    await asyncio.sleep(0)
    assert waiting[1].done()
    assert (await waiting[1]).is_left is False
