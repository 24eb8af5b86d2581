"""What is told of order, soak, breaker and network: one line each, and in words of hosts."""

from __future__ import annotations

import pytest

from fleetfix.events import (
    BreakerTripped,
    Event,
    HostConnected,
    HostFinished,
    HostPlanned,
    NetworkLost,
    NetworkReturned,
    RunHalted,
    SoakStarted,
)
from fleetfix.policy import Policy
from fleetfix.runs import BreakerRow
from fleetfix.state import fold
from fleetfix.views.breaker import breakers_text
from fleetfix.views.lines import line_of
from fleetfix.views.order import order_text
from fleetfix.views.summary import summary_text
from tests.cli.stories import records
from tests.unit.test_rollout import ended, names, planned, started, state_of, wave


def policy_of(**given: object) -> Policy:
    return Policy.model_validate({"batch": ["25%"], **given})


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (SoakStarted(wave="batch 2", seconds=300.0), "batch 2 soaks for 5 min"),
        (
            NetworkLost(dropped=9, open=16),
            (
                "9 of 16 sessions dropped at once: this machine's own network;"
                " nothing is begun until they are back"
            ),
        ),
        (NetworkReturned(seconds=75.0), "the network is back after 1 min 15 s"),
        (
            BreakerTripped(reason="going back failed on gpu\x1b[31m04"),
            (
                "the breaker tripped: going back failed on gpu\\x1b[31m04;"
                " no run changes hosts of this inventory until the breaker is reset"
            ),
        ),
    ],
)
def test_each_is_one_line(event: Event, said: str) -> None:
    (record,) = records([event])
    assert line_of(record, fold([])) == said


def test_a_summary_tells_of_the_breaker_once_and_of_the_wait() -> None:
    fleet, policy = names(2), policy_of()
    events = [
        started(fleet, policy),
        *planned(fleet),
        *wave("canary", fleet[:1]),
        *ended(fleet[:1], "failed"),
    ]
    events += [NetworkLost(dropped=3, open=4), NetworkReturned(seconds=90.0)]
    tripped = summary_text(state_of(*events, BreakerTripped(reason="three alike")), 3)
    assert tripped.count("three alike") == 1
    assert "the breaker tripped: three alike" in tripped
    assert "waited 1 min 30 s for the controller's network" in tripped
    assert "fleetfix breaker reset --reason TEXT" in tripped
    both = summary_text(
        state_of(*events, RunHalted(reason="enough"), BreakerTripped(reason="three alike")), 3
    )
    assert "halted: enough" in both
    assert "the breaker tripped: three alike" in both
    assert "breaker" not in summary_text(state_of(*events), 3)


def test_the_order_is_said_in_hosts() -> None:
    fleet = names(10)
    policy = policy_of(
        canary=1, strata=["sku"], batch=[2, "50%"], soak=60, max_unavailable="30%", on_unproven="count"
    )
    begun = started(fleet, policy).model_copy(
        update={
            "strata": {name: f"sku={'ab'[n % 2]}" for n, name in enumerate(fleet)},
            "last": {"gpu03": "the way to gpu[04-05]"},
        }
    )
    events = [begun, HostFinished(host="gpu10", outcome="unreachable"), *planned(fleet[:9])]
    said = (
        "canary of 2 (1 of each sku), then batches of 2, 4 …, 1 min apart, last, one at a time,"
        " gpu03 (the way to gpu[04-05]); at most 3 hosts out of service at once;"
        " halts at the 1st host that fails, or when more than 1 cannot be reached or are blocked;"
        " a speed that is not proven counts as a failure"
    )
    assert order_text(state_of(*events), policy) == said
    events += [*wave("canary", fleet[:2]), *ended(fleet[:2])]
    assert order_text(state_of(*events), policy) == said, "also when it is told later"


def test_a_run_over_the_controller_alone_has_no_order_to_tell() -> None:
    policy = policy_of(canary=1)
    begun = started(("here",), policy).model_copy(update={"last": {"here": "the controller itself"}})
    connected = HostConnected(host="here", user="root", python="3")
    text = order_text(state_of(begun, connected, HostPlanned(host="here", pending=True)), policy)
    assert (
        text == "canary of 1; halts at the 1st host that fails, or when any cannot be reached or is blocked"
    )


def test_breakers_are_told_those_that_hold_first_and_neutral() -> None:
    holds = BreakerRow("lab", 0.0, "r1", "going back failed on gpu01\x1b[2J")
    over = BreakerRow("/etc/fleet.yaml", 0.0, "r0", "old", reset=60.0, reset_by="ann", reset_reason="disk")
    text = breakers_text((holds, over))
    assert "\x1b" not in text
    first, hint, *rest = text.splitlines()
    assert first.startswith("lab: tripped ")
    assert "fleetfix breaker reset -i 'lab' --reason TEXT" in hint
    assert rest[-1].endswith("by ann: disk")
    assert breakers_text((over,)).splitlines()[0] == "no breaker is tripped"
