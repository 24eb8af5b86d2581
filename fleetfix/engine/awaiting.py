"""Waiting until another run has ended on a host, while the other hosts go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from fleetfix.engine.context import Interrupts
from fleetfix.engine.visit import Visit
from fleetfix.events import LeaseAwaited
from fleetfix.session import Lease, Session


def of_another(session: Session, run: str) -> Lease | None:
    """The lease that another run had here when the host was asked last."""
    lease = session.info.lease
    return lease if lease is not None and lease.run != run else None


async def wait_for_others(visit: Visit) -> bool:
    """Wait, without a slot, until no other run has the host; False where one still has it.

    All waits on one host together take `lock_wait` at most; the operator's interrupt ends them.
    """
    context, session = visit.context, visit.line.session
    request, clock = context.request, context.clock
    if not request.lock_wait or request.dry:
        return False
    if visit.waits_until is None:
        visit.waits_until = clock.now() + request.lock_wait
    left = max(visit.waits_until - clock.now(), 0.0)
    await session.await_lease(0.0)
    lease = of_another(session, request.run)
    if lease is None or not left:
        return lease is None
    context.recorder.record(awaited(visit.host.name, lease, left))
    async with context.slots.given_back():
        await unless_interrupted(session.await_lease(left), context.interrupts)
    return of_another(session, request.run) is None


def awaited(host: str, lease: Lease, seconds: float) -> LeaseAwaited:
    """The event that a wait begins with."""
    return LeaseAwaited(
        host=host,
        run=lease.run,
        operator=lease.operator,
        controller=lease.controller,
        since=lease.since,
        reason=lease.reason,
        seconds=seconds,
    )


async def unless_interrupted(work: Awaitable[None], interrupts: Interrupts) -> None:
    """Do it, at most until the operator asks to stop."""
    waiting = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(interrupts.more_than(0))
    try:
        await asyncio.wait({waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
    finally:
        waiting.cancel()
        stopped.cancel()
