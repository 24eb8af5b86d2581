"""The newest checkpoint of a running job, on real folders: what counts as one, and where one is sought."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.domain.checkpoints import SAVE_LINES
from fleetfix.remote import checkpoints, procs
from fleetfix.remote.api import Context, Refusal, stat_of
from tests.unit.gpu_host import PYTHON

MINUTE = 60.0


class Job:
    """A process that sleeps, with a command line, a working directory and a log."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.log = cwd.parent / "train.log"
        self.log.touch()
        self.process: subprocess.Popen[bytes] | None = None

    def runs(self, *options: str) -> Job:
        argv = [PYTHON, "-c", "import time; time.sleep(600)", *options]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(argv, cwd=self.cwd, stdout=out, stdin=subprocess.DEVNULL)
        pid = self.process.pid
        until(lambda: procs.argv_of(pid) == argv)  # for an instant of its start it has none
        return self

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)

    def last(self) -> dict[str, Any]:
        assert self.process is not None
        stat = stat_of(self.process.pid)
        assert stat is not None
        ctx = Context("RUN", "stop", "/nonexistent", dry=True)
        answer: dict[str, Any] = checkpoints.last(ctx, self.process.pid, stat[2], SAVE_LINES)
        return answer

    def minutes(self) -> float | None:
        """How long ago it saved, in whole minutes."""
        age = self.last()["age"]
        return None if age is None else age // MINUTE

    def put(self, name: str, minutes: float, content: str = "x") -> Path:
        """A file below the working directory, so many minutes old; its new folders are as old."""
        path = self.cwd / name
        new = [one for one in (path, *path.parents) if not one.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        at = time.time() - minutes * MINUTE - 1
        for one in new:
            os.utime(one, (at, at))
        return path


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "work").mkdir()
    one = Job(tmp_path / "work")
    yield one
    one.end()


@pytest.mark.parametrize(
    "options",
    [
        ["--save", "out"],
        ["--save=out"],
        ["--save-dir", "out"],
        ["--output_dir", "{cwd}/out"],
        ["--ckpt-dir=out/"],
        ["--checkpoint_path", "out"],
        ["--job.dump_folder", "out"],
        ["--checkpoint.folder", "out"],
        ["trainer.default_root_dir=out"],
        ["+checkpoint.dirpath='out'"],
        ["hydra.run.dir=out"],
        ["--config", "train.toml"],
        ["--config=train.yaml"],
        ["train.json"],
    ],
)
def test_where_it_saves_is_what_its_options_and_configuration_name(job: Job, options: list[str]) -> None:
    job.put("train.toml", 9, '[training]\nsteps = 9\n\n[checkpoint]  # kept\nfolder = "out"  # here\n')
    job.put("train.yaml", 9, "model:\n  dir: no\ncallbacks:\n  - checkpoint:\n      dirpath: out # here\n")
    job.put("train.json", 9, '{\n  "model": "m",\n  "output_dir": "out",\n  "steps": 4\n}\n')
    job.put("out/step-1000/model.safetensors", 5)
    job.put("checkpoints/step-2000/model.safetensors", 1)  # another job's: this one names its own
    assert job.runs(*[one.format(cwd=job.cwd) for one in options]).minutes() == 5


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--save-interval", "out", "--load", "out", "--pretrained-checkpoint", "out", "--data-path", "out"],
        ["--resume_from_checkpoint=out", "--save", "true", "--checkpoint", "none", "--output", "5"],
        ["--config", "missing.toml", "--config", "folder.toml"],
        ["--config", "data.yaml"],
        ["--save"],
    ],
)
def test_what_names_no_place_to_save_leads_to_none(job: Job, options: list[str]) -> None:
    job.put("out/step-1000/model.safetensors", 5)
    job.put("folder.toml/x", 5)
    job.put("data.yaml", 5, "checkpoint:\n  keep: 3\ndir: out\n")
    answer = job.runs(*options).last()
    assert (answer["age"], answer["unsure"]) == (None, None)
    assert answer["running"] >= 0


@pytest.mark.parametrize(
    "names",
    [
        ["checkpoint/latest"],
        ["checkpoints/step-1000/model-00001-of-00002.safetensors"],
        ["ckpt/model_1000.pth"],
        ["ckpts/epoch=3-step=400.ckpt"],
        ["outputs/checkpoint/step-500/.metadata", "outputs/checkpoint/step-500/__0_0.distcp"],
        ["outputs/2030-01-02/03-04-05/checkpoints/last.ckpt"],
        ["lightning_logs/version_3/checkpoints/epoch=1.ckpt/checkpoint/zero_pp_rank_0.pt"],
    ],
)
def test_without_a_name_the_usual_folders_are_looked_at(job: Job, names: list[str]) -> None:
    for name in names:
        job.put(name, 7)
    job.put("src/model.pt", 1)
    job.put("outputs/2030-01-02/03-04-05/metrics.pt", 1)
    assert job.runs().minutes() == 7


