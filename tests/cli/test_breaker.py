"""The breaker, from the run that trips it to the word that resets it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from fleetfix.cli import consent
from fleetfix.transports.scripted import Fleet
from tests.cli.conftest import Line
from tests.engine.test_evidence import packed

LAMPS = ("./lamps.yaml", "-i", "hosts.yaml")
ALL = ("--hosts", "gpu[01-04]", "--yes")
LOOK = """
name: look
steps:
  - id: keep
    collect: {what: light}
"""


def tripped(fleetfix: Line, fleet: Fleet, *words: str) -> str:
    """Run into a rollback that fails; says the run's id."""
    fleet["gpu01"].world.update(broken="right", stuck="left")
    with fleet:
        result = fleetfix("run", *LAMPS, *ALL, *words)
    assert result.code == 3
    assert "the breaker tripped: going back failed on gpu01" in result.out
    assert "fleetfix breaker reset" in result.out
    assert "the breaker tripped: going back failed on gpu01; no run changes hosts" in result.err
    return result.run


def test_a_tripped_breaker_refuses_runs_and_lets_all_else_go_on(
    fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    (place / "look.yaml").write_text(LOOK)
    fleet.on("evidence.take", packed("a lamp\n"))
    run = tripped(fleetfix, fleet)
    opened = fleet["gpu02"].opened
    with fleet:
        refused = fleetfix("run", *LAMPS, *ALL)
        assert refused.code == 3
        first, hint = refused.err.splitlines()
        assert first.endswith(f"is tripped by run {run}: going back failed on gpu01")
        assert "fleetfix breaker reset" in hint
        assert fleet["gpu02"].opened == opened, "nothing was connected to"
        assert fleetfix("plan", *LAMPS, "--hosts", "gpu[02-04]").code == 0
        assert fleetfix("run", *LAMPS, "--hosts", "gpu02", "--dry-run").code == 0
        looked = fleetfix("run", "./look.yaml", "-i", "hosts.yaml", "--hosts", "gpu02")
        assert looked.code == 0, "checks alone can change nothing"
        fleet["gpu01"].world["stuck"] = ""
        assert fleetfix("rollback", run, "--yes").code == 0
        assert fleetfix("run", *LAMPS, *ALL).code == 3, "a rollback that goes well resets nothing"


def test_status_tells_what_holds_and_what_was_reset_by_whom(fleetfix: Line, fleet: Fleet) -> None:
    assert fleetfix("breaker", "status").out == "no breaker is tripped\n"
    run = tripped(fleetfix, fleet)
    told = fleetfix("breaker", "status")
    assert told.code == 0
    assert f"by run {run}: going back failed on gpu01" in told.out
    row = json.loads(fleetfix("breaker", "status", "--json").out)
    assert (row["run"], row["reset"]) == (run, None)
    done = fleetfix("breaker", "reset", "--reason", "the lamp was replaced", "--yes")
    assert done.code == 0
    again = fleetfix("breaker", "status").out.splitlines()
    assert again[0] == "no breaker is tripped"
    assert again[-1].endswith("the lamp was replaced")
    fleet["gpu01"].world.update(broken="", stuck="")
    with fleet:
        fleetfix("rollback", run, "--yes")
        assert fleetfix("run", *LAMPS, *ALL).code == 0


def test_after_a_reset_a_run_is_taken_up_on_the_hosts_that_it_held_back(
    fleetfix: Line, fleet: Fleet
) -> None:
    run = tripped(fleetfix, fleet, "--canary", "0", "--batch", "1", "--max-failures", "1")
    with fleet:
        refused = fleetfix("resume", run, "--yes")
        assert (refused.code, "is tripped by run" in refused.err) == (3, True)
        fleetfix("breaker", "reset", "--reason", "one bad lamp, and it is out", "--yes")
        resumed = fleetfix("resume", run, "--hosts", "gpu[02-04]", "--yes")
    assert "the breaker tripped" not in resumed.out
    assert "changed          gpu[02-04]" in resumed.out, resumed.out + resumed.err
    assert "rollback_failed  gpu01" in resumed.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--yes",), "--reason"),
        (("--yes", "--reason", " "), "with a reason"),
        (("--reason", "x"), "nobody is at a terminal"),
        (("--reason", "x", "--yes", "-i", "other.yaml"), "the breaker of other.yaml is not tripped"),
    ],
)
def test_a_reset_wants_a_reason_a_yes_and_the_right_inventory(
    words: tuple[str, ...], said: str, fleetfix: Line, fleet: Fleet
) -> None:
    tripped(fleetfix, fleet)
    result = fleetfix("breaker", "reset", *words)
    assert (result.code, said in result.err) == (1, True), result.err
    assert json.loads(fleetfix("breaker", "status", "--json").out)["reset"] is None


