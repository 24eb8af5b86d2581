"""Hosts over SSH, by asyncssh: the user's own configuration, keys, agent and known hosts.

Every exception of asyncssh is mapped to a failure class in `ssh_failures`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import asyncssh

from fleetfix.conversation import Conversation, Receiver
from fleetfix.errors import HostError
from fleetfix.session import Opening, Purpose, Session
from fleetfix.transports.jump_hosts import Chain, Way, chain_to, way_to
from fleetfix.transports.pace import Pace, pace_of
from fleetfix.transports.ssh_failures import failure_of
from fleetfix.transports.ssh_login import TROUBLE, Connection, Login, log_in, session_failure

if TYPE_CHECKING:
    from fleetfix.inventory import Host

AGAIN_AFTER = 0.3
CLOSED = "the connection closed"


async def open_session(host: Host, purpose: Purpose, opening: Opening) -> Session:
    """Open a session over SSH."""
    way = await _way_to(host)
    timeout = way.host.number("ConnectTimeout")
    if opening.usual_timeout and timeout:
        opening = replace(opening, connect_timeout=float(timeout))
    pace = pace_of(way.server)
    # To wait for one's turn costs none of the time that a host has to answer.
    place = await pace.enter()
    ways = [way]

    async def connect(command: str, receiver: Receiver) -> SshWire:
        nonlocal place
        if not ways:  # it is connected to once more, and the configuration may be another by now
            ways.append(await _way_to(host))
            place = await pace.enter()
        try:
            return await _start(host, ways.pop(), opening, pace, command, receiver)
        finally:
            place.leave()

    try:
        return await Conversation.open(host, purpose, opening, connect)
    finally:
        place.leave()


async def _way_to(host: Host) -> Way:
    try:
        return await way_to(host)
    except TROUBLE as error:
        raise HostError(failure_of(error, host.name)) from error


class SshWire:
    """One process on an SSH connection of its own."""

    def __init__(
        self,
        connection: Connection,
        channel: asyncssh.SSHClientChannel[bytes],
        chain: Chain,
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
        await self._connection.hang_up()
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


async def _start(
    host: Host, way: Way, opening: Opening, pace: Pace, command: str, receiver: Receiver
) -> SshWire:
    """Connect, over jump hosts where there are some, and start a command. Raises HostError."""

    def tell(text: str) -> None:
        if opening.progress is not None:
            opening.progress("", text)

    loop = asyncio.get_running_loop()
    until = loop.time() + opening.time_to_connect
    login = Login(way.host, opening.host_keys, host.key_file, opening.connect_timeout, tell, until)
    while True:
        chain = await chain_to(way, login)
        connection = None
        try:
            connection = await log_in(login, chain.end, host.name, pace)
            return await _run(connection, chain, command, receiver)
        except BaseException as error:
            cut = chain.end is not None and chain.end.is_closed()
            if connection is not None:
                connection.ssh.abort()
                await asyncio.shield(asyncio.ensure_future(connection.hang_up()))
            await asyncio.shield(asyncio.ensure_future(chain.let_go()))
            if not isinstance(error, (HostError, *TROUBLE)):
                raise
            # A jump host that was cut off takes all behind it along: it is gone to once more.
            if not cut or loop.time() + AGAIN_AFTER > until:
                failure = session_failure(error, host.name)
                raise error if isinstance(error, HostError) else HostError(failure) from error
        await asyncio.sleep(AGAIN_AFTER)


async def _run(connection: Connection, chain: Chain, command: str, receiver: Receiver) -> SshWire:
    channel, _ = await connection.ssh.create_session(
        lambda: _Ear(receiver),
        command,
        encoding=None,
        request_pty=False,
        x11_forwarding=False,
        env=[],
        send_env=[],
    )
    return SshWire(connection, channel, chain)
