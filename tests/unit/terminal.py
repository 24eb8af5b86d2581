"""A terminal in memory: enough of one to see what stands on it, and what scrolled off its screen."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n])")


class Terminal:
    """Takes what a program writes; lines wrap at its width, and again where it is made narrower."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.lines: list[str] = [""]
        """Everything that was written, the screen being the last `rows` of it."""
        self.at = (0, 0)
        self.top = 0

    def write(self, text: str) -> None:
        for match in _TOKEN.finditer(text):
            argument, command, control, letter = match.groups()
            row, column = self.at
            if letter is not None:
                self._put(letter)
            elif control == "\r":
                self.at = (row, 0)
            elif control == "\n":
                self._to(row + 1, 0)
            elif command == "A":
                self.at = (max(row - int(argument or 1), self.top), column)
            elif command == "K":
                self.lines[row] = self.lines[row][:column]
            elif command == "J":
                self.lines[row] = self.lines[row][:column]
                del self.lines[row + 1 :]
            else:
                assert command == "m", match[0]

    def _put(self, letter: str) -> None:
        row, column = self.at
        if column == self.columns:
            self._to(row + 1, 0)
            row, column = self.at
        line = self.lines[row].ljust(column)
        self.lines[row] = line[:column] + letter + line[column + 1 :]
        self.at = (row, column + 1)

    def _to(self, row: int, column: int) -> None:
        while row >= len(self.lines):
            self.lines.append("")
        self.at = (row, column)
        self.top = max(self.top, row - self.rows + 1)

    def resize(self, columns: int) -> None:
        """Make it narrower or wider: long lines break anew, and the cursor stays with its line."""
        if columns < self.columns:
            broken = [
                [line[start : start + columns] for start in range(0, max(len(line), 1), columns)]
                for line in self.lines
            ]
            row, column = self.at
            self.lines = [part for parts in broken for part in parts]
            self._to(sum(len(parts) for parts in broken[:row]), column)
        self.columns = columns

    @property
    def text(self) -> list[str]:
        """All lines, without blanks at their ends and empty ones at the end."""
        shown = [line.rstrip() for line in self.lines]
        while shown and not shown[-1]:
            shown.pop()
        return shown
