"""Fit text to a terminal: long lines are broken between words, and go on under their beginning."""

from __future__ import annotations

import os
import re
from typing import TextIO

NARROWEST = 40
_LABEL = re.compile(r" *\S{1,16}(?: \S{1,3})? {2,}(?=\S)")
"""What stands before the text of a line: a step, an outcome, a time."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def fit(text: str, stream: TextIO) -> str:
    """The text as it is, or broken between words where the stream is a terminal."""
    try:
        if not stream.isatty():
            return text
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return text
    return broken(text, width)


def broken(text: str, width: int) -> str:
    """Break lines of more than `width` columns; colours count nothing, single words stay whole."""
    if width < NARROWEST:
        return text
    return "\n".join(_broken_line(line, width) for line in text.split("\n"))


def _broken_line(line: str, width: int) -> str:
    if _columns(line) <= width:
        return line
    label = _LABEL.match(line)
    begin = label.end() if label else len(line) - len(line.lstrip(" ")) + 4
    indent = " " * min(begin, width // 2)
    lines, current = [], ""
    for part in re.split(r"(?<=\S)(?= +\S)", line):
        if current.strip() and _columns(current + part) > width:
            lines.append(current)
            part = indent + part.lstrip(" ")
            current = ""
        current += part
    return "\n".join([*lines, current])


def _columns(text: str) -> int:
    return len(_COLOUR.sub("", text))
