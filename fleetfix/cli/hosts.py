"""`hosts`: what a pattern selects."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetfix.cli import complete, options


def hosts(
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="PATTERN",
            help="Which hosts; all where none is given.",
            autocompletion=complete.hosts,
        ),
    ] = "*",
    exclude: options.Exclude = None,
    inventory: options.InventoryFile = None,
    json: options.Json = False,
) -> None:
    """Show the hosts that a pattern selects, and what was understood of them. Connects to none."""
    import sys
    from json import dumps

    from fleetfix.cli.places import load_inventory
    from fleetfix.hostset import HostSet
    from fleetfix.views.hosts import hosts_text, remarks_text

    loaded = load_inventory(inventory)
    chosen = loaded.chosen(pattern, exclude or ())
    groups: dict[str, list[str]] = {name: [] for name in chosen}
    for group, members in loaded.groups.items():
        for name in (members & chosen).names:
            groups[name].append(group)
    if not json:
        print(hosts_text(loaded, chosen, groups))
        return
    said: dict[str, list[dict[str, str]]] = {}
    for remark in loaded.remarks:
        for name in remark.hosts:
            said.setdefault(name, []).append({"what": remark.what, "why": remark.why})
    for name in chosen:
        host = (
            loaded.hosts[name].model_dump(mode="json")
            if name in loaded.hosts
            else {"name": name, "refused": loaded.refused[name]}
        )
        print(dumps(host | {"groups": groups[name], "not_taken": said.get(name, [])}))
    for line in remarks_text(loaded, HostSet()):
        print(f"not taken: {line}", file=sys.stderr)
