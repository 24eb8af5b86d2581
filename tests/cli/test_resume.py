"""`resume`, `commit` and `release`: how a run that was cut short is brought to its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetfix.cli import consent
from fleetfix.journal import Journal
from fleetfix.session import Purpose
from fleetfix.state import fold
from fleetfix.transports.scripted import Fleet
from tests.cli.conftest import Line, Result

LAMPS = ("lamps.yaml", "-i", "hosts.yaml")
ALL = ("--hosts", "*")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def cut(fleetfix: Line, fleet: Fleet) -> Callable[..., Result]:
    """A run that was interrupted on its canary, between its two steps."""

    def make(*more: str) -> Result:
        world = fleet["gpu01"].world
        world["hook"] = lambda: (world.pop("hook"), interrupt())
        with fleet:
            return fleetfix("run", *LAMPS, *ALL, "--yes", *more)

    return make


def test_what_was_interrupted_names_the_commands_and_is_resumed(
    cut: Callable[..., Result], fleetfix: Line, fleet: Fleet
) -> None:
    result = cut()
    assert result.code == 130
    assert "cancelled        gpu01: left at a safe point, before right" in result.out
    assert f"go on with gpu[01-04]: fleetfix resume {result.run}" in result.out.splitlines()
    assert f"go back on gpu01: fleetfix rollback {result.run}" in result.out.splitlines()
    with fleet:
        on = fleetfix("resume", result.run, "--yes")
    assert on.code == 0, on.err
    assert on.run == result.run
    assert "4 changed" in on.out
    assert [fleet[name].runs("do") for name in fleet] == [["shell.run", "shell.run"]] * 4
    assert f"run {result.run} goes on with gpu[01-04] (4)" in on.err


def test_a_run_that_ended_well_has_nothing_to_resume(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, *ALL, "--yes")
        again = fleetfix("resume", "last", "--yes")
    assert again.code == 0
    assert again.out.splitlines()[0] == "nothing to resume: every host has come to its end"
    assert again.run == done.run


def test_a_run_that_went_back_has_nothing_to_resume(
    cut: Callable[..., Result], fleetfix: Line, fleet: Fleet
) -> None:
    run = cut("--hosts", "gpu01").run
    with fleet:
        fleetfix("release", run, "--hosts", "gpu01")
        back = fleetfix("rollback", run)
        again = fleetfix("resume", run, "--hosts", "gpu01", "--yes")
    assert back.code == 0
    assert (again.code, "nothing of run" in again.err) == (1, True)
    assert fleet["gpu01"].world["left"] is False


def test_what_cannot_be_resumed_says_so_in_one_line(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        dry = fleetfix("plan", *LAMPS, *ALL)
        of_dry = fleetfix("resume", dry.run)
        unknown = fleetfix("resume", "20300101-000000-lamps-aaaa")
    assert (of_dry.code, "is a dry run" in of_dry.err) == (1, True)
    assert (unknown.code, "--hosts PATTERN" in unknown.err) == (1, True)


def test_a_resume_keeps_to_the_hosts_that_are_named(
    cut: Callable[..., Result], fleetfix: Line, fleet: Fleet
) -> None:
    run = cut().run
    with fleet:
        one = fleetfix("resume", run, "--hosts", "gpu01", "--yes")
        strange = fleetfix("resume", run, "--hosts", "gpu01", "--yes")
        told = [fleetfix("show", run, name).out for name in ("gpu01", "gpu02")]
        rest = fleetfix("resume", run, "--yes")
    assert one.code == 2
    assert "1 changed" in one.out
    assert "3 not_started" in one.out
    assert ["taken up again" in out for out in told] == [True, False]
    assert (strange.code, "nothing of run" in strange.err) == (1, True)
    assert (rest.code, "4 changed" in rest.out) == (0, True)


def test_an_edited_playbook_changes_nothing_for_a_run_that_began_before(
    cut: Callable[..., Result], fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    run = cut().run
    text = (place / "lamps.yaml").read_text()
    (place / "lamps.yaml").write_text(text.replace("second: right", "second: middle"))
    with fleet:
        on = fleetfix("resume", run, "--yes")
    assert on.code == 0
    assert "was edited since: the run goes on with the text that it began with" in on.err
    assert all(fleet[name].world == {"left": True, "right": True} for name in fleet)


def test_without_a_terminal_a_resume_needs_a_yes(
    cut: Callable[..., Result], fleetfix: Line, fleet: Fleet
) -> None:
    run = cut().run
    with fleet:
        result = fleetfix("resume", run)
    assert (result.code, "--yes" in result.err) == (1, True)
    assert fleet["gpu01"].writes() == 1


def test_a_resume_at_a_terminal_shows_what_is_left_and_asks(
    cut: Callable[..., Result], fleetfix: Line, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cut().run

    async def no() -> str:
        return "n"

    monkeypatch.setattr(consent, "at_terminal", lambda: True)
    monkeypatch.setattr(consent, "_typed", no)
    with fleet:
        result = fleetfix("resume", run)
    assert result.code == 3
    assert "go on with 4 hosts gpu[01-04]?" in result.err
    assert fleet["gpu01"].writes() == 1
    assert f"go back on gpu01: fleetfix rollback {run}" in result.out


def test_the_plan_of_a_resume_is_what_is_left_and_that_of_the_run_what_there_was(
    cut: Callable[..., Result], fleetfix: Line, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cut("--batch", "1").run
    with fleet:
        fleetfix("resume", run, "--hosts", "gpu01", "--yes")
    fleet["gpu02"].world["hook"] = lambda: (fleet["gpu02"].world.pop("hook"), interrupt())
    with fleet:
        fleetfix("resume", run, "--yes")
    fleet["gpu02"].world["right"] = True  # what is left there was done meanwhile

    async def yes() -> str:
        return "y"

    monkeypatch.setattr(consent, "at_terminal", lambda: True)
    monkeypatch.setattr(consent, "_typed", yes)
    with fleet:
        result = fleetfix("resume", run)
        shown = fleetfix("show", run)
    assert (result.code, "4 changed" in result.out) == (0, True)
    asked = result.err.partition("go on with 3 hosts gpu[02-04]?")[0]
    assert "plan: lamps on gpu[02-04] (3)," in asked
    assert "gpu01" not in asked
    assert "gpu02: begun before: nothing more to change; the rest is checked" in asked
    assert "gpu[03-04] (2):\n" in asked
    assert "nothing to do" not in asked
    assert "order: 1 host of batch 1 first, then batches of 1" in asked
    assert "plan: lamps on gpu[01-04] (4)," in shown.out
    assert "gpu[01-04] (4):\n  left" in shown.out
    assert "order: canary of 1, then batches of 1" in shown.out


def test_a_run_that_its_policy_halted_would_halt_again(fleetfix: Line, fleet: Fleet) -> None:
    fleet["gpu01"].world["broken"] = "right"
    with fleet:
        halted = fleetfix("run", *LAMPS, *ALL, "--yes")
        opened = [fleet[name].opened for name in fleet]
        again = fleetfix("resume", halted.run, "--yes")
    assert halted.code == 3
    assert (again.code, "would halt at once, as before: the canary gpu01" in again.err) == (1, True)
    assert [fleet[name].opened for name in fleet] == opened


def test_from_another_machine_the_hosts_tell_how_far_they_are(
    cut: Callable[..., Result], fleetfix: Line, fleet: Fleet, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cut("--set", "second=right").run
    (place / "lamps.yaml").unlink()
    monkeypatch.setenv("FLEETFIX_STATE_DIR", str(place / "elsewhere"))
    with fleet:
        wrong = fleetfix("resume", run, "-i", "hosts.yaml", "--hosts", "gpu04", "--yes")
        on = fleetfix("resume", run, "-i", "hosts.yaml", *ALL, "--yes")
    assert (wrong.code, "keeps anything of run" in wrong.err) == (1, True)
    assert on.code == 0, on.err
    assert [fleet[name].runs("do") for name in fleet] == [["shell.run", "shell.run"]] * 4
    with Journal.open(place / "elsewhere") as journal:
        state = fold(journal.records(run))
    assert [wave.hosts for wave in state.waves] == [("gpu01",), ("gpu02", "gpu03", "gpu04")]


def test_a_run_that_is_driven_cannot_be_taken_up(
    cut: Callable[..., Result], fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    run = cut().run
    with Journal.open(place / "state") as journal, journal.drive(run), fleet:
        for command in ("resume", "commit", "release", "rollback"):
            result = fleetfix(command, run)
            assert result.code == 1
            assert "is being driven by another process" in result.err


@pytest.mark.parametrize("command", ["resume", "commit", "release", "rollback"])
def test_a_run_that_another_controller_is_at_work_on_is_left_to_it(
    cut: Callable[..., Result],
    fleetfix: Line,
    fleet: Fleet,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    run = cut().run
    purpose = Purpose(
        run=run,
        playbook="lamps",
        dry=False,
        operator="bob",
        controller="vm",
        reason="a swap",
        driver="bob's",
    )
    host = fleet["gpu01"]
    host.grant(purpose)
    asked = (command, run, "-i", "hosts.yaml", "--hosts", "gpu01", "--yes")
    monkeypatch.setenv("FLEETFIX_STATE_DIR", str(place / "elsewhere"))
    with fleet:
        refused, again = fleetfix(*asked), fleetfix(*asked)
        for said in (refused, again):
            assert said.code == (1 if command == "resume" else 2)
            assert f"run {run} of bob on vm writes to this host since" in said.err
            assert "(a swap)" in said.err
        assert host.lease is not None
        assert (host.lease.operator, list(host.claims)) == ("bob", [run])
        assert host.runs("undo") == []
        taken = fleetfix(*asked, "--take-over")
    assert taken.code == 0, taken.err
    assert host.lease is None


def at_safe_point(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody at a terminal answers the question that comes after ^C."""

    async def typed() -> str:
        return answer

    monkeypatch.setattr(consent, "at_terminal", lambda: True)
    monkeypatch.setattr(consent, "_typed", typed)


