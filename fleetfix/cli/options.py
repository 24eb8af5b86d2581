"""Options that several commands share, so that they mean the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fleetfix.cli import complete, patience

RUN = typer.Argument(
    metavar="RUN", help="A run's id, the beginning of it, or `last`.", autocompletion=complete.runs
)
Hosts = Annotated[
    list[str],
    typer.Option(
        "--hosts",
        "--limit",
        "-l",
        metavar="PATTERN",
        help="Which hosts, e.g. 'gpu[01-16]', @group, 'gpu*!gpu07'; repeated: all of these.",
        autocompletion=complete.hosts,
    ),
]
SomeHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--hosts",
        "--limit",
        "-l",
        metavar="PATTERN",
        help="Only these hosts of the run.",
        autocompletion=complete.hosts_of_run,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        "-x",
        metavar="PATTERN",
        help="Hosts to leave out; repeat it for more.",
        autocompletion=complete.hosts,
    ),
]
InventoryFile = Annotated[
    str | None,
    typer.Option(
        "--inventory",
        "-i",
        metavar="FILE",
        help="Inventory file, folder or program, `lab`, names: 'gpu[01-16],', slurm:, clustershell:, "
        "ssh-config: or ansible:PATH.",
        autocompletion=complete.inventories,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a variable of the playbook; repeat it.",
        autocompletion=complete.settings,
    ),
]
Secrets = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="NAME=SOURCE",
        help="Where a secret comes from: env:VARIABLE, file:PATH, cmd:COMMAND, keyring:SERVICE/USER or "
        "prompt; repeat it. `become` is the password for sudo.",
        autocompletion=complete.secrets,
    ),
]
Forks = Annotated[
    int | None,
    typer.Option("--forks", "--fanout", "-f", metavar="N", min=1, help="Hosts talked to at once."),
]
ConnectTimeout = Annotated[
    str | None,
    typer.Option(
        "--connect-timeout",
        metavar="TIME",
        help="How long a host may take to answer, e.g. 30s. Default: the inventory's, ssh's, or 15s.",
        callback=patience.take,
    ),
]
"""Its callback hands it on: commands take it and leave it."""
Canary = Annotated[
    int | None, typer.Option("--canary", metavar="N", min=0, help="Hosts that go first, alone.")
]
Batch = Annotated[
    list[str] | None,
    typer.Option("--batch", metavar="SHARE", help="Hosts a batch, 3 or 10%; repeated: the sizes in turn."),
]
MaxFailures = Annotated[
    str | None,
    typer.Option("--max-failures", metavar="SHARE", help="Touched hosts that may fail before it halts."),
]
MaxUnreachable = Annotated[
    str | None,
    typer.Option("--max-unreachable", metavar="SHARE", help="Hosts that may be unreachable or blocked."),
]
MaxUnavailable = Annotated[
    str | None,
    typer.Option("--max-unavailable", metavar="SHARE", help="Hosts out of service at the same time."),
]
Soak = Annotated[
    str | None, typer.Option("--soak", metavar="TIME", help="Time between one batch and the next, e.g. 5m.")
]
OnUnproven = Annotated[
    str | None,
    typer.Option("--on-unproven", metavar="halt|count", help="What a speed that is not proven does."),
]
Diff = Annotated[bool, typer.Option("--diff", "-D", help="Show what each change makes of what.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
YesHosts = Annotated[
    int | None, typer.Option("--yes-hosts", metavar="N", min=1, help="Do not ask, if it is N hosts.")
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Go on without this terminal; `fleetfix watch` follows it.")
]
LockWait = Annotated[
    str | None,
    typer.Option(
        "--lock-wait",
        metavar="TIME",
        help="Where another run has a host, wait so long for it to end, e.g. 10m.",
    ),
]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="Also where another controller is at work on this run.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout, and nothing else.")]


class Progress(StrEnum):
    """How progress is shown on stderr."""

    AUTO = "auto"
    PLAIN = "plain"

    @property
    def plain(self) -> bool:
        return self is Progress.PLAIN


HowShown = Annotated[
    Progress,
    typer.Option("--progress", help="plain: lines instead of a live view, at a terminal too."),
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept in journal and ledger.")]
