"""What holds a run back, on scripted hosts: budgets, order, soak, the breaker, names of one machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import pytest

from fleetfix.engine.context import Interrupts
from fleetfix.engine.going_back import roll_back
from fleetfix.engine.network import GIVEN_UP_AFTER, Network
from fleetfix.errors import Failure
from fleetfix.inventory import Host
from fleetfix.policy import Policy
from fleetfix.recorder import Recorder
from fleetfix.runs import BreakerRow
from fleetfix.session import Opening, Purpose, Session
from fleetfix.state import RunState
from fleetfix.transports.scripted import Fleet
from tests.engine.toys import HandClock, Lit, Shelf, Switch, play, request, step, toy_host

A = [step("a", Switch(name="a"))]


def outcomes(state: RunState) -> dict[str, str | None]:
    return {name: host.outcome for name, host in state.hosts.items()}


def dark(count: int) -> Fleet:
    return Fleet({f"gpu{n:02}": toy_host(a=False) for n in range(1, count + 1)})


def policy_of(**given: object) -> Policy:
    return Policy.model_validate({"canary": 0, "batch": ["100%"], "max_unreachable": "100%", **given})


# -- how many at once -----------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "most"), [(None, 8), ("25%", 2), ("3", 3)])
async def test_no_more_hosts_are_at_work_than_may_be_out_of_service(bound: str | None, most: int) -> None:
    at_work, seen = 0, 0

    async def work(args: dict[str, object], world: dict[str, object]) -> None:
        nonlocal at_work, seen
        at_work += 1
        seen = max(seen, at_work)
        await asyncio.sleep(0.005)
        at_work -= 1
        world["a"] = True

    fleet = dark(8).on("toy.set", work)
    state, _ = await play(fleet, A, policy=policy_of(max_unavailable=bound))
    assert set(outcomes(state).values()) == {"changed"}
    assert seen == most


async def test_hosts_that_stay_out_of_service_leave_less_room_and_at_last_none() -> None:
    steps = [
        step("stop", Switch(name="job", on=False, key="stop:job", job="stops")),
        step("lamp", Lit(name="lamp"), on_failure="stop"),
    ]
    fleet = Fleet({f"gpu{n}": toy_host(job=True, lamp=n > 2) for n in range(1, 7)})
    policy = policy_of(max_unavailable=2, max_failures="100%")
    state, _ = await play(fleet, steps, policy=policy)
    assert list(outcomes(state).values()) == ["failed", "failed", *["not_started"] * 4]
    assert state.halted is not None
    assert "2 out of service already, and gpu3 would be one more" in state.halted
    assert state.exit == 3


async def test_a_host_that_waits_in_the_middle_of_a_change_gives_its_slot_back() -> None:
    fleet, inside = dark(3), 0
    all_in = asyncio.Event()

    async def grace(args: dict[str, object], world: dict[str, object]) -> None:
        nonlocal inside
        inside += 1
        if inside == 3:
            all_in.set()
        await all_in.wait()
        world["a"] = True

    fleet.on("toy.set", grace)
    steps = [step("a", Switch(name="a", waits=True))]
    async with asyncio.timeout(20):
        state, _ = await play(fleet, steps, policy=policy_of(forks=1))
    assert set(outcomes(state).values()) == {"changed"}


async def test_a_host_that_settles_after_going_back_gives_its_slot_back() -> None:
    fleet = Fleet({"gpu01": toy_host(a=False, lamp=False), "gpu02": toy_host(a=False, lamp=True)})
    late = iter([True, True, False])

    def settles(args: dict[str, object], world: dict[str, object]) -> object:
        if args["name"] == "a" and fleet["gpu01"].runs("undo"):
            return next(late)
        return world[str(args["name"])]

    fleet["gpu01"].on("toy.get", settles)
    clock = HandClock()
    steps = [*A, step("lamp", Lit(name="lamp"))]
    state, shelf = await play(fleet, steps, clock=clock, policy=policy_of(forks=1, max_failures=1))
    assert outcomes(state) == {"gpu01": "rolled_back", "gpu02": "changed"}
    assert clock.slept == [0.5, 0.5]
    assert [event.host for event in shelf.of("host_finished")] == ["gpu02", "gpu01"]


async def test_the_work_of_a_run_grows_with_its_hosts_and_not_with_their_square() -> None:
    async def calls(hosts: int) -> int:
        made = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event == "call"

        fleet = dark(hosts)
        sys.setprofile(count)
        try:
            state, _ = await play(fleet, A, policy=policy_of(canary=1, max_unavailable="50%"))
        finally:
            sys.setprofile(None)
        assert state.exit == 0
        return made

    assert await calls(400) < 5 * await calls(100)


# -- soak -----------------------------------------------------------------------------------------


async def test_between_two_waves_it_soaks_and_says_so() -> None:
    clock = HandClock()
    policy = policy_of(canary=1, batch=[1], soak=300)
    state, shelf = await play(dark(3), A, policy=policy, clock=clock)
    assert [event.wave for event in shelf.of("soak_started")] == ["canary", "batch 1"]
    assert clock.slept == [300.0, 300.0]
    assert state.exit == 0


class LongClock(HandClock):
    """Time of which a long sleep never ends, but is begun."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds < 100:
            return await super().sleep(seconds)
        self.asleep.set()
        await asyncio.Event().wait()
        return None


