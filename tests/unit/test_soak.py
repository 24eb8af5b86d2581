"""The judge of a soak: what it calls wrong, and what right."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak.playbook import STEPS, playbook
from benchmarks.soak.verdict import at_most_once, judge
from fleetfix.playbook import load

MENDED = ["begin first", "end first", "ring bell", "begin second", "end second", "begin third", "end third"]
BACK = [*MENDED, "undo third", "undo second", "undo first"]
ALL = set(STEPS)


def told(outcome: str, *open_: str) -> dict[str, Any]:
    return {"outcome": outcome, "open": list(open_), "reason": ""}


@pytest.mark.parametrize(
    ("outcome", "log", "marks", "suffered"),
    [
        ("changed", MENDED, ALL, set()),
        ("rolled_back", BACK, set(), set()),
        ("unreachable", [], set(), {"vanish"}),
        ("changed", ["begin first", *MENDED], ALL, {"reboot"}),
        ("in_doubt", ["begin first", "end first", "ring bell"], {"first"}, {"reboot"}),
    ],
)
def test_a_host_that_is_as_it_should_be_has_nothing_wrong(
    outcome: str, log: list[str], marks: set[str], suffered: set[str]
) -> None:
    assert judge(told(outcome), log, marks, suffered) == []


@pytest.mark.parametrize(
    ("outcome", "log", "marks", "suffered"),
    [
        ("changed", MENDED, ALL - {"third"}, set()),
        ("rolled_back", BACK, {"first"}, set()),
        ("unreachable", ["begin first"], set(), {"vanish"}),
        ("changed", ["begin first", *MENDED], ALL, {"vanish"}),
        ("changed", [*MENDED, "begin second", "end second"], ALL, {"reboot"}),
        ("changed", [*MENDED, "ring bell"], ALL, {"reboot"}),
        ("in_doubt", MENDED, ALL, {"vanish"}),
        ("failed", [], set(), set()),
    ],
)
def test_a_host_that_is_not_is_told(
    outcome: str, log: list[str], marks: set[str], suffered: set[str]
) -> None:
    assert len(judge(told(outcome), log, marks, suffered)) == 1


def test_what_is_left_open_is_wrong_whatever_the_outcome() -> None:
    assert judge(told("changed", "done: first"), MENDED, ALL, set()) == ["left open: ['done: first']"]


def test_what_was_taken_back_may_be_done_once_more() -> None:
    assert (
        list(at_most_once("first", ["begin first", "end first", "undo first", "begin first"], False)) == []
    )


def test_the_playbook_of_a_soak_loads(write: Any) -> None:
    loaded = load(str(write("soak.yaml", playbook())))
    assert [step.id for step in loaded.steps] == ["first", "bell", "second", "third"]
