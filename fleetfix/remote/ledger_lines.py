"""The last lines of the ledger of this host, for whoever asks."""

import json
import os

from fleetfix.remote.api import read
from fleetfix.remote.ledger import NAME, OLDER

TAIL = 1024 * 1024  # bytes of a file that are looked at from its end
ANSWER = 56 * 1024  # bytes of an answer
LATEST = 1e11  # seconds since the epoch


@read
def last(ctx, count):
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
    for record in reversed(found[-count:]):
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
    at = record.get("t") if isinstance(record, dict) else None
    # One that is no time, such as NaN, would make the others unreadable too.
    return record if isinstance(at, (int, float)) and 0 <= at <= LATEST else None
