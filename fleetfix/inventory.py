"""Hosts and groups, and where they are declared: a file, a folder, or the command line itself."""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pydantic import Field

from fleetfix.commands import Json, Value
from fleetfix.documents import Document, parse, refuse, text_of
from fleetfix.errors import DocumentError, InventoryError, PatternError
from fleetfix.folders import config_folder
from fleetfix.hostset import HostSet
from fleetfix.inventory_files import Address, Gathered, Merger, Port, PythonPath, Transport, UserName
from fleetfix.spelling import hint_for_file

VARIABLE = "FLEETFIX_INVENTORY"
Patterns = str | Iterable[str]
"""One host pattern, or several whose hosts are taken together."""


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
    python: PythonPath | None = None
    ssh_config: str | None = None
    """An ssh configuration file used for this host beside the user's own."""
    vars: dict[str, Json] = Field(default_factory=dict)
    """Variables for playbooks: of the file, its groups and the host, the nearest winning."""


@dataclass(frozen=True)
class Inventory:
    """Every host that may be named, and the groups they are in."""

    source: str
    digest: str
    hosts: Mapping[str, Host]
    groups: Mapping[str, HostSet]

    @classmethod
    def load(
        cls,
        spec: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        named: Mapping[str, Path] | None = None,
    ) -> Inventory:
        """Load what `-i` says, or the first of the usual places; `named` gives names such as `lab`.

        `gpu[01-03],` (with a comma) names the hosts itself. InventoryError and DocumentError say
        what is missing, doubtful or wrong; nothing is ever skipped silently.
        """
        here = Path.cwd() if cwd is None else cwd
        settings = os.environ if env is None else env
        if spec is None:
            return _from_usual_place(settings, here, named or {})
        return _from_spec(spec, here, named or {})

    def select(self, pattern: Patterns, exclude: Patterns = ()) -> tuple[Host, ...]:
        """The hosts of one pattern or several, without those of others, in natural order; never none."""
        known = HostSet(self.hosts)
        wanted, unwanted = _many(pattern), _many(exclude)
        if not all(text.strip() for text in wanted):
            raise InventoryError(
                "no hosts are named", hint=f"--hosts 'PATTERN', or --hosts '*' for all {len(known)}"
            )
        if not all(text.strip() for text in unwanted):
            # An empty shell variable must not turn "all but these" into "all".
            raise InventoryError("--exclude names no hosts", hint="leave it out where none are meant")
        kept = self._named(wanted) - self._named(unwanted)
        if not kept:
            raise InventoryError(
                f"{', '.join(map(repr, wanted))} leaves no host",
                hint=f"{', '.join(unwanted)} is taken out" if unwanted else "",
            )
        return tuple(self.hosts[name] for name in kept)

    def _named(self, patterns: tuple[str, ...]) -> HostSet:
        """The union of several patterns, each read by itself."""
        known = HostSet(self.hosts)
        found = HostSet()
        for pattern in patterns:
            try:
                found |= HostSet.parse(pattern, known=known, groups=self.groups)
            except PatternError as error:
                raise self._placed(error) from None
        return found

    def _placed(self, error: PatternError) -> PatternError:
        """The error of a name that is not known, with the inventory that does not know it."""
        if not error.message.startswith(("unknown", "no host matches")):
            return error
        named = str(HostSet(self.hosts))
        where = f"{self.source} has {named if len(named) <= 60 else f'{len(self.hosts)} other hosts'}"
        return PatternError(
            error.message,
            pattern=error.pattern,
            column=error.column,
            hint=f"{error.hint.rstrip('.')}; {where}" if error.hint else where,
        )


def _many(pattern: Patterns) -> tuple[str, ...]:
    return (pattern,) if isinstance(pattern, str) else tuple(pattern)


# -- where to look ----------------------------------------------------------------------------------


