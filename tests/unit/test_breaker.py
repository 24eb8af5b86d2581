"""What trips the breaker, and which failures count as one."""

from __future__ import annotations

import pytest

from fleetfix.engine.breaker import normalised, why_tripped
from fleetfix.engine.rollout import Finish, Halt, Start, Trip, Wait, decide
from fleetfix.errors import Failure, FailureKind
from fleetfix.events import (
    BreakerTripped,
    Event,
    HostFinished,
    HostLost,
    HostStarted,
    Outcome,
    RunHalted,
    RunResumed,
)
from fleetfix.policy import Policy, Share
from tests.unit.test_rollout import names, planned, started, state_of, wave

POLICY = Policy(canary=0, batch=(Share.parse("100%"),), max_failures=Share.parse("100%"))


def failed(
    host: str,
    message: str,
    outcome: Outcome = "rolled_back",
    kind: FailureKind = "command",
    step: str = "a",
) -> HostFinished:
    failure = Failure(kind=kind, message=message)
    return HostFinished(host=host, outcome=outcome, failure=failure, step=step, touched=True)


def after(*ends: Event, hosts: int = 8) -> list[Event]:
    fleet = names(hosts)
    return [started(fleet, POLICY), *planned(fleet), *wave("batch 1", fleet), *ends]


@pytest.mark.parametrize(
    ("host", "message", "other", "alike"),
    [
        ("gpu01", "gpu01: no space left on /opt", "gpu07: no space left on /opt", True),
        ("gpu01", "no space left on /opt", "no space left on /var", False),
        ("gpu01", "pid 4211 did not end within 60 s", "pid 17 did not end within 61.5 s", True),
        ("gpu01", "10.0.0.1 refused", "10.0.0.207 refused", True),
        ("gpu01", "sha256 9f86d081884c7d65 differs", "sha256 60303ae22b998861 differs", True),
        (
            "gpu01",
            "GPU-0a1b2c3d-1111-2222-3333-444455556666 fell off",
            "GPU-0f1b2c3d-9999-2222-3333-444455556666 fell off",
            True,
        ),
        ("gpu01", "Disk  full", "disk full", True),
        ("gpu01", "the face is bad", "the facade is bad", False),
    ],
)
def test_a_message_is_compared_without_what_differs_on_every_host(
    host: str, message: str, other: str, alike: bool
) -> None:
    assert (normalised(message, host) == normalised(other, "gpu07")) is alike


def test_a_name_inside_another_name_is_not_the_hosts_own() -> None:
    assert normalised("gpu0 and gpu0-mgmt", "gpu0") == "host and gpu<number>-mgmt"


def test_three_hosts_that_fail_alike_trip_it_and_two_do_not() -> None:
    two = [failed("gpu01", "gpu01: disk full"), failed("gpu02", "gpu02: disk full", "failed")]
    assert why_tripped(state_of(*after(*two))) is None
    three = [*two, failed("gpu05", "gpu05: disk full")]
    why = why_tripped(state_of(*after(*three)))
    assert why == "3 hosts failed alike: gpu[01-02,05] at a: disk full"


@pytest.mark.parametrize(
    "third",
    [
        failed("gpu03", "disk full", step="b"),
        failed("gpu03", "disk full", kind="no_space"),
        failed("gpu03", "another thing"),
        failed("gpu03", "disk full", "changed"),
    ],
)
def test_what_fails_elsewhere_or_otherwise_is_no_third(third: HostFinished) -> None:
    events = after(failed("gpu01", "disk full"), failed("gpu02", "disk full"), third)
    assert why_tripped(state_of(*events)) is None


@pytest.mark.parametrize("kind", ["cancelled", "unreachable"])
def test_hosts_that_were_ended_or_lost_have_no_failure_in_common(kind: FailureKind) -> None:
    ends = [failed(host, "ended", "cancelled", kind) for host in names(4)]
    assert why_tripped(state_of(*after(*ends))) is None


def test_hosts_given_up_before_any_change_trip_nothing() -> None:
    fleet = names(5)
    blocked = [
        HostFinished(host=h, outcome="blocked", failure=Failure(kind="blocked", message="x")) for h in fleet
    ]
    assert why_tripped(state_of(started(fleet, POLICY), *blocked)) is None


