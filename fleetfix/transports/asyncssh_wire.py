"""Hosts over SSH, by asyncssh: the user's own configuration, keys, agent and known hosts.

Every exception of asyncssh is mapped to a failure class here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import asyncssh

from fleetfix.conversation import Conversation, Receiver
from fleetfix.errors import Failure, FailureKind, HostError
from fleetfix.session import Opening, Purpose, Session
from fleetfix.transports.host_keys import HostKeys

if TYPE_CHECKING:
    from fleetfix.inventory import Host

ATTEMPTS = 5
"""How often a connection is tried that the server drops before or while it answers: MaxStartups and
MaxSessions do that to a crowd."""

LOOKUPS = 256
"""Names that are looked up at once. The event loop has a handful of threads by itself: a slow name server
would keep hosts whose turn it is, and the journal, waiting for the names of others."""

HANG_UP = 2.0
CLOSED = "the connection closed"
KEEPALIVE = 15
UNANSWERED = 3


async def open_session(host: Host, purpose: Purpose, opening: Opening) -> Session:
    """Open a session over SSH."""

    async def connect(command: str, receiver: Receiver) -> SshWire:
        return await _start(host, opening, command, receiver)

    return await Conversation.open(host, purpose, opening, connect)


class SshWire:
    """One process on an SSH connection of its own."""

    def __init__(
        self,
        connection: asyncssh.SSHClientConnection,
        channel: asyncssh.SSHClientChannel[bytes],
        chain: _Chain,
    ) -> None:
        self._connection = connection
        self._channel = channel
        self._chain = chain

    def send(self, data: bytes) -> None:
        """Queue bytes for the process's input."""
        # A channel that is closing tells by `connection_lost`; there is nothing to add here.
        with contextlib.suppress(OSError):
            self._channel.write(data)

    async def close(self) -> None:
        """Close the channel and the connection; a server that does not answer is not waited for."""
        self._channel.close()
        await _hang_up(self._connection)
        await self._chain.let_go()


class _Ear(asyncssh.SSHClientSession[bytes]):
    """Passes on what comes over the channel."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._end = CLOSED

    def data_received(self, data: bytes, datatype: asyncssh.DataType) -> None:
        if datatype == asyncssh.EXTENDED_DATA_STDERR:
            self._receiver.errors(data)
        else:
            self._receiver.data(data)

    def exit_status_received(self, status: int) -> None:
        self._end = f"exit {status}"

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self._end = f"signal {signal}"

    def connection_lost(self, exc: Exception | None) -> None:
        why = self._end if exc is None else failure_of(exc, "").message or type(exc).__name__
        self._receiver.ended(why, dropped=exc is not None or self._end == CLOSED)


async def _start(host: Host, opening: Opening, command: str, receiver: Receiver) -> SshWire:
    """Connect and start a command; dropped attempts are made again, at random moments."""
    for attempt in range(1, ATTEMPTS + 1):
        keys = HostKeys(opening.host_keys)
        try:
            return await _start_once(host, opening, keys, command, receiver)
        except (asyncssh.Error, OSError, ValueError) as error:
            if attempt == ATTEMPTS or not _worth_another(error):
                raise HostError(_failure(error, host, keys)) from error
        await asyncio.sleep(random.uniform(0.05, 0.3) * 2**attempt)
    raise AssertionError("unreachable")


def _worth_another(error: Exception) -> bool:
    dropped = asyncssh.ConnectionLost | asyncssh.ChannelOpenError | ConnectionResetError | BrokenPipeError
    return isinstance(error, dropped)


async def _start_once(
    host: Host, opening: Opening, keys: HostKeys, command: str, receiver: Receiver
) -> SshWire:
    chain = await _chain_to(host, opening)
    connection = None
    try:
        connection = await _connect(
            host.address, host.port, host.user, host.ssh_config, keys, chain.end, host.key_file
        )
        channel, _ = await connection.create_session(
            lambda: _Ear(receiver),
            command,
            encoding=None,
            request_pty=False,
            x11_forwarding=False,
            env=[],
            send_env=[],
        )
    except BaseException:
        if connection is not None:
            connection.abort()
        await chain.let_go()
        raise
    return SshWire(connection, channel, chain)


async def _connect(
    address: str,
    port: int | None,
    user: str | None,
    ssh_config: str | None,
    keys: HostKeys,
    tunnel: asyncssh.SSHClientConnection | None = None,
    key_file: str | None = None,
) -> asyncssh.SSHClientConnection:
    _look_up_side_by_side()
    more: dict[str, Any] = {}
    if port is not None:
        more["port"] = port
    if user is not None:
        more["username"] = user
    if tunnel is not None:
        more["tunnel"] = tunnel
    config = _configuration(ssh_config)
    keys.learn(config, address, port, user)
    own = keys.identities if key_file is None else [key_file]
    if own is not None:
        # One that has a passphrase is asked of the agent, as with `ssh -i`.
        more |= {"client_keys": own, "ignore_encrypted": True}
    return await asyncssh.connect(
        address,
        config=config,
        known_hosts=keys.match,
        client_factory=lambda: _Client(keys),
        agent_forwarding=False,
        keepalive_interval=KEEPALIVE,
        keepalive_count_max=UNANSWERED,
        **more,
    )


_wide: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def _look_up_side_by_side() -> None:
    """Give the event loop as many threads for names as hosts may be connected to; they start as needed."""
    loop = asyncio.get_running_loop()
    if loop not in _wide:
        _wide.add(loop)
        loop.set_default_executor(ThreadPoolExecutor(LOOKUPS, "fleetfix-lookup"))


class _Client(asyncssh.SSHClient):
    """Asks the host keys' policy about a key that no known_hosts file holds."""

    def __init__(self, keys: HostKeys) -> None:
        self._keys = keys

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        return self._keys.accept(host, port, key)


