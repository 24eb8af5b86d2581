"""`ledger`: what was changed on hosts, by whom, when and why, as the hosts themselves tell it."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetfix.cli import options


def ledger(
    hosts: options.Hosts,
    exclude: options.Exclude = None,
    inventory: options.InventoryFile = None,
    connect_timeout: options.ConnectTimeout = None,
    last: Annotated[
        int,
        typer.Option("--last", "-n", metavar="N", min=1, max=1000, help="The last N lines of each host."),
    ] = 50,
    forks: options.Forks = None,
    json: options.Json = False,
) -> int:
    """Show who changed what on hosts, when and why, by the ledgers that they keep; changes nothing."""
    from fleetfix.cli.ledger_reading import Order, conduct

    return conduct(
        Order(
            hosts=tuple(hosts),
            exclude=tuple(exclude or ()),
            inventory=inventory,
            last=last,
            forks=forks,
            json=json,
        )
    )
