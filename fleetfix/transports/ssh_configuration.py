"""What the user's ssh configuration says of a host, for a wire that cannot read all of it by itself."""

from __future__ import annotations

import getpass
from dataclasses import dataclass
from pathlib import Path

from asyncssh.config import SSHClientConfig


@dataclass(frozen=True)
class Place:
    """Where one connection goes, before the configuration had its say."""

    address: str
    port: int | None = None
    user: str | None = None
    key_file: str | None = None

    @classmethod
    def parse(cls, hop: str) -> Place:
        """Read `[USER@]HOST[:PORT]`, as ProxyJump has it."""
        user, _, place = hop.strip().removeprefix("ssh://").rpartition("@")
        bracketed, _, after = place.removeprefix("[").partition("]")
        if place.startswith("["):
            address, port = bracketed, after.removeprefix(":")
        else:
            address, _, port = place.partition(":") if place.count(":") == 1 else (place, "", "")
        return cls(address, int(port) if port else None, user or None)


def files(ssh_config: str | None) -> list[str]:
    """The configuration files, the host's own first: ssh takes the first value it finds."""
    own = Path("~/.ssh/config").expanduser()
    return ([ssh_config] if ssh_config else []) + ([str(own)] if own.is_file() else [])


def settings(place: Place, ssh_config: str | None) -> SSHClientConfig:
    """What the ssh configuration says of a place: the host's own file first, then the user's.

    Both wires read it with the same parser: `Include` and `Match` count, which paramiko's does not know.
    """
    for final in (False, True):
        said: SSHClientConfig = SSHClientConfig.load(  # type: ignore[assignment]
            None,
            files(ssh_config),
            True,
            False,
            final,
            getpass.getuser(),
            () if place.user is None else place.user,
            place.address,
            () if place.port is None else place.port,
        )
        if not said.has_match_final():
            break
    return said


def hops_of(via: str | None, said: SSHClientConfig) -> list[str]:
    """The jump hosts on the way, the nearest first."""
    jump = via or str(said.get("ProxyJump") or "")
    return [] if jump.lower() in ("", "none") else [hop.strip() for hop in jump.split(",")]
