"""Stop a job and start it again: with real processes, other users, and kills at every point."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.remote import capture, ending, jobs, launch, logs, procs, relaunch
from fleetfix.remote.api import Context, Refusal, alive, stat_of
from tests.unit.gpu_host import PYTHON, GpuHost

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be other users")
NOBODY = 65534


@pytest.fixture(autouse=True)
def _no_long_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "RESPAWN_WATCH", 0.2)
    monkeypatch.setattr(launch, "SETTLE", 0.3)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuHost]:
    with GpuHost(tmp_path, monkeypatch) as host:
        yield host


@pytest.fixture
def open_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuHost]:
    """A host that other users can enter: pytest keeps its own folders closed to them."""
    with tempfile.TemporaryDirectory(prefix="fleetfix-test-") as folder:
        Path(folder).chmod(0o755)
        with GpuHost(Path(folder), monkeypatch) as host:
            yield host


def job_of(host: GpuHost) -> dict[str, Any]:
    (job,) = [job for job in procs.jobs_here()[1] if job["pid"] in host.marked()]
    return job


def target(pid: int) -> dict[str, int]:
    return {"pid": pid, "start": stat_of(pid)[2]}


def stop(host: GpuHost, pid: int, grace: float = 5.0) -> dict[str, Any]:
    return relaunch.stop(host.context("stop"), [target(pid)], grace)


def dumped(path: Path, host: GpuHost, other_than: int | None = None) -> dict[str, Any]:
    """What a job says of itself, once one other than `other_than` has said it."""

    def read() -> dict[str, Any] | None:
        state = json.loads(path.read_text()) if path.exists() else None
        return state if state and state["pid"] != other_than else None

    state: dict[str, Any] = host.wait(read)
    return state


def run_job(host: GpuHost, how: dict[str, Any] | None = None, **options: Any) -> tuple[int, Path]:
    """Start a job that says what it is in a file; its pid, and the file."""
    dump = host.path("state.json")
    argv = host.argv(host.environment(), host.options(host.environment(), 0, dump=str(dump), **options))
    child = host.start(argv, {"SECRET": "hunter2"}, **(how or {}))
    host.wait(dump.exists)
    return child.pid, dump


SAME = (
    "argv",
    "cwd",
    "environ",
    "umask",
    "affinity",
    "nice",
    "oom",
    "uid",
    "gid",
    "groups",
    "limits",
    "prefix",
)


# -- exactly as it ran ----------------------------------------------------------------------------


def test_a_stopped_job_comes_back_exactly_as_it_ran(host: GpuHost) -> None:
    log = host.path("train.log")
    log.write_text("before\n")

    def peculiar() -> None:
        os.umask(0o027)
        os.nice(3)
        resource.setrlimit(resource.RLIMIT_NOFILE, (777, 4000))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.sched_setaffinity(0, {0})
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    cwd = host.path("a b")
    cwd.mkdir()
    with log.open("ab") as out:
        how = {"cwd": cwd, "stdout": out, "stderr": out, "preexec_fn": peculiar}
        pid, dump = run_job(host, how)
    before = dumped(dump, host)
    stop(host, pid)
    assert host.gone(pid)

    answer = relaunch.start(host.context("train"), "stop")
    after = dumped(dump, host, other_than=pid)
    assert answer["started"] == [after["pid"]]
    assert {name: after[name] for name in SAME} == {name: before[name] for name in SAME}
    assert after["ignored"] == before["ignored"] == 1
    assert after["blocked"] == 0
    assert after["leader"]
    assert {fd: after["fds"][fd] for fd in "012"} == {"0": "/dev/null", "1": str(log), "2": str(log)}
    assert log.read_text().startswith("before\n")


def test_the_job_has_no_descriptor_of_the_session(host: GpuHost) -> None:
    pid, dump = run_job(host)
    stop(host, pid)
    lock = os.open(host.path("lock"), os.O_RDWR | os.O_CREAT)
    os.set_inheritable(lock, True)
    try:
        relaunch.start(host.context("train"), "stop")
        after = dumped(dump, host, other_than=pid)
    finally:
        os.close(lock)
    libraries_and_devices = (host.device(0), host.memory_device(), host.library(host.environment()))
    ours = [path for fd, path in after["fds"].items() if int(fd) > 2 and path not in libraries_and_devices]
    assert ours == []


def test_the_capture_lies_in_the_runs_folder_closed_to_others(host: GpuHost) -> None:
    pid, _ = run_job(host)
    stop(host, pid)
    path = Path(jobs.capture_path(host.context(), "stop"))
    assert path == host.root / "state" / "runs" / "run-1" / "job" / "stop.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    (entry,) = jobs.captured(host.context(), "stop")["jobs"]
    assert entry["environ"]["SECRET"] == "hunter2"
    assert jobs.job_environ(host.context(), "stop") == (os.getuid(), entry["environ"])
    relaunch.forget(host.context("stop"))
    assert path.exists(), "it is the way back of a job that stays stopped"
    relaunch.start(host.context("train"), "stop")
    relaunch.forget(host.context("stop"))
    assert not path.exists()


def test_a_job_that_was_started_again_and_has_ended_leaves_no_capture(host: GpuHost) -> None:
    pid, dump = run_job(host)
    stop(host, pid)
    relaunch.start(host.context("train"), "stop")
    os.kill(dumped(dump, host, other_than=pid)["pid"], signal.SIGKILL)
    relaunch.forget(host.context("stop"))
    assert jobs.captured(host.context(), "stop") is None


# -- what another run left stopped ----------------------------------------------------------------


def test_a_later_run_starts_what_an_earlier_one_left_stopped(host: GpuHost) -> None:
    pid, dump = run_job(host)
    before = dumped(dump, host)
    stop(host, pid)
    later = host.context("train", run="run-2")
    found = jobs.state(later, "adopted", run="last")
    assert found["left"] == {"run": "run-1", "step": "stop"}
    assert [one["alive"] for one in found["captured"]] == [False]
    assert relaunch.adopt(later, "run-1", "stop", "adopted") == {"adopted": 1}
    relaunch.start(later, "adopted")
    after = dumped(dump, host, other_than=pid)
    assert {name: after[name] for name in SAME} == {name: before[name] for name in SAME}
    again = jobs.state(later, "adopted", run="last")
    assert (again["left"], [one["alive"] for one in again["captured"]]) == (None, [True])
    relaunch.forget_adopted(later, "run-1", "stop", "adopted")
    assert jobs.captured(host.context(), "stop") is None
    assert jobs.captured(later, "adopted") is None


def test_the_newest_capture_is_the_one_that_is_meant_unless_a_run_is_named(host: GpuHost) -> None:
    for run in ("run-1", "run-2"):
        pid, dump = run_job(host)
        relaunch.stop(host.context("stop", run=run), [target(pid)], 5.0)
        dump.unlink()
    os.utime(jobs.capture_path(host.context(run="run-1"), "stop"), (1, 1))
    later = host.context("train", run="run-3")
    for asked, meant in (("last", "run-2"), ("run-1", "run-1"), ("run-9", None)):
        left = jobs.state(later, "adopted", run=asked)["left"]
        assert (left and left["run"]) == meant


def test_what_is_asked_of_no_other_run_is_not_looked_for(host: GpuHost) -> None:
    pid, _ = run_job(host)
    stop(host, pid)
    assert jobs.state(host.context("train", run="run-2"), "stop")["captured"] == []


def test_undo_of_a_start_leaves_what_the_earlier_run_kept(host: GpuHost) -> None:
    pid, dump = run_job(host)
    stop(host, pid)
    later = host.context("train", run="run-2")
    relaunch.adopt(later, "run-1", "stop", "adopted")
    relaunch.start(later, "adopted")
    dumped(dump, host, other_than=pid)
    relaunch.unstart(later, "adopted")
    relaunch.disown(later, "run-1", "stop", "adopted")
    assert jobs.state(later, "adopted", run="last")["left"] == {"run": "run-1", "step": "stop"}
    assert host.marked() == []


def test_undo_after_the_good_end_keeps_the_capture_that_is_left(host: GpuHost) -> None:
    pid, dump = run_job(host)
    stop(host, pid)
    later = host.context("train", run="run-2")
    relaunch.adopt(later, "run-1", "stop", "adopted")
    relaunch.start(later, "adopted")
    dumped(dump, host, other_than=pid)
    relaunch.forget_adopted(later, "run-1", "stop", "adopted")
    relaunch.unstart(later, "adopted")
    relaunch.disown(later, "run-1", "stop", "adopted")
    third = host.context("train", run="run-3")
    assert jobs.state(third, "adopted", run="last")["left"] == {"run": "run-2", "step": "adopted"}


def test_what_was_started_meanwhile_is_not_adopted(host: GpuHost) -> None:
    pid, _ = run_job(host)
    stop(host, pid)
    relaunch.restore(host.context("stop"))
    with pytest.raises(Refusal, match="started or dropped meanwhile"):
        relaunch.adopt(host.context("train", run="run-2"), "run-1", "stop", "adopted")


def test_a_dry_run_finds_what_was_left_and_writes_nothing(host: GpuHost) -> None:
    pid, _ = run_job(host)
    stop(host, pid)
    dry = Context("run-2", "train", str(host.root / "state"), dry=True)
    assert jobs.state(dry, "adopted", run="last")["left"] == {"run": "run-1", "step": "stop"}
    assert sorted(os.listdir(host.root / "state" / "runs")) == ["run-1"]


def test_the_capture_is_whole_before_the_first_signal(
    host: GpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, _ = run_job(host)

    def end(*_: Any) -> int:
        assert not host.gone(pid)
        assert jobs.captured(host.context(), "stop")["jobs"][0]["pid"] == pid
        raise KeyboardInterrupt

    monkeypatch.setattr(ending, "end", end)
    with pytest.raises(KeyboardInterrupt):
        stop(host, pid)


def test_a_worker_that_is_started_without_its_agent_loses_its_rank(host: GpuHost) -> None:
    ranks = {"RANK": "3", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "a", "KEPT": "1"}
    dump = host.path("state.json")
    argv = host.argv(host.environment(), host.options(host.environment(), 0, dump=str(dump)))
    pid = host.start(argv, ranks).pid
    host.wait(dump.exists)
    stop(host, pid)
    relaunch.start(host.context("train"), "stop")
    environ = dumped(dump, host, other_than=pid)["environ"]
    assert environ["KEPT"] == "1"
    assert not set(ranks) - {"KEPT"} & set(environ) or set(ranks) & set(environ) == {"KEPT"}


def test_output_that_went_into_a_pipe_goes_to_a_log_beside_and_is_said(host: GpuHost) -> None:
    cwd = host.path("work")
    cwd.mkdir()
    pid, dump = run_job(host, {"stdout": subprocess.PIPE, "cwd": cwd})
    host.children[-1].stdout.close()
    stop(host, pid)
    answer = relaunch.start(host.context("train"), "stop")
    after = dumped(dump, host, other_than=pid)
    assert after["fds"]["1"] == str(cwd / "fleetfix-run-1.log")
    assert any("pipe" in note for note in answer["notes"])
    assert any("fleetfix-run-1.log" in note for note in answer["notes"])


def test_output_behind_tee_goes_to_the_file_that_tee_wrote(host: GpuHost) -> None:
    log = host.path("train.log")
    tee = host.start(["tee", "-a", str(log)], stdin=subprocess.PIPE)
    pid, dump = run_job(host, {"stdout": tee.stdin, "stderr": tee.stdin})
    tee.stdin.close()
    stop(host, pid)
    relaunch.start(host.context("train"), "stop")
    assert dumped(dump, host, other_than=pid)["fds"]["1"] == str(log)


@root_only
def test_another_users_job_comes_back_as_that_user(open_host: GpuHost) -> None:
    host = open_host
    work = host.path("work")
    work.mkdir(mode=0o777)
    work.chmod(0o777)
    dump = work / "state.json"
    log = work / "train.log"
    log.touch()
    os.chown(log, NOBODY, NOBODY)
    with log.open("ab") as out:
        argv = host.argv(host.environment(), host.options(host.environment(), 0, dump=str(dump)))
        how = {"user": NOBODY, "group": NOBODY, "extra_groups": [12, 34], "cwd": work}
        pid = host.start(argv, stdout=out, stderr=out, **how).pid
    host.wait(dump.exists)
    before = dumped(dump, host)
    assert before["uid"] == [NOBODY] * 3
    stop(host, pid)
    relaunch.start(host.context("train"), "stop")
    after = dumped(dump, host, other_than=pid)
    assert {name: after[name] for name in SAME} == {name: before[name] for name in SAME}
    assert after["fds"]["1"] == str(log)


# -- stopping -------------------------------------------------------------------------------------


def test_the_whole_tree_ends_however_it_is_scattered(host: GpuHost) -> None:
    dumps = [host.path(name) for name in ("setsid", "twice", "stubborn")]
    forks = [
        {"dump": str(dumps[0]), "setsid": True},
        {"dump": str(dumps[1]), "twice": True},
        {"dump": str(dumps[2]), "term": "ignore"},
    ]
    pid, _ = run_job(host, forks=forks)
    host.wait(lambda: all(path.exists() for path in dumps))
    host.wait(lambda: len(host.marked()) == 4)  # who forked twice is gone
    answer = stop(host, pid, grace=0.5)
    assert host.marked() == []
    assert answer["killed"] >= 1


def test_one_that_handles_term_has_its_grace_and_its_children_are_left_to_it(host: GpuHost) -> None:
    told, child_told, child = host.path("told"), host.path("child-told"), host.path("child")
    spawns = [host.options(host.environment(), 1, dump=str(child), on_term=str(child_told))]
    pid, _ = run_job(host, on_term=str(told), saves_for=0.5, spawns=spawns)
    host.wait(child.exists)
    assert stop(host, pid)["killed"] == 0
    assert told.read_text() == f"{pid}\n"
    # What the launcher did not tell, it is told once, when the launcher has saved and is gone.
    assert child_told.read_text().count("\n") == 1
    assert child_told.stat().st_mtime_ns > told.stat().st_mtime_ns


def test_a_loop_ends_with_the_job_in_it(host: GpuHost) -> None:
    ready = host.path("state.json")
    argv = host.argv(host.environment(), host.options(host.environment(), 0, dump=str(ready)))
    words = " ".join(f"'{word}'" for word in argv)
    host.start(["sh", "-c", f"while true; do {words}; done"])
    host.wait(ready.exists)
    stop(host, job_of(host)["pid"])
    assert host.marked() == []


def test_a_job_that_something_starts_again_is_not_fought_and_who_did_it_is_named(
    host: GpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "RESPAWN_WATCH", 5.0)
    ready = host.path("state.json")
    argv = host.argv(host.environment(), host.options(host.environment(), 0, dump=str(ready)))
    words = " ".join(f"'{word}'" for word in argv)
    shell = host.start(["bash"], stdin=subprocess.PIPE)
    shell.stdin.write(f"while true; do {words}; done\n".encode())
    shell.stdin.flush()
    host.wait(ready.exists)
    pid = job_of(host)["pid"]
    with pytest.raises(Refusal) as no:
        stop(host, pid)
    assert no.value.kind == "command"
    assert f"started again by pid {shell.pid} (bash)" in no.value.message
    # Undo leaves the one that is there alone.
    answer = relaunch.restore(host.context("stop"))
    assert answer["started"] == []
    assert len(answer["already"]) == 1


def test_a_job_that_holds_this_session_is_never_signalled(
    host: GpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, _ = run_job(host)
    own = procs.ancestors() | {pid}
    job = jobs.as_job(pid, stat_of(pid)[2])
    monkeypatch.setattr(procs, "ancestors", lambda: own)
    monkeypatch.setattr(relaunch, "_targets", lambda asked: [job])
    with pytest.raises(Refusal, match="inside the job"):
        stop(host, pid)
    assert not host.gone(pid)


def test_a_job_that_ended_by_itself_is_nothing_to_stop(host: GpuHost) -> None:
    pid, _ = run_job(host)
    asked = [target(pid)]
    os.kill(pid, signal.SIGKILL)
    host.children[-1].wait()
    assert relaunch.stop(host.context("stop"), asked, 1.0)["stopped"] == []


def test_an_orphan_is_ended_and_never_started(host: GpuHost) -> None:
    worker = host.path("worker")
    pid, _ = run_job(host, forks=[{"name": "pt_data_worker", "dump": str(worker)}])
    host.wait(worker.exists)
    os.kill(pid, signal.SIGKILL)
    host.children[-1].wait()
    orphan = job_of(host)
    relaunch.stop(host.context("stop"), [target(orphan["pid"])], 2.0)
    assert host.marked() == []
    assert relaunch.start(host.context("train"), "stop") == {"started": [], "already": [], "notes": []}


# -- once -----------------------------------------------------------------------------------------


def test_a_second_start_starts_nothing(host: GpuHost) -> None:
    pid, dump = run_job(host)
    stop(host, pid)
    first = relaunch.start(host.context("train"), "stop")
    dumped(dump, host, other_than=pid)
    again = relaunch.start(host.context("train"), "stop")
    assert (again["started"], again["already"]) == ([], first["started"])
    assert len(host.marked()) == 1


@pytest.mark.parametrize("gpus", [((0, 1), (0,)), ((0,), (0, 1))])
def test_of_several_jobs_the_one_that_was_measured_before_is_measured_after(
    host: GpuHost, gpus: tuple[tuple[int, ...], ...]
) -> None:
    venv = host.environment()
    for one in gpus:
        host.train(venv, devices=[*map(host.device, one), host.memory_device()])

    def seen() -> list[int] | None:
        job = jobs.live_job(host.context("train"))
        held = sorted(len(one["gpus"]) for one in procs.jobs_here()[1])
        return job["gpus"] if job is not None and held == [1, 2] else None

    assert len(host.wait(seen)) == 2
    relaunch.stop(host.context("stop"), [target(job["pid"]) for job in procs.jobs_here()[1]], 5.0)
    assert len(relaunch.start(host.context("train"), "stop")["started"]) == 2
    assert len(host.wait(seen)) == 2


def test_two_starters_at_once_start_one_job(host: GpuHost) -> None:
    pid, _ = run_job(host)
    stop(host, pid)
    starters = [
        threading.Thread(target=relaunch.start, args=(host.context("train", change=f"c{n}"), "stop"))
        for n in range(3)
    ]
    for one in starters:
        one.start()
    for one in starters:
        one.join()
    assert len(host.wait(host.marked)) == 1


def test_a_job_that_its_owner_started_meanwhile_is_the_job(host: GpuHost) -> None:
    pid, dump = run_job(host)
    stop(host, pid)
    dump.unlink()
    by_hand, _ = run_job(host)
    assert relaunch.start(host.context("train"), "stop")["already"] == [by_hand]


def test_undo_of_a_stop_brings_the_job_back_and_undo_of_a_start_ends_it(host: GpuHost) -> None:
    pid, _ = run_job(host)
    assert relaunch.restore(host.context("stop"))["started"] == []  # nothing has been stopped
    stop(host, pid)
    assert relaunch.unstart(host.context("train"))["ended"] == []
    (started,) = relaunch.start(host.context("train"), "stop")["started"]
    assert relaunch.unstart(host.context("train"), grace=1.0)["ended"] == [started]
    assert host.marked() == []
    (back,) = relaunch.restore(host.context("stop"))["started"]
    assert host.marked() == [back]
    # What undo has brought back is not ended by another undo of the start.
    assert relaunch.unstart(host.context("train"))["ended"] == []


def test_a_capture_that_was_removed_by_hand_is_missed_before_anything_is_undone(host: GpuHost) -> None:
    lacks = relaunch.restore.lacks  # type: ignore[attr-defined]
    pid, _ = run_job(host)
    assert lacks(host.context("stop"), False) is None, "nothing has been stopped"
    stop(host, pid)
    assert lacks(host.context("stop"), False) is None
    Path(capture.path_of(host.context("stop"), "stop")).unlink()
    assert "what starts the job again is gone" in lacks(host.context("stop"), False)
    assert lacks(host.context("stop"), True) is None, "it was dropped at the good end of the run"


def test_a_run_that_ended_well_can_still_be_undone_and_the_job_runs_after_it(host: GpuHost) -> None:
    pid, _ = run_job(host)
    stop(host, pid)
    (started,) = relaunch.start(host.context("train"), "stop")["started"]
    relaunch.forget(host.context("stop"))
    assert relaunch.unstart(host.context("train"), step="stop", grace=1.0)["ended"] == [started]
    assert host.marked() == []
    (back,) = relaunch.restore(host.context("stop"))["started"]
    assert host.marked() == [back]


def in_child(work: Callable[[], Any], kill_at: tuple[Any, str], after: bool, nth: int = 1) -> int:
    """Run `work` in a child that kills itself -9 just before or after the nth call of a function."""
    module, name = kill_at
    child = os.fork()
    if child == 0:
        real, left = getattr(module, name), [nth]

        def killing(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = real(*args, **kwargs)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        setattr(module, name, killing)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


STOP_POINTS = [
    (capture, "take", False),
    (capture, "save", False),
    (capture, "save", True),
    (Context, "remember", False),
    (Context, "remember", True),
    (ending, "_tell", False),
    (ending, "_tell", True),
    (ending, "_kill", False),
    (ending, "_kill", True),
    (ending, "watch_for_return", False),
]


TERMS: dict[str, dict[str, Any]] = {
    "prompt": {},
    "saves first": {"on_term": "/dev/null", "saves_for": 0.4},
    "ignores": {"term": "ignore"},
}


SIGNALLED = [point for point in STOP_POINTS if point[0] is ending]


@pytest.mark.parametrize(
    ("point", "term"),
    [
        *((point, "prompt") for point in STOP_POINTS),
        # How it takes being told to end matters once it was told.
        *((point, term) for point in SIGNALLED for term in TERMS if term != "prompt"),
    ],
    ids=lambda one: one if isinstance(one, str) else f"{one[1]}-{'after' if one[2] else 'before'}",
)
def test_killed_anywhere_in_a_stop_undo_leaves_one_job(host: GpuHost, point: Any, term: str) -> None:
    pid, _ = run_job(host, **TERMS[term])
    status = in_child(lambda: stop(host, pid, grace=0.6), point[:2], point[2])
    assert os.WIFSIGNALED(status)
    relaunch.restore(host.context("stop"))
    host.wait(lambda: len(host.marked()) == 1)
    time.sleep(0.5)  # one that had been told to end would be gone by now
    assert len(host.marked()) == 1
    assert relaunch.restore(host.context("stop"))["started"] == []


START_POINTS = [
    ((launch, "_launch"), False),
    ((os, "fork"), False),
    ((os, "waitpid"), False),
    ((launch, "_talk"), False),
    ((launch, "_scope"), False),
    ((launch, "_scope"), True),
    ((launch, "_talk"), True),
    ((launch, "see_it_live"), False),
]
SEEN_STARTED = START_POINTS[-2:]


@pytest.mark.parametrize(
    "point", START_POINTS, ids=lambda point: f"{point[0][1]}-{'after' if point[1] else 'before'}"
)
def test_killed_anywhere_in_a_start_there_is_one_job_after_the_next(host: GpuHost, point: Any) -> None:
    pid, _ = run_job(host)
    stop(host, pid)
    status = in_child(lambda: relaunch.start(host.context("train"), "stop"), point[0], point[1])
    assert os.WIFSIGNALED(status)
    launch.wait_for_starter(os.path.join(host.context().state, "job"), 0)
    # A stub whose starter was killed before it gave its word becomes no job by itself.
    assert len(host.marked()) == (1 if point in SEEN_STARTED else 0)
    relaunch.start(host.context("train"), "stop")
    assert len(host.marked()) == 1


@pytest.mark.parametrize(
    ("name", "after"), [("write_durably", False), ("write_durably", True), ("_become", True)]
)
def test_a_stub_killed_before_it_is_the_job_leaves_the_next_free(
    host: GpuHost, name: str, after: bool
) -> None:
    """The functions named here run in the stub alone, which inherits the patch by its fork."""
    pid, _ = run_job(host)
    stop(host, pid)
    real = getattr(launch, name)

    def killing(*args: Any, **kwargs: Any) -> Any:
        if not after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, name, killing)
        with pytest.raises(Refusal):
            relaunch.start(host.context("train"), "stop")
    assert host.marked() == []
    relaunch.start(host.context("train"), "stop")
    assert len(host.marked()) == 1


def test_the_job_outlives_the_one_that_started_it(host: GpuHost) -> None:
    pid, dump = run_job(host)
    stop(host, pid)
    child = os.fork()
    if child == 0:
        os.setsid()
        capture.os.umask(0)
        relaunch.start(host.context("train"), "stop")
        os._exit(0)
    os.waitpid(child, 0)
    state = dumped(dump, host, other_than=pid)
    assert alive(state["pid"], stat_of(state["pid"])[2])
    assert state["leader"]
    assert stat_of(state["pid"])[1] != child


def test_a_call_that_adopts_orphans_does_not_adopt_the_job(host: GpuHost) -> None:
    pid, dump = run_job(host)
    stop(host, pid)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        launch._adopt_orphans(True)
        relaunch.start(host.context("train"), "stop")
        os.write(writer, b"adopts" if launch._adopt_orphans(True) else b"lost")
        signal.pause()
    os.close(writer)
    try:
        assert os.read(reader, 16) == b"adopts"
        state = dumped(dump, host, other_than=pid)
        assert stat_of(state["pid"])[1] != child
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not host.gone(state["pid"])


# -- starts that go wrong -------------------------------------------------------------------------


def test_a_program_that_is_gone_is_a_failure_and_no_job(host: GpuHost) -> None:
    pid, _ = run_job(host)
    stop(host, pid)
    (host.environment() / "bin" / "python").unlink()
    with pytest.raises(Refusal) as no:
        relaunch.start(host.context("train"), "stop")
    assert no.value.kind == "command"
    assert "No such file" in no.value.message
    assert host.marked() == []


def test_a_job_that_ends_at_once_is_a_failure_with_its_last_words(host: GpuHost) -> None:
    log = host.path("train.log")
    with log.open("ab") as out:
        pid, _ = run_job(host, {"stdout": out, "stderr": out})
    stop(host, pid)
    host.script.write_text("import sys; print('CUDA error: no kernel image', flush=True); sys.exit(3)")
    with pytest.raises(Refusal, match="ended at once: CUDA error: no kernel image") as no:
        relaunch.start(host.context("train"), "stop")
    assert no.value.hint == str(log)


def test_a_job_that_begins_from_zero_is_stopped_at_once_and_not_started_again(host: GpuHost) -> None:
    log, checkpoint = host.path("train.log"), host.path("checkpoint")
    checkpoint.write_text("41200")
    with log.open("ab") as out:
        pid, _ = run_job(host, {"stdout": out, "stderr": out}, step=0, checkpoint=str(checkpoint))
    stop(host, pid)
    assert jobs.captured(host.context(), "stop")["jobs"][0]["steps_seen"] == 41201
    checkpoint.unlink()
    relaunch.start(host.context("train"), "stop")
    with pytest.raises(
        Refusal, match=r"restarted from zero: stopped at step 1 \(it had reached 41201\)"
    ) as no:
        relaunch.settle(host.context("train"), 10.0)
    assert no.value.kind == "verify_failed"
    assert host.marked() == []
    with pytest.raises(Refusal, match="not started again"):
        relaunch.restore(host.context("stop"))
    assert host.marked() == []


def test_a_job_that_begins_from_zero_after_its_start_was_over_is_known_to_later_checks(
    host: GpuHost,
) -> None:
    log, checkpoint = host.path("train.log"), host.path("checkpoint")
    checkpoint.write_text("41200")
    with log.open("ab") as out:
        pid, _ = run_job(host, {"stdout": out, "stderr": out}, step=0, checkpoint=str(checkpoint))
    stop(host, pid)
    checkpoint.unlink()
    relaunch.start(host.context("train"), "stop")
    speed = {"name": "titan", "rate": r"tps: (?P<rate>[0-9]+)", "step": None}

    def said(run: str) -> tuple[Any, Any]:
        job = logs.find_rates(host.context("speed", run=run), [speed])["job"]
        return job["first_step"], job["steps_seen"]

    host.wait(lambda: said("run-1") == (1, 41201))
    # Another run has not started it: it judges what runs, not how it came to run.
    assert said("run-2") == (None, None)


def test_a_job_that_may_begin_from_zero_is_not_judged_by_its_steps(host: GpuHost) -> None:
    log = host.path("train.log")
    log.write_text("step: 41200\nstep: 41201\n")
    with log.open("ab") as out:
        pid, _ = run_job(host, {"stdout": out, "stderr": out}, step=0)
    stop(host, pid)
    relaunch.start(host.context("train"), "stop", guard=False)
    assert jobs.log_of_job(host.context("speed"))["steps_seen"] is None


def test_a_job_that_resumes_settles(host: GpuHost) -> None:
    log, checkpoint = host.path("train.log"), host.path("checkpoint")
    checkpoint.write_text("41200")
    with log.open("ab") as out:
        pid, _ = run_job(host, {"stdout": out, "stderr": out}, step=0, checkpoint=str(checkpoint))
    stop(host, pid)
    relaunch.start(host.context("train"), "stop")
    assert relaunch.settle(host.context("train"), 10.0) == {"at_work": 1, "waiting": 0}
    state = jobs.state(host.context(), "stop")
    assert state["captured"][0]["alive"]
    assert state["started"][0]["first_step"] == 41201
    assert state["from_zero"] is None


# -- described, units, logs -----------------------------------------------------------------------


def test_a_described_job_is_started_where_none_runs_and_not_beside_one(host: GpuHost) -> None:
    cwd, ready = host.path("work"), host.path("state.json")
    cwd.mkdir()
    argv = host.argv(host.environment(), host.options(host.environment(), 0, dump=str(ready)))
    described = {"argv": argv, "cwd": str(cwd), "env": {"A": "1", **host.environ()}}
    (pid,) = relaunch.start(host.context("train"), "stop", described)["started"]
    state = dumped(ready, host)
    assert (state["pid"], state["cwd"], state["environ"]["A"]) == (pid, str(cwd), "1")
    assert state["fds"]["1"] == str(cwd / "fleetfix-job.log")
    other = host.context("train", run="run-2")
    assert relaunch.start(other, "stop", described)["started"] == []


def test_a_described_command_is_for_the_shell(host: GpuHost) -> None:
    command = f'echo "$GREETING" > {host.path("said")}; sleep 60'
    described = {"command": command, "cwd": str(host.root), "env": {"GREETING": "hi", **host.environ()}}
    relaunch.start(host.context("train"), "stop", described)
    assert host.path("said").read_text() == "hi\n"


def test_nothing_captured_and_nothing_described_starts_nothing(host: GpuHost) -> None:
    assert relaunch.start(host.context("train"), "stop") == {"started": [], "already": [], "notes": []}


def test_the_log_of_a_job_begins_where_this_start_began(host: GpuHost) -> None:
    log = host.path("train.log")
    log.write_text("old\n" * 10)
    with log.open("ab") as out:
        pid, dump = run_job(host, {"stdout": out, "stderr": out})
    first = jobs.log_of_job(host.context())
    assert (first["path"], first["offset"], first["pid"]) == (str(log), 0, pid)
    stop(host, pid)
    with log.open("a") as out:
        out.write("the end\n")
    size = log.stat().st_size
    relaunch.start(host.context("train"), "stop")
    started = dumped(dump, host, other_than=pid)["pid"]
    again = jobs.log_of_job(host.context())
    assert (again["offset"], again["pid"], again["key"]) == (size, started, first["key"])
    # A later run knows it from the record of the earlier one.
    assert jobs.log_of_job(host.context(run="run-2"))["offset"] == size
    assert 0 <= again["seconds"] < 60


def test_a_changed_configuration_is_another_job(host: GpuHost) -> None:
    ctx, config = host.context(), host.path("llama.toml")
    config.write_text("seq_len = 2048")

    def key(*argv: str) -> str:
        return jobs.key_of(ctx, ["python", "train.py", *argv], str(host.root), os.getuid(), "/x/train.log")

    first = key("--config", "llama.toml")
    assert key("--config", "llama.toml", "/x/train.log") == first
    assert key("--config=llama.toml") != first
    config.write_text("seq_len = 4096")
    assert key("--config", "llama.toml") != first


def test_no_job_is_no_log_and_no_environment(host: GpuHost) -> None:
    ctx = host.context()
    assert jobs.current(ctx) is None
    assert jobs.log_of_job(ctx) is None
    assert jobs.job_environ(ctx, "stop") is None


def test_what_stands_against_starting_a_job_again_is_found(host: GpuHost) -> None:
    cwd = host.path("work")
    cwd.mkdir()
    uv = host.path("uv")
    uv.symlink_to(PYTHON)
    ready = host.path("state.json")
    spawns = [host.options(host.environment(), 0, dump=str(ready))]
    # `uv run …`, played by a Python that starts the job below it.
    starter = "import subprocess,sys;subprocess.run(sys.argv[2:])"
    child = host.argv(host.environment(), {"spawns": spawns})
    host.start(
        [str(uv), "-c", starter, "run", *child], {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8"}, cwd=cwd
    )
    host.wait(ready.exists)
    cwd.rmdir()
    (job,) = [one for one in jobs.found(host.context())["jobs"] if one["pid"] in host.marked()]
    assert job["uv_run"].startswith(str(uv))
    assert job["cwd_gone"] is True
    assert job["rank_of"] == 8
    assert job["unreadable"] is False
    assert job["processes"] == 3


def ranks(host: GpuHost, count: int, **names: str) -> list[int]:
    """Processes of one command line that differ in variables alone, by N, their number."""
    options = host.options(host.environment(), 0)
    argv = host.argv(host.environment(), options)
    how = [
        {name: value.replace("N", str(number)) for name, value in names.items()} for number in range(count)
    ]
    pids = [host.start(argv, env).pid for env in how]
    host.wait(lambda: {one["pid"] for one in procs.jobs_here()[1]} >= set(pids))
    return pids


def test_ranks_that_differ_in_one_variable_are_each_a_job(host: GpuHost) -> None:
    pids = ranks(host, 4, SHARD="N")
    relaunch.stop(host.context("stop"), [target(pid) for pid in pids], 2.0)
    assert host.marked() == []
    entries = jobs.captured(host.context(), "stop")["jobs"]
    assert sorted(entry["environ"]["SHARD"] for entry in entries) == ["0", "1", "2", "3"]
    answer = relaunch.start(host.context("train"), "stop")
    assert len(answer["started"]) == 4
    assert sorted(host.marked()) == sorted(answer["started"])
    assert all(one["alive"] for one in jobs.state(host.context("train"), "stop")["captured"])
    os.kill(answer["started"][2], signal.SIGKILL)
    host.wait(lambda: len(host.marked()) == 3)
    alive_now = [one["alive"] for one in jobs.state(host.context("train"), "stop")["captured"]]
    assert alive_now == [True, True, False, True]
    assert len(relaunch.start(host.context("train"), "stop")["started"]) == 1


def test_jobs_that_differ_in_nothing_are_each_a_job(host: GpuHost) -> None:
    pids = ranks(host, 2, SHARD="0")
    relaunch.stop(host.context("stop"), [target(pid) for pid in pids], 2.0)
    assert len(jobs.captured(host.context(), "stop")["jobs"]) == 2
    assert len(relaunch.start(host.context("train"), "stop")["started"]) == 2
    assert len(host.marked()) == 2


def test_a_second_attempt_at_a_stop_counts_no_job_twice(host: GpuHost) -> None:
    pids = ranks(host, 2, SHARD="N")
    relaunch.stop(host.context("stop"), [target(pid) for pid in pids], 2.0)
    again = ranks(host, 2, SHARD="N", SSH_TTY="/dev/pts/N")
    relaunch.stop(host.context("stop"), [target(pid) for pid in again], 2.0)
    entries = jobs.captured(host.context(), "stop")["jobs"]
    assert sorted(entry["environ"]["SHARD"] for entry in entries) == ["0", "1"]


def test_a_rank_without_an_agent_is_not_stopped(host: GpuHost) -> None:
    pids = ranks(host, 2, RANK="N", WORLD_SIZE="2")
    found = [one for one in jobs.found(host.context())["jobs"] if one["pid"] in pids]
    assert [one["rank_of"] for one in found] == [2, 2]
    with pytest.raises(Refusal, match="one of 2 workers, and no agent is above it") as no:
        relaunch.stop(host.context("stop"), [target(pid) for pid in pids], 2.0)
    assert no.value.kind == "blocked"
    assert sorted(host.marked()) == sorted(pids)


def test_an_agent_that_is_told_the_world_size_is_no_rank(host: GpuHost) -> None:
    ready = host.path("ready")
    spawns = [host.options(host.environment(), 0, dump=str(ready))]
    agent = host.start(host.argv(host.environment(), {"spawns": spawns}), {"RANK": "0", "WORLD_SIZE": "2"})
    host.wait(ready.exists)
    (found,) = [one for one in jobs.found(host.context())["jobs"] if one["pid"] == agent.pid]
    assert found["rank_of"] is None


def test_a_job_that_was_captured_before_may_end_by_itself_and_is_started_again(host: GpuHost) -> None:
    pids = ranks(host, 2, SHARD="N")
    relaunch.prepare(host.context("stop"), [target(pid) for pid in pids])
    assert sorted(host.marked()) == sorted(pids), "nothing is stopped"
    asked = [target(pid) for pid in pids]
    os.kill(pids[0], signal.SIGKILL)
    host.wait(lambda: host.marked() == [pids[1]])
    relaunch.stop(host.context("stop"), asked, 2.0)
    assert host.marked() == []
    entries = jobs.captured(host.context(), "stop")["jobs"]
    assert sorted(entry["environ"]["SHARD"] for entry in entries) == ["0", "1"]
    assert relaunch.restore(host.context("stop")) == {"started": []}, "it may not have ended on all hosts"
    assert len(relaunch.unprepare(host.context("stop"))["started"]) == 2


def test_a_job_that_ended_before_it_was_captured_is_said(host: GpuHost) -> None:
    (pid,) = ranks(host, 1)
    asked = [target(pid)]
    os.kill(pid, signal.SIGKILL)
    host.wait(lambda: host.marked() == [])
    with pytest.raises(Refusal, match="ended by itself before it was captured") as no:
        relaunch.prepare(host.context("stop"), asked)
    assert no.value.kind == "stale_plan"
    assert jobs.captured(host.context(), "stop") is None


def test_a_capture_that_nothing_came_of_is_dropped_and_a_job_that_ended_meanwhile_runs_again(
    host: GpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaunch, "DYING", 0.1)
    (pid,) = ranks(host, 1)
    relaunch.prepare(host.context("stop"), [target(pid)])
    relaunch.unprepare(host.context("stop"))
    assert jobs.captured(host.context(), "stop") is None
    relaunch.prepare(host.context("stop"), [target(pid)])
    os.kill(pid, signal.SIGKILL)
    host.wait(lambda: host.marked() == [])
    relaunch.unprepare(host.context("stop"))
    assert len(host.marked()) == 1
    assert jobs.captured(host.context(), "stop") is None


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("[titan] INFO - step: 12  loss: 9.1  tps: 10,050", [12]),
        ("iter 41200: loss 2.01, time 22.1ms", [41200]),
        ('{"step": 77, "loss": 2.0}', [77]),
        ("step 1,250/10,000", [1250]),
        ("\x1b[31mstep:  5\x1b[0m", [5]),
        (" iteration      100/     500 | elapsed", [100]),
        ("Loading the checkpoint from checkpoints/step-1500.", []),
        ("steps per epoch 300", []),
        ("warmup_steps: 100", []),
    ],
)
def test_step_counters_are_read_from_the_lines_of_trainers(line: str, steps: list[int]) -> None:
    assert capture.steps_in([capture.ESCAPES.sub("", line)]) == steps


@pytest.mark.parametrize(
    ("first", "seen", "zero"),
    [
        (1, 41200, True),
        (41000, 41200, False),
        (30000, 41200, False),
        (1, 50, False),
        (None, 41200, False),
        (1, None, False),
        (4120, 41200, True),
        (4121, 41200, False),
    ],
)
def test_zero_is_told_from_a_checkpoint(first: int | None, seen: int | None, zero: bool) -> None:
    assert relaunch.from_zero(first, seen) is zero
