"""The way to a host over its jump hosts, each of which has one connection for all hosts behind it.

Where a jump host is named makes no difference: in the inventory, as ProxyJump, or as a ProxyCommand that
is nothing but `ssh -W`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import asyncssh

from fleetfix.errors import HostError
from fleetfix.inventory import Host
from fleetfix.transports.name_lookup import look_up
from fleetfix.transports.proxy_command import as_jump
from fleetfix.transports.ssh_config import Settings, mentions, resolve, resolve_now
from fleetfix.transports.ssh_login import Connection, Login, Unanswered, log_in

LONGEST = 8
"""Jump hosts on one way; more is a way that leads in a circle."""
REFUSED_FOR = 10.0
"""Seconds in which a jump host that refused us, or did not answer, is not asked again: every host behind
it would do so."""

Resolve = Callable[[str, int | None, str | None], Awaitable[Settings]]


@dataclass(frozen=True)
class Way:
    """All that is logged in to on the way to a host, the nearest first, the host itself last."""

    hops: tuple[Settings, ...]
    names: tuple[str, ...]
    """The jump hosts as they are written."""

    @property
    def host(self) -> Settings:
        return self.hops[-1]

    @property
    def server(self) -> tuple[object, ...]:
        """What tells the server at its end from others."""
        return tuple(_identity(hop) for hop in self.hops)


async def way_to(host: Host) -> Way:
    """Read the way to a host from the inventory and the ssh configuration. Raises ConfigParseError."""

    async def ask(name: str, port: int | None, user: str | None) -> Settings:
        return await resolve(name, port, user, host.ssh_config, look_up)

    via = None if host.via is None else _listed(host.via)
    hops, names = await _way(host.address, host.port, host.user, via, ask, ())
    return Way(tuple(hops), tuple(names))


def jump_hosts(hosts: Iterable[Host]) -> dict[str, tuple[str, ...]]:
    """The jump hosts on the way to each of these hosts, where their configuration has any.

    A configuration that cannot be read says none here: connecting will tell.
    """
    has_any: dict[str | None, bool] = {}
    found: dict[str, tuple[str, ...]] = {}
    read: dict[tuple[object, ...], Settings] = {}
    with contextlib.suppress(asyncssh.ConfigParseError, OSError):
        for host in hosts:
            if host.ssh_config not in has_any:
                has_any[host.ssh_config] = mentions(
                    host.ssh_config, frozenset(("proxyjump", "proxycommand"))
                )
            if has_any[host.ssh_config] and (jumps := jump_hosts_of(host, read)):
                found[host.name] = jumps
    return found


def jump_hosts_of(host: Host, read: dict[tuple[object, ...], Settings] | None = None) -> tuple[str, ...]:
    """The names and addresses of the jump hosts on the way to a host, without a look at the network.

    `read` keeps what was read of each: the hosts of a fleet have theirs in common.
    """
    way = way_now(host, read)
    return tuple(dict.fromkeys(name for hop in way.hops[:-1] for name in (hop.name, hop.host)))


def way_now(host: Host, read: dict[tuple[object, ...], Settings] | None = None) -> Way:
    """The way to a host, without a look at the network. Raises ConfigParseError."""
    known = {} if read is None else read

    async def ask(name: str, port: int | None, user: str | None) -> Settings:
        key = (name, port, user, host.ssh_config)
        if key not in known:
            known[key] = resolve_now(name, port, user, host.ssh_config)
        return known[key]

    via = None if host.via is None else _listed(host.via)
    going = _way(host.address, host.port, host.user, via, ask, ())
    try:
        going.send(None)
    except StopIteration as done:
        hops, names = done.value
        return Way(tuple(hops), tuple(names))
    raise AssertionError("nothing was to be waited for")


async def _way(
    address: str,
    port: int | None,
    user: str | None,
    via: tuple[str, ...] | None,
    ask: Resolve,
    behind: tuple[object, ...],
) -> tuple[list[Settings], list[str]]:
    settings = await ask(address.removeprefix("[").removesuffix("]"), port, user)
    own = (settings.name, settings.port, settings.user)
    if via is None:
        via = settings.jumps
        if not via and (jump := as_jump(settings.proxy_command, settings.host, settings.port)):
            via = (jump,)
        if via and (own in behind or len(behind) > LONGEST):
            raise asyncssh.ConfigParseError(
                f"the way over jump hosts leads back to {settings.name}: "
                "give its Host block `ProxyJump none`, before the others"
            )
    hops: list[Settings] = []
    names: list[str] = []
    for number, jump in enumerate(via):
        # The first of a list is reached as its own configuration says, the others through the one before.
        inner = None if number == 0 else ()
        further, nearer = await _way(*parts(jump), inner, ask, (*behind, own))
        hops += further
        names += [*nearer, jump]
    return [*hops, settings], names


def _listed(via: str) -> tuple[str, ...]:
    return () if via.lower() == "none" else tuple(word.strip() for word in via.split(","))


def parts(jump: str) -> tuple[str, int | None, str | None]:
    """Address, port and user of `[user@]host[:port]`, an IPv6 address with a port in brackets."""
    user, _, place = jump.strip().removeprefix("ssh://").rpartition("@")
    if place.startswith("["):
        address, _, rest = place[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        address, _, port = place.partition(":") if place.count(":") == 1 else (place, "", "")
    if port and not port.isdigit():
        raise asyncssh.ConfigParseError(f"jump host {jump}: {port!r} is no port")
    return address, int(port) if port else None, user or None


def _identity(settings: Settings) -> tuple[object, ...]:
    keys = (*settings.texts("IdentityFile"), *settings.texts("CertificateFile"))
    alias, proxy = settings.text("HostKeyAlias"), settings.proxy_command
    return (settings.host, settings.port, settings.user, alias, proxy, keys)


# -- connections --------------------------------------------------------------------------------------


@dataclass
class _Jump:
    """A connection to a jump host, which serves every host behind it while there is one."""

    connection: Connection | None = None
    making: asyncio.Task[Connection] | None = None
    users: int = 0
    refused: tuple[HostError, float] | None = None


_Jumps = dict[tuple[object, ...], _Jump]
_jumps: WeakKeyDictionary[asyncio.AbstractEventLoop, _Jumps] = WeakKeyDictionary()


@dataclass
class Chain:
    """The connections to the jump hosts on the way to one host, the nearest first; held until `let_go`."""

    held: list[_Jump] = field(default_factory=list)

    @property
    def end(self) -> asyncssh.SSHClientConnection | None:
        """The connection to go on from."""
        connection = self.held[-1].connection if self.held else None
        return connection.ssh if connection is not None else None

    async def let_go(self) -> None:
        """Hang up the connections that nobody needs any more, the farthest first."""
        while self.held:
            await _let_go(self.held.pop())


async def chain_to(way: Way, login: Login) -> Chain:
    """Connect to the jump hosts of a host, each of them once for all hosts behind it. Raises HostError."""
    jumps = _jumps.setdefault(asyncio.get_running_loop(), {})
    chain = Chain()
    try:
        for number, hop in enumerate(way.hops[:-1]):
            key = tuple(_identity(one) for one in way.hops[: number + 1])
            jump = jumps.setdefault(key, _Jump())
            jump.users += 1
            chain.held.append(jump)
            own = replace(login, settings=hop, key_file=None)
            await _connected(jump, own, chain.held[-2].connection if number else None, way.names[number])
    except BaseException:
        await asyncio.shield(asyncio.ensure_future(chain.let_go()))
        raise
    return chain


async def _connected(jump: _Jump, login: Login, before: Connection | None, name: str) -> None:
    """See that a jump host is connected to: one attempt for all who wait, and one answer to all."""
    if jump.connection is not None:
        if not jump.connection.ssh.is_closed():
            return
        _aside(jump)
    if jump.refused is not None and time.monotonic() - jump.refused[1] < REFUSED_FOR:
        raise jump.refused[0]
    if jump.making is None:
        tunnel = before.ssh if before is not None else None
        jump.making = asyncio.ensure_future(log_in(login, tunnel, f"jump host {name}"))
        jump.making.add_done_callback(lambda made: _take(jump, made))
    await asyncio.shield(jump.making)


def _take(jump: _Jump, made: asyncio.Task[Connection]) -> None:
    if jump.making is made:
        jump.making = None
    if made.cancelled():
        return
    error = made.exception()
    if error is None:
        jump.connection, jump.refused = made.result(), None
        if not jump.users:
            _aside(jump)  # it was made in the moment in which the last one went away
    elif isinstance(error, Unanswered) or (
        isinstance(error, HostError) and error.failure.kind in ("auth", "host_key")
    ):
        jump.refused = (error, time.monotonic())


async def _let_go(jump: _Jump) -> None:
    jump.users -= 1
    if jump.users:
        return
    if jump.making is not None:
        making, jump.making = jump.making, None
        making.cancel()
    if jump.connection is not None:
        connection, jump.connection = jump.connection, None
        await connection.hang_up()


_leaving: set[asyncio.Task[None]] = set()


def _aside(jump: _Jump) -> None:
    """Hang a connection up that is of no use any more, and wait for nothing."""
    assert jump.connection is not None
    task = asyncio.ensure_future(jump.connection.hang_up())
    jump.connection = None
    _leaving.add(task)
    task.add_done_callback(_leaving.discard)