def test_where_none_is_tripped_there_is_nothing_to_reset(fleetfix: Line) -> None:
    result = fleetfix("breaker", "reset", "--reason", "x", "--yes")
    assert (result.code, "no breaker is tripped" in result.err) == (1, True)


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("\n", 1), ("", 1)])
def test_at_a_terminal_a_reset_is_asked_for(
    typed: str, code: int, fleetfix: Line, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    tripped(fleetfix, fleet)
    monkeypatch.setattr(consent, "at_terminal", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    result = fleetfix("breaker", "reset", "-i", "hosts.yaml", "--reason", "looked")
    assert result.code == code
    assert "again? [y/N]" in result.err


def test_each_policy_has_its_option_and_the_plan_says_it_in_hosts(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        result = fleetfix(
            *("plan", *LAMPS, "--hosts", "gpu[01-04]", "--max-unavailable", "50%", "--soak", "5m"),
            *("--on-unproven", "count", "--batch", "1"),
        )
    assert (
        "order: canary of 1, then batches of 1, 5 min apart; at most 2 hosts out of service at once;"
        " halts at the 1st host that fails, or when more than 2 cannot be reached or are blocked;"
        " a speed that is not proven counts as a failure" in " ".join(result.out.split())
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-unavailable", "some"), "--max-unavailable 'some'"),
        (("--soak", "soon"), "--soak 'soon'"),
        (("--on-unproven", "wait"), "--on-unproven 'wait'"),
    ],
)
def test_an_option_that_cannot_be_meant_is_one_line(
    words: tuple[str, ...], said: str, fleetfix: Line
) -> None:
    result = fleetfix("plan", *LAMPS, "--hosts", "gpu01", *words)
    assert (result.code, said in result.err) == (1, True), result.err


def test_a_stratum_that_no_host_knows_is_refused_and_one_that_is_known_is_planned(
    fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    playbook, inventory = place / "lamps.yaml", place / "hosts.yaml"
    playbook.write_text(playbook.read_text().replace("{canary: 1,", "{canary: 1, strata: [sku],"))
    result = fleetfix("plan", *LAMPS, "--hosts", "gpu[01-04]")
    assert (result.code, "policy.strata names sku" in result.err) == (1, True)
    groups = """\
  odd: {hosts: "gpu[01,03]", vars: {sku: a}}
  even: {hosts: "gpu[02,04]", vars: {sku: b}}
"""
    inventory.write_text(inventory.read_text() + groups)
    with fleet:
        result = fleetfix("plan", *LAMPS, "--hosts", "gpu[01-04]")
        assert "canary of 2 (1 of each sku)" in result.out
        done = fleetfix("run", *LAMPS, *ALL)
    assert "canary: gpu[01-02] (2)" in done.err


@pytest.mark.parametrize("spelled", ["alias.yaml", "folder/../hosts.yaml"])
def test_a_breaker_holds_however_its_inventory_is_spelled(
    spelled: str, fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    (place / "alias.yaml").symlink_to("hosts.yaml")
    (place / "folder").mkdir()
    run = tripped(fleetfix, fleet)
    with fleet:
        refused = fleetfix("run", "./lamps.yaml", "-i", spelled, *ALL)
    assert (refused.code, f"is tripped by run {run}" in refused.err) == (3, True), refused.err
    reset = fleetfix("breaker", "reset", "-i", spelled, "--reason", "looked", "--yes")
    assert reset.code == 0, reset.err


def test_going_back_from_another_machine_trips_the_breaker_there(
    fleetfix: Line, fleet: Fleet, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, *ALL)
        fleet["gpu01"].world["stuck"] = "left"
        monkeypatch.setenv("FLEETFIX_STATE_DIR", str(place / "elsewhere"))
        back = fleetfix("rollback", done.run, "--hosts", "gpu01", "-i", "hosts.yaml", "--yes")
        assert "rollback_failed" in back.out
        refused = fleetfix("run", *LAMPS, "--hosts", "gpu02", "--yes")
    assert (refused.code, f"is tripped by run {done.run}" in refused.err) == (3, True), refused.err