async def test_only_the_operator_cuts_a_soak_short_and_then_nothing_more_is_begun() -> None:
    clock, interrupts, fleet = LongClock(), Interrupts(), dark(2)

    async def interrupt() -> None:
        await clock.asleep.wait()
        await asyncio.sleep(0.01)
        interrupts.interrupt("SIGINT")

    task = asyncio.ensure_future(interrupt())
    policy = policy_of(canary=1, soak=300)
    state, _ = await play(fleet, A, policy=policy, clock=clock, interrupts=interrupts)
    await task
    assert outcomes(state) == {"gpu01": "changed", "gpu02": "not_started"}
    assert (state.exit, state.interrupted) == (130, 1)


class SoakClock(HandClock):
    """Time of which a soak does not pass, until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.soaks, self.over = asyncio.Event(), asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds < 100:
            return await super().sleep(seconds)
        self.soaks.set()
        await self.over.wait()
        return None


async def test_what_happens_while_it_soaks_decides_what_comes_next() -> None:
    fleet, clock = dark(2), SoakClock()
    for host in fleet.hosts.values():
        host.world["lamp"] = True
    fleet.hosts["gpu03"] = healthy = toy_host(a=True, lamp=True)
    asked = 0

    async def lost_in_the_soak(args: dict[str, object], world: dict[str, object]) -> object:
        nonlocal asked
        asked += args["name"] == "lamp"
        if asked == 2:
            await clock.soaks.wait()
            clock.over.set()
            healthy.vanish()
            await asyncio.sleep(10)
        return world[str(args["name"])]

    healthy.on("toy.get", lost_in_the_soak)
    steps = [*A, step("lamp", Lit(name="lamp"))]
    policy = policy_of(canary=1, soak=300, max_unreachable=0)
    state, shelf = await play(fleet, steps, policy=policy, clock=clock)
    assert outcomes(state) == {"gpu01": "changed", "gpu02": "not_started", "gpu03": "unreachable"}
    assert [wave.name for wave in shelf.of("wave_started")] == ["canary"]
    assert state.exit == 3


# -- the breaker ----------------------------------------------------------------------------------


async def test_one_failure_on_three_hosts_trips_the_breaker_and_holds_the_rest() -> None:
    fleet = dark(9)
    fleet.on("toy.set", None)
    policy = policy_of(max_failures="100%", batch=[3])
    state, shelf = await play(fleet, A, policy=policy)
    assert list(outcomes(state).values()) == [*["rolled_back"] * 3, *["not_started"] * 6]
    assert [event.reason for event in shelf.of("breaker_tripped")] == [
        "3 hosts failed alike: gpu[01-03] at a: done, and still to do: turn a on"
    ]
    assert shelf.of("run_halted") == []
    assert state.exit == 3
    assert {name: fleet[name].writes() for name in ("gpu04", "gpu09")} == {"gpu04": 0, "gpu09": 0}


async def test_hosts_of_a_wave_that_wait_for_their_turn_are_held_too() -> None:
    fleet = dark(6)
    fleet.on("toy.set", None)
    state, shelf = await play(fleet, A, policy=policy_of(max_failures="100%", forks=1))
    assert list(outcomes(state).values()) == [*["rolled_back"] * 3, *["not_started"] * 3]
    assert len(shelf.of("breaker_tripped")) == 1


async def test_two_hosts_lost_after_a_change_trip_it() -> None:
    fleet = dark(5)
    for name in ("gpu01", "gpu02"):
        fleet[name].lose(after=1, back=False)
    state, shelf = await play(fleet, A, policy=policy_of(max_failures="100%", batch=[1]))
    assert list(outcomes(state).values()) == ["rollback_pending"] * 2 + ["not_started"] * 3
    assert shelf.of("breaker_tripped")[0].reason == "2 hosts were lost after a change: gpu[01-02]"


async def test_a_breaker_that_another_run_tripped_meanwhile_stops_this_one_before_its_next_wave() -> None:
    shelf = Shelf()
    fleet = dark(3)

    def trip_meanwhile(args: dict[str, object], world: dict[str, object]) -> None:
        world["a"] = True
        shelf.trips["inline"] = BreakerRow("inline", 0.0, "another", "going back failed on gpu99")

    fleet["gpu01"].on("toy.set", trip_meanwhile)
    state, _ = await play(fleet, A, policy=policy_of(canary=1), shelf=shelf)
    assert list(outcomes(state).values()) == ["changed", "not_started", "not_started"]
    assert state.halted == "run another has tripped the breaker: going back failed on gpu99"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_rollback_by_hand_that_fails_trips_it_and_one_that_goes_well_does_not(fails: bool) -> None:
    fleet, shelf = dark(2), Shelf()
    state, _ = await play(fleet, A, shelf=shelf, policy=policy_of())
    if fails:
        full = Failure(kind="no_space", message="no space left")
        fleet["gpu02"].on("toy.set", full)
    asked = request(tuple(fleet), A)
    recorder = Recorder(asked.run, shelf, state=state, seq=len(shelf.records))
    with fleet:
        await roll_back(asked.run, "toy", asked.hosts, recorder, operator="ann", controller="here")
    tripped = [event.reason for event in shelf.of("breaker_tripped")]
    assert tripped == (["going back failed on gpu02"] if fails else [])


# -- one machine, two names -----------------------------------------------------------------------


@pytest.mark.parametrize("dry", [False, True])
async def test_two_names_of_one_machine_are_both_refused_before_any_change(dry: bool) -> None:
    fleet = dark(3)
    fleet["gpu01"].machine = fleet["gpu03"].machine = "one"
    state, shelf = await play(fleet, A, policy=policy_of(), dry=dry)
    well = "pending" if dry else "changed"
    assert outcomes(state) == {"gpu01": "blocked", "gpu02": well, "gpu03": "blocked"}
    assert [fleet[name].writes() for name in fleet] == [0, 0 if dry else 1, 0]
    for end in shelf.of("host_finished"):
        if end.outcome == "blocked":
            assert end.reason.startswith("gpu[01,03] are one machine")
            assert "/etc/machine-id" in end.failure.hint


async def test_they_are_refused_also_where_neither_needs_anything() -> None:
    fleet = Fleet({"gpu01": toy_host(a=True), "gpu02": toy_host(a=True)})
    fleet["gpu01"].machine = fleet["gpu02"].machine = "one"
    state, _ = await play(fleet, A, policy=policy_of())
    assert outcomes(state) == {"gpu01": "blocked", "gpu02": "blocked"}


# -- the last -------------------------------------------------------------------------------------


async def test_the_controller_itself_goes_last_and_alone() -> None:
    fleet = dark(3)
    fleet["gpu01"].machine = "here"
    state, shelf = await play(fleet, A, policy=policy_of(canary=1), machine="here/boot-1")
    assert [(wave.name, wave.hosts) for wave in shelf.of("wave_started")] == [
        ("canary", ("gpu02",)),
        ("batch 1", ("gpu03",)),
        ("last 1", ("gpu01",)),
    ]
    assert state.exit == 0


# -- the controller's network ---------------------------------------------------------------------


class PatientClock(HandClock):
    """Time of which only the long wait for a network does not pass, until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.gives_up = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds < GIVEN_UP_AFTER:
            return await super().sleep(seconds)
        await self.gives_up.wait()
        return None


