"""Looks at lab hosts from outside, through /proc: files, and the speed that the job logs.

Independent of everything that fleetfix runs on hosts, so that it can bear witness for or against it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from fleetfix.lab.template import LOG

OWNED = ("/etc", "/home", "/opt", "/root", "/run", "/tmp", "/var", "/dev/shm", "/usr/local/sbin")
"""The folders that belong to a host: everything else of it is the machine's, and read-only."""

JOB_WRITES = ("/opt/train/checkpoints", "/var/log/train")
"""What a running job writes all the time."""

STEP = re.compile(rb"step:\s*(\d+) .*tps: ([\d,]+)")
STARTS = (b"Loading the checkpoint", b"No checkpoint found")
TAIL = 256 * 1024


class Seen(NamedTuple):
    """One file as it is: `what` is its kind; `content` a sha256, or the target of a link."""

    what: str
    mode: int
    uid: int
    gid: int
    size: int
    content: str


def inside(init: int, path: str) -> Path:
    """A host's path as this machine reaches it."""
    return Path(f"/proc/{init}/root{path}")


def files(init: int, ignore: Iterable[str] = ()) -> dict[str, Seen]:
    """Everything below the host's own folders, with all that can be compared of it but times."""
    skipped = tuple(ignore)
    return {
        path: seen
        for top in OWNED
        for path, seen in _walk(init, top)
        if not any(path == one or path.startswith(one + "/") for one in skipped)
    }


def _walk(init: int, top: str) -> Iterator[tuple[str, Seen]]:
    start = str(inside(init, top))
    # Files that come and go while a job runs are not seen: nobody can compare them.
    for folder, names, plain in os.walk(start):
        for name in (*names, *plain):
            path = os.path.join(folder, name)
            seen = _look(path)
            if seen is not None:
                yield top + path[len(start) :], seen


def _look(path: str) -> Seen | None:
    try:
        status = os.lstat(path)
        kind, content = "other", ""
        if stat.S_ISLNK(status.st_mode):
            kind, content = "link", os.readlink(path)
        elif stat.S_ISDIR(status.st_mode):
            kind = "folder"
        elif stat.S_ISREG(status.st_mode):
            kind, content = "file", hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except FileNotFoundError:
        return None
    size = status.st_size if kind == "file" else 0
    return Seen(kind, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, size, content)


def tok_s(init: int, last: int) -> float | None:
    """The median tok/s of the last steps logged since the job's last start, or None."""
    rates = [rate for _, rate in steps(init)][-last:]
    return statistics.median(rates) if rates else None


def steps(init: int) -> list[tuple[int, float]]:
    """(step, tok/s) of the steps logged since the job's last start, as far as the log's tail goes."""
    data = _log(init)
    begin = max((data.rfind(mark) for mark in STARTS), default=-1)
    found = STEP.finditer(data, max(begin, 0))
    return [(int(match[1]), float(match[2].replace(b",", b""))) for match in found]


def starts(init: int) -> int:
    """How often the log's tail says that training started."""
    data = _log(init)
    return sum(data.count(mark) for mark in STARTS)


def _log(init: int) -> bytes:
    try:
        with open(inside(init, LOG), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read()
    except FileNotFoundError:
        return b""
