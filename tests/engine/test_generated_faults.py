"""Anything happens at any moment, on any fleet: nothing is lost, nothing is done twice, all is told."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fleetfix.playbook import Step
from fleetfix.policy import Policy
from fleetfix.transports.scripted import Fleet
from tests.engine.adversity import KINDS, Adversity, Fault, Round
from tests.engine.clusters import STEPS as OF_ONE_JOB
from tests.engine.clusters import Cluster, Stop
from tests.engine.test_resume import STEPS, host
from tests.engine.toys import step

pytestmark = pytest.mark.usefixtures("one_thread")

FAULTS = st.lists(
    st.builds(Fault, at=st.integers(1, 160), kind=st.sampled_from(KINDS), host=st.integers(0, 3)),
    max_size=4,
)
ROUNDS = st.lists(
    st.builds(
        Round,
        way=st.sampled_from(("resume", "resume", "rollback")),
        faults=FAULTS.map(tuple),
        machine=st.integers(0, 2),
        healed=st.booleans(),
    ),
    max_size=4,
)
POLICIES = st.builds(
    Policy.model_validate,
    st.fixed_dictionaries(
        {
            "canary": st.integers(0, 2),
            "batch": st.sampled_from((["1"], ["50%"], ["100%"])),
            "forks": st.integers(1, 3),
            "max_failures": st.sampled_from(("0", "1", "100%")),
            "max_unreachable": st.sampled_from(("0", "100%")),
            "max_unavailable": st.sampled_from((None, "1", "100%")),
            "soak": st.sampled_from((0, 60)),
        }
    ),
)
BY_WORD = STEPS
CONVERGING = [one for one in STEPS if one.id != "bell"]


MANY = not settings.default.derandomize
"""New stories are wanted, with `--fuzz`; else a few, always the same."""
EXAMPLES = settings(
    max_examples=settings.default.max_examples if MANY else 35,
    # A story that went wrong is made short where there is time for that.
    phases=[phase for phase in Phase if MANY or phase is not Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@given(
    sick=st.lists(st.booleans(), min_size=1, max_size=4),
    steps=st.sampled_from((CONVERGING, BY_WORD)),
    policy=POLICIES,
    faults=FAULTS,
    rounds=ROUNDS,
)
@EXAMPLES
def test_hosts_by_themselves(
    sick: list[bool], steps: list[Step], policy: Policy, faults: list[Fault], rounds: list[Round]
) -> None:
    hosts = {f"gpu0{n}": host(a=not one, b=not one) for n, one in enumerate(sick, start=1)}
    asyncio.run(story(Adversity(Fleet(hosts), steps, policy), faults, rounds))


@given(sick=st.lists(st.booleans(), min_size=2, max_size=3), policy=POLICIES, faults=FAULTS, rounds=ROUNDS)
@EXAMPLES
def test_hosts_of_a_cohort(
    sick: list[bool], policy: Policy, faults: list[Fault], rounds: list[Round]
) -> None:
    names = [f"gpu0{n}" for n, _ in enumerate(sick, start=1)]
    cluster = Cluster(*names, broken=tuple(name for name, one in zip(names, sick, strict=True) if one))
    cluster.turns = 300
    steps = [step("stop", Stop(nodes=len(names)), when_pending=("mend",), barrier=True), *OF_ONE_JOB[1:]]
    asyncio.run(story(Adversity(cluster.fleet, steps, policy, alone=False), faults, rounds))


async def story(adversity: Adversity, faults: list[Fault], rounds: list[Round]) -> None:
    """The run, what came after, and then, with nothing in the way any more, to its end."""
    await adversity.run(faults)
    for one in rounds:
        await adversity.go_on(one)
    for _ in range(3):
        await adversity.go_on(Round("resume"))
    adversity.all_told()
    await adversity.go_on(Round("rollback", machine=3))
    await adversity.release()
    await adversity.anew()
