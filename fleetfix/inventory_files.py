"""Inventory files as settings: who is declared, in which groups, with what, and where it is written.

    vars: {cuda: "12"}              # of every host; user, port, become … may stand here too
    hosts:
      gpu[01-16]: {user: ml}        # one entry for many hosts; a host's own entry wins over it
      gpu07: {vars: {min_tok_s: 150}}
    groups:
      train: {hosts: "gpu[01-08]", vars: {venv: /opt/train/venv}}
      all-gpus: {children: [train]}

From weak to strong: the file's top level, outer groups, inner groups, an entry of many hosts, an entry
of one. Two of equal strength that say different things are a complaint, never a matter of order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fleetfix.commands import Json, Seconds, Value
from fleetfix.complaints import Place, check, keys_of, like
from fleetfix.documents import Document
from fleetfix.errors import PatternError
from fleetfix.folders import expanded
from fleetfix.hostset import HostSet
from fleetfix.scalars import written
from fleetfix.spelling import hint_for

Transport = Literal["asyncssh", "fabric", "local", "scripted"]
Address = Annotated[str, *like(r"[A-Za-z0-9_\[][^\s'\"`$\\;|&<>]*", "an address: a name or IP")]
UserName = Annotated[str, *like(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*\$?", "a user name")]
PythonPath = Annotated[
    str, *like(r"/[A-Za-z0-9_./+-]+", "an absolute path of letters, digits and _ . / + -")
]
Port = Annotated[int, Field(ge=1, le=65535)]


class Settings(Value):
    """What an entry may say of hosts; what is not said stays as it was."""

    address: Address | None = None
    port: Port | None = None
    user: UserName | None = None
    transport: Transport | None = None
    via: Address | None = None
    become: bool | None = None
    connect_timeout: Annotated[Seconds, Field(gt=0)] | None = None
    python: PythonPath | None = None
    ssh_config: str | None = None
    key_file: str | None = None
    vars: dict[str, Json] | None = None


class GroupEntry(Settings):
    """A group: hosts of its own, other groups inside it, and what holds for all of them."""

    hosts: Json = None
    children: tuple[str, ...] | str = ()


class FileEntry(Settings):
    """A whole file."""

    hosts: Json = None
    groups: dict[str, Json] | None = None


FILE_KEYS = frozenset(keys_of(FileEntry))
_KEYS = frozenset(keys_of(Settings))
_FOREIGN = {
    "steps": "this looks like a playbook, not an inventory",
    "ansible_host": "write `address`",
    "ansible_user": "write `user`",
    "ansible_port": "write `port`",
    "ansible_become": "write `become`",
    "ansible_python_interpreter": "write `python`",
    "ansible_ssh_private_key_file": "write `key_file`",
}


@dataclass(frozen=True)
class Layer:
    """Settings that one entry gives: flat, `vars.x` for a variable; and where it stands."""

    values: Mapping[str, Json]
    where: str


@dataclass
class Group:
    """One group, gathered from every file that speaks of it."""

    hosts: set[str] = field(default_factory=set)
    children: dict[str, str] = field(default_factory=dict)
    """Name of an inner group -> where it is written."""
    layers: list[Layer] = field(default_factory=list)


@dataclass
class Gathered:
    """Everything the files of one inventory say."""

    top: list[Layer] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    many: dict[str, list[Layer]] = field(default_factory=dict)
    """Host -> entries that name several hosts."""
    single: dict[str, list[Layer]] = field(default_factory=dict)
    """Host -> entries that name it alone."""
    names: dict[str, None] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def read(self, document: Document, folder: Path) -> None:
        """Take in one file; relative paths in it start at `folder`."""
        _FileReader(self, document, folder).read()


@dataclass
class _FileReader:
    gathered: Gathered
    document: Document
    folder: Path

    def read(self) -> None:
        self.gathered.complaints += self.document.problems
        value = self.document.value
        entry = self._entry(FileEntry, value, ())
        if entry is not None:
            self._add_layer(self.gathered.top, entry, ())
        # A file with a wrong key is still read on: its author gets all complaints at once.
        self._hosts(_part(value, "hosts"), ("hosts",), None)
        groups = _part(value, "groups")
        for name, inner in groups.items() if isinstance(groups, dict) else ():
            self._group(name, inner, ("groups", name))

    def _complain(self, place: Place, message: str) -> None:
        self.gathered.complaints.append(self.document.complaint(place, message))

    def _entry(self, model: type[Any], value: Any, place: Place) -> Any:
        made, complaints = check(model, {} if value is None else value)
        for inner, message in complaints:
            hint = _FOREIGN.get(str(inner[-1])) if inner else None
            if (
                message.startswith("unknown key")
                and hint is None
                and "did you mean" not in message
                and place
            ):
                hint = "a variable goes under vars:"
            # What another tool's word means says more than a word of ours that looks like it.
            said = message.partition(", did you mean")[0] if hint else message
            self._complain((*place, *inner), f"{said}: {hint}" if hint else said)
        return made

    def _add_layer(self, layers: list[Layer], entry: Settings, place: Place) -> None:
        where = f"{self.document.name}:{self.document.line(place)}"
        values = dict(self._flat(entry, place))
        if values:
            layers.append(Layer(values, where))

    def _flat(self, entry: Settings, place: Place) -> Iterator[tuple[str, Json]]:
        for key in entry.model_fields_set & _KEYS:
            value = getattr(entry, key)
            if key == "vars":
                yield from ((f"vars.{name}", item) for name, item in (value or {}).items())
            elif key in ("ssh_config", "key_file") and value is not None:
                yield key, self._file(value, key, place)
            else:
                yield key, value

    def _file(self, text: str, key: str, place: Place) -> str:
        path = self.folder / expanded(text)
        if not path.is_file():
            self._complain((*place, key), f"{key}: there is no file {path}")
        return str(path.absolute())

    def _group(self, name: str, value: Any, place: Place) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            self._complain(place, f"{name!r} cannot name a group: letters, digits, _ . -")
        group = self.gathered.groups.setdefault(name, Group())
        entry = self._entry(GroupEntry, value, place)
        if entry is not None:
            self._group_settings(group, entry, place)
        self._hosts(_part(value, "hosts"), (*place, "hosts"), group)

    def _group_settings(self, group: Group, entry: GroupEntry, place: Place) -> None:
        self._add_layer(group.layers, entry, place)
        if entry.address is not None:
            self._complain((*place, "address"), "address: a group of hosts has no address of its own")
        children = (entry.children,) if isinstance(entry.children, str) else entry.children
        where = f"{self.document.name}:{self.document.line((*place, 'children'))}"
        group.children.update(dict.fromkeys(children, where))

    def _hosts(self, value: Any, place: Place, group: Group | None) -> None:
        if isinstance(value, dict):
            for pattern, settings in value.items():
                self._declare(pattern, settings, (*place, pattern), group)
        elif isinstance(value, list):
            for index, pattern in enumerate(value):
                self._declare(pattern, None, (*place, index), group)
        elif value is not None:
            self._declare(value, None, place, group)

    def _declare(self, pattern: Any, settings: Any, place: Place, group: Group | None) -> None:
        text = written(pattern)
        if text is None:
            self._complain(place, "wanted host names such as gpu[01-16]; settings go in a mapping of names")
            return
        names = self._names(text, place)
        self.gathered.names.update(dict.fromkeys(names))
        if group is not None:
            group.hosts.update(names)
        if settings is not None:
            self._settings_of(tuple(names), settings, place)

    def _names(self, text: str, place: Place) -> HostSet:
        if "@" in text or "*" in text:
            self._complain(place, f"{text}: name hosts here; a group takes in others by `children`")
            return HostSet()
        try:
            names = HostSet.parse(text)
        except PatternError as error:
            hint = f" ({error.hint})" if error.hint else ""
            self._complain(place, f"{text}: {error.message} at character {error.column + 1}{hint}")
            return HostSet()
        if not names:
            self._complain(place, "a host name is missing")
        return names

    def _settings_of(self, names: tuple[str, ...], settings: Any, place: Place) -> None:
        entry = self._entry(Settings, settings, place)
        if entry is None:
            return
        layers: list[Layer] = []
        self._add_layer(layers, entry, place)
        if entry.address is not None and len(names) > 1:
            self._complain((*place, "address"), f"address: {len(names)} hosts cannot share one address")
        side = self.gathered.single if len(names) == 1 else self.gathered.many
        for name in names:
            side.setdefault(name, []).extend(layers)


def _part(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


# -- what holds for a host --------------------------------------------------------------------------


class Merger:
    """Puts together what all entries say of each host."""

    def __init__(self, gathered: Gathered) -> None:
        self.gathered = gathered
        self.complaints: list[str] = []
        self.groups = self._memberships()
        self.inside = {name: self._inner_groups(name) for name in gathered.groups}
        self._of_host: dict[str, list[str]] = {}
        for name, members in self.groups.items():
            for host in members:
                self._of_host.setdefault(host, []).append(name)
        self._bases: dict[tuple[str, ...], tuple[dict[str, Json], dict[str, str]]] = {}
        self._top = self._merge(gathered.top, "every host", {})

    def settings(self, host: str) -> dict[str, Json]:
        """All that holds for one host: settings by name, and `vars`."""
        base, doubts = self._base(tuple(self._of_host.get(host, ())))
        merged = dict(base)
        own: dict[str, Json] = {}
        for side in (self.gathered.single, self.gathered.many):
            own = {**self._merge(side.get(host, ()), host, own), **own}
        merged |= own
        self.complaints += [f"{text} for {host}" for key, text in doubts.items() if key not in own]
        flat = {key: value for key, value in merged.items() if not key.startswith("vars.")}
        return {
            **flat,
            "vars": {key[5:]: value for key, value in merged.items() if key.startswith("vars.")},
        }

    def _merge(self, layers: Iterable[Layer], what: str, stronger: Mapping[str, Json]) -> dict[str, Json]:
        """Entries of equal strength as one; a contradiction that nothing stronger settles complains."""
        merged: dict[str, Json] = {}
        origin: dict[str, str] = {}
        for layer in layers:
            for key, value in layer.values.items():
                if key in merged and _differ(merged[key], value) and key not in stronger:
                    self.complaints.append(
                        f"{layer.where}: {key} of {what} is another one in {origin[key]}"
                    )
                merged[key] = value
                origin[key] = layer.where
        return merged

    def _base(self, names: tuple[str, ...]) -> tuple[dict[str, Json], dict[str, str]]:
        """What the top level and these groups give, and the keys on which groups disagree."""
        if names not in self._bases:
            self._bases[names] = self._base_of(names)
        return self._bases[names]

    def _base_of(self, names: tuple[str, ...]) -> tuple[dict[str, Json], dict[str, str]]:
        merged, doubts = dict(self._top), {}
        values = {name: self._merge(self.gathered.groups[name].layers, f"@{name}", {}) for name in names}
        for key in dict.fromkeys(key for name in names for key in values[name]):
            sayers = [name for name in names if key in values[name]]
            # An inner group speaks for its own hosts with more right than the groups around it.
            nearest = [name for name in sayers if not self.inside[name] & set(sayers)]
            merged[key] = values[nearest[-1]][key]
            other = next((name for name in nearest if _differ(values[name][key], merged[key])), None)
            if other is not None:
                where = self.gathered.groups[nearest[-1]].layers[0].where
                doubts[key] = f"{where}: groups {other} and {nearest[-1]} say different {key}"
        return merged, doubts

    # -- groups in groups ---------------------------------------------------------------------

    def _memberships(self) -> dict[str, frozenset[str]]:
        done: dict[str, frozenset[str]] = {}
        for name in self.gathered.groups:
            self._members(name, done, ())
        return done

    def _members(
        self, name: str, done: dict[str, frozenset[str]], around: tuple[str, ...]
    ) -> frozenset[str]:
        if name in done:
            return done[name]
        group = self.gathered.groups[name]
        found = frozenset(group.hosts)
        for child, where in group.children.items():
            if child not in self.gathered.groups:
                hint = hint_for(child, self.gathered.groups)
                self.complaints.append(f"{where}: unknown group {child!r}" + (f", {hint}" if hint else ""))
            elif child in (*around, name):
                self.complaints.append(f"{where}: group {child} is inside itself")
            else:
                found |= self._members(child, done, (*around, name))
        done[name] = found
        return found

    def _inner_groups(self, name: str) -> frozenset[str]:
        found: set[str] = set()
        queue = list(self.gathered.groups[name].children)
        while queue:
            child = queue.pop()
            if child in self.gathered.groups and child not in found and child != name:
                found.add(child)
                queue += self.gathered.groups[child].children
        return frozenset(found)


def _differ(one: Json, other: Json) -> bool:
    return bool(one != other or written(one) != written(other))
