"""Which GPU jobs may be stopped for an environment, and who stands in the way."""

from __future__ import annotations

from typing import Any

import pytest

from fleetfix.domain.processes import Found, GpuJob, Monitor, sort_out, sort_out_all

VENV, OTHER = "/opt/train/venv", "/home/alice/venv"
ROOT, ALICE, BOB = 0, 1001, 1002


def job(pid: int = 4211, **fields: Any) -> GpuJob:
    given = {
        "start": 100,
        "uid": ROOT,
        "user": "root",
        "argv": (
            "/opt/train/venv/bin/python",
            "/opt/train/venv/bin/torchrun",
            "--nproc-per-node=8",
            "train.py",
        ),
        "environments": (VENV,),
        "gpus": (0, 1),
        "holders": 2,
        "processes": 3,
    }
    return GpuJob(pid=pid, **{**given, **fields})


def foreign(**fields: Any) -> GpuJob:
    given = {"uid": ALICE, "user": "alice", "argv": ("python", "train.py"), "environments": (OTHER,)}
    return job(123, **{**given, **fields})


def decide(
    *jobs: GpuJob, owner: int = ROOT, complete: bool = True, schedulers: tuple[str, ...] = ()
) -> Any:
    return sort_out(Found(complete=complete, jobs=jobs, schedulers=schedulers), VENV, owner)


def test_the_job_of_the_environment_is_the_target() -> None:
    decided = decide(job())
    assert ([one.pid for one in decided.targets], decided.blocked, decided.notes) == ([4211], None, ())


def test_nothing_to_stop_is_never_blocked() -> None:
    decided = decide(foreign(), schedulers=("Slurm",))
    assert (decided.targets, decided.blocked) == ((), None)
    assert decided.notes == ("left alone: alice's job 123 (python train.py)",)


def test_another_job_on_the_same_gpus_blocks_by_its_name() -> None:
    decided = decide(job(), foreign(gpus=(1, 2)))
    assert decided.blocked == "alice's job 123 (python train.py) holds these GPUs"


def test_the_same_users_other_environment_blocks_too() -> None:
    assert "holds these GPUs" in decide(job(), foreign(uid=ROOT, user="root")).blocked


def test_another_job_on_other_gpus_is_left_alone() -> None:
    decided = decide(job(), foreign(gpus=(6, 7)))
    assert decided.blocked is None
    assert "left alone: alice's job 123 (python train.py)" in decided.notes


@pytest.mark.parametrize(
    ("owner", "users", "blocked"),
    [
        (ROOT, [ROOT], None),
        (ALICE, [ALICE], None),
        (ROOT, [ALICE], None),  # a shared environment of root's, used by one
        (ROOT, [ROOT, ALICE], ALICE),
        (ALICE, [ALICE, BOB], BOB),
        (ALICE, [BOB], BOB),  # a user's environment serves that user
        (ALICE, [ROOT], ROOT),
        (ROOT, [ALICE, BOB], ALICE),
    ],
)
def test_only_the_owners_job_is_stopped(owner: int, users: list[int], blocked: int | None) -> None:
    names = {ROOT: "root", ALICE: "alice", BOB: "bob"}
    jobs = [job(100 + uid, uid=uid, user=names[uid]) for uid in users]
    decided = decide(*jobs, owner=owner)
    if blocked is None:
        assert decided.blocked is None
    else:
        assert decided.blocked.startswith(f"{names[blocked]}'s job {100 + blocked}")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scheduler": "Slurm job 77"}, "is Slurm job 77: scancel 77 ends it, or drain the node"),
        ({"scheduler": "PBS job 12.head"}, "is PBS job 12.head: qdel 12.head ends it"),
        ({"scheduler": "Slurm job 7; reboot"}, "is Slurm job 7; reboot: end it there, or drain the node"),
        ({"scheduler": "a Kubernetes pod"}, "is a Kubernetes pod: end it there, or drain the node"),
        ({"container": True}, "runs in a container"),
        ({"user_unit": "train.service"}, "systemctl --user stop train.service"),
        (
            {"inside": "unit code-server@alice.service"},
            "root's job 4211 (python torchrun) runs inside unit code-server@alice.service: end it there",
        ),
        ({"supervisor": "supervisord -n"}, "kept alive by supervisord -n: stop it there"),
        ({"runner": True}, "holds this session itself"),
        ({"unreadable": True}, "cannot be read"),
        ({"cwd_gone": True}, "working directory is gone"),
        ({"rank_of": 8}, "no agent is above it, and 8 workers need one"),
        ({"uv_run": "uv run train.py"}, "add --no-sync"),
    ],
)
def test_what_stands_against_it_is_said(fields: dict[str, Any], words: str) -> None:
    assert words in decide(job(**fields)).blocked


