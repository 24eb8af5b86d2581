"""One thing happens, at every moment of a run in turn; then it is taken up again, or back, to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from fleetfix.playbook import Step
from fleetfix.policy import Policy, Share
from fleetfix.state import RunState, fold
from fleetfix.transports.scripted import Fleet
from tests.engine.adversity import Adversity, Fault, Round
from tests.engine.clusters import STEPS as OF_ONE_JOB
from tests.engine.clusters import Cluster
from tests.engine.test_resume import STEPS, WELL, host

pytestmark = pytest.mark.usefixtures("one_thread")

BY_WORD = [
    one if one.id != "stop" else one.model_copy(update={"when_pending": ("a",)})
    for one in STEPS
    if one.id in ("stop", "a", "bell", "train", "lamp")
]
CONVERGING = [one for one in BY_WORD if one.id != "bell"]
AT_ONCE = Policy(
    canary=0, batch=(Share.parse("100%"),), max_failures=Share.parse("100%"), forks=2, soak=60.0
)


def two() -> Fleet:
    return Fleet({name: host(b=True) for name in ("gpu01", "gpu02")})


def story(fleet: Fleet, steps: Sequence[Step]) -> Adversity:
    return Adversity(fleet, steps, AT_ONCE, alone=steps is not OF_ONE_JOB)


def moments(adversity: Adversity) -> range:
    """Every moment of the run when nothing happens."""
    asyncio.run(adversity.run())
    return range(1, adversity.moments + 1)


def told(adversity: Adversity, machine: int = 0) -> RunState:
    return fold(adversity.shelves[machine].records)


@pytest.mark.parametrize(
    ("kinds", "steps"),
    [
        (["killed"], BY_WORD),
        (["interrupted"], BY_WORD),
        (["interrupted", "interrupted"], CONVERGING),
    ],
    ids=["killed", "interrupted", "interrupted twice"],
)
def test_a_run_that_is_ended_at_any_moment_is_taken_up_to_its_end(
    kinds: list[str], steps: list[Step]
) -> None:
    for moment in moments(story(two(), steps)):
        adversity = story(two(), steps)

        async def live(adversity: Adversity = adversity, moment: int = moment) -> None:
            await adversity.run([Fault(moment, kind) for kind in kinds])
            if kinds == ["interrupted"]:
                jobs = {adversity.fleet[name].world["job"] for name in adversity.names}
                assert jobs == {True}, f"{moment}: left where the job runs"
            await adversity.go_on(Round("resume"))

        asyncio.run(live())
        if not adversity.shelves[0].records:
            continue
        state = told(adversity)
        outcomes = {host.outcome for host in state.hosts.values()}
        assert outcomes <= {"changed", "ok"}, (moment, outcomes, state.halted)
        well = WELL if steps is BY_WORD else {key: value for key, value in WELL.items() if key != "bell"}
        assert [adversity.fleet[name].world for name in adversity.names] == [well] * 2, moment
        assert [adversity.fleet[name].claims for name in adversity.names] == [{}] * 2, moment


def test_a_way_back_that_is_killed_at_any_moment_is_gone_to_its_end_from_any_machine() -> None:
    whole = story(two(), CONVERGING)
    asyncio.run(whole.run())
    asyncio.run(whole.go_on(Round("rollback")))
    for moment in range(1, whole.moments + 1):
        adversity = story(two(), CONVERGING)

        async def live(adversity: Adversity = adversity, moment: int = moment) -> None:
            await adversity.run()
            await adversity.go_on(Round("rollback", (Fault(moment, "killed"),)))
            await adversity.go_on(Round("rollback", machine=moment % 2))

        asyncio.run(live())
        was = [adversity.was[name] for name in adversity.names]
        assert [adversity.fleet[name].world for name in adversity.names] == was, moment
        assert [adversity.fleet[name].claims for name in adversity.names] == [{}] * 2, moment


@pytest.mark.parametrize("kinds", [["interrupted"], ["interrupted", "interrupted"]], ids=["once", "twice"])
def test_a_cohort_that_is_interrupted_at_any_moment_is_taken_up_to_its_end(kinds: list[str]) -> None:
    def cohort() -> Adversity:
        cluster = Cluster("gpu01", "gpu02")
        cluster.turns = 300
        return story(cluster.fleet, OF_ONE_JOB)

    for moment in moments(cohort()):
        adversity = cohort()

        async def live(adversity: Adversity = adversity, moment: int = moment) -> None:
            await adversity.run([Fault(moment, kind) for kind in kinds])
            await adversity.go_on(Round("resume"))

        asyncio.run(live())
        state = told(adversity)
        outcomes = {host.outcome for host in state.hosts.values()}
        assert outcomes <= {"changed", "ok"}, (moment, outcomes, state.halted)
        assert {host.world["job"] for host in adversity.fleet.hosts.values()} == {"running"}, moment
        assert all(host.world["sound"] and host.claims == {} for host in adversity.fleet.hosts.values()), (
            moment
        )