@pytest.mark.parametrize(
    ("answer", "outcome", "right"),
    [("finish\n", "1 changed", True), ("rollback\n", "1 rolled_back", None), ("\n", "1 cancelled", None)],
)
def test_at_a_safe_point_the_operator_chooses(
    answer: str,
    outcome: str,
    right: bool | None,
    cut: Callable[..., Result],
    fleet: Fleet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_safe_point(answer, monkeypatch)
    result = cut()
    assert result.code == 130
    assert "at a safe point: gpu01. finish, rollback, or leave for later? [f/r/L]" in result.err
    assert outcome in result.out
    assert "3 not_started" in result.out
    assert fleet["gpu01"].world.get("right") is right
    assert fleet["gpu01"].world["left"] is (outcome != "1 rolled_back")


def test_a_release_frees_the_host_and_undoes_nothing(
    cut: Callable[..., Result], fleetfix: Line, fleet: Fleet
) -> None:
    run = cut().run
    with fleet:
        refused = fleetfix("run", *LAMPS, "--hosts", "gpu01", "--yes")
        released = fleetfix("release", run, "--reason", "mended by hand")
        shown = fleetfix("show", run, "gpu01")
        again = fleetfix("resume", run, "--hosts", "gpu01", "--yes")
        free = fleetfix("run", *LAMPS, "--hosts", "gpu01", "--yes")
    assert "unfinished" in refused.out
    assert released.code == 0
    assert "gpu01 released: left as it is: done: run `light left`" in released.err
    assert "released: left as it is" in shown.out
    assert "(mended by hand)" in shown.out
    assert again.code == 1
    assert free.code == 0
    assert fleet["gpu01"].runs("undo") == []


def test_what_is_committed_is_never_undone(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "@front", "--yes")
        kept = fleetfix("commit", done.run, "--hosts", "gpu01")
        refused = fleetfix("rollback", done.run)
        other = fleetfix("rollback", done.run, "--hosts", "gpu02")
        shown = fleetfix("show", done.run, "gpu01")
        whole = fleetfix("show", done.run)
    assert "committed        gpu01: what was done stays, there is no way back" in whole.out
    assert kept.code == 0
    assert "gpu01 committed: what the run did there stays" in kept.err
    assert (refused.code, "was committed on gpu01" in refused.err) == (1, True)
    assert "--hosts 'gpu02' leaves them out" in refused.err
    assert other.code == 0
    assert fleet["gpu01"].world["left"] is True
    assert "committed" in shown.out


def test_a_committed_host_refuses_a_rollback_from_another_machine_too(
    fleetfix: Line, fleet: Fleet, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "gpu01", "--yes")
        fleetfix("commit", done.run)
        monkeypatch.setenv("FLEETFIX_STATE_DIR", str(place / "elsewhere"))
        back = fleetfix("rollback", done.run, "-i", "hosts.yaml", "--hosts", "gpu01")
    assert "was committed here" in back.err
    assert back.code == 2
    assert fleet["gpu01"].runs("undo") == []


def test_a_release_at_a_terminal_says_what_it_means_and_asks(
    cut: Callable[..., Result], fleetfix: Line, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cut().run
    monkeypatch.setattr(consent, "at_terminal", lambda: True)
    monkeypatch.setattr(consent, "ask", lambda question: False)
    with fleet:
        result = fleetfix("release", run)
    assert (result.code, "not confirmed; nothing was done" in result.err) == (1, True)
    assert "gpu01: stays: run `light left`" in result.err
    assert "nothing is undone, and other runs may change these hosts then" in result.err
    assert list(fleet["gpu01"].claims) == [run]


def test_going_back_is_not_asked_for_while_another_process_drives_the_run(
    cut: Callable[..., Result], fleetfix: Line, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cut().run
    monkeypatch.setattr(consent, "at_terminal", lambda: True)
    with Journal.open(place / "state") as journal, journal.drive(run):
        refused = fleetfix("rollback", run)
    assert (refused.code, "is being driven by another process" in refused.err) == (1, True), refused.err
    assert "[y/N]" not in refused.err


def test_what_went_back_is_not_committed(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, *ALL, "--yes")
        fleetfix("rollback", done.run, "--hosts", "gpu01", "--yes")
        kept = fleetfix("commit", done.run)
    assert kept.code == 0
    assert "gpu01: nothing is left to commit: the run went back here" in kept.err
    assert "committed        gpu[02-04] (3): what was done stays" in fleetfix("show", done.run).out