FILES = [
    # Hugging Face Trainer: logs beside the checkpoints are written all the time and are none.
    (
        ["checkpoint-500/trainer_state.json 30", "checkpoint-1000/optimizer.pt 10", "runs/events.out.1 0"],
        10,
    ),
    # Megatron-LM: the file says which iteration is whole; the next one is being written.
    (["latest_checkpointed_iteration.txt 20", "iter_0000100/x.distcp 20", "iter_0000200/x.distcp 0"], 20),
    # torch.distributed.checkpoint writes .metadata last: without it a checkpoint is not whole.
    (["step-100/.metadata 15", "step-100/__0_0.distcp 16", "step-200/__0_0.distcp 0"], 15),
    # DeepSpeed: `latest` is written when all ranks are done.
    (["latest 25", "global_step500/mp_rank_00_model_states.pt 25", "global_step600/mp_rank_00.pt 0"], 25),
    (["latest 25", "step-500.pt 25", "step-600.pt 0"], 25),
    # What is being written, or was left half.
    (["model.pt 40", "model.pt.tmp 0", "tmp-checkpoint-9/model.pt 0", ".step-9/model.pt 0"], 40),
    (["epoch_0/model-00001.safetensors 12", "epoch_1/model-00001.safetensors 3", "log.txt 0"], 3),
    (["notes.md 1", "wandb/run/files/config.yaml 1", "profile/trace.json 1"], None),
]


@pytest.mark.parametrize(("files", "minutes"), FILES)
def test_what_counts_is_what_looks_like_a_whole_checkpoint(
    job: Job, files: list[str], minutes: int | None
) -> None:
    for one in files:
        name, age = one.split()
        job.put(f"out/{name}", float(age))
    assert job.runs("--output_dir", "out").minutes() == minutes


LINES = [
    "[INFO|trainer.py:3993] 2030-01-02 03:04:05,006 >> Saving model checkpoint to elsewhere/checkpoint-500",
    "01/02/2030 03:04:05 - INFO - accelerate - Saving current state to elsewhere/checkpoint-500",
    "Epoch 3, global step 500: 'loss' reached 2.1 (best 2), saving model to 'elsewhere/e=3.ckpt' as top 1",
    "  successfully saved checkpoint from iteration     500 to elsewhere/checkpoint-500 [ t 1/2, p 1/1 ]",
    "[2030-01-02 03:04:05,006] [INFO] [engine.py:23] [Torch] Saved elsewhere/checkpoint-500/mp_rank.pt.",
    "INFO:torchtune:Model checkpoint of size 2.30 GiB saved to elsewhere/checkpoint-500/model.safetensors",
]


@pytest.mark.parametrize("line", LINES)
def test_where_it_saves_is_also_what_its_log_says(job: Job, line: str) -> None:
    for name in ("checkpoint-500/mp_rank.pt", "checkpoint-500/model.safetensors", "e=3.ckpt"):
        job.put(f"elsewhere/{name}", 6)
    job.log.write_text(f"{line.replace('500', '400')}\nstep 1\n\x1b[32m{line}\x1b[0m\nstep 2\n")
    assert job.runs().minutes() == 6


def test_every_kind_of_line_has_its_example() -> None:
    assert [sum(bool(re.search(one, line)) for line in LINES) for one in SAVE_LINES] == [1] * len(
        SAVE_LINES
    )


def test_a_link_to_the_folder_is_followed_and_none_below_it(job: Job, tmp_path: Path) -> None:
    job.put("../scratch/step-100/model.pt", 8)
    job.put("../other/step-200/model.pt", 1)
    (job.cwd / "checkpoints").symlink_to(tmp_path / "scratch")
    for name in ("step-200", "deeper", "model.pt"):
        (tmp_path / "scratch" / name).symlink_to(tmp_path / "other")
    (tmp_path / "scratch" / "loop").symlink_to(tmp_path / "scratch")
    assert job.runs().minutes() == 8


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--save", "s3://bucket/run"], "it saves to s3"),
        (["--output_dir", "${oc.env:SCRATCH}/run"], "a variable names where it saves"),
        (["--save", "ahead"], "its time is in the future"),
        (["--save", "many"], "there is too much to look at"),
        (["--save", "loop"], "its folder cannot be looked at: Too many levels of symbolic links"),
    ],
)
def test_what_may_be_there_and_cannot_be_seen_is_not_called_none(
    job: Job, monkeypatch: pytest.MonkeyPatch, options: list[str], why: str
) -> None:
    monkeypatch.setattr(checkpoints, "ENTRIES", 10)
    job.put("ahead/step-1.pt", -600)
    for number in range(12):
        job.put(f"many/{number}.log", 1)
    (job.cwd / "loop").symlink_to("loop")
    answer = job.runs(*options).last()
    assert (answer["age"], answer["unsure"]) == (None, why)


def test_of_a_launcher_the_workers_options_and_folders_count_too(job: Job) -> None:
    inner = job.cwd / "inner"
    inner.mkdir()
    job.put("inner/out/step-5.pt", 4)
    worker = [PYTHON, "-c", "import time; time.sleep(600)", "--save", "out"]
    launcher = f"import subprocess; subprocess.run({worker!r}, cwd='inner')"
    job.process = subprocess.Popen([PYTHON, "-c", launcher], cwd=job.cwd, start_new_session=True)
    try:
        until(lambda: job.minutes() == 4)
    finally:
        os.killpg(job.process.pid, 9)


def test_a_job_that_has_ended_is_not_taken_for_another(job: Job) -> None:
    job.runs()
    assert job.process is not None
    with pytest.raises(Refusal, match="ended by itself"):
        checkpoints.last(Context("RUN", "stop", "/nonexistent", dry=True), job.process.pid, 1)


def test_the_age_is_by_the_clock_of_the_host(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    path = job.put("checkpoints/latest", 3)
    job.runs()
    monkeypatch.setattr(checkpoints.time, "time", lambda: path.stat().st_mtime + 1000.0)
    assert job.last()["age"] == pytest.approx(1000.0, abs=1e-3)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
