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
    """Show the hosts that a pattern selects, and how each is reached. Connects to none."""
    from json import dumps

    from fleetfix.cli.places import load_inventory
    from fleetfix.views.hosts import hosts_text

    loaded = load_inventory(inventory)
    chosen = loaded.select(pattern, exclude or ())
    groups = {
        host.name: [name for name, members in loaded.groups.items() if host.name in members]
        for host in chosen
    }
    if json:
        for host in chosen:
            print(dumps(host.model_dump(mode="json") | {"groups": groups[host.name]}))
    else:
        print(hosts_text(chosen, groups, loaded.source))
