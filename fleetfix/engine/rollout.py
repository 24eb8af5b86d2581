"""Which hosts go next: a pure decision over the folded state of a run.

It knows no engine, no clock and no I/O. The same state and policy always decide the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetfix.events import GOOD, Outcome
from fleetfix.policy import Policy, Share
from fleetfix.state import HostState, RunState

NOT_REACHED: frozenset[Outcome] = frozenset({"unreachable", "blocked", "busy", "unfinished"})
"""Outcomes of hosts that were given up before anything was changed there."""

ALARMING: frozenset[Outcome] = frozenset({"rollback_failed", "in_doubt"})
"""Outcomes after which nobody can say what the next host would suffer."""


@dataclass(frozen=True)
class Start:
    """Begin these hosts together, under this name (`canary`, `batch 1`, …)."""

    name: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """Nothing to begin until a host moves on."""


@dataclass(frozen=True)
class Halt:
    """Begin no further host; those in flight go on to their end."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """Every host has had its turn."""


Decision = Start | Wait | Halt | Finish


def decide(state: RunState, policy: Policy) -> Decision:
    """Say what comes next. While a host is still being planned nothing is started.

    Counted against `max_unreachable`: hosts given up before a change, out of all hosts of the run.
    Counted against `max_failures`: hosts that were touched and did not end well, out of those with
    something to do. A budget of n is spent when more than n hosts are counted.
    """
    hosts = tuple(state.hosts.values())
    if any(_surveying(host) for host in hosts):
        return Wait()
    called = {name for wave in state.waves for name in wave.hosts}
    ready = tuple(host.name for host in hosts if host.name not in called and _has_work(host))
    open_ = [host for host in hosts if host.finished is None and host.name not in ready]
    if state.halted is not None or state.interrupted:
        return Wait() if open_ else Finish()
    to_begin = bool(ready) or any(not host.started for host in open_ if host.name in called)
    reason = _reason_to_halt(state, policy, hosts, to_begin)
    if reason is not None:
        return Halt(reason)
    if any(host.name in called for host in open_):
        return Wait()
    if ready:
        return _next_wave(state, policy, hosts, ready)
    return Wait() if open_ else Finish()


def why_not_begin(state: RunState, policy: Policy) -> str | None:
    """Why a host whose wave was called may not be begun any more; None when it may.

    A wave is wider than what is talked to at once: the budget may be spent, or the operator may have
    asked to stop, while a host of it still waits for its turn.
    """
    if state.interrupted:
        return "interrupted"
    return state.halted or _reason_to_halt(state, policy, tuple(state.hosts.values()), True)


def _next_wave(
    state: RunState, policy: Policy, hosts: tuple[HostState, ...], ready: tuple[str, ...]
) -> Start:
    waves = len(state.waves)
    if waves == 0 and policy.canary:
        return Start("canary", ready[: policy.canary])
    number = waves - (1 if policy.canary else 0)
    pending = sum(1 for host in hosts if host.pending)
    size = _batch(policy, number).of(pending, least=1)
    return Start(f"batch {number + 1}", ready[:size])


def _batch(policy: Policy, number: int) -> Share:
    return policy.batch[min(number, len(policy.batch) - 1)]


def _reason_to_halt(
    state: RunState, policy: Policy, hosts: tuple[HostState, ...], to_begin: bool
) -> str | None:
    """Why no further host may be started. The last ones are told even where no host is left to begin."""
    budgets = None
    if to_begin:
        budgets = _too_many_not_reached(policy, hosts) or _too_many_failures(policy, hosts)
    return _canary_not_well(state, hosts) or _alarm(hosts) or _unproven(policy, hosts) or budgets


def _too_many_not_reached(policy: Policy, hosts: tuple[HostState, ...]) -> str | None:
    lost = [host for host in hosts if host.outcome in NOT_REACHED and not host.started]
    most = policy.max_unreachable.of(len(hosts))
    if len(lost) <= most:
        return None
    share = f"{most} ({policy.max_unreachable} of {len(hosts)})" if policy.max_unreachable.percent else most
    return f"{len(lost)} hosts unreachable or blocked, at most {share} may be: --max-unreachable decides"


def _too_many_failures(policy: Policy, hosts: tuple[HostState, ...]) -> str | None:
    bad = [host for host in hosts if _ended_badly(host)]
    most = policy.max_failures.of(sum(1 for host in hosts if host.pending))
    if len(bad) <= most:
        return None
    return f"{len(bad)} hosts failed, at most {most} may: --max-failures decides"


def _canary_not_well(state: RunState, hosts: tuple[HostState, ...]) -> str | None:
    canary = next((wave for wave in state.waves if wave.name == "canary"), None)
    if canary is None:
        return None
    for host in hosts:
        if host.name in canary.hosts and host.outcome is not None and host.outcome not in GOOD:
            return f"the canary {host.name} is {host.outcome}"
    return None


def _alarm(hosts: tuple[HostState, ...]) -> str | None:
    for host in hosts:
        if host.outcome in ALARMING:
            return f"{host.name} is {host.outcome}"
    return None


def _unproven(policy: Policy, hosts: tuple[HostState, ...]) -> str | None:
    if policy.on_unproven != "halt":
        return None
    for host in hosts:
        if host.outcome == "unproven" and host.started:
            return f"{host.name} is mended and sound, but its speed is not proven"
    return None


def _ended_badly(host: HostState) -> bool:
    return host.started and host.outcome is not None and host.outcome not in GOOD


def _surveying(host: HostState) -> bool:
    return host.pending is None and host.finished is None


def _has_work(host: HostState) -> bool:
    return host.pending is True and host.finished is None
