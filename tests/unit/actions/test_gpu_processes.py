"""gpu_processes: what is planned from what hosts say, and nothing without a reason."""

from __future__ import annotations

from typing import Any

import pytest

from fleetfix.actions.gpu_processes import GpuProcesses, ProcessFacts
from fleetfix.commands import Completed
from fleetfix.engine.phases import shown
from fleetfix.errors import Failure, HostError
from fleetfix.saved_plan import announced

VENV = "/opt/train/venv"
HEADER = "index, uuid, memory.used [MiB], memory.total [MiB], mig.mode.current\n"
GOOD = HEADER + "0, GPU-1, 0 MiB, 9 MiB, Disabled\n"
STARTS = {"smi": {"exit": 0, "text": GOOD, "cut": False}, "cuda": {"found": True, "code": 0}}
ENVIRONMENT = {"path": VENV, "uid": 0, "user": "root", "kind": "venv", "by": "job 4211"}
SAVED = {"age": 720.0, "running": 86400.0, "unsure": None}
LATE = Completed(exit=None, failure=Failure(kind="timed_out", message="it ran past its deadline"))


def job(pid: int = 4211, **fields: Any) -> dict[str, Any]:
    given = {
        "pid": pid,
        "start": 100,
        "uid": 0,
        "user": "root",
        "argv": [VENV + "/bin/python", VENV + "/bin/torchrun", "train.py"],
        "environments": [VENV],
        "gpus": [0, 1],
        "holders": 2,
        "processes": 3,
    }
    return {**given, **fields}


def found(*jobs: dict[str, Any], complete: bool = True) -> dict[str, Any]:
    return {"complete": complete, "jobs": list(jobs), "left_out": 0, "schedulers": []}


def probe(
    action: GpuProcesses,
    jobs: Any,
    where: Any = ENVIRONMENT,
    starts: Any = STARTS,
    survey: Any = None,
    saved: Any = SAVED,
) -> ProcessFacts:
    asking = action.probe()
    reads = next(asking)
    assert [read.function for read in reads] == ["jobs.found", "environments.find", "gpus.start_possible"]
    assert all(read.module in action.modules for read in reads)
    answers = tuple(
        one if isinstance(one, Completed) else Completed(value=one) for one in (jobs, where, starts)
    )
    try:
        reads = asking.send(answers)
        assert all(read.module in action.modules for read in reads)
        known = {"gpus.survey": survey, "checkpoints.last": saved}
        given = [known[read.function] for read in reads]
        asking.send(tuple(one if isinstance(one, Completed) else Completed(value=one) for one in given))
    except StopIteration as end:
        facts: ProcessFacts = end.value
        return facts
    raise AssertionError("it asks for ever")


def plan(*args: Any, **kwargs: Any) -> Any:
    action = GpuProcesses()
    return action.plan(probe(action, *args, **kwargs))


def test_a_job_of_the_environment_is_stopped_by_one_change() -> None:
    (change,) = plan(found(job())).changes
    assert change.key == "stop:python"
    assert change.parts == ("root: python torchrun, 2 GPUs, #1",)
    assert (change.risk, change.alters) == ("compensable", ("job",))
    assert [call.function for call in change.do] == ["relaunch.stop"]
    assert change.do[0].args == {"targets": [{"pid": 4211, "start": 100}], "grace": 60.0}
    assert change.do[0].timeout > 60.0
    assert [call.function for call in change.undo] == ["relaunch.restore"]
    assert [call.function for call in change.commit] == ["relaunch.forget"]
    assert {call.module for call in (*change.do, *change.undo, *change.commit)} <= set(GpuProcesses.modules)
    assert "root's job 4211 (python torchrun)" in change.summary


def test_after_the_stop_nothing_is_planned() -> None:
    assert plan(found(), {**ENVIRONMENT, "by": "capture of step stop"}).changes == ()


def test_a_job_started_anew_is_announced_by_the_same_key() -> None:
    one, two = (plan(found(job(pid))).changes[0] for pid in (4211, 5000))
    assert one.announces() == two.announces()


@pytest.mark.parametrize(
    "other",
    [
        [job(), job(5, gpus=[2, 3])],  # a second one that looks the same
        [job(5, gpus=[0, 1, 2, 3])],
        [job(5, argv=[VENV + "/bin/python", VENV + "/bin/torchrun2"])],
        [job(), job(5, argv=[VENV + "/bin/python", "other.py"], gpus=[2])],
    ],
)
def test_another_job_that_came_meanwhile_is_not_announced(other: list[dict[str, Any]]) -> None:
    before, now = plan(found(job())).changes[0], plan(found(*other)).changes[0]
    assert not now.announces() <= before.announces()


def test_fewer_jobs_than_announced_are() -> None:
    before = plan(found(job(), job(5, gpus=[2, 3]))).changes[0]
    assert plan(found(job(5, gpus=[2, 3]))).changes[0].announces() <= before.announces()


def test_no_job_at_all_plans_nothing_and_blocks_nothing() -> None:
    none = {"none": "nothing here says which environment", "hint": "give venv: a path"}
    planned = plan(found(), none)
    assert (planned.changes, planned.blocked) == ((), None)


def test_two_environments_in_use_block() -> None:
    none = {
        "none": "2 environments are in use: /a (job 1 of root), /b (job 2 of alice)",
        "hint": "give venv",
    }
    assert plan(found(job(environments=["/a"]), job(2, environments=["/b"])), none).blocked == none["none"]