def _configuration(ssh_config: str | None) -> list[str]:
    """The ssh configuration files, the host's own first: ssh takes the first value it finds."""
    own = Path("~/.ssh/config").expanduser()
    return ([ssh_config] if ssh_config else []) + ([str(own)] if own.is_file() else [])


async def _hang_up(connection: asyncssh.SSHClientConnection) -> None:
    connection.close()
    try:
        async with asyncio.timeout(HANG_UP):
            await connection.wait_closed()
    except (TimeoutError, OSError, asyncssh.Error):
        connection.abort()


# -- jump hosts -----------------------------------------------------------------------------------------


@dataclass
class _Jump:
    """A connection to a jump host, which serves every host behind it while there is one."""

    lock: asyncio.Lock
    connection: asyncssh.SSHClientConnection | None = None
    users: int = 0


_Jumps = dict[tuple[str, str | None], _Jump]
_jumps: WeakKeyDictionary[asyncio.AbstractEventLoop, _Jumps] = WeakKeyDictionary()


@dataclass
class _Chain:
    """The jump hosts on the way to one host, the nearest first; held until `let_go`."""

    hops: list[_Jump]

    @property
    def end(self) -> asyncssh.SSHClientConnection | None:
        """The connection to go on from."""
        return self.hops[-1].connection if self.hops else None

    async def let_go(self) -> None:
        """Hang up the connections that nobody needs any more, the farthest first."""
        while self.hops:
            jump = self.hops.pop()
            async with jump.lock:
                jump.users -= 1
                if jump.users == 0 and jump.connection is not None:
                    connection, jump.connection = jump.connection, None
                    await _hang_up(connection)


async def _chain_to(host: Host, opening: Opening) -> _Chain:
    """Connect to the jump hosts of a host, each of them once for all hosts behind it."""
    jumps = _jumps.setdefault(asyncio.get_running_loop(), {})
    chain = _Chain([])
    names = host.via.split(",") if host.via else []
    try:
        for number, name in enumerate(names, start=1):
            key = (",".join(names[:number]), host.ssh_config)
            jump = jumps.setdefault(key, _Jump(asyncio.Lock()))
            async with jump.lock:
                if jump.connection is None or jump.connection.is_closed():
                    jump.connection = await _hop(name, host.ssh_config, opening, chain.end)
                jump.users += 1
            chain.hops.append(jump)
    except BaseException:
        await chain.let_go()
        raise
    return chain


async def _hop(
    hop: str, ssh_config: str | None, opening: Opening, tunnel: asyncssh.SSHClientConnection | None
) -> asyncssh.SSHClientConnection:
    user, _, place = hop.rpartition("@")
    address, _, port = place.partition(":") if place.count(":") == 1 else (place, "", "")
    keys = HostKeys(opening.host_keys)
    try:
        return await _connect(address, int(port) if port else None, user or None, ssh_config, keys, tunnel)
    except (asyncssh.Error, OSError, ValueError) as error:
        raise HostError(failure_of(error, f"jump host {hop}", keys)) from error


# -- failures -------------------------------------------------------------------------------------------

_KINDS: tuple[tuple[type[BaseException], FailureKind, str], ...] = (
    (asyncssh.HostKeyNotVerifiable, "host_key", "compare its key with what you know of it"),
    (asyncssh.PermissionDenied, "auth", "see which keys `ssh -v` offers there"),
    (asyncssh.IllegalUserName, "auth", "set `user:` in the inventory"),
    (asyncssh.PasswordChangeRequired, "auth", "change the password there by hand"),
    (asyncssh.KeyImportError, "auth", "look at the key files that your ssh configuration names"),
    (asyncssh.KeyEncryptionError, "auth", "add the key to your ssh agent"),
    (asyncssh.ConfigParseError, "unreachable", "mend your ssh configuration"),
)


def failure_of(error: BaseException, host: str, keys: HostKeys | None = None) -> Failure:
    """The failure class of what asyncssh, or the system below it, raised."""
    before = f"{host}: " if host else ""
    if isinstance(error, asyncssh.HostKeyNotVerifiable) and keys is not None and keys.complaint:
        return Failure(kind="host_key", message=before + keys.complaint, hint=keys.hint)
    for kind_of_error, kind, hint in _KINDS:
        if isinstance(error, kind_of_error):
            return Failure(kind=kind, message=before + _words(error), hint=hint)
    return Failure(kind="unreachable", message=before + _words(error))


def _failure(error: Exception, host: Host, keys: HostKeys) -> Failure:
    return error.failure if isinstance(error, HostError) else failure_of(error, host.name, keys)


_NUMBER = re.compile(r"\[Errno (\d+)\] Connect call failed")


def _words(error: BaseException) -> str:
    # asyncio names the address instead of the reason, which would make equal reasons differ.
    numbers = dict.fromkeys(_NUMBER.findall(str(error)))
    if numbers:
        return ", ".join(os.strerror(int(number)).lower() for number in numbers)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = getattr(error, "reason", "") or str(error) or type(error).__name__
    return " ".join(str(text).split())
