"""`lab`: a fleet on this machine to rehearse on."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetfix.cli import complete, options
from fleetfix.cli.command import Command

app = typer.Typer(
    name="lab",
    help="Make a fleet on this machine to rehearse on; its inventory is `-i lab`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command(cls=Command)
def up(
    hosts: Annotated[
        str, typer.Option("--hosts", metavar="PATTERN", help="The hosts to make.")
    ] = "gpu[01-03]",
    contaminated: Annotated[
        str | None,
        typer.Option(
            "--contaminated", metavar="PATTERN", help="Only these have CUDA 13 left in; else all."
        ),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=1, max=16, help="GPUs a host.")] = 2,
    spanning: Annotated[
        str | None,
        typer.Option("--spanning", metavar="PATTERN", help="These train one job together, a node each."),
    ] = None,
    shared: Annotated[
        list[str] | None,
        typer.Option(
            "--shared", metavar="PATH", help="A folder that is one for all hosts, as on NFS; repeat it."
        ),
    ] = None,
) -> None:
    """Make hosts with a training job on each, slowed down as after the upgrade and back."""
    from fleetfix import lab
    from fleetfix.hostset import HostSet
    from fleetfix.views.lab import status_text

    wanted = HostSet.parse(hosts)
    bad = None if contaminated is None else HostSet.parse(contaminated)
    together = () if spanning is None else HostSet.parse(spanning)
    hosts_up = lab.up(wanted, contaminated=bad, gpus=gpus, spanning=together, shared=tuple(shared or ()))
    print(status_text(hosts_up))


@app.command(cls=Command)
def down() -> None:
    """End every process of the lab and remove its files."""
    from fleetfix import lab

    hosts = lab.down()
    print(f"gone: {hosts}" if hosts else "no lab was up")


@app.command(cls=Command)
def status(json: options.Json = False) -> None:
    """Show each host: up or not, whether CUDA 13 lies in its environment now, its faults, its tok/s."""
    from dataclasses import asdict
    from json import dumps

    from fleetfix import lab
    from fleetfix.views.lab import status_text

    hosts = lab.status()
    print("\n".join(dumps(asdict(one)) for one in hosts) if json else status_text(hosts))


@app.command("break", cls=Command)
def break_hosts(
    hosts: Annotated[
        str, typer.Argument(metavar="PATTERN", help="Hosts of the lab.", autocompletion=complete.lab_hosts)
    ],
    fault: Annotated[
        str,
        typer.Option(
            "--fault",
            metavar="FAULT",
            help="Which; `fleetfix lab faults` lists them.",
            autocompletion=complete.faults,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the fault; repeat it."),
    ] = None,
) -> None:
    """Make a fault on hosts of the lab."""
    from fleetfix import lab
    from fleetfix.cli.conduct import read_settings
    from fleetfix.cli.places import load_inventory

    read = read_settings(settings or ())
    for host in load_inventory("lab").select(hosts):
        print(lab.break_host(host.name, fault, **read))


@app.command(cls=Command)
def heal(
    hosts: Annotated[
        str,
        typer.Argument(
            metavar="PATTERN", help="Hosts of the lab; all without it.", autocompletion=complete.lab_hosts
        ),
    ] = "*",
) -> None:
    """Take back every fault of hosts of the lab."""
    from fleetfix import lab
    from fleetfix.cli.places import load_inventory

    for host in load_inventory("lab").select(hosts):
        healed = lab.heal(host.name)
        print(f"{host.name}: healed of {', '.join(healed)}" if healed else f"{host.name}: nothing to heal")


@app.command(cls=Command)
def faults() -> None:
    """List the faults that can be made."""
    from fleetfix.lab import FAULTS

    for name, fault in FAULTS.items():
        print(f"{name:<20} {fault.summary}")


@app.command(
    cls=Command, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
def ssh(
    host: Annotated[str, typer.Argument(metavar="HOST", autocompletion=complete.lab_hosts)],
    command: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]…")] = None,
) -> None:
    """Log in to a host of the lab, or run a command there."""
    import os

    from fleetfix import lab
    from fleetfix.errors import LabError

    argv = [*lab.ssh_command(host), *(command or ())]
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        raise LabError(f"there is no {argv[0]} on this machine", hint="install an OpenSSH client") from None
