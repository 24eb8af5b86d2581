"""Hosts that train one job: stopped, mended and started as one, or left as they were, all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleetfix.commands import Json
from fleetfix.engine.context import Interrupts
from fleetfix.engine.going_back import roll_back
from fleetfix.errors import Failure
from fleetfix.policy import Policy, Share
from fleetfix.recorder import Recorder
from fleetfix.state import HostState, RunState, fold
from tests.engine.clusters import STEPS, Cluster, Stop
from tests.engine.test_resume import Cut
from tests.engine.toys import Lit, Shelf, Switch, play, request, resume, step

ALL_MAY_FAIL = Policy(canary=0, batch=(Share.parse("100%"),), max_unreachable=Share.parse("100%"))


def outcomes(state: RunState) -> dict[str, str | None]:
    return {name: host.outcome for name, host in state.hosts.items()}


def reasons(state: RunState) -> dict[str, str]:
    return {name: host.finished.reason if host.finished else "" for name, host in state.hosts.items()}


# -- as one --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forks", [1, 64])
async def test_a_healthy_member_goes_along_and_all_are_captured_before_any_is_stopped(forks: int) -> None:
    cluster = Cluster("gpu01", "gpu02", "gpu03", broken=("gpu02",))
    steps = [step("stop", Stop(nodes=3), when_pending=("mend",), barrier=True), *STEPS[1:]]
    policy = ALL_MAY_FAIL.model_copy(update={"canary": 1, "forks": forks})
    state, shelf = await play(cluster.fleet, steps, policy=policy)
    assert outcomes(state) == dict.fromkeys(cluster.hosts, "changed")
    assert sorted(cluster.did("capture")) == ["gpu01", "gpu02", "gpu03"]
    assert cluster.last("capture") < cluster.first("stop")
    assert cluster.last("stop") < cluster.first("sound True") < cluster.first("start")
    assert cluster.did("sound True") == ["gpu02"]
    assert cluster.jobs() == dict.fromkeys(cluster.hosts, "running")
    (formed,) = shelf.of("cohort_formed")
    assert (formed.name, formed.hosts) == ("job llama (gpu01:1)", ("gpu01", "gpu02", "gpu03"))
    assert shelf.of("wave_started")[0].hosts == ("gpu01", "gpu02", "gpu03"), (
        "the canary is the whole cohort"
    )
    last = [event for event in shelf.of("step_planned") if (event.host, event.step) == ("gpu01", "stop")][
        -1
    ]
    assert last.pending
    assert "only because job llama (gpu01:1) spans gpu[01-03]" in last.notes


async def test_one_member_is_mended_before_the_others() -> None:
    cluster = Cluster("gpu01", "gpu02", broken=("gpu01", "gpu02"))
    state, shelf = await play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL)
    assert set(outcomes(state).values()) == {"changed"}
    assert cluster.did("sound True") == ["gpu01", "gpu02"]
    ends = [(e.kind, e.host, e.step) for e in shelf.events if e.kind in ("step_started", "step_finished")]
    mended, began = (
        ends.index(("step_finished", "gpu01", "mend")),
        ends.index(("step_started", "gpu02", "mend")),
    )
    assert mended < began


async def test_a_healthy_cohort_is_not_disturbed_also_where_one_of_it_is_selected() -> None:
    for names in (("gpu01", "gpu02"), ("gpu01",)):
        cluster = Cluster(*names, broken=())
        state, shelf = await play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL)
        assert set(outcomes(state).values()) == {"ok"}
        assert cluster.told == []
        assert shelf.of("cohort_formed") == []


async def test_a_job_that_does_not_span_hosts_needs_no_cohort() -> None:
    cluster = Cluster("gpu01", broken=("gpu01",))
    steps = [step("stop", Stop(nodes=1), when_pending=("mend",), barrier=True), *STEPS[1:]]
    state, shelf = await play(cluster.fleet, steps, policy=ALL_MAY_FAIL)
    assert outcomes(state) == {"gpu01": "changed"}
    assert [done for _, done in cluster.told][-1] == "start"
    assert cluster.did("capture") == []
    assert shelf.of("step_waited") == []


# -- not all can take part -------------------------------------------------------------------------------


async def test_a_member_that_is_not_selected_blocks_the_others_and_is_asked_for() -> None:
    cluster = Cluster("gpu02", broken=("gpu02",))
    state, _ = await play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL)
    assert outcomes(state) == {"gpu02": "blocked"}
    assert "spans 2 hosts" in reasons(state)["gpu02"]
    assert "it meets at gpu01" in reasons(state)["gpu02"]
    assert "--hosts" in reasons(state)["gpu02"]
    assert cluster.told == []


async def test_a_member_that_cannot_be_reached_blocks_the_others() -> None:
    cluster = Cluster("gpu01", "gpu02", "gpu03", broken=("gpu01", "gpu03"))
    cluster.hosts["gpu02"].refuse()
    cluster.hosts["gpu03"].on(
        "toy.get", lambda args, world: None if args["name"] == "job" else world[args["name"]]
    )
    state, _ = await play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL)
    assert outcomes(state) == {"gpu01": "blocked", "gpu02": "unreachable", "gpu03": "changed"}
    assert cluster.did("stop") == []


async def test_a_member_that_is_blocked_blocks_the_others() -> None:
    cluster = Cluster("gpu01", "gpu02")
    cluster.hosts["gpu02"].world["job"] = "odd"
    state, _ = await play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL)
    assert outcomes(state) == dict.fromkeys(cluster.hosts, "blocked")
    assert "on gpu02: the job is odd" in reasons(state)["gpu01"]
    assert cluster.told == []


async def test_a_cohort_by_word_alone_goes_as_one_and_misses_whoever_is_not_there() -> None:
    """Nothing shows that these hosts train one job: the inventory says so."""
    steps = [step("stop", Stop(nodes=1), when_pending=("mend",), barrier=True), *STEPS[1:]]
    by_word = {name: {"cohort": "llama3"} for name in ("gpu01", "gpu02")}
    cluster = Cluster("gpu01", "gpu02")
    state, shelf = await play(cluster.fleet, steps, policy=ALL_MAY_FAIL, variables=by_word)
    assert set(outcomes(state).values()) == {"changed"}
    assert shelf.of("cohort_formed")[0].name == "llama3"
    assert cluster.last("capture") < cluster.first("stop")
    cluster = Cluster("gpu01", "gpu02")
    cluster.hosts["gpu02"].refuse()
    state, _ = await play(cluster.fleet, steps, policy=ALL_MAY_FAIL, variables=by_word)
    assert outcomes(state) == {"gpu01": "blocked", "gpu02": "unreachable"}
    assert "cohort llama3, and gpu02 is unreachable" in reasons(state)["gpu01"]
    assert cluster.told == []


async def test_a_step_that_stops_such_a_job_without_a_barrier_is_refused() -> None:
    cluster = Cluster("gpu01", "gpu02")
    steps = [step("stop", Stop(), when_pending=("mend",)), *STEPS[1:]]
    state, _ = await play(cluster.fleet, steps, policy=ALL_MAY_FAIL)
    assert outcomes(state)["gpu01"] == "blocked"
    assert "stop needs `barrier: true`" in reasons(state)["gpu01"]
    assert cluster.told == []


async def test_a_policy_without_cohorts_leaves_them_alone() -> None:
    cluster = Cluster("gpu01", "gpu02")
    policy = ALL_MAY_FAIL.model_copy(update={"cohort": "none"})
    state, _ = await play(cluster.fleet, STEPS, policy=policy)
    assert outcomes(state)["gpu01"] == "blocked"
    assert cluster.told == []


# -- one fails, all go back ------------------------------------------------------------------------------


@pytest.mark.parametrize("forks", [1, 64])
@pytest.mark.parametrize("where", ["gpu01", "gpu02"])
async def test_where_one_fails_all_go_back_and_train_together_again(where: str, forks: int) -> None:
    cluster = Cluster("gpu01", "gpu02", broken=("gpu01", "gpu02"))
    cluster.hosts[where].world["lamp"] = False
    policy = ALL_MAY_FAIL.model_copy(update={"forks": forks})
    state, _ = await play(cluster.fleet, STEPS, policy=policy)
    assert outcomes(state) == dict.fromkeys(cluster.hosts, "rolled_back"), reasons(state)
    other = next(name for name in cluster.hosts if name != where)
    assert state.hosts[where].finished.failure.kind == "verify_failed"  # type: ignore[union-attr]
    assert state.hosts[other].finished.failure.kind == "cohort"  # type: ignore[union-attr]
    assert where in reasons(state)[other]
    assert cluster.jobs() == dict.fromkeys(cluster.hosts, "running")
    assert [host.world["sound"] for host in cluster.hosts.values()] == [False, False]
    assert cluster.last("unstart") < cluster.first("sound False")
    assert cluster.last("sound False") < cluster.first("restore"), (
        "none is started before all are as before"
    )


async def test_a_capture_that_fails_stops_nobody() -> None:
    cluster = Cluster("gpu01", "gpu02")
    cluster.hosts["gpu02"].on("job.capture", Failure(kind="blocked", message="it cannot be read"))
    state, _ = await play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL)
    assert set(outcomes(state).values()) == {"rolled_back"}
    assert cluster.did("stop") == []
    assert cluster.jobs() == dict.fromkeys(cluster.hosts, "running")


async def test_none_is_committed_before_all_are_well() -> None:
    cluster = Cluster("gpu01", "gpu02")
    state, shelf = await play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL)
    assert set(outcomes(state).values()) == {"changed"}
    lamp = max(
        place for place, e in enumerate(shelf.events) if e.kind == "step_finished" and e.step == "lamp"
    )
    ends = [place for place, e in enumerate(shelf.events) if e.kind == "host_finished"]
    assert lamp < min(ends)


@pytest.mark.parametrize("change", range(1, 5))
@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_a_member_that_is_lost_takes_no_other_with_it(change: int, when: str) -> None:
    """At each of gpu02's changes: capture, stop, mend, start."""
    cluster = Cluster("gpu01", "gpu02", broken=("gpu01", "gpu02"))
    lost = cluster.hosts["gpu02"]
    lost.lose(**{when: change}, back=False)
    state, shelf = await play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL)
    assert outcomes(state)["gpu02"] in ("rollback_pending", "failed"), reasons(state)
    stopped = bool(cluster.did("stop"))
    assert cluster.did("restore") == [], "no job is started on one of its hosts alone"
    if not stopped:
        assert outcomes(state)["gpu01"] == "rolled_back"
        assert cluster.jobs() == dict.fromkeys(cluster.hosts, "running")
        return
    assert outcomes(state)["gpu01"] == "rollback_pending", reasons(state)
    assert "not started again without gpu02" in reasons(state)["gpu01"]
    assert cluster.hosts["gpu01"].world["sound"] is False, "what can be undone alone is undone"
    asleep = await _roll_back(cluster, shelf)
    ends = {name: host.finished for name, host in asleep.hosts.items()}
    assert {name for name, end in ends.items() if end and end.job_stopped} == set(cluster.hosts)
    assert all(end and end.outcome == "rollback_pending" and end.open for end in ends.values())
    lost.accept()
    again = await _roll_back(cluster, shelf)
    assert set(outcomes(again).values()) == {"rolled_back"}, reasons(again)
    assert cluster.jobs() == dict.fromkeys(cluster.hosts, "running")
    assert [host.world["sound"] for host in cluster.hosts.values()] == [False, False]


