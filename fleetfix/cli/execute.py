"""`exec`: one command on many hosts."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetfix.cli import options


def execute(
    hosts: options.Hosts,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[--] COMMAND...",
            help="Run by the host's sh, words joined by blanks as ssh does. With --script: its arguments.",
        ),
    ] = None,
    exclude: options.Exclude = None,
    inventory: options.InventoryFile = None,
    connect_timeout: options.ConnectTimeout = None,
    gather: Annotated[
        bool, typer.Option("--gather", "-b", help="Show equal output once, under its hosts, at the end.")
    ] = False,
    script: Annotated[
        str | None,
        typer.Option(
            "--script", metavar="FILE", help="Run this file there by its first line; it is not left behind."
        ),
    ] = None,
    stdin: Annotated[
        str | None,
        typer.Option("--stdin", metavar="FILE", help="Give every host this as input; - is our own stdin."),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout", "-u", metavar="TIME", help="End what runs longer: 90s, 5m. Default: never."
        ),
    ] = None,
    secrets: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="NAME=SOURCE",
            help="A secret for the command's environment, as NAME: env:VARIABLE, file:PATH, cmd:COMMAND, "
            "keyring:SERVICE/USER or prompt.",
        ),
    ] = None,
    forks: options.Forks = None,
    become: Annotated[
        bool | None,
        typer.Option("--become/--no-become", help="By sudo, or not, whatever the inventory says."),
    ] = None,
    yes_hosts: options.YesHosts = None,
    reason: options.Reason = "",
    json: options.Json = False,
) -> int:
    """Run a command on hosts, and say of every host how it ended."""
    from fleetfix.cli.run_command import Order, conduct

    return conduct(
        Order(
            words=tuple(command or ()),
            hosts=tuple(hosts),
            exclude=tuple(exclude or ()),
            inventory=inventory,
            gather=gather,
            script=script,
            stdin=stdin,
            timeout=timeout,
            secrets=tuple(secrets or ()),
            forks=forks,
            become=become,
            yes_hosts=yes_hosts,
            reason=reason,
            json=json,
        )
    )