def test_one_failed_rollback_trips_it() -> None:
    state = state_of(*after(failed("gpu04", "disk full", "rollback_failed")))
    assert decide(state, POLICY) == Trip("going back failed on gpu04")


def test_hosts_on_which_the_operator_cut_a_way_back_short_are_not_lost() -> None:
    ends = [failed(host, "cut short", "rollback_pending", "cancelled") for host in ("gpu01", "gpu06")]
    assert why_tripped(state_of(*after(*ends))) is None


def lost(host: str, *, by_controller: bool = False) -> list[Event]:
    failure = Failure(kind="unreachable", message="no route")
    return [
        HostLost(host=host, failure=failure, by_controller=by_controller),
        HostFinished(host=host, outcome="rollback_pending", failure=failure, touched=True),
    ]


def test_two_hosts_lost_after_a_change_trip_it_unless_the_network_was_the_controllers() -> None:
    assert why_tripped(state_of(*after(*lost("gpu01")))) is None
    both = why_tripped(state_of(*after(*lost("gpu01"), *lost("gpu06"))))
    assert both == "2 hosts were lost after a change: gpu[01,06]"
    own = [*lost("gpu01", by_controller=True), *lost("gpu06", by_controller=True)]
    assert why_tripped(state_of(*after(*own))) is None


def test_it_trips_also_in_a_run_that_is_halted_already_and_once() -> None:
    events = after(failed("gpu01", "disk full"), RunHalted(reason="enough"))
    assert decide(state_of(*events), POLICY) == Wait()
    events.append(failed("gpu02", "disk full", "rollback_failed"))
    decision = decide(state_of(*events), POLICY)
    assert isinstance(decision, Trip)
    events.append(BreakerTripped(reason=decision.reason))
    state = state_of(*events)
    assert (state.halted, state.tripped) == ("enough", "going back failed on gpu02")
    assert decide(state, POLICY) == Wait()
    events += [HostFinished(host=h, outcome="changed", touched=True) for h in names(8)[2:]]
    assert decide(state_of(*events), POLICY) == Finish()


def test_after_a_trip_no_further_host_is_called() -> None:
    fleet = names(4)
    events: list[Event] = [started(fleet, POLICY), *planned(fleet), *wave("batch 1", fleet[:1])]
    events += [failed("gpu01", "x", "rollback_failed")]
    decision = decide(state_of(*events), POLICY)
    assert isinstance(decision, Trip)
    assert not isinstance(decide(state_of(*events, BreakerTripped(reason="x")), POLICY), Start | Halt)


def test_a_host_that_was_not_started_has_no_part_in_it() -> None:
    fleet = names(3)
    ends = [failed(host, "boom", "failed") for host in fleet]
    assert why_tripped(state_of(started(fleet, POLICY), *ends)) is None
    begun = [HostStarted(host=host) for host in fleet]
    assert why_tripped(state_of(started(fleet, POLICY), *begun, *ends)) is not None


def test_a_run_that_is_taken_up_after_a_reset_trips_on_new_ends_and_not_on_those_looked_at() -> None:
    events = after(failed("gpu01", "disk full", "rollback_failed"), BreakerTripped(reason="x"))
    events += [HostFinished(host=h, outcome="not_started") for h in names(8)[2:]]
    events.append(failed("gpu02", "disk full", "rollback_failed"))
    resumed = RunResumed(operator="ann", controller="c", hosts=names(8)[2:])
    state = state_of(*events, resumed)
    assert (state.tripped, state.halted, why_tripped(state)) == (None, None, None)
    again = state_of(*events, resumed, failed("gpu03", "disk full", "rollback_failed"))
    assert why_tripped(again) == "going back failed on gpu03"


def test_without_a_trip_what_failed_before_a_run_was_taken_up_still_counts() -> None:
    events = after(failed("gpu01", "disk full"), failed("gpu02", "disk full"))
    events.append(RunResumed(operator="ann", controller="c", hosts=names(8)[2:]))
    events += [HostStarted(host="gpu03"), failed("gpu03", "disk full")]
    assert why_tripped(state_of(*events)) is not None
