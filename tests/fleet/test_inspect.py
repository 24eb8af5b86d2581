"""A lab is looked at, judged and asked: nothing on it changes, and what is wrong is found."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.fleet.conftest import Site

pytestmark = pytest.mark.fleet


def test_a_look_finds_what_is_wrong_and_changes_nothing(site: Callable[..., Site]) -> None:
    one = site("gpu[01-03]", contaminated=["gpu02"])
    for name, low, high in (("gpu01", 19e3, 21e3), ("gpu02", 12e3, 13.5e3), ("gpu03", 19e3, 21e3)):
        one.wait_for_speed(name, low, high)
    before = {name: one.files(name) for name in ("gpu01", "gpu02")}
    all_hosts = ("--hosts", "gpu*", "-i", one.inventory)

    seen = one("inspect", *all_hosts, "--env", "of-job")
    lines = seen.out.splitlines()
    assert seen.exit == 2, seen.err
    assert "gpus         2 NVIDIA H200, 140.4 GiB each" in lines
    assert any(line.startswith("  tok/s/GPU    gpu02 12.") for line in lines), seen.out
    wrong = "  gpu02: /opt/train/venv: 17 packages of another CUDA beside CUDA 12, 21 files of 4 packages"
    assert f"{wrong} are not as the RECORD says" in lines, seen.out
    assert f"    fleetfix run purge-cu13 --hosts gpu02 -i {one.inventory}" in lines
    assert not any(line.startswith(("  gpu01", "  gpu03", "  gpu[")) for line in lines), seen.out

    sound = one(
        "inspect", "--hosts", "gpu01,gpu03", "-i", one.inventory, "--env", "/opt/train/venv", "--json"
    )
    told = {told["host"]: told for told in map(json.loads, sound.out.splitlines())}
    assert sound.exit == 0, sound.out
    assert told["gpu03"]["facts"]["jobs"][0]["gpus"] == [0, 1]
    assert told["gpu03"]["environments"][0]["findings"] == []
    assert {name: one.files(name) for name in before} == before

    # The same as claims: planned, then judged, with one host whose driver is not what it should be.
    planned = one("plan", "inspect-fleet", *all_hosts)
    assert planned.exit == 0, planned.out
    one.lab.break_host("gpu03", "driver_mismatch")
    judged = one.run("gpu*", "--set", "gpus=2", "--set", "driver=590.*", playbook="inspect-fleet")
    assert judged.exit == 2, judged.told
    assert judged.outcomes == {"gpu01": "ok", "gpu02": "ok", "gpu03": "failed"}, judged.told
    assert "different versions" in judged.finished("gpu03")["reason"]
    assert judged.of("change_started") == []

    # And asked by hand: one that fails is told apart, equal output once.
    asked = one("exec", *all_hosts, "-b", "--", "nvidia-smi --query-gpu=count --format=csv,noheader")
    assert asked.exit == 2
    assert asked.out.splitlines()[:5] == ["-" * 15, "gpu[01-02] (2)", "-" * 15, "2", "2"]
    assert "exit 18      gpu03" in asked.err.splitlines()
    assert {name: one.files(name) for name in before} == before
