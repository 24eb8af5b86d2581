"""`resume`, `commit` and `release`: what becomes of a run that is not over."""

from __future__ import annotations

from typing import Annotated

from fleetfix.cli import options


def resume(
    run: Annotated[str, options.RUN],
    hosts: options.SomeHosts = None,
    inventory: options.InventoryFile = None,
    secrets: options.Secrets = None,
    connect_timeout: options.ConnectTimeout = None,
    reason: options.Reason = "",
    yes: options.Yes = False,
    yes_hosts: options.YesHosts = None,
    take_over: options.TakeOver = False,
    lock_wait: options.LockWait = None,
    detach: options.Detach = False,
    progress: options.HowShown = options.Progress.AUTO,
    json: options.Json = False,
) -> int:
    """Go on with a run that was cut short, from where each host is. No change is made twice."""
    from fleetfix.cli.conduct import seconds_of
    from fleetfix.cli.taking_up import Resumption
    from fleetfix.cli.taking_up import resume as take_up

    return take_up(
        Resumption(
            run=run,
            hosts=tuple(hosts) if hosts else None,
            inventory=inventory,
            secrets=tuple(secrets or ()),
            reason=reason,
            yes=yes,
            yes_hosts=yes_hosts,
            json=json,
            plain=progress.plain,
            take_over=take_over,
            lock_wait=seconds_of("--lock-wait", lock_wait),
            detach=detach,
        )
    )


def commit(
    run: Annotated[str, options.RUN],
    hosts: options.SomeHosts = None,
    inventory: options.InventoryFile = None,
    connect_timeout: options.ConnectTimeout = None,
    reason: options.Reason = "",
    yes: options.Yes = False,
    take_over: options.TakeOver = False,
    json: options.Json = False,
) -> int:
    """Make lasting what a run did: drop what only undo needs. There is no way back then."""
    from fleetfix.cli.settling import Order, settle

    return settle(
        Order("commit", run, tuple(hosts) if hosts else None, inventory, reason, json, yes, take_over)
    )


def release(
    run: Annotated[str, options.RUN],
    hosts: options.SomeHosts = None,
    inventory: options.InventoryFile = None,
    connect_timeout: options.ConnectTimeout = None,
    reason: options.Reason = "",
    yes: options.Yes = False,
    take_over: options.TakeOver = False,
    json: options.Json = False,
) -> int:
    """Give up what a run holds on its hosts, and undo nothing: they are free for other runs then."""
    from fleetfix.cli.settling import Order, settle

    return settle(
        Order("release", run, tuple(hosts) if hosts else None, inventory, reason, json, yes, take_over)
    )