async def _roll_back(
    cluster: Cluster, shelf: Shelf, names: tuple[str, ...] = (), *, journal: bool = True
) -> RunState:
    asked = request(names or tuple(cluster.hosts), STEPS)
    known = fold(shelf.records) if journal else RunState()
    hosts = {
        host.name: known.hosts[host.name] if journal else HostState(host.name, started=True)
        for host in asked.hosts
    }
    state = RunState(run=asked.run, hosts=hosts)
    recorder = Recorder(asked.run, Shelf(), clock=lambda: 0.0, state=state)
    with cluster.fleet:
        return await roll_back(
            asked.run, "toy", asked.hosts, recorder, operator="ann", controller="here", forks=1, known=known
        )


async def test_a_run_over_a_cohort_is_taken_back_as_one_also_from_another_machine() -> None:
    for journal in (True, False):
        cluster = Cluster("gpu01", "gpu02", broken=("gpu01", "gpu02"))
        state, shelf = await play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL)
        assert set(outcomes(state).values()) == {"changed"}
        again = await _roll_back(cluster, shelf, journal=journal)
        assert set(outcomes(again).values()) == {"rolled_back"}, reasons(again)
        assert cluster.last("sound False") < cluster.first("restore")
        assert cluster.jobs() == dict.fromkeys(cluster.hosts, "running")


