"""The lowest lines of a terminal, drawn over again and again, whatever becomes of its size."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from fleetfix.views.out import Out

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
_END = "\x1b[0m"


class Region:
    """Draws lines at the end of what a stream shows; everything else goes above them."""

    def __init__(self, out: Out) -> None:
        self._out = out
        self._width = 0
        self._drawn: list[int] = []
        """Columns of each line that stands there."""

    def draw(self, lines: Sequence[str], width: int) -> None:
        """Show these lines instead of the last ones, each cut where a terminal of this width ends."""
        cut = [clipped(line, width - 1) for line in lines]
        # A line that is drawn over is never cleared before: it would flicker.
        body = "".join(f"{line}\x1b[K\n" for line in cut)
        self._out.words(self._back(width) + body + "\x1b[J")
        self._width, self._drawn = width, [columns(line) for line in cut]

    def clear(self, width: int) -> None:
        """Take the lines away; what is written next stands where they began."""
        if self._drawn:
            # Line by line: tmux keeps what is cleared from the top of the screen on in its history.
            rows = len(self._drawn)
            self._out.words(self._back(width) + "\x1b[K\n" * rows + f"\x1b[{rows}A\x1b[J")
            self._drawn = []

    def _back(self, width: int) -> str:
        """Go to where the region begins. A narrower terminal has broken its lines."""
        if not self._drawn:
            return "\r"
        if width >= self._width:
            return f"\r\x1b[{len(self._drawn)}A"
        rows = sum(max(-(-line // width), 1) for line in self._drawn)
        return f"\r\x1b[{rows}A\x1b[J"


def columns(text: str) -> int:
    """How many columns a text takes; colours take none."""
    return cell_len(_COLOUR.sub("", text))


def clipped(text: str, width: int) -> str:
    """The beginning of a text that fits, with its colours; what is cut ends in `…`."""
    if columns(text) <= width:
        return text
    left, parts = max(width - 1, 0), []
    for part in _COLOUR.split(text):
        if part.startswith("\x1b["):
            parts.append(part)
        elif left > 0:
            taken = part if cell_len(part) <= left else set_cell_size(part, left)
            left -= cell_len(taken)
            parts.append(taken)
    end = _END if _COLOUR.search(text) else ""
    return "".join(parts).rstrip() + ("…" if width > 0 else "") + end


def spread(left: str, right: str, width: int) -> str:
    """A line with one text at its beginning and one at its end; the first is cut where both do not fit."""
    room = width - columns(right) - 2
    if room < 1:
        return left
    cut = clipped(left, room)
    return f"{cut}{' ' * (width - columns(cut) - columns(right))}{right}"
