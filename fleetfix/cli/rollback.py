"""`rollback`: undo a run, by what its hosts themselves recorded."""

from __future__ import annotations

from typing import Annotated

from fleetfix.cli import options


def rollback(
    run: Annotated[str, options.RUN],
    hosts: options.SomeHosts = None,
    inventory: options.InventoryFile = None,
    secrets: options.Secrets = None,
    connect_timeout: options.ConnectTimeout = None,
    forks: options.Forks = None,
    reason: options.Reason = "",
    yes: options.Yes = False,
    take_over: options.TakeOver = False,
    lock_wait: options.LockWait = None,
    progress: options.HowShown = options.Progress.AUTO,
    json: options.Json = False,
) -> int:
    """Undo what a run did, newest change first. Works from any machine that reaches the hosts."""
    from fleetfix.cli.conduct import seconds_of
    from fleetfix.cli.going_back import Return, go_back

    return go_back(
        Return(
            run,
            tuple(hosts) if hosts else None,
            inventory,
            forks or 64,
            reason,
            json,
            yes,
            progress.plain,
            take_over,
            secrets=tuple(secrets or ()),
            lock_wait=seconds_of("--lock-wait", lock_wait),
        )
    )
