"""Which hosts go next: a pure decision over the folded state of a run.

It knows no engine, no clock and no I/O. The same state and policy always decide the same. In what
order hosts go is said by `fleetfix.order`; whether they go at all is said here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fleetfix.engine.breaker import why_tripped
from fleetfix.events import GOOD, Outcome
from fleetfix.order import CANARY, Unit, next_wave, ready, units, with_a_turn
from fleetfix.policy import Policy, Share
from fleetfix.state import HostState, RunState

NOT_REACHED: frozenset[Outcome] = frozenset({"unreachable", "blocked", "busy", "unfinished"})
"""Outcomes of hosts that were given up before anything was changed there."""

OUT_OF_SERVICE: frozenset[Outcome] = NOT_REACHED | {"rollback_failed", "rollback_pending", "in_doubt"}
"""Outcomes of hosts of which nobody can say that they serve; one whose job is stopped serves neither."""


@dataclass(frozen=True)
class Start:
    """Call these hosts together, under this name (`canary`, `batch 1`, …)."""

    name: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """Nothing to call until a host moves on."""


@dataclass(frozen=True)
class Halt:
    """Begin no further host; those in flight go on to their end."""

    reason: str


@dataclass(frozen=True)
class Trip:
    """Halt, and let no other run change hosts of this inventory until somebody has looked."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """Every host has had its turn."""


Decision = Start | Wait | Halt | Trip | Finish


def decide(state: RunState, policy: Policy) -> Decision:
    """Say what comes next. While a host is still being planned nothing is started.

    Counted against `max_unreachable`: hosts given up before a change, out of all hosts of the run.
    Counted against `max_failures`: hosts that were touched and did not end well, out of those with
    something to do. A budget of n is spent when more than n hosts are counted. A host that went with
    the controller's own network counts against none.
    """
    if (trip := _tripped(state)) is not None:
        return trip
    if surveying(state):
        return Wait()
    called = _called(state)
    waiting = {name for unit in ready(state) for name in unit}
    open_ = [name for name, host in state.hosts.items() if host.finished is None and name not in waiting]
    if state.halted is not None or state.interrupted:
        return Wait() if open_ else Finish()
    if state.paused:
        return Wait()
    unbegun = any(name in called and not state.hosts[name].started for name in open_)
    halt = _reason_to_halt(state, policy, to_begin=bool(waiting) or unbegun)
    if halt is not None:
        return Halt(halt)
    if any(name in called for name in open_):
        return Wait()
    if (wave := next_wave(state, policy)) is not None:
        return Start(wave.name, wave.hosts)
    return Wait() if open_ else Finish()


def surveying(state: RunState) -> bool:
    """Whether a host is still being planned."""
    return any(host.pending is None and host.finished is None for host in state.hosts.values())


def to_begin(state: RunState, policy: Policy, begun: Collection[str]) -> tuple[str, ...]:
    """The called hosts that are begun now, beside those that were begun already: whole units, in order.

    A wave may be wider than what may be out of service at once; the rest of it waits. Where the run is
    to stop all of them are named: each ends as not started, and says why.
    """
    stopping = stops(state, policy) is not None or bool(state.interrupted)
    if state.paused and not stopping:
        return ()
    waiting = _still_to_begin(state, begun)
    if policy.max_unavailable is None or stopping:
        return tuple(name for unit in waiting for name in unit)
    at_work = sum(1 for name in begun if _open(state, name))
    room = policy.max_unavailable.of(len(state.hosts)) - at_work - len(_out_of_service(state))
    return tuple(_that_fit(waiting, room))


def stops(state: RunState, policy: Policy) -> Halt | Trip | None:
    """Why a host whose wave was called may not be begun any more; None when it may.

    A wave is wider than what is talked to at once: the budget may be spent while a host of it still
    waits for its turn.
    """
    if (trip := _tripped(state)) is not None:
        return trip
    reason = state.halted or _reason_to_halt(state, policy, to_begin=True)
    return None if reason is None else Halt(reason)


def _tripped(state: RunState) -> Trip | None:
    """Also a run that is halted trips the breaker: what its last hosts show holds other runs too."""
    reason = None if state.tripped is not None else why_tripped(state)
    return None if reason is None else Trip(reason)


def _called(state: RunState) -> frozenset[str]:
    return frozenset(name for wave in state.waves for name in wave.hosts)


def _still_to_begin(state: RunState, begun: Collection[str]) -> tuple[Unit, ...]:
    """The units of called waves that have hosts which were not begun, without those that were."""
    called = _called(state)
    left = (tuple(n for n in u if n in called and n not in begun and _open(state, n)) for u in units(state))
    return tuple(unit for unit in left if unit)


def _open(state: RunState, name: str) -> bool:
    return state.hosts[name].finished is None


def _that_fit(waiting: tuple[Unit, ...], room: int) -> Iterator[str]:
    for unit in waiting:
        room -= len(unit)
        if room < 0:
            return
        yield from unit


# -- reasons to halt ------------------------------------------------------------------------------


def _reason_to_halt(state: RunState, policy: Policy, *, to_begin: bool) -> str | None:
    """Why no further host may be started. The last ones are told even where no host is left to begin."""
    budgets = None
    if to_begin:
        budgets = (
            _too_many_not_reached(state, policy)
            or _too_many_failures(state, policy)
            or _never_enough_in_service(state, policy)
        )
    return _canary_not_well(state) or _in_doubt(state) or _unproven(state, policy) or budgets


def _too_many_not_reached(state: RunState, policy: Policy) -> str | None:
    lost = sum(
        host.outcome in NOT_REACHED and not host.started and not host.lost_by_controller
        for host in state.hosts.values()
    )
    most = policy.max_unreachable.of(len(state.hosts))
    if lost <= most:
        return None
    share = _in_numbers(policy.max_unreachable, len(state.hosts))
    return f"{lost} hosts unreachable or blocked, at most {share} may be: --max-unreachable decides"


def _too_many_failures(state: RunState, policy: Policy) -> str | None:
    bad = sum(_ended_badly(host) for host in state.hosts.values())
    if bad == 0:
        return None
    of = len(with_a_turn(state))
    if bad <= policy.max_failures.of(of):
        return None
    return f"{bad} hosts failed, at most {_in_numbers(policy.max_failures, of)} may: --max-failures decides"


def _in_numbers(share: Share, of: int) -> str:
    """`3`, or `0 (10% of 3)`."""
    return f"{share.of(of)} ({share} of {of})" if share.percent else str(share.of(of))


def _never_enough_in_service(state: RunState, policy: Policy) -> str | None:
    """A unit that is still to begin, and that will never find room beside those that are out for good."""
    if policy.max_unavailable is None:
        return None
    most = policy.max_unavailable.of(len(state.hosts))
    out = _out_of_service(state)
    begun = frozenset(name for name, host in state.hosts.items() if host.started)
    for unit in (*_still_to_begin(state, begun), *ready(state)):
        if len(out) + len(unit) > most:
            share = _in_numbers(policy.max_unavailable, len(state.hosts))
            already = f"{len(out)} out of service already, and " if out else ""
            more = f"{unit[0]} would be one more" if len(unit) == 1 else f"{len(unit)} more go together"
            return f"{already}{more}, at most {share} may be: --max-unavailable decides"
    return None


def _out_of_service(state: RunState) -> frozenset[str]:
    """Hosts that have ended, and do not serve."""
    return frozenset(
        name
        for name, host in state.hosts.items()
        if host.finished is not None
        and (host.finished.outcome in OUT_OF_SERVICE or host.finished.job_stopped)
    )


def _canary_not_well(state: RunState) -> str | None:
    canary = next((wave for wave in state.waves if wave.name == CANARY), None)
    for name in canary.hosts if canary is not None else ():
        outcome = state.hosts[name].outcome
        if outcome is not None and outcome not in GOOD:
            return f"the canary {name} is {outcome}"
    return None


def _in_doubt(state: RunState) -> str | None:
    """Nobody can say what the next host would suffer."""
    found = (name for name, host in state.hosts.items() if host.outcome == "in_doubt")
    return next((f"{name} is in_doubt" for name in found), None)


def _unproven(state: RunState, policy: Policy) -> str | None:
    if policy.on_unproven != "halt":
        return None
    for host in state.hosts.values():
        if host.outcome == "unproven" and host.started:
            return f"{host.name} is mended and sound, but its speed is not proven"
    return None


def _ended_badly(host: HostState) -> bool:
    return (
        host.started
        and host.outcome is not None
        and host.outcome not in GOOD
        and not host.lost_by_controller
    )
