"""`watch` and `stop`: a run is followed by its journal alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fleetfix.events import Record, RunInterrupted
from fleetfix.journal import Journal
from fleetfix.transports.scripted import Fleet
from tests.cli.conftest import Line

LAMPS = ("lamps.yaml", "-i", "hosts.yaml")


def copied(place: Path, run: str, name: str, upto: str) -> str:
    """The beginning of a run as a run of its own, as if its controller had ended there."""
    with Journal.open(place / "state") as journal:
        records = [record.model_copy(update={"run": name}) for record in journal.records(run)]
        kinds = [record.event.kind for record in records]
        journal.append(records[: kinds.index(upto) + 1])
    return name


def test_a_run_that_has_ended_is_told_from_its_beginning_and_exits_as_it_did(
    fleetfix: Line, fleet: Fleet
) -> None:
    fleet["gpu01"].world["broken"] = "left"
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "@front", "--yes")
    watched = fleetfix("watch", "last")
    assert watched.code == done.code == 3
    assert watched.out == done.out
    assert watched.err == done.err
    as_json = fleetfix("watch", "last", "--json")
    assert as_json.out == fleetfix("show", "last", "--json").out


def test_a_run_whose_controller_ended_is_followed_up_to_there_and_no_further(
    fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "@front", "--yes")
    dead = copied(place, done.run, "20300101-000000-lamps-dead", "change_started")
    watched = fleetfix("watch", dead)
    assert watched.code == 2
    assert "it did not finish: its controller ended" in watched.out
    assert f"go on: fleetfix resume {dead}" in watched.out.splitlines()


def test_only_a_run_that_is_driven_can_be_stopped(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "@front", "--yes")
    stopped = fleetfix("stop", done.run)
    assert stopped.code == 1
    assert f"no process of this machine drives run {done.run}" in stopped.err


def test_stop_interrupts_the_process_that_drives_the_run(
    fleetfix: Line, fleet: Fleet, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "@front", "--yes")
    run = copied(place, done.run, "20300101-000000-lamps-busy", "change_started")
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    with Journal.open(place / "state") as journal, journal.drive(run):
        stopped = fleetfix("stop", run)
    assert killed == [(os.getpid(), signal.SIGINT)]
    assert stopped.code == 0
    assert "hosts at work go to a safe point" in stopped.out


def test_a_dry_run_is_not_detached(fleetfix: Line) -> None:
    result = fleetfix("run", *LAMPS, "--hosts", "*", "--dry-run", "--detach")
    assert (result.code, "leave out --detach" in result.err) == (1, True)


def test_without_a_terminal_a_detached_run_needs_a_yes_beforehand(fleetfix: Line) -> None:
    result = fleetfix("run", *LAMPS, "--hosts", "*", "--detach")
    assert (result.code, "--yes" in result.err) == (1, True)


@pytest.mark.parametrize(
    ("times", "said"),
    [(0, "go to a safe point"), (1, "everything that runs is cancelled"), (2, "ended at once")],
)
def test_stop_says_what_one_more_signal_means(
    times: int, said: str, fleetfix: Line, fleet: Fleet, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "@front", "--yes")
    run = copied(place, done.run, "20300101-000000-lamps-busy", "change_started")
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    with Journal.open(place / "state") as journal, journal.drive(run):
        seq = journal.last_seq(run)
        for time in range(1, times + 1):
            event = RunInterrupted(signal="SIGINT", times=time)
            journal.append([Record(run=run, seq=seq + time, at=0.0, event=event)])
        assert said in fleetfix("stop", run).out
