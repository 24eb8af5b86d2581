"""Every exception that asyncssh can raise has a failure class."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
import socket
import threading
from collections.abc import Iterator

import asyncssh
import pytest

from fleetfix.errors import Failure, HostError
from fleetfix.inventory import Host
from fleetfix.session import Opening, Purpose
from fleetfix.transports.asyncssh_wire import open_session
from fleetfix.transports.ssh_failures import failure_of


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
