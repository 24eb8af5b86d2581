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

from fleetfix.remote import lease as leases
from fleetfix.remote import records as recording
from fleetfix.remote.api import Refusal

CHANGE = {"summary": "stop the job", "risk": "compensable", "do": [], "undo": [], "commit": []}
PURPOSE = {
    "run": "r1",
    "playbook": "p",
    "operator": "grace",
    "controller": "bastion",
    "driver": "bastion /home/grace",
    "reason": "fire",
}


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
    records.log.append("undone", id="r1/s/1/0", completed={"exit": 0})
    records.log.append("committed", id="r1/s/1/1", completed={"exit": 0})
    assert records.open_business() == ["done: stop the job"]


# -- the lease ----------------------------------------------------------------------------------------


def held(tmp_path: Path, run: str = "r1") -> tuple[Any, str]:
    places = leases.Places(str(tmp_path))
    home = places.prepare(run)
    recording.Records(home, run).prepare()
    taken = leases.Lease(places, {**PURPOSE, "run": run})
    taken.take(home)
    return taken, home


def expire(home: str, **changes: object) -> None:
    path = Path(home) / "lease.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "expires": 0, **changes}))


def test_a_lease_past_its_time_holds_while_its_runner_lives(tmp_path: Path) -> None:
    first, home = held(tmp_path)
    expire(home)
    with pytest.raises(Refusal) as refused:
        held(tmp_path, "r2")
    assert refused.value.kind == "lease_held"
    os.close(first._alive)
    held(tmp_path, "r2")


def test_a_lease_of_before_a_reboot_holds_nobody_off(tmp_path: Path) -> None:
    _, home = held(tmp_path)
    expire(home, expires=9e9, boot_id="another boot")
    taken, _ = held(tmp_path, "r2")
    assert taken.epoch == 2


def test_an_older_owner_is_refused_after_a_newer_acquisition(tmp_path: Path) -> None:
    first, _ = held(tmp_path)
    second, _ = held(tmp_path)
    second.check()
    with pytest.raises(Refusal):
        first.check()


def test_an_older_owner_cannot_release_the_newer_ones_lease(tmp_path: Path) -> None:
    first, _ = held(tmp_path)
    second, _ = held(tmp_path)
    first.release()
    second.check()


def test_a_broken_lease_file_is_no_lease(tmp_path: Path) -> None:
    _, home = held(tmp_path)
    (Path(home) / "lease.json").write_text("{torn")
    held(tmp_path, "r2")


def test_records_go_to_run_where_var_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the second place is root's: run it as root")
    (tmp_path / "var").write_text("a file where a folder should be")
    places = leases.Places(str(tmp_path))
    home = places.prepare("r1")
    assert home == f"{tmp_path}/run/fleetfix"
    assert not places.durable(home)


def test_a_run_goes_on_where_it_began(tmp_path: Path) -> None:
    places = leases.Places(str(tmp_path))
    second = places.homes[1]
    recording.Records(second, "r1").prepare()
    assert places.expected("r1") == second
    assert places.expected("r2") == places.homes[0]


def test_a_home_that_belongs_to_someone_else_is_not_used(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("gives a folder away: run it as root")
    places = leases.Places(str(tmp_path))
    os.makedirs(places.homes[0])
    os.chown(places.homes[0], 65534, 65534)
    assert places.prepare("r1") == places.homes[1]
