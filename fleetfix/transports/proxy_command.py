"""A command that connects to a host, as ssh's ProxyCommand: its input and output are the connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess

LAST_WORDS = 2000
"""Characters of its stderr that are kept, to tell why it ended."""
ENDS_WITHIN = 1.0

_FLAGS = frozenset("qxaAnNTCkv")
_FORWARDS = ("%h:%p", "[%h]:%p")


def begun(command: str, stderr: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a command apart from the terminal; the connection that it makes, and its process.

    `stderr` is subprocess.PIPE or DEVNULL. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    try:
        # By the shell, as with ssh: quotes, pipes and redirections mean what they mean there.
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=stderr,
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, process


class Proxy:
    """One running command. `socket` is the connection that it made."""

    def __init__(self, command: str) -> None:
        self._said = bytearray()
        self.socket, self._process = begun(command, subprocess.PIPE)
        assert self._process.stderr is not None
        self._errors = self._process.stderr
        os.set_blocking(self._errors.fileno(), False)
        asyncio.get_running_loop().add_reader(self._errors.fileno(), self._hear)

    @property
    def last_words(self) -> str:
        """What it said last on its stderr."""
        self._hear()
        lines = self._said.decode("utf-8", "replace").split("\n")
        return next((" ".join(line.split()) for line in reversed(lines) if line.strip()), "")

    def _hear(self) -> None:
        if self._errors.closed:
            return
        try:
            data = self._errors.read(65536)
        except OSError:
            data = b""
        if data:
            self._said += data
            del self._said[:-LAST_WORDS]
        elif data is not None:
            self._stop_hearing()

    def _stop_hearing(self) -> None:
        if not self._errors.closed:
            asyncio.get_running_loop().remove_reader(self._errors.fileno())
            self._errors.close()

    async def end(self) -> None:
        """End it and all that it started."""
        self._stop_hearing()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            if await self._has_ended():
                return

    async def _has_ended(self) -> bool:
        pause = 0.002
        while self._process.poll() is None and pause < ENDS_WITHIN:
            await asyncio.sleep(pause)
            pause *= 2
        return self._process.poll() is not None


def as_jump(command: str, host: str, port: int) -> str | None:
    """The jump host of `ssh -W %h:%p HOST`, as ProxyJump names one; None for any other command.

    So all hosts behind it share one connection to it, as they do with ProxyJump. The tokens are in.
    """
    try:
        words = shlex.split(command.removeprefix("exec "))
    except ValueError:
        return None
    if not words or os.path.basename(words[0]) != "ssh":
        return None
    target, user, to, forward = "", "", "", False
    rest = iter(words[1:])
    for word in rest:
        if word in ("-W", "-l", "-p"):
            value = next(rest, "")
            if word == "-W":
                forward = value in tuple(
                    form.replace("%h", host).replace("%p", str(port)) for form in _FORWARDS
                )
            elif word == "-l":
                user = value
            else:
                to = value
        elif word.startswith("-") and set(word[1:]) <= _FLAGS:
            continue
        elif not word.startswith("-") and not target:
            target = word
        else:
            return None
    if not forward or not target:
        return None
    own, _, place = target.rpartition("@")
    user = user or own
    return f"{user + '@' if user else ''}{place}{':' + to if to else ''}"
