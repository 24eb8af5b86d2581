"""What lies between a controller and a host, and misbehaves when it is told to: a relay of connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass
class Relay:
    """Passes connections on to a port of this machine. Both directions pass until it is told otherwise."""

    target: int
    idle: float | None = None
    """Cuts a connection over which nothing has passed for so many seconds, as many a NAT does."""
    cut_after: list[int] = field(default_factory=list)
    """Cuts as many of the next connections, each once so many bytes have come from the host."""
    port: int = 0
    taken: int = 0
    """Connections that were made."""
    refused: int = 0
    """Connections that were turned away."""
    idled: int = 0
    """Connections that were cut because they were idle."""
    asked: int = 0
    """Pieces that came from the controller."""
    open: bool = True
    _ways: list[_Way] = field(default_factory=list)
    _up: asyncio.Event = field(default_factory=asyncio.Event)
    _down: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        """Take connections until the end of the block."""
        self._up.set()
        self._down.set()
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await asyncio.gather(*(way.task for way in self._ways), return_exceptions=True)

    def hold(self, *, up: bool = False, down: bool = False) -> None:
        """Let nothing more through in these directions: no word, no end."""
        for event, held in ((self._up, up), (self._down, down)):
            if held:
                event.clear()

    def let_go(self) -> None:
        """Let everything through again, what was held back first."""
        self._up.set()
        self._down.set()

    def cut(self) -> None:
        """End every connection at once. What is held back never arrives."""
        for way in self._ways:
            way.task.cancel()
        self.let_go()

    # -- connections ----------------------------------------------------------------------------------

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.open:
            self.refused += 1
            writer.transport.abort()
            return
        self.taken += 1
        most = self.cut_after.pop(0) if self.cut_after else None
        way = _Way(self, reader, writer, most)
        way.task = asyncio.ensure_future(way.run())
        self._ways.append(way)

    async def pass_up(self) -> None:
        await self._up.wait()

    async def pass_down(self) -> None:
        await self._down.wait()


@dataclass
class _Way:
    """One connection, with both its ends."""

    relay: Relay
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    most: int | None
    task: asyncio.Task[None] = field(init=False)
    _moved: float = 0.0

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.relay.target)
        self._moved = asyncio.get_running_loop().time()
        ways = [
            asyncio.ensure_future(self._up(writer)),
            asyncio.ensure_future(self._down(reader)),
            asyncio.ensure_future(self._watch()),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.transport.abort()
            self.writer.transport.abort()

    async def _up(self, to_host: asyncio.StreamWriter) -> None:
        while data := await self.reader.read(65536):
            self.relay.asked += 1
            await self.relay.pass_up()
            await self._write(to_host, data)

    async def _down(self, from_host: asyncio.StreamReader) -> None:
        passed = 0
        while data := await from_host.read(65536):
            await self.relay.pass_down()
            passed += len(data)
            if self.most is not None and passed > self.most:
                return
            await self._write(self.writer, data)

    async def _write(self, to: asyncio.StreamWriter, data: bytes) -> None:
        self._moved = asyncio.get_running_loop().time()
        to.write(data)
        await to.drain()

    async def _watch(self) -> None:
        now = asyncio.get_running_loop().time
        while self.relay.idle is None or now() - self._moved < self.relay.idle:
            await asyncio.sleep(0.02)
        self.relay.idled += 1
