"""Which environment is meant: what the job maps, what this run captured, or the path that is given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.remote import ending, environments, procs, relaunch
from fleetfix.remote.api import Refusal, stat_of
from tests.unit.gpu_host import GpuHost


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuHost]:
    monkeypatch.setattr(ending, "RESPAWN_WATCH", 0.0)
    with GpuHost(tmp_path, monkeypatch) as host:
        yield host


def resolve(host: GpuHost, venv: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = environments.resolve(host.context("wheels"), str(venv))
    return found


def test_of_job_is_what_the_job_maps(host: GpuHost) -> None:
    venv = host.environment()
    pid = host.train(venv, how={"cwd": "/"})
    assert resolve(host, "of-job") == {
        "path": str(venv),
        "python": str(venv / "bin" / "python"),
        "site": [str(venv / "lib" / "python3.11" / "site-packages")],
        "uid": os.getuid(),
        "gid": os.getgid(),
        "user": procs.user_name(os.getuid()),
        "kind": "venv",
        "by": f"job {pid}",
        "used_by": [f"job {pid} of {procs.user_name(os.getuid())}"],
    }
    assert environments.find(host.context(), "of-job") == resolve(host, "of-job")


def test_after_the_stop_the_capture_of_this_run_says_it(host: GpuHost) -> None:
    venv = host.environment()
    pid = host.train(venv)
    relaunch.stop(host.context("stop"), [{"pid": pid, "start": stat_of(pid)[2]}], 2.0)
    assert resolve(host, "of-job")["path"] == str(venv)
    assert resolve(host, "of-job")["by"] == "capture of step stop"
    assert resolve(host, venv)["by"] == "given"
    other_run = environments.resolve(host.context("wheels", run="run-2"), "of-job")
    assert other_run["none"] == "nothing here says which environment"


def test_two_environments_in_use_are_named_and_neither_is_taken(host: GpuHost) -> None:
    one, two = host.environment("one"), host.environment("two")
    pids = host.train(one, 0), host.train(two, 1)
    none = resolve(host, "of-job")["none"]
    for venv, pid in zip((one, two), pids, strict=True):
        assert f"{venv} (job {pid} of " in none
    assert resolve(host, two)["by"] == "given"


def test_a_job_that_maps_no_environment_is_named(host: GpuHost) -> None:
    pid = host.train(host.environment(), maps=[])
    assert resolve(host, "of-job")["none"].startswith(f"job {pid} of ")


def test_a_path_that_no_running_job_maps_is_refused_and_the_used_one_named(host: GpuHost) -> None:
    used, idle = host.environment("used"), host.environment("idle")
    assert resolve(host, idle)["path"] == str(idle)
    pid = host.train(used)
    none = resolve(host, idle)["none"]
    assert none.startswith(f"no job uses {idle}: job {pid} of ")
    assert none.endswith(f" uses {used}")
    # Who only looks may look at any, and is told that it is another.
    looked = environments.resolve(host.context("look"), str(idle), to_look=True)
    assert (looked["path"], looked["used_by"]) == (str(idle), [])
    assert looked["beside"] == f"job {pid} of {looked['user']} uses {used}"


def test_a_link_to_the_environment_means_the_environment(host: GpuHost) -> None:
    venv, link = host.environment(), host.path("current")
    link.symlink_to(venv)
    host.train(venv)
    assert resolve(host, link)["path"] == str(venv)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("venv", "not an absolute path"),
        ("/nowhere/venv", "no environment at /nowhere/venv"),
        ("/proc", "no Python environment"),
    ],
)
def test_what_is_no_environment_is_refused_in_words(host: GpuHost, given: str, reason: str) -> None:
    found = resolve(host, given)
    assert reason in found["none"]
    assert found["hint"]


def test_the_maker_of_an_environment_is_told(host: GpuHost) -> None:
    venv, conda = host.environment("venv"), host.environment("conda")
    (conda / "pyvenv.cfg").unlink()
    (conda / "conda-meta").mkdir()
    assert (resolve(host, venv)["kind"], resolve(host, conda)["kind"]) == ("venv", "conda")
    (conda / "conda-meta").rmdir()
    assert resolve(host, conda)["kind"] == "system"


def test_a_container_is_told_by_its_job(host: GpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procs, "in_container", lambda *_: True)
    host.train(host.environment())
    assert resolve(host, "of-job")["kind"] == "container"


def test_lib64_that_is_a_link_to_lib_is_one_site(host: GpuHost) -> None:
    venv = host.environment()
    (venv / "lib64").symlink_to("lib")
    assert len(resolve(host, venv)["site"]) == 1


def refusal(venv: Path, back: bool = False) -> str | None:
    try:
        environments.refuse_in_use(str(venv), back)
    except Refusal as no:
        return f"{no.kind}: {no.message}"
    return None


def test_a_process_without_a_gpu_that_maps_the_environment_is_in_the_way(host: GpuHost) -> None:
    venv = host.environment()
    assert refusal(venv) is None
    pid = host.train(venv, gpu=None)
    who = f"{procs.user_name(os.getuid())}'s {procs.comm_of(pid)} (pid {pid})"
    assert environments.others_of(str(venv)) == [who]
    assert refusal(venv) == f"blocked: {who} uses {venv}"
    assert refusal(venv, back=True) is None


def test_a_program_of_the_environment_that_has_mapped_nothing_yet_is_in_the_way(host: GpuHost) -> None:
    venv = host.environment()
    pid = host.train(venv, gpu=None, maps=[])
    assert f"(pid {pid})" in (refusal(venv) or "")
    assert environments.others_of(str(host.environment("other"))) == []


def test_what_belongs_to_the_gpu_job_is_no_other(host: GpuHost) -> None:
    venv = host.environment()
    dump = host.path("child")
    child = {"maps": [host.library(venv)], "dump": str(dump)}
    pid = host.train(venv, spawns=[child])
    host.wait(dump.exists)
    assert environments.others_of(str(venv)) == []
    assert f"job {pid} of" in (refusal(venv) or "")
