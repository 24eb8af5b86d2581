"""The main job where it goes wrong: what is brought back, what is kept, what is left claimed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from fleetfix.lab.template import FIRST_STEP
from tests.fleet import independent
from tests.fleet.conftest import Ran, Site, said, step_began, until

pytestmark = pytest.mark.fleet

Make = Callable[..., Site]
ALL = "gpu[01-03]"
TORCHRUN = ("/opt/train/venv/bin/torchrun", "--nproc-per-node=2")
EVERYWHERE = ("--max-unreachable", "100%")


def no_secret_of_the_job(lab: Site, ran: Ran) -> None:
    """The captured environment left neither its host, nor anything behind there once it was not needed."""
    (secret,) = (
        one.partition("=")[2] for one in lab.job("gpu01").environ if one.startswith("WANDB_API_KEY=")
    )
    journal = b"".join(path.read_bytes() for path in (lab.home / "state").iterdir() if path.is_file())
    assert secret not in ran.out + ran.err
    assert secret.encode() not in journal
    kept = independent.root(lab.pid("gpu01")) / "var/lib/fleetfix"
    files = [path for path in kept.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_a_load_check_that_fails_brings_everything_back_byte_for_byte(site: Make) -> None:
    lab = site("gpu[01-02]")
    lab.lab.break_host("gpu01", "load_fails")
    before = {host: (lab.files(host), lab.job(host)) for host in ("gpu01", "gpu02")}
    ran = lab.run("gpu[01-02]")
    assert ran.outcomes == {"gpu01": "rolled_back", "gpu02": "not_started"}, ran.told
    assert ran.exit == 3
    finished = ran.finished("gpu01")
    assert finished["step"] == "loads"
    assert "ImportError" in finished["reason"] or "import" in finished["reason"]
    assert not finished["job_stopped"]
    assert lab.files("gpu01") == before["gpu01"][0]
    new, old = lab.job("gpu01"), before["gpu01"][1]
    assert (new.argv, new.cwd, new.environ, new.limits) == (old.argv, old.cwd, old.environ, old.limits)
    assert min(independent.first_steps(lab.pid("gpu01"))) >= FIRST_STEP
    assert (lab.files("gpu02"), lab.job("gpu02")) == before["gpu02"]
    no_secret_of_the_job(lab, ran)


def test_without_a_canary_a_host_that_rolled_back_is_exit_2(site: Make) -> None:
    lab = site("gpu01")
    lab.lab.break_host("gpu01", "load_fails")
    ran = lab.run("gpu01", "--canary", "0")
    assert (ran.outcomes, ran.exit) == ({"gpu01": "rolled_back"}, 2), ran.told


def test_a_speed_that_does_not_come_back_keeps_the_repair_and_halts(site: Make) -> None:
    lab = site("gpu[01-02]")
    lab.lab.break_host("gpu01", "slow_after_repair")
    ran = lab.run("gpu[01-02]")
    assert ran.outcomes == {"gpu01": "unproven", "gpu02": "not_started"}, ran.told
    assert ran.exit == 3
    assert independent.damaged(lab.pid("gpu01")) == []
    assert lab.job("gpu01")
    assert ran.of("rollback_started") == []


def test_a_supervisor_above_the_job_is_stopped_and_started_with_it(site: Make) -> None:
    lab = site("gpu01")
    lab.lab.break_host("gpu01", "respawning_job", how="loop")
    ran = lab.run("gpu01")
    assert ran.outcomes == {"gpu01": "changed"}, ran.told
    loops = [one for one in lab.lab.processes("gpu01") if one.argv[:1] == ("/bin/sh",)]
    assert len(loops) == 1
    assert lab.job("gpu01")


def test_a_job_that_something_else_restarts_is_named_and_not_fought(site: Make) -> None:
    lab = site("gpu01")
    lab.lab.break_host("gpu01", "respawning_job", how="watchdog")
    before = lab.files("gpu01")
    ran = lab.run("gpu01")
    assert ran.outcomes == {"gpu01": "rolled_back"}, ran.told
    finished = ran.finished("gpu01")
    assert finished["step"] == "stop"
    assert "again" in finished["reason"]
    assert lab.job("gpu01"), "training runs, once"
    assert lab.files("gpu01") == before


def test_a_killed_controller_leaves_a_host_that_says_so_and_rollback_brings_the_job_back(
    site: Make,
) -> None:
    lab = site("gpu[01-02]")
    before = lab.files("gpu01"), lab.job("gpu01")
    process = lab.start("run", "purge-cu13", "--hosts", "gpu01", "-i", lab.inventory, "--yes", "--json")
    run = step_began(process, "idle")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert independent.jobs(lab.pid("gpu01")) == [], "killed between stop and wheels"
    refused = lab.run("gpu[01-02]", *EVERYWHERE)
    assert refused.outcomes["gpu01"] == "unfinished", refused.told
    reason = refused.finished("gpu01")["reason"]
    assert run in reason
    assert "stop" in reason
    assert independent.jobs(lab.pid("gpu01")) == []
    back = lab("rollback", run, "-i", lab.inventory)
    assert back.exit == 0, back.err + back.out
    assert lab.files("gpu01") == before[0]
    assert lab.job("gpu01").argv == before[1].argv
    assert lab.job("gpu01").environ == before[1].environ
    after = lab.run("gpu01", "--dry-run")
    assert after.outcomes == {"gpu01": "pending"}, after.told


def test_a_run_that_ended_well_can_be_taken_back_and_training_goes_on(site: Make) -> None:
    lab = site("gpu01")
    wheels = {path: seen for path, seen in lab.files("gpu01").items() if path.startswith(independent.VENV)}
    old = lab.job("gpu01")
    ran = lab.run("gpu01")
    assert ran.outcomes == {"gpu01": "changed"}, ran.told
    no_secret_of_the_job(lab, ran)
    back = lab("rollback", ran.run_id, "-i", lab.inventory)
    assert back.exit == 0, back.err + back.out
    after = {path: seen for path, seen in lab.files("gpu01").items() if path.startswith(independent.VENV)}
    assert {path for path in after if after[path] != wheels.get(path)} == set()
    assert set(wheels) == set(after)
    new = lab.job("gpu01")
    assert (new.argv, new.environ, new.cwd) == (old.argv, old.environ, old.cwd)
    twice = lab("rollback", ran.run_id, "-i", lab.inventory)
    assert twice.exit == 0, twice.err + twice.out
    assert lab.job("gpu01") == new, "nothing is left to undo"


@pytest.mark.parametrize("faults", [["forgets_checkpoint"], ["forgets_checkpoint", "load_fails"]])
def test_a_job_that_lost_its_checkpoint_is_stopped_before_it_saves_over_it(
    site: Make, faults: list[str]
) -> None:
    lab = site("gpu01")
    lab.wait_for_speed("gpu01", 12_000, 14_000)
    for fault in faults:
        lab.lab.break_host("gpu01", fault)
    ran = lab.run("gpu01")
    assert ran.outcomes == {"gpu01": "rollback_failed"}, ran.told
    finished = ran.finished("gpu01")
    assert "from zero" in finished["reason"] or "instead of" in finished["reason"]
    assert finished["job_stopped"]
    assert independent.jobs(lab.pid("gpu01")) == []
    assert int(lab.lab.read("gpu01", "/opt/train/checkpoints/latest")) >= FIRST_STEP
    lab.lab.heal("gpu01")
    assert lab.lab.run("gpu01", BY_HAND).returncode == 0
    lab.wait_for_speed("gpu01", 10_000, 21_000)
    back = lab("rollback", ran.run_id, "-i", lab.inventory)
    assert back.exit == 0, back.out + back.err
    assert lab.run("gpu01", "--dry-run").outcomes == {"gpu01": "pending"}, "the host is free again"


def ended(process: subprocess.Popen[str]) -> dict[str, str]:
    """Read a run that was started with --json to its end: outcome and reason of each host."""
    assert process.stdout is not None
    events = [json.loads(line)["event"] for line in process.stdout]
    process.wait(30)
    return {e["host"]: f"{e['outcome']}: {e['reason']}" for e in events if e["kind"] == "host_finished"}


def test_a_disk_that_fills_in_the_middle_brings_training_back(site: Make) -> None:
    lab = site("gpu01")
    before, old = lab.files("gpu01"), lab.job("gpu01")
    process = lab.start("run", "purge-cu13", "--hosts", "gpu01", "-i", lab.inventory, "--yes", "--json")
    run = step_began(process, "idle")
    lab.lab.break_host("gpu01", "full_disk")
    outcome = ended(process)["gpu01"]
    assert outcome.startswith("rolled_back"), outcome
    assert "space" in outcome or "room" in outcome
    assert lab.job("gpu01").argv == old.argv
    lab.lab.heal("gpu01")
    assert lab.files("gpu01") == before
    assert lab("rollback", run, "-i", lab.inventory).exit == 0, "nothing is left to undo"


def test_a_rollback_beside_a_job_started_by_hand_waits_for_its_end(site: Make) -> None:
    lab = site("gpu01")
    before = {path: seen for path, seen in lab.files("gpu01").items() if path.startswith(independent.VENV)}
    process = lab.start("run", "purge-cu13", "--hosts", "gpu01", "-i", lab.inventory, "--yes", "--json")
    run = step_began(process, "loads")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    by_hand = lab.lab.run("gpu01", BY_HAND)
    assert by_hand.returncode == 0, by_hand.stderr
    until(lambda: independent.jobs(lab.pid("gpu01")) or None, "the job started by hand")
    lab.wait_for_speed("gpu01", 10_000, 21_000)
    back = lab("rollback", run, "-i", lab.inventory)
    assert back.exit == 2
    assert "stop it first" in back.out + back.err
    mine = lab.job("gpu01")
    os.kill(mine.pid, signal.SIGTERM)
    until(lambda: not independent.jobs(lab.pid("gpu01")) or None, "its end")
    assert lab("rollback", run, "-i", lab.inventory).exit == 0
    after = {path: seen for path, seen in lab.files("gpu01").items() if path.startswith(independent.VENV)}
    assert after == before
    assert lab.job("gpu01"), "what the run had stopped runs again"


BY_HAND = """
cd /opt/train
setsid /opt/train/venv/bin/python /opt/train/venv/bin/torchrun --nproc-per-node=2 train.py \\
  --config llama3-8b.toml </dev/null >>/var/log/train/train.log 2>&1 &
