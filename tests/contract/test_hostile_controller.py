"""Frames that no controller sends, to a real runner: each is refused, the session goes on or ends well."""

from __future__ import annotations

import json
import select
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetfix import protocol

SECONDS = 20.0


class Talk:
    """A runner, spoken to in bytes."""

    def __init__(self, root: Path) -> None:
        start = protocol.Start("ab", None, False)
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", start.command()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        assert self.process.stdout is not None
        while not start.marker.match(self.process.stdout.readline()):
            pass
        self._decoder = protocol.Decoder()
        self.write(protocol.core())
        names = ("run", "playbook", "operator", "controller", "driver", "reason")
        purpose = {**dict.fromkeys(names, "x"), "dry": False, "take_over": False}
        self.send({"op": "greet", "v": 1, "purpose": purpose, "orphaned": SECONDS, "root": str(root)})

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def send(self, frame: Any) -> None:
        body = json.dumps(frame).encode()
        self.write(struct.pack(">I", len(body)) + body)

    def answers(self, word: float) -> bool:
        """Whether a sign of life is answered; whatever else comes is frames."""
        assert self.process.stdout is not None
        try:
            self.send({"op": "ping", "t": word})
        except BrokenPipeError:
            return False
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and select.select([self.process.stdout], [], [], SECONDS)[0]:
            data = self.process.stdout.read(1 << 16)
            if not data:
                return False
            if any(frame.get("pong") == word for frame in self._decoder.feed(data)):
                return True
        return False

    def close(self) -> bytes:
        """Hang up, and wait for the end; what it complained of."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.stderr is not None
        said = self.process.stderr.read()
        self.process.wait(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.stderr.close()
        return said


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    one = Talk(tmp_path)
    yield one
    if one.process.stdin is not None and not one.process.stdin.closed:
        one.close()


OPS = """
hello read acquire change undo past modules note recall execute cancel end commit release taken feed sources
"""
KEYS = """
n of id step change reads call name value argv script fed timeout bytes data end modules commit outcome
"""
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("x/s/1/1")
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=3)
    ),
    max_leaves=8,
)
frames = st.builds(
    lambda op, rest: {**rest, "op": op},
    st.sampled_from(OPS.split()) | values,
    st.dictionaries(st.sampled_from(KEYS.split()), values, max_size=6),
)


@settings(suppress_health_check=list(HealthCheck))
@given(sent=st.lists(frames, min_size=3, max_size=8))
def test_a_frame_that_makes_no_sense_is_refused_and_the_session_goes_on(
    talk: Talk, sent: list[Any]
) -> None:
    for frame in sent:
        talk.send(frame)
    assert talk.answers(len(str(sent)))


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 1 << 31),
        struct.pack(">I", 4) + b"nope",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 100_000) + b"[" * 100_000,
        struct.pack(">I", 9) + b"\xff" * 9,
    ],
    ids=["too long", "no JSON", "no object", "bottomless", "no text"],
)
def test_what_is_no_frame_ends_the_session_in_order(talk: Talk, data: bytes) -> None:
    assert talk.answers(1)
    talk.write(data)
    assert not talk.answers(2)
    assert talk.close() == b""