def wave_of(fleet: Fleet, gate: asyncio.Event) -> asyncio.Event:
    """Have every host of the fleet be in the middle of its change until the gate opens."""
    all_in, inside = asyncio.Event(), set()

    def rule(name: str) -> object:
        async def work(args: dict[str, object], world: dict[str, object]) -> None:
            inside.add(name)
            if len(inside) == 4:
                all_in.set()
            await gate.wait()
            world["a"] = True

        return work

    for name in fleet:
        fleet[name].on("toy.set", rule(name))
    return all_in


async def test_where_half_the_sessions_drop_it_waits_and_goes_on_when_they_are_back() -> None:
    fleet, shelf, clock = dark(8), Shelf(), PatientClock()
    gate = asyncio.Event()
    all_in = wave_of(fleet, gate)

    async def weather() -> None:
        await all_in.wait()
        for name in fleet:
            fleet[name].cut()
        gate.set()
        await until(lambda: shelf.of("network_lost"))
        clock.time += 400.0
        await asyncio.sleep(0.02)
        assert [event.host for event in shelf.of("host_started")] == [f"gpu{n:02}" for n in range(1, 5)]
        for name in fleet:
            fleet[name].splice()

    task = asyncio.ensure_future(weather())
    state, _ = await play(fleet, A, shelf=shelf, clock=clock, policy=policy_of(batch=[4]))
    await task
    assert set(outcomes(state).values()) == {"changed"}
    assert state.exit == 0
    (lost,), (back,) = shelf.of("network_lost"), shelf.of("network_returned")
    assert (lost.dropped, lost.open) == (4, 8)
    assert back.seconds == 400.0
    assert {name: fleet[name].writes() for name in fleet} == dict.fromkeys(fleet, 1)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)


