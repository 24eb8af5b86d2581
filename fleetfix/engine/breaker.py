"""When a run must stop because what went wrong would go wrong elsewhere too: a pure decision.

The breaker trips on any rollback that failed, on two hosts that were lost after a change, and on one
failure that three hosts have alike. It never resets itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from fleetfix.errors import NO_WAY_IN
from fleetfix.events import GOOD
from fleetfix.hostset import HostSet
from fleetfix.state import HostState, RunState

LOST_AFTER_A_CHANGE = 2
ALIKE = 3

Signature = tuple[str, str, str]
"""Step, class of failure, and its message without what differs from host to host."""

_NAMES = re.compile(
    r"(?P<uuid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
    r"|(?P<address>\b\d{1,3}(?:\.\d{1,3}){3}\b)"
    r"|(?P<hex>\b(?:0x[0-9a-f]+|(?=[0-9a-f]*\d)[0-9a-f]{8,})\b)"
    r"|(?P<number>\d+(?:[.,]\d+)*)"
)


def why_tripped(state: RunState) -> str | None:
    """Why no further host may be changed, in this run or another; None while nothing says so."""
    hosts = [
        host
        for name, host in state.hosts.items()
        if host.finished is not None and host.finished.outcome not in GOOD and name not in state.settled
    ]
    if not hosts:
        return None
    return _rollback_failed(hosts) or _lost(hosts) or _alike(hosts)


def rollback_failed(state: RunState) -> str | None:
    """The one reason that also a rollback by hand can give."""
    return _rollback_failed(state.hosts.values())


def signature_of(host: HostState) -> Signature | None:
    """What a touched host failed of; None where it did not, or was ended by the operator."""
    done = host.finished
    if done is None or not host.started or done.outcome in GOOD or done.failure is None:
        return None
    if done.failure.kind in NO_WAY_IN | {"cancelled", "cohort"}:
        return None
    return done.step, done.failure.kind, normalised(done.failure.message, host.name)


@lru_cache(maxsize=4096)
def normalised(message: str, host: str) -> str:
    """A message without the host's own name, numbers, addresses and ids: what hosts have in common."""
    own = re.sub(rf"(?<![\w.-]){re.escape(host.lower())}(?![\w-])", "host", message.lower())
    return " ".join(_NAMES.sub(lambda match: f"<{match.lastgroup}>", own).split())


def _rollback_failed(hosts: Iterable[HostState]) -> str | None:
    failed = HostSet(host.name for host in hosts if host.outcome == "rollback_failed")
    return f"going back failed on {failed}" if failed else None


def _lost(hosts: Iterable[HostState]) -> str | None:
    lost = HostSet(
        host.name
        for host in hosts
        if host.outcome == "rollback_pending" and host.lost and not host.lost_by_controller
    )
    if len(lost) < LOST_AFTER_A_CHANGE:
        return None
    return f"{len(lost)} hosts were lost after a change: {lost}"


def _alike(hosts: Iterable[HostState]) -> str | None:
    alike: dict[Signature, list[HostState]] = {}
    for host in hosts:
        signature = signature_of(host)
        if signature is not None:
            alike.setdefault(signature, []).append(host)
    for (step, _, _), found in alike.items():
        first = found[0].finished
        if len(found) >= ALIKE and first is not None and first.failure is not None:
            said = first.failure.message.removeprefix(f"{found[0].name}: ")
            where = f"at {step}: " if step else ""
            return f"{len(found)} hosts failed alike: {HostSet(h.name for h in found)} {where}{said}"
    return None
