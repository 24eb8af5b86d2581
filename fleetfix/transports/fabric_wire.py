"""Hosts over SSH, by Fabric and paramiko: blocking, so that each host has threads of its own.

A thread connects; then one listens and one speaks. What they hear is told in the event loop, a few
pieces at a time: a host cannot fill this machine's memory, and one that hangs hangs its own threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import select
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fleetfix.conversation import Conversation, Receiver
from fleetfix.errors import HostError
from fleetfix.session import Opening, Purpose, Session
from fleetfix.transports.fabric_connection import Line
from fleetfix.transports.fabric_failures import failure_of
from fleetfix.transports.ssh_configuration import said_to_take

if TYPE_CHECKING:
    import paramiko

    from fleetfix.inventory import Host

HANG_UP = 2.0
PIECE = 64 * 1024
AHEAD = 4
"""Pieces of output that may wait for the event loop."""

T = TypeVar("T")


async def open_session(host: Host, purpose: Purpose, opening: Opening) -> Session:
    """Open a session over SSH, by Fabric."""

    if opening.usual_timeout:
        opening = await in_thread(lambda: _as_configured(host, opening), f"{host.name}: read")

    async def connect(command: str, receiver: Receiver) -> FabricWire:
        line = Line(host, opening.host_keys, opening.time_to_connect)
        try:
            channel = await in_thread(lambda: line.start(command), f"{host.name}: connect")
        except BaseException:
            _let_go(line)
            raise
        return FabricWire(line, channel, receiver, host.name)

    return await Conversation.open(host, purpose, opening, connect)


def _as_configured(host: Host, opening: Opening) -> Opening:
    try:
        seconds = said_to_take(host)
    except (ValueError, OSError) as error:
        raise HostError(failure_of(error, host.name)) from error
    return replace(opening, connect_timeout=seconds) if seconds else opening


class FabricWire:
    """One process on a connection of its own."""

    def __init__(self, line: Line, channel: paramiko.Channel, receiver: Receiver, host: str) -> None:
        self._line = line
        self._channel = channel
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(AHEAD)
        self._closed = threading.Event()
        self._speaker = _thread(self._speak, f"{host}: speak")
        self._listener = _thread(self._listen, f"{host}: listen")

    def send(self, data: bytes) -> None:
        """Queue bytes for the process's input."""
        self._out.put(data)

    async def close(self) -> None:
        """Send what is queued and hang up; a server that does not answer is not waited for."""
        self._out.put(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * HANG_UP):
                await in_thread(self._hang_up, "hang up")

    def _hang_up(self) -> None:
        self._speaker.join(HANG_UP)
        self._closed.set()
        self._line.close()
        self._listener.join(HANG_UP)

    # -- the threads --------------------------------------------------------------------------------

    def _speak(self) -> None:
        with contextlib.suppress(Exception):  # the listener tells how the channel ended
            while (data := self._out.get()) is not None:
                self._channel.sendall(data)

    def _listen(self) -> None:
        try:
            self._hear()
            code = self._channel.recv_exit_status()
            dropped = code < 0
            end = "the connection closed" if dropped else f"exit {code}"
        except Exception as error:  # noqa: BLE001 - whatever it is, the channel has ended by it
            end, dropped = failure_of(error, "").message, True
        finally:
            # By whoever listens: its descriptor must not be another's while it is waited for.
            with contextlib.suppress(Exception):
                self._channel.close()
        self._tell(partial(self._receiver.ended, dropped=dropped), end)
        self._out.put(None)

    def _hear(self) -> None:
        channel = self._channel
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        while not self._closed.is_set():
            poll.poll()
            # Asked before it is read: what comes between is read by the next turn.
            over = channel.eof_received or channel.closed
            if channel.recv_ready():
                self._pass_on(self._receiver.data, channel.recv(PIECE))
            elif channel.recv_stderr_ready():
                self._pass_on(self._receiver.errors, channel.recv_stderr(PIECE))
            elif over:
                return

    def _pass_on(self, take: Callable[[bytes], None], data: bytes) -> None:
        while not self._room.acquire(timeout=HANG_UP):
            if self._closed.is_set() or self._loop.is_closed():
                return

        def taken() -> None:
            self._room.release()
            take(data)

        self._tell(taken)

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is gone, and whoever listened with it
            self._loop.call_soon_threadsafe(call, *args)


async def in_thread(work: Callable[[], T], name: str) -> T:
    """Wait for what blocks, in a thread that nobody else waits for: not even the end of the program."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 - it is raised where it is waited for
            error = raised
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    _thread(run, name)
    return await future


def _let_go(line: Line) -> None:
    """Give up a line without waiting for it."""
    _thread(line.close, "give up")


def _thread(work: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=work, name=f"fleetfix {name}", daemon=True)
    thread.start()
    return thread
