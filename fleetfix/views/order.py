"""A policy said in hosts: who goes first, how many at once, who last, and what halts the run."""

from __future__ import annotations

from collections.abc import Iterator

from fleetfix.order import batches_called, canary, goes_last, with_a_turn
from fleetfix.policy import Policy
from fleetfix.state import RunState, goes_on
from fleetfix.views.amounts import count, duration


def order_text(state: RunState, policy: Policy) -> str:
    """Say in numbers of hosts how the hosts of a plan would go."""
    turns = with_a_turn(state)
    parts = [", ".join(_waves(state, policy, turns)), *_limits(state, policy, len(turns))]
    return "; ".join(part for part in parts if part)


def _waves(state: RunState, policy: Policy, turns: frozenset[str]) -> Iterator[str]:
    if goes_on(state) and state.waves_before:
        yield from _waves_left(state, policy, turns)
        return
    first = canary(state, policy)
    last = {name: why for name, why in goes_last(state).items() if name in turns and name not in first}
    if first:
        of_each = f" ({policy.canary} of each {', '.join(policy.strata)})" if policy.strata else ""
        yield f"canary of {len(first)}{of_each}"
    if left := len(turns) - len(first) - len(last):
        yield f"{'then ' if first else ''}{_batches(policy, len(turns), left)}"
    for number, (name, why) in enumerate(last.items()):
        yield f"{'' if number else 'last, one at a time, '}{name} ({why})"


def _waves_left(state: RunState, policy: Policy, turns: frozenset[str]) -> Iterator[str]:
    """What is left of the order of a run that is taken up again: who was called goes on first."""
    before = state.waves[: state.waves_before]
    called = {name for wave in before for name in wave.hosts}
    on = [name for name in state.taken_up if name in called and state.hosts[name].is_open]
    left = [name for name in state.taken_up if name in turns and name not in called]
    if on:
        yield f"{count(len(on), 'host')} of {before[-1].name} first"
    last = [name for name in goes_last(state) if name in left]
    if len(left) > len(last):
        sizes = policy.batch[min(batches_called(before), len(policy.batch) - 1) :]
        words = _batches(policy.model_copy(update={"batch": sizes}), len(turns), len(left) - len(last))
        yield f"{'then ' if on else ''}{words}"
    for number, name in enumerate(last):
        yield f"{'' if number else 'last, one at a time, '}{name} ({goes_last(state)[name]})"


def _batches(policy: Policy, turns: int, left: int) -> str:
    # The last size repeats, so equal ones at the end say nothing.
    sizes = [str(min(share.of(turns, least=1), left)) for share in policy.batch]
    while len(sizes) > 1 and sizes[-1] == sizes[-2]:
        sizes.pop()
    apart = f", {duration(policy.soak)} apart" if policy.soak else ""
    return f"batches of {', '.join(sizes)}{' …' if len(sizes) > 1 else ''}{apart}"


def _limits(state: RunState, policy: Policy, turns: int) -> Iterator[str]:
    total = len(state.hosts)
    if policy.max_unavailable is not None:
        yield f"at most {count(policy.max_unavailable.of(total), 'host')} out of service at once"
    lost = policy.max_unreachable.of(total)
    given_up = (
        "any cannot be reached or is blocked"
        if lost == 0
        else f"more than {lost} cannot be reached or are blocked"
    )
    failures = policy.max_failures.of(turns)
    # Where all may fail there is no host that would halt it.
    at = f"at the {_ordinal(failures + 1)} host that fails, or " if failures < turns else ""
    yield f"halts {at}when {given_up}"
    if policy.on_unproven == "count":
        yield "a speed that is not proven counts as a failure"


def _ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
