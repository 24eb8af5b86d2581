"""The chain over a journal: the digest of a record covers the one before, that of a first the run before.

A run has a chain of its own, so that runs may go on side by side; their beginnings are linked in order.
What is written later in a record, taken out, put in another order or cut off then no longer fits. Who can
write the whole journal anew can also write a chain that fits: what hosts keep of its heads tells that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

NOTHING = "0" * 64
"""What stands before the first link."""

_encode = json.JSONEncoder(separators=(",", ":"), default=repr).encode


class Row(NamedTuple):
    """One record as it is kept, with its digest; empty where it is older than the chain."""

    seq: int
    at: float
    v: int
    kind: str
    host: str | None
    event: str
    digest: str


@dataclass
class Head:
    """Where the chain of a run stands: its last record, and the first that it covers."""

    run: str
    place: int
    """Which run of the journal it is, in the order of their beginnings."""
    first: int
    start: str
    """The digest of the first record that is covered."""
    link: str
    seq: int
    digest: str

    @property
    def anchor(self) -> str:
        """What a host keeps of it: `SEQ:DIGEST`."""
        return f"{self.seq}:{self.digest}"


@dataclass(frozen=True)
class Misfit:
    """The first thing that is not as it was written. `seq` is None where it is no one record."""

    run: str
    seq: int | None
    why: str


@dataclass(frozen=True)
class Verified:
    """What came of going over the chain of a run."""

    run: str
    covered: int = 0
    """Records that fit."""
    older: int = 0
    """Records from before there was a chain: nothing tells whether they are as they were."""
    misfit: Misfit | None = None


def before_first(run: str) -> str:
    """What the first digest of a run covers in the place of a record."""
    return _digest("run", run)


def digest_of(previous: str, run: str, row: Row) -> str:
    """The digest of a record that follows on `previous`."""
    event = hashlib.sha256(str(row.event).encode("utf-8", "surrogatepass")).hexdigest()
    return _digest(previous, run, row.seq, repr(row.at), row.v, row.kind, row.host, event)


def link_of(previous: str, head: Head) -> str:
    """Tie the beginning of a run to that of the run before."""
    return _digest(previous, head.place, head.run, head.first, head.start)


def _digest(*parts: object) -> str:
    return hashlib.sha256(_encode(parts).encode()).hexdigest()


def verify(run: str, head: Head | None, rows: Iterable[Row]) -> Verified:
    """Go over the records of a run, oldest first, up to the first that does not fit."""
    first = head.first if head is not None else None
    older, covered, due = 0, 0, first or 0
    previous = before_first(run)
    for row in rows:
        if first is None or row.seq < first:
            if row.digest:
                return Verified(run, covered, older, Misfit(run, row.seq, "stands before its chain begins"))
            older += 1
            continue
        if row.seq != due:
            return Verified(run, covered, older, Misfit(run, due, _MISSING))
        found = digest_of(previous, run, row)
        if found != row.digest:
            return Verified(run, covered, older, Misfit(run, row.seq, _CHANGED))
        previous, due, covered = found, due + 1, covered + 1
    return Verified(run, covered, older, None if head is None else _at_its_end(head, due, previous))


_MISSING = "is missing"
_CHANGED = "is not as it was written, or does not follow on the one before it"


def _at_its_end(head: Head, due: int, digest: str) -> Misfit | None:
    if due <= head.seq:
        many = f"is missing, and all up to {head.seq}" if due < head.seq else _MISSING
        return Misfit(head.run, due, f"{many}: the end was cut off")
    if (due - 1, digest) != (head.seq, head.digest):
        return Misfit(head.run, due - 1, "is not the last that was written")
    return None


def verify_links(heads: Iterable[Head]) -> Misfit | None:
    """Go over the beginnings of all runs, in order: whether a whole run is gone, or another's."""
    previous, before, due = NOTHING, "", 1
    for head in heads:
        if head.place != due:
            after = f"the run after {before}" if before else "the first run"
            return Misfit(head.run, None, f"{after} is missing from this journal")
        if link_of(previous, head) != head.link:
            return Misfit(head.run, None, "its beginning is not as it was written")
        previous, before, due = head.link, head.run, due + 1
    return None
