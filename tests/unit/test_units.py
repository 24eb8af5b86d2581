"""Jobs that systemd runs, and jobs that only live inside of a unit: with a stand-in systemctl.

The stand-in knows one unit: it starts and ends real processes, and says which is the main one.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.remote import api, capture, ending, jobs, launch, procs, relaunch, units
from fleetfix.remote.api import Refusal, stat_of
from tests.unit.gpu_host import PYTHON, GpuHost

UNIT = "train.service"
CGROUP = "/system.slice/" + UNIT

# A stand-in for systemd's own: `show`, `start` and `stop` of one unit.
SYSTEMCTL = """
import json, os, signal, subprocess, sys, time
state = json.load(open(HERE + "/unit.json"))
def living():
    try:
        pid = int(open(HERE + "/main").read())
        stat = open("/proc/%d/stat" % pid).read()
    except (OSError, ValueError):
        return 0
    return 0 if stat[stat.rindex(")") + 2] in "ZX" else pid
with open(HERE + "/asked", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "show":
    print("MainPID=%d" % living())
elif sys.argv[1] == "start" and not living():
    log = open(HERE + "/train.log", "ab")
    job = subprocess.Popen(state["argv"], env=state["env"], cwd=HERE, start_new_session=True,
                           stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    with open(HERE + "/main", "w") as file:
        file.write(str(job.pid))
elif sys.argv[1] == "stop":
    pid = living()
    while pid and living():
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.02)
"""


class UnitHost(GpuHost):
    """A host of one unit; every process of a job of it lies in that unit's cgroup."""

    def install(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        bin = self.path("bin")
        bin.mkdir()
        (bin / "systemctl").write_text(f"#!{PYTHON}\nHERE = {str(self.root)!r}\n{SYSTEMCTL}")
        (bin / "systemctl").chmod(0o755)
        monkeypatch.setattr(api, "PATH", f"{bin}:/usr/bin:/bin")
        argv = self.argv(self.environment(), self.options(self.environment(), 0, **options))
        self.path("unit.json").write_text(json.dumps({"argv": argv, "env": self.environ()}))
        monkeypatch.setattr(procs, "cgroup_of", lambda pid: CGROUP if pid in self.marked() else "/x")

    def systemctl(self, verb: str) -> None:
        relaunch._systemctl(self.context(), verb, UNIT, 10)

    def asked(self) -> list[str]:
        """What systemctl was told to do, questions left out."""
        lines = self.path("asked").read_text().splitlines() if self.path("asked").exists() else []
        return [line for line in lines if not line.startswith("show")]

    def run(self) -> dict[str, Any]:
        """Start the unit, and return its job once that holds its GPU."""
        self.systemctl("start")
        self.path("asked").unlink()
        return self.job()

    def job(self) -> dict[str, Any]:
        """The only GPU job of this host, once there is one."""

        def here() -> dict[str, Any] | None:
            return next((one for one in procs.jobs_here()[1] if one["pid"] in self.marked()), None)

        found: dict[str, Any] = self.wait(here)
        return found


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UnitHost]:
    monkeypatch.setattr(ending, "RESPAWN_WATCH", 0.2)
    monkeypatch.setattr(launch, "SETTLE", 0.3)
    with UnitHost(tmp_path, monkeypatch) as host:
        yield host


def target(job: dict[str, Any]) -> dict[str, int]:
    return {"pid": job["pid"], "start": job["start"]}


# -- whose unit it is -----------------------------------------------------------------------------


def test_a_unit_is_the_jobs_own_where_the_job_is_its_main_process(
    host: UnitHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.install(monkeypatch)
    job = host.run()
    assert (job["unit"], job["inside"]) == (UNIT, None)


def test_a_job_inside_somebodys_unit_is_not_that_unit(
    host: UnitHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.install(monkeypatch)
    main = host.run()
    other = host.train(host.environment("other"), gpu=1)
    job = next(one for one in procs.jobs_here()[1] if one["pid"] == other)
    assert (job["unit"], job["inside"]) == (None, "unit train.service")
    (found,) = [one for one in jobs.found(host.context())["jobs"] if one["pid"] == other]
    assert found["inside"] == "unit train.service"
    with pytest.raises(Refusal, match=r"runs inside unit train\.service") as no:
        relaunch.stop(host.context("stop"), [target(job)], 1.0)
    assert no.value.kind == "blocked"
    assert not host.gone(other)
    assert not host.gone(main["pid"])
    assert host.asked() == []


def test_without_an_answer_of_systemd_only_the_one_top_process_is_the_units(
    host: UnitHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.install(monkeypatch)
    ready = host.path("ready")
    options = host.options(host.environment(), 0, dump=str(ready))
    # As a child of init: a script that leaves its job behind.
    argv = " ".join(f"'{word}'" for word in host.argv(host.environment(), options))
    host.start(["sh", "-c", f"{argv} & exec true"])
    host.wait(ready.exists)
    host.path("bin/systemctl").write_text("#!/bin/sh\nexit 1\n")
    host.wait(lambda: stat_of(host.job()["pid"])[1] == 1)
    assert host.job()["unit"] == UNIT
    host.start(["sleep", "60"])  # a second top process: which one is the unit's?
    assert (host.job()["unit"], host.job()["inside"]) == (None, "unit train.service")


@pytest.mark.parametrize("name", ["jupyter-lab", "gitlab-runner", "Runner.Worker"])
def test_what_runs_the_programs_of_its_users_is_no_part_of_their_job(host: UnitHost, name: str) -> None:
    ready = host.path("ready")
    options = {"name": name[:15], "spawns": [host.options(host.environment(), 0, dump=str(ready))]}
    above = host.start(host.argv(host.environment(), options))
    host.wait(ready.exists)
    job = host.job()
    assert job["pid"] != above.pid
    assert job["inside"] == name


def test_an_ide_is_known_by_its_program(host: UnitHost) -> None:
    program = host.path("code-server/lib/node")
    program.parent.mkdir(parents=True)
    program.symlink_to(PYTHON)
    ready = host.path("ready")
    options = {"spawns": [host.options(host.environment(), 0, dump=str(ready))]}
    host.start([str(program), *host.argv(host.environment(), options)[1:]])
    host.wait(ready.exists)
    assert host.job()["inside"] == "code-server"


# -- stopped and started by it ----------------------------------------------------------------------


def test_a_units_job_is_stopped_and_started_by_its_unit(
    host: UnitHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.install(monkeypatch)
    job = host.run()
    relaunch.stop(host.context("stop"), [target(job)], 2.0)
    assert host.asked() == ["stop " + UNIT]
    assert host.marked() == []
    answer = relaunch.start(host.context("train"), "stop")
    (pid,) = answer["started"]
    assert host.asked()[-1] == "start " + UNIT
    (record,) = jobs.records(host.context())
    assert (record["pid"], record["start"], record["unit"]) == (pid, stat_of(pid)[2], UNIT)
    assert relaunch.start(host.context("train"), "stop")["already"] == [pid]
    assert relaunch.settle(host.context("train"), 5.0) == {"at_work": 1, "waiting": 0}


def test_the_start_of_a_unit_is_undone_by_stopping_it_and_its_stop_by_starting_it(
    host: UnitHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.install(monkeypatch)
    relaunch.stop(host.context("stop"), [target(host.run())], 2.0)
    (pid,) = relaunch.start(host.context("train"), "stop")["started"]
    host.path("asked").unlink()
    assert relaunch.unstart(host.context("train"), step="stop")["ended"] == [pid]
    assert host.asked() == ["stop " + UNIT]
    assert host.marked() == []
    (back,) = relaunch.restore(host.context("stop"))["started"]
    assert host.marked() == [back]
    # What undo has brought back is not ended by another undo of the start.
    assert host.job()["unit"] == UNIT


def test_a_units_start_that_was_killed_before_its_record_can_be_undone(
    host: UnitHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.install(monkeypatch)
    relaunch.stop(host.context("stop"), [target(host.run())], 2.0)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "keep_record", killed)
        with pytest.raises(KeyboardInterrupt):
            relaunch.start(host.context("train"), "stop")
    assert len(host.marked()) == 1
    relaunch.unstart(host.context("train"))
    assert host.marked() == []


def test_a_unit_that_begins_from_zero_is_stopped_by_its_unit(
    host: UnitHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = host.path("checkpoint")
    checkpoint.write_text("41200")
    host.install(monkeypatch, step=0, checkpoint=str(checkpoint))
    job = host.run()
    host.wait(lambda: (capture.last_step(str(host.path("train.log"))) or 0) > 41200)
    relaunch.stop(host.context("stop"), [target(job)], 2.0)
    checkpoint.unlink()
    relaunch.start(host.context("train"), "stop")
    host.path("asked").unlink()
    with pytest.raises(Refusal, match="restarted from zero"):
        relaunch.settle(host.context("train"), 10.0)
    assert host.asked() == ["kill --signal=SIGKILL " + UNIT, "stop " + UNIT]
    assert host.marked() == []


def test_a_unit_that_fails_at_once_is_a_failure(host: UnitHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.install(monkeypatch)
    relaunch.stop(host.context("stop"), [target(host.run())], 2.0)
    host.script.write_text("import sys; sys.exit(3)")
    with pytest.raises(Refusal) as no:
        relaunch.start(host.context("train"), "stop")
    assert no.value.kind == "command"


def test_the_answer_of_systemd_is_a_number_or_none(host: UnitHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.install(monkeypatch)
    assert units.main_pid(UNIT) == 0
    job = host.run()
    assert units.main_pid(UNIT) == job["pid"]
    monkeypatch.setattr(api, "PATH", str(host.path("nowhere")))
    assert units.main_pid(UNIT) is None
    os.kill(job["pid"], signal.SIGKILL)
