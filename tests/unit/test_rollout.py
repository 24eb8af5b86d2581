"""The rollout decides from values alone, so its laws are checked on every fleet that hypothesis draws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.engine.rollout import Finish, Halt, Start, Trip, Wait, decide
from fleetfix.events import (
    GOOD,
    BreakerTripped,
    Event,
    HostFinished,
    HostPlanned,
    HostStarted,
    Outcome,
    Record,
    RunHalted,
    RunInterrupted,
    RunStarted,
    WaveStarted,
)
from fleetfix.policy import Policy, Share
from fleetfix.state import RunState, fold


def started(hosts: tuple[str, ...], policy: Policy) -> RunStarted:
    return RunStarted(
        playbook="p",
        source="p.yaml",
        digest="0",
        inventory="inline",
        hosts=hosts,
        steps=(),
        policy=policy,
        operator="ann",
        controller="c",
        version="0",
    )


def state_of(*events: Event) -> RunState:
    return fold(Record(run="r", seq=n, at=0.0, event=event) for n, event in enumerate(events))


def names(count: int) -> tuple[str, ...]:
    return tuple(f"gpu{n:02}" for n in range(1, count + 1))


def planned(hosts: tuple[str, ...]) -> list[Event]:
    return [HostPlanned(host=host, pending=True) for host in hosts]


def wave(name: str, hosts: tuple[str, ...]) -> list[Event]:
    return [WaveStarted(name=name, hosts=hosts), *(HostStarted(host=host) for host in hosts)]


def ended(hosts: tuple[str, ...], outcome: Outcome = "changed") -> list[Event]:
    return [HostFinished(host=host, outcome=outcome, touched=True) for host in hosts]


POLICY = Policy(canary=1, batch=(Share.parse("25%"),), max_failures=Share.parse(1))


def test_nothing_starts_before_every_host_is_planned() -> None:
    hosts = names(3)
    state = state_of(started(hosts, POLICY), *planned(hosts[:2]))
    assert decide(state, POLICY) == Wait()


def test_the_canary_is_the_first_host_with_something_to_do() -> None:
    hosts = names(4)
    state = state_of(
        started(hosts, POLICY),
        HostFinished(host="gpu01", outcome="ok"),
        HostPlanned(host="gpu02", pending=False),
        *planned(hosts[2:]),
    )
    assert decide(state, POLICY) == Start("canary", ("gpu03",))


def test_batches_follow_the_list_and_repeat_its_last() -> None:
    hosts = names(12)
    policy = Policy(canary=1, batch=(Share.parse(2), Share.parse("25%")))
    events: list[Event] = [started(hosts, policy), *planned(hosts)]
    sizes = []
    while isinstance(decision := decide(state_of(*events), policy), Start):
        sizes.append(len(decision.hosts))
        events += wave(decision.name, decision.hosts) + ended(decision.hosts)
    assert sizes == [1, 2, 3, 3, 3]
    assert decide(state_of(*events), policy) == Finish()


def test_a_batch_waits_for_the_one_before() -> None:
    hosts = names(4)
    state = state_of(started(hosts, POLICY), *planned(hosts), *wave("canary", hosts[:1]))
    assert decide(state, POLICY) == Wait()


@pytest.mark.parametrize("outcome", ["failed", "rolled_back", "unproven", "rollback_pending", "cancelled"])
def test_a_canary_that_is_not_well_halts_whatever_the_budget_says(outcome: Outcome) -> None:
    hosts = names(4)
    policy = Policy(canary=1, max_failures=Share.parse("100%"))
    state = state_of(
        started(hosts, policy), *planned(hosts), *wave("canary", hosts[:1]), *ended(hosts[:1], outcome)
    )
    decision = decide(state, policy)
    assert isinstance(decision, Halt)
    assert "gpu01" in decision.reason


def after_canary(policy: Policy, *bad: Outcome) -> RunState:
    hosts = names(10)
    events = [started(hosts, policy), *planned(hosts), *wave("canary", hosts[:1]), *ended(hosts[:1])]
    events += wave("batch 1", hosts[1 : 1 + len(bad)])
    for host, outcome in zip(hosts[1:], bad, strict=False):
        events += ended((host,), outcome)
    return state_of(*events)


def test_a_budget_of_one_bears_one_failure_and_not_two() -> None:
    assert isinstance(decide(after_canary(POLICY, "failed"), POLICY), Start)
    decision = decide(after_canary(POLICY, "failed", "rolled_back"), POLICY)
    assert isinstance(decision, Halt)
    assert "2 hosts failed, at most 1" in decision.reason


@pytest.mark.parametrize("outcome", ["in_doubt", "unproven"])
def test_an_alarming_host_halts_at_once(outcome: Outcome) -> None:
    policy = Policy(max_failures=Share.parse("100%"))
    assert isinstance(decide(after_canary(policy, outcome), policy), Halt)


def test_a_halted_run_waits_for_those_in_flight_and_then_finishes() -> None:
    hosts = names(3)
    events = [started(hosts, POLICY), *planned(hosts), *wave("batch 1", hosts[:1]), RunHalted(reason="x")]
    assert decide(state_of(*events), POLICY) == Wait()
    assert decide(state_of(*events, *ended(hosts[:1])), POLICY) == Finish()


def test_an_interrupted_run_starts_nothing() -> None:
    hosts = names(3)
    state = state_of(started(hosts, POLICY), *planned(hosts), RunInterrupted(signal="SIGINT", times=1))
    assert decide(state, POLICY) == Finish()


def test_unreachable_and_blocked_hosts_have_a_budget_of_their_own() -> None:
    hosts = names(10)
    policy = Policy(max_unreachable=Share.parse("10%"))
    lost = [
        HostFinished(host="gpu01", outcome="unreachable"),
        HostFinished(host="gpu02", outcome="blocked"),
    ]
    one = state_of(started(hosts, policy), lost[0], *planned(hosts[1:]))
    two = state_of(started(hosts, policy), *lost, *planned(hosts[2:]))
    assert isinstance(decide(one, policy), Start)
    assert isinstance(decide(two, policy), Halt)


def test_with_nothing_left_to_start_lost_hosts_are_no_halt() -> None:
    hosts = names(2)
    state = state_of(
        started(hosts, POLICY),
        HostFinished(host="gpu01", outcome="unreachable"),
        HostFinished(host="gpu02", outcome="ok"),
    )
    assert decide(state, POLICY) == Finish()


# -- laws ------------------------------------------------------------------------------------------

outcomes = st.sampled_from(["ok", "changed", "failed", "rolled_back", "unproven", "rollback_failed"])
surveys = st.sampled_from(["pending", "pending", "pending", "idle", "unreachable", "blocked"])
shares = st.one_of(
    st.integers(0, 5).map(Share.parse), st.sampled_from(["0%", "10%", "50%", "100%"]).map(Share.parse)
)
sizes = shares.filter(lambda share: bool(share.count or share.percent))
policies = st.builds(
    Policy,
    canary=st.integers(0, 3),
    batch=st.lists(sizes, min_size=1, max_size=3).map(tuple),
    max_failures=shares,
    max_unreachable=shares,
)


@given(st.lists(st.tuples(surveys, outcomes), min_size=1, max_size=25), policies)
def test_laws_of_every_rollout(fleet: list[tuple[str, Outcome]], policy: Policy) -> None:
    hosts = names(len(fleet))
    fate = {host: outcome for host, (_, outcome) in zip(hosts, fleet, strict=True)}
    events: list[Event] = [started(hosts, policy)]
    for host, (survey, _) in zip(hosts, fleet, strict=True):
        if survey in ("unreachable", "blocked"):
            events.append(HostFinished(host=host, outcome=survey))
        else:
            events.append(HostPlanned(host=host, pending=survey == "pending"))
            if survey == "idle":
                events.append(HostFinished(host=host, outcome="ok"))
    pending = [h for h, (survey, _) in zip(hosts, fleet, strict=True) if survey == "pending"]
    begun: list[str] = []
    halted = tripped = False
    for _ in range(len(fleet) + 3):
        decision = decide(state_of(*events), policy)
        assert decision == decide(state_of(*events), policy)
        if isinstance(decision, Finish):
            break
        if isinstance(decision, Halt):
            assert not halted
            halted = True
            events.append(RunHalted(reason=decision.reason))
            continue
        if isinstance(decision, Trip):
            assert not tripped
            halted = tripped = True
            events.append(BreakerTripped(reason=decision.reason))
            continue
        assert isinstance(decision, Start), "with every host planned and none running there is no waiting"
        assert not halted, "a halted run starts nothing"
        assert decision.hosts, "a wave is never empty"
        assert not set(decision.hosts) & set(begun), "no host starts twice"
        bad = sum(fate[host] not in GOOD for host in begun)
        assert bad <= policy.max_failures.of(len(pending)), "nothing starts once the budget is spent"
        if policy.canary and not begun:
            assert list(decision.hosts) == pending[: policy.canary]
        begun += decision.hosts
        events += wave(decision.name, decision.hosts)
        for host in decision.hosts:
            events += ended((host,), fate[host])
    else:
        pytest.fail("the rollout neither finished nor halted")
    assert halted or sorted(begun) == sorted(pending)
    if policy.canary and any(fate[host] not in GOOD for host in pending[: policy.canary]):
        assert len(begun) <= policy.canary
