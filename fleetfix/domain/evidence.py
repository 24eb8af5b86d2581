"""What is kept of a host before something that nothing brings back, and how it is asked for."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from typing import Literal

from fleetfix.action import Exhibit, Probe
from fleetfix.commands import Completed, Read

Level = Literal["light", "full"]

LIGHT: dict[str, float] = {
    "system": 10.0,
    "nvidia-smi": 40.0,
    "kernel": 40.0,
    "processes": 20.0,
    "mounts": 10.0,
    "disk": 20.0,
    "packages": 20.0,
    "job-log": 20.0,
}
"""What is asked for, with seconds that the answer may take."""

FULL: dict[str, float] = {
    **LIGHT,
    "topology": 40.0,
    "kernel-before": 30.0,
    "pci": 30.0,
    "network": 20.0,
    "infiniband": 20.0,
    "units": 20.0,
}

MOST = 256 * 1024
"""Characters of one item."""


def probe(level: Level) -> Probe[tuple[Exhibit, ...]]:
    """Ask a host for all items of a level; what cannot be had is among the answers."""
    items = FULL if level == "full" else LIGHT
    reads = tuple(
        Read(function="evidence.take", args={"item": item}, timeout=seconds)
        for item, seconds in items.items()
    )
    replies = yield reads
    return tuple(_exhibit(item, reply) for item, reply in zip(items, replies, strict=True))


def _exhibit(item: str, reply: Completed) -> Exhibit:
    if not reply.ok:
        why = reply.failure.message if reply.failure else "nothing tells how the question ended"
        return Exhibit(name=item, failed=why)
    value = reply.value
    if not isinstance(value, dict):
        return Exhibit(name=item, failed="the answer cannot be read")
    if value.get("lacks"):
        return Exhibit(name=item, lacks=str(value["lacks"]))
    text = _unpacked(value.get("packed"))
    if text is None:
        return Exhibit(name=item, failed="the answer cannot be read")
    return Exhibit(name=item, text=text, cut=bool(value.get("cut")))


def _unpacked(packed: object) -> str | None:
    """The text of an answer, never longer than it may be: a host can send anything."""
    if not isinstance(packed, str):
        return None
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(packed, validate=True), 4 * MOST)
    except (zlib.error, binascii.Error, ValueError):
        return None
    if not stream.eof and not stream.unconsumed_tail:
        return None
    return data.decode("utf-8", "replace")


def missing(exhibits: Sequence[Exhibit]) -> tuple[str, ...]:
    """What should have been there and is not, each with its reason."""
    return tuple(f"{one.name}: {one.failed}" for one in exhibits if one.failed)


def lacking(exhibits: Sequence[Exhibit]) -> tuple[str, ...]:
    """What this host does not have."""
    return tuple(f"{one.name}: {one.lacks}" for one in exhibits if one.lacks)
