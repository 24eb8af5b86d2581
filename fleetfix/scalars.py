"""Plain words as values: numbers that remember how they were written, truth values, text.

As YAML 1.2 reads them: `true` and `false` are truth values; `yes`, `on`, `22:30` and `0644` are text. A
number keeps its text, so that whoever wants text gets `1.10` and not 1.1.
"""

from __future__ import annotations

import re
from typing import Any

_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})


class WrittenInt(int):
    """An integer that remembers how it was written."""

    text: str


class WrittenFloat(float):
    """A number that remembers how it was written."""

    text: str


def scalar(text: str) -> Any:
    """The value of a plain word: null, a truth value, a number that remembers its text, or text."""
    if text in _NULLS:
        return None
    if text in ("true", "false"):
        return text == "true"
    if _INTEGER.fullmatch(text) and len(text) < 100:
        number = WrittenInt(text)
        number.text = text
        return number
    if _FLOAT.fullmatch(text) and len(text) < 100:
        real = WrittenFloat(text)
        real.text = text
        return real
    return text


def written(value: object) -> str | None:
    """How a scalar was written, or None where it has no text of its own."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(getattr(value, "text", value))
    return None
