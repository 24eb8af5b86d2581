"""Which hosts go together, and why: what ties a host to others, and the cohorts that come of it. Pure.

Hosts are tied by a job that runs on several of them, by a folder that they share, and by the word of the
inventory: the host variables `cohort: NAME`, and `shared_paths`, a list of folders or a mapping of each to
the name of what is mounted there.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

from fleetfix.action import Plan, Span
from fleetfix.commands import Change, Folder
from fleetfix.domain.file_systems import SHARED_FILE_SYSTEMS
from fleetfix.errors import InventoryError
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host

COHORT = "cohort"
SHARED = "shared_paths"


@dataclass(frozen=True)
class Ties:
    """What ties one host to others."""

    spans: tuple[Span, ...] = ()
    declared: str = ""
    """The cohort that the inventory says it is in."""
    formed: bool = False
    """It is `declared` by an earlier part of the run, and not by the inventory."""
    touched: tuple[tuple[str, Folder], ...] = ()
    """(what is shared, the folder on this host) of what its pending changes alter."""

    def __bool__(self) -> bool:
        return bool(self.spans or self.declared or self.touched)


@dataclass(frozen=True)
class Cohort:
    """Hosts that go together. `name` is what ties them, `why` says it in a sentence."""

    name: str
    hosts: tuple[str, ...]
    why: str
    spans: tuple[Span, ...] = ()
    shared: tuple[str, ...] = ()
    """What its members share and the run changes: changed once, by the first host that would."""
    declared: bool = False
    absent: str = ""
    """Why not all of its members take part, and what to do; empty where all do."""


# -- what the inventory says -----------------------------------------------------------------------


def declared_cohort(host: Host) -> str:
    """The name of the cohort that the inventory puts a host in; empty where in none."""
    name = host.vars.get(COHORT)
    if name is None:
        return ""
    if not isinstance(name, str) or not name.strip():
        raise InventoryError(f"{host.name}: {COHORT} is no name: {name!r}", hint=f"{COHORT}: llama3")
    return name.strip()


def shared_paths(host: Host) -> dict[str, str]:
    """{folder: what is mounted there} as the inventory says of a host. Raises InventoryError."""
    given = host.vars.get(SHARED)
    named = dict.fromkeys(given) if isinstance(given, list | tuple) else given
    if given is None or given == "":
        return {}
    if not isinstance(named, Mapping):
        raise _malformed(host, given)
    found = {}
    for path, source in named.items():
        if not isinstance(path, str) or not path.startswith("/") or not isinstance(source, str | None):
            raise _malformed(host, path)
        if ".." in path.split("/"):
            raise _malformed(host, path)  # what that leads to, a link may decide
        plain = "/" + posixpath.normpath(path).strip("/")
        found[plain] = (source or plain).rstrip("/") or "/"
    return found


def _malformed(host: Host, value: object) -> InventoryError:
    return InventoryError(
        f"{host.name}: {SHARED} takes absolute folders, not {value!r}", hint=f"{SHARED}: [/opt/train/venv]"
    )


def neighbours(hosts: Iterable[Host], selected: Iterable[Host]) -> tuple[Host, ...]:
    """The hosts of an inventory that are not selected and may be tied to some that are; checks them all."""
    chosen = {host.name for host in selected}
    tied = [host for host in hosts if any((declared_cohort(host), shared_paths(host)))]
    return tuple(host for host in tied if host.name not in chosen)


# -- what ties a host ------------------------------------------------------------------------------


def ties_of(host: Host, plans: Iterable[tuple[bool, Plan]]) -> Ties:
    """What ties a host to others, by its plans; of each it is said whether it is pending."""
    spans: dict[tuple[str, str], Span] = {}
    touched: dict[str, Folder] = {}
    for pending, plan in plans:
        spans |= {(span.id, span.at): span for span in plan.spans}
        for change in plan.changes if pending else ():
            touched |= dict(shared_of(host, change))
    return Ties(tuple(spans.values()), declared_cohort(host), touched=tuple(touched.items()))


def shared_of(host: Host, change: Change) -> list[tuple[str, Folder]]:
    """(what is shared, the folder) of each folder that a change alters and other hosts have too."""
    known = shared_paths(host)
    found = []
    for folder in change.folders:
        above = [path for path in known if within(folder.path, path)]
        if above:
            top = max(above, key=len)
            found.append((known[top].rstrip("/") + folder.path[len(top.rstrip("/")) :], folder))
    return found


def undeclared(host: Host, change: Change) -> Folder | None:
    """A folder that a change alters on a file system of the network, and nobody says who shares it."""
    known = shared_paths(host)
    return next(
        (
            folder
            for folder in change.folders
            if folder.filesystem in SHARED_FILE_SYSTEMS
            and not any(within(folder.path, path) for path in known)
        ),
        None,
    )


def why_undeclared(folder: Folder) -> str:
    """What to do about it."""
    return (
        f"{folder.path} is on {folder.filesystem} ({folder.source}), which other hosts may use too: "
        f"say in the inventory which do, by `{SHARED}: [{folder.path}]`, and it is changed once for all"
    )


def within(path: str, top: str) -> bool:
    """Whether a folder, or what is shared, is another or lies in it."""
    return path == top or path.startswith(top.rstrip("/") + "/")


# -- forming ---------------------------------------------------------------------------------------


def form(ties: Mapping[str, Ties], others: Iterable[Host]) -> tuple[Cohort, ...]:
    """The cohorts among the hosts of a run, by what ties them; hosts that nothing ties are in none.

    `others` are hosts of the inventory beside them. A job counts as whole when each of its nodes is a
    host of the run.
    """
    groups = _groups(ties)
    beside = tuple(others)
    found = []
    for members in groups:
        spans = {(span.id, span.at): span for name in members for span in ties[name].spans}
        shared = sorted({what for name in members for what, _ in ties[name].touched})
        declared = sorted({ties[name].declared for name in members} - {""})
        absent = (
            _absent_nodes(spans.values(), members, ties)
            or _absent_by_word(declared, beside)
            or _absent_sharers(shared, members, ties, beside)
            or _not_one(members, ties)
        )
        shared = [what for what in shared if _sharers(what, members, ties) > 1]
        if len(members) == 1 and not absent:
            continue
        name = _name(spans.values(), declared, shared)
        why = _why(HostSet(members), spans.values(), declared, shared)
        if any(ties[name].formed for name in members):
            why = f"{HostSet(members)} went as one before, by {name}"
        found.append(
            Cohort(name, members, why, tuple(spans.values()), tuple(shared), bool(declared), absent)
        )
    return tuple(found)


def _groups(ties: Mapping[str, Ties]) -> list[tuple[str, ...]]:
    """The hosts in groups, each of hosts that are tied to one another, directly or by others."""
    by_tie: dict[object, list[str]] = {}
    for name, one in ties.items():
        for tie in (
            *(("job", span.id, span.at) for span in one.spans),
            *((("word", one.declared),) if one.declared else ()),
            *(("shared", what) for what, _ in one.touched),
        ):
            by_tie.setdefault(tie, []).append(name)

    def joined(groups: list[set[str]], names: list[str]) -> list[set[str]]:
        touching = [group for group in groups if group & set(names)]
        apart = [group for group in groups if group not in touching]
        return [*apart, set(names).union(*touching)]

    order = list(ties)
    nothing: list[set[str]] = []
    groups = reduce(joined, by_tie.values(), nothing)
    tuples = (tuple(sorted(group, key=order.index)) for group in groups)
    return sorted(tuples, key=lambda group: order.index(group[0]))


def _absent_nodes(spans: Iterable[Span], members: tuple[str, ...], ties: Mapping[str, Ties]) -> str:
    for span in spans:
        here = [n for n in members if any((s.id, s.at) == (span.id, span.at) for s in ties[n].spans)]
        if len(here) < span.nodes:
            meets = span.at.rpartition(":")[0]
            where = f"; it meets at {meets}" if meets and meets not in here else ""
            return (
                f"job {span.name} spans {span.nodes} hosts, and {HostSet(here)} alone could be looked at"
                f"{where}: select all of its hosts (--hosts)"
            )
    return ""


def _absent_by_word(declared: list[str], others: tuple[Host, ...]) -> str:
    missing = HostSet(host.name for host in others if declared_cohort(host) in declared)
    if not missing:
        return ""
    return f"cohort {', '.join(declared)} has {missing} too: select all of its hosts (--hosts)"


def _absent_sharers(
    shared: Iterable[str],
    members: tuple[str, ...],
    ties: Mapping[str, Ties],
    others: tuple[Host, ...],
) -> str:
    for what in shared:
        folder = next(folder for name in members for one, folder in ties[name].touched if one == what)
        missing = HostSet(
            other.name
            for other in others
            if any(within(what, one) or within(one, what) for one in shared_paths(other).values())
        )
        if missing:
            return f"{folder.path} is shared with {missing}: select all that share it (--hosts)"
    return ""


def _not_one(members: tuple[str, ...], ties: Mapping[str, Ties]) -> str:
    """Why what the inventory calls one folder is not one."""
    mounted: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    for name in members:
        for what, folder in ties[name].touched:
            network = folder.filesystem in SHARED_FILE_SYSTEMS
            place = (folder.filesystem, folder.source, folder.inside) if network else ("", "", "")
            mounted.setdefault(what, {}).setdefault(place, []).append(name)
    for what, places in mounted.items():
        if len(places) > 1:
            said = "; ".join(
                f"{HostSet(names)} {f'has {place[1]}:{place[2]}' if place[0] else 'has its own disk'} there"
                for place, names in sorted(places.items())
            )
            return f"{what} is not shared as `{SHARED}` says: {said}"
    return ""


def _sharers(what: str, members: tuple[str, ...], ties: Mapping[str, Ties]) -> int:
    return sum(any(one == what for one, _ in ties[name].touched) for name in members)


def _name(spans: Iterable[Span], declared: list[str], shared: list[str]) -> str:
    return next(iter([*declared, *(f"job {span.name}" for span in spans), *shared]), "")


def _why(members: HostSet, spans: Iterable[Span], declared: list[str], shared: list[str]) -> str:
    reasons = [
        *(f"job {span.name} spans {members}" for span in spans),
        *(f"{members} share {what}" for what in shared),
        *(f"the inventory says cohort {name}" for name in declared),
    ]
    return "; ".join(reasons)
