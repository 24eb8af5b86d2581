"""One SSH session on a lab host: runs the user's shell in its namespaces, as sshd would."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh

from fleetfix.lab import namespaces, stock

CHUNK = 65536
# setsid: the user's shell leads a session of its own, as under sshd. `cd` here and not by nsenter,
# whose --wdns is younger than the systems we run on.
SHELL = 'cd "$HOME" 2>/dev/null || cd /; exec "$SHELL" "$@"'
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Process = asyncssh.SSHServerProcess[bytes]


@dataclass(frozen=True)
class Account:
    """A line of the host's own passwd."""

    name: str
    uid: int
    home: str
    shell: str


def account(passwd: Path, name: str) -> Account | None:
    """Find a user in a host's passwd."""
    for line in passwd.read_text().splitlines():
        fields = line.split(":")
        if len(fields) == 7 and fields[0] == name:
            return Account(name, int(fields[2]), fields[5], fields[6])
    return None


class Session:
    """The process of one channel, from its start until its pipes are closed, in sshd's manner:
    the session lasts until the command has ended and nobody holds its output any more."""

    def __init__(self, channel: Process, init: int, who: Account, python: str) -> None:
        self.channel = channel
        self.init = init
        self.who = who
        self.python = python

    async def run(self) -> None:
        """Run it, and tell the client how it ended."""
        child = self._spawn()
        closed = asyncio.ensure_future(self.channel.channel.wait_closed())
        pumps = asyncio.ensure_future(self._pump(child))
        ended = asyncio.ensure_future(_wait(child.pid))
        await asyncio.wait({closed, pumps}, return_when=asyncio.FIRST_COMPLETED)
        pumps.cancel()
        await asyncio.gather(pumps, return_exceptions=True)
        # A client that is gone ends nothing: the command finds its pipes closed, and goes on.
        await ended
        self._say_end(child.wait())
        closed.cancel()

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = {
            "HOME": self.who.home,
            "USER": self.who.name,
            "LOGNAME": self.who.name,
            "SHELL": self.who.shell,
            "PATH": PATH,
            "SSH_CONNECTION": "127.0.0.1 0 127.0.0.1 22",
            "SSH_CLIENT": "127.0.0.1 0 22",
        }
        if self.channel.term_type is not None:
            environment["TERM"] = self.channel.term_type
        return subprocess.Popen(
            namespaces.enter(self.init, self._inner(), uid=self.who.uid),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )

    def _words(self) -> list[str]:
        """The arguments of `sh -c`: a name for itself, then those of the user's shell."""
        shell = os.path.basename(self.who.shell)
        command = self.channel.command
        words = [] if command is None else ["-c", command]
        return [shell, *words]

    def _inner(self) -> list[str]:
        """The command in the host: the shell alone, or the shell on a terminal of the host."""
        if self.channel.term_type is None:
            return ["setsid", "/bin/sh", "-c", SHELL, *self._words()]
        columns, rows = self.channel.term_size[:2]
        terminal = [
            self.python,
            "-ISB",
            "-c",
            stock.stand_in("terminal.py").decode(),
            str(rows),
            str(columns),
        ]
        return [*terminal, "/bin/sh", "-c", SHELL, *self._words()]

    async def _pump(self, child: subprocess.Popen[bytes]) -> None:
        """Carry all three streams; done when both outputs are at their end."""
        feeding = asyncio.ensure_future(self._feed(child))
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_carry(child.stdout, self.channel.stdout))
                both.create_task(_carry(child.stderr, self.channel.stderr))
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _feed(self, child: subprocess.Popen[bytes]) -> None:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, child.stdin)
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        try:
            while True:
                try:
                    data = await self.channel.stdin.read(CHUNK)
                except asyncssh.SignalReceived as got:
                    _signal(child.pid, got.signal)
                    continue
                except (asyncssh.BreakReceived, asyncssh.TerminalSizeChanged):
                    continue
                if not data:
                    return
                if not transport.is_closing():
                    writer.write(data)
                    await writer.drain()
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            transport.close()

    def _say_end(self, code: int) -> None:
        if code < 0:
            self.channel.exit_with_signal(signal.Signals(-code).name[3:])
        else:
            self.channel.exit(code)


async def _carry(source: Any, target: Any) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=4 * CHUNK)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    try:
        while data := await reader.read(CHUNK):
            target.write(data)
            await target.drain()
    except (BrokenPipeError, ConnectionError, asyncssh.Error):
        return
    finally:
        transport.close()


async def _wait(pid: int) -> None:
    """Wait until a child has ended; whoever asks for its status reaps it."""
    loop = asyncio.get_running_loop()
    fd = os.pidfd_open(pid)
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _signal(entered: int, name: str) -> None:
    """Signal the process group that the client's command leads; it is the child of `nsenter`."""
    number = getattr(signal, f"SIG{name}", None)
    children = Path(f"/proc/{entered}/task/{entered}/children")
    if number is None:
        return
    try:
        for pid in children.read_text().split():
            os.killpg(int(pid), number)
    except (FileNotFoundError, ProcessLookupError):
        return
