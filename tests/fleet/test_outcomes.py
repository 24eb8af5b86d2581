"""Every outcome that a host can come to, each made by a fault of the lab, as the operator is shown it.

A few runs over one fleet bring them all; each is then looked at in the events, in the summary and in the
exit code of its run.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import pytest

from fleetfix.events import Outcome
from tests.fleet import independent
from tests.fleet.conftest import Make, Ran, Site, step_began, until

pytestmark = pytest.mark.fleet

HEALTHY = ("gpu01", "gpu12")
ALL_AT_ONCE = ("--canary", "0", "--batch", "100%", "--max-failures", "100%", "--max-unreachable", "100%")


@dataclass(frozen=True)
class Shown:
    """A run as the operator has it: its events, its summary, its exit code."""

    ran: Ran
    summary: str


Runs = Mapping[str, Shown]


@pytest.fixture(scope="module")
def fleet(shared_site: Make) -> Site:
    bad = [f"gpu{n:02}" for n in range(1, 16) if f"gpu{n:02}" not in HEALTHY]
    return shared_site("gpu[01-15]", contaminated=bad)


def shown(fleet: Site, ran: Ran) -> Shown:
    return Shown(ran, fleet("show", ran.run_id).out)


@pytest.fixture(scope="module")
def runs(fleet: Site) -> Runs:
    """The runs that bring every outcome, by name."""
    lab = fleet.lab
    for host, *faults in (
        ("gpu03", "kubelet"),
        ("gpu04", "foreign_lease"),
        ("gpu05", "unfinished_run"),
        ("gpu06", "refuse"),
        ("gpu07", "naive_purge"),
        ("gpu08", "slow_after_repair"),
        ("gpu09", "load_fails"),
        ("gpu10", "load_fails", "forgets_checkpoint"),
    ):
        for fault in faults:
            lab.break_host(host, fault)
    found = {
        "planned": fleet.run("gpu[01-02]", "--dry-run"),
        "mixed": fleet.run("gpu[01-06],gpu[08-09]", *ALL_AT_ONCE, "--on-unproven", "count"),
        "dead": fleet.run("gpu01,gpu06", *ALL_AT_ONCE),
        "checked": fleet.run("gpu01,gpu07", *ALL_AT_ONCE, playbook=playbook(fleet, "check", CHECK)),
        "interrupted": interrupted(fleet, "gpu13", "gpu14"),
        "doubted": doubted(fleet, "gpu12"),
        "halted": fleet.run("gpu[10-11]"),  # the last: going back fails, and that trips the breaker
    }
    return {name: shown(fleet, ran) for name, ran in found.items()}


CHECK = """
name: check-torch
steps:
  - id: loads
    hosts: "gpu07"
    torch_loads: {venv: /opt/train/venv, cuda: "12"}
"""


ALWAYS = """
name: always
steps:
  - id: work
    shell: {run: sleep 600, always: true}
    timeout: 1h
"""


def playbook(fleet: Site, name: str, text: str) -> str:
    path = fleet.home / f"{name}.yaml"
    path.write_text(text)
    return str(path)


def doubted(fleet: Site, host: str) -> Ran:
    """Restart a host in the middle of what nothing verifies, when its controller is gone; then resume."""
    work = ("run", playbook(fleet, "always", ALWAYS), "--hosts", host, "-i", fleet.inventory)
    process = fleet.start(*work, "--yes", "--json")
    run = step_began(process, "work")
    until(lambda: ("sleep", "600") in argvs(fleet, host), "the work to begin")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    fleet.lab.reboot(host)
    return fleet("resume", run, "-i", fleet.inventory, "--yes", "--json")


def interrupted(fleet: Site, lost: str, cancelled: str) -> Ran:
    """Lose one host for good while its job is stopped, then end the run by two interrupts."""
    process = fleet.start(
        *("run", "purge-cu13", "--hosts", f"{lost},{cancelled}", "-i", fleet.inventory, "--yes", "--json"),
        *ALL_AT_ONCE,
    )
    lines: list[str] = []
    stopped = {lost, cancelled}
    while stopped:
        event = _next(process, lines)
        if event["kind"] == "step_started" and event["step"] == "idle":
            stopped.discard(event["host"])
    # The GPUs of the one do not become idle, and the other comes back with another key.
    fleet.lab.break_host(cancelled, "gpu_memory_stays")
    fleet.lab.break_host(lost, "changed_host_key")
    fleet.lab.break_host(lost, "drop")
    while event["kind"] != "host_finished":
        event = _next(process, lines)
    process.send_signal(signal.SIGINT)
    while event["kind"] != "run_interrupted":
        event = _next(process, lines)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return Ran(process.returncode, "".join(lines) + out, err)


def _next(process: subprocess.Popen[str], lines: list[str]) -> dict[str, str]:
    """The next event of a run, kept in `lines` too."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        pytest.fail(f"the run ended early: {process.stderr and process.stderr.read()}")
    lines.append(line)
    event: dict[str, str] = json.loads(line)["event"]
    return event


