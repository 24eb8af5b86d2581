"""What is pending is decided from facts alone."""

from __future__ import annotations

from typing import Any

import pytest

from fleetfix.engine.pending import foresee
from fleetfix.playbook import Step
from tests.engine.toys import Lit, Switch, step

FLAGSHIP: list[Step] = [
    step("parts", Switch(name="parts"), when_pending=("wheels",)),
    step("stop", Switch(name="job", on=False, key="stop"), when_pending=("wheels", "caches", "libs")),
    step("idle", Lit(name="idle"), when_changed=("stop",)),
    step("wheels", Switch(name="wheels")),
    step("loads", Lit(name="loads"), when_changed=("wheels",)),
    step("caches", Switch(name="caches", follows="wheels")),
    step("train", Switch(name="job", key="start", follows="stop")),
    step("libs", Lit(name="libs")),
]

HEALTHY: dict[str, Any] = {
    "parts": False,
    "stop": True,
    "idle": False,
    "wheels": True,
    "loads": True,
    "caches": True,
    "train": True,
    "libs": True,
}


def pending(**facts: Any) -> list[str]:
    return [one.step.id for one in foresee(FLAGSHIP, {**HEALTHY, **facts}) if one.pending]


def test_on_a_healthy_host_nothing_is_pending() -> None:
    assert pending() == []


def test_a_contaminated_host_is_stopped_mended_and_started_again() -> None:
    assert pending(wheels=False) == ["parts", "stop", "wheels", "caches", "train"]


def test_stale_caches_alone_stop_the_job_and_need_no_parts() -> None:
    assert pending(caches=False) == ["stop", "caches", "train"]


def test_a_job_that_still_maps_the_wrong_libraries_is_restarted() -> None:
    assert pending(libs=False) == ["stop", "train", "libs"]


def test_a_check_behind_pending_steps_is_not_judged_yet() -> None:
    by_id = {one.step.id: one for one in foresee(FLAGSHIP, {**HEALTHY, "wheels": False, "libs": False})}
    assert by_id["libs"].verdict is None
    assert not by_id["libs"].pending


def test_a_check_with_nothing_before_it_is_judged() -> None:
    by_id = {one.step.id: one for one in foresee(FLAGSHIP, HEALTHY)}
    assert by_id["libs"].verdict is not None
    assert by_id["libs"].verdict.result == "pass"


def test_with_the_job_already_stopped_it_is_started_and_nothing_else() -> None:
    assert pending(stop=False, train=False) == ["train"]


@pytest.mark.parametrize("missing", ["libs", "loads"])
def test_a_check_without_facts_is_not_pending(missing: str) -> None:
    facts = {id: fact for id, fact in HEALTHY.items() if id != missing}
    assert [one.step.id for one in foresee(FLAGSHIP, facts) if one.pending] == []
