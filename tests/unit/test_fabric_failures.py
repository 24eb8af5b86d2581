"""Every exception that paramiko and Fabric can raise has a failure class."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import fabric
import paramiko
import pytest
from paramiko.auth_strategy import AuthFailure
from paramiko.ssh_exception import NoValidConnectionsError

from fleetfix.transports.fabric_failures import failure_of


def exceptions() -> Iterator[type[Exception]]:
    """Every exception class of the modules of both."""
    seen = set()
    for package in (paramiko, fabric):
        for module in (one for one in pkgutil.iter_modules(package.__path__) if one.name != "__main__"):
            try:
                found = importlib.import_module(f"{package.__name__}.{module.name}")
            except (ImportError, AttributeError):
                continue  # of another system, or for pytest
            for _, one in inspect.getmembers(found, inspect.isclass):
                own = one.__module__.split(".")[0] == package.__name__
                if issubclass(one, Exception) and own and one not in seen:
                    seen.add(one)
                    yield one


class Anything(str):
    """Stands for whatever an exception wants to say of itself."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Anything:
        return Anything(name)

    def __call__(self, *args: object) -> Anything:
        return self


@pytest.mark.parametrize("kind", list(exceptions()), ids=lambda one: one.__qualname__)
def test_each_has_a_class_and_a_line(kind: type[Exception]) -> None:
    error = kind.__new__(kind)
    Exception.__init__(error, "what it\nsays")
    for name in ("hostname", "key", "expected_key", "command", "error", "key_type", "key_bytes"):
        error.__dict__[name] = Anything("AAAA")
    error.__dict__ |= {
        "code": 1,
        "text": "no",
        "errors": {},
        "result": [],
        "allowed_types": [],
        "explanation": "",
    }
    failure = failure_of(error, "gpu01")
    assert failure.kind in ("unreachable", "auth", "host_key")
    assert failure.message.startswith("gpu01: ")
    assert "\n" not in failure.message


REFUSED = ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (paramiko.AuthenticationException("no"), "auth", "no"),
        (AuthFailure([]), "auth", "there is no key to log in with"),
        (
            AuthFailure([SimpleNamespace(result=paramiko.AuthenticationException("no"))] * 2),
            "auth",
            "it refused the 2 keys that it was offered",
        ),
        (paramiko.PasswordRequiredException("no"), "auth", "no"),
        (paramiko.ChannelException(1, "open failed"), "unreachable", "ChannelException(1, 'open failed')"),
        (paramiko.SSHException("Error reading SSH protocol banner"), "unreachable", None),
        (
            NoValidConnectionsError({("::1", 22): REFUSED, ("127.0.0.1", 22): REFUSED}),
            "unreachable",
            "connection refused",
        ),
        (socket.gaierror(-2, "Name or service not known"), "unreachable", "name or service not known"),
        (TimeoutError(), "unreachable", "timed out"),
        (EOFError(), "unreachable", "the connection was closed"),
    ],
)
def test_the_common_ones_are_told_apart(error: Exception, kind: str, words: str | None) -> None:
    failure = failure_of(error, "gpu01")
    assert failure.kind == kind
    assert words is None or failure.message == f"gpu01: {words}"