def _from_spec(spec: str, here: Path, named: Mapping[str, Path]) -> Inventory:
    if "," in spec:
        return _from_names(spec)
    if spec in named:
        if not _exists(named[spec]):
            hint = "make it with: fleetfix lab up --hosts 'gpu[01-03]'" if spec == "lab" else ""
            raise InventoryError(f"there is no inventory {spec} now", hint=hint)
        return _from_path(named[spec], spec, str(named[spec]))
    if not spec.strip():
        raise InventoryError("-i names no inventory", hint="leave it out for the usual places")
    path = here / Path(spec).expanduser()
    if not _exists(path):
        raise InventoryError(f"there is no inventory {spec!r}", hint=_hint_for_missing(spec, path))
    return _from_path(path, spec)


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
    if "/" in spec or spec.endswith((".yaml", ".yml")):
        return f"looked for in {path.parent}"
    return f"to name hosts here, end with a comma: -i '{spec},'"


def _from_usual_place(env: Mapping[str, str], here: Path, named: Mapping[str, Path]) -> Inventory:
    if spec := env.get(VARIABLE):
        try:
            return _from_spec(spec, here, named)
        except InventoryError as error:
            raise InventoryError(f"${VARIABLE}: {error.message}", hint=error.hint) from None
    local = here / "inventory"
    if _exists(local):
        _require_trust(local)
        return _from_path(local, "./inventory")
    for path in _configured(env):
        if _exists(path):
            return _from_path(path, str(path))
    raise InventoryError(
        "no inventory: nothing says which hosts there are",
        hint=f"-i FILE, -i 'gpu[01-16],', ${VARIABLE}, ./inventory or {_configured(env)[0]}",
    )


def _configured(env: Mapping[str, str]) -> tuple[Path, ...]:
    folder = config_folder(env)
    return (folder / "inventory", folder / "inventory.yaml", folder / "inventory.yml")


def _require_trust(path: Path) -> None:
    """A ./inventory counts only if nobody else could have put it there."""
    for each in (path, *_files_of(path)):
        reason = _distrust(each)
        if reason:
            raise InventoryError(
                f"./{each.relative_to(path.parent)} is not used: {reason}",
                hint="say -i ./inventory if you trust it",
            )


def _distrust(path: Path) -> str:
    try:
        status = path.stat()
    except OSError as error:
        return os.strerror(error.errno or 0).lower()
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to {_user_name(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _group_of_one(status)):
        return "others may write to it"
    return ""


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _group_of_one(status: os.stat_result) -> bool:
    """Whether the file's group is the private group of its owner, as most systems give each user."""
    try:
        group, owner = grp.getgrgid(status.st_gid), pwd.getpwuid(status.st_uid)
    except KeyError:
        return False
    return (
        status.st_gid == owner.pw_gid
        and group.gr_name == owner.pw_name
        and not set(group.gr_mem) - {owner.pw_name}
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


def _from_path(path: Path, source: str, shown: str = "") -> Inventory:
    files = _files_of(path)
    if not files:
        raise InventoryError(f"{source}: no *.yaml or *.yml in this folder")
    names = [os.path.normpath(os.path.join(shown or source, file.relative_to(path))) for file in files]
    texts = [text_of(file, name) for file, name in zip(files, names, strict=True)]
    gathered = Gathered()
    for file, name, text in zip(files, names, texts, strict=True):
        document = _parsed(text, name, gathered)
        if document is not None:
            gathered.read(document, file.parent)
    hosts, groups = _hosts_and_groups(gathered)
    if not hosts:
        raise InventoryError(f"{source}: no host is declared")
    digest = _digest(zip((file.name for file in files), texts, strict=True))
    return Inventory(source, digest, MappingProxyType(hosts), MappingProxyType(groups))


def _files_of(path: Path) -> tuple[Path, ...]:
    if not path.is_dir():
        return (path,)
    for name in ("group_vars", "host_vars"):
        if (path / name).is_dir():
            raise InventoryError(
                f"{path / name}: not read", hint="write vars under groups: or hosts: in a file"
            )
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
