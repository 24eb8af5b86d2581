"""`lab`: a fleet on this machine to rehearse on."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    name="lab",
    help="Make a fleet on this machine to rehearse on.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Host = Annotated[str, typer.Argument(metavar="HOST")]


@app.command()
def up(
    hosts: Annotated[
        str, typer.Option("--hosts", metavar="PATTERN", help="The hosts to make.")
    ] = "gpu[01-03]",
) -> None:
    """Make hosts, contaminated as after the upgrade and back; they are the inventory `lab`."""
    from fleetfix import lab
    from fleetfix.hostset import HostSet

    lab.up(HostSet.parse(hosts))


@app.command()
def down() -> None:
    """End every host of the lab, and remove all of it."""
    from fleetfix import lab

    lab.down()
