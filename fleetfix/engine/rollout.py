"""Which hosts go next: a pure decision over the folded state of a run.

It knows no engine, no clock and no I/O. The same state and policy always decide the same. In what
order hosts go is said by `fleetfix.order`; whether they go at all is said here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from fleetfix.engine.breaker import why_tripped
from fleetfix.events import GOOD, Outcome
from fleetfix.order import CANARY, Unit, next_wave, ready, with_a_turn
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
    in_flight = any(_open(state, name) for wave in state.waves for name in wave.hosts)
    if state.halted is not None or state.interrupted:
        return Wait() if in_flight or _being_judged(state) else Finish()
    if state.paused:
        return Wait()
    if (reason := _reason_to_halt(state, policy)) is not None:
        return Halt(reason)
    if in_flight:
        return Wait()
    if (wave := next_wave(state, policy)) is not None:
        return Start(wave.name, wave.hosts)
    return Wait() if _being_judged(state) or awaiting(state) else Finish()


def surveying(state: RunState) -> bool:
    """Whether a host is still being planned. One that another run has now is planned when it is free."""
    return any(
        host.pending is None and host.finished is None and not host.awaits for host in state.hosts.values()
    )


def awaiting(state: RunState) -> tuple[str, ...]:
    """The hosts of which it is waited that another run ends there."""
    return tuple(name for name, host in state.hosts.items() if host.awaits)


def to_begin(state: RunState, policy: Policy, begun: Collection[str]) -> tuple[str, ...]:
    """The called hosts that are begun now, beside those that were begun already: whole units, in order.

    A wave may be wider than what may be out of service at once; the rest of it waits. Where the run is
    to stop all of them are named: each ends as not started, and says why.
    """
    waiting = _still_to_begin(state, begun)
    if not waiting:
        return ()
    stopping = stops(state, policy) is not None or bool(state.interrupted)
    if state.paused and not stopping:
        return ()
    if policy.max_unavailable is None or stopping:
        return tuple(name for unit in waiting for name in unit)
    at_work = sum(1 for name in begun if _open(state, name))
    room = policy.max_unavailable.of(len(state.hosts)) - at_work - len(_out_of_service(_bad(state)))
    return tuple(_that_fit(waiting, room))


def stops(state: RunState, policy: Policy) -> Halt | Trip | None:
    """Why a host whose wave was called may not be begun any more; None when it may.

    A wave is wider than what is talked to at once: the budget may be spent while a host of it still
    waits for its turn.
    """
    if (trip := _tripped(state)) is not None:
        return trip
    reason = state.halted or _reason_to_halt(state, policy)
    return None if reason is None else Halt(reason)


def _tripped(state: RunState) -> Trip | None:
    """Also a run that is halted trips the breaker: what its last hosts show holds other runs too."""
    reason = None if state.tripped is not None else why_tripped(state)
    return None if reason is None else Trip(reason)


def _still_to_begin(state: RunState, begun: Collection[str]) -> tuple[Unit, ...]:
    """The units of called waves that have hosts which were not begun, without those that were."""
    left: dict[str, list[str]] = {}
    for wave in state.waves:
        for name in wave.hosts:
            if name not in begun and _open(state, name) and not state.hosts[name].awaits:
                left.setdefault(state.cohorts.get(name, "\0" + name), []).append(name)
    return tuple(tuple(names) for names in left.values())


def _being_judged(state: RunState) -> bool:
    """Whether a host that has nothing to do is still open."""
    waiting = {name for unit in ready(state) for name in unit}
    called = {name for wave in state.waves for name in wave.hosts}
    return any(
        host.is_open and not host.awaits and name not in waiting and name not in called
        for name, host in state.hosts.items()
    )


def _open(state: RunState, name: str) -> bool:
    return state.hosts[name].finished is None


def _that_fit(waiting: tuple[Unit, ...], room: int) -> Iterator[str]:
    for unit in waiting:
        room -= len(unit)
        if room < 0:
            return
        yield from unit


# -- reasons to halt ------------------------------------------------------------------------------


def _reason_to_halt(state: RunState, policy: Policy) -> str | None:
    """Why no further host may be started. Budgets matter while there is one that could be."""
    bad = _bad(state)
    if not bad and policy.max_unavailable is None:
        return None
    reason = _canary_not_well(state) or _in_doubt(bad) or _unproven(bad, policy)
    if reason is not None:
        return reason
    spent = (
        _too_many_not_reached(state, policy, bad)
        or _too_many_failures(state, policy, bad)
        or _never_enough_in_service(state, policy, bad)
    )
    return spent if spent is not None and _to_begin_at_all(state) else None


def _bad(state: RunState) -> list[HostState]:
    """The hosts that did not end well; of most runs there are few, and all that halts a run is in them."""
    return [
        host
        for host in state.hosts.values()
        if host.finished is not None and (host.finished.outcome not in GOOD or host.finished.job_stopped)
    ]


def _to_begin_at_all(state: RunState) -> bool:
    """Whether any host is still to be begun, or called."""
    started = frozenset(name for name, host in state.hosts.items() if host.started)
    return bool(_still_to_begin(state, started) or ready(state) or awaiting(state))


def _too_many_not_reached(state: RunState, policy: Policy, bad: Sequence[HostState]) -> str | None:
    lost = sum(
        host.outcome in NOT_REACHED and not host.started and not host.lost_by_controller for host in bad
    )
    if lost <= policy.max_unreachable.of(len(state.hosts)):
        return None
    share = _in_numbers(policy.max_unreachable, len(state.hosts))
    return f"{_hosts(lost)} unreachable or blocked, at most {share} may be: --max-unreachable decides"


def _too_many_failures(state: RunState, policy: Policy, bad: Sequence[HostState]) -> str | None:
    failed = sum(host.started and host.outcome not in GOOD and not host.lost_by_controller for host in bad)
    if failed == 0:
        return None
    of = len(with_a_turn(state))
    if failed <= policy.max_failures.of(of):
        return None
    share = _in_numbers(policy.max_failures, of)
    return f"{_hosts(failed)} failed, at most {share} may: --max-failures decides"


def _hosts(number: int) -> str:
    return f"{number} host" if number == 1 else f"{number} hosts"


def _in_numbers(share: Share, of: int) -> str:
    """`3`, or `0 (10% of 3)`."""
    return f"{share.of(of)} ({share} of {of})" if share.percent else str(share.of(of))


def _never_enough_in_service(state: RunState, policy: Policy, bad: Sequence[HostState]) -> str | None:
    """A unit that is still to begin, and that will never find room beside those that are out for good."""
    if policy.max_unavailable is None:
        return None
    most, out = policy.max_unavailable.of(len(state.hosts)), len(_out_of_service(bad))
    if not state.cohorts and out < most:
        return None  # there is room for one, and nothing goes as more than one
    started = frozenset(name for name, host in state.hosts.items() if host.started)
    for unit in (*_still_to_begin(state, started), *ready(state)):
        if out + len(unit) > most:
            share = _in_numbers(policy.max_unavailable, len(state.hosts))
            already = f"{out} out of service already, and " if out else ""
            more = f"{unit[0]} would be one more" if len(unit) == 1 else f"{len(unit)} more go together"
            return f"{already}{more}, at most {share} may be: --max-unavailable decides"
    return None


def _out_of_service(bad: Sequence[HostState]) -> list[HostState]:
    """Those that do not serve, of hosts that have ended."""
    return [
        host
        for host in bad
        if host.finished is not None
        and (host.finished.outcome in OUT_OF_SERVICE or host.finished.job_stopped)
    ]


def _canary_not_well(state: RunState) -> str | None:
    canary = next((wave for wave in state.waves if wave.name == CANARY), None)
    for name in canary.hosts if canary is not None else ():
        outcome = state.hosts[name].outcome
        if outcome is not None and outcome not in GOOD:
            return f"the canary {name} is {outcome}"
    return None


def _in_doubt(bad: Sequence[HostState]) -> str | None:
    """Nobody can say what the next host would suffer."""
    return next((f"{host.name} is in_doubt" for host in bad if host.outcome == "in_doubt"), None)


def _unproven(bad: Sequence[HostState], policy: Policy) -> str | None:
    if policy.on_unproven != "halt":
        return None
    for host in bad:
        if host.outcome == "unproven" and host.started:
            return f"{host.name} is mended and sound, but its speed is not proven"
    return None
