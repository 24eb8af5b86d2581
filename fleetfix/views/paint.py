"""Colours, on a terminal that wants them: `NO_COLOR` (no-color.org) and `TERM=dumb` are respected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TextIO

Tone = Literal["good", "bad", "warn", "faint", "strong"]

_CODES: dict[Tone, str] = {"good": "32", "bad": "31", "warn": "33", "faint": "2", "strong": "1"}

TONES: dict[str, Tone] = {
    "ok": "good",
    "changed": "good",
    "pending": "warn",
    "skipped": "faint",
    "not_started": "faint",
    "rolled_back": "warn",
    "blocked": "warn",
    "busy": "warn",
    "unproven": "warn",
    "cancelled": "warn",
}
"""The tone of an outcome or a step's result; all others are bad."""


class Paint:
    """Colours text, or leaves it alone."""

    def __init__(self, on: bool = False) -> None:
        self.on = on

    @classmethod
    def for_stream(cls, stream: TextIO, environ: Mapping[str, str]) -> Paint:
        """Decide for a stream: colours only on a terminal, and only where nobody said no."""
        refused = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
        return cls(not refused and stream.isatty())

    def __call__(self, tone: Tone, text: str) -> str:
        return f"\x1b[{_CODES[tone]}m{text}\x1b[0m" if self.on and text else text

    def outcome(self, word: str, text: str | None = None) -> str:
        return self(TONES.get(word, "bad"), text if text is not None else word)


PLAIN = Paint()
