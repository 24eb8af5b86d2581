"""How long a host may take to answer, as this command line asks for it: it holds for every host of it."""

from __future__ import annotations

from contextvars import ContextVar

import typer

_asked: ContextVar[float | None] = ContextVar("connect_timeout", default=None)


def asked() -> float | None:
    """Seconds that --connect-timeout gives; None where it is not given."""
    return _asked.get()


def take(context: typer.Context, value: str | None) -> str | None:
    """Read --connect-timeout: the callback of the option."""
    seconds = None
    if value is not None and not context.resilient_parsing:
        from fleetfix.commands import read_seconds

        try:
            seconds = read_seconds(value)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < 1e6:
            raise typer.BadParameter(f"{value!r} is no time: for example 30s or 2m")
    _asked.set(seconds)
    return value
