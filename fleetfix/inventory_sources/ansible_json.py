"""The JSON that Ansible's inventories speak: `--list` of a program, or of `ansible-inventory`.

Groups give their variables to their hosts as in Ansible: outer groups first, of equal depth by
`ansible_group_priority`, then by name; the host's own win.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetfix.commands import Json
from fleetfix.domain.masking import NAME
from fleetfix.errors import InventoryError
from fleetfix.inventory_sources.ansible_words import Words
from fleetfix.inventory_sources.declared import Declared

_SECRET = re.compile(NAME, re.I)
_TEMPLATE = re.compile(r"\{\{|\{%")


@dataclass
class Group:
    """One group as it is written."""

    hosts: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    vars: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Listed:
    """A whole answer to `--list`."""

    groups: Mapping[str, Group]
    hostvars: Mapping[str, Mapping[str, Json]] | None
    """None where the program has no `_meta` and must be asked for each host."""

    def hosts(self) -> tuple[str, ...]:
        """Every host that is in a group, as first written."""
        return tuple(dict.fromkeys(name for group in self.groups.values() for name in group.hosts))


def parse(text: str, source: str) -> Listed:
    """Read an answer; InventoryError says what of it is not as Ansible has it."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "an inventory program answers --list with one JSON object and nothing else"
        raise InventoryError(f"{source} is not JSON: {error}", hint=hint) from None
    if not isinstance(data, dict):
        raise InventoryError(f"{source} is not a JSON object of groups")
    meta = data.pop("_meta", None)
    hostvars = meta.get("hostvars") if isinstance(meta, dict) else None
    if hostvars is not None and not _is_mapping_of_mappings(hostvars):
        raise InventoryError(f"{source}: _meta.hostvars is not an object of objects")
    return Listed({name: _group(name, value, source) for name, value in data.items()}, hostvars)


def looks_like(text: str) -> bool:
    """Whether a file is such an answer that was saved; our own files have no `all` and no `_meta`."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and bool({"_meta", "all"} & set(data))


def declared(listed: Listed, kind: str) -> Declared:
    """Hosts and groups in our words, each with what holds for it."""
    return _Reader(listed, Declared(kind)).read()


def _is_mapping_of_mappings(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(one, dict) for one in value.values())


def _group(name: str, value: Any, source: str) -> Group:
    if isinstance(value, list):
        value = {"hosts": value}
    elif isinstance(value, dict) and value and not {"hosts", "children", "vars"} & set(value):
        # An old form: a host by itself, with its variables.
        value = {"hosts": [name], "vars": value}
    if not isinstance(value, dict):
        raise InventoryError(f"{source}: group {name!r} is neither an object nor a list of hosts")
    hosts, children, variables = (value.get(key) or () for key in ("hosts", "children", "vars"))
    for key, names in (("hosts", hosts), ("children", children)):
        if not isinstance(names, list | tuple | dict) or not all(isinstance(one, str) for one in names):
            raise InventoryError(f"{source}: {key} of group {name!r} are not a list of names")
    if variables and not isinstance(variables, dict):
        raise InventoryError(f"{source}: vars of group {name!r} are not an object")
    return Group(tuple(hosts), tuple(children), dict(variables))


class _Reader:
    def __init__(self, listed: Listed, into: Declared) -> None:
        self.listed = listed
        self.into = into
        self.words = Words(into)
        self.groups = {"all": Group(), **listed.groups}
        self.depth = self._depths()
        self._members: dict[str, frozenset[str]] = {}
        self._inherited: dict[tuple[str, ...], dict[str, Json]] = {}

    def read(self) -> Declared:
        hosts = self.listed.hosts()
        every = frozenset(hosts)
        of_host: dict[str, list[str]] = {host: [] for host in hosts}
        order = sorted(self.groups, key=lambda name: (self.depth[name], self._priority(name), name))
        for name in order:
            members = every if name == "all" else self._hosts_in(name)
            for host in members:
                of_host[host].append(name)
            if name != "ungrouped" or members:
                self.into.group(name, members)
        hostvars = self.listed.hostvars or {}
        for host in hosts:
            self._host(host, {**self._inherits(tuple(of_host[host])), **hostvars.get(host, {})})
        for host in hostvars.keys() - every:
            self.into.remark("variables of a host in no group", "Ansible does not know it either", host)
        return self.into

    def _host(self, name: str, said: Mapping[str, Json]) -> None:
        variables: dict[str, Json] = {}
        for key, value in said.items():
            if key.startswith("ansible_"):
                continue
            if isinstance(value, dict) and "__ansible_vault" in value:
                self.into.remark(key, "encrypted by Ansible Vault", name)
            elif _SECRET.fullmatch(key):
                self.into.remark(key, "by its name a secret: an inventory of fleetfix holds none", name)
            else:
                variables[key] = value
                if _has_template(value):
                    self.into.remark(key, "a template of Ansible: kept as it is written", name)
        self.into.host(name, self.words.settings(name, said), variables)

    def _inherits(self, groups: tuple[str, ...]) -> dict[str, Json]:
        if groups not in self._inherited:
            merged: dict[str, Json] = {}
            for group in groups:
                merged |= self.groups[group].vars
            self._inherited[groups] = merged
        return self._inherited[groups]

    def _priority(self, name: str) -> int:
        said = self.groups[name].vars.get("ansible_group_priority", 1)
        try:
            return int(said)
        except (TypeError, ValueError):
            return 1

    def _depths(self) -> dict[str, int]:
        """How far each group is inside others: `all` 0, those in no other 1."""
        depth = {name: int(name != "all") for name in self.groups}
        for _ in range(len(self.groups) + 1):
            deeper = {
                child: depth[name] + 1
                for name, group in self.groups.items()
                for child in group.children
                if child in depth and depth[child] <= depth[name]
            }
            if not deeper:
                return depth
            depth |= deeper
        raise InventoryError(f"group {next(iter(deeper))!r} is inside itself")

    def _hosts_in(self, name: str) -> frozenset[str]:
        if name not in self._members:
            group = self.groups[name]
            found = frozenset(group.hosts)
            for child in group.children:
                if child in self.groups:
                    found |= self._hosts_in(child)
                else:
                    self.into.remark(f"group {child!r} inside {name!r}", "nothing says what is in it")
            self._members[name] = found
        return self._members[name]


def _has_template(value: Json) -> bool:
    if isinstance(value, str):
        return bool(_TEMPLATE.search(value))
    if isinstance(value, dict):
        return any(map(_has_template, value.values()))
    return isinstance(value, list) and any(map(_has_template, value))