async def test_a_network_that_does_not_come_back_is_given_up_and_no_host_is_blamed() -> None:
    fleet, shelf, clock = dark(8), Shelf(), PatientClock()
    gate = asyncio.Event()
    all_in = wave_of(fleet, gate)

    async def weather() -> None:
        await all_in.wait()
        for name in fleet:
            fleet[name].cut()
        await until(lambda: shelf.of("network_lost"))
        clock.gives_up.set()
        gate.set()

    task = asyncio.ensure_future(weather())
    state, _ = await play(fleet, A, shelf=shelf, clock=clock, policy=policy_of(batch=[4]))
    await task
    assert list(outcomes(state).values()) == ["rollback_pending"] * 4 + ["not_started"] * 4
    assert shelf.of("breaker_tripped") == []
    (halted,) = shelf.of("run_halted")
    assert halted.reason.startswith("the controller's network: 4 of 8 sessions dropped at once")
    assert all(event.by_controller for event in shelf.of("host_lost"))
    assert state.exit == 3


class LateFleet(Fleet):
    """One host is connected to only when the test says so."""

    def __init__(self, hosts: Fleet, late: str) -> None:
        super().__init__(hosts.hosts)
        self.late, self.now = late, asyncio.Event()

    async def open(self, host: Host, purpose: Purpose, opening: Opening | None = None) -> Session:
        if host.name == self.late:
            await self.now.wait()
        return await super().open(host, purpose, opening)


