"""Where another run has a host, and this one is told to wait: the others go on, and nothing is guessed."""

from __future__ import annotations

import asyncio

import pytest

from fleetfix.engine.context import Interrupts
from fleetfix.engine.going_back import roll_back
from fleetfix.policy import Policy, Share
from fleetfix.recorder import Recorder
from fleetfix.session import Purpose
from fleetfix.state import RunState
from fleetfix.transports.scripted import Fleet, ScriptedHost
from tests.engine.toys import Shelf, Switch, play, request, resume, step, toy_host

STEPS = [step("a", Switch(name="a"))]
OTHER = "20260101-000000-other-cccc"
LONG = 600.0


def taken(host: ScriptedHost) -> ScriptedHost:
    """Have another run write to a host."""
    host.grant(_other())
    return host


def _other() -> Purpose:
    asked = request(("gpu01",), STEPS, run=OTHER).purpose()
    return asked.model_copy(update={"operator": "ada", "controller": "bastion", "reason": "night shift"})


def outcomes(state: RunState) -> dict[str, str | None]:
    return {name: host.outcome for name, host in state.hosts.items()}


async def until_changed(host: ScriptedHost) -> None:
    while not host.writes():
        await asyncio.sleep(0.001)


async def test_the_others_go_on_and_the_waiting_one_follows_when_it_is_free() -> None:
    fleet = Fleet(
        {"gpu01": taken(toy_host(a=False)), "gpu02": toy_host(a=False), "gpu03": toy_host(a=False)}
    )

    async def end_there() -> None:
        await asyncio.gather(until_changed(fleet["gpu02"]), until_changed(fleet["gpu03"]))
        assert fleet["gpu01"].executed == [], "what another run changes now is no ground for a plan"
        fleet["gpu01"].lease = None

    ended = asyncio.ensure_future(end_there())
    one_fork = Policy(canary=1, batch=(Share.parse("100%"),), forks=1)
    state, shelf = await play(fleet, STEPS, lock_wait=LONG, policy=one_fork)
    await ended
    assert outcomes(state) == {"gpu01": "changed", "gpu02": "changed", "gpu03": "changed"}
    assert [wave.hosts for wave in state.waves] == [("gpu02",), ("gpu03",), ("gpu01",)]
    (awaited,) = shelf.of("lease_awaited")
    assert (awaited.host, awaited.run, awaited.operator) == ("gpu01", OTHER, "ada")
    assert (awaited.controller, awaited.reason, awaited.seconds) == ("bastion", "night shift", LONG)


async def test_a_host_that_the_other_run_has_mended_is_left_alone() -> None:
    host = taken(toy_host(a=False))
    playing = asyncio.ensure_future(play(Fleet({"gpu01": host}), STEPS, lock_wait=LONG))
    await asyncio.sleep(0.02)
    host.world["a"] = True
    host.lease = None
    state, _ = await playing
    assert outcomes(state) == {"gpu01": "ok"}
    assert host.writes() == 0


async def test_when_the_time_is_over_the_host_is_busy_and_says_who_has_it() -> None:
    fleet = Fleet({"gpu01": taken(toy_host(a=False)), "gpu02": toy_host(a=False)})
    state, _ = await play(fleet, STEPS, lock_wait=0.05)
    assert outcomes(state) == {"gpu01": "busy", "gpu02": "changed"}
    reason = state.hosts["gpu01"].finished.reason
    assert all(word in reason for word in (OTHER, "ada", "bastion", "night shift"))
    assert fleet["gpu01"].lease is not None
    assert fleet["gpu01"].lease.run == OTHER
    assert state.exit == 2


async def test_an_interrupt_ends_the_wait() -> None:
    interrupts = Interrupts()
    fleet = Fleet({"gpu01": taken(toy_host(a=False))})
    playing = asyncio.ensure_future(play(fleet, STEPS, lock_wait=LONG, interrupts=interrupts))
    await asyncio.sleep(0.02)
    interrupts.interrupt("SIGINT")
    state, _ = await asyncio.wait_for(playing, 5)
    assert outcomes(state) == {"gpu01": "busy"}
    assert state.exit == 130


