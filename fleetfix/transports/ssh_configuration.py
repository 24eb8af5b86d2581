"""What the user's ssh configuration says of a host, for a wire that cannot read it by itself."""

from __future__ import annotations

from dataclasses import dataclass

from fleetfix.inventory import Host
from fleetfix.transports.jump_hosts import parts, way_now
from fleetfix.transports.ssh_config import Settings, resolve_now


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
        return cls(*parts(hop))


def settings(place: Place, ssh_config: str | None) -> Settings:
    """What the ssh configuration says of a place."""
    return resolve_now(place.address, place.port, place.user, ssh_config)


def hops_of(host: Host) -> list[str]:
    """The jump hosts on the way to a host, the nearest first, as the other wire goes."""
    return list(way_now(host).names)


def said_to_take(host: Host) -> float | None:
    """How long a host may take to answer, in seconds, as its ConnectTimeout says; None without one."""
    seconds = way_now(host).host.number("ConnectTimeout")
    return float(seconds) if seconds else None
