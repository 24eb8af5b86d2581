"""The operator's word before anything is changed."""

from __future__ import annotations

import sys

from fleetfix.errors import UsageError
from fleetfix.hostset import HostSet
from fleetfix.views.amounts import count
from fleetfix.views.grouping import fold


def at_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def require(what: str, hosts: HostSet, *, yes: bool, yes_hosts: int | None, above: int) -> None:
    """Go on only with the operator's word; UsageError without it.

    Above so many hosts `--yes` alone is not enough: their number must be given or typed.
    """
    if yes_hosts is not None:
        _require_number(yes_hosts, hosts)
    elif len(hosts) > above and (yes or not at_terminal()):
        raise UsageError(
            f"{what} would go to {len(hosts)} hosts: {fold(hosts)}",
            hint=f"say that you mean it: --yes-hosts {len(hosts)}",
        )
    elif not yes:
        _ask(what, hosts, above)


def _require_number(given: int, hosts: HostSet) -> None:
    if given != len(hosts):
        raise UsageError(
            f"--yes-hosts {given}, but {count(len(hosts), 'host')} would be reached: {fold(hosts)}",
            hint="look at the selection again",
        )


def _ask(what: str, hosts: HostSet, above: int) -> None:
    if not at_terminal():
        raise UsageError(
            f"{what} on {count(len(hosts), 'host')} needs a yes, and nobody is at a terminal to say it",
            hint="--yes, or --dry-run to see the plan",
        )
    where = f"{what} on {count(len(hosts), 'host')} {fold(hosts)}?"
    if len(hosts) > above:
        agreed = _answer(f"{where} type the number of hosts: ") == str(len(hosts))
    else:
        agreed = _answer(f"{where} [y/N] ").lower() in ("y", "yes")
    if not agreed:
        raise UsageError("not confirmed; nothing was done")


def _answer(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()