def test_a_schedulers_node_is_drained_first() -> None:
    assert decide(job(), schedulers=("Slurm",)).blocked == "this is a node of Slurm: drain it first"


def test_an_orphan_is_ended_whether_or_not_it_could_be_started() -> None:
    decided = decide(job(orphan=True, unreadable=True, cwd_gone=True))
    assert decided.blocked is None
    assert "not started again" in decided.notes[0]


def test_what_the_operator_should_know_is_noted() -> None:
    notes = " | ".join(decide(job(shell=77, rank_of=1), complete=False).notes)
    assert "started from shell 77" in notes
    assert "lost its agent" in notes
    assert "processes of other users could not be looked at" in notes


def test_a_monitor_of_the_gpus_is_noted_and_blocks_nothing() -> None:
    watching = Monitor(pid=9, user="root", argv=("/usr/bin/nvitop",))
    decided = sort_out(Found(complete=True, jobs=(job(),), monitors=(watching,)), VENV, ROOT)
    assert (decided.blocked, len(decided.targets)) == (None, 1)
    assert decided.notes == ("left alone: root's process 9 (nvitop) watches the GPUs and computes nothing",)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("/opt/venv/bin/python", "-u", "/opt/train.py", "--x"), "python train.py"),
        (("./gpu_burn",), "gpu_burn"),
        ((), "?"),
    ],
)
def test_a_command_is_said_in_a_few_words(argv: tuple[str, ...], said: str) -> None:
    assert job(argv=argv).command == said


# -- every job ------------------------------------------------------------------------------------


def decide_all(*jobs: GpuJob, users: tuple[str, ...] | None = None, **found: Any) -> Any:
    return sort_out_all(Found(complete=True, jobs=jobs, **found), users)


def test_every_job_is_a_target_whatever_its_environment() -> None:
    decided = decide_all(job(), job(5, environments=(OTHER,)), job(6, environments=()))
    assert ([one.pid for one in decided.targets], decided.blocked) == ([4211, 5, 6], None)


def test_where_several_users_have_jobs_they_are_to_be_named() -> None:
    decided = decide_all(job(), foreign())
    assert decided.blocked == (
        "alice's job 123 (python train.py) and root's job 4211 (python torchrun) are of 2 users: "
        "users: [alice, root] stops them all"
    )
    assert decide_all(job(), foreign(), users=("root", "alice")).blocked is None
    only_root = decide_all(job(), foreign(), users=("root",)).blocked
    assert only_root == "alice's job 123 (python train.py) may not be stopped: users names root"


def test_what_could_not_be_stopped_or_started_again_blocks_here_too() -> None:
    assert "drain it first" in decide_all(job(), schedulers=("Slurm",)).blocked
    assert "in a container" in decide_all(job(container=True)).blocked
    assert "cannot be read" in decide_all(job(unreadable=True)).blocked


def test_a_host_without_a_job_has_nothing_to_stop_even_under_a_scheduler() -> None:
    decided = decide_all(schedulers=("Slurm",))
    assert (decided.targets, decided.blocked) == ((), None)
