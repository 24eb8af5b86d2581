"""A saved plan is applied only where the host still is as it was planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleetfix.engine.context import Interrupts
from fleetfix.engine.fleetrun import run_fleet
from fleetfix.policy import Policy, Share
from fleetfix.recorder import Recorder
from fleetfix.state import RunState
from fleetfix.transports.scripted import Fleet
from tests.engine.toys import HandClock, Shelf, Switch, play, request, resume, step, toy_host

STEPS = [step("a", Switch(name="a")), step("b", Switch(name="b", risk="compensable"))]
ALL = Policy(canary=0, batch=(Share.parse("100%"),), max_unreachable=Share.parse("100%"))

A, B = frozenset({"a: a, reversible"}), frozenset({"b: b, compensable"})


async def applied(fleet: Fleet, expected: dict[str, frozenset[str]], **asked: object) -> RunState:
    asked_for = replace(request(tuple(fleet), STEPS, policy=ALL), expected=expected, **asked)
    shelf = Shelf()
    recorder = Recorder(asked_for.run, shelf, clock=lambda: 0.0)
    with fleet:
        return await run_fleet(asked_for, recorder, shelf, interrupts=Interrupts(), clock=HandClock())


async def test_hosts_that_are_as_planned_are_mended_and_the_others_not_touched() -> None:
    fleet = Fleet(
        {
            "equal": toy_host(a=False, b=False),
            "more": toy_host(a=False, b=False),
            "less": toy_host(a=False, b=True),
            "well": toy_host(a=True, b=True),
            "unplanned": toy_host(a=False, b=True),
        }
    )
    expected = {"equal": A | B, "more": A, "less": A | B, "well": A, "unplanned": frozenset[str]()}
    state = await applied(fleet, expected)
    assert {name: host.outcome for name, host in state.hosts.items()} == {
        "equal": "changed", "more": "blocked", "less": "blocked", "well": "ok", "unplanned": "blocked",
    }  # fmt: skip
    assert fleet["equal"].world == {"a": True, "b": True}
    assert [fleet[name].runs("do") for name in ("more", "less", "well", "unplanned")] == [[]] * 4
    ends = {name: host.finished for name, host in state.hosts.items()}
    assert {end.failure.kind for end in ends.values() if end and end.failure} == {"stale_plan"}
    reasons = {name: end.reason for name, end in ends.items() if end}
    assert reasons["more"] == "the host changed since the plan: now it would also turn b on"
    assert reasons["less"] == "the host changed since the plan: now there is less to do in b"
    assert reasons["unplanned"] == "the host changed since the plan: now it would also turn a on"


async def test_the_same_change_at_a_higher_risk_is_another_one() -> None:
    fleet = Fleet({"gpu01": toy_host(a=True, b=False)})
    state = await applied(fleet, {"gpu01": frozenset({"b: b, reversible"})})
    assert state.hosts["gpu01"].outcome == "blocked"
    assert fleet["gpu01"].world["b"] is False


@pytest.mark.parametrize(
    ("booted", "outcome"), [("boot-1", "changed"), ("", "changed"), ("other", "blocked")]
)
async def test_what_was_found_before_a_restart_says_nothing_after_it(booted: str, outcome: str) -> None:
    fleet = Fleet({"gpu01": toy_host(a=False, b=True)})
    state = await applied(fleet, {"gpu01": A}, boots={"gpu01": booted})
    assert state.hosts["gpu01"].outcome == outcome


async def test_hosts_that_changed_count_as_blocked_ones_do() -> None:
    fleet = Fleet({f"gpu0{n}": toy_host(a=False, b=False) for n in (1, 2, 3)})
    few = ALL.model_copy(update={"max_unreachable": Share.parse("1")})
    everything = A | B
    state = await applied(fleet, {"gpu01": everything, "gpu02": A, "gpu03": B}, policy=few)
    assert state.exit == 3
    assert fleet["gpu01"].runs("do") == []


async def test_what_a_run_has_begun_it_may_finish_and_nothing_else_is_begun_unannounced() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False, b=False), "gpu02": toy_host(a=False, b=False)})
    interrupts = Interrupts()

    def cut_short(args: dict[str, Any], world: dict[str, Any]) -> None:
        world[args["name"]] = args["to"]
        interrupts.interrupt("SIGTERM")

    fleet["gpu01"].on("toy.set", cut_short)
    expected = {"gpu01": A | B, "gpu02": A}
    one = ALL.model_copy(update={"canary": 1})
    _, shelf = await play(
        fleet, STEPS, policy=one, interrupts=interrupts, expected={"gpu01": A | B, "gpu02": A | B}
    )
    assert fleet["gpu01"].world == {"a": True, "b": False}
    state = await resume(fleet, STEPS, shelf, policy=one, expected=expected)
    assert {name: host.outcome for name, host in state.hosts.items()} == {
        "gpu01": "changed",
        "gpu02": "blocked",
    }
    assert fleet["gpu01"].world == {"a": True, "b": True}
    assert fleet["gpu02"].runs("do") == []


async def test_without_a_saved_plan_nothing_is_compared() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False, b=False)})
    state, _ = await play(fleet, STEPS)
    assert state.hosts["gpu01"].outcome == "changed"