@dataclass(frozen=True)
class Case:
    """Where an outcome is brought about, what is said of it, and how its run ends."""

    outcome: Outcome
    run: str
    host: str
    said: str
    exit: int


CASES = (
    Case("ok", "mixed", "gpu01", "", 2),
    Case("changed", "mixed", "gpu02", "", 2),
    Case("pending", "planned", "gpu02", "", 0),
    Case("skipped", "checked", "gpu01", "no step of this playbook is for this host", 2),
    Case("blocked", "mixed", "gpu03", "this is a node of Kubernetes: drain it first", 2),
    Case("busy", "mixed", "gpu04", "writes to this host", 2),
    Case("unfinished", "mixed", "gpu05", "is unfinished here", 2),
    Case("unreachable", "dead", "gpu06", "connection refused", 4),
    Case("failed", "checked", "gpu07", "libcudnn.so.9", 2),
    Case("unproven", "mixed", "gpu08", "not recovered", 2),
    Case("rolled_back", "mixed", "gpu09", "torch", 2),
    Case("in_doubt", "doubted", "gpu12", "", 3),
    Case("rollback_failed", "halted", "gpu10", "and going back failed: ", 3),
    Case("not_started", "halted", "gpu11", "", 3),
    Case("rollback_pending", "interrupted", "gpu13", "its key has changed", 130),
    Case("cancelled", "interrupted", "gpu14", "", 130),
)


@pytest.mark.parametrize("case", CASES, ids=[case.outcome for case in CASES])
def test_an_outcome_is_shown_in_events_summary_and_exit_code(runs: Runs, case: Case) -> None:
    ran, summary = runs[case.run].ran, runs[case.run].summary
    assert ran.exit == case.exit, ran.told
    assert ran.of("run_finished")[-1]["exit"] == case.exit
    end = ran.finished(case.host)
    assert end["outcome"] == case.outcome, ran.told
    if case.outcome == "pending":  # what is pending is the plan itself
        assert f"\n{case.host}:\n" in summary
        assert "dry run: nothing was changed" in summary
        return
    lines = [line for line in summary.splitlines() if line.startswith(f"{case.outcome:<16} ")]
    assert [line for line in lines if case.host in line and case.said in line], summary
    assert f"1 {case.outcome}" in summary.splitlines()[-1]
    assert f"exit {case.exit}" in summary.splitlines()[-1]


def test_a_command_whose_host_was_lost_meanwhile_is_in_doubt(fleet: Site) -> None:
    process = fleet.start(
        "exec", "--hosts", "gpu01,gpu15", "-i", fleet.inventory, "--json", "--", "sleep 3"
    )
    running = ("sleep", "3")
    until(lambda: all(running in argvs(fleet, host) for host in ("gpu01", "gpu15")), "both to sleep")
    fleet.lab.break_host("gpu15", "drop")
    out, err = process.communicate(timeout=60)
    told = {one["host"]: one["result"] for one in map(json.loads, out.splitlines()) if "result" in one}
    assert (process.returncode, told) == (2, {"gpu01": "ok", "gpu15": "in_doubt"}), err
    assert "in doubt     gpu15: the connection was lost" in err
    assert "nothing tells how far the command came" in err
    assert "1 in doubt, 1 ok" in err.splitlines()[-1]


def argvs(fleet: Site, host: str) -> list[tuple[str, ...]]:
    return [one.argv for one in fleet.lab.processes(host)]


def test_every_outcome_there_is_has_its_case() -> None:
    assert {case.outcome for case in CASES} == set(get_args(Outcome))


def test_a_host_whose_job_stayed_stopped_heads_the_summary(runs: Runs) -> None:
    first = runs["interrupted"].summary.splitlines()
    assert any(line.startswith("JOB STOPPED, NOT RESTARTED: gpu[13-14] (2)") for line in first)


def test_a_run_that_bob_drives_is_not_taken_from_him(fleet: Site, runs: Runs) -> None:
    there = independent.root(fleet.pid("gpu04"))
    before = json.loads((there / "var/lib/fleetfix/lease.json").read_text())
    run = before["run"]
    for command, code in (("release", 2), ("rollback", 2), ("commit", 2), ("resume", 1)):
        refused = fleet(command, run, "--hosts", "gpu04", "-i", fleet.inventory, "--yes")
        assert refused.exit == code, refused.told
        assert f"run {run} of bob on" in refused.err
        assert "--take-over" in refused.err
    after = json.loads((there / "var/lib/fleetfix/lease.json").read_text())
    assert (after["epoch"], after["driver"]) == (before["epoch"], before["driver"])
    assert (there / f"var/lib/fleetfix/claims/{run}.json").exists()
    assert (there / "run/other-work").exists()
