"""Make text from hosts harmless to show: nothing in it moves a cursor or turns writing around.

A host is not trusted to say how its words look. Escapes, other control characters and characters that
reorder or hide text (CVE-2021-42574, "Trojan Source") are shown as what they are, `\\x1b` for instance.
"""

from __future__ import annotations

import re

LONGEST = 600
"""Characters of one line that are shown; the journal has all of it."""

_HIDDEN = (
    "\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_TABOO = re.compile("[\x00-\x1f" + _HIDDEN)
_TABOO_IN_TEXT = re.compile("[\x00-\x08\x0b-\x1f" + _HIDDEN)


def neutral(text: str) -> str:
    """Neutralise one line; line ends inside it are shown as `\\n`."""
    return _TABOO.sub(_spell, text)


def neutral_text(text: str) -> str:
    """Neutralise a text whose line ends and tabs are meant."""
    return _TABOO_IN_TEXT.sub(_spell, text)


def one_line(text: str, longest: int = LONGEST) -> str:
    """Bring a text on one neutral line: blank space is joined, what is too long is cut and said to be."""
    line = neutral(" ".join(text.split()))
    return line if len(line) <= longest else line[: longest - 1] + "…"


def many_lines(text: str) -> list[str]:
    """Cut a text into neutral lines; tabs become blanks."""
    return (
        [neutral(line.expandtabs(4)) for line in re.split(r"\r\n|\n", text.rstrip("\r\n"))] if text else []
    )


def _spell(match: re.Match[str]) -> str:
    code = ord(match[0])
    named = {9: "\\t", 10: "\\n", 13: "\\r"}.get(code)
    if named:
        return named
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
