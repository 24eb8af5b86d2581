"""`--secret NAME=SOURCE`: where the values of secrets come from; they are read before anything connects.

A value is never an argument: the list of processes shows those to everybody.
"""

from __future__ import annotations

import getpass
import importlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

from fleetfix import secret_values
from fleetfix.cli import config
from fleetfix.engine.context import Request
from fleetfix.errors import UsageError
from fleetfix.folders import expanded
from fleetfix.inventory import Host
from fleetfix.playbook import Playbook, Step
from fleetfix.redaction import SHORTEST
from fleetfix.sealed import NAME, names_in
from fleetfix.secret_values import BECOME
from fleetfix.spelling import hint_for
from fleetfix.steps import kept

LARGEST = 16 * 1024
"""Bytes of a value: a secret is a key or a token, not a file of data."""

PATIENCE = 300.0
"""Seconds that a program which gives a value may take: it may ask for a touch, or a password of its own."""

SOURCES = "env:VARIABLE, file:PATH, cmd:COMMAND, keyring:SERVICE/USER or prompt"


def hold(words: Iterable[str], playbook: Playbook) -> None:
    """Read the secrets that a command line names, and that a playbook uses: all of them, and no other."""
    given = parse(words)
    wanted = [*playbook.secrets, BECOME]
    for name in given:
        if name not in wanted:
            known = ", ".join(playbook.secrets) or "none"
            hint = hint_for(name, playbook.secrets) or f"it has: {known}"
            raise UsageError(f"{playbook.name} has no secret {name!r}", hint=hint)
    if missing := [name for name in playbook.secrets if name not in given]:
        raise UsageError(
            f"{playbook.name} uses secrets that are not given: {', '.join(missing)}",
            hint=" ".join(f"--secret {name}=SOURCE" for name in missing) + f"; {SOURCES}",
        )
    hold_given(given)


def parse(words: Iterable[str]) -> dict[str, str]:
    """Read `NAME=SOURCE` words: the source of each name. No value is read, and none is ever told."""
    given: dict[str, str] = {}
    for word in words:
        name, _, source = word.partition("=")
        kind, colon, rest = source.partition(":")
        if not re.fullmatch(NAME, name):
            raise UsageError("--secret wants NAME=SOURCE", hint=f"SOURCE: {SOURCES}")
        if not (source == "prompt" or (colon and rest and kind in _READERS)):
            # What stands there may be the value itself.
            raise UsageError(f"--secret {name}=… names no source", hint=f"one of {SOURCES}")
        if name in given:
            raise UsageError(f"--secret gives {name} twice")
        given[name] = source
    return given


def hold_given(given: dict[str, str]) -> None:
    """Read these secrets, by name, from their sources, and hold them for this process."""
    values = {name: value_of(source, name) for name, source in given.items()}
    become = values.pop(BECOME, None)
    for name, value in values.items():
        if len(value) < SHORTEST:
            raise UsageError(
                f"the secret {name} is shorter than {SHORTEST} characters: such words stand anywhere,"
                " and could not be masked",
                hint="use a longer one",
            )
    secret_values.hold(values)
    if become is not None:
        secret_values.hold_become_password(become)


def hold_become_password(hosts: Iterable[Host]) -> None:
    """Have the password for sudo ready where a host may ask for it: as the environment or the configuration
    says."""
    if not any(host.become for host in hosts) or secret_values.become_password() is not None:
        return
    source = config.load().become_password
    if source is not None:
        secret_values.hold_become_password(value_of(source, BECOME))


def value_of(source: str, name: str) -> str:
    """The value that a source gives; one line end at its end is not part of it. UsageError says why not."""
    kind, _, rest = source.partition(":")
    value = _prompt(name) if source == "prompt" else _READERS[kind](name, rest)
    value = value.removesuffix("\n").removesuffix("\r")
    if not value:
        raise UsageError(f"the secret {name} is empty")
    if "\0" in value:
        raise UsageError(f"the secret {name} holds a NUL, which no variable and no text can")
    return value


def _from_environment(name: str, variable: str) -> str:
    value = os.environ.get(variable)
    if value is None:
        raise UsageError(f"--secret {name}: the variable {variable} is not set")
    return _text(name, os.fsencode(value))


