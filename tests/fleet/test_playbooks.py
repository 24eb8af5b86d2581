"""The shipped playbooks but the flagship, on real hosts: what they do, undo, and leave alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetfix.lab.template import FIRST_STEP
from tests.fleet import independent
from tests.fleet.conftest import Site

pytestmark = pytest.mark.fleet

Make = Callable[..., Site]
BOTH = "gpu[01-02]"
OLD = "find /tmp/torchinductor_root -exec touch -d 2020-01-01 {} +"


WORDS = """\
name: words
vars: {whose: alice}
steps:
  - id: who
    hosts: gpu01
    as_user: "${{ vars.whose }}"
    shell: {check: test -e /tmp/was-here, run: id -un >/tmp/was-here}
"""


def same_job(one: independent.Job, other: independent.Job) -> bool:
    return all(
        getattr(one, name) == getattr(other, name) for name in ("argv", "cwd", "environ", "limits", "umask")
    )


def test_jobs_are_stopped_started_again_and_measured(site: Make) -> None:
    lab = site(BOTH, contaminated=[])
    lab.wait_for_speed("gpu01", 19_000, 21_000)
    lab.wait_for_speed("gpu02", 19_000, 21_000)
    before = {host: lab.job(host) for host in ("gpu01", "gpu02")}

    measured = lab.run(BOTH, playbook="relaunch-and-measure")
    assert measured.outcomes == dict.fromkeys(before, "ok"), measured.told
    assert {host: lab.job(host) for host in before} == before, "what trains is measured and not touched"

    stopped = lab.run(BOTH, playbook="stop-gpu-jobs")
    assert (stopped.exit, stopped.outcomes) == (0, dict.fromkeys(before, "changed")), stopped.told
    assert [independent.jobs(lab.pid(host)) for host in before] == [[], []]
    assert all(stopped.finished(host)["job_stopped"] for host in before)
    again = lab.run(BOTH, playbook="stop-gpu-jobs")
    assert (again.outcomes, again.of("change_started")) == (dict.fromkeys(before, "ok"), []), again.told

    planned = lab.run("gpu02", "--dry-run", playbook="relaunch-and-measure")
    assert planned.outcomes == {"gpu02": "pending"}
    assert independent.jobs(lab.pid("gpu02")) == []
    started = lab.run("gpu02", playbook="relaunch-and-measure")
    assert (started.exit, started.outcomes) == (0, {"gpu02": "changed"}), started.told
    assert stopped.run_id in started.of("change_started")[0]["shown"]["summary"]
    assert same_job(lab.job("gpu02"), before["gpu02"])
    assert min(independent.first_steps(lab.pid("gpu02"))) >= FIRST_STEP

    now = lab.job("gpu02")
    back = lab("rollback", stopped.run_id, "--yes", "-i", lab.inventory)
    assert back.exit == 0, back.out + back.err
    assert same_job(lab.job("gpu01"), before["gpu01"])
    assert lab.job("gpu02") == now, "it runs already"

    blocked = lab.run("gpu01", "--set", "run=20200101-000000-x-abcd", playbook="relaunch-and-measure")
    assert blocked.outcomes == {"gpu01": "ok"}, "training runs: nothing has to be found"


def test_a_job_that_spans_hosts_is_stopped_and_started_on_both_or_on_none(site: Make) -> None:
    lab = site(BOTH, contaminated=[], spanning=["gpu01", "gpu02"])
    hosts = ("gpu01", "gpu02")
    for host in hosts:
        lab.wait_for_speed(host, 19_000, 21_000)
    before = {host: lab.job(host) for host in hosts}
    alone = lab.run("gpu01", playbook="stop-gpu-jobs")
    assert alone.outcomes == {"gpu01": "blocked"}, alone.told
    assert {host: lab.job(host) for host in hosts} == before
    stopped = lab.run(BOTH, playbook="stop-gpu-jobs")
    assert stopped.outcomes == dict.fromkeys(hosts, "changed"), stopped.told
    half = lab.run("gpu02", playbook="relaunch-and-measure")
    assert half.outcomes == {"gpu02": "blocked"}, half.told
    assert "spans 2 hosts" in half.finished("gpu02")["reason"]
    ran = lab.run(BOTH, playbook="relaunch-and-measure")
    assert (ran.exit, ran.outcomes) == (0, dict.fromkeys(hosts, "changed")), ran.told
    assert all(same_job(lab.job(host), before[host]) for host in hosts)


def test_a_start_from_zero_is_taken_back_and_can_be_tried_again(site: Make) -> None:
    lab = site("gpu01", contaminated=[])
    lab.wait_for_speed("gpu01", 19_000, 21_000)
    stopped = lab.run("gpu01", playbook="stop-gpu-jobs")
    assert stopped.outcomes == {"gpu01": "changed"}, stopped.told
    lab.lab.break_host("gpu01", "forgets_checkpoint")
    failed = lab.run("gpu01", playbook="relaunch-and-measure")
    assert failed.outcomes == {"gpu01": "rolled_back"}, failed.told
    assert "restarted from zero" in failed.finished("gpu01")["reason"]
    assert independent.jobs(lab.pid("gpu01")) == []
    lab.lab.heal("gpu01")
    mended = lab.run("gpu01", playbook="relaunch-and-measure")
    assert mended.outcomes == {"gpu01": "changed"}, mended.told
    assert int(lab.lab.read("gpu01", "/opt/train/checkpoints/latest")) >= FIRST_STEP


def test_stale_caches_are_cleared_and_others_left_alone(site: Make) -> None:
    lab = site(BOTH, contaminated=[])
    for host in ("gpu01", "gpu02"):
        lab.wait_for_speed(host, 19_000, 21_000)
    assert lab.lab.run("gpu01", OLD).returncode == 0
    well = lab.job("gpu02")
    planned = lab.run(BOTH, "--dry-run", playbook="clear-compile-caches")
    assert planned.outcomes == {"gpu01": "pending", "gpu02": "ok"}, planned.told
    ran = lab.run(BOTH, playbook="clear-compile-caches")
    assert (ran.exit, ran.outcomes) == (0, {"gpu01": "changed", "gpu02": "ok"}), ran.told
    assert [e["shown"]["key"] for e in ran.of("change_started") if e["step"] == "caches"] == [
        "cache:/tmp/torchinductor_root"
    ]
    assert lab.job("gpu02") == well
    assert lab.wait_for_speed("gpu01", 19_000, 21_000)
    assert "trash" not in "".join(lab.files("gpu01"))
    now = lab.job("gpu01")
    again = lab.run(BOTH, playbook="clear-compile-caches")
    assert again.outcomes == {"gpu01": "ok", "gpu02": "ok"}, again.told
    assert lab.job("gpu01") == now


def test_evidence_is_kept_here_and_the_host_stays_as_it_was(site: Make) -> None:
    lab = site("gpu01")
    lab.wait_for_speed("gpu01", 12_000, 14_000)
    files, job = lab.files("gpu01"), lab.job("gpu01")
    ran = lab.run("gpu01", playbook="collect-evidence")
    assert (ran.exit, ran.outcomes) == (0, {"gpu01": "ok"}), ran.told
    (kept,) = ran.of("evidence_kept")
    folder = Path(kept["folder"])
    assert folder == lab.home / "state" / "evidence" / ran.run_id / "gpu01" / "evidence"
    for file in kept["files"]:
        content = (folder / file["name"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["bytes"], file["sha256"])
        assert (folder / file["name"]).stat().st_mode & 0o777 == 0o600
    assert "Product Name" in (folder / "nvidia-smi.txt").read_text()
    assert "nvidia_cudnn_cu13==" in (folder / "packages.txt").read_text()
    assert "torchrun" in (folder / "processes.txt").read_text()
    assert "tps:" in (folder / "job-log.txt").read_text()
    assert (lab.files("gpu01"), lab.job("gpu01")) == (files, job)
    told = lab("show", ran.run_id, "gpu01").out
    assert str(folder) in told
    assert kept["files"][0]["sha256"][:16] in told


def test_a_step_counts_where_it_says_and_runs_as_whom_it_says_with_evidence_before(site: Make) -> None:
    lab = site(BOTH, contaminated=[])
    playbook = lab.home / "words.yaml"
    playbook.write_text(WORDS)
    # Where an ordinary user made the lab, its hosts have no other user than root.
    alice = "alice" if os.geteuid() == 0 else "root"
    unknown = lab.run(BOTH, "--set", "whose=nobody-here", "--max-unreachable", "2", playbook=str(playbook))
    assert unknown.outcomes == {"gpu01": "blocked", "gpu02": "skipped"}, unknown.told
    assert "there is no user nobody-here on this host" in unknown.finished("gpu01")["reason"]
    ran = lab.run(BOTH, "--set", f"whose={alice}", playbook=str(playbook))
    assert ran.outcomes == {"gpu01": "changed", "gpu02": "skipped"}, ran.told
    assert lab.lab.read("gpu01", "/tmp/was-here").decode().strip() == alice
    (kept,) = ran.of("evidence_kept")
    assert (kept["host"], kept["missing"]) == ("gpu01", [])
    assert {file["name"] for file in kept["files"]} >= {"nvidia-smi.txt", "processes.txt", "packages.txt"}
    assert ran.events.index(kept) < ran.events.index(ran.of("change_started")[0])
