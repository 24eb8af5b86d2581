"""Run a program of this machine that tells of hosts: with a deadline, bounded output and no input."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from fleetfix.errors import InventoryError

DEADLINE = 120.0
"""Seconds; inventories of clouds take their time."""
MOST = 64 * 1024 * 1024
"""Bytes of an answer: some kilobytes for each of ten thousand hosts."""
_MOST_ERRORS = 64 * 1024
_READ = 65536
_ENDS_WITHIN = 5.0
"""Seconds after KILL that the end of a program is waited for."""


def found(name: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Where a program is on the PATH."""
    return shutil.which(name, path=env.get("PATH"))


def answer(
    argv: Sequence[str],
    *,
    shown: str = "",
    env: Mapping[str, str] | None = None,
    deadline: float = DEADLINE,
    most: int = MOST,
    given_up: Callable[[], bool] = lambda: False,
    telling: str = "error",
) -> tuple[str, str]:
    """What a program prints on stdout, and on stderr; InventoryError where it does not end well.

    It is ended with all that it started when the deadline (seconds) passes, when it prints more than
    `most` bytes, when fleetfix is interrupted, and when `given_up` says that nobody waits for it. Of its
    complaints the last line that has `telling` is told.
    """
    name = shown or " ".join(argv)
    environ = None if env is None else {**os.environ, **env}
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno or 0).lower() if isinstance(error, OSError) else str(error)
        hint = "does its first line name an interpreter, #!/usr/bin/env python3?" if _format(error) else ""
        raise InventoryError(f"{name} cannot be run: {reason}", hint=hint) from error
    try:
        output, errors = _read(process, name, deadline, most, given_up)
    except BaseException:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one that waits in the kernel ends only with that
            process.wait(_ENDS_WITHIN)
        raise
    finally:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    said = errors.decode(errors="replace")
    if process.returncode:
        raise InventoryError(f"{name} {_ending(process.returncode)}{_reason(said, telling)}")
    try:
        return output.decode("utf-8-sig"), said
    except UnicodeDecodeError:
        raise InventoryError(f"{name} printed what is not UTF-8 text") from None


def _read(
    process: subprocess.Popen[bytes], name: str, deadline: float, most: int, given_up: Callable[[], bool]
) -> tuple[bytearray, bytearray]:
    """Read both streams until the program ends; what it leaves behind may keep them open."""
    end = time.monotonic() + deadline
    output, errors = bytearray(), bytearray()
    assert process.stdout is not None
    assert process.stderr is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, output)
        selector.register(process.stderr, selectors.EVENT_READ, errors)
        while selector.get_map():
            left = end - time.monotonic()
            if given_up():
                raise InventoryError(f"{name} was ended: nobody waits for it any more")
            if left <= 0:
                raise InventoryError(f"{name} has not ended within {deadline:g} s", hint="it was ended")
            ready = selector.select(min(left, 0.05))
            for key, _ in ready:
                data = os.read(key.fd, _READ)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data)
            if len(output) > most:
                raise InventoryError(f"{name} printed more than {most // 1024**2} MiB")
            del errors[: max(len(errors) - _MOST_ERRORS, 0)]
            if not ready and process.poll() is not None:
                break
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0.1))
    if process.returncode is None:
        raise InventoryError(f"{name} has not ended within {deadline:g} s", hint="it was ended")
    return output, errors


def _format(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (8, 2)  # ENOEXEC, ENOENT


def _ending(code: int) -> str:
    return f"ended with exit {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


def _reason(said: str, telling: str) -> str:
    """The line of stderr that says most: one known to tell, or that names an error, or the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    known, errors = ([line for line in lines if word in line.lower()] for word in (telling, "error"))
    chosen = (known or errors or lines)[-1:]
    return f": {chosen[0][:300]}" if chosen else " and said nothing"
