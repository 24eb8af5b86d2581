"""The node groups of ClusterShell, as its own `nodeset` tells them: groups.conf, upcalls, YAML files.

It is asked in a process of its own: upcalls are commands that may hang, and importing its groups would
change what a pattern means here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from fleetfix.errors import InventoryError, PatternError
from fleetfix.folders import home
from fleetfix.hostset import HostSet
from fleetfix.inventory_sources import program
from fleetfix.inventory_sources.declared import Declared
from fleetfix.spelling import hint_for

_NODESET = (sys.executable, "-m", "ClusterShell.CLI.Nodeset")
_GROUP = re.compile(r"@(\S+)(?: (.*))?")


def groups(source: str, deadline: float, env: Mapping[str, str] = os.environ) -> Declared:
    """Every group of one source, or of all; hosts are those of the groups and of `@*`."""
    if not any(path.is_file() for path in _configurations(env)):
        raise InventoryError(
            "ClusterShell has no groups here: there is no groups.conf",
            hint=f"looked for {', '.join(map(str, _configurations(env)))}",
        )
    sources = [
        line.split()[0] for line in _ask(["--groupsources"], deadline)[0].splitlines() if line.strip()
    ]
    if source and source not in sources:
        hint = hint_for(source, sources) or f"sources: {', '.join(sources)}"
        raise InventoryError(f"ClusterShell has no group source {source!r}", hint=hint)
    text, said = _ask(["-s", source, "-ll"] if source else ["-LL"], deadline)
    every, _ = _ask(["-q", "-f", f"@{source}:*" if source else "@*"], deadline, may_fail=True)
    return declared(text, every, said, source)


def declared(text: str, every: str = "", said: str = "", source: str = "") -> Declared:
    """Read what `nodeset -LL` prints, the nodes of `@*`, and what it warned of."""
    found = Declared("ClusterShell")
    names = _names(every.strip(), "@*", found)
    for line in text.splitlines():
        match = _GROUP.fullmatch(line.strip())
        if match is None:
            continue
        members = _names((match[2] or "").strip(), f"@{match[1]}", found)
        # With one source its name says nothing.
        found.group(match[1].removeprefix(f"{source}:") if source else match[1], members)
        names |= members
    for name in HostSet(names):
        found.host(name, {}, {})
    for line in said.splitlines():
        found.remark("ClusterShell warns", line.strip().removeprefix("Warning: "))
    return found


def _names(text: str, group: str, found: Declared) -> frozenset[str]:
    try:
        return HostSet.parse(text).names
    except PatternError as error:
        found.remark(group, f"{error.message}: {text}")
        return frozenset()


def _ask(words: list[str], deadline: float, *, may_fail: bool = False) -> tuple[str, str]:
    try:
        return program.answer([*_NODESET, *words], shown=f"nodeset {' '.join(words)}", deadline=deadline)
    except InventoryError:
        if may_fail:
            return "", ""
        raise


def _configurations(env: Mapping[str, str]) -> tuple[Path, ...]:
    """Where a groups.conf of this machine or user is; the example that pip lays down is not among them."""
    config = env.get("XDG_CONFIG_HOME", "")
    folders = [
        Path(env["CLUSTERSHELL_CFGDIR"]) if env.get("CLUSTERSHELL_CFGDIR") else None,
        (Path(config) if os.path.isabs(config) else home(env) / ".config") / "clustershell",
        home(env) / ".local/etc/clustershell",
        Path("/etc/clustershell"),
    ]
    return tuple(folder / "groups.conf" for folder in folders if folder is not None)
