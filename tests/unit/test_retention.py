"""What a host lets go of: the records of old runs that nobody needs any more, and nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix import evidence_folder
from fleetfix.events import HostFinished, Record, RunFinished, RunStarted
from fleetfix.journal import Journal
from fleetfix.policy import Policy
from fleetfix.remote import retention
from fleetfix.remote.api import Context
from fleetfix.remote.records import Records, hold_shared

CHANGE = {"summary": "stop the job", "do": [], "undo": [], "commit": []}
LONG_AGO = time.time() - retention.OLD - 60


@pytest.fixture(autouse=True)
def _newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "NEWEST", 2)
    for name in ("n1", "n2"):
        a_run(tmp_path, name, at=time.time())


def a_run(home: Path, run: str, *kinds: str, at: float = LONG_AGO, **ended: Any) -> Records:
    """A run that began a change, and went through these records after that."""
    records = Records(str(home), run)
    records.prepare()
    records.log.append("opened", run=run)
    if kinds:
        records.log.append("begun", id=f"{run}/s/1/0", step="s", digest="d", change=CHANGE)
    for kind in kinds:
        records.log.append(kind, id=f"{run}/s/1/0", completed={"exit": 0})
    records.log.append("ended", **{"outcome": "changed", **ended})
    os.utime(records.log.path, (at, at))
    return records


def swept(home: Path) -> set[str]:
    """Sweep; the runs that went."""
    before = set(os.listdir(home / "runs"))
    context = Context("now", "", str(home), homes=[str(home), str(home / "elsewhere")])
    answer = retention.sweep(context)
    gone = before - set(os.listdir(home / "runs"))
    assert answer == {"runs": len(gone)}
    return gone


def test_an_old_run_that_is_settled_goes_and_a_young_one_stays(tmp_path: Path) -> None:
    a_run(tmp_path, "committed", "done", "committed")
    a_run(tmp_path, "undone", "done", "undone")
    a_run(tmp_path, "did-nothing")
    a_run(tmp_path, "given-up", "done", outcome="released")
    a_run(tmp_path, "young", "done", "committed", at=LONG_AGO + 3600)
    assert swept(tmp_path) == {"committed", "undone", "did-nothing", "given-up"}


def _claimed(home: Path) -> Iterator[object]:
    a_run(home, "kept", "done", "committed")
    (home / "claims").mkdir()
    (home / "claims/kept.json").write_text("torn")
    yield


def _open(home: Path) -> Iterator[object]:
    a_run(home, "kept", "done", outcome="unproven")
    yield


def _in_doubt(home: Path) -> Iterator[object]:
    a_run(home, "kept", "pondered")
    yield


def _held(home: Path) -> Iterator[object]:
    a_run(home, "kept", "done", "committed")
    (home / "holds").mkdir()
    (home / "holds/x.json").write_text(json.dumps({"run": "kept", "until": 9e9, "outer": "/nowhere"}))
    yield


def _job(home: Path) -> Iterator[object]:
    records = a_run(home, "kept", "done", "committed")
    os.mkdir(records.folder + "/job")
    Path(records.folder, "job/stop.json").write_text("{}")
    yield


def _alive(home: Path) -> Iterator[object]:
    records = a_run(home, "kept", "done", "committed")
    lock = hold_shared(records.alive)
    yield
    os.close(lock)


@pytest.mark.parametrize("needed", [_claimed, _open, _in_doubt, _held, _job, _alive])
def test_nothing_goes_that_somebody_may_need(tmp_path: Path, needed: Any) -> None:
    for _ in needed(tmp_path):
        assert swept(tmp_path) == set()


def test_what_starts_a_job_again_is_told_from_the_record_of_a_start(tmp_path: Path) -> None:
    records = a_run(tmp_path, "over", "done", "committed")
    os.mkdir(records.folder + "/job")
    Path(records.folder, "job/started.json").write_text("{}")
    assert swept(tmp_path) == {"over"}


def test_the_newest_stay_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(tmp_path, "n3", "done", "committed", at=time.time() - 60)
    now = time.time()
    for jump in (400, -400):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump * 86400)
        assert swept(tmp_path) == ({"n3"} if jump > 0 else set())
    assert set(os.listdir(tmp_path / "runs")) == {"n1", "n2"}


def test_there_are_never_more_than_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MOST", 3)
    for number in range(4):
        a_run(tmp_path, f"r{number}", "done", "committed", at=time.time() - 10 - number)
    assert swept(tmp_path) == {"r1", "r2", "r3"}


# -- on the controller --------------------------------------------------------------------------------


def test_old_evidence_goes_but_none_of_a_run_that_may_go_on(tmp_path: Path) -> None:
    for run in ("old", "unfinished", "young"):
        evidence_folder.keep(tmp_path, run, "gpu01", "s", {"x": b"1"})
        if run != "young":
            for path in (tmp_path / "evidence" / run).rglob("*"):
                os.utime(path, (1000, 1000))
            os.utime(tmp_path / "evidence" / run, (1000, 1000))
    gone = evidence_folder.sweep(tmp_path, time.time() - 90 * 86400, lambda run: run == "unfinished")
    assert gone == ["old"]
    assert sorted(os.listdir(tmp_path / "evidence")) == ["unfinished", "young"]
    assert evidence_folder.sweep(tmp_path / "none", 0.0, lambda run: False) == []


def test_the_journal_says_of_which_runs_evidence_is_needed(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        for run, outcome, exit in (
            ("over", "changed", 0),
            ("back", "rollback_pending", 2),
            ("cut", "ok", None),
        ):
            started = RunStarted(
                playbook="p",
                source="p.yaml",
                digest="",
                inventory="i",
                hosts=("gpu01",),
                steps=(),
                policy=Policy(),
                operator="ann",
                controller="here",
                version="1",
            )
            events: list[Any] = [started, HostFinished(host="gpu01", outcome=outcome)]
            events += [RunFinished(exit=exit)] if exit is not None else []
            records = [Record(run=run, seq=n, at=1.0, event=event) for n, event in enumerate(events, 1)]
            journal.append(records)
            journal.keep_evidence(run, "gpu01", "s", {"x": b"1"})
        assert journal.sweep_evidence(time.time() + 60) == ["over"]
        assert sorted(os.listdir(tmp_path / "evidence")) == ["back", "cut"]
        assert journal.sweep_evidence(time.time() - 60) == []
