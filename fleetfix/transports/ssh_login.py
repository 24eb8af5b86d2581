"""One SSH connection: dialled, its key believed, logged in; retried where the server drops a crowd."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import asyncssh

from fleetfix.errors import Failure, HostError
from fleetfix.transports.host_keys import HostKeys, Policy
from fleetfix.transports.name_lookup import dial, look_up
from fleetfix.transports.pace import Pace
from fleetfix.transports.proxy_command import Proxy
from fleetfix.transports.ssh_config import Settings
from fleetfix.transports.ssh_failures import failure_of, words_of
from fleetfix.transports.ssh_keys import Identities

KEEPALIVE = 15
UNANSWERED = 3
HANG_UP = 2.0
LONGEST_PAUSE = 2.0

TROUBLE = (asyncssh.Error, OSError, ValueError, EOFError)
"""What asyncssh raises where a connection cannot be made."""


@dataclass(frozen=True)
class Login:
    """How one destination is logged in to."""

    settings: Settings
    policy: Policy | None
    key_file: str | None = None
    within: float = 15.0
    """Seconds, for all of it."""
    tell: Callable[[str], None] | None = None
    """Hears what is worth to be known and no failure."""
    until: float | None = None
    """When its time is over, by the event loop's clock, where that has begun before."""


@dataclass
class Connection:
    """A connection that is logged in, and the command that it may run through."""

    ssh: asyncssh.SSHClientConnection
    proxy: Proxy | None = None

    async def hang_up(self) -> None:
        """Close it; a server that does not answer is not waited for."""
        self.ssh.close()
        try:
            async with asyncio.timeout(HANG_UP):
                await self.ssh.wait_closed()
        except (TimeoutError, OSError, asyncssh.Error):
            self.ssh.abort()
        if self.proxy is not None:
            await self.proxy.end()


class Unanswered(HostError):
    """The time to connect was over before there was an answer."""


@dataclass
class Attempt:
    """How far one attempt to log in has come; it tells what is waited for in vain."""

    name: str
    keys: HostKeys
    identities: Identities
    waits_for: str = ""
    proxy: Proxy | None = None
    ssh: asyncssh.SSHClientConnection | None = None
    asks_for_keys: bool = False

    @property
    def stage(self) -> str:
        """What is waited for now, in words."""
        if self.ssh is None:
            return self.waits_for
        if not self.ssh.get_extra_info("server_version"):
            return (
                self.waits_for
                if self.proxy is not None
                else "it takes the connection and gives no SSH greeting"
            )
        return "the login has no end" if self.asks_for_keys else "the key exchange has no end"


