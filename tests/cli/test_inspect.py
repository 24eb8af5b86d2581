"""inspect: what it shows of a fleet, and what its exit code says."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from fleetfix.cli.look import exit_code
from fleetfix.commands import Completed
from fleetfix.domain.conditions import Condition
from fleetfix.domain.host_facts import HostFacts, facts_of
from fleetfix.errors import Failure
from fleetfix.session import Lease, Purpose, unfinished_hint
from fleetfix.transports.scripted import Fleet
from fleetfix.views.inspect import Seen, inspect_text
from tests.cli.conftest import Line
from tests.unit.test_audit_findings import NCCL_12, NCCL_13, PLACE, audit
from tests.unit.test_host_facts import GIB, MISMATCH, NO_RATES, WELL, answer, job, reply

ALL = ("inspect", "--hosts", "gpu*", "-i", "hosts.yaml")


def survey(**other: Any) -> dict[str, Any]:
    """The reply of a host whose clock agrees with any."""
    return reply(clock=[9e9, 0.0], **other)


@pytest.fixture
def well(fleet: Fleet) -> Fleet:
    """Four hosts that are alike and well."""
    fleet.on("facts.survey", survey())
    fleet.on("logs.find_rates", NO_RATES)
    return fleet


def test_hosts_that_are_alike_are_told_once_and_the_exit_is_0(fleetfix: Line, well: Fleet) -> None:
    with well:
        result = fleetfix(*ALL)
    lines = result.out.splitlines()
    assert lines[0] == "4 hosts"
    assert "gpus         2 NVIDIA H200, 140.4 GiB each" in lines
    assert "driver       570.86.10, serves CUDA 12.8" in lines
    assert "modes        persistence on, ECC on, MIG off" in lines
    assert "environment  /opt/v: Python 3.11, torch 2.8.0 (CUDA 12.8)" in lines
    assert "job          alice's python train.py on 1 GPU, for 1 min: gpu[01-04] (4)" in lines
    assert "disk free    / 50.0 GiB; /var 20.0 GiB" in lines
    assert not {"drift", "outliers", "conditions"} & set(lines)
    assert (result.code, result.err) == (0, "")


def test_who_differs_is_drift_and_no_reason_to_fail(fleetfix: Line, well: Fleet) -> None:
    well["gpu03"].on(
        "facts.survey", survey(kernel="5.15.0", gpus={"query": answer(WELL.replace("570", "565"))})
    )
    with well:
        result = fleetfix(*ALL)
    lines = result.out.splitlines()
    assert "kernel       6.8.0 (3 of 4)" in lines
    drift = lines[lines.index("drift") + 1 :]
    assert drift[:2] == [
        "  driver       565.86.10, serves CUDA 12.8: gpu03",
        "  kernel       5.15.0: gpu03",
    ]
    assert result.code == 0


def test_what_is_wrong_comes_with_what_helps_and_no_host_is_lost(fleetfix: Line, well: Fleet) -> None:
    for name in ("gpu01", "gpu02"):
        well[name].on("facts.survey", survey(gpus={"query": answer(MISMATCH, 18)}))
    well["gpu03"].refuse("unreachable", "no route to host")
    purpose = Purpose(run="r7", playbook="mend", dry=False, operator="bob", controller="vm")
    well["gpu04"].claim(purpose, ["stop job 4"])
    well["gpu04"].disabled = "by carol \x1b[2J"
    with well:
        result = fleetfix(*ALL)
    lines = result.out.splitlines()
    wrong = lines[lines.index("conditions") + 1 :]
    assert wrong == [
        f"  gpu[01-02] (2): driver and libraries are of different versions: {MISMATCH}",
        "    the driver was updated under the running one: reboot, or reload it with no job running",
        "  gpu04: run r7 by bob on vm is unfinished here: stop job 4",
        f"    {unfinished_hint('r7')}",
        "  gpu04: fleetfix is switched off here: by carol \\x1b[2J",
        "    remove /etc/fleetfix/DISABLED there",
        "not reached",
        "  gpu03: no route to host",
    ]
    assert lines[0] == "4 hosts, 3 answered"
    assert result.code == 2


def test_an_audit_shows_the_command_that_mends(fleetfix: Line, well: Fleet) -> None:
    well.on("audits.environment", audit(NCCL_12).model_dump())
    for name in ("gpu01", "gpu03"):
        well[name].on("audits.environment", audit(NCCL_12, NCCL_13).model_dump())
    with well:
        result = fleetfix(*ALL, "--env", "of-job", "--env", "/v")
    place = re.escape(str(Path("hosts.yaml").absolute()))
    said = "  gpu[01,03] (2): /v: 1 package of another CUDA beside CUDA 12\n"
    command = rf"    fleetfix run purge-cu13 --hosts 'gpu\[01,03\]' -i {place}"
    assert re.search(re.escape(said) + command + "\n", result.out)
    assert re.search(command + " --set venv=/v\n", result.out)
    assert result.code == 2
    asked = [one.args for one in well["gpu02"].executed if one.function == "audits.environment"]
    assert asked == [{"venv": "of-job"}, {"venv": "/v"}]


def test_what_could_not_be_seen_is_said_and_is_no_fault(fleetfix: Line, well: Fleet) -> None:
    well.on("audits.environment", audit(NCCL_12).model_dump())
    well["gpu01"].on("audits.environment", {"none": "no job is running", "hint": "give a path"})
    well["gpu01"].on("facts.survey", survey(jobs=[]))
    well["gpu02"].on("facts.survey", survey(complete=False))
    with well:
        result = fleetfix(*ALL, "--env", "of-job")
    lines = result.out.splitlines()
    assert lines[lines.index("not seen") + 1 :] == [
        "  gpu01: of-job: no job is running (give a path)",
        "  gpu02: processes of other users cannot be looked at (become: true)",
    ]
    assert result.code == 0


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("/nope", {"none": "there is no environment at /nope"}),
        ("of-job", {"none": "2 environments are in use"}),
        ("of-job", {"env": {**PLACE.model_dump(), "kind": "container"}}),
        ("of-job", Failure(kind="timed_out", message="it ran past its deadline")),
    ],
)
def test_an_environment_that_could_not_be_audited_is_never_taken_for_a_sound_one(
    fleetfix: Line, well: Fleet, asked: str, answer: Any
) -> None:
    well.on("audits.environment", audit(NCCL_12).model_dump())
    well["gpu02"].on("audits.environment", answer)
    with well:
        result = fleetfix(*ALL, "--env", asked)
    assert result.out.splitlines()[-2] == "not seen"
    assert result.code == 2


def test_json_is_one_object_a_host(fleetfix: Line, well: Fleet) -> None:
    well["gpu02"].refuse("auth", "no key is accepted")
    well["gpu01"].on("audits.environment", audit(NCCL_12, NCCL_13).model_dump())
    for name in ("gpu03", "gpu04"):
        well[name].on("audits.environment", {"none": "no job is running"})
    with well:
        result = fleetfix(*ALL, "--env", "of-job", "--json")
    told = {one["host"]: one for one in map(json.loads, result.out.splitlines())}
    assert sorted(told) == ["gpu01", "gpu02", "gpu03", "gpu04"]
    assert told["gpu01"]["facts"]["kernel"] == "6.8.0"
    assert told["gpu01"]["environments"] == [
        {
            "asked": "of-job",
            "path": "/v",
            "findings": ["/v: 1 package of another CUDA beside CUDA 12"],
            "not_audited": None,
        }
    ]
    assert told["gpu02"]["failure"]["kind"] == "auth"
    assert told["gpu03"]["environments"][0]["not_audited"] == "no job is running"
    assert result.err == ""


def test_a_host_that_answers_nonsense_is_told_apart(fleetfix: Line, well: Fleet) -> None:
    well["gpu01"].garbage("facts.survey")
    well["gpu02"].on("facts.survey", Failure(kind="timed_out", message="it ran past its deadline"))
    with well:
        result = fleetfix(*ALL)
    lines = result.out.splitlines()
    left = lines[lines.index("not reached") + 1 :]
    assert any(line.startswith("  gpu01: facts could not read the answers") for line in left)
    assert "  gpu02: it ran past its deadline" in left
    assert result.code == 2


def test_interrupted_it_shows_what_it_has_and_who_is_left(fleetfix: Line, well: Fleet) -> None:
    async def interrupt(args: Any, world: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    well["gpu04"].on("facts.survey", interrupt)
    with well:
        result = fleetfix(*ALL, "--forks", "1")
    assert result.out.splitlines()[-2:] == ["not reached", "  gpu04: it was not looked at: interrupted"]
    assert result.code == 130


def test_nothing_is_written_anywhere(fleetfix: Line, well: Fleet, place: Path) -> None:
    with well:
        fleetfix(*ALL)
    assert not (place / "state").exists()
    assert {one.way for one in well["gpu01"].executed} == {"read"}
    assert well["gpu01"].claims == {}


@pytest.mark.parametrize("env", ["venv", "", "of-jobs"])
def test_an_environment_must_be_of_job_or_a_path(fleetfix: Line, well: Fleet, env: str) -> None:
    with well:
        result = fleetfix(*ALL, "--env", env)
    assert (result.code, well["gpu01"].opened) == (1, 0)
    assert "is neither of-job nor an absolute path" in result.err


WRONG = Condition(text="x")
LOST = Failure(kind="unreachable", message="x")


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        ([Seen("a")], 0),
        ([Seen("a"), Seen("b", conditions=(WRONG,))], 2),
        ([Seen("a"), Seen("b", failure=LOST)], 4),
        ([Seen("a", conditions=(WRONG,)), Seen("b", failure=LOST)], 2),
        ([Seen("a", failure=Failure(kind="no_python", message="x")), Seen("b", failure=LOST)], 2),
    ],
)
def test_the_exit_code_says_the_worst(seen: list[Seen], code: int) -> None:
    assert exit_code(seen) == code


def facts(**other: Any) -> HostFacts:
    rates = other.pop("rates", NO_RATES)
    return facts_of(reply(**other), rates, (999.9, 1000.6))


def trains_at(rate: float) -> Completed:
    points = {"jsonl": [[str(step), str(rate)] for step in range(30)]}
    return Completed(value={"points": points, "whole": {}, "log": "/l", "job": {}})


def test_a_thousand_hosts_fit_one_screen() -> None:
    seen = []
    for n in range(1000):
        name = f"gpu{n:04}"
        if n % 100 == 7:
            seen.append(
                Seen(name, failure=Failure(kind="unreachable", message=f"{name}: no answer in 15 s"))
            )
            continue
        wrong = {"query": answer("", None)} if n % 250 == 1 else {}
        more = {"jobs": []} if n % 3 == 0 else {"jobs": [job(pid=4000 + n)]}
        slow = 12800.0 if n % 200 == 5 else 20000.0 + n
        seen.append(
            Seen(
                name,
                facts(
                    kernel=f"6.8.{n % 40}" if n % 11 == 0 else "6.8.0",
                    load=float(n % 60),
                    gpus=wrong,
                    rates=trains_at(slow),
                    disks={"asked": [["/", 100 * GIB, (n % 90 + 5) * GIB, 0, 0]], "others": []},
                    **more,
                ),
            )
        )
    text = inspect_text(seen, inventory="lab", playbooks=("purge-cu13",))
    lines = text.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) < 160
    assert lines[0] == "1000 hosts, 990 answered"
    assert any(line.startswith("  tok/s") and "12.8K" in line for line in lines)
    assert any(line.startswith("  kernel       36 other values: ") for line in lines)
    assert "  gpu[0001,0251,0501,0751] (4): nvidia-smi does not answer" in lines
    assert lines[-1].endswith("(10): no answer in 15 s")


def test_hosts_that_were_not_reached_are_named_whatever_the_reasons() -> None:
    names = [f"n{number:02}" for number in range(1, 30, 2)]
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    why = {name: f"no {words[place % 8]}" for place, name in enumerate(names)}
    seen = [Seen(name, failure=Failure(kind="no_python", message=text)) for name, text in why.items()]
    told = inspect_text(seen)
    assert [name for name in names if name.removeprefix("n") not in told] == []
    assert told.endswith("  n[13,15,29] (3): 2 other reasons")


def test_orphans_of_a_fleet_are_one_condition() -> None:
    seen = [Seen(f"gpu{n}", facts(jobs=[job(pid=4000 + n, orphan=True)])) for n in range(1, 9)]
    told = inspect_text(seen)
    assert "  gpu[1-8] (8): alice's process 4001…4008 (" in told


def test_a_lease_that_has_run_out_is_none(fleetfix: Line, well: Fleet) -> None:
    lease = Lease(run="r8", operator="bob", controller="vm", since="now", expires=0.0, epoch=1, boot_id="b")
    well["gpu01"].lease = lease
    with well:
        assert fleetfix(*ALL).code == 0
        well["gpu01"].lease = lease.model_copy(update={"expires": 9e9})
        purpose = Purpose(run="r8", playbook="mend", dry=False, operator="bob", controller="vm")
        well["gpu01"].claim(purpose, ["stop job 4"])
        result = fleetfix(*ALL)
    assert "  gpu01: run r8 of bob on vm writes here now" in result.out
    assert "unfinished" not in result.out, "it is at work"


def test_a_few_scheduler_nodes_differ_from_hosts_that_have_none(fleetfix: Line, well: Fleet) -> None:
    well["gpu02"].on("facts.survey", survey(schedulers=["Slurm"]))
    with well:
        lines = fleetfix(*ALL).out.splitlines()
    assert "scheduler    none (3 of 4)" in lines
    assert "  scheduler    Slurm: gpu02" in lines
