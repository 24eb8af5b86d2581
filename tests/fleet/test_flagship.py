"""The main job on real hosts: every promise of purge-cu13, with a witness that is not fleetfix."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest

from fleetfix.lab.template import FIRST_STEP
from tests.fleet import independent
from tests.fleet.conftest import Site

pytestmark = pytest.mark.fleet

Make = Callable[..., Site]
ALL = "gpu[01-03]"
TORCHRUN = ("/opt/train/venv/bin/torchrun", "--nproc-per-node=2")
EVERYWHERE = ("--max-unreachable", "100%")


def test_three_contaminated_hosts_are_mended_and_a_second_run_touches_nothing(site: Make) -> None:
    lab = site(ALL)
    before = {host: lab.job(host) for host in ("gpu01", "gpu02", "gpu03")}
    for host in before:
        assert 12_000 < lab.wait_for_speed(host, 12_000, 14_000) < 14_000
    ran = lab.run(ALL)
    assert (ran.exit, ran.outcomes) == (0, dict.fromkeys(before, "changed")), ran.told
    for host, old in before.items():
        pid = lab.pid(host)
        assert independent.damaged(pid) == []
        left = independent.distributions(pid)
        assert [name for name in left if "cu13" in name] == ["nixl-cu13"]
        assert "nixl-cu13" in independent.required(pid)
        assert not {"nvidia-cublas", "cuda-toolkit", "sglang-kernel"} & set(left)
        assert {"nvidia-ml-py", "nvidia-cudnn-cu12"} <= set(left)
        assert independent.torch_imports(pid) == "ok 12.8"
        new = lab.job(host)
        assert new.pid != old.pid
        assert (new.argv, new.cwd, new.environ, new.limits, new.umask) == (
            old.argv,
            old.cwd,
            old.environ,
            old.limits,
            old.umask,
        )
        assert min(independent.first_steps(pid)) >= FIRST_STEP, "from its checkpoint, not from step 0"
        assert lab.lab.read(host, "/var/log/train/train.log").count(b"Loading the checkpoint") == 2
        assert lab.wait_for_speed(host, 19_000, 21_000) > 19_000
        assert "/tmp/torchinductor_root.fleetfix-trash" not in "".join(lab.files(host))
    jobs = {host: lab.job(host) for host in before}
    files = {host: lab.files(host) for host in before}
    again = lab.run(ALL)
    assert (again.exit, set(again.outcomes.values())) == (0, {"ok"}), again.told
    assert {host: lab.job(host) for host in before} == jobs
    assert {host: lab.files(host) for host in before} == files
    assert again.of("change_started") == []


def test_a_dry_run_leaves_every_file_and_process_as_it_was(site: Make) -> None:
    lab = site(ALL, contaminated=["gpu01", "gpu02"])
    before = {host: lab.lab.files(host, ignore=independent_job_files()) for host in ("gpu01", "gpu03")}
    processes = {host: [one.pid for one in lab.lab.processes(host)] for host in before}
    ran = lab("run", "purge-cu13", "--hosts", ALL, "-i", lab.inventory, "--dry-run", "--diff")
    assert ran.exit == 0
    assert "repair 21 files of 4 packages" in ran.out
    # Whatever their ages are, the two hosts are one plan; the job saves every few seconds.
    ages = r"(\d+ s|\d min)( to (\d+ s|\d min))? ago"
    assert re.search(rf"stop root's job 2 \(python torchrun\): 2 GPUs, last checkpoint {ages}", ran.out)
    assert re.search(r"^oldest last checkpoint: \S+ \S+ ago, on gpu0[12]$", ran.out, re.MULTILINE)
    assert "gpu[01-02] (2):" in ran.out
    assert "nothing was changed" in ran.out
    after = {host: lab.lab.files(host, ignore=independent_job_files()) for host in before}
    assert after == before
    left = {host: [one.pid for one in lab.lab.processes(host)] for host in before}
    assert left == processes


def independent_job_files() -> tuple[str, ...]:
    return ("/opt/train/checkpoints", "/var/log/train")


def test_hosts_that_may_not_be_touched_say_why_and_are_left_alone(site: Make) -> None:
    lab = site("gpu[01-07]")
    lab.lab.break_host("gpu01", "no_repair_source")
    lab.lab.break_host("gpu02", "foreign_job")
    lab.lab.break_host("gpu03", "nvidia_smi_hangs")
    lab.lab.break_host("gpu04", "driver_mismatch")
    lab.lab.break_host("gpu05", "vanish")
    lab.lab.break_host("gpu06", "disabled")
    lab.lab.break_host("gpu07", "foreign_job")
    lab.set_vars("gpu07", venv="/opt/train/venv")
    still = ["gpu01", "gpu02", "gpu03", "gpu04", "gpu06", "gpu07"]
    jobs = {host: lab.job(host) for host in still}
    files = {host: lab.files(host) for host in still}
    foreign = [one.pid for one in lab.lab.processes("gpu02")]
    ran = lab.run("gpu[01-07]", *EVERYWHERE)
    reasons = {host: ran.finished(host)["reason"] for host in ran.outcomes}
    assert ran.outcomes == {**dict.fromkeys(still, "blocked"), "gpu05": "unreachable"}, reasons
    assert "no source for nvidia-cudnn-cu12" in reasons["gpu01"]
    whose = "alice" if os.geteuid() == 0 else "root"
    assert "2 environments are in use" in reasons["gpu02"]
    assert f"of {whose}" in reasons["gpu02"]
    assert f"{whose}'s job" in reasons["gpu07"]
    assert "nvidia-smi" in reasons["gpu03"]
    assert "driver" in reasons["gpu04"].lower()
    assert "DISABLED" in reasons["gpu06"] or "switched off" in reasons["gpu06"]
    assert ran.exit == 2
    assert {host: lab.job(host) for host in still} == jobs
    assert {host: lab.files(host) for host in still} == files
    assert [one.pid for one in lab.lab.processes("gpu02")] == foreign


def test_a_local_patch_of_another_package_is_told_and_survives(site: Make) -> None:
    lab = site("gpu01")
    lab.lab.break_host("gpu01", "local_patch")
    patched = [path for path in independent.damaged(lab.pid("gpu01")) if "numpy" in path]
    assert len(patched) == 1
    ran = lab.run("gpu01")
    assert ran.outcomes == {"gpu01": "changed"}, ran.told
    assert independent.damaged(lab.pid("gpu01")) == patched
    assert any("numpy" in event["text"] for event in ran.of("host_said"))