async def log_in(
    login: Login, tunnel: asyncssh.SSHClientConnection | None, name: str, pace: Pace | None = None
) -> Connection:
    """Connect and log in, over a tunnel where there is one. Raises HostError, which names it as `name`.

    Where the server drops the connection before anybody is logged in, it is tried again at random moments.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + login.within if login.until is None else login.until
    pause = 0.1
    while True:
        keys = HostKeys(login.policy, login.tell)
        keys.learn(login.settings)
        attempt = Attempt(name, keys, Identities(login.settings, login.key_file))
        try:
            async with asyncio.timeout_at(until):
                made = await _once(login, attempt, tunnel)
        except TimeoutError:
            raise Unanswered(_timed_out(attempt, login.within)) from None
        except TROUBLE as error:
            over = loop.time() + pause >= until or (tunnel is not None and tunnel.is_closed())
            if not _dropped(error) or over or (attempt.proxy is not None and pause > 0.2):
                raise HostError(_failure(error, attempt)) from error
            if pace is not None:
                pace.dropped()
        else:
            if pace is not None:
                pace.welcomed()
            return made
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(pause * 2, LONGEST_PAUSE)


def _dropped(error: BaseException) -> bool:
    """Whether the server let us go before it said anything for or against us."""
    return isinstance(error, asyncssh.ConnectionLost | ConnectionResetError | BrokenPipeError)


async def _once(login: Login, attempt: Attempt, tunnel: asyncssh.SSHClientConnection | None) -> Connection:
    settings = login.settings
    sock: socket.socket | None = None
    try:
        if tunnel is None and settings.proxy_command:
            attempt.waits_for = "its ProxyCommand does not connect"
            attempt.proxy = Proxy(settings.proxy_command)
            sock = attempt.proxy.socket
        elif tunnel is None:
            attempt.waits_for = f"the name {settings.host} is not resolved"
            family = settings.number("AddressFamily")
            found = await look_up(settings.host, settings.port, family or socket.AF_UNSPEC)
            attempt.waits_for = "the connection is not answered"
            sock = await dial(found, settings.text("BindAddress") or None, login.within)
        else:
            attempt.waits_for = "its jump host does not get there"
        ssh = await _greeted(settings, attempt, tunnel, sock)
    except BaseException:
        if sock is not None:
            sock.close()
        if attempt.proxy is not None:
            await asyncio.shield(asyncio.ensure_future(attempt.proxy.end()))
        raise
    return Connection(ssh, attempt.proxy)


async def _greeted(
    settings: Settings,
    attempt: Attempt,
    tunnel: asyncssh.SSHClientConnection | None,
    sock: socket.socket | None,
) -> asyncssh.SSHClientConnection:
    options = copy.copy(_plain_options())
    options.config = settings.config  # type: ignore[assignment]
    interval = min(settings.number("ServerAliveInterval") or KEEPALIVE, KEEPALIVE)
    # However patient the configuration is, a silent cut is noticed within the time that all is built on.
    unanswered = min(
        settings.number("ServerAliveCountMax") or UNANSWERED, KEEPALIVE * UNANSWERED // interval
    )
    how: dict[str, Any] = {"sock": sock} if sock is not None else {"tunnel": tunnel}
    if not settings.text("HostKeyAlgorithms"):
        how["server_host_key_algs"] = attempt.keys.algorithms(settings.host, settings.port)
    return await asyncssh.connect(
        settings.name,
        options=options,
        config=None,
        canonicalize_hostname=False,
        proxy_command=None,
        connect_timeout=None,
        known_hosts=attempt.keys.match,
        client_factory=lambda: _Client(attempt),
        # The keys are asked for when it is time: see _Client.
        client_keys=None,
        agent_forwarding=False,
        keepalive_interval=interval,
        keepalive_count_max=max(unanswered, 1),
        **{"tunnel": None, **how},
    )


@functools.cache
def _plain_options() -> asyncssh.SSHClientConnectionOptions:
    return asyncssh.SSHClientConnectionOptions(config=None, client_keys=None, known_hosts=None)


class _Client(asyncssh.SSHClient):
    """Asks the host keys' policy about a key that no known_hosts file holds, and offers keys once."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self._attempt.ssh = conn

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        return self._attempt.keys.accept(host, port, key)

    async def public_key_auth_requested(self) -> Any:
        if self._attempt.asks_for_keys:
            return None
        self._attempt.asks_for_keys = True
        return await self._attempt.identities.offered() or None


# -- failures -----------------------------------------------------------------------------------------


def _failure(error: BaseException, attempt: Attempt) -> Failure:
    if isinstance(error, asyncssh.ChannelOpenError):
        forbidden = error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED
        hint = "AllowTcpForwarding or PermitOpen of its sshd forbids it" if forbidden else ""
        message = f"{attempt.name}: its jump host does not get there: {words_of(error).lower()}"
        return Failure(kind="unreachable", message=message, hint=hint)
    failure = failure_of(error, attempt.name, attempt.keys, attempt.identities.troubles)
    if attempt.proxy is not None and failure.kind == "unreachable":
        with contextlib.suppress(OSError):
            if words := attempt.proxy.last_words:
                message = f"{attempt.name}: its ProxyCommand says: {words}"
                return failure.model_copy(update={"message": message})
    return failure


def _timed_out(attempt: Attempt, within: float) -> Failure:
    trouble = next((one for one in attempt.identities.troubles if "agent" in one), "")
    why = f"{attempt.stage}{': ' + trouble if trouble else ''}"
    return Failure(kind="unreachable", message=f"{attempt.name}: {why} within {within:g} s")


def session_failure(error: BaseException, name: str) -> Failure:
    """Why a connection that is logged in runs no command."""
    hint = ""
    if isinstance(error, asyncssh.ChannelOpenError):
        hint = "MaxSessions of its sshd is 0, or it lets this user run no command"
    return Failure(kind="unreachable", message=f"{name}: it opens no session: {words_of(error)}", hint=hint)
