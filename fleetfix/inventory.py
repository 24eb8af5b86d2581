"""Hosts and groups, and where they are declared: a file, a folder, the command line, another tool.

What `-i` and $FLEETFIX_INVENTORY take:

    FILE, FOLDER            YAML of ours; names, one a line; Ansible's INI and YAML, which ansible-inventory
                            reads, its saved answer, or a program that answers --list as Ansible has it
    'gpu[01-16],'           the hosts themselves       lab                   the lab
    ansible:PATH            by ansible-inventory       slurm:[PARTITION]     Slurm's nodes
    clustershell:[SOURCE]   ClusterShell's groups      ssh-config:[FILE]     hosts of an ssh configuration
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from pydantic import Field

from fleetfix.commands import Json, Seconds, Value
from fleetfix.documents import Document, parse, refuse, text_of
from fleetfix.errors import DocumentError, InventoryError, PatternError
from fleetfix.folders import config_folder, expanded
from fleetfix.hostset import HostSet
from fleetfix.inventory_files import (
    FILE_KEYS,
    Address,
    Gathered,
    Merger,
    Port,
    PythonPath,
    Transport,
    UserName,
)
from fleetfix.inventory_sources.declared import Declared
from fleetfix.inventory_sources.trust import distrust, open_to_all
from fleetfix.selection import Choice, History, Patterns
from fleetfix.spelling import hint_for, hint_for_file

VARIABLE = "FLEETFIX_INVENTORY"
DEADLINE = 120.0
"""Seconds that a program which tells of hosts may take."""
OF_A_TOOL = ("ansible", "slurm", "clustershell", "ssh-config")
"""What may stand before the colon of `-i`."""


class Host(Value):
    """One host: how to reach it, and its variables. Complete when loaded; holds no secret."""

    name: str
    address: Address
    port: Port | None = None
    user: UserName | None = None
    transport: Transport = "asyncssh"
    via: Address | None = None
    """A jump host, as ssh's ProxyJump."""
    become: bool = False
    """Work as root, by sudo."""
    connect_timeout: Seconds | None = None
    """How long the host may take to answer, in seconds, before it is unreachable."""
    python: PythonPath | None = None
    ssh_config: str | None = None
    """An ssh configuration file used for this host beside the user's own."""
    key_file: str | None = None
    """A private key that logs in, as `ssh -i`; else ssh's configuration and the agent say which."""
    vars: dict[str, Json] = Field(default_factory=dict)
    """Variables for playbooks: of the file, its groups and the host, the nearest winning."""


@dataclass(frozen=True)
class Remark:
    """Something of an inventory that was not taken, why, and the hosts that it was said of, if any."""

    what: str
    why: str
    hosts: HostSet


@dataclass(frozen=True)
class Inventory:
    """Every host that may be named, and the groups they are in."""

    source: str
    digest: str
    hosts: Mapping[str, Host]
    groups: Mapping[str, HostSet]
    kind: str = ""
    """Whose inventory it is where it is not one of ours: `Slurm`."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Hosts that cannot be reached as the source wants it, and why: choosing one is an error."""
    remarks: tuple[Remark, ...] = ()
    history: History | None = field(default=None, compare=False)
    """What `@failed:RUN` asks; without it there are no such groups."""

    @classmethod
    def load(
        cls,
        spec: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        named: Mapping[str, Path] | None = None,
        deadline: float = DEADLINE,
    ) -> Inventory:
        """Load what `-i` says, or the first of the usual places; `named` gives names such as `lab`.

        `gpu[01-03],` (with a comma) names the hosts itself. A program is run only where it is named,
        and for at most `deadline` seconds. InventoryError and DocumentError say what is missing,
        doubtful or wrong; nothing is ever skipped silently.
        """
        here = Path.cwd() if cwd is None else cwd
        settings = os.environ if env is None else env
        place = _Place(here, named or {}, settings, deadline)
        return _from_usual_place(place) if spec is None else _from_spec(spec, place)

    def select(self, pattern: Patterns, exclude: Patterns = ()) -> tuple[Host, ...]:
        """The hosts of one pattern or several, without those of others, in natural order; never none."""
        chosen = self.chosen(pattern, exclude)
        if refused := HostSet(chosen.names & self.refused.keys()):
            why = self.refused[next(iter(refused))]
            alike = HostSet(name for name in refused if self.refused[name] == why)
            raise InventoryError(f"{alike}: {why}", hint=f"leave out by -x '{refused}'")
        return tuple(self.hosts[name] for name in chosen)

    def chosen(self, pattern: Patterns, exclude: Patterns = ()) -> HostSet:
        """The names that `select` takes, also of hosts that cannot be reached as the source wants it."""
        known = HostSet((*self.hosts, *self.refused))
        return Choice(self.source, known, self.groups, self.history).chosen(pattern, exclude)


# -- where to look ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where inventories are looked for, and how long they may take."""

    here: Path
    named: Mapping[str, Path]
    env: Mapping[str, str]
    deadline: float

    def path(self, text: str) -> Path:
        return self.here / expanded(text)