@pytest.mark.parametrize("returns", [True, False])
async def test_a_host_that_cannot_be_connected_to_meanwhile_is_tried_again_and_not_blamed(
    returns: bool,
) -> None:
    fleet, shelf, clock = LateFleet(dark(5), "gpu05"), Shelf(), PatientClock()
    asked, gate = 0, asyncio.Event()

    async def survey(args: dict[str, object], world: dict[str, object]) -> object:
        nonlocal asked
        asked += 1
        await gate.wait()
        return world["a"]

    async def weather() -> None:
        await until(lambda: asked == 4)
        for name in fleet:
            fleet[name].cut()
        await until(lambda: shelf.of("network_lost"))
        fleet.now.set()
        gate.set()
        await asyncio.sleep(0.02)
        if returns:
            for name in fleet:
                fleet[name].splice()
        else:
            clock.gives_up.set()

    fleet.on("toy.get", survey)
    task = asyncio.ensure_future(weather())
    state, _ = await play(fleet, A, shelf=shelf, clock=clock, policy=policy_of(max_unreachable=0))
    await task
    assert set(outcomes(state).values()) == {"changed" if returns else "not_started"}
    assert [event.by_controller for event in shelf.of("host_lost")] == ([] if returns else [True] * 5)
    assert state.exit == (0 if returns else 3)


async def test_two_sessions_are_no_network() -> None:
    fleet, shelf = dark(4), Shelf()
    gate = asyncio.Event()
    all_in = wave_of(fleet, gate)

    async def weather() -> None:
        await all_in.wait()
        for name in ("gpu01", "gpu02"):
            fleet[name].cut()
        gate.set()
        await until(lambda: len(shelf.of("host_finished")) == 2)
        for name in ("gpu01", "gpu02"):
            fleet[name].splice()

    task = asyncio.ensure_future(weather())
    state, _ = await play(fleet, A, shelf=shelf, policy=policy_of())
    await task
    assert set(outcomes(state).values()) == {"changed"}
    assert shelf.of("network_lost") == []


async def test_the_operator_need_not_wait_for_the_network() -> None:
    fleet, shelf, interrupts = dark(8), Shelf(), Interrupts()
    gate = asyncio.Event()
    all_in = wave_of(fleet, gate)

    async def weather() -> None:
        await all_in.wait()
        for name in list(fleet)[4:]:
            fleet[name].cut()
        gate.set()
        await until(lambda: shelf.of("network_lost"))
        interrupts.interrupt("SIGINT")

    task = asyncio.ensure_future(weather())
    policy = policy_of(batch=[4])
    state, _ = await play(fleet, A, shelf=shelf, clock=PatientClock(), policy=policy, interrupts=interrupts)
    await task
    assert list(outcomes(state).values()) == ["changed"] * 4 + ["not_started"] * 4
    assert state.exit == 130


async def test_a_steps_time_stands_still_while_the_network_is_lost() -> None:
    clock = PatientClock()
    network = Network(clock)
    for name in ("a", "b", "c", "d"):
        network.opened(name)
    began = network.now()
    async with network.deadline(0.05):
        for name in ("a", "b", "c"):
            network.dropped(name)
        assert network.lost
        clock.time += 1000.0
        await asyncio.sleep(0.1)
        assert network.now() == began
        network.returned("a")
        assert not network.lost
        assert (network.now(), network.away) == (began, 1000.0)
    with pytest.raises(TimeoutError):
        async with network.deadline(0.01):
            await asyncio.sleep(5)


@pytest.mark.parametrize(
    ("open_", "down", "lost"), [(4, 2, False), (4, 3, True), (8, 3, False), (8, 4, True)]
)
async def test_it_takes_half_of_the_sessions_and_three(open_: int, down: int, lost: bool) -> None:
    network = Network(PatientClock())
    names = [f"gpu{n}" for n in range(open_)]
    for name in names:
        network.opened(name)
    for name in names[:down]:
        network.dropped(name)
    assert network.lost is lost
    network.close()


async def test_sessions_that_drop_one_after_the_other_are_no_network() -> None:
    clock = PatientClock()
    network = Network(clock)
    for name in ("a", "b", "c", "d"):
        network.opened(name)
        network.dropped(name)
        clock.time += 40.0
    assert not network.lost
