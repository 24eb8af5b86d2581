"""Who may write to a host: the lease, the claims, and where they are kept."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.remote import claims as claiming
from fleetfix.remote import lease as leases
from fleetfix.remote import places as placing
from fleetfix.remote import records as recording
from fleetfix.remote.api import Refusal, stat_of, user_home

PURPOSE = {
    "run": "r1",
    "playbook": "p",
    "operator": "grace",
    "controller": "bastion",
    "driver": "bastion /home/grace",
    "reason": "fire",
    "take_over": False,
}


def held(tmp_path: Path, run: str = "r1") -> tuple[Any, str]:
    places = placing.Places(str(tmp_path))
    home = places.prepare(run)
    recording.Records(home, run).prepare()
    taken = leases.Lease(places, {**PURPOSE, "run": run})
    taken.take(home)
    return taken, home


@pytest.fixture
def dead() -> int:
    """A process id that no process has."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return gone.pid


@pytest.fixture
def living() -> Iterator[dict[str, int]]:
    """A process that lives, as a lease names one."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield {"pid": child.pid, "start": stat_of(child.pid)[2]}
    child.communicate(b"\n")


def rewrite(tmp_path: Path, home: str, **changes: object) -> None:
    """What another session would have written: in root's own place, and where all can read it."""
    for path in (Path(home) / "lease.json", tmp_path / "run/fleetfix.lease"):
        if path.exists():
            path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def left_by_a_dead_one(tmp_path: Path, dead: int, **changes: object) -> str:
    """A lease whose runner is gone, past its time where `changes` do not say otherwise."""
    first, home = held(tmp_path)
    os.close(first._alive)
    rewrite(tmp_path, home, **{"until": leases.since_boot() - 1, "pid": dead, **changes})
    return home


def test_a_lease_past_its_time_holds_while_its_runner_lives(
    tmp_path: Path, dead: int, living: dict[str, int]
) -> None:
    first, home = held(tmp_path)
    rewrite(tmp_path, home, until=0, pid=dead)
    with pytest.raises(Refusal) as refused:  # its lock is held: a change of it runs
        held(tmp_path, "r2")
    assert refused.value.kind == "lease_held"
    os.close(first._alive)
    rewrite(tmp_path, home, **living)
    with pytest.raises(Refusal):  # its lock was removed, say: the process lives
        held(tmp_path, "r2")
    rewrite(tmp_path, home, pid=dead)
    held(tmp_path, "r2")


def test_a_lease_whose_runner_is_gone_holds_until_its_time_is_over(tmp_path: Path, dead: int) -> None:
    left_by_a_dead_one(tmp_path, dead, until=leases.since_boot() + 60)
    with pytest.raises(Refusal):
        held(tmp_path, "r2")


