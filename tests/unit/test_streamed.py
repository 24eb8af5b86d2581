"""What a host may send while a command runs, and what it is fed."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from fleetfix.conversation import AHEAD, Streamed
from fleetfix.errors import HostError


def frame(size: int, of: Any = "out") -> dict[str, Any]:
    return {"n": 1, "of": of, "chunk": base64.b64encode(b"x" * size).decode()}


def test_a_host_that_sends_more_than_was_asked_for_is_cut_off() -> None:
    streamed = Streamed(None)
    streamed.hear("gpu01", frame(2 * AHEAD))
    with pytest.raises(HostError):
        streamed.hear("gpu01", frame(1))
    honest = Streamed(None)
    for _ in range(50):
        honest.hear("gpu01", frame(AHEAD))
        assert honest.taken(AHEAD) == {"op": "taken", "bytes": AHEAD}


async def test_output_that_comes_byte_by_byte_is_kept_as_one_piece_a_stream() -> None:
    streamed = Streamed(None)
    for _ in range(3000):
        streamed.hear("gpu01", frame(1))
    streamed.hear("gpu01", frame(2, "err"))
    streamed.hear("gpu01", frame(3))
    streamed.end()
    assert [await streamed.next() for _ in range(4)] == [
        *(("out", b"x" * 3000), ("err", b"xx")),
        *(("out", b"xxx"), None),
    ]


@pytest.mark.parametrize(
    "bad", [frame(0), frame(1, "in"), {"of": "out", "chunk": "%%"}, {"of": "out", "chunk": ["x"]}]
)
def test_what_is_no_output_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(HostError) as refused:
        Streamed(None).hear("gpu01", bad)
    assert refused.value.failure.kind == "bug"


def test_input_is_fed_once_and_its_end_is_told() -> None:
    data = bytes(range(10))
    streamed = Streamed(lambda at, most: data[at : at + most])
    pieces = []
    while (piece := streamed.next_input(4)) is not None:
        pieces.append((base64.b64decode(piece["data"]), piece["end"]))
    assert pieces == [(data[:4], False), (data[4:8], False), (data[8:], True)]
    assert Streamed(None).next_input(4) is None