@pytest.mark.parametrize(
    ("smi", "words"),
    [
        (
            {"exit": 18, "text": "Failed to initialize NVML: Driver/library version mismatch"},
            "different versions",
        ),
        ({"exit": None, "text": ""}, "nvidia-smi does not answer"),
        ({"exit": 127, "text": "nvidia-smi: not found"}, "nvidia-smi is not there"),
    ],
)
def test_nothing_is_stopped_where_nothing_new_could_start(smi: dict[str, Any], words: str) -> None:
    starts = {"smi": {**smi, "cut": False}, "cuda": {"found": False, "code": None}}
    planned = plan(found(job()), starts=starts)
    assert planned.changes == ()
    assert "one-way door" in planned.blocked
    assert words in planned.blocked
    # Where nothing would be stopped it is nobody's business.
    assert plan(found(), starts=starts).blocked is None


def test_an_answer_that_did_not_come_blocks_in_its_own_words() -> None:
    assert "it ran past its deadline" in plan(found(job()), starts=LATE).blocked


def test_a_question_that_failed_is_the_hosts_failure() -> None:
    broken = Completed(exit=None, failure=Failure(kind="bug", message="it broke"))
    with pytest.raises(HostError, match="it broke"):
        plan(broken)


def test_an_ordinary_user_asks_nvidia_smi_for_the_others() -> None:
    alice = {"uid": 1001, "user": "alice", "argv": ["/usr/bin/python", "train.py"], "allowed": False}
    own = {"uid": 0, "user": "root", "argv": ["python"], "allowed": False}
    seen = plan(found(job(), complete=False), survey={"listed": {"9": alice, "10": own, "11": None}})
    assert seen.blocked == "alice's process 9 (python train.py) holds these GPUs"
    alone = plan(found(job(), complete=False), survey={"listed": {"10": own}})
    assert len(alone.changes) == 1
    assert any("could not be looked at" in note for note in alone.notes)


def test_a_process_that_only_nvidia_smi_sees_may_be_anybodys() -> None:
    seen = plan(found(job(), complete=False), survey={"listed": {"4217": None}})
    assert seen.changes == ()
    assert seen.blocked == "process 4217, which this user cannot see (use become: true), holds these GPUs"


def test_the_grace_is_a_time() -> None:
    assert GpuProcesses.model_validate({"using": "of-job", "grace": "2m"}).grace == 120.0


# -- what stopping costs ----------------------------------------------------------------------------


def test_the_age_of_the_last_checkpoint_is_shown_and_is_no_part_of_what_is_announced() -> None:
    now, later = (plan(found(job()), saved={**SAVED, "age": age}) for age in (720.0, 1020.0))
    (one,), (two,) = now.changes, later.changes
    assert (one.checkpoint_ages, two.checkpoint_ages) == ((720.0,), (1020.0,))
    assert one.announces() == two.announces()
    assert announced("stop", [shown(one)]) == announced("stop", [shown(two)])
    assert one.summary == two.summary
    assert (now.notes, later.notes) == ((), ())


@pytest.mark.parametrize(
    ("saved", "note"),
    [
        ({"age": None, "running": 900.0, "unsure": None}, "no checkpoint of {job} was found"),
        (LATE, "when {job} saved its last checkpoint is unknown: where it saves does not answer"),
        (
            {"age": None, "running": 900.0, "unsure": "it saves to s3"},
            "when {job} saved its last checkpoint is unknown: it saves to s3",
        ),
        (
            Completed(exit=None, failure=Failure(kind="blocked", message="no rights")),
            "when {job} saved its last checkpoint is unknown: no rights",
        ),
        ({"nonsense": 1}, "when {job} saved its last checkpoint is unknown: the host does not say"),
        (
            {"age": "nan", "running": 900.0},
            "when {job} saved its last checkpoint is unknown: the host does not say",
        ),
        (
            {"age": 7200.0, "running": 3600.0, "unsure": None},
            "{job} has saved no checkpoint since it was started",
        ),
    ],
)
def test_what_is_not_known_of_checkpoints_is_a_note_and_holds_nothing_up(saved: Any, note: str) -> None:
    planned = plan(found(job()), saved=saved)
    assert planned.blocked is None
    assert len(planned.changes) == 1
    assert planned.notes == (note.format(job="root's job 4211 (python torchrun)"),)


def test_a_job_that_was_just_started_need_not_have_saved() -> None:
    assert plan(found(job()), saved={"age": 7200.0, "running": 20.0, "unsure": None}).notes == ()


def test_checkpoints_are_asked_for_only_where_a_job_would_be_stopped() -> None:
    asked = []
    for jobs in (found(), found(job(environments=["/other"])), found(job(container=True)), found(job())):
        asking = GpuProcesses().probe()
        next(asking)
        try:
            reads = asking.send(tuple(Completed(value=one) for one in (jobs, ENVIRONMENT, STARTS)))
            asked.append([(read.function, read.args["pid"], read.timeout) for read in reads])
        except StopIteration:
            asked.append([])
    assert asked == [[], [], [], [("checkpoints.last", 4211, 5.0)]]


@pytest.mark.parametrize(
    ("using", "jobs", "runs"),
    [
        ("of-job", (job(),), True),
        ("of-job", (), False),
        ("any", (job(),), True),
        ("any", (job(orphan=True),), False),
    ],
)
def test_whether_the_job_still_runs_takes_no_look_at_the_gpus(
    using: str, jobs: tuple[dict[str, Any], ...], runs: bool
) -> None:
    asking = GpuProcesses(using=using).runs_still()
    reads = next(asking)
    known = {"jobs.found": found(*jobs), "environments.find": ENVIRONMENT if jobs else {"none": "no job"}}
    assert {read.function for read in reads} <= known.keys(), "nvidia-smi may hang"
    assert all(read.timeout <= 5.0 for read in reads)
    with pytest.raises(StopIteration) as end:
        asking.send(tuple(Completed(value=known[read.function]) for read in reads))
    assert end.value.value is runs
