"""What the host remembers: its log, its locks, its lease, whatever crashes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetfix.remote import records as recording
from fleetfix.remote.api import Refusal

CHANGE = {"summary": "stop the job", "risk": "compensable", "do": [], "undo": [], "commit": []}


@pytest.fixture
def records(tmp_path: Path) -> Any:
    made = recording.Records(str(tmp_path), "r1")
    made.prepare()
    return made


def begin(records: Any, id: str = "r1/s/1/0") -> Any:
    records.log.append("begun", id=id, step="s", digest="d", epoch=1, change=CHANGE)
    records.log.refresh()
    return records.log.entries[id]


def test_a_record_is_one_versioned_line(records: Any) -> None:
    begin(records)
    (line,) = Path(records.log.path).read_text().splitlines()
    record = json.loads(line)
    assert (record["v"], record["kind"], record["id"]) == (1, "begun", "r1/s/1/0")


def test_a_change_goes_from_begun_to_done_to_undone(records: Any) -> None:
    entry = begin(records)
    assert records.state(entry) == "in_doubt"
    records.log.append("done", id=entry.id, completed={"exit": 0})
    records.log.refresh()
    assert records.state(entry) == "done"
    records.log.append("undoing", id=entry.id)
    records.log.refresh()
    assert records.state(entry) == "undo_failed", "an undo that a crash has cut off"
    records.log.append("undone", id=entry.id, completed={"exit": 0})
    records.log.refresh()
    assert records.state(entry) == "undone"


def test_a_change_whose_lock_is_held_is_running(records: Any) -> None:
    entry = begin(records)
    lock = recording.fresh_lock(records.lock(entry.id, "do"))
    assert records.state(entry) == "begun"
    os.close(lock)
    assert records.state(entry) == "in_doubt"


def test_a_copy_of_the_lock_in_a_command_keeps_it_held(records: Any) -> None:
    entry = begin(records)
    lock = recording.fresh_lock(records.lock(entry.id, "do"))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    os.close(lock)
    assert records.state(entry) == "begun"
    child.communicate(b"\n")
    assert records.state(entry) == "in_doubt"


def test_a_line_that_a_crash_has_torn_is_passed_over_and_the_next_one_stands(records: Any) -> None:
    entry = begin(records)
    with open(records.log.path, "a") as file:
        file.write('{"v":1,"kind":"done","id":"r1/s/1/0","compl')
    records.log.append("done", id=entry.id, completed={"exit": 0, "value": 7})
    again = recording.Records(os.path.dirname(os.path.dirname(records.folder)), "r1")
    again.log.refresh()
    assert again.log.entries[entry.id].done == {"exit": 0, "value": 7}


def test_the_first_answer_stands(records: Any) -> None:
    entry = begin(records)
    records.log.append("done", id=entry.id, completed={"exit": 0, "value": 1})
    records.log.append("done", id=entry.id, completed={"exit": 0, "value": 2})
    records.log.refresh()
    assert entry.done["value"] == 1


def test_a_record_of_a_newer_version_is_passed_over(records: Any) -> None:
    begin(records)
    records.log.append("pondered", id="r1/s/1/0", depth=3)
    records.log.append("measured", id="r1/other/1/0")
    records.log.refresh()
    assert list(records.log.entries) == ["r1/s/1/0"]


def test_room_for_the_answer_is_kept_before_anything_begins(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a small file system is mounted for this test: run it as root")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        records = recording.Records(str(small), "r1")
        records.prepare()
        records.log.reserve()
        entry = begin(records)
        with contextlib.suppress(OSError):
            (small / "filler").write_bytes(b"x" * 2**20)
        records.log.append("done", id=entry.id, completed={"exit": 0, "value": "x" * 60_000})
        records.log.refresh()
        assert records.state(entry) == "done"
        with pytest.raises(OSError, match="No space"):
            records.log.reserve()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_an_answer_too_long_for_its_room_is_shortened_and_says_so() -> None:
    answer = {"exit": 0, "stdout": "\0" * 40_000, "stderr": "\0" * 40_000, "value": "v" * 60_000}
    short = recording.shortened(answer)
    assert len(json.dumps(short)) <= recording.LONGEST
    assert short["cut"]
    assert short["value"] == answer["value"]


@pytest.mark.parametrize(
    "id", ["r2/s/1/0", "r1/s/1", "r1/../1/0", "r1/s/1/0/9", "r1//1/0", "r1/s~/1/0", 7, None]
)
def test_an_id_that_is_not_of_this_run_is_refused(records: Any, id: object) -> None:
    with pytest.raises(Refusal):
        recording.file_of(id, "r1")


def test_open_business_is_what_was_begun_and_neither_undone_nor_committed(records: Any) -> None:
    for number in range(3):
        begin(records, f"r1/s/1/{number}")
        records.log.append("done", id=f"r1/s/1/{number}", completed={"exit": 0})
    records.log.append("committed", id="r1/s/1/1", completed={"exit": 0})
    records.log.append("committed", id="r1/s/1/2", completed={"exit": 0})
    assert records.open_business() == ["done: stop the job"]
    records.log.append("undone", id="r1/s/1/0", completed={"exit": 0})
    assert len(records.open_business()) == 2, "half of a way back is no place to stay"


def test_a_run_of_which_nothing_can_be_read_any_more_is_open_business(records: Any) -> None:
    assert "gone or torn" in records.open_business()[0]
    records.log.append("opened", run="r1")
    assert records.open_business() == []
    Path(records.log.path).write_bytes(b"\0" * 100)
    assert (
        "gone or torn" in recording.Records(str(Path(records.folder).parents[1]), "r1").open_business()[0]
    )


def test_what_was_read_is_not_relied_on_once_the_log_was_removed(records: Any) -> None:
    begin(records)
    Path(records.log.path).unlink()
    records.log.refresh()
    assert (records.log.entries, records.log.lost, records.log.is_blank) == ({}, ["stop the job"], True)


def test_behind_a_lock_is_each_process_that_has_it_open(records: Any) -> None:
    lock = recording.fresh_lock(records.lock("r1/s/1/0", "do"))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    os.close(lock)
    assert [pid for pid, _ in recording.holders(records.lock("r1/s/1/0", "do"))] == [child.pid]
    child.communicate(b"\n")
    assert recording.holders(records.lock("r1/s/1/0", "do")) == []
