"""Look at many hosts, and change none: facts, what fleetfix has there, and audits of environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fleetfix.action import Measurement, Probe
from fleetfix.commands import Read
from fleetfix.domain.host_facts import HostFacts, look
from fleetfix.domain.wheels import Audit
from fleetfix.engine.context import OpenSession
from fleetfix.engine.line import Line
from fleetfix.errors import Failure, HostError
from fleetfix.inventory import Host
from fleetfix.session import HostInfo, Purpose, open_session

AUDIT_SECONDS = 1800.0
"""A large environment is hashed when nobody else wants the disk: that takes its time."""


@dataclass(frozen=True)
class Inspected:
    """What one look at a host told. `failure` says why there are no facts."""

    host: str
    facts: HostFacts | None = None
    info: HostInfo | None = None
    failure: Failure | None = None
    audits: dict[str, Audit | Failure] = field(default_factory=dict)
    """By the environment as it was asked for: `of-job`, or a path."""


Told = Callable[[Inspected], None]


async def inspect(
    hosts: Sequence[Host],
    purpose: Purpose,
    told: Told,
    *,
    environments: Sequence[str] = (),
    forks: int = 64,
    opener: OpenSession = open_session,
) -> None:
    """Look at every host, `forks` of them at a time; each is told once, as it is done."""
    slots = asyncio.Semaphore(forks)

    async def one(host: Host) -> None:
        async with slots:
            told(await _look_at(host, purpose, environments, opener))

    async with asyncio.TaskGroup() as group:
        for host in hosts:
            group.create_task(one(host))


async def _look_at(
    host: Host, purpose: Purpose, environments: Sequence[str], opener: OpenSession
) -> Inspected:
    try:
        session = await opener(host, purpose, progress=_unheard)
    except HostError as error:
        return Inspected(host.name, failure=error.failure)
    try:
        line = Line(session, _NoMemory())
        facts = await line.ask("facts", look())
        audits: dict[str, Audit | Failure] = {}
        if environments:
            answers = await line.ask_all({env: _audit(_meant(host, env)) for env in environments})
            audits = {
                env: got.failure if isinstance(got, HostError) else got for env, got in answers.items()
            }
        return Inspected(host.name, facts=facts, info=session.info, audits=audits)
    except HostError as error:
        return Inspected(host.name, info=session.info, failure=error.failure)
    finally:
        await session.close()


def _meant(host: Host, environment: str) -> str:
    """`of-job` means the host's own `venv` where the inventory names one, as it does in playbooks."""
    own = host.vars.get("venv")
    return own if environment == "of-job" and isinstance(own, str) and own else environment


def _audit(venv: str) -> Probe[Audit]:
    args = {"venv": venv}
    (reply,) = yield (Read(function="audits.environment", args=args, timeout=AUDIT_SECONDS),)
    return Audit.read(reply.answer())


class _NoMemory:
    """Nothing is compared with earlier runs here."""

    def baseline(self, job: str) -> Measurement | None:
        del job
        return None


def _unheard(step: str, text: str) -> None:
    del step, text
