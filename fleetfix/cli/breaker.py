"""`breaker`: what trips it, what it holds back, and who lets it go."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetfix.cli import options
from fleetfix.cli.command import Command

app = typer.Typer(
    help="The breaker of an inventory: tripped by a run, it holds all others back until it is reset.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("status", cls=Command)
def status(json: options.Json = False) -> None:
    """Show which breakers are tripped, by which run and why, and the last that were reset."""
    from fleetfix.cli.tripped import show_breakers

    show_breakers(as_json=json)


@app.command("reset", cls=Command)
def reset(
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="What was found, and done; kept in the journal.")
    ],
    inventory: options.InventoryFile = None,
    yes: options.Yes = False,
) -> None:
    """Let runs change hosts of an inventory again. Nothing else resets a breaker."""
    from fleetfix.cli.conduct import operator
    from fleetfix.cli.tripped import reset as let_go

    let_go(inventory, reason, by=operator(), yes=yes)
