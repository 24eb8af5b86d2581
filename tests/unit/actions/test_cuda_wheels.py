"""cuda_wheels: one change for each environment, announced part by part."""

from fleetfix.actions.cuda_wheels import CudaWheels
from fleetfix.actions.wheel_parts import MIB, Part, WheelFacts, WheelParts
from fleetfix.commands import Change
from fleetfix.domain.wheels import Audit, Dist, Overwritten, Place, Torch

PLACE = Place(path="/opt/train/venv", python="/opt/train/venv/bin/python", site=("/s",), uid=0, kind="venv")
LOST = Dist(
    info="i12",
    name="nvidia-nccl-cu12",
    version="2.27.5",
    record="aa",
    shares={"i13": 2},
    overwritten=(Overwritten(by=("i13",), files=2),),
)
NEW = Dist(info="i13", name="nvidia-nccl-cu13", version="2.28.9", record="bb", shares={"i12": 2})
LONE = Dist(info="ib", name="nvidia-cublas", version="13.1.0.3", record="cc")
STEP = CudaWheels(venv="/opt/train/venv", cuda="12")


def facts(*dists, staged=True, free=1000 * MIB):
    audit = Audit(env=PLACE, torch=Torch(version="2.9.1", cuda="12.8"), dists=dists)
    parts = (
        (Part(info="i12", files=2, bytes=300 * MIB, lack=0, staged=staged, source="x"),)
        if LOST in dists
        else ()
    )
    return WheelFacts(audit=audit, parts=parts, free=free, room=free)


def test_the_change_names_every_package():
    (change,) = STEP.plan(facts(LOST, NEW, LONE)).changes
    assert change.summary == "repair 2 files of 1 package, remove 2 packages"
    assert change.key == "wheels:/opt/train/venv"
    assert change.parts == (
        "repair:nvidia-nccl-cu12==2.27.5",
        "remove:nvidia-nccl-cu13==2.28.9",
        "remove:nvidia-cublas==13.1.0.3",
    )
    assert change.alters == ("environment",)
    assert change.before.splitlines() == [
        "nvidia-cublas 13.1.0.3",
        "nvidia-nccl-cu12 2.27.5 (2 files damaged)",
        "nvidia-nccl-cu13 2.28.9",
    ]
    assert change.after == "nvidia-nccl-cu12 2.27.5"
    assert change.do[0].args["records"] == {"i12": "aa", "i13": "bb", "ib": "cc"}
    assert [call.function for call in (*change.do, *change.undo, *change.commit)] == [
        "wheels.repair",
        "wheels.restore",
        "wheels.settle",
    ]


def test_removal_alone_needs_no_parts():
    (change,) = STEP.plan(facts(LONE)).changes
    assert change.summary == "remove 1 package"


def test_parts_that_are_not_staged_block_it_by_name():
    plan = STEP.plan(facts(LOST, NEW, staged=False))
    assert plan.changes == ()
    assert "the bytes to mend nvidia-nccl-cu12 2.27.5 are not on this host" in plan.blocked


def test_a_step_that_will_stage_them_is_foreseen():
    ready = facts(LOST, NEW, staged=False)
    staging = WheelParts(venv="/opt/train/venv", cuda="12").plan(ready).changes
    assert STEP.foresee(ready, {"parts": staging}).changes == STEP.plan(facts(LOST, NEW)).changes
    assert STEP.foresee(ready, {}).blocked


def test_an_environment_that_a_job_maps_is_blocked_until_a_step_stops_the_job():
    audit = facts(LONE).audit
    place = audit.env.model_copy(update={"used_by": ("job 4211 of alice",)})
    used = facts(LONE).model_copy(update={"audit": audit.model_copy(update={"env": place})})
    stop = Change(key="stop:torchrun", summary="stop it", do=(), risk="compensable", job="stops")
    assert "job 4211 of alice uses /opt/train/venv" in STEP.plan(used).blocked
    assert STEP.foresee(used, {}).blocked
    assert STEP.foresee(used, {"stop": (stop,)}).changes == STEP.plan(facts(LONE)).changes


def test_a_file_system_without_room_blocks_it():
    assert "no room in /opt/train/venv" in STEP.plan(facts(LOST, NEW, free=100 * MIB)).blocked


def test_clean_environment_plans_nothing():
    plan = STEP.plan(facts())
    assert (plan.changes, plan.blocked) == ((), None)


def test_equal_facts_give_equal_plans():
    assert STEP.plan(facts(LOST, NEW, LONE)) == STEP.plan(facts(LOST, NEW, LONE))


def test_who_uses_the_environment_without_a_gpu_is_in_the_way_whatever_is_stopped():
    used = facts(LONE)
    place = PLACE.model_copy(update={"others": ("alice's python (pid 12)", "bob's uv (pid 13)")})
    used = used.model_copy(update={"audit": used.audit.model_copy(update={"env": place})})
    said = "alice's python (pid 12) and 1 more uses /opt/train/venv without a GPU: end that first"
    stop = Change(
        key="stop:torchrun", summary="stop", do=(), alters=("job",), job="stops", risk="compensable"
    )
    assert STEP.plan(used).blocked == said
    assert STEP.foresee(used, {"stop": (stop,)}).blocked == said