async def test_a_run_that_halts_does_not_wait_to_its_end() -> None:
    fleet = Fleet({"gpu01": taken(toy_host(a=False)), "gpu02": toy_host(a=False)})
    fleet["gpu02"].on("toy.set", {"no": "switch turned"})
    state, _ = await asyncio.wait_for(play(fleet, STEPS, lock_wait=LONG), 5)
    assert outcomes(state) == {"gpu01": "not_started", "gpu02": "rolled_back"}
    assert state.exit == 3


async def test_a_host_taken_between_plan_and_turn_is_waited_for_and_left_where_it_changed() -> None:
    host, same = toy_host(a=False, b=False), toy_host(a=False, b=False)
    steps = [*STEPS, step("b", Switch(name="b"))]
    for one, leaves in ((host, {"a": True}), (same, {})):

        def look(args: dict[str, object], world: dict[str, object], one=one, leaves=leaves) -> object:
            if one.lease is None and not one.anchors:
                one.anchors.append(("seen", ""))
                one.grant(_other())
                loop = asyncio.get_running_loop()
                loop.call_later(0.05, lambda: (world.update(leaves), setattr(one, "lease", None)))
            return world[str(args["name"])]

        one.on("toy.get", look)
        one.anchors = []
    state, _ = await play(Fleet({"gpu01": host}), steps, lock_wait=LONG)
    assert outcomes(state) == {"gpu01": "blocked"}
    assert state.hosts["gpu01"].finished.failure.kind == "stale_plan"
    assert host.writes() == 0
    state, _ = await play(Fleet({"gpu01": same}), steps, lock_wait=LONG)
    assert outcomes(state) == {"gpu01": "changed"}


async def test_hosts_that_belong_together_wait_together() -> None:
    fleet = Fleet({"gpu01": taken(toy_host(a=False)), "gpu02": toy_host(a=False)})
    together = {name: {"cohort": "pair"} for name in fleet}
    playing = asyncio.ensure_future(play(fleet, STEPS, lock_wait=LONG, variables=together))
    await asyncio.sleep(0.05)
    assert fleet["gpu02"].writes() == 0
    fleet["gpu01"].lease = None
    state, _ = await playing
    assert outcomes(state) == {"gpu01": "changed", "gpu02": "changed"}
    assert state.cohorts == {"gpu01": "pair", "gpu02": "pair"}


async def test_a_run_that_is_taken_up_again_waits_too() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False), "gpu02": toy_host(a=False).refuse()})
    _, shelf = await play(fleet, STEPS)
    taken(fleet["gpu02"].accept())
    going = asyncio.ensure_future(resume(fleet, STEPS, shelf, lock_wait=LONG))
    await asyncio.sleep(0.02)
    fleet["gpu02"].lease = None
    assert outcomes(await going) == {"gpu01": "changed", "gpu02": "changed"}


@pytest.mark.parametrize("freed", [True, False])
async def test_a_way_back_waits_for_the_run_that_has_the_host(freed: bool) -> None:
    host = toy_host(a=False)
    fleet = Fleet({"gpu01": host})
    state, shelf = await play(fleet, STEPS)
    taken(host)
    asked = request(("gpu01",), STEPS)
    recorder = Recorder(asked.run, Shelf(), state=state, seq=len(shelf.records), clock=lambda: 0.0)
    with fleet:
        going = asyncio.ensure_future(
            roll_back(
                asked.run,
                "toy",
                asked.hosts,
                recorder,
                operator="ann",
                controller="here",
                lock_wait=LONG if freed else 0.0,
                known=state,
            )
        )
        await asyncio.sleep(0.02)
        if freed:
            host.lease = None
        state = await going
    assert outcomes(state) == {"gpu01": "rolled_back" if freed else "busy"}
    assert host.world["a"] is not freed
