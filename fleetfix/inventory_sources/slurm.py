"""The nodes of Slurm as hosts: `scontrol show node`, grouped by partition, feature and state.

@gpu             a partition          @feature:a100    a feature
@state:idle      idle, alloc, drain, down or off; a node that drains while jobs run is in both
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fleetfix.commands import Json
from fleetfix.errors import InventoryError
from fleetfix.inventory_sources import program
from fleetfix.inventory_sources.declared import Declared
from fleetfix.spelling import hint_for

_ASK = ("scontrol", "--all", "--oneliner", "show", "node")
_FIELD = re.compile(r"(?:^|\s)([A-Z][A-Za-z_]*)=")
_NOTHING = frozenset({"", "(null)", "N/A", "n/a", "n/s", "none", "None"})
_SUFFIXES: Mapping[str, str] = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "%": "POWERING_DOWN",
    "!": "POWERING_DOWN",
    "#": "POWERING_UP",
    "$": "MAINTENANCE",
    "@": "REBOOT",
    "^": "REBOOT",
    "-": "PLANNED",
}
"""Marks behind a state as sinfo and older scontrol write them."""
_OFF = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "POWERED_OFF"})
_DOWN = frozenset(
    {"DOWN", "ERROR", "FAIL", "FAILING", "NOT_RESPONDING", "NO_RESPOND", "UNKNOWN", "INVAL", "INVALID_REG"}
)
_DRAIN = frozenset({"DRAIN", "DRAINED", "DRAINING"})
_ALLOC = frozenset({"ALLOCATED", "ALLOC", "MIXED", "MIX", "COMPLETING", "COMP"})
_NOT_NOW = frozenset(
    {
        "MAINT",
        "MAINTENANCE",
        "RESERVED",
        "REBOOT",
        "REBOOT_ISSUED",
        "REBOOT_REQUESTED",
        "POWERING_UP",
        "FUTURE",
    }
)


def nodes(partition: str, deadline: float) -> Declared:
    """Ask Slurm for its nodes: all, or those of partitions (`gpu,debug`)."""
    if program.found("scontrol") is None:
        raise InventoryError(
            "-i slurm: asks scontrol, and it is not on the PATH",
            hint="go where Slurm's commands are, such as a login node",
        )
    text, _ = program.answer(_ASK, shown="scontrol show node", deadline=deadline)
    return declared(text, partition)


def declared(text: str, partition: str = "") -> Declared:
    """Read what `scontrol --oneliner show node` prints."""
    read = [_fields(line) for line in text.splitlines() if line.startswith("NodeName=")]
    known = sorted({name for node in read for name in _list(node.get("Partitions"))})
    wanted = frozenset(partition.split(",")) if partition else frozenset()
    for name in sorted(wanted - set(known)):
        hint = hint_for(name, known) or f"partitions: {', '.join(known) or 'none'}"
        raise InventoryError(f"Slurm has no partition {name!r}", hint=hint)
    found = Declared("Slurm")
    groups: dict[str, set[str]] = {name: set() for name in known if not wanted or name in wanted}
    for node in read:
        partitions = _list(node.get("Partitions"))
        if wanted and not wanted & set(partitions):
            continue
        name = node["NodeName"]
        _node(found, name, node)
        for group in (*partitions, *_features(node), *_states(node.get("State", ""))):
            groups.setdefault(group, set()).add(name)
    for group, members in sorted(groups.items()):
        found.group(group, frozenset(members))
    return found


def _fields(line: str) -> dict[str, str]:
    """`Key=value` of one node. A reason may hold anything, so the first of each key counts."""
    parts = _FIELD.split(line)
    found: dict[str, str] = {}
    for key, value in zip(parts[1::2], parts[2::2], strict=True):
        found.setdefault(key, value.strip())
    return found


def _node(found: Declared, name: str, node: Mapping[str, str]) -> None:
    address = next((node[key] for key in ("NodeAddr", "NodeHostName") if _said(node, key)), name)
    variables: dict[str, Json] = {"slurm_state": "+".join(_tokens(node.get("State", ""))).lower()}
    variables |= {f"slurm_{key.lower()}": node[key] for key in ("Reason", "Gres") if _said(node, key)}
    found.host(name, {"address": address}, variables)


def _said(node: Mapping[str, str], key: str) -> bool:
    return node.get(key, "") not in _NOTHING


def _list(text: str | None) -> list[str]:
    return [part for part in (text or "").split(",") if part not in _NOTHING]


def _features(node: Mapping[str, str]) -> list[str]:
    return [
        f"feature:{name}" for name in _list(node.get("ActiveFeatures") or node.get("AvailableFeatures"))
    ]


def _tokens(state: str) -> list[str]:
    """`DOWN*+DRAIN` as words: DOWN, NOT_RESPONDING, DRAIN."""
    found: list[str] = []
    for part in state.upper().split("+"):
        word = part.rstrip("".join(_SUFFIXES))
        found += [word, *(_SUFFIXES[mark] for mark in part[len(word) :])]
    return [word for word in dict.fromkeys(found) if word]


def _states(state: str) -> Iterator[str]:
    """The groups of a state. Idle is only what could take a job now."""
    words = set(_tokens(state))
    groups = [
        name
        for name, these in (("off", _OFF), ("down", _DOWN), ("drain", _DRAIN), ("alloc", _ALLOC))
        if words & these
    ]
    if not groups and "IDLE" in words and not words & _NOT_NOW:
        groups = ["idle"]
    yield from (f"state:{name}" for name in groups)