@pytest.mark.parametrize("journal", [True, False], ids=["same", "elsewhere"])
async def test_where_one_member_cannot_be_undone_any_more_none_is(journal: bool) -> None:
    cluster = Cluster("gpu01", "gpu02", broken=("gpu01", "gpu02"))
    _, shelf = await play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL)
    told = len(cluster.told)
    cluster.hosts["gpu02"].gone["mend"] = "the hold is gone"
    again = await _roll_back(cluster, shelf, journal=journal)
    assert again.rolled_back_exit == 2
    assert len(cluster.told) == told, "nothing was done"
    assert cluster.jobs() == dict.fromkeys(cluster.hosts, "running")


async def test_one_member_alone_is_not_taken_back() -> None:
    for journal in (True, False):
        cluster = Cluster("gpu01", "gpu02", broken=("gpu01", "gpu02"))
        _, shelf = await play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL)
        told = len(cluster.told)
        again = await _roll_back(cluster, shelf, ("gpu01",), journal=journal)
        assert again.rolled_back_exit == 2
        assert outcomes(again)["gpu01"] == ("changed" if journal else "rollback_pending")
        assert len(cluster.told) == told, "nothing was done"


async def test_the_operators_second_interrupt_ends_all_members() -> None:
    cluster = Cluster("gpu01", "gpu02", broken=("gpu01", "gpu02"))
    interrupts = Interrupts()
    cluster.hosts["gpu01"].gate("toy.set")
    shelf = Shelf()
    playing = asyncio.create_task(
        play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL, interrupts=interrupts, shelf=shelf)
    )
    while not any(event.step == "mend" for event in shelf.of("change_started")):
        await asyncio.sleep(0)
    interrupts.interrupt("INT")
    await asyncio.sleep(0)
    interrupts.interrupt("INT")
    state, _ = await playing
    assert set(outcomes(state).values()) == {"cancelled"}
    assert state.exit == 130