"""


STUBBORN = """
name: stubborn
steps:
  - id: work
    shell:
      run: |
        trap '' TERM
        setsid sh -c 'trap "" TERM; sleep 1001' &
        (sh -c 'sleep 1002 &') &
        sleep 1003
      always: true
    timeout: 5m
"""


def test_the_second_interrupt_leaves_no_process_of_the_step_on_any_host(site: Make) -> None:
    lab = site("gpu[01-02]", contaminated=[])
    playbook = lab.home / "stubborn.yaml"
    playbook.write_text(STUBBORN)
    together = ("--canary", "0", "--batch", "100%")
    process = lab.start(
        "run", str(playbook), "--hosts", "gpu[01-02]", "-i", lab.inventory, "--yes", "--json", *together
    )

    def sleeping(host: str) -> list[str]:
        return [" ".join(one.argv) for one in lab.lab.processes(host) if "sleep" in one.argv[:1]]

    until(lambda: len(sleeping("gpu01")) == 3 == len(sleeping("gpu02")), "three sleeps on each host")
    before = [one.pid for one in lab.lab.processes("gpu01") if "torchrun" in " ".join(one.argv)]
    process.send_signal(signal.SIGINT)
    until(lambda: said(process, "run_interrupted"), "the first interrupt to be heard")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert sleeping("gpu01") == []
    assert sleeping("gpu02") == []
    assert [one.pid for one in lab.lab.processes("gpu01") if "torchrun" in " ".join(one.argv)] == before
