"""Nights of an operator, told from the first command to the last; the first of them has sixteen hosts.

What is true on a host is asked of `independent`, which shares no code with fleetfix. From the fourth on
the nights are on one fleet, and each has hosts of its own there.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from fleetfix.lab.template import FIRST_STEP
from tests.fleet import independent
from tests.fleet.conftest import Make, Site, said, step_began, until

pytestmark = pytest.mark.fleet

ALICE = "alice" if os.geteuid() == 0 else "root"
MENDED = "ok 12.8"


@pytest.fixture(scope="module")
def fleet(shared_site: Make) -> Site:
    """Sixteen hosts; gpu02 is healthy, all others are contaminated."""
    return shared_site("gpu[01-16]", contaminated=[f"gpu{n:02}" for n in range(1, 17) if n != 2])


def mend(hosts: str, *more: str) -> tuple[str, ...]:
    """The command that mends these hosts, with events on stdout."""
    return ("run", "purge-cu13", "--hosts", hosts, "-i", "lab", "--yes", "--json", *more)


def mended(fleet: Site, host: str) -> bool:
    """Whether an environment is as its packages say, without a wheel of CUDA 13, and loads."""
    pid = fleet.pid(host)
    foreign = [name for name in independent.distributions(pid) if name.endswith("cu13")]
    whole = independent.damaged(pid) == [] and foreign == ["nixl-cu13"]
    return whole and independent.torch_imports(pid) == MENDED


def test_night_2_one_job_over_two_nodes_and_a_controller_that_dies_while_it_is_stopped(
    site: Make, tmp_path: Path
) -> None:
    hosts = ("gpu01", "gpu02")
    pair = site("gpu[01-02]", contaminated=["gpu01"], spanning=hosts)
    old, healthy = {host: pair.job(host) for host in hosts}, pair.files("gpu02")
    process = pair.start(*mend("gpu[01-02]"))
    run = step_began(process, "wheels")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert [independent.jobs(pair.pid(host)) for host in hosts] == [[], []], (
        "a job lives on both or on none"
    )
    elsewhere = Site(pair.lab, tmp_path)
    taken = elsewhere("resume", run, "--hosts", "gpu[01-02]", "-i", pair.inventory, "--yes", "--json")
    assert (taken.exit, taken.outcomes) == (0, dict.fromkeys(hosts, "changed")), taken.told
    assert mended(pair, "gpu01")
    for host in hosts:
        new = pair.job(host)
        assert (new.argv, new.environ, new.cwd) == (old[host].argv, old[host].environ, old[host].cwd)
        assert min(independent.first_steps(pair.pid(host))) >= FIRST_STEP, "from their checkpoint"
        assert pair.wait_for_speed(host, 19_000, 21_000)
    assert pair.files("gpu02") == healthy, "stopped because the job spans it, and nothing more"


def test_night_3_a_shared_environment_is_mended_once_and_taken_back_once(site: Make) -> None:
    hosts = ("gpu01", "gpu02")
    pair = site("gpu[01-02]", shared=[independent.VENV])
    before = {path: seen for path, seen in pair.files("gpu01").items() if path.startswith(independent.VENV)}
    alone = pair.run("gpu01")
    assert (alone.exit, alone.outcomes) == (2, {"gpu01": "blocked"}), alone.told
    assert f"{independent.VENV} is shared with gpu02" in alone.finished("gpu01")["reason"]
    ran = pair.run("gpu[01-02]")
    assert (ran.exit, ran.outcomes) == (0, dict.fromkeys(hosts, "changed")), ran.told
    assert [one["host"] for one in ran.of("change_started") if one["step"] == "wheels"] == ["gpu01"]
    assert mended(pair, "gpu01")
    assert mended(pair, "gpu02")
    jobs = {host: pair.job(host) for host in hosts}
    back = pair("rollback", ran.run_id, "-i", pair.inventory, "--yes", "--json")
    assert (back.exit, back.outcomes) == (0, dict.fromkeys(hosts, "rolled_back")), back.told
    for host in hosts:
        after = {path: seen for path, seen in pair.files(host).items() if path.startswith(independent.VENV)}
        assert after == before
        new = pair.job(host)
        assert new.pid != jobs[host].pid, "started anew, on what is mapped now"
        assert (new.argv, new.environ, new.cwd) == (jobs[host].argv, jobs[host].environ, jobs[host].cwd)


def test_night_4_a_scheduler_node_with_somebodys_job(fleet: Site) -> None:
    fleet.lab.break_host("gpu01", "slurm_node")
    fleet.wait_for_speed("gpu01", 12_000, 14_000)
    job, files = fleet.job("gpu01"), fleet.files("gpu01")
    ran = fleet.run("gpu[01-02]", "--max-unreachable", "1")
    assert (ran.exit, ran.outcomes) == (2, {"gpu01": "blocked", "gpu02": "ok"}), ran.told
    shown = fleet("show", ran.run_id).out
    assert f"gpu01: stop: {ALICE}'s job" in shown
    assert "is Slurm job 4711" in shown
    assert (fleet.job("gpu01"), fleet.files("gpu01")) == (job, files), "nobody touched it"


def test_night_5_somebody_uninstalled_the_packages_and_the_job_is_dead(fleet: Site) -> None:
    hosts = ("gpu03", "gpu11")
    for host in hosts:
        fleet.lab.break_host(host, "naive_purge")
        assert independent.damaged(fleet.pid(host))
        assert "ImportError" in independent.torch_imports(fleet.pid(host))
        assert independent.jobs(fleet.pid(host)) == []
    at_first = fleet.run("gpu03,gpu11")
    assert (at_first.exit, at_first.outcomes) == (2, dict.fromkeys(hosts, "blocked")), at_first.told
    assert "which environment" in at_first.finished("gpu03")["reason"]
    for host in hosts:
        fleet.set_vars(host, venv=independent.VENV)
    fleet.set_vars("gpu03", job=TRAINING)
    ran = fleet.run("gpu03,gpu11", "--canary", "0", "--batch", "100%")
    assert (ran.exit, ran.outcomes) == (0, dict.fromkeys(hosts, "changed")), ran.told
    (repair,) = [one for one in ran.of("step_planned") if (one["host"], one["step"]) == ("gpu11", "wheels")]
    assert "4 packages" in repair["changes"][0]["summary"]
    for host in hosts:
        assert mended(fleet, host)
    assert fleet.job("gpu03").argv[1:] == tuple(TRAINING["argv"])
    assert min(independent.first_steps(fleet.pid("gpu03"))) >= FIRST_STEP, "from its checkpoint"
    assert fleet.wait_for_speed("gpu03", 19_000, 21_000)
    assert independent.jobs(fleet.pid("gpu11")) == [], "no job is invented"


TRAINING = {
    "argv": [
        f"{independent.VENV}/bin/torchrun",
        "--nproc-per-node=2",
        "train.py",
        "--config",
        "llama3-8b.toml",
    ],
    "cwd": "/opt/train",
    "log": "/var/log/train/train.log",
}


def test_night_6_three_kinds_of_sick_hosts_at_once(fleet: Site) -> None:
    sick = {"gpu04": "nvidia_smi_hangs", "gpu05": "driver_mismatch", "gpu06": "vanish"}
    for host, fault in sick.items():
        fleet.lab.break_host(host, fault)
    before = {host: (fleet.job(host), fleet.files(host)) for host in sick}
    ran = fleet.run("gpu[04-07]", "--max-unreachable", "3")
    outcomes = {"gpu04": "blocked", "gpu05": "blocked", "gpu06": "unreachable", "gpu07": "changed"}
    assert (ran.exit, ran.outcomes) == (2, outcomes), ran.told
    assert "nvidia-smi" in ran.finished("gpu04")["reason"]
    assert "nothing new would start" in ran.finished("gpu05")["reason"]
    assert mended(fleet, "gpu07")
    assert {host: (fleet.job(host), fleet.files(host)) for host in sick} == before


def test_night_7_the_job_runs_in_a_container(fleet: Site) -> None:
    fleet.lab.break_host("gpu08", "container_job")
    job, files = fleet.lab.job("gpu08"), fleet.files("gpu08")
    ran = fleet.run("gpu08")
    assert (ran.exit, ran.outcomes) == (2, {"gpu08": "blocked"}), ran.told
    reason = ran.finished("gpu08")["reason"]
    assert "container image" in reason
    assert "mend the image and start the container again" in reason
    assert (fleet.lab.job("gpu08"), fleet.files("gpu08")) == (job, files)


def test_night_8_the_controllers_network_is_lost_and_the_run_taken_up_elsewhere(
    fleet: Site, tmp_path: Path
) -> None:
    hosts = ("gpu12", "gpu13", "gpu16")
    named = ",".join(hosts)
    old = {host: fleet.job(host) for host in hosts}
    process = fleet.start(*mend(named, "--canary", "0", "--batch", "100%"))
    run = step_began(process, "wheels")
    for host in hosts:
        fleet.lab.break_host(host, "vanish")
    until(lambda: said(process, "network_lost"), "the run to see that it is its own network")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    for host in hosts:
        fleet.lab.heal(host)
    elsewhere = Site(fleet.lab, tmp_path)
    taken = elsewhere("resume", run, "--hosts", named, "-i", fleet.inventory, "--yes", "--json")
    assert (taken.exit, taken.outcomes) == (0, dict.fromkeys(hosts, "changed")), taken.told
    assert not [one for one in taken.of("change_started") if one["step"] in ("parts", "stop")], (
        "done before"
    )
    for host in hosts:
        assert mended(fleet, host)
        new = fleet.job(host)
        assert (new.argv, new.environ, new.cwd) == (old[host].argv, old[host].environ, old[host].cwd)
        assert min(independent.first_steps(fleet.pid(host))) >= FIRST_STEP, "from its checkpoint"
        assert fleet.wait_for_speed(host, 19_000, 21_000)
    twice = elsewhere("resume", run, "--yes")
    assert twice.exit == 0, twice.out + twice.err
    assert "nothing to resume" in twice.out + twice.err


def test_night_9_the_operator_interrupts_while_the_canarys_job_is_stopped(fleet: Site) -> None:
    untouched = fleet.job("gpu15"), fleet.files("gpu15")
    process = fleet.start(*mend("gpu[14-15]"))
    run = step_began(process, "idle")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert fleet.job("gpu14"), "it went on until training ran again"
    assert (fleet.job("gpu15"), fleet.files("gpu15")) == untouched
    ends = [json.loads(line)["event"] for line in out.splitlines() if '"host_finished"' in line]
    assert {one["host"]: one["outcome"] for one in ends} == {"gpu14": "cancelled", "gpu15": "not_started"}
    shown = fleet("show", run).out
    assert f"fleetfix resume {run}" in shown
    assert "JOB STOPPED" not in shown
    taken = fleet("resume", run, "-i", fleet.inventory, "--yes", "--json")
    assert (taken.exit, taken.outcomes) == (0, {"gpu14": "changed", "gpu15": "changed"}), taken.told
    assert mended(fleet, "gpu14")
    assert mended(fleet, "gpu15")


def test_night_10_a_host_changed_between_the_plan_and_its_apply(fleet: Site, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    plan = ("plan", "purge-cu13", "--hosts", "gpu[09-10]", "--max-unreachable", "1", "--out", str(saved))
    told = fleet(*plan, "-i", fleet.inventory)
    assert told.exit == 0, told.err
    damage(fleet, "gpu10")
    job, files = fleet.job("gpu10"), fleet.files("gpu10")
    ran = fleet("apply", str(saved), "--yes", "--json")
    assert (ran.exit, ran.outcomes) == (2, {"gpu09": "changed", "gpu10": "blocked"}), ran.told
    assert ran.finished("gpu10")["failure"]["kind"] == "stale_plan"
    assert "the host changed since the plan" in ran.finished("gpu10")["reason"]
    assert mended(fleet, "gpu09")
    assert (fleet.job("gpu10"), fleet.files("gpu10")) == (job, files)


def damage(fleet: Site, host: str) -> None:
    """Lose a file of a package that no plan has spoken of, as a hand that slipped does."""
    (lost,) = independent.site_packages(fleet.pid(host)).glob("nvidia/cublas/lib/libcublasLt.so.12")
    lost.unlink()
