"""A file of host names, one a line, as `pssh -h`, `pdsh -w ^FILE` and `clush --hostfile` take it."""

from __future__ import annotations

import re

from fleetfix.commands import Json
from fleetfix.errors import DocumentError, PatternError
from fleetfix.hostset import HostSet
from fleetfix.inventory_sources.declared import Declared

_USER = r"(?:(?P<user>[A-Za-z0-9_][\w.+-]*)@)?"
_NAME = r"[A-Za-z0-9_](?:[^\s:@,{}=\[\]]|\[[0-9:/,-]+\])*"
_ADDRESS = r"\[[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?\]"
_BARE_ADDRESS = r"[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?"
_LINE = re.compile(
    rf"{_USER}(?:(?P<pattern>{_NAME}|{_ADDRESS})(?::(?P<port>[0-9]+))?|(?P<bare>{_BARE_ADDRESS}))"
)


def is_list(text: str) -> bool:
    """Whether a text is names alone: `[user@]host[:port]` a line, and comments."""
    lines = _lines(text)
    return bool(lines) and all(_LINE.fullmatch(line) for _, line in lines)


def strange_line(text: str, shown: str) -> str:
    """The first line that is no name, as a complaint: for a file that is nothing else either."""
    number, line = next((one for one in _lines(text) if not _LINE.fullmatch(one[1])), (1, ""))
    words = "is no host, and the file is no YAML of ours: one [user@]host[:port] a line, or hosts: {…}"
    return f"{shown}:{number}: {line[:60]!r} {words}"


def hosts(text: str, shown: str) -> Declared:
    """Read the names; a range such as `gpu[01-16]` is many."""
    found = Declared("a list of names")
    for number, line in _lines(text):
        match = _LINE.fullmatch(line)
        assert match is not None
        user, port = match["user"], match["port"]
        pattern = match["pattern"] or match["bare"]
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
