"""A run that is taken up again: from its journal, or from what its hosts say of themselves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from fleetfix.engine.context import Interrupts
from fleetfix.engine.going_back import roll_back
from fleetfix.events import Record
from fleetfix.playbook import Step
from fleetfix.policy import Policy, Share
from fleetfix.recorder import Recorder
from fleetfix.state import HostState, RunState, fold, to_take_up
from fleetfix.transports.scripted import Fleet, ScriptedHost
from tests.engine.toys import HandClock, Lit, Once, Shelf, Switch, play, request, resume, step, toy_host

STEPS = [
    step("before", Lit(name="eyes")),
    step("stop", Switch(name="job", on=False, key="stop:job", job="stops"), when_pending=("a", "b")),
    step("idle", Lit(name="idle"), when_changed=("stop",)),
    step("a", Switch(name="a")),
    step("bell", Once(name="bell"), when_changed=("a",)),
    step("b", Switch(name="b")),
    step("sound", Lit(name="sound"), when_changed=("a", "b")),
    step("train", Switch(name="job", key="start", job="starts", follows="stop")),
    step("lamp", Lit(name="lamp")),
]
"""The shape of the main job: stop, prove idle, mend twice, something by word, prove, start, prove."""

POLICY = Policy(canary=1, batch=(Share.parse("100%"),), max_unreachable=Share.parse("100%"), forks=1)


def host(**world: Any) -> ScriptedHost:
    """A host whose `idle` holds exactly while its job is stopped."""
    made = toy_host(a=False, b=False, job=True, eyes=True, sound=True, lamp=True)
    made.world.update(world)
    made.on(
        "toy.get", lambda args, now: not now["job"] if args["name"] == "idle" else now.get(args["name"])
    )
    return made


def two() -> Fleet:
    return Fleet({"gpu01": host(), "gpu02": host()})


WELL = {"a": True, "b": True, "job": True, "eyes": True, "sound": True, "lamp": True, "bell": 1}


class Cut:
    """Ends the controller as kill -9 does: no record more, no word more to a host, no answer heard.

    What a host does at that moment it does to its end.
    """

    def __init__(
        self, fleet: Fleet, *, at_record: int = 0, at_call: int = 0, steps: Sequence[Step] = STEPS
    ) -> None:
        self.fleet = fleet
        self.steps = steps
        self.policy = POLICY
        self.shelf = Shelf()
        self.calls = 0
        self.happened = False
        self._at_record, self._at_call = at_record, at_call
        self._append = self.shelf.append
        self.shelf.append = self._keep  # type: ignore[method-assign]
        for name in fleet:
            self._listen(fleet[name])

    def _keep(self, records: Sequence[Record]) -> None:
        left = self._at_record - len(self.shelf.records) if self._at_record else len(records)
        if self.happened:
            return
        self._append(records[:left])
        if len(records) >= left and self._at_record:
            self._playing.get_loop().call_soon_threadsafe(self._kill)

    def _listen(self, host: ScriptedHost) -> None:
        execute = host.execute

        async def counted(*words: Any) -> Any:
            self.calls += 1
            if self.calls == self._at_call:
                self._kill()
            return await execute(*words)

        host.execute = counted  # type: ignore[method-assign]

    def _kill(self) -> None:
        if not self.happened:
            self.happened = True
            for name in self.fleet:
                self.fleet[name].drop()
            self._playing.cancel()

    async def play(self) -> Shelf:
        """Play up to the cut; the journal as it is then."""
        return await self._up_to_the_cut(play(self.fleet, self.steps, shelf=self.shelf, policy=self.policy))

    async def resume(self) -> Shelf:
        """Resume up to the cut."""
        return await self._up_to_the_cut(resume(self.fleet, self.steps, self.shelf, policy=self.policy))

    async def _up_to_the_cut(self, work: Coroutine[Any, Any, Any]) -> Shelf:
        self._playing = asyncio.ensure_future(work)
        with contextlib.suppress(asyncio.CancelledError):
            await self._playing
        # What the recorder that was killed still has in hand comes to a shelf that nobody reads any more.
        kept, self.shelf = self.shelf, Shelf()
        self.shelf.records += kept.records
        self.shelf.kept |= kept.kept
        for _ in range(20):
            await asyncio.sleep(0)
        return self.shelf


async def whole_length() -> tuple[int, int]:
    """How many records, and how many calls on hosts, a run that nothing cuts has."""
    whole = Cut(two())
    return len((await whole.play()).records), whole.calls


def set_once(fleet: Fleet) -> None:
    """No change was made twice: the host counts."""
    for name in fleet:
        made = Counter(
            (one.function, *sorted(one.args.items())) for one in fleet[name].executed if one.way == "do"
        )
        assert set(made.values()) == {1}, (name, made)
        assert not fleet[name].runs("undo")


def outcomes(state: RunState) -> dict[str, str | None]:
    return {name: host.outcome for name, host in state.hosts.items()}


# -- cut anywhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["at_record", "at_call"])
async def test_a_controller_that_is_killed_anywhere_leaves_a_run_that_another_can_finish(what: str) -> None:
    records, calls = await whole_length()
    for place in range(1, (records if what == "at_record" else calls) + 1):
        fleet = two()
        shelf = await Cut(fleet, **{what: place}).play()
        state = await resume(fleet, STEPS, shelf, elsewhere=True, policy=POLICY)
        assert {fleet[name].world.get("job") for name in fleet} == {True}, place
        assert [fleet[name].world for name in fleet] == [WELL, WELL], place
        set_once(fleet)
        assert set(outcomes(state).values()) <= {"changed", "ok"}, (place, outcomes(state))
        assert state.exit == 0, place
        assert [fleet[name].claims for name in fleet] == [{}, {}], place


async def test_cut_again_and_again_it_still_comes_to_its_end() -> None:
    fleet = two()
    shelf = await Cut(fleet, at_record=30).play()
    for _ in range(20):
        if fold(shelf.records).exit is not None:
            break
        cut = Cut(fleet, at_record=len(shelf.records) + 37)
        cut.shelf.records += shelf.records
        await cut.resume()
        shelf = cut.shelf
    assert fold(shelf.records).exit == 0
    assert [fleet[name].world for name in fleet] == [WELL, WELL]
    set_once(fleet)


async def test_a_way_back_that_is_cut_anywhere_is_gone_to_its_end() -> None:
    steps = [one for one in STEPS if one.id != "bell"]
    sick = {"a": False, "b": False, "job": True, "eyes": True, "sound": True, "lamp": False}
    whole = Cut(Fleet({"gpu01": host(lamp=False)}), steps=steps)
    records = len((await whole.play()).records)
    for place in range(1, records + 1):
        fleet = Fleet({"gpu01": host(lamp=False)})
        shelf = await Cut(fleet, at_record=place, steps=steps).play()
        state = await resume(fleet, steps, shelf, policy=POLICY)
        assert outcomes(state) == {"gpu01": "rolled_back"}, place
        assert fleet["gpu01"].world == sick, place
        assert fleet["gpu01"].claims == {}, place


async def test_a_way_back_that_the_operator_leaves_is_gone_to_its_end_later() -> None:
    fleet = two()
    steps = [one for one in STEPS if one.id != "bell"]
    ran, _ = await play(fleet, steps, policy=POLICY)
    asked = request(("gpu01", "gpu02"), steps)
    gate = fleet["gpu01"].gate("toy.set")

    def again(forks: int) -> Coroutine[Any, Any, RunState]:
        fresh = {name: HostState(name, started=True) for name in fleet}
        recorder = Recorder(ran.run, Shelf(), state=RunState(run=ran.run, hosts=fresh))
        return roll_back(
            ran.run, "toy", asked.hosts, recorder, operator="ann", controller="here", known=ran, forks=forks
        )

    with fleet:
        work = asyncio.ensure_future(again(1))
        while not any(entry.running for entry in fleet["gpu01"].log.values()):
            await asyncio.sleep(0)
        work.cancel()
        left = await work
        assert set(outcomes(left).values()) == {"rollback_pending"}, "gpu02 was not even reached"
        assert left.rolled_back_exit == 130
        gate.set()
        gone = await again(2)
    assert set(outcomes(gone).values()) == {"rolled_back"}
    for name in fleet:
        assert fleet[name].claims == {}


# -- what the host says ----------------------------------------------------------------------------


@pytest.mark.parametrize(("calls", "attempts"), [(0, [2]), (1, [1])])
async def test_a_change_in_doubt_is_settled_by_looking_again(calls: int, attempts: list[int]) -> None:
    fleet, shelf = Fleet({"gpu01": toy_host(a=False)}), Shelf()
    fleet["gpu01"].lose(during=1, calls=calls)
    steps = [step("a", Switch(name="a"))]
    first, _ = await play(fleet, steps, shelf=shelf)
    assert outcomes(first) == {"gpu01": "rollback_pending"}
    shelf.records = [record for record in shelf.records if record.event.kind not in ENDS]
    state = await resume(fleet, steps, shelf)
    assert outcomes(state) == {"gpu01": "changed"}
    assert fleet["gpu01"].world == {"a": True}
    made = [one.id for one in fleet["gpu01"].executed if one.way == "do"]
    assert made == [f"20260101-000000-toy-aaaa/a/{attempt}/0" for attempt in attempts]


ENDS = ("host_lost", "rollback_finished", "host_finished", "run_halted", "run_finished", "breaker_tripped")
"""What a controller that had died instead would not have recorded."""


async def test_what_nothing_verifies_is_never_repeated_unasked() -> None:
    fleet, shelf = Fleet({"gpu01": toy_host()}), Shelf()
    fleet["gpu01"].lose(during=1, calls=0)
    steps = [step("bell", Once(name="bell")), step("a", Switch(name="a", on=False))]
    await play(fleet, steps, shelf=shelf)
    shelf.records = [record for record in shelf.records if record.event.kind not in ENDS]
    state = await resume(fleet, steps, shelf)
    assert outcomes(state) == {"gpu01": "in_doubt"}
    finished = state.hosts["gpu01"].finished
    assert finished is not None
    assert finished.failure is not None
    assert "ring bell" in finished.reason
    assert "rollback, or release, 20260101-000000-toy-aaaa --hosts gpu01" in finished.failure.hint
    assert fleet["gpu01"].writes() == 0
    assert list(fleet["gpu01"].claims) == ["20260101-000000-toy-aaaa"]
    assert outcomes(await resume(fleet, steps, shelf)) == {"gpu01": "in_doubt"}
    assert fleet["gpu01"].writes() == 0


async def test_a_host_that_forgot_the_run_is_looked_at_by_somebody() -> None:
    fleet = two()
    shelf = await Cut(fleet, at_call=25).play()
    assert fold(shelf.records).hosts["gpu01"].changes
    fleet["gpu01"].log.clear()
    fleet["gpu01"].notes.clear()
    before = fleet["gpu01"].writes()
    state = await resume(fleet, STEPS, shelf, policy=POLICY)
    assert outcomes(state) == {"gpu01": "in_doubt", "gpu02": "not_started"}
    assert fleet["gpu01"].writes() == before
    assert state.exit == 3


async def test_the_steps_are_those_that_the_host_keeps_whatever_the_inventory_says_now() -> None:
    fleet = two()
    shelf = await Cut(fleet, at_call=25).play()
    edited = [step("a", Switch(name="a")), step("other", Switch(name="other"))]
    state = await resume(fleet, edited, shelf, policy=POLICY)
    assert fleet["gpu01"].world == WELL
    assert fleet["gpu02"].world["other"] is True
    assert state.exit == 0


@pytest.mark.parametrize("trouble", ["gone", "taken"])
async def test_a_host_that_cannot_go_on_now_is_left_open_and_taken_up_next_time(trouble: str) -> None:
    fleet = two()
    shelf = await Cut(fleet, at_call=25).play()
    open_ = set(fleet["gpu01"].claims["20260101-000000-toy-aaaa"].open)
    if trouble == "gone":
        fleet["gpu01"].refuse()
    else:
        fleet["gpu01"].disabled = "ann: hands off"
    state = await resume(fleet, STEPS, shelf, policy=POLICY)
    assert outcomes(state) == {"gpu01": "failed", "gpu02": "not_started"}
    finished = state.hosts["gpu01"].finished
    assert finished is not None
    assert finished.open
    assert set(fleet["gpu01"].claims["20260101-000000-toy-aaaa"].open) == open_
    fleet["gpu01"].accept().disabled = None
    state = await resume(fleet, STEPS, shelf, policy=POLICY)
    assert outcomes(state) == {"gpu01": "changed", "gpu02": "changed"}
    set_once(fleet)


async def test_waves_go_on_as_if_nothing_had_happened() -> None:
    fleet = Fleet({f"gpu0{n}": host() for n in range(1, 6)})
    policy = Policy(canary=1, batch=(Share.parse("2"),), max_unreachable=Share.parse("100%"))
    shelf = await Cut(fleet, at_call=45).play()
    await resume(fleet, STEPS, shelf, policy=policy)
    waves = [(wave.name, wave.hosts) for wave in shelf.of("wave_started")]
    assert waves == [
        ("canary", ("gpu01",)),
        ("batch 1", ("gpu02", "gpu03")),
        ("batch 2", ("gpu04", "gpu05")),
    ]
    ends = [event.host for event in shelf.of("host_finished")]
    assert ends[0] == "gpu01"
    assert {fleet[name].world["bell"] for name in fleet} == {1}


async def test_from_another_machine_canary_batches_and_budgets_go_on_as_if_nothing_had_happened() -> None:
    policy = Policy(
        canary=1,
        batch=(Share.parse("1"), Share.parse("34%")),
        max_unreachable=Share.parse("100%"),
        max_failures=Share.parse("1"),
    )
    steps = [one for one in STEPS if one.id != "bell"]
    expected = [
        ("canary", ("gpu01",)),
        ("batch 1", ("gpu02",)),
        ("batch 2", ("gpu03", "gpu04")),
        ("batch 3", ("gpu05", "gpu06")),
    ]

    def six(*dark: str) -> Fleet:
        return Fleet({name: host(lamp=name not in dark) for name in (f"gpu0{n}" for n in range(1, 7))})

    for dark, code in ((("gpu02",), 2), (("gpu02", "gpu03"), 3), ((), 0)):
        fleet = six(*dark)
        whole, _ = await play(six(*dark), steps, policy=policy)
        cut = Cut(fleet, at_call=75 if dark else 85, steps=steps)
        cut.policy = policy
        await cut.play()
        begun = [name for name in fleet if fleet[name].notes]
        assert begun[:2] == ["gpu01", "gpu02"]
        assert 3 <= len(begun) <= 4, begun
        shelf = Shelf()
        state = await resume_elsewhere(fleet, steps, shelf, policy)
        waves = [(wave.name, wave.hosts) for wave in shelf.of("wave_started")]
        assert outcomes(state) == outcomes(whole), dark
        assert (state.exit, whole.exit) == (code, code)
        assert [name for name, _ in waves] == [name for name, _ in expected[: len(waves)]]
        assert [sorted(hosts) for _, hosts in waves] == [sorted(h) for _, h in expected[: len(waves)]]


async def resume_elsewhere(fleet: Fleet, steps: Sequence[Step], shelf: Shelf, policy: Policy) -> RunState:
    """Take the run up on a machine that has nothing of it."""
    return await resume(fleet, steps, shelf, hosts=tuple(fleet), policy=policy)


async def test_hosts_that_are_not_named_get_an_end_and_are_taken_up_later() -> None:
    fleet = two()
    shelf = await Cut(fleet, at_call=25).play()
    state = await resume(fleet, STEPS, shelf, hosts=["gpu02"], policy=POLICY)
    assert outcomes(state) == {"gpu01": "cancelled", "gpu02": "not_started"}
    assert state.halted == "the canary gpu01 is cancelled"
    state = await resume(fleet, STEPS, shelf, policy=POLICY)
    assert outcomes(state) == {"gpu01": "changed", "gpu02": "changed"}
    set_once(fleet)


async def test_without_a_yes_nothing_goes_on() -> None:
    fleet = two()
    shelf = await Cut(fleet, at_call=25).play()
    before = [fleet[name].writes() for name in fleet]

    async def no(state: RunState) -> bool:
        assert state.hosts["gpu01"].started
        return False

    state = await resume(fleet, STEPS, shelf, policy=POLICY, consent=no)
    assert outcomes(state) == {"gpu01": "cancelled", "gpu02": "not_started"}
    assert state.halted == "not confirmed"
    assert [fleet[name].writes() for name in fleet] == before
    assert list(fleet["gpu01"].claims) == ["20260101-000000-toy-aaaa"]


async def test_a_host_that_ended_well_or_went_back_is_left_alone() -> None:
    fleet = Fleet({"gpu01": host(), "gpu02": host(lamp=False)})
    state, _ = await play(fleet, [one for one in STEPS if one.id != "bell"], policy=POLICY)
    assert outcomes(state) == {"gpu01": "changed", "gpu02": "rolled_back"}
    assert to_take_up(state) == ()


# -- safe points -----------------------------------------------------------------------------------


async def test_a_host_whose_job_is_stopped_goes_on_until_it_runs_again() -> None:
    fleet, interrupts, shelf = two(), Interrupts(), Shelf()

    def interrupt(args: dict[str, object], world: dict[str, object]) -> None:
        if args["name"] == "a":
            interrupts.interrupt("SIGINT")
        world[str(args["name"])] = args["to"]

    fleet.on("toy.set", interrupt)
    state, _ = await play(fleet, STEPS, shelf=shelf, policy=POLICY, interrupts=interrupts)
    assert outcomes(state) == {"gpu01": "cancelled", "gpu02": "not_started"}
    assert state.exit == 130
    assert fleet["gpu01"].world == WELL
    assert [event.step for event in shelf.of("step_finished")][-1] == "train", "the lamp is left for later"
    assert not shelf.of("host_finished")[0].job_stopped
    state = await resume(fleet, STEPS, shelf, policy=POLICY)
    assert (set(outcomes(state).values()), state.exit) == ({"changed"}, 0)


async def test_it_goes_on_for_five_minutes_at_most() -> None:
    clock = HandClock()
    fleet, interrupts = two(), Interrupts(clock.now)
    fleet["gpu01"].on("toy.get", lambda args, world: world.get(args["name"]))  # never idle
    fleet["gpu01"].world["idle"] = False
    steps = [one if one.id != "idle" else one.model_copy(update={"within": 3600.0}) for one in STEPS]

    def interrupt(args: dict[str, object], world: dict[str, object]) -> None:
        interrupts.interrupt("SIGINT")
        world[str(args["name"])] = args["to"]

    fleet["gpu01"].on("toy.set", interrupt)
    state, shelf = await play(fleet, steps, policy=POLICY, interrupts=interrupts, clock=clock)
    assert outcomes(state)["gpu01"] == "cancelled"
    assert shelf.of("host_finished")[0].job_stopped
    assert 300 <= sum(clock.slept) < 400


async def test_a_wait_ends_where_the_job_runs() -> None:
    clock = HandClock()
    fleet, interrupts = Fleet({"gpu01": toy_host(a=False, lamp=False)}), Interrupts(clock.now)

    def look(args: dict[str, object], world: dict[str, object]) -> object:
        if args["name"] == "lamp" and clock.time > 10:
            interrupts.interrupt("SIGINT")
            fleet["gpu01"].on("toy.get", lambda args, world: world.get(args["name"]))
        return world.get(str(args["name"]))

    fleet["gpu01"].on("toy.get", look)
    steps = [step("a", Switch(name="a")), step("lamp", Lit(name="lamp"), within=3600.0, every=2.0)]
    state, shelf = await play(fleet, steps, interrupts=interrupts, clock=clock)
    assert outcomes(state) == {"gpu01": "cancelled"}
    assert fleet["gpu01"].world["a"] is True, "what is unproven is not taken back"
    assert clock.time < 20
    fleet["gpu01"].world["lamp"] = True
    assert outcomes(await resume(fleet, steps, shelf)) == {"gpu01": "changed"}


@pytest.mark.parametrize(
    ("choice", "outcome", "b"), [("finish", "changed", True), ("rollback", "rolled_back", False)]
)
async def test_the_operator_chooses_once_every_host_is_at_its_safe_point(
    choice: Any, outcome: str, b: bool
) -> None:
    fleet = Fleet({name: toy_host(a=False, b=False) for name in ("gpu01", "gpu02", "gpu03")})
    interrupts, asked = Interrupts(), []

    def interrupt(args: dict[str, object], world: dict[str, object]) -> None:
        if not interrupts.times:
            interrupts.interrupt("SIGINT")
        world[str(args["name"])] = args["to"]

    fleet.on("toy.set", interrupt)

    async def choose(state: RunState) -> Any:
        asked.append([name for name, one in state.hosts.items() if one.changes])
        return choice

    policy = Policy(canary=0, batch=(Share.parse("2"),))
    steps = [step("a", Switch(name="a")), step("b", Switch(name="b"))]
    state, _ = await play(fleet, steps, policy=policy, interrupts=interrupts, choose=choose)
    begun = [name for name in fleet if fleet[name].writes()]
    assert asked == [begun]
    assert {outcomes(state)[name] for name in begun} == {outcome}
    assert {fleet[name].world["b"] for name in begun} == {b}
    assert outcomes(state)["gpu03"] == "not_started"
    assert state.exit == 130


async def test_a_question_is_asked_when_all_that_came_before_it_is_kept_and_shown() -> None:
    class SlowShelf(Shelf):
        def append(self, records: Sequence[Record]) -> None:
            time.sleep(0.05)
            super().append(records)

    fleet, interrupts, shelf = Fleet({"gpu01": toy_host(a=False, b=False)}), Interrupts(), SlowShelf()

    def interrupt(args: dict[str, object], world: dict[str, object]) -> None:
        interrupts.interrupt("SIGINT")
        world[str(args["name"])] = args["to"]

    fleet.on("toy.set", interrupt)

    async def agree(state: RunState) -> bool:
        assert [event.host for event in shelf.of("host_planned")] == ["gpu01"]
        return True

    async def choose(state: RunState) -> Any:
        assert [event.step for event in shelf.of("step_finished")] == ["a"]
        return "leave"

    steps = [step("a", Switch(name="a")), step("b", Switch(name="b"))]
    state, _ = await play(fleet, steps, shelf=shelf, interrupts=interrupts, consent=agree, choose=choose)
    assert outcomes(state) == {"gpu01": "cancelled"}


async def test_a_second_interrupt_at_the_question_cancels() -> None:
    fleet, interrupts = Fleet({"gpu01": toy_host(a=False, b=False)}), Interrupts()

    def interrupt(args: dict[str, object], world: dict[str, object]) -> None:
        interrupts.interrupt("SIGINT")
        world[str(args["name"])] = args["to"]

    fleet.on("toy.set", interrupt)

    async def choose(state: RunState) -> Any:
        interrupts.interrupt("SIGINT")
        return "leave"

    steps = [step("a", Switch(name="a")), step("b", Switch(name="b"))]
    state, _ = await play(fleet, steps, interrupts=interrupts, choose=choose)
    assert outcomes(state) == {"gpu01": "cancelled"}
    assert (fleet["gpu01"].world, state.interrupted) == ({"a": True, "b": False}, 2)
    assert list(fleet["gpu01"].claims)
