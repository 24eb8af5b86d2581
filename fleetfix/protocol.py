"""What travels between controller and host: frames, the start command, the sources of host modules.

A frame is four bytes of length, big endian, then JSON. The start command finds a Python and runs a
bootstrap of one line, which prints a marker and takes the core's source; nothing is sent before the
marker has come, so whatever login shells print before it does no harm.
"""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fleetfix.commands import Json
from fleetfix.errors import Bug, Failure, HostError

PROTOCOL = 1
LARGEST_SENT = 8 * 1024 * 1024
LARGEST_RECEIVED = 1024 * 1024 + 4096
DEEPEST = 64
NOISE = 64 * 1024
"""Bytes that login shells may print before the marker."""

GREETING = 60
"""Seconds that a host waits for the runner's source: whoever was to send it may be gone without a word."""

CORE = (
    "api",
    "records",
    "places",
    "claims",
    "lease",
    "ledger",
    "calls",
    "channel",
    "loop",
    "changes",
    "runner",
)
"""The host modules that every session sends first."""

NOT_OURS = "look at what answers there instead of sh"

_MINORS = range(20, 7, -1)
PYTHONS = (
    "/usr/bin/python3",
    "/usr/local/bin/python3",
    *(f"/usr/bin/python3.{minor}" for minor in _MINORS),
    *(f"/usr/local/bin/python3.{minor}" for minor in _MINORS),
    "/opt/python3/bin/python3",
    "/opt/python/bin/python3",
    "/opt/bin/python3",
)
"""Where Python is looked for, in order: fixed places that only root can write to."""

TOO_OLD = 97
NO_PYTHON = 3

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._+/-]+\Z")

# No quote of any kind, no `$`, `!`, backslash or newline may be in here: it stands in double quotes
# of sh, inside single quotes of whatever login shell. Words come as arguments.
_BOOTSTRAP = (
    "import os,signal,sys,zlib;"
    f"signal.alarm({GREETING});"
    f"sys.version_info<(3,8) and sys.exit({TOO_OLD});"
    "a=sys.argv;n=int(a[2]);"
    "os.write(1,(a[1]+str(sys.hexversion)+chr(10)).encode());"
    "d=bytearray();"
    "[d.extend(os.read(0,n-len(d)) or sys.exit(4)) for _ in iter(lambda:len(d)<n,False)];"
    "exec(zlib.decompress(d))"
)


# -- frames -----------------------------------------------------------------------------------------


def encode(frame: Mapping[str, Json]) -> bytes:
    """A frame as bytes. Raises Bug where it is too long for the host to take."""
    data = json.dumps(frame, separators=(",", ":")).encode()
    if len(data) > LARGEST_SENT:
        raise Bug(f"a frame of {len(data)} bytes: the host takes at most {LARGEST_SENT}")
    return struct.pack(">I", len(data)) + data


