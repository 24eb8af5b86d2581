"""A file of host names, one a line, as `pssh -h`, `pdsh -w ^FILE` and `clush --hostfile` take it."""

from __future__ import annotations

import re

from fleetfix.commands import Json
from fleetfix.errors import DocumentError, PatternError
from fleetfix.hostset import HostSet
from fleetfix.inventory_sources.declared import Declared

_LINE = re.compile(r"(?:([A-Za-z0-9_][\w.+-]*)@)?([A-Za-z0-9_][^\s:@,{}=]*)(?::([0-9]+))?")


def is_list(text: str) -> bool:
    """Whether a text is names alone: `[user@]host[:port]` a line, and comments."""
    lines = _lines(text)
    return bool(lines) and all(_LINE.fullmatch(line) for _, line in lines)


def hosts(text: str, shown: str) -> Declared:
    """Read the names; a range such as `gpu[01-16]` is many."""
    found = Declared("a list of names")
    for number, line in _lines(text):
        match = _LINE.fullmatch(line)
        assert match is not None
        user, pattern, port = match.groups()
        settings: dict[str, Json] = {"user": user} if user else {}
        settings |= {"port": int(port)} if port else {}
        try:
            names = HostSet.parse(pattern)
        except PatternError as error:
            raise DocumentError((f"{shown}:{number}: {pattern}: {error.message}",)) from None
        for name in names:
            found.host(name, settings, {})
    return found


def _lines(text: str) -> list[tuple[int, str]]:
    stripped = (
        (number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)
    )
    return [(number, line) for number, line in stripped if line]
