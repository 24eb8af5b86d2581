"""`inspect`: facts, drift and conditions of a fleet; changes nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetfix.cli import options


def inspect(
    hosts: options.Hosts,
    exclude: options.Exclude = None,
    inventory: options.InventoryFile = None,
    connect_timeout: options.ConnectTimeout = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            "-e",
            metavar="of-job|PATH",
            help="Audit this Python environment too, by its RECORDs; of-job: the one the job uses.",
        ),
    ] = None,
    forks: options.Forks = None,
    json: options.Json = False,
) -> int:
    """Look at hosts and change nothing: what they have in common, who differs, and what is wrong."""
    from fleetfix.cli.look import Order, conduct

    return conduct(
        Order(
            hosts=tuple(hosts),
            exclude=tuple(exclude or ()),
            inventory=inventory,
            environments=tuple(dict.fromkeys(env or ())),
            forks=forks,
            json=json,
        )
    )
