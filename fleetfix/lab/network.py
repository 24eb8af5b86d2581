"""The wire between clients and one lab host: it carries, delays, freezes, cuts, refuses, falls silent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Literal

Weather = Literal["ok", "vanish", "freeze", "refuse"]

Serve = Callable[[socket.socket], Awaitable[None]]
"""Takes the server's end of a new connection."""

BACKLOG = 512
HIGH_WATER = 256 * 1024


class Wire:
    """One host's address. All its connections pass through here, so that they can misbehave."""

    def __init__(self, address: str, port: int, serve: Serve) -> None:
        self.address = address
        self.port = port
        self.weather: Weather = "ok"
        self.delay = 0.0
        self._serve = serve
        self._links: set[_Link] = set()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._fillers: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Listen; an OSError where the address is taken."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.address, self.port))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._listener = listener

    def start(self) -> None:
        """Begin to take connections."""
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def change(self, weather: Weather, delay: float) -> None:
        """Turn the weather; `delay` is what each direction of the wire takes, in seconds."""
        self.delay = delay
        if weather == self.weather:
            return
        self.weather = weather
        self._stop_accepting()
        for socket_ in self._fillers:
            socket_.close()
        self._fillers.clear()
        if weather == "refuse":
            self._close_listener()
            return
        if self._listener is None:
            self.open()
        if weather == "vanish":
            self._fall_silent()
            self.drop()
            return
        assert self._listener is not None
        self._listener.listen(BACKLOG)
        for link in self._links:
            link.frozen(weather == "freeze")
        self.start()

    def drop(self) -> None:
        """Cut every connection there is."""
        for link in list(self._links):
            link.cut()

    def close(self) -> None:
        """Listen no more."""
        self._stop_accepting()
        self._close_listener()

    def _stop_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _fall_silent(self) -> None:
        """Fill the queue of connections that wait: the kernel then answers no further SYN, and a
        client sees what it sees of a dead host."""
        assert self._listener is not None
        self._listener.listen(0)
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect((self.address, self.port))
            self._fillers.append(filler)

    async def _accept(self) -> None:
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        while True:
            outside, _ = await loop.sock_accept(self._listener)
            task = loop.create_task(self._connect(outside))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, outside: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        outside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        inside, server = socket.socketpair()
        link = _Link(self)
        self._links.add(link)
        await loop.create_connection(lambda: link.inner, sock=inside)
        await loop.create_connection(lambda: link.outer, sock=outside)
        if self.weather == "freeze":
            link.frozen(True)
        await self._serve(server)

    def forget(self, link: _Link) -> None:
        """A connection has ended at both sides."""
        self._links.discard(link)


class _Link:
    """One connection: what comes in at one end goes out at the other, in order."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.outer = _End(self)
        self.inner = _End(self)
        self.outer.peer, self.inner.peer = self.inner, self.outer

    def frozen(self, yes: bool) -> None:
        for end in (self.outer, self.inner):
            end.freeze(yes)

    def cut(self) -> None:
        """End both sides at once; the client sees a reset."""
        if self.outer.transport is not None:
            raw = self.outer.transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for end in (self.outer, self.inner):
            if end.transport is not None:
                end.transport.abort()

    def ended(self) -> None:
        if self.outer.lost and self.inner.lost:
            self.wire.forget(self)


class _End(asyncio.Protocol):
    """One end of a link: reads here, and writes what its peer has read."""

    peer: _End

    def __init__(self, link: _Link) -> None:
        self.link = link
        self.transport: asyncio.Transport | None = None
        self.lost = False
        self._frozen = False
        self._held = False
        self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(HIGH_WATER)
        self._settle()

    def freeze(self, yes: bool) -> None:
        self._frozen = yes
        self._settle()

    def _settle(self) -> None:
        """Read only when neither frozen nor ahead of the other end."""
        if self.transport is None or self.transport.is_closing():
            return
        if self._frozen or self._held:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._later(lambda: self.peer.write(data))

    def eof_received(self) -> bool:
        self._later(self.peer.end)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._later(self.peer.close)
        self.link.ended()

    def pause_writing(self) -> None:
        self.peer._held = True
        self.peer._settle()

    def resume_writing(self) -> None:
        self.peer._held = False
        self.peer._settle()

    def write(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def end(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            with contextlib.suppress(OSError):
                self.transport.write_eof()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def _later(self, act: Callable[[], None]) -> None:
        """Do it now, or when the wire's delay has passed; never before what came earlier."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._due = max(self._due, now + self.link.wire.delay)
        if self._due <= now:
            act()
        else:
            loop.call_at(self._due, act)
