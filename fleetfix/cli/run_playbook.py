"""`run`, `plan` and `apply`: everything is read, bound and agreed to before anything connects."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetfix.cli import complete, options

PlaybookName = Annotated[
    str,
    typer.Argument(
        metavar="PLAYBOOK", help="A shipped playbook's name, or a file.", autocompletion=complete.playbooks
    ),
]


def run(
    playbook: PlaybookName,
    hosts: options.Hosts,
    exclude: options.Exclude = None,
    inventory: options.InventoryFile = None,
    connect_timeout: options.ConnectTimeout = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--check", "-C", help="Plan only; every host stays as it is.")
    ] = False,
    diff: options.Diff = False,
    settings: options.Settings = None,
    secrets: options.Secrets = None,
    forks: options.Forks = None,
    canary: options.Canary = None,
    batch: options.Batch = None,
    max_failures: options.MaxFailures = None,
    max_unreachable: options.MaxUnreachable = None,
    max_unavailable: options.MaxUnavailable = None,
    soak: options.Soak = None,
    on_unproven: options.OnUnproven = None,
    yes: options.Yes = False,
    yes_hosts: options.YesHosts = None,
    reason: options.Reason = "",
    lock_wait: options.LockWait = None,
    detach: options.Detach = False,
    progress: options.HowShown = options.Progress.AUTO,
    json: options.Json = False,
) -> int:
    """Run a playbook over hosts: a canary first, then batches, every step verified."""
    from fleetfix.cli.conduct import Manner, Order, conduct, seconds_of

    return conduct(
        Order(
            playbook=playbook,
            hosts=tuple(hosts),
            exclude=tuple(exclude or ()),
            inventory=inventory,
            settings=tuple(settings or ()),
            secrets=tuple(secrets or ()),
            policy=_policy(
                batch,
                forks=forks,
                canary=canary,
                max_failures=max_failures,
                max_unreachable=max_unreachable,
                max_unavailable=max_unavailable,
                soak=soak,
                on_unproven=on_unproven,
            ),
            dry=dry_run,
            reason=reason,
            lock_wait=seconds_of("--lock-wait", lock_wait),
        ),
        Manner(
            diff=diff,
            json=json,
            plain=progress.plain,
            yes=yes,
            yes_hosts=yes_hosts,
            detach=detach,
        ),
    )


def plan(
    playbook: PlaybookName,
    hosts: options.Hosts,
    exclude: options.Exclude = None,
    inventory: options.InventoryFile = None,
    connect_timeout: options.ConnectTimeout = None,
    diff: options.Diff = False,
    settings: options.Settings = None,
    secrets: options.Secrets = None,
    forks: options.Forks = None,
    canary: options.Canary = None,
    batch: options.Batch = None,
    max_failures: options.MaxFailures = None,
    max_unreachable: options.MaxUnreachable = None,
    max_unavailable: options.MaxUnavailable = None,
    soak: options.Soak = None,
    on_unproven: options.OnUnproven = None,
    detailed_exitcode: Annotated[
        bool, typer.Option("--detailed-exitcode", help="Exit 6 where something would be changed.")
    ] = False,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Save the plan for `fleetfix apply`.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--check", "-C", help="A plan is one anyway.", hidden=True)
    ] = False,
    progress: options.HowShown = options.Progress.AUTO,
    json: options.Json = False,
) -> int:
    """Show what `run` would do, and change nothing."""
    del dry_run  # what people type from habit means here what it says
    from pathlib import Path

    from fleetfix.cli.conduct import Manner, Order, conduct

    return conduct(
        Order(
            playbook=playbook,
            hosts=tuple(hosts),
            exclude=tuple(exclude or ()),
            inventory=inventory,
            settings=tuple(settings or ()),
            secrets=tuple(secrets or ()),
            policy=_policy(
                batch,
                forks=forks,
                canary=canary,
                max_failures=max_failures,
                max_unreachable=max_unreachable,
                max_unavailable=max_unavailable,
                soak=soak,
                on_unproven=on_unproven,
            ),
            dry=True,
        ),
        Manner(
            diff=diff,
            json=json,
            plain=progress.plain,
            detailed_exit=detailed_exitcode,
            out=None if out is None else Path(out),
        ),
    )


def apply(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A plan that `plan --out` saved.", autocompletion=complete.saved_plans
        ),
    ],
    diff: options.Diff = False,
    secrets: options.Secrets = None,
    yes: options.Yes = False,
    yes_hosts: options.YesHosts = None,
    connect_timeout: options.ConnectTimeout = None,
    reason: options.Reason = "",
    lock_wait: options.LockWait = None,
    detach: options.Detach = False,
    progress: options.HowShown = options.Progress.AUTO,
    json: options.Json = False,
) -> int:
    """Do what a saved plan says, on the hosts where it still holds; it is good for 15 minutes."""
    from fleetfix.cli.applying import apply as apply_plan
    from fleetfix.cli.conduct import Manner, seconds_of

    return apply_plan(
        file,
        Manner(diff=diff, json=json, plain=progress.plain, yes=yes, yes_hosts=yes_hosts, detach=detach),
        reason,
        tuple(secrets or ()),
        seconds_of("--lock-wait", lock_wait),
    )


def _policy(batch: list[str] | None, **given: object) -> dict[str, object]:
    """What the command line says over the playbook's own policy."""
    sizes = tuple(size for word in batch or () for size in word.split(","))
    return {key: value for key, value in {"batch": sizes or None, **given}.items() if value is not None}
