"""What is read from a job's log: this start's points, whatever the terminal left in the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.domain.log_formats import FORMATS
from fleetfix.remote import logs
from fleetfix.remote.api import Context, Refusal

UID = os.geteuid()
ASKED = [{"name": row.name, "rate": row.rate, "step": row.step} for row in FORMATS]


class Job:
    """A job whose output goes to a file, as `jobs` says it."""

    def __init__(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = log
        self.offset = 0
        self.runs = True
        self.to_file = True
        monkeypatch.setattr(logs.jobs, "log_of_job", lambda ctx: self._log())
        monkeypatch.setattr(logs.jobs, "current", lambda ctx: self._live() if self.runs else None)
        monkeypatch.setattr(logs.jobs, "key_of", lambda ctx, argv, cwd, uid, log: "key")
        monkeypatch.setattr(logs.jobs, "age_of", lambda start: 60.0)

    def _live(self) -> dict[str, Any]:
        return {"pid": 7, "start": 70, "uid": UID, "argv": ["torchrun", "train.py"], "cwd": "/"}

    def _log(self) -> dict[str, Any] | None:
        if not self.runs or not self.to_file:
            return None
        place = {"path": str(self.log), "offset": self.offset, "key": "key", "seconds": 60.0}
        return {**self._live(), **place}

    def read(self, **args: Any) -> dict[str, Any]:
        ctx = Context("RUN", "speed", "/nonexistent", dry=True)
        answer: dict[str, Any] = logs.find_rates(ctx, **{"formats": ASKED, **args})
        return answer


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path / "train.log", monkeypatch)


def titan(step: int, rate: str = "20,000") -> str:
    return f"[titan] INFO - step: {step:>2}  loss:  2.10000  tps: {rate}  tflops: 402.10  mfu: 40%\n"


def test_only_what_this_start_wrote_is_read(job: Job) -> None:
    job.log.write_text("".join(titan(step, "12,800") for step in range(1, 50)))
    job.offset = job.log.stat().st_size
    with job.log.open("a") as file:
        file.write(titan(50) + "a warning\n" + titan(51))
    answer = job.read()
    assert answer["points"]["torchtitan"] == [["50", "20,000"], ["51", "20,000"]]
    assert answer["whole"]["torchtitan"]
    assert answer["points"]["jsonl"] == []
    assert answer["job"] == {
        "pid": 7,
        "key": "key",
        "seconds": 60.0,
        "first_step": None,
        "steps_seen": None,
    }


def test_a_log_that_was_emptied_meanwhile_is_read_from_its_start(job: Job) -> None:
    job.offset = 1000000
    job.log.write_text(titan(1))
    assert job.read()["points"]["torchtitan"] == [["1", "20,000"]]


def test_a_line_that_is_still_being_written_waits(job: Job) -> None:
    job.log.write_text(titan(1) + titan(2)[:70])
    assert len(job.read()["points"]["torchtitan"]) == 1


def test_the_states_of_a_progress_bar_are_lines(job: Job) -> None:
    line = titan(1).strip()
    job.log.write_text(f"  1%|\r{line}\r  2%|\r{titan(2)}")
    assert len(job.read()["points"]["torchtitan"]) == 2


def test_bytes_that_are_no_text_break_nothing(job: Job) -> None:
    job.log.write_bytes(b"\xff\xfe\x00\n" + titan(1).encode() + b"\x1b[31m\xc3\n" + b"x" * 3000000 + b"\n")
    assert len(job.read()["points"]["torchtitan"]) == 1


def test_a_long_log_is_read_at_its_end_and_says_so(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "TAIL", 2000)
    job.log.write_text("".join(titan(step) for step in range(1, 500)))
    answer = job.read()
    assert not answer["whole"]["torchtitan"]
    steps = [int(step) for step, _ in answer["points"]["torchtitan"]]
    assert steps == list(range(steps[0], 500))


def test_many_points_are_thinned_to_the_last_and_fit_a_reply(job: Job) -> None:
    job.log.write_text("".join(titan(step) for step in range(1, 5000)))
    answer = job.read(last=600)
    assert len(answer["points"]["torchtitan"]) == 600
    assert answer["points"]["torchtitan"][-1][0] == "4999"
    assert not answer["whole"]["torchtitan"]
    assert len(json.dumps(job.read(last=100000))) < 60000


def test_a_pattern_finds_rate_and_step_by_its_groups(job: Job) -> None:
    job.log.write_text("it 5 | 12.8K tok/s\nit 6 | 20.1k tok/s\n")
    pattern = {"name": "pattern", "rate": r"it (?P<step>\d+) \| (?P<rate>\S+) tok/s", "step": None}
    assert job.read(formats=[pattern])["points"]["pattern"] == [["5", "12.8K"], ["6", "20.1k"]]


def test_a_pattern_that_this_python_does_not_know_is_refused(job: Job) -> None:
    with pytest.raises(Refusal, match="the pattern of pattern"):
        job.read(formats=[{"name": "pattern", "rate": "(?P<rate>", "step": None}])


def test_without_a_job_there_is_nothing_to_read(job: Job) -> None:
    job.runs = False
    assert job.read() == {"none": "no job runs here", "job": None}


def test_a_job_that_writes_to_no_file_needs_its_log_named(job: Job) -> None:
    job.to_file = False
    job.log.write_text(titan(1))
    answer = job.read()
    assert "goes to no file" in answer["none"]
    assert answer["job"]["pid"] == 7
    assert len(job.read(log=str(job.log))["points"]["torchtitan"]) == 1


def test_another_log_is_read_from_its_own_start(job: Job, tmp_path: Path) -> None:
    job.log.write_text("")
    job.offset = 5
    other = tmp_path / "metrics.jsonl"
    other.write_text('{"step": 1, "tokens_per_sec": 20000}\n')
    assert job.read(log=str(other))["points"]["jsonl"] == [["1", "20000"]]


@pytest.mark.parametrize("kind", ["gone", "folder", "pipe"])
def test_what_is_no_readable_file_is_said_and_never_waited_for(job: Job, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    assert "log" in job.read(log=str(path))["none"]


@pytest.mark.skipif(UID != 0, reason="needs root, to give up root's rights")
def test_the_log_is_read_with_the_rights_of_the_jobs_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "shadow"
    secret.write_text(titan(1))
    secret.chmod(0o600)
    job = Job(secret, monkeypatch)
    monkeypatch.setattr(job, "_live", lambda: {"pid": 7, "start": 70, "uid": 65534, "argv": [], "cwd": "/"})
    assert "cannot be read" in job.read()["none"]


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("\x1b[31mstep: 4\x1b[39m", "step: 4"),
        ("[rank0]:step", "step"),
        ("[default3]:step", "step"),
        ("(Worker pid=12) step", "step"),
        ("(pid=12) step", "step"),
        ("3: step", "step"),
        ("step: 4", "step: 4"),
        ("[titan] step", "[titan] step"),
    ],
)
def test_colours_and_rank_prefixes_go(line: str, plain: str) -> None:
    assert logs.cleaned(line) == plain


@given(st.lists(st.text(alphabet="ab\r\n", max_size=20), max_size=8), st.integers(1, 7))
def test_lines_are_the_same_however_the_file_is_cut(pieces: list[str], block: int) -> None:
    import io

    class Dripping(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, block))

    data = "".join(pieces).encode()
    whole = list(logs._lines(io.BytesIO(data), len(data), partial=False))
    assert list(logs._lines(Dripping(data), len(data), partial=False)) == whole
