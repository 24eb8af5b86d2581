"""In what order hosts go: whole units, strata, the last; and how many may be at work at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.engine.rollout import Finish, Halt, Start, Trip, Wait, decide, to_begin
from fleetfix.events import (
    BreakerTripped,
    CohortFormed,
    Event,
    HostConnected,
    HostFinished,
    HostPlanned,
    HostStarted,
    NetworkLost,
    NetworkReturned,
    Outcome,
    RunHalted,
    WaveStarted,
)
from fleetfix.inventory import Host
from fleetfix.order import canary, goes_last, known_to_go_last, next_wave, same_machine, strata_of
from fleetfix.policy import Policy
from fleetfix.state import RunState
from tests.unit.test_rollout import ended, names, planned, started, state_of, wave


def policy_of(**given: object) -> Policy:
    return Policy.model_validate({"batch": ["100%"], "max_unreachable": "100%", **given})


def waves(events: list[Event], policy: Policy) -> list[tuple[str, tuple[str, ...]]]:
    """All waves of a run in which every host ends well."""
    found = []
    while (decision := decide(state_of(*events), policy)) != Finish():
        assert isinstance(decision, Start), decision
        found.append((decision.name, decision.hosts))
        events = [*events, *wave(decision.name, decision.hosts), *ended(decision.hosts)]
    return found


# -- units ----------------------------------------------------------------------------------------


def test_a_cohort_is_one_unit_of_canary_and_batch() -> None:
    fleet, policy = names(8), policy_of(canary=1, batch=[3])
    cohorts = [
        CohortFormed(name="job a", hosts=("gpu01", "gpu05")),
        CohortFormed(name="job b", hosts=("gpu03", "gpu04")),
    ]
    assert waves([started(fleet, policy), *planned(fleet), *cohorts], policy) == [
        ("canary", ("gpu01", "gpu05")),
        ("batch 1", ("gpu02", "gpu03", "gpu04")),
        ("batch 2", ("gpu06", "gpu07", "gpu08")),
    ]


def test_a_unit_that_is_larger_than_a_batch_goes_alone_and_whole() -> None:
    fleet, policy = names(5), policy_of(canary=0, batch=[2])
    cohort = CohortFormed(name="job", hosts=("gpu02", "gpu03", "gpu04"))
    assert waves([started(fleet, policy), *planned(fleet), cohort], policy) == [
        ("batch 1", ("gpu01",)),
        ("batch 2", ("gpu02", "gpu03", "gpu04")),
        ("batch 3", ("gpu05",)),
    ]


def test_a_healthy_member_goes_with_its_cohort_and_a_cohort_that_is_all_healthy_does_not() -> None:
    fleet, policy = names(4), policy_of(canary=1)
    events: list[Event] = [started(fleet, policy)]
    events += [HostPlanned(host=host, pending=host == "gpu02") for host in fleet]
    events += [
        CohortFormed(name="job a", hosts=("gpu01", "gpu02")),
        CohortFormed(name="job b", hosts=("gpu03", "gpu04")),
    ]
    found = next_wave(state_of(*events), policy)
    assert found is not None
    assert found.hosts == ("gpu01", "gpu02")
    events += wave("canary", found.hosts) + ended(found.hosts)
    assert next_wave(state_of(*events), policy) is None


# -- strata ---------------------------------------------------------------------------------------


def test_the_canary_has_its_number_of_each_stratum() -> None:
    fleet = names(6)
    policy = policy_of(canary=1, strata=["sku"])
    skus = dict(zip(fleet, ["a", "a", "b", "a", "c", "b"], strict=True))
    begun = started(fleet, policy).model_copy(update={"strata": skus})
    assert waves([begun, *planned(fleet)], policy) == [
        ("canary", ("gpu01", "gpu03", "gpu05")),
        ("batch 1", ("gpu02", "gpu04", "gpu06")),
    ]
    two = policy_of(canary=2, strata=["sku"])
    assert canary(state_of(begun, *planned(fleet)), two) == ("gpu01", "gpu02", "gpu03", "gpu05", "gpu06")


def test_only_a_host_with_something_to_do_stands_for_its_stratum() -> None:
    fleet, policy = names(3), policy_of(canary=1, strata=["sku"])
    begun = started(fleet, policy).model_copy(update={"strata": dict.fromkeys(fleet, "a")})
    state = state_of(begun, HostPlanned(host="gpu01", pending=False), *planned(fleet[1:]))
    assert canary(state, policy) == ("gpu02",)


def test_strata_are_read_from_the_hosts_variables() -> None:
    hosts = [host("gpu01", sku="h100", driver=550), host("gpu02", sku="a100")]
    policy = policy_of(strata=["sku", "driver"])
    assert strata_of(policy, hosts) == {"gpu01": "sku=h100, driver=550", "gpu02": "sku=a100, driver=?"}
    assert strata_of(policy_of(), hosts) == {}


def host(name: str, *, via: str | None = None, transport: str = "asyncssh", **vars: object) -> Host:
    return Host.model_validate(
        {"name": name, "address": f"10.0.0.{name[-1]}", "via": via, "transport": transport, "vars": vars}
    )


# -- the last -------------------------------------------------------------------------------------


@pytest.mark.parametrize("via", ["gpu01", "op@gpu01:2222", "10.0.0.1", "elsewhere,gpu01"])
def test_a_host_through_which_others_are_reached_goes_last(via: str) -> None:
    hosts = [host("gpu01"), host("gpu02", via=via), host("gpu03", via=via), host("gpu04")]
    assert known_to_go_last(hosts) == {"gpu01": "the way to gpu[02-03]"}


def test_the_controller_itself_goes_last_by_its_transport_or_its_machine() -> None:
    assert known_to_go_last([host("gpu01", transport="local")]) == {"gpu01": "the controller itself"}


def test_a_jump_host_of_the_ssh_configuration_goes_last_too() -> None:
    hosts = [host("gpu01", address="10.0.0.1"), host("gpu02"), host("gpu03")]
    jumps = {"gpu02": ("bastion", "10.0.0.1"), "gpu03": ("bastion", "10.0.0.1")}
    assert known_to_go_last(hosts, jumps) == {"gpu01": "the way to gpu[02-03]"}
    fleet, policy = names(3), policy_of()
    begun = started(fleet, policy).model_copy(update={"controller_machine": "m2/b"})
    connected = [connection(name, f"m{number}") for number, name in enumerate(fleet, start=1)]
    assert goes_last(state_of(begun, *connected)) == {"gpu02": "the controller itself"}
    assert goes_last(state_of(started(fleet, policy), *connected)) == {}


def connection(name: str, machine: str, boot: str = "b") -> HostConnected:
    return HostConnected(host=name, user="root", python="3.11", machine_id=machine, boot_id=boot)


def test_the_last_go_one_by_one_after_all_others_and_the_controller_behind_them() -> None:
    fleet, policy = names(5), policy_of(canary=1)
    last = {"gpu01": "the controller itself", "gpu02": "the way to gpu03", "gpu04": "the way to gpu05"}
    begun = started(fleet, policy).model_copy(update={"last": last})
    assert waves([begun, *planned(fleet)], policy) == [
        ("canary", ("gpu03",)),
        ("batch 1", ("gpu05",)),
        ("last 1", ("gpu02",)),
        ("last 2", ("gpu04",)),
        ("last 3", ("gpu01",)),
    ]


def test_where_only_they_have_something_to_do_one_of_them_is_the_canary() -> None:
    fleet, policy = names(3), policy_of(canary=1)
    begun = started(fleet, policy).model_copy(update={"last": {"gpu01": "x", "gpu03": "x"}})
    events: list[Event] = [begun, *(HostPlanned(host=h, pending=h != "gpu02") for h in fleet)]
    events.append(HostFinished(host="gpu02", outcome="ok"))
    assert waves(events, policy) == [("canary", ("gpu01",)), ("last 1", ("gpu03",))]


def test_a_run_over_one_host_has_no_last() -> None:
    policy = policy_of(canary=0)
    begun = started(names(1), policy).model_copy(update={"last": {"gpu01": "the controller itself"}})
    assert waves([begun, *planned(names(1))], policy) == [("batch 1", ("gpu01",))]


def test_one_machine_is_known_by_machine_id_and_boot() -> None:
    fleet = names(5)
    state = state_of(
        started(fleet, policy_of()),
        connection("gpu01", "m1"),
        connection("gpu02", "m1"),
        connection("gpu03", "m1", "another boot: a clone"),
        connection("gpu04", ""),
        connection("gpu05", ""),
    )
    assert {name: str(all_names) for name, all_names in same_machine(state).items()} == {
        "gpu01": "gpu[01-02]",
        "gpu02": "gpu[01-02]",
    }


# -- out of service -------------------------------------------------------------------------------


def at_work(policy: Policy, *events: Event, hosts: int = 10) -> RunState:
    fleet = names(hosts)
    return state_of(
        started(fleet, policy), *planned(fleet), WaveStarted(name="batch 1", hosts=fleet), *events
    )


@pytest.mark.parametrize(("bound", "first"), [(None, 10), ("10", 10), ("30%", 3), ("1", 1), ("0", 0)])
def test_no_more_hosts_are_begun_than_may_be_out_of_service(bound: str | None, first: int) -> None:
    policy = policy_of(canary=0, max_unavailable=bound)
    state = at_work(policy)
    if first:
        assert to_begin(state, policy, ()) == names(10)[:first]
    else:
        assert isinstance(decide(state, policy), Halt)


@pytest.mark.parametrize(
    ("outcome", "job_stopped", "room"),
    [
        ("changed", False, 2), ("rolled_back", False, 2), ("failed", False, 2), ("failed", True, 1),
        ("rollback_pending", False, 1), ("cancelled", True, 1),
    ],
)  # fmt: skip
def test_a_host_that_ends_gives_its_place_back_unless_it_stays_out_of_service(
    outcome: Outcome, job_stopped: bool, room: int
) -> None:
    policy = policy_of(canary=0, max_unavailable=2, max_failures="100%")
    end = HostFinished(host="gpu01", outcome=outcome, job_stopped=job_stopped, touched=True)
    state = at_work(policy, HostStarted(host="gpu01"), end)
    assert to_begin(state, policy, ("gpu01",)) == names(10)[1 : 1 + room]


def test_hosts_at_work_keep_their_places_until_they_end() -> None:
    policy = policy_of(canary=0, max_unavailable=3)
    begun = [HostStarted(host="gpu01"), HostStarted(host="gpu02")]
    two = ("gpu01", "gpu02")
    assert to_begin(at_work(policy, *begun), policy, two) == ("gpu03",)
    assert to_begin(at_work(policy, *begun), policy, (*two, "gpu03")) == ()
    assert to_begin(at_work(policy, *begun, *ended(two)), policy, two) == ("gpu03", "gpu04", "gpu05")


def test_hosts_that_were_given_up_before_any_change_count_too() -> None:
    fleet, policy = names(10), policy_of(canary=0, max_unavailable="40%")
    lost = [
        HostFinished(host="gpu09", outcome="unreachable"),
        HostFinished(host="gpu10", outcome="blocked"),
    ]
    events = [
        started(fleet, policy),
        *planned(fleet[:8]),
        *lost,
        WaveStarted(name="batch 1", hosts=fleet[:8]),
    ]
    assert to_begin(state_of(*events), policy, ()) == fleet[:2]


def test_where_it_can_never_be_met_the_run_halts_and_says_the_numbers() -> None:
    fleet, policy = names(10), policy_of(canary=0, max_unavailable="20%")
    lost = [HostFinished(host=host, outcome="unreachable") for host in fleet[:2]]
    decision = decide(state_of(started(fleet, policy), *planned(fleet[2:]), *lost), policy)
    assert decision == Halt(
        "2 out of service already, and gpu03 would be one more, at most 2 (20% of 10) may be:"
        " --max-unavailable decides"
    )


def test_a_cohort_that_can_never_be_out_of_service_as_a_whole_halts_before_anything_is_begun() -> None:
    fleet, policy = names(6), policy_of(max_unavailable=2)
    cohort = CohortFormed(name="job", hosts=("gpu04", "gpu05", "gpu06"))
    decision = decide(state_of(started(fleet, policy), *planned(fleet), cohort), policy)
    assert isinstance(decision, Halt)
    assert "3 more go together, at most 2 may be" in decision.reason


def test_a_unit_is_begun_whole_or_not_yet() -> None:
    fleet, policy = names(4), policy_of(canary=0, max_unavailable=2)
    cohort = CohortFormed(name="job", hosts=("gpu02", "gpu03"))
    events = [started(fleet, policy), *planned(fleet), cohort, WaveStarted(name="batch 1", hosts=fleet)]
    assert to_begin(state_of(*events), policy, ()) == ("gpu01",)
    events += [HostStarted(host="gpu01"), *ended(("gpu01",))]
    assert to_begin(state_of(*events), policy, ("gpu01",)) == ("gpu02", "gpu03")


def test_in_a_run_that_is_to_stop_every_called_host_is_told_so() -> None:
    policy = policy_of(canary=0, max_unavailable=1)
    assert to_begin(at_work(policy, RunHalted(reason="x")), policy, ()) == names(10)


def test_while_the_controllers_network_is_lost_nothing_is_called_or_begun() -> None:
    policy = policy_of(canary=0)
    lost = NetworkLost(dropped=6, open=10)
    assert to_begin(at_work(policy, lost), policy, ()) == ()
    before = [started(names(3), policy), *planned(names(3))]
    assert decide(state_of(*before, lost), policy) == Wait()
    assert isinstance(decide(state_of(*before, lost, NetworkReturned(seconds=3)), policy), Start)


# -- laws -----------------------------------------------------------------------------------------

shares = st.one_of(st.integers(1, 6), st.sampled_from(["20%", "50%", "100%"]))
bounds = st.one_of(st.none(), st.integers(0, 6), st.sampled_from(["20%", "50%", "100%"]))
policies = st.builds(
    policy_of,
    canary=st.integers(0, 2),
    batch=st.lists(shares, min_size=1, max_size=3),
    max_failures=st.one_of(st.integers(0, 3), st.just("100%")),
    max_unavailable=bounds,
    strata=st.sampled_from([[], ["sku"]]),
)
fates = st.sampled_from(["changed", "changed", "changed", "ok", "failed", "rolled_back", "rollback_failed"])


@given(
    st.lists(
        st.tuples(st.booleans(), fates, st.booleans(), st.sampled_from("ab")), min_size=1, max_size=14
    ),
    st.lists(st.sets(st.integers(0, 13), min_size=2, max_size=4), max_size=3),
    st.sets(st.integers(0, 13), max_size=2),
    policies,
    st.randoms(use_true_random=False),
)
def test_laws_of_order_and_of_what_is_out_of_service(
    fleet: list[tuple[bool, Outcome, bool, str]],
    drawn: list[set[int]],
    late: set[int],
    policy: Policy,
    chance: object,
) -> None:
    hosts = names(len(fleet))
    fate = {name: (outcome, stopped) for name, (_, outcome, stopped, _) in zip(hosts, fleet, strict=True)}
    begun = started(hosts, policy).model_copy(
        update={
            "strata": {h: one[3] for h, one in zip(hosts, fleet, strict=True)} if policy.strata else {},
            "last": {hosts[n]: "x" for n in late if n < len(hosts)},
        }
    )
    events: list[Event] = [begun]
    events += [HostPlanned(host=h, pending=one[0]) for h, one in zip(hosts, fleet, strict=True)]
    units = _apart(drawn, hosts)
    events += [CohortFormed(name=f"job {n}", hosts=unit) for n, unit in enumerate(units)]
    working = {
        h for unit in _all_units(units, hosts) for h in unit if any(fleet[hosts.index(m)][0] for m in unit)
    }
    events += [HostFinished(host=h, outcome="ok") for h in hosts if h not in working]
    called: list[tuple[str, ...]] = []
    at_work: list[str] = []
    taken: set[str] = set()
    out: set[str] = set()
    most = policy.max_unavailable.of(len(hosts)) if policy.max_unavailable is not None else len(hosts)
    stopped = False
    for _ in range(8 * len(hosts) + 8):
        state = state_of(*events)
        decision = decide(state, policy)
        assert decision == decide(state_of(*events), policy), "equal histories decide the same"
        match decision:
            case Finish():
                break
            case Halt() | Trip():
                stopped = True
                trip = isinstance(decision, Trip)
                events.append((BreakerTripped if trip else RunHalted)(reason=decision.reason))
            case Start(hosts=wave_hosts):
                assert not stopped
                assert not at_work, "a wave waits for the one before"
                _assert_whole(wave_hosts, units, working)
                called.append(wave_hosts)
                events.append(WaveStarted(name=decision.name, hosts=wave_hosts))
            case Wait():
                for name in to_begin(state, policy, taken):
                    taken.add(name)
                    if stopped:
                        events.append(HostFinished(host=name, outcome="not_started"))
                    else:
                        at_work.append(name)
                        events.append(HostStarted(host=name))
                if not stopped:
                    assert len(at_work) + len(out) <= most, "more out of service than may be"
                if at_work:
                    name = at_work.pop(chance.randrange(len(at_work)))  # type: ignore[attr-defined]
                    outcome, job_stopped = fate[name]
                    events.append(
                        HostFinished(host=name, outcome=outcome, job_stopped=job_stopped, touched=True)
                    )
                    out |= {name} if job_stopped or outcome == "rollback_failed" else set()
    else:
        pytest.fail("the rollout neither finished nor halted")
    assert not at_work
    assert stopped or {name for one in called for name in one} == working


def _apart(drawn: Sequence[set[int]], hosts: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Cohorts that share no host."""
    free, found = set(hosts), []
    for numbers in drawn:
        unit = tuple(hosts[n] for n in sorted(numbers) if n < len(hosts) and hosts[n] in free)
        if len(unit) > 1:
            free -= set(unit)
            found.append(unit)
    return found


def _all_units(units: Sequence[tuple[str, ...]], hosts: tuple[str, ...]) -> list[tuple[str, ...]]:
    taken = {name for unit in units for name in unit}
    return [*units, *((name,) for name in hosts if name not in taken)]


def _assert_whole(wave_hosts: tuple[str, ...], units: Sequence[tuple[str, ...]], working: set[str]) -> None:
    for unit in units:
        inside = set(unit) & set(wave_hosts)
        assert not inside or inside == set(unit) & working, "a unit is never split"
