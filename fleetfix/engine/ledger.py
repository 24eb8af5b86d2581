"""Read the ledgers of many hosts, and change none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fleetfix.domain.ledger import Ledger, question, understood
from fleetfix.engine.context import OpenSession
from fleetfix.errors import Failure, HostError
from fleetfix.inventory import Host
from fleetfix.session import Purpose, open_session

Told = Callable[[str, Ledger | Failure], None]
"""Takes what one host told, or why it told nothing."""


async def read_ledgers(
    hosts: Sequence[Host],
    purpose: Purpose,
    told: Told,
    *,
    last: int,
    forks: int = 64,
    opener: OpenSession = open_session,
) -> None:
    """Read every host's last lines, `forks` hosts at a time; each is told once, as it answers."""
    slots = asyncio.Semaphore(forks)

    async def one(host: Host) -> None:
        async with slots:
            told(host.name, await _read(host, purpose, last, opener))

    async with asyncio.TaskGroup() as group:
        for host in hosts:
            group.create_task(one(host))


async def _read(host: Host, purpose: Purpose, last: int, opener: OpenSession) -> Ledger | Failure:
    try:
        session = await opener(host, purpose, progress=_unheard)
    except HostError as error:
        return error.failure
    try:
        (reply,) = await session.read("", (question(last),))
        return understood(reply)
    except HostError as error:
        return error.failure
    finally:
        await session.close()


def _unheard(step: str, text: str) -> None:
    del step, text
