"""A run over scripted hosts: each test is a promise about order, outcome and what was touched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy

import pytest

from fleetfix.engine.context import Interrupts
from fleetfix.engine.going_back import roll_back
from fleetfix.engine.settling import Settling
from fleetfix.errors import Failure, FailureKind, HostError, JournalError
from fleetfix.events import Record
from fleetfix.policy import Policy, Share
from fleetfix.recorder import Recorder
from fleetfix.session import Purpose
from fleetfix.state import RunState, fold
from fleetfix.transports.scripted import Fleet, ScriptedHost
from tests.engine.toys import Fast, HandClock, Lit, Shelf, Switch, _set, play, request, step, toy_host

SWITCHES = [step("a", Switch(name="a")), step("b", Switch(name="b"))]


def outcomes(state: RunState) -> dict[str, str | None]:
    return {name: host.outcome for name, host in state.hosts.items()}


async def test_a_host_is_mended_verified_and_committed() -> None:
    host = toy_host(a=False, b=False)
    state, shelf = await play(Fleet({"gpu01": host}), SWITCHES)
    assert outcomes(state) == {"gpu01": "changed"}
    assert (state.exit, host.world) == (0, {"a": True, "b": True})
    assert host.runs("do") == ["toy.set", "toy.set"]
    assert host.runs("commit") == ["toy.commit", "toy.commit"]
    assert host.claims == {}
    assert host.lease is None
    assert [event.step for event in shelf.of("step_finished")] == ["a", "b"]


async def test_a_second_run_touches_nothing() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False, b=True)})
    await play(fleet, SWITCHES)
    before = len(fleet["gpu01"].runs("do"))
    state, shelf = await play(fleet, SWITCHES, run="20260101-000000-toy-bbbb")
    assert outcomes(state) == {"gpu01": "ok"}
    assert len(fleet["gpu01"].runs("do")) == before
    assert shelf.of("wave_started") == []


async def test_a_dry_run_says_what_is_pending_and_changes_nothing() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False, b=True), "gpu02": toy_host(a=True, b=True)})
    state, shelf = await play(fleet, SWITCHES, dry=True)
    assert outcomes(state) == {"gpu01": "pending", "gpu02": "ok"}
    assert fleet["gpu01"].runs("do") == []
    assert [(e.step, e.pending) for e in shelf.of("step_planned") if e.host == "gpu01"] == [
        ("a", True),
        ("b", False),
    ]


async def test_each_change_is_durable_in_the_journal_before_it_is_made() -> None:
    shelf, seen = Shelf(), []
    host = toy_host(a=False)

    def look_and_set(args: dict[str, object], world: dict[str, object]) -> None:
        seen.append(len(shelf.of("change_started")))
        world["a"] = True

    host.on("toy.set", look_and_set)
    await play(Fleet({"gpu01": host}), SWITCHES[:1], shelf=shelf)
    assert seen == [1]


async def test_a_change_that_fails_takes_everything_back_newest_first_and_stops_at_the_canary() -> None:
    def refuse_b(args: dict[str, object], world: dict[str, object]) -> object:
        if args["name"] == "b" and args["to"]:
            raise_no_space()
        world[str(args["name"])] = args["to"]
        return None

    fleet = Fleet({name: toy_host(a=False, b=False) for name in ("gpu01", "gpu02", "gpu03")})
    fleet.on("toy.set", refuse_b)
    state, shelf = await play(fleet, SWITCHES)
    assert outcomes(state) == {"gpu01": "rolled_back", "gpu02": "not_started", "gpu03": "not_started"}
    assert state.exit == 3
    finished = shelf.of("host_finished")[0]
    assert (finished.failure.kind, finished.step) == ("no_space", "b")
    undone = [one.args["name"] for one in fleet["gpu01"].executed if one.way == "undo"]
    assert undone == ["b", "a"]
    assert fleet["gpu01"].world == {"a": False, "b": False}
    assert fleet["gpu01"].claims == {}
    assert fleet["gpu02"].runs("do") == []


def raise_no_space() -> None:
    raise HostError(Failure(kind="no_space", message="no space left"))


async def test_a_change_that_does_not_reach_its_goal_is_rolled_back() -> None:
    host = toy_host(a=False)
    host.on("toy.set", None)
    state, shelf = await play(Fleet({"gpu01": host}), SWITCHES[:1])
    assert outcomes(state) == {"gpu01": "rolled_back"}
    assert shelf.of("host_finished")[0].failure.kind == "verify_failed"


async def test_a_goal_may_be_reached_within_the_time_of_its_step() -> None:
    host = toy_host(a=False)
    asked = iter([False, False, False, False, True])
    host.on("toy.set", None)
    host.on("toy.get", lambda args, world: next(asked))
    clock = HandClock()
    steps = [step("a", Switch(name="a"), within=10.0, every=2.0)]
    state, _ = await play(Fleet({"gpu01": host}), steps, clock=clock)
    assert outcomes(state) == {"gpu01": "changed"}
    assert clock.slept.count(2.0) == 2


async def test_a_failed_check_after_a_change_rolls_back() -> None:
    steps = [*SWITCHES[:1], step("lamp", Lit(name="lamp"), when_changed=("a",))]
    state, _ = await play(Fleet({"gpu01": toy_host(a=False, lamp=False)}), steps)
    assert outcomes(state) == {"gpu01": "rolled_back"}


async def test_a_check_of_what_a_step_did_is_not_asked_before_it() -> None:
    steps = [*SWITCHES[:1], step("lamp", Lit(name="lamp"), when_changed=("a",))]
    host = toy_host(a=False, lamp=True)
    await play(Fleet({"gpu01": host}), steps, dry=True)
    assert [one.args["name"] for one in host.executed] == ["a"]


async def test_unknown_never_counts_as_pass() -> None:
    steps = [*SWITCHES[:1], step("lamp", Lit(name="lamp"))]
    state, shelf = await play(Fleet({"gpu01": toy_host(a=False)}), steps)
    assert outcomes(state) == {"gpu01": "rolled_back"}
    assert shelf.of("host_finished")[0].failure.kind == "verify_unknown"


async def test_a_check_must_hold_as_often_in_a_row_as_its_step_says() -> None:
    answers = iter([None, True, True, False, True, True, True, True])
    host = toy_host()
    host.on("toy.get", lambda args, world: next(answers))
    steps = [step("lamp", Lit(name="lamp"), consecutive=3, within=60.0, every=1.0)]
    state, _ = await play(Fleet({"gpu01": host}), steps)
    assert outcomes(state) == {"gpu01": "ok"}
    assert len(host.executed) == 7, (
        "the survey's None, two that did not make three, the one that broke them, three"
    )


async def test_a_speed_that_is_not_back_never_rolls_a_sound_repair_back() -> None:
    steps = [*SWITCHES[:1], step("speed", Fast(name="speed"), on_failure="stop")]
    fleet = Fleet({name: toy_host(a=False, speed=5) for name in ("gpu01", "gpu02")})
    state, _ = await play(fleet, steps)
    assert outcomes(state) == {"gpu01": "unproven", "gpu02": "not_started"}
    assert state.exit == 3
    assert fleet["gpu01"].world["a"] is True
    assert fleet["gpu01"].runs("undo") == []
    assert fleet["gpu01"].runs("commit") == [], "what undo needs is kept"


async def test_a_check_of_proof_that_finds_the_work_itself_wrong_is_a_failure() -> None:
    steps = [*SWITCHES[:1], step("speed", Fast(name="speed"), on_failure="rollback")]
    state, _ = await play(Fleet({"gpu01": toy_host(a=False, speed="from zero")}), steps)
    assert outcomes(state) == {"gpu01": "rolled_back"}


async def test_a_proven_speed_becomes_a_baseline() -> None:
    steps = [*SWITCHES[:1], step("speed", Fast(name="speed"))]
    _, shelf = await play(Fleet({"gpu01": toy_host(a=False, speed=12)}), steps)
    assert [(e.step, e.proven, e.measured.rate) for e in shelf.of("step_finished") if e.measured] == [
        ("speed", True, 12.0)
    ]


async def test_what_was_not_announced_is_not_done() -> None:
    host = toy_host(a=False, b=True)

    def a_breaks_b(args: dict[str, object], world: dict[str, object]) -> None:
        world.update({str(args["name"]): args["to"], "b": args["to"] is False})

    host.on("toy.set", a_breaks_b)
    state, shelf = await play(Fleet({"gpu01": host}), SWITCHES)
    assert outcomes(state) == {"gpu01": "rolled_back"}
    assert shelf.of("host_finished")[0].failure.kind == "stale_plan"


async def test_what_a_step_foresees_from_another_is_announced() -> None:
    steps = [
        step("stop", Switch(name="job", on=False, key="stop:job", job="stops"), when_pending=("a",)),
        step("a", Switch(name="a")),
        step("train", Switch(name="job", key="start", job="starts", follows="stop")),
    ]
    fleet = Fleet({"gpu01": toy_host(a=False, job=True), "gpu02": toy_host(a=True, job=True)})
    state, shelf = await play(fleet, steps)
    assert outcomes(state) == {"gpu01": "changed", "gpu02": "ok"}
    assert fleet["gpu01"].world == {"a": True, "job": True}
    assert fleet["gpu02"].runs("do") == [], "a healthy host is never disturbed"
    assert [e.summary for e in (c.shown for c in shelf.of("change_started"))] == [
        "turn job off",
        "turn a on",
        "turn job on",
    ]


async def test_a_stopped_job_that_was_not_started_again_is_said_and_claimed() -> None:
    steps = [
        step("stop", Switch(name="job", on=False, key="stop:job", job="stops")),
        step("lamp", Lit(name="lamp"), on_failure="stop"),
    ]
    host = toy_host(job=True, lamp=False)
    state, shelf = await play(Fleet({"gpu01": host}), steps)
    assert outcomes(state) == {"gpu01": "failed"}
    finished = shelf.of("host_finished")[0]
    assert finished.job_stopped
    assert finished.open == ("turn job off",)
    assert list(host.claims) == ["20260101-000000-toy-aaaa"]


async def test_a_start_that_failed_leaves_the_job_stopped() -> None:
    def cannot_start(args: dict[str, object], world: dict[str, object]) -> None:
        if args["to"]:
            raise_no_space()
        world[str(args["name"])] = args["to"]

    host = toy_host(job=True)
    host.on("toy.set", cannot_start)
    steps = [
        step("stop", Switch(name="job", on=False, key="stop:job", job="stops")),
        step("train", Switch(name="job", key="start", job="starts", follows="stop")),
    ]
    state, shelf = await play(Fleet({"gpu01": host}), steps)
    assert outcomes(state) == {"gpu01": "rollback_failed"}
    assert shelf.of("host_finished")[0].job_stopped


async def test_a_host_with_work_of_another_run_left_open_is_refused() -> None:
    steps = [
        step("stop", Switch(name="job", on=False, key="stop:job", job="stops")),
        step("lamp", Lit(name="lamp"), on_failure="stop"),
    ]
    fleet = Fleet({"gpu01": toy_host(job=True, lamp=False)})
    await play(fleet, steps)
    state, shelf = await play(fleet, SWITCHES, run="20260101-000000-toy-bbbb")
    assert outcomes(state) == {"gpu01": "unfinished"}
    finished = shelf.of("host_finished")[0]
    assert "20260101-000000-toy-aaaa" in finished.reason
    assert "turn job off" in finished.reason
    assert "rollback" in finished.failure.hint


async def test_a_dry_run_too_says_that_the_host_is_left_half_done() -> None:
    host = toy_host(a=False)
    other = request(("gpu01",), SWITCHES, run="20260101-000000-other-cccc").purpose()
    host.claim(other, ["job stopped: torchrun"])
    state, shelf = await play(Fleet({"gpu01": host}), SWITCHES, dry=True)
    assert outcomes(state) == {"gpu01": "unfinished"}
    assert shelf.of("step_planned") == [], "a half done host is no ground for a plan"


async def test_an_undo_that_does_not_bring_the_host_back_is_a_failed_rollback() -> None:
    host = toy_host(a=False, lamp=False)

    def forwards(args: dict[str, object], world: dict[str, object]) -> None:
        world["a"] = True

    host.on("toy.set", forwards)
    state, shelf = await play(Fleet({"gpu01": host}), [*SWITCHES[:1], step("lamp", Lit(name="lamp"))])
    assert outcomes(state) == {"gpu01": "rollback_failed"}
    assert "not as before" in shelf.of("host_finished")[0].reason


async def test_a_way_back_that_no_plan_can_be_compared_with_says_so() -> None:
    host = toy_host(a=False, lamp=False)

    def blocked_after_undo(args: dict[str, object], world: dict[str, object]) -> None:
        world["a"] = args["to"] or "no"

    host.on("toy.set", blocked_after_undo)
    state, shelf = await play(Fleet({"gpu01": host}), [*SWITCHES[:1], step("lamp", Lit(name="lamp"))])
    assert outcomes(state) == {"gpu01": "rolled_back"}
    assert any("cannot be compared" in event.text for event in shelf.of("host_said"))


async def test_a_blocked_step_that_would_have_to_act_blocks_the_host_before_any_change() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False, b="no"), "gpu02": toy_host(a=False, b=True)})
    state, shelf = await play(fleet, SWITCHES)
    assert outcomes(state) == {"gpu01": "blocked", "gpu02": "changed"}
    assert fleet["gpu01"].runs("do") == []
    assert state.exit == 2
    assert shelf.of("host_finished")[0].reason == "b says no"


async def test_a_blocked_step_that_need_not_act_blocks_nothing() -> None:
    steps = [step("b", Switch(name="b"), when_pending=("a",)), step("a", Switch(name="a"))]
    state, _ = await play(Fleet({"gpu01": toy_host(a=True, b="no")}), steps)
    assert outcomes(state) == {"gpu01": "ok"}


async def test_hosts_that_cannot_be_reached_do_not_hold_the_others() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False).refuse(), "gpu02": toy_host(a=False)})
    state, _ = await play(fleet, SWITCHES[:1])
    assert outcomes(state) == {"gpu01": "unreachable", "gpu02": "changed"}
    assert state.exit == 4


async def test_another_runs_lease_makes_the_host_busy() -> None:
    host = toy_host(a=False)
    other = request(("gpu01",), SWITCHES, run="20260101-000000-other-cccc").purpose()
    host.grant(other)
    state, _ = await play(Fleet({"gpu01": host}), SWITCHES[:1])
    assert outcomes(state) == {"gpu01": "busy"}
    assert host.executed == [], "what another run changes now is no ground for a plan"


async def test_a_lease_taken_between_plan_and_turn_makes_the_host_busy() -> None:
    host = toy_host(a=False)
    other = request(("gpu01",), SWITCHES, run="20260101-000000-other-cccc").purpose()

    def look(args: dict[str, object], world: dict[str, object]) -> object:
        host.grant(other)
        return world[str(args["name"])]

    host.on("toy.get", look)
    state, _ = await play(Fleet({"gpu01": host}), SWITCHES[:1])
    assert outcomes(state) == {"gpu01": "busy"}
    assert host.runs("do") == []


@pytest.mark.parametrize("at", ["a", "b"])
async def test_a_host_that_another_controller_has_taken_over_is_busy_however_much_was_changed(
    at: str,
) -> None:
    host = toy_host(a=False, b=False)
    other = request(("gpu01",), SWITCHES).purpose().model_copy(update={"controller": "elsewhere"})

    def turn(args: dict[str, object], world: dict[str, object]) -> None:
        world[str(args["name"])] = args["to"]
        if args["name"] == at:
            host.grant(other)

    host.on("toy.set", turn)
    state, shelf = await play(Fleet({"gpu01": host}), SWITCHES[:2])
    assert outcomes(state) == {"gpu01": "busy"}
    assert "taken over" in state.hosts["gpu01"].finished.reason
    assert host.runs("do") == ["toy.set"] * (1 if at == "a" else 2), "nothing was done after that"
    assert host.lease is not None
    assert host.lease.controller == "elsewhere", "and nothing was taken back"
    assert shelf.of("host_lost") == [], "which counts as lost for nobody's breaker"


async def test_a_host_that_is_switched_off_is_blocked_where_it_needs_something_and_only_there() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False), "gpu02": toy_host(a=True)})
    for name in fleet:
        fleet[name].disabled = "ann: burning in"
    state, shelf = await play(fleet, SWITCHES[:1])
    assert outcomes(state) == {"gpu01": "blocked", "gpu02": "ok"}
    assert shelf.of("wave_started") == []
    assert "ann: burning in" in shelf.of("host_finished")[0].reason


@pytest.mark.parametrize(("moment", "world"), [("before", False), ("after", True), ("during", True)])
async def test_a_host_lost_around_a_change_is_rolled_back_later_from_its_own_log(
    moment: str, world: bool
) -> None:
    host = toy_host(a=False)
    host.lose(**{moment: 1})  # type: ignore[arg-type]
    fleet, shelf = Fleet({"gpu01": host}), Shelf()
    state, _ = await play(fleet, SWITCHES[:1], shelf=shelf)
    assert outcomes(state) == {"gpu01": "rollback_pending"}
    assert host.world["a"] is world
    state = await go_back(fleet, shelf, state)
    assert outcomes(state) == {"gpu01": "rolled_back"}
    assert (state.rolled_back_exit, state.hosts["gpu01"].changes) == (0, {}), "also what was never begun"
    assert host.world["a"] is False
    assert host.claims == {}


async def go_back(fleet: Fleet, shelf: Shelf, state: RunState) -> RunState:
    asked = request(tuple(fleet), SWITCHES)
    recorder = Recorder(asked.run, shelf, state=state, seq=len(shelf.records))
    with fleet:
        return await roll_back(asked.run, "toy", asked.hosts, recorder, operator="ann", controller="there")


async def test_a_host_that_was_switched_off_meanwhile_can_still_go_back() -> None:
    host = toy_host(a=False)
    host.lose(after=1)
    fleet, shelf = Fleet({"gpu01": host}), Shelf()
    state, _ = await play(fleet, SWITCHES[:1], shelf=shelf)
    host.disabled = "ann: hands off"
    assert outcomes(await go_back(fleet, shelf, state)) == {"gpu01": "rolled_back"}
    assert host.world["a"] is False


async def test_a_rollback_that_fails_keeps_both_errors_and_alarms() -> None:
    def only_forwards(args: dict[str, object], world: dict[str, object]) -> None:
        if not args["to"]:
            raise_no_space()
        world[str(args["name"])] = args["to"]

    fleet = Fleet({name: toy_host(a=False, lamp=False) for name in ("gpu01", "gpu02")})
    fleet.on("toy.set", only_forwards)
    steps = [*SWITCHES[:1], step("lamp", Lit(name="lamp"))]
    state, shelf = await play(fleet, steps)
    assert outcomes(state) == {"gpu01": "rollback_failed", "gpu02": "not_started"}
    finished = shelf.of("host_finished")[0]
    assert finished.failure.message == "lamp is False"
    assert "no space left" in finished.reason
    assert list(fleet["gpu01"].claims)


async def test_the_mistake_of_one_action_is_one_hosts_bug() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False).garbage("toy.get"), "gpu02": toy_host(a=False)})
    steps_of = {"gpu01": [step("speed", Fast(name="speed"))]}
    state, shelf = await play(fleet, SWITCHES[:1], steps_of=steps_of)
    assert outcomes(state) == {"gpu01": "failed", "gpu02": "changed"}
    assert {e.host: e.failure and e.failure.kind for e in shelf.of("host_finished")}["gpu01"] == "bug"


async def test_retries_are_counted_and_the_last_one_counts() -> None:
    answers = iter([False, None, True])
    host = toy_host()
    host.on("toy.get", lambda args, world: next(answers))
    clock = HandClock()
    steps = [step("lamp", Lit(name="lamp"), retries=1, delay=5.0)]
    state, shelf = await play(Fleet({"gpu01": host}), steps, clock=clock)
    assert outcomes(state) == {"gpu01": "ok"}
    assert [e.attempt for e in shelf.of("step_started")] == [1, 2]
    assert clock.slept == [5.0]


async def test_on_failure_continue_goes_on_and_still_ends_badly() -> None:
    steps = [step("lamp", Lit(name="lamp"), on_failure="continue"), *SWITCHES[:1]]
    fleet = Fleet({"gpu01": toy_host(a=False, lamp=False)})
    state, _ = await play(fleet, steps)
    assert outcomes(state) == {"gpu01": "failed"}
    assert fleet["gpu01"].world["a"] is True


async def test_never_more_hosts_are_talked_to_than_forks() -> None:
    talking, most = 0, 0

    async def count(args: dict[str, object], world: dict[str, object]) -> object:
        nonlocal talking, most
        talking += 1
        most = max(most, talking)
        await asyncio.sleep(0.001)
        talking -= 1
        return world.get(str(args["name"]))

    fleet = Fleet({f"gpu{n:02}": toy_host(a=False) for n in range(20)})
    fleet.on("toy.get", count)
    policy = Policy(canary=0, batch=(Share.parse("100%"),), forks=4)
    state, _ = await play(fleet, SWITCHES[:1], policy=policy)
    assert set(outcomes(state).values()) == {"changed"}
    assert 1 < most <= 4


async def test_a_host_that_waits_gives_its_slot_back() -> None:
    dark = iter([False] * 50)
    sick = toy_host()
    sick.on("toy.get", lambda args, world: next(dark))
    fleet = Fleet({"gpu01": sick, "gpu02": toy_host(lamp=True)})
    policy = Policy(canary=0, forks=1)
    steps = [step("lamp", Lit(name="lamp"), within=40.0, every=1.0)]
    _, shelf = await play(fleet, steps, policy=policy)
    assert [e.host for e in shelf.of("host_finished")] == ["gpu02", "gpu01"]


@pytest.mark.parametrize("answer", [True, False])
async def test_consent_is_asked_once_with_the_plan_on_the_table_and_before_any_change(answer: bool) -> None:
    fleet = Fleet({name: toy_host(a=False) for name in ("gpu01", "gpu02")})
    asked: list[list[str]] = []

    async def ask(state: RunState) -> bool:
        asked.append([name for name, host in state.hosts.items() if host.pending])
        assert fleet["gpu01"].runs("do") == []
        return answer

    state, _ = await play(fleet, SWITCHES[:1], consent=ask)
    assert asked == [["gpu01", "gpu02"]]
    assert set(outcomes(state).values()) == ({"changed"} if answer else {"not_started"})
    assert state.exit == (0 if answer else 3)
    assert fleet["gpu01"].writes() == (1 if answer else 0)


async def test_consent_is_not_asked_where_nothing_is_to_be_done() -> None:
    async def ask(state: RunState) -> bool:
        raise AssertionError("asked")

    state, _ = await play(Fleet({"gpu01": toy_host(a=True)}), SWITCHES[:1], consent=ask)
    assert outcomes(state) == {"gpu01": "ok"}


async def test_a_halt_reaches_hosts_of_the_same_wave_that_still_wait_for_their_turn() -> None:
    fleet = Fleet({f"gpu{n}": toy_host(a=False) for n in range(6)})
    fleet["gpu1"].on("toy.set", None)
    policy = Policy(canary=0, batch=(Share.parse("100%"),), forks=1)
    state, shelf = await play(fleet, SWITCHES[:1], policy=policy)
    assert list(outcomes(state).values()) == ["changed", "rolled_back", *["not_started"] * 4]
    assert [fleet[name].writes() for name in fleet] == [1, 1, 0, 0, 0, 0]
    assert state.exit == 3
    assert [e.host for e in shelf.of("host_started")] == ["gpu0", "gpu1"]


async def test_the_first_interrupt_reaches_them_too() -> None:
    fleet = Fleet({f"gpu{n}": toy_host(a=False) for n in range(4)})
    interrupts = Interrupts()

    def interrupt(args: dict[str, object], world: dict[str, object]) -> None:
        interrupts.interrupt("SIGINT")
        world[str(args["name"])] = args["to"]

    fleet["gpu0"].on("toy.set", interrupt)
    policy = Policy(canary=0, batch=(Share.parse("100%"),), forks=1)
    state, _ = await play(fleet, SWITCHES[:1], policy=policy, interrupts=interrupts)
    assert list(outcomes(state).values()) == ["changed", *["not_started"] * 3]


# -- going back -----------------------------------------------------------------------------------


async def test_an_undo_that_is_blocked_has_nothing_older_undone_before_it() -> None:
    def guarded(args: dict[str, object], world: dict[str, object]) -> None:
        if args["name"] == "b" and not args["to"] and world.get("guard"):
            raise HostError(Failure(kind="blocked", message="alice uses it"))
        world[str(args["name"])] = args["to"]

    host = toy_host(a=False, b=False, guard=True, lamp=False)
    host.on("toy.set", guarded)
    fleet, shelf = Fleet({"gpu01": host}), Shelf()
    state, _ = await play(fleet, [*SWITCHES, step("lamp", Lit(name="lamp"))], shelf=shelf)
    assert outcomes(state) == {"gpu01": "rollback_failed"}
    assert (host.world["a"], host.world["b"]) == (True, True)
    host.world["guard"] = False
    assert outcomes(await go_back(fleet, shelf, state)) == {"gpu01": "rolled_back"}
    assert (host.world["a"], host.world["b"]) == (False, False)


async def test_what_cannot_be_undone_is_said_and_never_called_rolled_back() -> None:
    steps = [step("a", Switch(name="a", risk="irreversible")), SWITCHES[1], step("lamp", Lit(name="lamp"))]
    host = toy_host(a=False, b=False, lamp=False)
    fleet, shelf = Fleet({"gpu01": host}), Shelf()
    state, _ = await play(fleet, steps, shelf=shelf)
    assert outcomes(state) == {"gpu01": "failed"}
    assert "cannot be undone: turn a on" in shelf.of("host_finished")[0].reason
    assert (host.world["a"], host.world["b"]) == (True, False)
    assert host.claims == {}, "there is nothing more that anyone could do about it"


def settling(shelf: Shelf, state: RunState) -> Settling:
    asked = request(["gpu01"], SWITCHES[:2])
    purpose = Purpose(run=asked.run, playbook="toy", dry=False, operator="ann", controller="here")
    return Settling(purpose, asked.hosts, Recorder(asked.run, shelf, state=state, seq=len(shelf.records)))


async def test_a_host_that_was_released_and_goes_back_after_all_is_not_told_to_be_as_it_was_left() -> None:
    host = toy_host(a=False)
    host.lose(after=1)
    fleet, shelf = Fleet({"gpu01": host}), Shelf()
    state, _ = await play(fleet, SWITCHES[:1], shelf=shelf)
    with fleet:
        await settling(shelf, state).release()
    assert fold(shelf.records).hosts["gpu01"].released
    await go_back(fleet, shelf, fold(shelf.records))
    state = fold(shelf.records)
    assert (outcomes(state), state.hosts["gpu01"].released) == ({"gpu01": "rolled_back"}, False)


@pytest.mark.parametrize("torn", [False, True], ids=["removed", "torn"])
async def test_a_host_that_forgot_the_run_is_not_called_rolled_back(torn: bool) -> None:
    host = toy_host(a=False, b=False)
    if torn:
        host.lose(before=2)
    else:
        host.lose(after=1)
    fleet, shelf = Fleet({"gpu01": host}), Shelf()
    state, _ = await play(fleet, SWITCHES[:2], shelf=shelf)
    host.log.clear()
    if not torn:
        host.notes.clear()
    state = await go_back(fleet, shelf, state)
    assert outcomes(state) == {"gpu01": "rollback_failed"}
    assert "no record of this run" in shelf.of("host_finished")[-1].reason
    assert state.rolled_back_exit == 2
    asked = request(["gpu01"], SWITCHES[:2])
    purpose = Purpose(run=asked.run, playbook="toy", dry=False, operator="ann", controller="here")
    settling = Settling(
        purpose, asked.hosts, Recorder(asked.run, shelf, state=state, seq=len(shelf.records))
    )
    with fleet:
        assert await settling.commit() == 2
        assert await settling.release() == 0
    assert "which began: turn a on" in shelf.of("host_released")[0].left[0]


async def test_the_first_error_of_a_host_stays_whatever_comes_of_going_back_later() -> None:
    host = toy_host(a=False, b=False, lamp=False)
    steps = [*SWITCHES[:1], step("lamp", Lit(name="lamp"), on_failure="stop")]
    fleet, shelf = Fleet({"gpu01": host}), Shelf()
    state, _ = await play(fleet, steps, shelf=shelf)
    assert outcomes(state) == {"gpu01": "failed"}
    host.refuse()
    state = await go_back(fleet, shelf, state)
    assert state.rolled_back_exit == 4
    for outcome, said in (
        ("rollback_pending", "lamp is False; connection refused"),
        ("rollback_failed", "lamp is False; and going back failed: it sticks"),
        ("rolled_back", "lamp is False"),
    ):
        finished = state.hosts["gpu01"].finished
        assert finished is not None
        assert (finished.outcome, finished.reason, finished.step) == (outcome, said, "lamp")
        assert finished.failure is not None
        assert finished.failure.message == "lamp is False"
        broken = outcome == "rollback_pending"
        host.accept()
        host.on("toy.set", Failure(kind="command", message="it sticks") if broken else _set)
        state = await go_back(fleet, shelf, state)


async def test_a_job_whose_start_was_being_undone_when_the_host_was_lost_is_said_to_be_stopped() -> None:
    steps = [
        step("stop", Switch(name="job", on=False, key="stop:job", job="stops"), when_pending=("a",)),
        step("a", Switch(name="a")),
        step("train", Switch(name="job", key="start", job="starts", follows="stop")),
    ]
    host = toy_host(a=False, job=True)
    fleet, shelf = Fleet({"gpu01": host}), Shelf()
    state, _ = await play(fleet, steps, shelf=shelf)
    assert outcomes(state) == {"gpu01": "changed"}
    assert host.claims == {}

    def undone_and_lost(args: dict[str, object], world: dict[str, object]) -> None:
        host.on("toy.set", _set)
        world[str(args["name"])] = args["to"]
        host.drop()

    host.on("toy.set", undone_and_lost)
    state = await go_back(fleet, shelf, state)
    assert host.world["job"] is False
    finished = state.hosts["gpu01"].finished
    assert finished is not None
    assert (finished.outcome, finished.job_stopped) == ("rollback_pending", True)
    assert len(host.claims) == 1, "what was committed is open again once it goes back"
    state = await go_back(fleet, shelf, state)
    assert outcomes(state) == {"gpu01": "rolled_back"}
    assert (host.world, host.claims) == ({"a": False, "job": True}, {})


async def test_a_second_rollback_leaves_the_verdict_of_the_run_as_it_was() -> None:
    fleet, shelf = Fleet({"gpu01": toy_host(a=False, lamp=False)}), Shelf()
    state, _ = await play(fleet, [*SWITCHES[:1], step("lamp", Lit(name="lamp"))], shelf=shelf)
    assert (outcomes(state), state.exit) == ({"gpu01": "rolled_back"}, 3)
    state = await go_back(fleet, shelf, state)
    assert (outcomes(state), state.exit, state.rolled_back_exit) == ({"gpu01": "rolled_back"}, 3, 0)


# -- interrupts ------------------------------------------------------------------------------------


async def interrupted(times: int, fleet: Fleet, held: ScriptedHost) -> tuple[RunState, Shelf]:
    """Interrupt while the first change of `held` is being made."""
    gate, interrupts = asyncio.Event(), Interrupts()

    async def hold(args: dict[str, object], world: dict[str, object]) -> None:
        for _ in range(times):
            interrupts.interrupt("SIGINT")
        if times > 1:
            await gate.wait()
        world[str(args["name"])] = args["to"]

    held.on("toy.set", hold)
    return await play(fleet, SWITCHES[:1], interrupts=interrupts)


async def test_the_first_interrupt_lets_hosts_in_flight_end_and_starts_no_more() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False), "gpu02": toy_host(a=False)})
    state, _ = await interrupted(1, fleet, fleet["gpu01"])
    assert outcomes(state) == {"gpu01": "changed", "gpu02": "not_started"}
    assert state.exit == 130


async def test_the_second_interrupt_ends_what_runs_and_keeps_the_claim() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False), "gpu02": toy_host(a=False)})
    state, shelf = await interrupted(2, fleet, fleet["gpu01"])
    assert outcomes(state) == {"gpu01": "cancelled", "gpu02": "not_started"}
    assert state.exit == 130
    assert list(fleet["gpu01"].claims) == ["20260101-000000-toy-aaaa"]
    assert shelf.of("host_finished")[0].open == ("turn a on",)


@pytest.mark.parametrize("ended", [True, False])
async def test_a_stop_that_was_cut_short_is_looked_at_before_the_job_is_called_stopped(ended: bool) -> None:
    host = toy_host(job=True)
    gate, interrupts = asyncio.Event(), Interrupts()

    async def cut_short(args: dict[str, object], world: dict[str, object]) -> None:
        world["job"] = not ended
        interrupts.interrupt("SIGINT")
        interrupts.interrupt("SIGINT")
        await gate.wait()

    host.on("toy.set", cut_short)
    steps = [step("stop", Switch(name="job", on=False, key="stop:job", job="stops"))]
    state, shelf = await play(Fleet({"gpu01": host}), steps, interrupts=interrupts)
    assert outcomes(state) == {"gpu01": "cancelled"}
    assert shelf.of("host_finished")[0].job_stopped is ended


async def test_a_host_that_does_not_say_whether_its_job_runs_is_left_all_the_same() -> None:
    host = toy_host(job=True)
    gate, interrupts = asyncio.Event(), Interrupts()

    async def cut_short(args: dict[str, object], world: dict[str, object]) -> None:
        host.on("toy.get", Failure(kind="timed_out", message="it ran past its deadline"))
        interrupts.interrupt("SIGINT")
        interrupts.interrupt("SIGINT")
        await gate.wait()

    host.on("toy.set", cut_short)
    steps = [step("stop", Switch(name="job", on=False, key="stop:job", job="stops"))]
    state, shelf = await play(Fleet({"gpu01": host}), steps, interrupts=interrupts)
    finished = shelf.of("host_finished")[0]
    assert (finished.outcome, finished.reason, finished.job_stopped) == ("cancelled", "", True)
    assert host.lease is None, "it was let go of"
    assert list(host.claims) == [state.run]


# -- the record ------------------------------------------------------------------------------------


async def test_the_journal_alone_tells_the_same_state() -> None:
    fleet = Fleet(
        {"gpu01": toy_host(a=False), "gpu02": toy_host(a=True), "gpu03": toy_host(a=False).refuse()}
    )
    state, shelf = await play(fleet, SWITCHES[:1])
    assert fold(shelf.records) == state
    assert [record.seq for record in shelf.records] == list(range(1, len(shelf.records) + 1))


async def test_without_a_journal_nothing_more_is_changed() -> None:
    class FullShelf(Shelf):
        def append(self, records: Sequence[Record]) -> None:
            if any(record.event.kind == "change_started" for record in records):
                raise JournalError("no space left on device")
            super().append(records)

    fleet = Fleet({"gpu01": toy_host(a=False)})
    with pytest.raises(JournalError):
        await play(fleet, SWITCHES[:1], shelf=FullShelf())
    assert fleet["gpu01"].runs("do") == []


async def test_without_a_journal_a_way_back_says_so_and_is_no_bug() -> None:
    host = toy_host(a=False)
    host.lose(after=1)
    fleet, shelf = Fleet({"gpu01": host}), Shelf()
    state, _ = await play(fleet, SWITCHES[:1], shelf=shelf)

    def full(records: Sequence[Record]) -> None:
        raise JournalError("no space left on device")

    shelf.append = full  # type: ignore[method-assign]
    with pytest.raises(JournalError):
        await go_back(fleet, shelf, state)
    assert host.runs("undo") == []


async def test_every_host_ends_with_exactly_one_outcome() -> None:
    fleet = Fleet({f"gpu{n:02}": toy_host(a=bool(n % 2)) for n in range(12)})
    fleet["gpu03"].refuse()
    fleet["gpu04"].garbage("toy.get")
    _, shelf = await play(fleet, SWITCHES[:1])
    ends = [event.host for event in shelf.of("host_finished")]
    assert sorted(ends) == sorted(fleet)


async def test_a_step_of_other_hosts_is_neither_asked_nor_done_nor_waited_for() -> None:
    steps = [
        step("a", Switch(name="a")),
        step("b", Switch(name="b"), hosts="gpu01"),
        step("c", Switch(name="c"), when_changed=("b",)),
    ]
    there = [steps[0], steps[1].model_copy(update={"elsewhere": True}), steps[2]]
    fleet = Fleet({name: toy_host(a=False, b=False, c=False) for name in ("gpu01", "gpu02")})
    state, shelf = await play(fleet, steps, steps_of={"gpu02": there})
    assert outcomes(state) == {"gpu01": "changed", "gpu02": "changed"}
    assert fleet["gpu01"].world == {"a": True, "b": True, "c": True}
    assert fleet["gpu02"].world == {"a": True, "b": False, "c": False}
    assert {one.args["name"] for one in fleet["gpu02"].executed} == {"a", "c"}
    assert shelf.of("run_started")[0].only == {"b": "gpu01"}


async def test_going_back_does_not_look_for_a_step_of_other_hosts() -> None:
    steps = [
        step("a", Switch(name="a")),
        step("b", Switch(name="b"), hosts="gpu09", elsewhere=True),
        step("lamp", Lit(name="lamp"), when_changed=("a",)),
    ]
    host = toy_host(a=False, b=False, lamp=False)
    state, _ = await play(Fleet({"gpu01": host}), steps)
    assert outcomes(state) == {"gpu01": "rolled_back"}


async def test_a_job_that_was_stopped_because_it_was_asked_for_leaves_the_host_free() -> None:
    steps = [step("stop", Switch(name="job", on=False, key="stop:job", job="stops"))]
    host = toy_host(job=True)
    state, shelf = await play(Fleet({"gpu01": host}), steps)
    assert outcomes(state) == {"gpu01": "changed"}
    assert shelf.of("host_finished")[0].job_stopped, "it is said nevertheless"
    assert host.claims == {}


async def test_a_host_that_no_step_is_for_is_skipped_and_not_even_connected_to() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False), "gpu02": toy_host(a=False)})
    here = step("a", Switch(name="a"), hosts="gpu01")
    there = here.model_copy(update={"elsewhere": True})
    state, shelf = await play(fleet, [here], steps_of={"gpu02": [there]})
    assert (outcomes(state), state.exit) == ({"gpu01": "changed", "gpu02": "skipped"}, 0)
    assert [event.host for event in shelf.of("host_connected")] == ["gpu01"]


@pytest.mark.parametrize("kind", ["unreachable", "host_key", "auth", "no_python", "sudo"])
async def test_a_session_that_cannot_come_back_is_lost_and_not_asked_again(kind: FailureKind) -> None:
    host, asked = toy_host(a=False, lamp=True), []

    def go(args: dict[str, object], world: dict[str, object]) -> object:
        if args["name"] == "lamp":
            asked.append(1)
            host.vanish(kind)
        return world[str(args["name"])]

    host.on("toy.get", go)
    lamp = step("lamp", Lit(name="lamp"), when_changed=("a",), within=60.0)
    clock = HandClock()
    state, _ = await play(Fleet({"gpu01": host}), [SWITCHES[0], lamp], clock=clock)
    assert outcomes(state) == {"gpu01": "rollback_pending"}
    assert (len(asked), clock.slept) == (1, [])


async def test_a_host_that_went_back_by_another_machine_is_back_for_this_one_too() -> None:
    host = toy_host(a=False)
    host.lose(after=1)
    fleet, here = Fleet({"gpu01": host}), Shelf()
    state, _ = await play(fleet, SWITCHES[:1], shelf=here)
    before = deepcopy(state)
    assert (await go_back(fleet, Shelf(), state)).rolled_back_exit == 0
    undone = host.runs("undo")
    state = await go_back(fleet, here, before)
    assert (outcomes(state), state.rolled_back_exit) == ({"gpu01": "rolled_back"}, 0)
    assert state.hosts["gpu01"].changes == {}
    assert host.runs("undo") == undone


# -- what cannot be undone any more ----------------------------------------------------------------


async def test_a_host_on_which_not_all_can_be_undone_any_more_is_left_as_it_is() -> None:
    fleet, shelf = Fleet({name: toy_host(a=False, b=False) for name in ("gpu01", "gpu02")}), Shelf()
    state, _ = await play(fleet, SWITCHES, shelf=shelf)
    fleet["gpu01"].gone["a"] = "the hold is gone"
    state = await go_back(fleet, shelf, state)
    assert outcomes(state) == {"gpu01": "changed", "gpu02": "rolled_back"}
    assert (fleet["gpu01"].world, fleet["gpu01"].runs("undo")) == ({"a": True, "b": True}, [])
    assert [(event.host, event.failure.message) for event in shelf.of("host_not_undone")] == [
        ("gpu01", "cannot be undone any more: turn a on: the hold is gone")
    ]
    assert (state.rolled_back_exit, state.tripped) == (2, None)
    assert fleet["gpu01"].claims == {}
