"""The hosts that an ssh configuration names: `Host` lines without wildcards, `Include` followed.

How each is reached stays with the configuration, which is read again by the connection.
"""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from fleetfix.commands import Json
from fleetfix.documents import text_of
from fleetfix.errors import InventoryError
from fleetfix.folders import home
from fleetfix.hostset import is_name
from fleetfix.inventory_sources.declared import Declared

_DEEPEST = 16
"""Levels of Include, as in ssh."""


def hosts(file: Path | None) -> Declared:
    """Every host named in this file, or in the user's own configuration."""
    path = home() / ".ssh/config" if file is None else file
    if not path.exists():
        raise InventoryError(f"there is no ssh configuration {path}")
    settings: dict[str, Json] = {} if file is None else {"ssh_config": str(path.absolute())}
    found = Declared("ssh configuration")
    for name in _names(path, 0):
        if set(name) & set("*?!"):
            continue
        if is_name(name):
            found.host(name, settings, {})
        else:
            found.remark(f"Host {name}", "no pattern can say this name")
    return found


def _names(path: Path, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        raise InventoryError(f"{path}: Include goes deeper than {_DEEPEST} levels")
    for number, line in enumerate(text_of(path).splitlines(), 1):
        keyword, _, rest = line.strip().replace("=", " ", 1).replace("\t", " ").partition(" ")
        keyword = keyword.lower()
        if keyword not in ("host", "include"):
            continue
        try:
            words = shlex.split(rest, comments=True)
        except ValueError:
            raise InventoryError(f"{path}:{number}: the quotes do not match") from None
        if keyword == "host":
            yield from words
        else:
            for word in words:
                yield from _included(word, depth)


def _included(word: str, depth: int) -> Iterator[str]:
    """Names of included files; as in ssh a relative path is below ~/.ssh, and none may match."""
    pattern = os.path.join(home() / ".ssh", os.path.expanduser(word))
    for path in sorted(glob.glob(pattern)):
        if os.path.isfile(path):
            yield from _names(Path(path), depth + 1)
