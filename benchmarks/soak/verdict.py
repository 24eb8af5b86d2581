"""Whether a host is as its outcome says, judged by what the host itself has counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.soak.playbook import BELL, STEPS
from benchmarks.soak.troubles import ENDS_CHANGES


def judge(told: dict[str, Any], log: list[str], marks: set[str], suffered: set[str]) -> list[str]:
    """What is wrong with a host: its outcome against its marks, and its log against at most once."""
    wrong = [f"left open: {told['open']}"] if told["open"] else []
    outcome = told["outcome"]
    if outcome == "changed" and marks != set(STEPS):
        wrong.append(f"only {sorted(marks)} is there")
    elif (
        outcome in ("rolled_back", "unreachable", "not_started", "blocked", "cancelled", "skipped")
        and marks
    ):
        wrong.append(f"{sorted(marks)} is there")
    elif outcome in ("unreachable", "not_started", "blocked", "skipped") and log:
        wrong.append(f"it was begun: {log}")
    elif outcome not in (*ENDS, "in_doubt") or (outcome == "in_doubt" and not suffered & set(ENDS_CHANGES)):
        wrong.append(f"that is no end for it: {told['reason']}")
    if log.count(f"ring {BELL}") > 1:
        wrong.append(f"the bell rang {log.count(f'ring {BELL}')} times")
    for id in STEPS:
        wrong += at_most_once(id, log, bool(suffered & set(ENDS_CHANGES)))
    return wrong


ENDS = ("changed", "rolled_back", "unreachable", "not_started", "blocked", "cancelled", "skipped")


def at_most_once(id: str, log: list[str], cut: bool) -> Iterator[str]:
    """Say where a change ran again although it had run, or, on a host that nothing cut, had begun."""
    begun = ended = 0
    for line in log:
        word, of = line.split(" ", 1) if " " in line else (line, "")
        if of != id:
            continue
        if word == "undo":
            begun = ended = 0
        elif word == "begin":
            begun += 1
            if ended or (begun > 1 and not cut):
                yield f"{id} began again: {log}"
        elif word == "end":
            ended += 1
