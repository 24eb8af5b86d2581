"""Who holds a GPU, which environment it maps, and which job it belongs to: with real processes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.remote import jobs, procs
from fleetfix.remote.api import stat_of
from tests.unit.gpu_host import PYTHON, GpuHost

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to own files and to be other users")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuHost]:
    with GpuHost(tmp_path, monkeypatch) as host:
        yield host


def holders(host: GpuHost) -> dict[int, dict]:
    return {
        one["pid"]: one for one in procs.holders(host.context())["processes"] if one["pid"] in host.marked()
    }


def job_of(host: GpuHost, pid: int) -> dict:
    return next(job for job in procs.jobs_here()[1] if job["pid"] == pid)


def test_a_process_that_has_a_gpu_open_is_found_with_its_environment(host: GpuHost) -> None:
    venv = host.environment()
    pid = host.train(venv, gpu=1, how={"cwd": "/tmp"})
    found = holders(host)[pid]
    assert found["gpus"] == [1]
    assert found["environment"] == str(venv)
    assert found["start"] == stat_of(pid)[2]
    assert (found["uid"], found["cwd"], found["exe"]) == (os.getuid(), "/tmp", PYTHON)
    assert found["argv"][:2] == [str(venv / "bin" / "python"), str(host.script)]
    assert found["launcher"]["pid"] == pid


def test_the_control_devices_alone_hold_no_gpu(host: GpuHost) -> None:
    control = [str(host.path("dev/nvidiactl")), str(host.path("dev/nvidia-uvm"))]
    host.train(host.environment(), gpu=None, maps=[], devices=control)
    assert holders(host) == {}


def test_a_mapped_driver_library_counts_without_an_open_device(host: GpuHost) -> None:
    driver = host.path("libcuda.so.590.48.01")
    driver.write_bytes(b"\0" * 4096)
    pid = host.train(host.environment(), gpu=None, maps=[str(driver)])
    assert holders(host)[pid]["gpus"] == []


def test_a_monitor_of_counters_is_seen_and_is_no_job(host: GpuHost) -> None:
    pid = host.train(host.environment(), gpu=None, devices=[host.device(0), host.device(1)])
    assert holders(host)[pid]["computes"] is False
    assert [job for job in procs.jobs_here()[1] if job["pid"] == pid] == []
    found = jobs.found(host.context())
    assert [one["pid"] for one in found["monitors"] if one["pid"] in host.marked()] == [pid]
    trainer = host.train(host.environment(), gpu=1)
    assert holders(host)[trainer]["computes"] is True
    assert jobs.live_job(host.context())["pid"] == trainer


def test_a_monitor_within_a_job_ends_with_it_and_adds_no_gpu(host: GpuHost) -> None:
    ready = host.path("ready")
    watching = {"devices": [host.device(0), host.device(1)], "dump": str(ready)}
    pid = host.train(host.environment(), gpu=0, spawns=[watching])
    host.wait(ready.exists)
    job = job_of(host, pid)
    assert (job["gpus"], len(job["holders"])) == ([0], 2)


@pytest.mark.parametrize("name", ["a b", ") S 1 (", "x) R 7"])
def test_any_process_name_is_read_right(host: GpuHost, name: str) -> None:
    pid = host.train(host.environment(), name=name)
    found = holders(host)[pid]
    assert found["comm"] == name
    assert (found["ppid"], found["launcher"]["pid"]) == (os.getpid(), pid)


def test_workers_in_sessions_of_their_own_belong_to_their_launcher(host: GpuHost) -> None:
    venv = host.environment()
    ready = [host.path("worker-0"), host.path("worker-1")]
    spawns = [host.options(venv, gpu, dump=str(path)) for gpu, path in enumerate(ready)]
    agent = host.train(venv, gpu=None, maps=[], spawns=spawns)
    host.wait(lambda: all(path.exists() for path in ready))
    found = holders(host)
    assert len(found) == 2
    assert {one["launcher"]["pid"] for one in found.values()} == {agent}
    job = job_of(host, agent)
    assert (job["gpus"], job["environments"]) == ([0, 1], [str(venv)])


def test_a_script_is_part_of_the_job_and_an_interactive_shell_is_not(host: GpuHost) -> None:
    ready = host.path("ready")
    options = host.options(host.environment(), 0, dump=str(ready))
    argv = " ".join(f"'{word}'" for word in host.argv(host.environment(), options))
    script = host.path("run.sh")
    script.write_text(f"{argv}\ntrue\n")
    shell = host.start(["bash"], stdin=-1)
    assert shell.stdin is not None
    shell.stdin.write(f"bash {script}\n".encode())
    shell.stdin.flush()
    host.wait(ready.exists)
    (found,) = holders(host).values()
    assert found["launcher"]["argv"] == ["bash", str(script)]
    assert found["above"]["pid"] == shell.pid


def test_a_loop_of_a_script_is_the_launcher(host: GpuHost) -> None:
    ready = host.path("ready")
    options = host.options(host.environment(), 0, dump=str(ready))
    argv = " ".join(f"'{word}'" for word in host.argv(host.environment(), options))
    loop = host.start(["sh", "-c", f"while true; do {argv}; done"])
    host.wait(ready.exists)
    (found,) = holders(host).values()
    assert found["launcher"]["pid"] == loop.pid


def test_a_job_below_a_supervisor_ends_there_and_names_it(host: GpuHost) -> None:
    venv, ready = host.environment(), host.path("ready")
    options = {"spawns": [host.options(venv, 0, dump=str(ready))]}
    host.start(["supervisord", *host.argv(venv, options)[1:]], executable=PYTHON)
    host.wait(ready.exists)
    ((pid, found),) = holders(host).items()
    assert found["launcher"]["pid"] == pid
    assert job_of(host, pid)["supervisor"]["argv"][0] == "supervisord"


def test_the_environment_with_torch_wins_over_one_beside_it(host: GpuHost) -> None:
    venv, other = host.environment(), host.environment("a-other")
    libraries = [Path(host.library(other)).parent.parent.parent / f"x{n}.so" for n in range(5)]
    for library in libraries:
        library.write_bytes(b"\0" * 4096)
    pid = host.train(venv, maps=[*map(str, libraries), host.library(venv)])
    assert procs.environment_of(pid) == str(venv)


def test_a_library_that_was_replaced_still_names_its_environment(host: GpuHost) -> None:
    venv = host.environment()
    pid = host.train(venv)
    os.unlink(host.library(venv))
    assert any(path.endswith(" (deleted)") for path in procs.mapped(pid))
    assert procs.environment_of(pid) == str(venv)


def test_a_data_worker_whose_rank_was_killed_is_an_orphan(host: GpuHost) -> None:
    worker = host.path("worker")
    forks = [{"name": "pt_data_worker", "dump": str(worker)}]
    pid = host.train(host.environment(), forks=forks)
    host.wait(worker.exists)
    assert not job_of(host, pid)["orphan"]
    os.kill(pid, signal.SIGKILL)
    (left,) = host.wait(lambda: [one for one in host.marked() if one != pid and stat_of(one)[1] != pid])
    assert job_of(host, left)["orphan"]


def test_a_job_that_outlived_its_shell_is_no_orphan(host: GpuHost) -> None:
    ready = host.path("ready")
    argv = host.argv(host.environment(), host.options(host.environment(), 0, dump=str(ready)))
    shell = host.start(["sh", "-c", '"$@" & exec true', "sh", *argv])
    host.wait(ready.exists)
    shell.wait()
    ((pid, found),) = host.wait(lambda: holders(host)).items()
    assert found["launcher"]["pid"] == pid
    assert not job_of(host, pid)["orphan"]


@root_only
def test_services_that_may_keep_a_gpu_are_left_out_only_when_their_program_is_roots(host: GpuHost) -> None:
    program = host.path("nvidia-persistenced")
    shutil.copy(PYTHON, program)
    venv, ready = host.environment(), host.path("ready")
    host.start([str(program), *host.argv(venv, host.options(venv, 0, dump=str(ready)))[1:]])
    host.wait(ready.exists)
    assert holders(host) == {}
    os.chown(program, 65534, 65534)
    assert len(holders(host)) == 1


@root_only
def test_a_view_that_is_not_whole_says_so(host: GpuHost) -> None:
    host.train(host.environment())
    assert procs.survey()[0] is True
    host.path("as-nobody").mkdir(mode=0o777)
    assert host.context().as_user(65534, lambda: procs.survey()[0]) is False


def test_a_view_without_the_processes_of_others_is_not_whole(
    host: GpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = host.train(host.environment())
    every, real, devices = procs.all_processes, procs._maps, procs.devices_of
    monkeypatch.setattr(procs, "_maps", lambda one: b"" if one != pid else real(one))
    monkeypatch.setattr(procs, "devices_of", lambda one: (set(), False) if one != pid else devices(one))
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    assert procs.survey()[0] is True
    monkeypatch.setattr(procs, "all_processes", lambda: {k: v for k, v in every().items() if k != 1})
    complete, found = procs.survey()
    assert (complete, [one["pid"] for one in found]) == (False, [pid])


def test_the_runner_and_all_above_it_are_no_job() -> None:
    own = procs.ancestors()
    assert {os.getpid(), os.getppid()} <= own


def test_a_reply_fits_into_its_frame(host: GpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"argv": ["x" * 200] * 20, "cgroup": "y" * 200, "uid": 0, "pid": 1}
    monkeypatch.setattr(procs, "survey", lambda: (True, [dict(one) for _ in range(800)]))
    found = procs.holders(host.context())
    assert found["left_out"] > 0
    assert len(found["processes"]) + found["left_out"] == 800
    assert len(procs.json.dumps(found)) < 64 * 1024


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["-bash"], True),
        (["bash"], True),
        (["/usr/bin/zsh", "-l"], True),
        (["bash", "--rcfile", "x", "-i"], True),
        (["fish", "--login"], True),
        (["bash", "run.sh"], False),
        (["sh", "-c", "python train.py"], False),
        (["bash", "-lc", "torchrun"], False),
        (["bash", "--norc"], True),
        (["python", "train.py"], False),
        ([], False),
    ],
)
def test_shells_that_are_typed_into_are_told_from_scripts(argv: list[str], typed: bool) -> None:
    assert procs.interactive_shell(argv) is typed


@pytest.mark.parametrize(
    ("cgroup", "environ", "said"),
    [
        ("/system.slice/slurmstepd.scope/job_123/step_0/user/task_0", {}, "Slurm job 123"),
        ("/slurm/uid_1000/job_77/step_batch", None, "Slurm job 77"),
        ("/kubepods.slice/kubepods-burstable.slice/cri-containerd-ab.scope", {}, "a Kubernetes pod"),
        ("/user.slice", {"SLURM_JOB_ID": "9"}, "Slurm job 9"),
        ("/user.slice", {"PBS_JOBID": "5.node"}, "PBS job 5.node"),
        ("/user.slice/user-0.slice/session-4.scope", {"HOME": "/root"}, None),
    ],
)
def test_a_schedulers_job_is_named(cgroup: str, environ: dict | None, said: str | None) -> None:
    assert procs.scheduler_of(cgroup, environ) == said


@pytest.mark.parametrize(
    ("cgroup", "units"),
    [
        ("/system.slice/train.service", ("train.service", None)),
        ("/system.slice/system-train.slice/train@3.service", ("train@3.service", None)),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/train.service", (None, "train.service")),
        ("/user.slice/user-1000.slice/session-4.scope", (None, None)),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope", (None, None)),
        ("/system.slice/ssh.service", (None, None)),
        ("/system.slice/cron.service", (None, None)),
        ("/system.slice/slurmd.service", (None, None)),
        ("/", (None, None)),
    ],
)
def test_a_unit_is_named_only_where_it_is_the_jobs_own(cgroup: str, units: tuple) -> None:
    assert procs.units_of(cgroup) == units


@pytest.mark.parametrize(
    ("cgroup", "own", "container"),
    [
        ("/system.slice/docker-0123.scope", "/system.slice/ssh.service", True),
        ("/docker/0123", "/docker/0123", False),
        ("/machine.slice/libpod-ab.scope", "/", True),
        ("/user.slice", "/user.slice", False),
    ],
)
def test_a_container_is_one_only_from_outside(cgroup: str, own: str, container: bool) -> None:
    assert procs.in_container(os.getpid(), cgroup, own) is container


@given(st.lists(st.text(st.characters(exclude_characters="\0\n"), min_size=1), max_size=8))
def test_no_path_breaks_the_search_for_the_environment(paths: list[str]) -> None:
    found = procs.environment_in(["/" + path for path in paths])
    assert found is None or any(path.startswith(found[1:]) for path in paths)
