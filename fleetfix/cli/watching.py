"""`watch` and `stop`: a run that another process drives."""

from __future__ import annotations

from typing import Annotated

from fleetfix.cli import options


def watch(
    run: Annotated[str, options.RUN],
    progress: options.HowShown = options.Progress.AUTO,
    json: options.Json = False,
) -> int:
    """Follow a run to its end, and exit as it does. ^C leaves the run alone."""
    from fleetfix.cli.following import watch as follow

    return follow(run, plain=progress.plain, json=json)


def stop(run: Annotated[str, options.RUN]) -> None:
    """Interrupt a run, as ^C does: its hosts go to a safe point. Again: cancel it."""
    from fleetfix.cli.following import stop as interrupt

    interrupt(run)