@pytest.mark.parametrize("hours", [-48, 48])
def test_a_wall_clock_that_jumps_frees_no_lease_and_keeps_none(
    tmp_path: Path, dead: int, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    home = left_by_a_dead_one(tmp_path, dead, until=leases.since_boot() + 60)
    monkeypatch.setattr(time, "time", lambda: now + hours * 3600)
    with pytest.raises(Refusal):
        held(tmp_path, "r2")
    boot = leases.since_boot()
    monkeypatch.setattr(leases, "since_boot", lambda: boot + 61)
    taken, _ = held(tmp_path, "r2")
    told = leases.told(taken.current())
    assert told["expires"] == pytest.approx(now + hours * 3600 + leases.LASTS, abs=5)
    assert Path(home, "lease.json").exists()


def test_a_lease_of_before_a_reboot_holds_nobody_off(tmp_path: Path, living: dict[str, int]) -> None:
    first, home = held(tmp_path)
    rewrite(tmp_path, home, until=9e9, boot_id="another boot", **living)
    taken, _ = held(tmp_path, "r2")
    assert taken.epoch == first.epoch + 1


def test_a_claim_outlives_a_reboot(tmp_path: Path) -> None:
    taken, home = held(tmp_path)
    claims = claiming.Claims(taken.places)
    claims.take(home, PURPOSE)
    log = recording.Records(home, "r1").log
    log.append("begun", id="r1/s/1/0", step="s", digest="d", change={"summary": "stop the job"})
    rewrite(tmp_path, home, boot_id="another boot")
    assert taken.current() is None
    with pytest.raises(Refusal, match="stop the job") as refused:
        claims.refuse_others("r2")
    assert refused.value.kind == "unfinished"


def test_an_older_owner_is_refused_after_a_newer_acquisition(tmp_path: Path) -> None:
    first, _ = held(tmp_path)
    second, _ = held(tmp_path)
    second.check()
    with pytest.raises(Refusal) as refused:
        first.check()
    assert refused.value.kind == "lease_held"


def test_an_older_owner_cannot_release_the_newer_ones_lease(tmp_path: Path) -> None:
    first, _ = held(tmp_path)
    second, _ = held(tmp_path)
    first.release()
    second.check()


@pytest.mark.parametrize(
    "torn", ["{torn", "", "[]", '{"run": 7}', '{"run": "r1", "pid": "x", "until": []}']
)
def test_a_lease_that_cannot_be_read_is_no_lease(tmp_path: Path, torn: str) -> None:
    _, home = held(tmp_path)
    (Path(home) / "lease.json").write_text(torn)
    (tmp_path / "run/fleetfix.lease").unlink(missing_ok=True)
    held(tmp_path, "r2")


def test_roots_lease_holds_where_its_own_records_were_removed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("root alone writes down its lease twice: run it as root")
    first, home = held(tmp_path)
    (Path(home) / "lease.json").unlink()
    with pytest.raises(Refusal, match="r1 of grace on bastion"):
        held(tmp_path, "r2")
    assert first.is_gone()
    with pytest.raises(Refusal) as refused:
        first.check()
    assert refused.value.kind == "in_doubt", "nobody has taken over: that must not be said"


def test_who_was_stopped_with_the_lock_of_the_lease_keeps_nobody_waiting_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, home = held(tmp_path)
    monkeypatch.setattr(leases, "PATIENCE", 0.05)
    with open(Path(home) / "lease.lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Refusal) as refused:
            held(tmp_path, "r1")
    assert refused.value.kind == "lease_held"
    assert f"process {os.getpid()} stands still" in refused.value.message


def test_a_lease_that_cannot_be_renewed_or_let_go_ends_no_runner(tmp_path: Path) -> None:
    taken, home = held(tmp_path)
    os.rename(home, home + ".moved")
    taken.renew()
    taken.leave()
    taken.release()


# -- claims -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["claim torn", "claim empty", "log gone", "log torn", "folder gone"])
def test_a_damaged_claim_neither_frees_the_host_silently_nor_blocks_it_for_ever(
    tmp_path: Path, damage: str
) -> None:
    taken, home = held(tmp_path)
    claims = claiming.Claims(taken.places)
    claims.take(home, PURPOSE)
    log = Path(recording.Records(home, "r1").log.path)
    log.write_text('{"v":1,"t":1.0,"kind":"opened","run":"r1"}\n')
    assert claims.told_to("r2") == [], "it has begun nothing"
    match damage:
        case "claim torn":
            (Path(home) / "claims/r1.json").write_bytes(b'{"run":')
        case "claim empty":
            (Path(home) / "claims/r1.json").write_bytes(b"")
        case "log gone":
            log.unlink()
        case "log torn":
            log.write_bytes(b'{"kin')
        case "folder gone":
            os.rename(log.parent, log.parent.with_name("elsewhere"))
    with pytest.raises(Refusal, match=r"cannot be read|gone or torn") as refused:
        claims.refuse_others("r2")
    assert refused.value.kind == "unfinished"
    assert "release r1" in refused.value.hint
    claims.drop(home, "r1")
    claims.refuse_others("r2")


# -- places -------------------------------------------------------------------------------------------


def test_records_go_to_run_where_var_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the second place is root's: run it as root")
    (tmp_path / "var").write_text("a file where a folder should be")
    places = placing.Places(str(tmp_path))
    home = places.prepare("r1")
    assert home == f"{tmp_path}/run/fleetfix"
    assert not places.durable(home)


def test_a_run_goes_on_where_it_began(tmp_path: Path) -> None:
    places = placing.Places(str(tmp_path))
    second = places.homes[1]
    recording.Records(second, "r1").prepare()
    assert places.expected("r1") == second
    assert places.expected("r2") == places.homes[0]


def test_a_home_that_belongs_to_someone_else_is_not_used(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("gives a folder away: run it as root")
    places = placing.Places(str(tmp_path))
    os.makedirs(places.homes[0])
    os.chown(places.homes[0], 65534, 65534)
    assert places.prepare("r1") == places.homes[1]


# -- root and ordinary users ---------------------------------------------------------------------------


def as_nobody(work: Any) -> str:
    """What a process of the user nobody says of it: nothing, or why it was refused."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            try:
                work()
                said = "taken"
            except Refusal as no:
                said = f"{no.kind}: {no.message}"
            os.write(writer, said.encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as told:
        return told.read()


def test_an_ordinary_user_is_held_off_by_root_and_holds_off_that_user_alone(dead: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("plays two users: run it as root")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        own = Path(str(root) + user_home(65534)) / ".local"
        own.mkdir(parents=True)
        (root / "run").mkdir()
        os.chown(own, 65534, 65534)
        mine, home = held(root)
        assert as_nobody(lambda: held(root, "r2")).startswith("lease_held: run r1 of grace on bastion")
        rewrite(root, home, until=0)
        assert "lease_held" in as_nobody(lambda: held(root, "r2")), "past its time, and its runner lives"
        mine.release()
        assert as_nobody(lambda: held(root, "r2")) == "taken"
        # The runner of that is gone, and its lease still counts: for that user.
        assert "run r2" in as_nobody(lambda: held(root, "r3"))
        again, _ = held(root, "r4")
        again.check()
