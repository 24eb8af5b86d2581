"""Files that a command makes: written whole or not at all, and never over something of another kind."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from fleetfix.errors import UsageError

HEAD = 4096
"""Bytes of a file by which it is known whose it is."""

LARGEST = 256 * 1024 * 1024
"""Bytes of a file that is read: no file of ours is as large."""


def require_place(path: Path, what: str, ours: Callable[[str], bool]) -> None:
    """Raise UsageError where the file could not be written: said before any work is done for it.

    `ours` knows by the beginning of a file whether it is of the same kind, and may be replaced.
    """
    if not path.name:  # an empty shell variable must not pass for no wish at all
        raise UsageError(f"no file is named for the {what}", hint="give the file's name")
    if path.name == "-":
        raise UsageError(f"- is no file: a {what} is written whole, into one", hint="give the file's name")
    folder = path.absolute().parent
    try:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder} for {path.name}", hint="make it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{folder} cannot be written to", hint="name a file in another folder")
        if not _exists(path):
            return
        if not stat.S_ISREG(path.lstat().st_mode):
            raise UsageError(f"{path} is no regular file", hint="name another file")
        with path.open("rb") as file:
            head = file.read(HEAD).decode(errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {os.strerror(error.errno or 0).lower()}") from error
    if head and not ours(head):
        raise UsageError(
            f"{path} is there and is no {what}", hint="name another file; it is not overwritten"
        )


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def write_whole(path: Path, text: str) -> None:
    """Write a file that only its owner reads; a kill or a full disk leaves what was there before."""
    folder = path.absolute().parent
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=folder)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise UsageError(f"{path} cannot be written: {os.strerror(error.errno or 0).lower()}") from error


def read_whole(path: Path) -> str:
    """Read a file of ours; UsageError says in one line why not."""
    try:
        if not path.name:
            raise UsageError("no file is named", hint="give the file's name")
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{path} is no regular file")
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        why = os.strerror(error.errno or 0).lower() if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path}: {why}") from error
    if len(data) > LARGEST:
        raise UsageError(f"{path} is too large to be a file of fleetfix")
    return data.decode(errors="replace")
