"""The ledger of this host, for people: what was changed here, when, by whom and why.

One JSON a line in `ledger.jsonl`: when a change begins, how it ended, and how a run ended here. It is
told from what `host.jsonl` holds of each run, and outlasts that. When it has grown long it becomes
`ledger.1.jsonl`, and what was that is dropped; the first line of the new one says how much.
"""

import contextlib
import json
import os
import time

NAME = "ledger.jsonl"
OLDER = "ledger.1.jsonl"
LARGEST = 2 * 1024 * 1024  # bytes of one file
LONGEST = 500  # characters of one text in it
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