def _from_spec(spec: str, place: _Place) -> Inventory:
    kind, colon, rest = spec.partition(":")
    if colon and kind in OF_A_TOOL:
        return _of_a_tool(spec, kind, rest.strip(), place)
    if "," in spec:
        return _from_names(spec)
    if spec in place.named:
        path = place.named[spec]
        if not _exists(path):
            hint = "make it with: fleetfix lab up --hosts 'gpu[01-03]'" if spec == "lab" else ""
            raise InventoryError(f"there is no inventory {spec} now", hint=hint)
        return _from_path(path, spec, str(path), place=place)
    if not spec.strip():
        raise InventoryError("-i names no inventory", hint="leave it out for the usual places")
    path = place.path(spec)
    if not _exists(path):
        raise InventoryError(f"there is no inventory {spec!r}", hint=_hint_for_missing(spec, path))
    found = _from_path(path, spec, place=place)
    for each in (path, *_files_of(path)):
        if why := open_to_all(each):
            raise InventoryError(
                f"{each} is not used: {why}", hint="it says where to log in, and how: chmod o-w"
            )
    return found


def _of_a_tool(spec: str, kind: str, rest: str, place: _Place) -> Inventory:
    """An inventory of `KIND:` or `KIND:WHAT`."""
    path = place.path(rest) if rest else None
    if kind == "slurm":
        from fleetfix.inventory_sources import slurm

        return _from_declared(slurm.nodes(rest, place.deadline), spec)
    if kind == "clustershell":
        from fleetfix.inventory_sources import clustershell

        return _from_declared(clustershell.groups(rest, place.deadline, place.env), spec)
    if kind == "ssh-config":
        from fleetfix.inventory_sources import ssh_hosts

        return _from_declared(ssh_hosts.hosts(path), spec)
    if path is None or not _exists(path):
        hint = _hint_for_missing(rest, path) if path else "ansible:PATH, a file or folder of Ansible"
        raise InventoryError(f"there is no inventory {spec!r}", hint=hint)
    from fleetfix.inventory_sources import ansible

    return _from_declared(ansible.through_tool(path, rest, place.deadline), spec)


def _exists(path: Path) -> bool:
    """Whether there is something; one that cannot be looked at is never passed over."""
    try:
        return path.exists()
    except PermissionError:
        raise InventoryError(f"{path}: permission denied") from None
    except (OSError, ValueError):  # a name that no file can have
        return False


def _hint_for_missing(spec: str, path: Path) -> str:
    beside: list[str] = []
    with contextlib.suppress(OSError):
        beside = [one.name for one in path.parent.iterdir()]
    if near := hint_for_file(path.name, beside):
        return near
    head, colon, _ = spec.partition(":")
    if spec in OF_A_TOOL:
        return f"a colon belongs to it: -i {spec}:"
    if near := hint_for(head, OF_A_TOOL):
        return near.replace("?", ":?")
    if colon and head.isalpha():
        return f"before a colon stands one of {', '.join(OF_A_TOOL)}"
    if "/" in spec or spec.endswith((".yaml", ".yml")):
        return f"looked for in {path.parent}"
    return f"to name hosts here, end with a comma: -i '{spec},'"


def _from_usual_place(place: _Place) -> Inventory:
    if spec := place.env.get(VARIABLE):
        try:
            return _from_spec(spec, place)
        except InventoryError as error:
            raise InventoryError(f"${VARIABLE}: {error.message}", hint=error.hint) from None
    local = place.here / "inventory"
    if _exists(local):
        _require_trust(local)
        return _from_path(local, "./inventory")
    for path in _configured(place.env):
        if _exists(path):
            return _from_path(path, str(path))
    raise InventoryError(
        "no inventory: nothing says which hosts there are",
        hint=f"-i FILE, -i 'gpu[01-16],', ${VARIABLE}, ./inventory or {_configured(place.env)[0]}; "
        f"or -i {':, '.join(OF_A_TOOL[1:])}:",
    )


def _configured(env: Mapping[str, str]) -> tuple[Path, ...]:
    folder = config_folder(env)
    return (folder / "inventory", folder / "inventory.yaml", folder / "inventory.yml")


def _require_trust(path: Path) -> None:
    """A ./inventory counts only if nobody else could have put it there."""
    for each in (path, *_files_of(path)):
        reason = distrust(each)
        if reason:
            raise InventoryError(
                f"./{each.relative_to(path.parent)} is not used: {reason}",
                hint="say -i ./inventory if you trust it",
            )


# -- reading ----------------------------------------------------------------------------------------


def _from_names(spec: str) -> Inventory:
    try:
        names = HostSet.parse(spec.strip().rstrip(","))
    except PatternError as error:
        raise PatternError(error.message, pattern=spec, column=error.column, hint=error.hint) from None
    if not names:
        raise InventoryError("the inventory names no host", hint="-i 'gpu[01-16],'")
    hosts = {name: Host(name=name, address=name) for name in names}
    return Inventory(spec, _digest([("", spec)]), MappingProxyType(hosts), MappingProxyType({}))


