"""Inventories that have a name of their own, how one is named for later, and hosts by how a run ended."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

from fleetfix.cli import patience
from fleetfix.folders import expanded
from fleetfix.hostset import HostSet
from fleetfix.inventory import DEADLINE, OF_A_TOOL, VARIABLE, Host, Inventory

LAB = "lab"
FAILED = "failed"
"""`@failed:RUN` means every host that did not end well, whatever it is called exactly."""
NOT_TRIED = frozenset({"not_started", "cancelled"})


def load_inventory(spec: str | None, *, deadline: float = DEADLINE) -> Inventory:
    """Load what `-i` says; the lab is asked for its place only where it is meant."""
    named = _lab() if LAB in (spec, os.environ.get(VARIABLE)) else None
    loaded = dataclasses.replace(Inventory.load(spec, named=named, deadline=deadline), history=Journalled())
    seconds = patience.asked()
    if seconds is None:
        return loaded
    hosts = loaded.hosts.items()
    patient = {name: host.model_copy(update={"connect_timeout": seconds}) for name, host in hosts}
    return dataclasses.replace(loaded, hosts=patient)


def _lab() -> dict[str, Path]:
    from fleetfix.lab import inventory_path

    return {LAB: inventory_path()}


def jumps_of(hosts: Iterable[Host]) -> dict[str, tuple[str, ...]]:
    """The jump hosts on the way to each host, as far as the ssh configuration has a part in it."""
    behind = [host for host in hosts if host.transport in ("asyncssh", "fabric")]
    if not behind:
        return {}
    from fleetfix.transports.jump_hosts import jump_hosts

    return jump_hosts(behind)


def lasting_name(inventory: Inventory) -> str:
    """Name an inventory so that it is found again from another folder."""
    return lasting(inventory.source)


def lasting(source: str) -> str:
    """The one name of an inventory, however it was spelled: by it a breaker holds."""
    kind, colon, rest = source.partition(":")
    if colon and kind in OF_A_TOOL:
        return f"{kind}:{_one_path(rest)}" if rest and kind in ("ansible", "ssh-config") else source
    return source if "," in source or source == LAB else _one_path(source)


def _one_path(path: str) -> str:
    return os.path.realpath(expanded(path))


class Journalled:
    """Hosts of past runs by how they ended, as this machine's journal knows them: `@failed:last`."""

    @property
    def words(self) -> frozenset[str]:
        from typing import get_args

        from fleetfix.events import Outcome

        return frozenset(get_args(Outcome))

    def hosts(self, word: str, run: str) -> HostSet:
        """The hosts of a run that ended so. `last` passes plans over, where they are not asked for."""
        from fleetfix.cli.state_dir import state_dir
        from fleetfix.events import GOOD
        from fleetfix.journal import Journal

        with Journal.open(state_dir()) as journal:
            ended = journal.outcomes(journal.find(run, dry=word == "pending", commands=True))
        if word == FAILED:
            return HostSet(host for host, outcome in ended.items() if outcome not in GOOD | NOT_TRIED)
        return HostSet(host for host, outcome in ended.items() if outcome == word)
