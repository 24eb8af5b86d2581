"""Hosts as a selection shows them: one line each, and the folded set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.views.amounts import count
from fleetfix.views.neutral import neutral


def hosts_text(hosts: Sequence[Host], groups: Mapping[str, Sequence[str]], source: str) -> str:
    """One line a host: name, where it is, how it is reached, its groups."""
    width = max(len(host.name) for host in hosts)
    lines = [f"{host.name:<{width}}  {_reached(host)}{_grouped(groups[host.name])}" for host in hosts]
    folded = HostSet(host.name for host in hosts)
    return "\n".join(
        neutral(line) for line in (*lines, f"{count(len(hosts), 'host')}: {folded} ({source})")
    )


def _reached(host: Host) -> str:
    if host.transport == "local":
        return "this machine"
    user = f"{host.user}@" if host.user else ""
    port = f":{host.port}" if host.port else ""
    via = f" via {host.via}" if host.via else ""
    become = ", sudo" if host.become else ""
    other = f" by {host.transport}" if host.transport != "asyncssh" else ""
    return f"{user}{host.address}{port}{via}{other}{become}"


def _grouped(groups: Sequence[str]) -> str:
    return f"  @{' @'.join(groups)}" if groups else ""