@pytest.mark.parametrize(
    ("choice", "outcome", "sound"),
    [("finish", "changed", True), ("rollback", "rolled_back", False), ("leave", "cancelled", False)],
)
async def test_an_interrupt_asks_once_for_all_members_also_where_one_waits_for_another(
    choice: Any, outcome: str, sound: bool
) -> None:
    """gpu02 has come to the barrier, gpu01 is at work before it: that is a safe point of both."""
    cluster, interrupts, asked = Cluster("gpu01", "gpu02", broken=("gpu01", "gpu02")), Interrupts(), []
    shelf = Shelf()

    async def choose(state: RunState) -> Any:
        asked.append(state.interrupted)
        return choice

    async def set_(args: dict[str, Json], world: dict[str, Any]) -> None:
        if args == {"name": "parts", "to": True}:
            while not any((e.host, e.step) == ("gpu02", "stop") for e in shelf.of("step_waited")):
                await asyncio.sleep(0)
            interrupts.interrupt("INT")
        world[str(args["name"])] = args["to"]

    cluster.hosts["gpu01"].world["parts"] = False
    cluster.hosts["gpu02"].world["parts"] = True
    cluster.hosts["gpu01"].on("toy.set", set_)
    steps = [step("parts", Switch(name="parts")), step("look", Lit(name="lamp")), *STEPS]
    state, _ = await play(
        cluster.fleet, steps, policy=ALL_MAY_FAIL, interrupts=interrupts, choose=choose, shelf=shelf
    )
    assert asked == [1]
    assert cluster.jobs() == dict.fromkeys(cluster.hosts, "running")
    assert {host.world["sound"] for host in cluster.hosts.values()} == {sound}
    assert outcomes(state)["gpu01"] == outcome, reasons(state)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same", "elsewhere"])
async def test_a_controller_that_is_killed_anywhere_leaves_a_cohort_that_can_be_finished(
    elsewhere: bool,
) -> None:
    whole = Cluster("gpu01", "gpu02")
    records = len((await Cut(whole.fleet, steps=STEPS).play()).records)
    for place in range(1, records + 1):
        cluster = Cluster("gpu01", "gpu02")
        shelf = await Cut(cluster.fleet, at_record=place, steps=STEPS).play()
        state = await resume(cluster.fleet, STEPS, shelf, elsewhere=elsewhere, policy=ALL_MAY_FAIL)
        assert cluster.jobs() == dict.fromkeys(cluster.hosts, "running"), (place, reasons(state))
        assert set(outcomes(state).values()) <= {"changed", "ok"}, (place, outcomes(state), reasons(state))
        assert all(host.world["sound"] for host in cluster.hosts.values()), place
        assert len(cluster.did("sound True")) == 1, place
        assert cluster.did("restore") == [], place
        assert all(host.claims == {} for host in cluster.hosts.values()), place


@pytest.mark.parametrize("hosts", [("gpu01",), ("gpu01", "gpu02")], ids=["one", "cohort"])
@pytest.mark.parametrize("journal", [True, False], ids=["same", "elsewhere"])
async def test_a_controller_that_is_killed_anywhere_leaves_hosts_that_can_be_taken_back(
    journal: bool, hosts: tuple[str, ...]
) -> None:
    whole = Cluster(*hosts)
    records = len((await Cut(whole.fleet, steps=STEPS).play()).records)
    for place in range(1, records + 1):
        cluster = Cluster(*hosts)
        shelf = await Cut(cluster.fleet, at_record=place, steps=STEPS).play()
        if not journal or fold(shelf.records).hosts:
            state = await _roll_back(cluster, shelf, journal=journal)
            assert state.rolled_back_exit == 0, (place, reasons(state))
            assert not any(host.job_stopped for host in state.hosts.values()), place
        assert cluster.jobs() == dict.fromkeys(cluster.hosts, "running"), place
        assert all(host.claims == {} for host in cluster.hosts.values()), place


