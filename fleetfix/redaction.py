"""Keep secrets out of text by their values, however they are spelled there.

A value is looked for as it is, and as programs write it: base64 at each of its three alignments, URL-
encoded, quoted for a shell, escaped in JSON, Python or HTML, in hex; of one over several lines each line
too. Text without any of these stays as it is, character by character.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import re
from collections.abc import Iterable, Iterator
from urllib.parse import quote, quote_plus

MASK = "***"

SHORTEST = 6
"""Characters that a secret has at least: a shorter one is a word that stands anywhere."""

PIECE = 8
"""Characters of an encoded value, or of one line of it, that are looked for at least."""

WRAPPED = (64, 76)
"""Columns at which programs that write base64 begin a new line."""


@functools.lru_cache(maxsize=4)
def needles_of(values: tuple[str, ...]) -> tuple[str, ...]:
    """All spellings of these values, the longest first; a host gets them to look for the same."""
    return Mask(values).needles


class Mask:
    """The spellings of some values, and text without them."""

    def __init__(self, values: Iterable[str]) -> None:
        found = {one for value in values if len(value) >= SHORTEST for one in spellings(value)}
        self.needles = tuple(sorted(found, key=lambda one: (-len(one), one)))
        """What is looked for, the longest first."""

    def finds(self, text: str) -> bool:
        """Whether there is anything to mask."""
        # To seek one after another is faster than one expression for all.
        return any(needle in text for needle in self.needles)

    def __call__(self, text: str) -> str:
        """The text with every value, in every spelling, replaced by `***`."""
        if not self.finds(text):
            return text
        parts, at = [], 0
        for begin, end in _merged(sorted(self._places(text))):
            parts += [text[at:begin], MASK]
            at = end
        return "".join([*parts, text[at:]])

    def _places(self, text: str) -> Iterator[tuple[int, int]]:
        """Where each needle stands; they may overlap."""
        for needle in self.needles:
            at = text.find(needle)
            while at >= 0:
                yield at, at + len(needle)
                at = text.find(needle, at + 1)


def _merged(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin, end = -1, -1
    for start, stop in places:
        if start < end:
            end = max(end, stop)
            continue
        if end > 0:
            yield begin, end
        begin, end = start, stop
    if end > 0:
        yield begin, end


def spellings(value: str) -> set[str]:
    """Every way to write a value that is looked for."""
    lines = [line.strip() for line in value.splitlines()] if len(value.splitlines()) > 1 else []
    # What frames a key is the same for everybody.
    inner = [line for line in lines if len(line) >= PIECE and not line.startswith("-----")]
    found = {spelled for text in (value, *inner) for spelled in _written(text)}
    encoded = {one for one in _encoded(value.encode()) if len(one) >= PIECE}
    return {one for one in found if len(one) >= SHORTEST} | encoded


def _written(text: str) -> Iterator[str]:
    yield text
    for ascii in (True, False):
        escaped = json.dumps(text, ensure_ascii=ascii)[1:-1]
        yield from (escaped, escaped.replace("/", "\\/"), json.dumps(escaped, ensure_ascii=ascii)[1:-1])
    yield repr(text)[1:-1]
    for coded in (quote(text, safe=""), quote(text), quote_plus(text)):
        yield from (coded, re.sub(r"%[0-9A-F]{2}", lambda match: match[0].lower(), coded))
    yield from (html.escape(text), html.escape(text, quote=False))
    yield from (text.replace("'", "'\"'\"'"), text.replace("'", "'\\''"))
    yield re.sub(r'([\\"$`])', r"\\\1", text)
    yield re.sub(r"([^A-Za-z0-9%+,./:=@_-])", r"\\\1", text)


def _encoded(data: bytes) -> Iterator[str]:
    yield from (data.hex(), data.hex().upper())
    for before in range(3):
        # Of a longer text that has the value in it only these characters depend on nothing else.
        whole = base64.b64encode(b"\0" * before + data).decode()
        bits = (before + len(data)) * 8
        begin = -(-before * 8 // 6)
        piece = whole[begin : bits // 6]
        # Where the value is the end of that text, its last bits have a character of their own.
        for one in (piece, whole[begin:], whole[begin:].rstrip("=")):
            yield from (one, one.replace("+", "-").replace("/", "_"))
        if before == 0:
            for columns in WRAPPED:
                yield from (whole[at : at + columns] for at in range(0, len(whole), columns))