def _from_declared(found: Declared, source: str) -> Inventory:
    """What another tool says, as an inventory."""
    if not found.settings:
        raise InventoryError(f"{source}: no host is declared", hint=_first_remark(found))
    hosts = {
        name: Host(name=name, **{"address": name, **found.settings[name]})
        for name in HostSet(found.settings)
        if name not in found.refused
    }
    return Inventory(
        source,
        _digest([("", found.text())]),
        MappingProxyType(hosts),
        MappingProxyType({name: HostSet(members) for name, members in found.groups.items()}),
        kind=found.kind,
        refused=MappingProxyType(found.refused),
        remarks=tuple(Remark(*said, HostSet(names)) for said, names in found.remarks.items()),
    )


def _first_remark(found: Declared) -> str:
    return next((f"{what}: {why}" for what, why in found.remarks), "")


def _from_path(path: Path, source: str, shown: str = "", *, place: _Place | None = None) -> Inventory:
    """Read a file or folder. Without a place it was found, not named: then no program is run for it."""
    from fleetfix.inventory_sources import ansible, plain_names

    if ansible.is_program(path):
        _require_naming(source, "a program", place)
        return _from_declared(ansible.from_program(path, source, _time(place)), source)
    if ansible.is_folder(path):
        return _through_ansible(path, source, place)
    files = _files_of(path)
    if not files:
        raise InventoryError(
            f"{source}: no *.yaml or *.yml in this folder", hint=f"is it Ansible's? -i ansible:{source}"
        )
    names = [os.path.normpath(os.path.join(shown or source, file.relative_to(path))) for file in files]
    texts = [text_of(file, name) for file, name in zip(files, names, strict=True)]
    if ansible.is_answer(texts[0]):
        return _from_declared(ansible.from_text(texts[0], source), source)
    free = path.suffix not in (".yaml", ".yml")
    if free and plain_names.is_list(texts[0]):
        return _from_declared(plain_names.hosts(texts[0], names[0]), source)
    if free and ansible.is_ini(texts[0]):
        return _through_ansible(path, source, place)
    gathered = Gathered()
    for file, name, text in zip(files, names, texts, strict=True):
        document = _parsed(text, name, gathered)
        if document is None:
            continue
        if ansible.is_yaml(document.value, FILE_KEYS):
            return _through_ansible(path, source, place)
        if free and isinstance(document.value, str):
            raise DocumentError((plain_names.strange_line(text, name),))
        gathered.read(document, file.parent)
    hosts, groups = _hosts_and_groups(gathered)
    if not hosts:
        raise InventoryError(f"{source}: no host is declared")
    digest = _digest(zip((file.name for file in files), texts, strict=True))
    return Inventory(source, digest, MappingProxyType(hosts), MappingProxyType(groups))


def _through_ansible(path: Path, source: str, place: _Place | None) -> Inventory:
    from fleetfix.inventory_sources import ansible

    _require_naming(source, "an inventory of Ansible", place)
    return _from_declared(ansible.through_tool(path, source, _time(place)), source)


def _require_naming(source: str, what: str, place: _Place | None) -> None:
    """A program is run only for whoever named it, or what it reads."""
    if place is None:
        raise InventoryError(
            f"{source} is {what}, which is read only where it is named",
            hint=f"-i {source}, or {VARIABLE}={source}",
        )


def _time(place: _Place | None) -> float:
    return DEADLINE if place is None else place.deadline


def _files_of(path: Path) -> tuple[Path, ...]:
    if not path.is_dir():
        return (path,)
    try:
        found = [
            file for file in path.iterdir() if file.suffix in (".yaml", ".yml") and file.name[0] != "."
        ]
    except OSError as error:
        raise InventoryError(f"{path}: {os.strerror(error.errno or 0).lower()}") from error
    return tuple(sorted(found))


def _parsed(text: str, name: str, gathered: Gathered) -> Document | None:
    try:
        return parse(text, name)
    except DocumentError as error:
        gathered.complaints += error.complaints
        return None


def _hosts_and_groups(gathered: Gathered) -> tuple[dict[str, Host], dict[str, HostSet]]:
    refuse(gathered.complaints)
    merger = Merger(gathered)
    hosts = {name: _host(name, merger) for name in HostSet(gathered.names)}
    refuse(merger.complaints)
    return hosts, {name: HostSet(members) for name, members in merger.groups.items()}


def _host(name: str, merger: Merger) -> Host:
    settings = {key: value for key, value in merger.settings(name).items() if value is not None}
    return Host(name=name, **{"address": name, **settings})


def _digest(parts: Iterable[tuple[str, str]]) -> str:
    digest = hashlib.sha256()
    for name, text in parts:
        digest.update(f"{name}\0{len(text)}\0{text}\0".encode())
    return digest.hexdigest()
