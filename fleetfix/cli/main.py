"""`fleetfix`: the commands, and the one place where errors become a line and an exit code.

`--help` loads nothing but Typer: every command imports what it needs when it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from fleetfix import __version__, secret_values
from fleetfix.cli import (
    bash_words,
    breaker,
    execute,
    history,
    hosts,
    inspect,
    lab,
    ledger,
    playbooks,
    rollback,
    run_playbook,
    unfinished,
    watching,
)
from fleetfix.cli.command import Command

app = typer.Typer(
    name="fleetfix",
    help="Mend fleets of GPU servers over SSH, with proof and a way back.",
    epilog="Exit codes: 0 done, 1 could not begin, 2 a host did not end well, 3 halted by policy, "
    "4 only unreachable, 6 plan --detailed-exitcode found changes, 70 a bug, 130 interrupted.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.command("run", cls=Command)(run_playbook.run)
app.command("plan", cls=Command)(run_playbook.plan)
app.command("apply", cls=Command)(run_playbook.apply)
app.command("inspect", cls=Command)(inspect.inspect)
app.command("ledger", cls=Command)(ledger.ledger)
app.command("exec", cls=Command, context_settings={"allow_interspersed_args": False})(execute.execute)
app.command("resume", cls=Command)(unfinished.resume)
app.command("rollback", cls=Command)(rollback.rollback)
app.command("commit", cls=Command)(unfinished.commit)
app.command("release", cls=Command)(unfinished.release)
app.command("watch", cls=Command)(watching.watch)
app.command("stop", cls=Command)(watching.stop)
app.command("runs", cls=Command)(history.runs)
app.command("show", cls=Command)(history.show)
app.command("report", cls=Command)(history.report)
app.command("hosts", cls=Command)(hosts.hosts)
app.command("playbooks", cls=Command)(playbooks.playbooks)
app.command("lint", cls=Command)(playbooks.lint)
app.command("explain", cls=Command)(playbooks.explain)
app.add_typer(breaker.app, name="breaker")
app.add_typer(lab.app, name="lab")


def _version(asked: bool) -> None:
    if asked:
        print(f"fleetfix {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version, and exit.")
    ] = False,
) -> None:
    """Mend fleets of GPU servers over SSH, with proof and a way back."""


def main(arguments: Sequence[str]) -> int:
    """Run a command line; tell what went wrong in one line on stderr. Returns the exit code."""
    try:
        secret_values.take_from_environment()
        _require_text(arguments)
        code = app(list(arguments), prog_name="fleetfix", standalone_mode=False)
        return _shown(code if isinstance(code, int) else None)
    except BaseException as error:  # noqa: BLE001 - the last place that can say anything
        from fleetfix.cli.trouble import tell

        return tell(error)


def _require_text(arguments: Sequence[str]) -> None:
    """Refuse words that are not UTF-8: neither the journal nor a host could keep them."""
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError:
            from fleetfix.errors import UsageError

            raise UsageError(f"{word!r} is not UTF-8 text") from None


def _shown(code: int | None) -> int:
    """The exit code; where a command had only to show something and could not, that is an error."""
    from fleetfix.cli import streams

    if why := streams.lost():
        print(f"fleetfix: not all could be written to stdout: {why}", file=sys.stderr)
        return 1 if code is None else code
    return code or 0


def run() -> None:
    """The entry point of the console script."""
    from fleetfix.cli import streams

    if os.environ.get(bash_words.ASKED) == "complete_bash":
        sys.exit(bash_words.complete(lambda: main(sys.argv[1:]), os.environ))
    streams.take()
    sys.exit(main(sys.argv[1:]))
