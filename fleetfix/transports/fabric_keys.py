"""Keys of both ends of a connection by paramiko: whether the host's is known, which of ours are offered."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import asyncssh
import paramiko
from paramiko.auth_strategy import AuthFailure, AuthStrategy, InMemoryPrivateKey

from fleetfix.folders import expanded
from fleetfix.transports.fabric_agent import agent_at
from fleetfix.transports.host_keys import HostKeys
from fleetfix.transports.ssh_config import Settings
from fleetfix.transports.ssh_configuration import Place
from fleetfix.transports.ssh_keys import agent_path

KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
"""What ssh looks for in ~/.ssh where no configuration names a key; as far as paramiko can use it."""


class Refused(Exception):
    """The host's key was refused; the `HostKeys` that did it know why."""


# -- keys of hosts ----------------------------------------------------------------------------------------


def kinds_known(keys: HostKeys, name: str, port: int) -> frozenset[str]:
    """The kinds of the keys that are known of a host, as `ssh-ed25519`."""
    trusted, _, revoked, *_ = keys.match(name, "", port)
    return frozenset(key.get_algorithm() for key in trusted if key not in revoked)


class Asking(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
    """Decides about every key that a host shows: paramiko is told of none that is known.

    Its own book of them knows neither revoked ones nor several of one kind.
    """

    def __init__(self, keys: HostKeys, name: str, port: int) -> None:
        self._keys = keys
        self._name = name
        self._port = port

    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        del client, hostname
        shown = asyncssh.import_public_key(f"{key.get_name()} {key.get_base64()}")
        trusted, authorities, revoked, *_ = self._keys.match(self._name, "", self._port)
        if shown in revoked:
            self._keys.complaint = f"its key {shown.get_fingerprint()} is marked as revoked"
            self._keys.hint = "look at who answers there"
            raise Refused
        if authorities and not trusted:
            self._keys.complaint = "it is known by a certificate authority, which paramiko cannot check"
            self._keys.hint = "write down its own key, too; `transport: asyncssh` checks its certificate"
            raise Refused
        if shown not in trusted and not self._keys.accept(self._name, self._port, shown):
            raise Refused


# -- keys of ours -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identities:
    """Which keys of the operator's may be offered."""

    files: tuple[str, ...]
    certificates: tuple[str, ...]
    only: bool
    """No key but these, also of the agent."""
    agent: str
    """Where the agent listens; empty where there is none."""

    @classmethod
    def of(cls, place: Place, said: Settings) -> Identities:
        # An empty list is one where it says `none`.
        files = said.texts("IdentityFile", [f"~/.ssh/{name}" for name in KEYS])
        return cls(
            tuple(map(_home, [place.key_file] if place.key_file else files)),
            tuple(map(_home, said.texts("CertificateFile"))),
            only=said.yes("IdentitiesOnly") or place.key_file is not None,
            agent=agent_path(said),
        )


class NoneAccepted(AuthFailure):  # type: ignore[misc]
    """None of our keys was accepted; `troubles` says why others could not be offered."""

    def __init__(self, result: Any, troubles: list[str]) -> None:
        super().__init__(result)
        self.troubles = troubles


def _home(path: str) -> str:
    return str(expanded(path))


class Keys(AuthStrategy):  # type: ignore[misc]
    """Offers keys in ssh's order: those of the files, then the agent's. Nothing is prompted for."""

    def __init__(
        self, *, identities: Identities, ssh_config: Any, fabric_config: Any, username: str
    ) -> None:
        del fabric_config
        super().__init__(ssh_config=ssh_config)
        self._identities = identities
        self._user = username

    def authenticate(self, transport: paramiko.Transport) -> Any:
        self._troubles: list[str] = []
        self._agents: list[Any] = []
        if self._identities.agent:
            agent = agent_at(self._identities.agent)
            try:
                self._agents = agent.keys()
            except paramiko.SSHException as error:
                self._troubles.append(str(error))
        try:
            return super().authenticate(transport)
        except AuthFailure as failure:
            raise NoneAccepted(failure.result, self._troubles) from failure

    def get_sources(self) -> Iterator[InMemoryPrivateKey]:
        offered: set[bytes] = set()
        for key in self._in_order():
            if key.asbytes() not in offered:
                offered.add(key.asbytes())
                yield InMemoryPrivateKey(self._user, key)

    def _in_order(self) -> Iterator[paramiko.PKey]:
        for path in self._identities.files:
            public = _public_half(path)
            kept = next((key for key in self._agents if key.asbytes() == public), None)
            key = kept if kept is not None else self._loaded(path)
            if key is not None:
                yield from self._certified(path, key)
                yield key
        if not self._identities.only:
            yield from self._agents

    def _certified(self, path: str, key: paramiko.PKey) -> Iterator[paramiko.PKey]:
        """The key with each certificate of ours that is for it."""
        for file in (*self._identities.certificates, f"{path}-cert.pub"):
            if os.path.exists(file) and (own := self._loaded(path)) is not None:
                with contextlib.suppress(Exception):
                    own.load_certificate(file)
                    yield own

    def _loaded(self, path: str) -> paramiko.PKey | None:
        """A key of a file; None where there is none that can be read: as ssh does, it is passed over."""
        try:
            return paramiko.PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError):  # the latter is what it says so by
            self._troubles.append(f"{path} has a passphrase: ssh-add {path}")
        except FileNotFoundError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever paramiko makes of such a file
            if _public_half(path) is None:
                said = " ".join(str(getattr(error, "strerror", None) or error).lower().split())
                self._troubles.append(f"{path}: {said}")
        return None


def _public_half(path: str) -> bytes | None:
    with contextlib.suppress(OSError, asyncssh.KeyImportError):
        file = path if path.endswith(".pub") else f"{path}.pub"
        return asyncssh.read_public_key(file).public_data
    return None
