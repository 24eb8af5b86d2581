"""The machine fleetfix runs on, as a host: the same start command, in a process of its own session."""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import TYPE_CHECKING

from fleetfix.conversation import Conversation, Receiver
from fleetfix.session import Opening, Purpose, Session

if TYPE_CHECKING:
    from fleetfix.inventory import Host

HANG_UP = 2.0
"""Seconds that a runner gets to end after hanging up; one with a change in hand is left to finish it."""

_left: set[subprocess.Popen[bytes]] = set()
"""Runners that were still finishing a change when they were left."""


async def open_session(host: Host, purpose: Purpose, opening: Opening) -> Session:
    """Open a session on this machine."""
    return await Conversation.open(host, purpose, opening, connect)


async def connect(command: str, receiver: Receiver) -> LocalWire:
    """Run the start command under sh, apart from this terminal's signals."""
    for process in list(_left):
        if process.poll() is not None:
            _left.discard(process)
    process = subprocess.Popen(  # noqa: ASYNC220 - asyncio's own would kill it when it is let go of
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
        env={"PATH": os.defpath, "LC_ALL": "C"},  # nothing of the operator's
    )
    wire = LocalWire(process, receiver)
    try:
        await wire.begin()
    except BaseException:
        await wire.close()
        raise
    return wire


class LocalWire:
    """One process on this machine."""

    def __init__(self, process: subprocess.Popen[bytes], receiver: Receiver) -> None:
        self._process = process
        self._receiver = receiver
        self._input: asyncio.WriteTransport | None = None
        self._outputs: list[asyncio.ReadTransport] = []

    async def begin(self) -> None:
        """Listen to the process."""
        loop = asyncio.get_running_loop()
        process, receiver = self._process, self._receiver
        assert process.stdin is not None
        self._input, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        for pipe, heard, over in (
            (process.stdout, receiver.data, self._over),
            (process.stderr, receiver.errors, lambda: None),
        ):
            assert pipe is not None
            output, _ = await loop.connect_read_pipe(lambda h=heard, o=over: _Ear(h, o), pipe)  # type: ignore[misc]
            self._outputs.append(output)

    def send(self, data: bytes) -> None:
        """Queue bytes for its input."""
        if self._input is not None and not self._input.is_closing():
            self._input.write(data)

    async def close(self) -> None:
        """Close its input and wait for it, but not long: a change in hand is finished without us."""
        if self._input is not None:
            self._input.close()
        for output in self._outputs:
            output.close()
        until = asyncio.get_running_loop().time() + HANG_UP
        pause = 0.002
        _left.add(self._process)
        while self._process.poll() is None and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.1)
        if self._process.returncode is not None:
            _left.discard(self._process)
        await asyncio.sleep(0)  # in which the transports close their pipes
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:  # one that nobody came to listen to, as `begin` was cut short
                pipe.close()

    def _over(self) -> None:
        code = self._process.poll()
        self._receiver.ended("it ended" if code is None else f"exit {code}")


class _Ear(asyncio.Protocol):
    """Passes on what comes from one pipe."""

    def __init__(self, heard, over) -> None:  # type: ignore[no-untyped-def]
        self._heard = heard
        self._over = over

    def data_received(self, data: bytes) -> None:
        self._heard(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._over()