def _from_file(name: str, path: str) -> str:
    try:
        # A pipe that nobody writes to would else hold up the opening itself, for good.
        descriptor = os.open(expanded(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            data = _read(file.fileno(), time.monotonic() + PATIENCE)
    except OSError as error:
        raise UsageError(f"--secret {name}: {path}: {(error.strerror or str(error)).lower()}") from None
    if data is None:
        raise UsageError(f"--secret {name}: {path} gave nothing more within {PATIENCE:.0f} s")
    return _text(name, data)


def _from_command(name: str, command: str) -> str:
    """What a program prints; it may speak with the operator, by stderr and the terminal."""
    deadline = time.monotonic() + PATIENCE
    with subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            data = _read(process.stdout.fileno(), deadline)
            # What has said more than a secret has may go on for ever.
            ends = data is not None and len(data) <= LARGEST
            code = process.wait(max(deadline - time.monotonic(), 0)) if ends else 0
        except subprocess.TimeoutExpired:
            data, code = None, 0
        finally:
            process.kill()
    if data is None:
        raise UsageError(f"--secret {name}: its command did not end within {PATIENCE:.0f} s")
    if code != 0:
        raise UsageError(f"--secret {name}: its command ended with exit {code}")
    return _text(name, data)


def _read(descriptor: int, deadline: float) -> bytes | None:
    """All that there is, up to one byte more than a secret has; None where it has no end in time."""
    ready, data = select.poll(), bytearray()
    ready.register(descriptor, select.POLLIN)
    while len(data) <= LARGEST:
        if not ready.poll(max(deadline - time.monotonic(), 0) * 1000):
            return None
        try:
            piece = os.read(descriptor, LARGEST + 1 - len(data))
        except BlockingIOError:
            continue  # another process that reads it, too, was faster
        if not piece:
            break
        data += piece
    return bytes(data)


def _from_keyring(name: str, entry: str) -> str:
    service, slash, user = entry.rpartition("/")
    if not (slash and service and user):
        raise UsageError(f"--secret {name}: a keyring's entry is SERVICE/USER")
    try:
        keyring = importlib.import_module("keyring")
    except ImportError:
        raise UsageError(
            f"--secret {name}: the package keyring is not installed beside fleetfix",
            hint="pip install keyring, or cmd:'secret-tool lookup …'",
        ) from None
    try:
        value = keyring.get_password(service, user)
    except Exception as error:  # noqa: BLE001 - each of its backends has errors of its own
        raise UsageError(f"--secret {name}: the keyring cannot be asked: {type(error).__name__}") from None
    if value is None:
        raise UsageError(f"--secret {name}: the keyring has no {user} of {service}")
    return _text(name, str(value).encode())


def _prompt(name: str) -> str:
    if not sys.stdin.isatty():
        raise UsageError(
            f"--secret {name}=prompt: there is no terminal to ask at", hint=f"one of {SOURCES}"
        )
    return getpass.getpass(f"secret {name}: ")


def _text(name: str, data: bytes) -> str:
    if len(data) > LARGEST:
        raise UsageError(f"the secret {name} is larger than {LARGEST >> 10} KiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(
            f"the secret {name} is not UTF-8 text", hint="encode it, for example by base64"
        ) from None


_READERS: dict[str, Callable[[str, str], str]] = {
    "env": _from_environment,
    "file": _from_file,
    "cmd": _from_command,
    "keyring": _from_keyring,
}


def sealed(request: Request) -> Request:
    """The request, unless a value stands in it openly: it would go into the journal and onto the hosts.

    From here on a host is given the secrets of those steps that count on it, and no other.
    """
    mask = secret_values.mask()
    if mask is None:
        return request
    places = {
        request.playbook.source: request.playbook.text,
        "--set": json.dumps(dict(request.settings), default=str, ensure_ascii=False),
    }
    for host, steps in {id(steps): (host, steps) for host, steps in request.steps.items()}.values():
        places[f"what is bound for {host}"] = json.dumps(kept(steps), ensure_ascii=False)
    for place, text in places.items():
        if mask.finds(text):
            raise UsageError(
                f"the value of a secret stands openly in {place}",
                hint="write ${{ secrets.NAME }} in the playbook in its place",
            )
    secret_values.confine({host: used_by(steps) for host, steps in request.steps.items()})
    return request


def used_by(steps: Iterable[Step]) -> frozenset[str]:
    """The names of the secrets of those steps that count on their host."""
    return frozenset(names_in(kept(step for step in steps if not step.elsewhere)))
