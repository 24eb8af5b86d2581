"""The ledger of this host, for people: what was changed here, when, by whom and why.

One JSON a line in `ledger.jsonl`: when a change begins, how it ended, and how a run ended here. It is
told from what `host.jsonl` holds of each run, and outlasts that. When it has grown long it becomes
`ledger.1.jsonl`, and what was that is dropped; the first line of the new one says how much.
"""

import contextlib
import json
import os
import time

from fleetfix.remote.api import read

NAME = "ledger.jsonl"
OLDER = "ledger.1.jsonl"
LARGEST = 2 * 1024 * 1024  # bytes of one file
LONGEST = 500  # characters of one text in it
TAIL = 1024 * 1024  # bytes of a file that are looked at from its end
ANSWER = 56 * 1024  # bytes of an answer
WHO = ("run", "playbook", "operator", "controller", "reason")


class Ledger:
    """Where one session writes down what it does, beside who does it."""

    def __init__(self, home, purpose):
        self.path = os.path.join(home, NAME)
        self.older = os.path.join(home, OLDER)
        self.who = {name: purpose[name][:LONGEST] for name in WHO}

    def enter(self, kind, **fields):
        """Write one line, durably. A disk that is full keeps no change from being made, or undone."""
        record = {"v": 1, "t": round(time.time(), 3), "kind": kind}
        record.update({name: text[:LONGEST] for name, text in fields.items()})
        record.update(self.who)
        with contextlib.suppress(OSError):
            _append(self.path, record)

    def keep_short(self):
        """Drop the oldest half where it has become too long."""
        with contextlib.suppress(OSError):
            if os.path.getsize(self.path) > LARGEST:
                dropped = _lines_in(self.older)
                os.rename(self.path, self.older)
                if dropped:
                    self.enter("dropped", lines=str(dropped))


def _append(path, record):
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line  # after one that a crash has torn
        os.write(fd, line)
        os.fsync(fd)
    finally:
        os.close(fd)


def _lines_in(path):
    try:
        with open(path, "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@read
def entries(ctx, last):
    """The last lines of the ledger, oldest first, and whether there are more; those torn are counted."""
    found, torn, more = [], 0, False
    for home in ctx.homes:
        for name in (OLDER, NAME):
            data, cut = _tail(os.path.join(home, name))
            more = more or cut
            for line in data.splitlines():
                record = _parsed(line)
                if record is None:
                    torn += 1
                else:
                    found.append(record)
    found.sort(key=lambda record: record["t"])
    kept, room = [], ANSWER
    for record in reversed(found[-last:]):
        room -= len(json.dumps(record))
        if room < 0:
            break
        kept.append(record)
    return {"lines": kept[::-1], "more": more or len(kept) < len(found), "torn": torn}


def _tail(path):
    """The last bytes of a file from the beginning of a line on, and whether there are more before."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - TAIL, 0))
            data = file.read(TAIL)
    except OSError:
        return b"", False
    if size <= TAIL:
        return data, False
    return data.partition(b"\n")[2], True


def _parsed(line):
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("t"), (int, float)):
        return None
    return record