async def _stopped_on_one(cluster: Cluster) -> Shelf:
    """gpu01 got the stop and gpu02 did not: the controller was killed between."""
    shelf = Shelf()
    for place in range(1, 100):
        fresh = Cluster(*cluster.hosts)
        cluster.hosts, cluster.told, cluster.starting = fresh.hosts, fresh.told, fresh.starting
        shelf = await Cut(fresh.fleet, at_record=place, steps=STEPS).play()
        changes = {
            name: [one.change.job for one in host.log.values()] for name, host in fresh.hosts.items()
        }
        if sorted(changes.values()) == [["captures"], ["captures", "stops"]]:
            return shelf
    raise AssertionError("no such place")


@pytest.mark.parametrize("journal", [True, False], ids=["same", "elsewhere"])
async def test_a_job_stopped_on_one_host_is_started_again_on_all_that_captured_it(journal: bool) -> None:
    cluster = Cluster("gpu01", "gpu02")
    shelf = await _stopped_on_one(cluster)
    state = await _roll_back(cluster, shelf, journal=journal)
    assert outcomes(state) == dict.fromkeys(cluster.hosts, "rolled_back"), reasons(state)
    assert sorted(cluster.did("restore")) == ["gpu01", "gpu02"]
    assert cluster.last("end") < cluster.first("restore"), "it has ended everywhere before it is started"
    assert not any(host.without_its_job for host in state.hosts.values())
    assert all(host.claims == {} for host in cluster.hosts.values())


@pytest.mark.parametrize("journal", [True, False], ids=["same", "elsewhere"])
async def test_a_host_that_cannot_start_what_ended_there_says_so_and_keeps_its_claim(journal: bool) -> None:
    cluster = Cluster("gpu01", "gpu02")
    shelf = await _stopped_on_one(cluster)
    for host in cluster.hosts.values():
        host.on("job.restore", Failure(kind="command", message="the file is gone"))
    state = await _roll_back(cluster, shelf, journal=journal)
    assert outcomes(state) == dict.fromkeys(cluster.hosts, "rollback_failed")
    assert all(host.claims for host in cluster.hosts.values())
    assert all(host.without_its_job for host in state.hosts.values())


async def test_a_stop_that_failed_half_way_is_seen_through_on_all_before_any_starts_again() -> None:
    cluster = Cluster("gpu01", "gpu02")
    for host in cluster.hosts.values():
        host.on("job.stop", Failure(kind="timed_out", message="it does not end"))
    state, _ = await play(cluster.fleet, STEPS, policy=ALL_MAY_FAIL)
    assert outcomes(state) == dict.fromkeys(cluster.hosts, "rolled_back"), reasons(state)
    assert sorted(cluster.did("end")) == ["gpu01", "gpu02"]
    assert cluster.last("end") < cluster.first("restore")
    assert cluster.jobs() == dict.fromkeys(cluster.hosts, "running")


async def test_a_member_that_was_never_begun_goes_along_when_others_are_taken_up() -> None:
    cluster, shelf = Cluster("gpu01", "gpu02", broken=("gpu02",)), Shelf()
    halted = ALL_MAY_FAIL.model_copy(update={"max_unavailable": Share.parse("1")})
    await play(cluster.fleet, STEPS, shelf=shelf, policy=halted)
    cluster.hosts["gpu02"].refuse()
    state = await resume(cluster.fleet, STEPS, shelf, policy=ALL_MAY_FAIL)
    assert outcomes(state) == {"gpu01": "ok", "gpu02": "unreachable"}
    cluster.hosts["gpu02"].accept()
    alone = await resume(cluster.fleet, STEPS, shelf, hosts=["gpu02"], policy=ALL_MAY_FAIL)
    assert outcomes(alone)["gpu02"] == "blocked"
    assert "it went as one with gpu01" in reasons(alone)["gpu02"]
    assert cluster.told == []
    state = await resume(cluster.fleet, STEPS, shelf, policy=ALL_MAY_FAIL)
    assert outcomes(state) == dict.fromkeys(cluster.hosts, "changed"), reasons(state)
    assert cluster.last("capture") < cluster.first("stop")
    assert cluster.jobs() == dict.fromkeys(cluster.hosts, "running")
