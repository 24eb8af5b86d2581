"""Whether a host's key is the one that is known, and what happens with the key of a host never seen.

The user's ssh configuration decides (UserKnownHostsFile, GlobalKnownHostsFile, StrictHostKeyChecking,
RevokedHostKeys, HashKnownHosts); where it says nothing, a new key is accepted and written down at a
terminal, and refused in a pipe. A changed or revoked key is always refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import asyncssh
from asyncssh.public_key import get_default_certificate_algs, get_default_public_key_algs

from fleetfix.folders import expanded
from fleetfix.transports import known_hosts
from fleetfix.transports.known_hosts import NOTHING, Known, spelt
from fleetfix.transports.ssh_config import Settings

Policy = Literal["strict", "accept_new"]

_ACCEPTING = ("accept-new", "no", "off")
_USERS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_SYSTEMS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")

_unwritten: dict[str, str] = {}
"""Keys that were accepted by this process and could not be written down, by host."""


class HostKeys:
    """The known keys of one host, for one connection to it."""

    def __init__(self, policy: Policy | None, tell: Callable[[str], None] | None = None) -> None:
        self.complaint = ""
        self.hint = ""
        self._policy: Policy = policy or _by_terminal()
        self._decided = policy is not None
        self._tell = tell
        self._hashed = self._commanded = False
        self._alias = ""
        self._user_files: list[Path] = []
        self._files: list[Path] = []
        self._revoked: list[Path] = []
        self._known: Known = NOTHING

    def learn(self, settings: Settings) -> None:
        """Take from the ssh configuration which files hold keys, and how strict to be."""
        strict = settings.text("StrictHostKeyChecking").lower()
        if strict not in ("", "ask") and not self._decided:
            self._policy = "accept_new" if strict in _ACCEPTING else "strict"
        self._hashed = settings.yes("HashKnownHosts")
        self._commanded = settings.text("KnownHostsCommand") != ""
        self._alias = settings.text("HostKeyAlias")
        self._user_files = _paths(settings.texts("UserKnownHostsFile", _USERS))
        self._files = self._user_files + _paths(settings.texts("GlobalKnownHostsFile", _SYSTEMS))
        self._revoked = _paths(settings.texts("RevokedHostKeys"))

    def algorithms(self, host: str, port: int) -> list[str]:
        """The kinds of keys to ask the host for, by preference: the known ones first.

        The others follow, so that a host without its known key is told from one that speaks another SSH.
        A certificate is asked for only where an authority is known: elsewhere the key itself counts.
        """
        known = self.match(self._alias or host, "", port)
        wanted = get_default_certificate_algs() if known[1] else []
        wanted = [*wanted, *(one for key in known[0] for one in key.sig_algorithms)]
        return list(dict.fromkeys(one.decode() for one in (*wanted, *get_default_public_key_algs())))

    def match(self, host: str, addr: str, port: int | None) -> Known:
        """The keys that are known of a host: as asyncssh asks for them. Raises OSError, ValueError."""
        known = known_hosts.look_up(self._files, host, addr, port)
        revoked = [*known[2], *(key for file in self._revoked for key in _listed(file))]
        self._known = (*known[:2], revoked, *known[3:])
        return self._known

    def accept(self, host: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Decide about a key that is not known; a new one that is accepted is written down."""
        print_ = key.get_fingerprint()
        # An alias stands for the host whatever its port is, as with ssh.
        name = self._alias or spelt(host, port)
        known = dict.fromkeys(one.algorithm.decode() for one in self._known[0])
        if known and key.algorithm.decode() not in known:
            shows = f"{key.algorithm.decode()} {print_}"
            self.complaint = f"it no longer shows the key that is known, {' or '.join(known)}, but {shows}"
        elif known or _unwritten.get(name, print_) != print_:
            self.complaint = f"its key has changed to {print_}"
        if self.complaint:
            self.hint = f"if that is right, remove the old key: ssh-keygen -R {_quoted(name)}"
            return False
        if name in _unwritten:
            return True
        if self._policy == "strict":
            self.complaint = f"its key {print_} is not known"
            self.hint = "connect once by ssh, or distribute known_hosts"
            if self._commanded:
                self.hint += "; KnownHostsCommand is not supported"
            return False
        if self._user_files:
            self._write_down(name, key)
        return True

    def _write_down(self, name: str, key: asyncssh.SSHKey) -> None:
        file = self._user_files[0]
        try:
            known_hosts.write_down(file, name, key, hashed=self._hashed)
        except OSError as error:
            # As ssh does: the host is believed now; its key must stay the same while this process lives.
            _unwritten[name] = key.get_fingerprint()
            if self._tell is not None:
                why = (error.strerror or str(error)).lower()
                self._tell(f"its new key is not written down: {file}: {why}")

    def refused(self, error: asyncssh.Error) -> None:
        """Say what is wrong with a key that asyncssh refused by itself."""
        if not self.complaint and "revoked" in str(error):
            self.complaint = "its key is revoked"
            self.hint = "known_hosts, or RevokedHostKeys of your ssh configuration, says so"


def _by_terminal() -> Policy:
    return (
        "accept_new" if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty() else "strict"
    )


def _paths(names: Sequence[str]) -> list[Path]:
    return [expanded(name) for name in names if name.lower() != "none"]


def _quoted(name: str) -> str:
    return f"'{name}'" if "[" in name else name


_KRL = b"SSHKRL\n\0"


def _listed(file: Path) -> Sequence[asyncssh.SSHKey]:
    """The keys of a RevokedHostKeys file. One that cannot be read lets nobody in, as with ssh."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"RevokedHostKeys {file}: {(error.strerror or str(error)).lower()}") from None
    if data.startswith(_KRL):
        raise ValueError(f"RevokedHostKeys {file} is a binary list; give one of public keys")
    lines = (line.strip() for line in data.decode("utf-8", "replace").splitlines())
    return [asyncssh.import_public_key(line) for line in lines if line and not line.startswith("#")]
