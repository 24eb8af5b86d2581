"""A run that another machine began: what its hosts keep of it, read without writing anything there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError

from fleetfix.commands import Json, Value
from fleetfix.engine.context import OpenSession
from fleetfix.errors import Failure, HostError, JournalError
from fleetfix.inventory import Host
from fleetfix.policy import Policy
from fleetfix.session import HostInfo, Purpose, at_work_elsewhere, open_session


class Bound(Value):
    """What a host keeps of the run that began there, for whoever goes on with it."""

    digest: str
    text: str
    source: str = "another machine"
    settings: dict[str, Json] = Field(default_factory=dict)
    policy: Policy


@dataclass(frozen=True)
class Kept:
    """What the hosts tell: the run as it was bound, and why it is not to be gone on with here, if so."""

    bound: Bound | None
    at_work: Failure | None = None


async def ask_hosts(
    run: str,
    hosts: Sequence[Host],
    *,
    operator: str,
    controller: str,
    driver: str = "",
    take_over: bool = False,
    opener: OpenSession = open_session,
    forks: int = 64,
) -> Kept:
    """Ask every host that answers. Raises JournalError where they keep different things of one run."""
    slots = asyncio.Semaphore(forks)
    purpose = Purpose(
        run=run,
        playbook="",
        dry=True,
        operator=operator,
        controller=controller,
        driver=driver,
        take_over=take_over,
    )

    async def one(host: Host) -> tuple[Any, HostInfo] | None:
        async with slots:
            try:
                session = await opener(host, purpose, progress=_unheard)
            except HostError:
                return None  # it is told of when the run is taken up
            try:
                return await session.recall("bound"), session.info
            except HostError:
                return None
            finally:
                await session.close()

    answers = [answer for answer in await asyncio.gather(*map(one, hosts)) if answer is not None]
    found = [_bound(run, note) for note, _ in answers if note is not None]
    if len({bound.digest for bound in found}) > 1:
        raise JournalError(f"the hosts keep different playbooks of run {run}", hint="name fewer of them")
    refusals = (at_work_elsewhere(info, purpose) for _, info in answers)
    return Kept(found[0] if found else None, next(filter(None, refusals), None))


def _bound(run: str, note: Any) -> Bound:
    try:
        return Bound.model_validate({name: note[name] for name in Bound.model_fields if name in note})
    except (ValidationError, TypeError, KeyError) as error:
        message = f"what the hosts keep of run {run} cannot be read by this fleetfix"
        raise JournalError(message, hint="a newer fleetfix began it: go on with that version") from error


def _unheard(step: str, text: str) -> None:
    del step, text
