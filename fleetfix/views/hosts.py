"""Hosts as a selection shows them: one line each, what the inventory says of them, and the folded set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fleetfix.hostset import HostSet
from fleetfix.inventory import OF_A_TOOL, Host, Inventory
from fleetfix.views.amounts import count
from fleetfix.views.neutral import neutral

MOST = 12
"""Groups or variables that a line names; more are counted."""


def hosts_text(inventory: Inventory, names: HostSet, groups: Mapping[str, Sequence[str]]) -> str:
    """One line a host (name, where it is, how it is reached, its groups), and what was understood."""
    width = max(len(name) for name in names)
    lines = [
        *(f"{name:<{width}}  {_reached(inventory, name)}{_grouped(groups[name])}" for name in names),
        *_understood(inventory, names),
        f"{count(len(names), 'host')}: {names} ({_source(inventory)})",
    ]
    return "\n".join(neutral(line) for line in lines)


def remarks_text(inventory: Inventory, names: HostSet | None = None) -> Iterator[str]:
    """What was not taken, a line each; with `names` only what concerns these, or no host by name."""
    for remark in inventory.remarks:
        concerned = remark.hosts if names is None else remark.hosts & names
        if concerned or not remark.hosts:
            of = f"{concerned}: " if concerned else ""
            yield neutral(f"{of}{remark.what}: {remark.why}")


def _source(inventory: Inventory) -> str:
    of_a_tool = inventory.source.partition(":")[0] in OF_A_TOOL
    return inventory.source if of_a_tool or not inventory.kind else f"{inventory.source}, {inventory.kind}"


def _reached(inventory: Inventory, name: str) -> str:
    if name in inventory.refused:
        return f"cannot be reached: {inventory.refused[name]}"
    return _way(inventory.hosts[name])


def _way(host: Host) -> str:
    if host.transport == "local":
        return "this machine"
    user = f"{host.user}@" if host.user else ""
    port = f":{host.port}" if host.port else ""
    via = f" via {host.via}" if host.via else ""
    become = ", sudo" if host.become else ""
    other = f" by {host.transport}" if host.transport != "asyncssh" else ""
    return f"{user}{host.address}{port}{via}{other}{become}"


def _grouped(groups: Sequence[str]) -> str:
    named = [group for group in groups if group != "all"]  # Ansible's, and every host is in it
    return f"  @{' @'.join(named)}" if named else ""


def _understood(inventory: Inventory, names: HostSet) -> Iterator[str]:
    """Groups and variables of these hosts with how many have them, and what was not taken."""
    members = {group: len(hosts & names) for group, hosts in inventory.groups.items()}
    reached = [inventory.hosts[name] for name in names if name in inventory.hosts]
    variables = Counter(key for host in reached for key in host.vars)
    for title, found in (
        ("groups", (f"@{group} {number}" for group, number in members.items() if number)),
        ("variables", (f"{key} {number}" for key, number in sorted(variables.items()))),
    ):
        if text := _some(found):
            yield f"{title}: {text}"
    if lines := list(remarks_text(inventory, names)):
        yield "not taken:"
        yield from (f"  {line}" for line in lines)


def _some(items: Iterable[str]) -> str:
    found = list(items)
    more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
    return ", ".join(found[:MOST]) + more
