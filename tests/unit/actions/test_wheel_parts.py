"""wheel_parts: what its plan says of sources, staging and room."""

import pytest
from pydantic import ValidationError

from fleetfix.actions.wheel_parts import MIB, Part, WheelFacts, WheelParts
from fleetfix.commands import Completed
from fleetfix.domain.wheels import Audit, Dist, Place, Torch
from fleetfix.errors import Failure

PLACE = Place(path="/opt/train/venv", python="/opt/train/venv/bin/python", site=("/s",), uid=0, kind="venv")
LOST = Dist(info="i12", name="nvidia-nccl-cu12", version="2.27.5", missing=2, missing_libraries=1)
AUDIT = Audit(env=PLACE, torch=Torch(version="2.9.1", cuda="12.8"), dists=(LOST,))
STEP = WheelParts(venv="/opt/train/venv", cuda="12")


def part(**more):
    return Part(
        **{"info": "i12", "files": 2, "bytes": 300 * MIB, "lack": 300 * MIB, "staged": False, **more}
    )


def facts(*parts, room=1000 * MIB):
    return WheelFacts(audit=AUDIT, parts=parts, free=1000 * MIB, room=room)


def test_parts_that_have_a_source_are_staged():
    (change,) = STEP.plan(facts(part(source="the uv cache"))).changes
    assert change.summary == "stage 300 MiB for 1 package"
    assert change.announces() == {
        "parts:/opt/train/venv",
        "parts:/opt/train/venv/stage:nvidia-nccl-cu12==2.27.5",
    }
    assert change.alters == ("parts",)
    assert change.fetch_bytes == 300 * MIB
    assert change.risk == "reversible"


def test_without_a_source_it_says_which_file_of_which_package():
    plan = STEP.plan(facts(part(first="nvidia/nccl/lib/libnccl.so.2")))
    assert plan.changes == ()
    assert plan.blocked.startswith(
        "no source for nvidia-nccl-cu12 2.27.5: 2 files such as nvidia/nccl/lib/libnccl.so.2"
    )


def test_staged_parts_leave_nothing_to_do():
    assert STEP.plan(facts(part(staged=True))).changes == ()


def test_without_room_nothing_is_fetched():
    assert "no room" in STEP.plan(facts(part(source="x"), room=100 * MIB)).blocked


def test_a_failed_audit_is_blocked_by_its_reason():
    probe = STEP.probe()
    next(probe)
    with pytest.raises(StopIteration) as end:
        probe.send((Completed(exit=None, failure=Failure(kind="timed_out", message="no answer in 600 s")),))
    assert STEP.plan(end.value.value).blocked == "no answer in 600 s"


def test_parts_are_asked_for_only_where_something_is_lost():
    probe = STEP.probe()
    (read,) = next(probe)
    assert read.function == "wheels.audit"
    clean = AUDIT.model_copy(update={"dists": ()})
    with pytest.raises(StopIteration):
        probe.send((Completed(value=clean.model_dump()),))
    probe = STEP.probe()
    next(probe)
    (read,) = probe.send((Completed(value=AUDIT.model_dump()),))
    assert read.function == "parts.find"
    assert read.args["repair"] == ["i12"]


@pytest.mark.parametrize("cuda", [12, "12", "12.8", 12.8])
def test_cuda_is_taken_as_its_major(cuda):
    assert WheelParts(venv="of-job", cuda=cuda).cuda == "12"


@pytest.mark.parametrize("wrong", [{"venv": "train/venv"}, {"cuda": "11"}, {"purge": 3}])
def test_wrong_parameters_do_not_load(wrong):
    with pytest.raises(ValidationError):
        WheelParts(**{"venv": "of-job", "cuda": "12", **wrong})
