"""Files of known host keys: what they say of one host, and a new key written down in one.

A fleet's file is long, and a host needs a few of its lines: only those are read as keys.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import functools
import hashlib
import hmac
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh

DEFAULT_PORT = 22
LOCK_SECONDS = 1.0
"""How long another one who writes to the file is waited for; then it is written to all the same."""

Known = tuple[Sequence[Any], ...]
"""As asyncssh has it: keys, keys of authorities, revoked keys, and the same in X.509."""

NOTHING: Known = ((), (), (), (), (), (), ())


def spelt(host: str, port: int | None) -> str:
    """A host as such files name it: with its port, where that is not ssh's own."""
    return host if port in (None, DEFAULT_PORT) else f"[{host}]:{port}"


def look_up(files: Sequence[Path], host: str, address: str, port: int | None) -> Known:
    """What is known of a host by its name or address. A line that cannot be read counts for nothing."""
    found = [_look_up(file, host, address, port) for file in files]
    return tuple([key for one in found for key in one[part]] for part in range(len(NOTHING)))


def write_down(file: Path, name: str, key: asyncssh.SSHKey, *, hashed: bool) -> None:
    """Add a key under this name, unless another has done so meanwhile. Raises OSError.

    The line is whole whoever else writes to the file, and also where the last one has no end.
    """
    kind_and_key = " ".join(key.export_public_key("openssh").decode().split()[:2])
    line = f"{_hashed(name) if hashed else name} {kind_and_key}\n".encode()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+b") as open_file:
        _lock(fd)
        size = open_file.seek(0, os.SEEK_END)
        if kind_and_key in _of(file, name):
            return
        if size:
            open_file.seek(size - 1)
            if open_file.read(1) != b"\n":
                line = b"\n" + line
        os.write(fd, line)


def _of(file: Path, name: str) -> list[str]:
    """The keys that a file has for exactly this name."""
    index = _index(file)
    return [" ".join(line.split()[1:3]) for line in index.lines_of(name)] if index else []


def _lock(fd: int) -> None:
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return None
            time.sleep(0.005)
        except OSError:
            return None  # a file system without locks


def _hashed(name: str) -> str:
    salt = os.urandom(20)
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


# -- reading ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Index:
    """The lines of one file, by what they are found by."""

    exact: dict[str, list[str]]
    hashed: list[tuple[bytes, bytes, str]]
    patterns: list[str]
    hashed_of: dict[str, list[str]]
    """What was found among the hashed lines: to look takes long, and each host is looked for twice."""

    def lines_of(self, name: str) -> list[str]:
        """The lines for exactly this name, patterns left out."""
        if name not in self.hashed_of:
            own = name.encode()
            self.hashed_of[name] = [
                line for salt, digest, line in self.hashed if hmac.digest(salt, own, "sha1") == digest
            ]
        return self.exact.get(name, []) + self.hashed_of[name]


def _look_up(file: Path, host: str, address: str, port: int | None) -> Known:
    index = _index(file)
    if index is None:
        return NOTHING
    names = dict.fromkeys(one for name in (host, address) if name for one in (spelt(name, port), name))
    lines = dict.fromkeys(line for name in names for line in index.lines_of(name))
    found = asyncssh.import_known_hosts("")
    for line in (*lines, *index.patterns):
        with contextlib.suppress(ValueError, asyncssh.KeyImportError):
            found.load(line)
    known = found.match(host, address, None if port == DEFAULT_PORT else port)
    # Where nothing but a revoked key is known at this port, asyncssh forgets it for those of port 22.
    revoked = found.match(spelt(host, port), "", None)[2]
    return (*known[:2], [*known[2], *revoked], *known[3:])


def _index(file: Path) -> _Index | None:
    try:
        there = file.stat()
    except OSError:
        return None
    if not stat.S_ISREG(there.st_mode):
        return None  # a device may have no end, and has no keys
    return _read(file, there.st_mtime_ns, there.st_size)


@functools.lru_cache(maxsize=64)
def _read(file: Path, changed: int, size: int) -> _Index | None:
    del changed, size
    try:
        text = file.read_text("utf-8", "replace")
    except OSError:
        return None
    index = _Index({}, [], [], {})
    for line in text.splitlines():
        words = line.split(None, 3)
        if len(words) < 3 or words[0].startswith("#"):
            continue
        names = words[1] if words[0].startswith("@") else words[0]
        if names.startswith("|"):
            with contextlib.suppress(ValueError, binascii.Error):
                _, _, salt, digest = names.split("|")
                index.hashed.append((base64.b64decode(salt), base64.b64decode(digest), line))
        elif set(names) & set("*?!/"):
            index.patterns.append(line)
        else:
            for name in names.split(","):
                index.exact.setdefault(name, []).append(line)
    return index
