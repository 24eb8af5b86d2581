"""One record a line, as JSON in plain ASCII, and nothing else on the stream."""

from __future__ import annotations

import json

from fleetfix.events import Record
from fleetfix.state import RunState
from fleetfix.views.out import Out


def json_line(record: Record) -> str:
    """Write a record on one line. ASCII only: no text of a host can move a cursor or break a line."""
    return json.dumps(record.model_dump(mode="json"), separators=(",", ":"))


class JsonLines:
    """Writes each record as it becomes durable."""

    def __init__(self, out: Out) -> None:
        self._out = out

    def see(self, record: Record, state: RunState) -> None:
        del state
        self._out.whole(json_line(record))
