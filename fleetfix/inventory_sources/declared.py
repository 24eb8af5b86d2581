"""What an inventory of another tool says, in our words, and what of it was not understood."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from fleetfix.commands import Json
from fleetfix.complaints import check
from fleetfix.errors import InventoryError
from fleetfix.hostset import is_name
from fleetfix.inventory_files import Settings

_ESSENTIAL = ("address", "port", "user", "via")
"""Settings without which the wrong machine, or the right one as somebody else, would be reached."""


@dataclass
class Declared:
    """Hosts and groups of one source, gathered while it is read."""

    kind: str
    """What the source is, for people: `Ansible`, `Slurm`."""
    settings: dict[str, dict[str, Json]] = field(default_factory=dict)
    """Host -> what `Host` takes beside the name; `vars` among it."""
    groups: dict[str, frozenset[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Host -> why it cannot be reached as the source wants it."""
    remarks: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """(what, why it was not taken) -> hosts that it was said of; none where it is of the whole."""

    def host(self, name: str, settings: dict[str, Json], variables: dict[str, Json]) -> None:
        """Take in a host; a setting that cannot be meant is said, or refuses the host where it must."""
        if not is_name(name):
            raise InventoryError(f"{name!r} cannot name a host: letters, digits and _ . - : % ~")
        for place, message in check(Settings, settings)[1]:
            key = str(place[0]) if place else ""
            if key in _ESSENTIAL:
                self.refused.setdefault(name, message)
            else:
                self.remark(key, message.removeprefix(f"{key}: "), name)
            settings = {other: value for other, value in settings.items() if other != key}
        self.settings[name] = {**settings, "vars": variables}

    def group(self, name: str, members: frozenset[str]) -> None:
        """Take in a group; one whose name no pattern can say is said."""
        if is_name(name):
            self.groups[name] = self.groups.get(name, frozenset()) | members
        else:
            self.remark(f"group {name!r}", "no pattern can say this name: letters, digits and _ . - :")

    def refuse(self, host: str, why: str) -> None:
        """Say why a host cannot be reached as the source wants it; the first reason counts."""
        self.refused.setdefault(host, why)

    def remark(self, what: str, why: str, host: str = "") -> None:
        """Say that something was not taken, and why."""
        hosts = self.remarks.setdefault((what, why), [])
        if host:
            hosts.append(host)

    def text(self) -> str:
        """All that was understood, equal for equal hosts and groups: what a digest is made of."""
        groups = {name: sorted(members) for name, members in self.groups.items()}
        return json.dumps([self.settings, groups, self.refused], sort_keys=True, default=str)