class Decoder:
    """Bytes from the host, as they come, to frames. What no runner sends is a HostError."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes of the frame that came last."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Json]]:
        """The frames that are whole with this data."""
        self._buffer += data
        while len(self._buffer) >= 4:
            (size,) = struct.unpack_from(">I", self._buffer)
            if size > LARGEST_RECEIVED:
                raise _garbage(f"a frame of {size} bytes")
            if len(self._buffer) < 4 + size:
                return
            body = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            self.size = 4 + size
            yield _parse(body)


def _parse(body: bytes) -> dict[str, Json]:
    try:
        frame = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise _garbage("something that is not JSON") from None
    if not isinstance(frame, dict) or not _shallow(frame):
        raise _garbage("JSON that is not a frame")
    return frame


def _no_number(name: str) -> None:
    raise ValueError(name)


def _shallow(frame: Json) -> bool:
    level: list[Any] = [frame]
    for _ in range(DEEPEST):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return True
    return False


def _garbage(what: str) -> HostError:
    message = f"the host sent {what}; no runner of fleetfix does"
    return HostError(Failure(kind="bug", message=message, hint=NOT_OURS))


# -- the start command --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """How a runner is started on one host, and what it says first.

    `nonce` makes each start's words its own, so that nothing a shell echoes is taken for them.
    """

    nonce: str
    python: str | None = None
    become: bool = False

    @property
    def marker(self) -> re.Pattern[bytes]:
        """The line that the bootstrap prints; its group is Python's hexversion."""
        return re.compile(rb"fleetfix/%d/%s/(\d+)\n" % (PROTOCOL, self.nonce.encode()))

    @property
    def prompt(self) -> str:
        """What sudo prints where it wants a password."""
        return f"fleetfix-sudo-{self.nonce}:"

    @property
    def no_python(self) -> bytes:
        """What the start script prints where it found no Python."""
        return f"fleetfix-none-{self.nonce}:\n".encode()

    @property
    def no_sudo(self) -> bytes:
        """What the start script prints where there is no sudo."""
        return f"fleetfix-no-sudo-{self.nonce}:\n".encode()

    @property
    def tried(self) -> re.Pattern[bytes]:
        """The line that the start script prints before it tries a Python; its group is the path."""
        return re.compile(rb"fleetfix-try-%s:(/[A-Za-z0-9._+/-]+)\n" % self.nonce.encode())

    @property
    def failed(self) -> re.Pattern[bytes]:
        """… and where that one would not do: its exit status."""
        return re.compile(rb"fleetfix-not-%s:(\d+)\n" % self.nonce.encode())

    @property
    def places(self) -> tuple[str, ...]:
        """Where Python is looked for on this host."""
        return (self.python,) if self.python else PYTHONS

    def command(self) -> str:
        """The command, the same for sh, bash, dash, fish and tcsh as login shell."""
        if self.python is not None and not _PLAIN_PATH.match(self.python):
            message = f"python: {self.python!r} is not an absolute path of plain characters"
            raise HostError(Failure(kind="no_python", message=message))
        places, look, sudo = " ".join(self.places), "", ""
        if self.become:
            sudo = f'sudo -S -p "{self.prompt}" -- '
            gone = f'echo "fleetfix-no-sudo-{self.nonce}:"; exit {NO_PYTHON}'
            look = f"command -v sudo >/dev/null || {{ {gone}; }}; "
        words = f"fleetfix/{PROTOCOL}/{self.nonce}/ {len(core())}"
        script = (
            # What sudo says of a refusal is read: it says it in English then.
            f'LC_ALL=C; export LC_ALL; {look}b="{_BOOTSTRAP}"; for p in {places}; do if [ -x "$p" ]; then '
            f'echo "fleetfix-try-{self.nonce}:$p"; {sudo}"$p" -I -S -B -c "$b" {words}; r=$?; '
            f'case "$r" in {TOO_OLD}|126|127) echo "fleetfix-not-{self.nonce}:$r";; *) exit "$r";; esac; '
            f'fi; done; echo "fleetfix-none-{self.nonce}:"; exit {NO_PYTHON}'
        )
        assert not set("'!\\\n") & set(script)
        return f"exec sh -c '{script}'"


# -- sources ------------------------------------------------------------------------------------------


@functools.cache
def core() -> bytes:
    """The compressed source that the bootstrap takes: the loader, with the core's modules in it."""
    sources = {name: _shipped(name) for name in CORE}
    return zlib.compress(f"{_shipped('boot')}\n\nbegin({sources!r})\n".encode(), 9)


def _shipped(name: str) -> str:
    return resources.files("fleetfix.remote").joinpath(f"{name}.py").read_text("utf-8")


@dataclass(frozen=True)
class Source:
    """A host module as it is sent."""

    name: str
    digest: str
    packed: str
    imports: tuple[str, ...]


class Sources:
    """The host modules that calls can name: fleetfix's own, and those that actions bring."""

    def __init__(self, extra: Mapping[str, str] | None = None) -> None:
        self._extra = dict(extra or {})

    def needed(self, modules: Iterable[str]) -> dict[str, Source]:
        """These modules and all that they import, by name. A module that is not here is left out."""
        found: dict[str, Source] = {}
        waiting = list(modules)
        while waiting:
            name = waiting.pop()
            source = None if name in found or name in CORE else self._source(name)
            if source is not None:
                found[name] = source
                waiting += source.imports
        return found

    def _source(self, name: str) -> Source | None:
        if name in self._extra:
            return _pack(name, self._extra[name])
        return _packed(name)


@functools.cache
def _packed(name: str) -> Source | None:
    try:
        return _pack(name, _shipped(name))
    except FileNotFoundError:
        return None


@functools.lru_cache(maxsize=256)
def _pack(name: str, text: str) -> Source:
    data = text.encode()
    return Source(
        name=name,
        digest=hashlib.sha256(data).hexdigest(),
        packed=base64.b64encode(zlib.compress(data, 9)).decode(),
        imports=tuple(_imports(text, name)),
    )


def _imports(text: str, name: str) -> Iterator[str]:
    """The host modules that a source imports, wherever in it."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Bug(f"host module {name} does not parse: {error}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "fleetfix.remote":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fleetfix.remote."):
            yield (node.module or "").removeprefix("fleetfix.remote.")


def readable(data: bytes, most: int = 300) -> str:
    """The tail of what a host printed, for a message: one line, nothing a terminal would act on."""
    text = data.decode("utf-8", "backslashreplace")
    clean = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return clean if len(clean) <= most else "… " + clean[-most:]
