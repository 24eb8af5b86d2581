"""Functions of the author's fabfiles, each called in a process of its own beside this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Protocol

from fleetfix.commands import Completed, Json
from fleetfix.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetfix.inventory import Host

AT_ONCE = 16
"""Functions that run at the same time: each is a Python of its own, of some 50 MB."""
KEPT = 24 * 1024
"""Bytes of each stream that are kept: half at the head, half at the tail."""
REPORT = 64 * 1024
GRACE = 3.0
"""Seconds between being asked to end and being ended."""
LEFT_OPEN = 1.0
"""Seconds that output is waited for once the process is gone; a child of it may hold the pipes open."""
PASSWORD = "FLEETFIX_BECOME_PASSWORD"


class Wanted(Protocol):
    """A function to call."""

    @property
    def file(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def function(self) -> str: ...
    @property
    def args(self) -> Mapping[str, Json]: ...
    @property
    def seconds(self) -> float: ...


class Fabfiles:
    """Calls functions, a few at a time."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(AT_ONCE)

    async def call(self, host: Host, asked: Wanted) -> Completed:
        """Call a function with a connection to a host; its whole process ends with this call."""
        if host.transport not in ("asyncssh", "fabric"):
            message = f"{host.name} is not reached by ssh, and a function of a fabfile needs a connection"
            return Completed(exit=None, failure=Failure(kind="blocked", message=message))
        async with self._room:
            try:
                async with asyncio.timeout(asked.seconds):
                    return await _called(host, asked)
            except TimeoutError:
                what = f"{asked.function} ran past its {asked.seconds:.0f} s and was ended"
                return Completed(exit=None, failure=Failure(kind="timed_out", message=what))


async def _called(host: Host, asked: Wanted) -> Completed:
    ours, theirs = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            # -P: nothing is imported from the folder that this was started in.
            *(sys.executable, "-P", "-m", "fleetfix.transports.fabfile_call", str(theirs)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(theirs,),
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != PASSWORD},
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    out, err, report = _Kept(KEPT), _Kept(KEPT), _Kept(REPORT)
    reading: list[asyncio.Future[Any]] = []
    pipe = asyncio.StreamReader()
    ear, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(pipe), os.fdopen(ours, "rb", buffering=0)
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        reading = [
            asyncio.ensure_future(kept.all_of(stream))
            for kept, stream in ((out, process.stdout), (err, process.stderr), (report, pipe))
        ]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # It stays open: its end is the end of this process.
            process.stdin.write(_request(host, asked))
            await process.stdin.drain()
        # Its end is the end of what it reports: what it has started has that descriptor not.
        await reading[-1]
        await asyncio.wait(reading, timeout=LEFT_OPEN)
    finally:
        for one in reading:
            one.cancel()
        ear.close()
        code = await _gone(process)
    return _answer(asked, code, out, err, report)


def _request(host: Host, asked: Wanted) -> bytes:
    said = {
        "host": host.model_dump(mode="json", exclude={"vars"}),
        "file": asked.file,
        "sha256": asked.sha256,
        "function": asked.function,
        "args": dict(asked.args),
        "password": os.environ.get(PASSWORD),
    }
    return json.dumps(said).encode() + b"\n"


def _answer(asked: Wanted, code: int, out: _Kept, err: _Kept, report: _Kept) -> Completed:
    try:
        said = json.loads(report.text)
    except ValueError:
        said = {}
    if "failure" in said:
        return Completed(exit=None, failure=Failure.model_validate(said["failure"]))
    if "value" not in said:
        how = said.get("error") or f"{asked.function} ended its process itself, with {_said_of(code)}"
        return Completed(
            exit=1, stdout=out.text, stderr=f"{err.text}{_break(err)}{how}\n", cut=out.cut or err.cut
        )
    return Completed(exit=0, value=said["value"], stdout=out.text, stderr=err.text, cut=out.cut or err.cut)


def _said_of(code: int) -> str:
    return f"exit {code}" if code >= 0 else f"signal {-code}"


def _break(kept: _Kept) -> str:
    return "" if not kept.text or kept.text.endswith("\n") else "\n"


class _Kept:
    """The head and the tail of a stream, in memory that does not grow."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    async def all_of(self, stream: asyncio.StreamReader) -> None:
        """Take a stream to its end."""
        while data := await stream.read(65536):
            room = self._half - len(self._head)
            self._head += data[:room]
            self._tail += data[room:]
            over = len(self._tail) - self._half
            if over > 0:
                self._dropped += over
                del self._tail[:over]

    @property
    def cut(self) -> bool:
        return self._dropped > 0

    @property
    def text(self) -> str:
        note = f"\n[... {self._dropped} bytes cut ...]\n".encode() if self._dropped else b""
        return bytes(self._head + note + self._tail).decode("utf-8", "backslashreplace")


async def _gone(process: asyncio.subprocess.Process) -> int:
    """End a process and what it started in its group, and see it gone; how it ended."""
    if process.returncode is None:
        await _ended(process, LEFT_OPEN)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        await _ended(process, GRACE)
    # One that has left its group may hold the pipes open for ever; nobody listens any more.
    process._transport.close()  # type: ignore[attr-defined]
    return -signal.SIGKILL if process.returncode is None else process.returncode


async def _ended(process: asyncio.subprocess.Process, within: float) -> None:
    # `wait` would also wait for whoever holds the pipes.
    until = asyncio.get_running_loop().time() + within
    while process.returncode is None:
        if asyncio.get_running_loop().time() > until:
            return
        await asyncio.sleep(0.01)
