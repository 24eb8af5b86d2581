"""`runs`, `show` and `report`: what the journal tells."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetfix.cli import complete, options


def runs(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="With --verify: this run only, or `last`.", autocompletion=complete.runs
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--number", "-n", min=1, max=1_000_000, help="How many, the newest first.")
    ] = 20,
    verify: Annotated[
        bool, typer.Option("--verify", help="Say whether the records are as they were written.")
    ] = False,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--hosts",
            "--limit",
            "-l",
            metavar="PATTERN",
            help="With --verify: also by what these hosts' ledgers keep.",
            autocompletion=complete.hosts,
        ),
    ] = None,
    inventory: options.InventoryFile = None,
    connect_timeout: options.ConnectTimeout = None,
    json: options.Json = False,
) -> int:
    """List the runs that this machine has driven, or verify what it keeps of them."""
    if verify:
        from fleetfix.cli.verifying import Order
        from fleetfix.cli.verifying import verify as verify_runs

        return verify_runs(Order(run, tuple(hosts) if hosts else None, inventory, json))
    if run is not None:
        raise typer.BadParameter(f"a run is named for --verify; `fleetfix show {run}` tells of one")
    if hosts:
        raise typer.BadParameter("--hosts is for --verify: whose ledgers are compared")
    import os
    import sys
    from dataclasses import asdict
    from json import dumps

    from fleetfix.cli.state_dir import state_dir
    from fleetfix.journal import Journal
    from fleetfix.views.history import runs_text
    from fleetfix.views.paint import Paint

    with Journal.open(state_dir()) as journal:
        rows = journal.runs(limit)
    if json:
        for row in rows:
            print(dumps(asdict(row)))
    else:
        print(runs_text(rows, Paint.for_stream(sys.stdout, os.environ)))
    return 0


def show(
    run: Annotated[str, options.RUN],
    host: Annotated[
        str | None,
        typer.Argument(metavar="HOST", help="Tell all of this host.", autocompletion=complete.hosts_of_run),
    ] = None,
    diff: options.Diff = False,
    json: options.Json = False,
) -> None:
    """Tell how a run went: on all hosts, or every step of one."""
    from fleetfix.cli.telling import tell_run

    tell_run(run, host, diff=diff, json=json)


def report(
    run: Annotated[str, options.RUN],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="Where to: a file that ends in .html or .md.")
    ],
) -> None:
    """Write a report of a run for those who were not there: one page that needs nothing else."""
    from pathlib import Path

    from fleetfix.cli.reporting import report as write_report

    write_report(run, Path(out))
