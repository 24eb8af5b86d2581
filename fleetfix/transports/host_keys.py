"""Whether a host's key is the one that is known, and what happens with the key of a host never seen.

The user's ssh configuration decides (UserKnownHostsFile, GlobalKnownHostsFile, StrictHostKeyChecking);
where it says nothing, a new key is accepted and written down at a terminal, and refused in a pipe. A
changed key is always refused.
"""

from __future__ import annotations

import functools
import getpass
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import asyncssh
from asyncssh.config import SSHClientConfig, SSHConfig

Policy = Literal["strict", "accept_new"]

_ACCEPTING = ("accept-new", "no", "off")
_DEFAULT_PORT = 22


class _Configuration(SSHClientConfig):
    """The user's ssh configuration, with the one option that asyncssh passes over."""

    _handlers = {  # noqa: RUF012 - as in the class above it
        **SSHClientConfig._handlers,
        "stricthostkeychecking": ("StrictHostKeyChecking", SSHClientConfig._set_string),
    }


class HostKeys:
    """The known keys of one host, for one connection to it."""

    def __init__(self, policy: Policy | None) -> None:
        self.complaint = ""
        self.hint = ""
        self.identities: list[str] | None = None
        """Files of the operator's own keys, where the configuration names one that is missing."""
        self._policy: Policy = policy or _by_terminal()
        self._decided = policy is not None
        self._user_files: list[Path] = []
        self._files: list[Path] = []
        self._known: tuple[Sequence[Any], ...] = ((), (), (), (), (), (), ())

    def learn(self, config: list[str], address: str, port: int | None, user: str | None) -> None:
        """Take from the ssh configuration which files hold keys, known and own, and how strict to be."""
        said = _Configuration.load(
            None,
            config,
            True,
            False,
            False,
            getpass.getuser(),
            () if user is None else user,
            address,
            () if port is None else port,
        )
        self.identities = _present(said)
        strict = str(said.get("StrictHostKeyChecking", "")).lower()
        if strict and not self._decided:
            self._policy = "accept_new" if strict in _ACCEPTING else "strict"
        self._user_files = _paths(said.get("UserKnownHostsFile", ["~/.ssh/known_hosts"]))
        system = said.get("GlobalKnownHostsFile", ["/etc/ssh/ssh_known_hosts"])
        self._files = self._user_files + _paths(system)

    def match(self, host: str, addr: str, port: int | None) -> tuple[Sequence[Any], ...]:
        """The keys that are known of a host: as asyncssh asks for them."""
        books = [_read(*stamp) for stamp in map(_stamp, self._files) if stamp]
        found = [book.match(host, addr, port) for book in books]
        # Where nothing but a revoked key is known at this port, asyncssh forgets it for those of port 22.
        found += [
            ((), (), book.match(_spelt(host, port), "", None)[2], (), (), (), ()) for book in books if port
        ]
        if found:
            self._known = tuple([key for one in found for key in one[part]] for part in range(7))
        return self._known

    def accept(self, host: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Decide about a key that is not known; a new one that is accepted is written down."""
        print_ = key.get_fingerprint()
        if self._known[0]:
            self.complaint = f"its key has changed to {print_}"
            self.hint = "if that is right, remove the old key: ssh-keygen -R " + _spelt(host, port)
            return False
        if self._policy == "strict":
            self.complaint = f"its key {print_} is not known"
            self.hint = "connect once by ssh, or distribute known_hosts"
            return False
        if self._user_files:
            _write_down(self._user_files[0], host, port, key)
        return True


def _present(said: SSHConfig) -> list[str] | None:
    """The identity files that there are, or None where all are. asyncssh stumbles over one that is missing.

    As with ssh such a one is passed over; with IdentitiesOnly its public half tells the agent's key.
    """
    named = said.get("IdentityFile", [])
    files = [str(Path(str(name)).expanduser()) for name in (named if isinstance(named, list) else [])]
    if all(map(os.path.exists, files)):
        return None
    halves = (".pub",) if said.get("IdentitiesOnly") else ()
    candidates = (
        next((file + end for end in ("", *halves) if os.path.exists(file + end)), "") for file in files
    )
    return [file for file in candidates if file]


def _by_terminal() -> Policy:
    return (
        "accept_new" if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty() else "strict"
    )


def _paths(names: object) -> list[Path]:
    listed = names if isinstance(names, list) else []
    return [Path(str(name)).expanduser() for name in listed if str(name).lower() != "none"]


def _stamp(path: Path) -> tuple[Path, int, int] | None:
    try:
        there = path.stat()
    except OSError:
        return None
    return (path, there.st_mtime_ns, there.st_size)


@functools.lru_cache(maxsize=64)
def _read(path: Path, changed: int, size: int) -> asyncssh.SSHKnownHosts:
    """One known_hosts file, read again only when it has changed; a fleet's is long."""
    del changed, size
    return asyncssh.import_known_hosts(path.read_text("utf-8", "replace"))


def _spelt(host: str, port: int) -> str:
    return host if port == _DEFAULT_PORT else f"[{host}]:{port}"


def _write_down(path: Path, host: str, port: int, key: asyncssh.SSHKey) -> None:
    line = f"{_spelt(host, port)} {key.export_public_key().decode().strip()}\n"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(line.encode())
