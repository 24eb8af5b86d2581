"""With which keys a connection logs in: those of the agent and of files, in ssh's order.

What stands in the way of a key, a passphrase, say, is told only where no other key is accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import asyncssh

from fleetfix.folders import expanded
from fleetfix.transports.ssh_agent import Agent, agent_at
from fleetfix.transports.ssh_config import Settings

_USUAL = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
_HARDWARE = b"sk-"


class Identities:
    """The keys for one connection."""

    def __init__(self, settings: Settings, key_file: str | None) -> None:
        said = settings.texts("IdentityFile", [f"~/.ssh/{name}" for name in _USUAL])
        files = [key_file] if key_file is not None else said
        self._files = [expanded(name) for name in files]
        self._certificates = settings.texts("CertificateFile")
        self._only = settings.yes("IdentitiesOnly")
        self._agent = _agent_of(settings)
        self.troubles: list[str] = []
        """Why keys could not be used, one line each."""
        if settings.text("PKCS11Provider"):
            self.troubles.append("PKCS11Provider is not supported: ssh-add -s gives its keys to your agent")

    async def offered(self) -> list[asyncssh.SSHKeyPair]:
        """Key pairs in the order in which they are tried; made anew, for they remember what was agreed."""
        held, named = await asyncio.to_thread(self._read)
        agents = await self._of_agent(named)
        known = {pair.public_data for pair in agents}
        first = [pair for pair in agents if pair.public_data in named]
        others = [pair for pair in agents if pair.public_data not in named]
        pairs = [*first, *others, *(pair for pair in held if pair.public_data not in known)]
        return sorted(pairs, key=lambda pair: not pair.has_cert)  # keeps the order otherwise

    async def _of_agent(
        self, named: dict[bytes, list[asyncssh.SSHCertificate]]
    ) -> list[asyncssh.SSHKeyPair]:
        if self._agent is None:
            return []
        try:
            pairs = await self._agent.get_keys()
        except ValueError as error:
            self.troubles.append(self._agent.trouble or f"the ssh agent: {str(error) or 'no answer'}")
            return []
        wanted = [pair for pair in pairs if not self._only or pair.public_data in named]
        # A certificate in a file goes with its key, wherever that is.
        certified: list[asyncssh.SSHKeyPair] = []
        for pair in wanted if any(named.values()) else ():
            for certificate in named.get(pair.public_data, ()):
                twin = asyncssh.SSHAgentKeyPair(self._agent, pair.algorithm, pair.public_data, b"")
                twin.set_certificate(certificate)
                certified.append(twin)
        return [*certified, *wanted]

    def _read(self) -> tuple[list[asyncssh.SSHKeyPair], dict[bytes, list[asyncssh.SSHCertificate]]]:
        """The pairs in files, and the public keys that files name, with the certificates for them."""
        pairs: list[asyncssh.SSHKeyPair] = []
        named: dict[bytes, list[asyncssh.SSHCertificate]] = {}
        certificates = [one for name in self._certificates for one in self._certificate(expanded(name))]
        for file in self._files:
            if not os.path.exists(file) and not os.path.exists(f"{file}.pub"):
                continue  # as with ssh
            own = [*certificates, *self._certificate(Path(f"{file}-cert.pub"), missing=True)]
            for public in _public_halves(file):
                named.setdefault(public, []).extend(one for one in own if one.key.public_data == public)
            for pair in self._private(file, own):
                named.setdefault(pair.public_data if not pair.has_cert else pair.key_public_data, [])
                pairs.append(pair)
        return pairs, named

    def _certificate(self, file: Path, *, missing: bool = False) -> Sequence[asyncssh.SSHCertificate]:
        try:
            return asyncssh.load_certificates([str(file)])
        except OSError as error:
            if not missing:
                self.troubles.append(f"{file}: {(error.strerror or str(error)).lower()}")
        except (ValueError, asyncssh.KeyImportError):
            self.troubles.append(f"{file} is no certificate")
        return ()

    def _private(
        self, file: Path, certificates: Iterable[asyncssh.SSHCertificate]
    ) -> Sequence[asyncssh.SSHKeyPair]:
        if not os.path.exists(file):
            return ()
        try:
            pairs = asyncssh.load_keypairs([str(file)], certlist=list(certificates))
        except OSError as error:
            self.troubles.append(f"{file}: {(error.strerror or str(error)).lower()}")
        except asyncssh.KeyEncryptionError:
            self.troubles.append(f"{file} has a passphrase: ssh-add {file}")
        except (ValueError, asyncssh.KeyImportError) as error:
            if "passphrase" in str(error).lower():
                self.troubles.append(f"{file} has a passphrase: ssh-add {file}")
            elif not _is_public(file):
                self.troubles.append(f"{file} is no private key that can be read: {error}")
        else:
            if any(pair.algorithm.startswith(_HARDWARE) for pair in pairs):
                self.troubles.append(
                    f"{file} is on a security key: ssh-add {file}; the agent is asked for it"
                )
                return ()
            return pairs
        return ()


def _public_halves(file: Path) -> list[bytes]:
    found = []
    for name in (f"{file}.pub", str(file)):
        with contextlib.suppress(OSError, ValueError, asyncssh.KeyImportError):
            found.append(asyncssh.read_public_key(name).public_data)
    return found


def _is_public(file: Path) -> bool:
    return bool(_public_halves(file))


def _agent_of(settings: Settings) -> Agent | None:
    path = agent_path(settings)
    return agent_at(path) if path else None


def agent_path(settings: Settings) -> str:
    """Where the agent listens that the configuration, or the environment, names; empty where none is."""
    said = settings.config.get("IdentityAgent", "SSH_AUTH_SOCK")
    path = str(said or "")
    if path == "SSH_AUTH_SOCK":
        path = os.environ.get("SSH_AUTH_SOCK", "")
    elif path.startswith("$"):
        path = os.environ.get(path[1:].strip("{}"), "")
    return str(expanded(path)) if path else ""
