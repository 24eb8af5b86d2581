"""A plan that is saved and applied: only as it was shown, and only where it still holds."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from fleetfix import saved_plan
from fleetfix.journal import Journal
from fleetfix.transports.scripted import Fleet
from tests.cli.conftest import Line

LAMPS = ("./lamps.yaml", "-i", "hosts.yaml")


@pytest.fixture
def plan(fleetfix: Line, fleet: Fleet, place: Path) -> Path:
    """A plan of all four hosts, of which gpu04 has nothing to do."""
    fleet["gpu04"].world.update(left=True, right=True)
    with fleet:
        result = fleetfix("plan", *LAMPS, "--hosts", "gpu*", "--out", "p.json")
    assert result.code == 0
    assert "\nnothing was changed\nsaved in p.json, good until 20" in result.out
    assert result.out.splitlines()[-2].endswith(": fleetfix apply p.json")
    return place / "p.json"


def test_a_plan_file_is_private_and_says_what_would_be_done(plan: Path, place: Path) -> None:
    assert plan.stat().st_mode & 0o777 == 0o600
    value = json.loads(plan.read_text())
    assert (value["format"], value["v"], value["playbook"]) == ("fleetfix-plan", 1, "lamps")
    assert value["expires"] - value["made"] == 900
    assert value["hosts"] == ["gpu01", "gpu02", "gpu03", "gpu04"]
    (group,) = value["plans"]
    assert group["hosts"] == "gpu[01-03]"
    assert [change["summary"] for change in group["changes"]] == ["run `light left`", "run `light right`"]
    assert [path.name for path in place.iterdir() if path.name.startswith(".")] == []


def test_a_plan_is_applied_where_it_still_holds(
    plan: Path, fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    fleet["gpu02"].world.update(left=True)
    fleet["gpu03"].world.update(left=True, right=True)
    fleet["gpu04"].world.update(left=False)
    with fleet:
        result = fleetfix("apply", "p.json", "--yes", "--reason", "incident 7")
    assert fleet["gpu01"].world == {"left": True, "right": True}
    assert all(fleet[name].runs("do") == [] for name in ("gpu02", "gpu03", "gpu04"))
    assert "changed          gpu01\n" in result.out
    assert "ok               gpu03\n" in result.out
    assert "gpu04: the host changed since the plan: now it would also run `light left`" in result.out
    assert "gpu02: the host changed since the plan: now there is less to do in left" in result.out
    assert result.code == 2
    with Journal.open(place / "state") as journal:
        started = next(journal.records(result.run)).event
        assert started.kind == "run_started"
        assert (started.dry, started.reason) == (False, "incident 7")
        assert started.plan == json.loads(plan.read_text())["run"]
    shown = fleetfix("show", result.run).out
    assert f"  plan       saved by {started.plan}" in shown


def test_a_plan_applied_twice_finds_nothing_to_do(plan: Path, fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        assert fleetfix("apply", str(plan), "--yes").code == 0
        again = fleetfix("apply", str(plan), "--yes", "--json")
    assert again.code == 0
    assert [json.loads(line)["event"]["kind"] for line in again.out.splitlines()][-1] == "run_finished"
    assert all(len(fleet[name].runs("do")) == 2 for name in ("gpu01", "gpu02", "gpu03"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("plan", *LAMPS, "--hosts", "gpu*", "--out", ""), "no file is named"),
        (("plan", *LAMPS, "--hosts", "gpu*", "--out", "-"), "- is no file"),
        (("apply", "", "--yes"), "no file is named"),
    ],
)
def test_a_file_without_a_name_is_refused_before_anything_connects(
    fleetfix: Line, fleet: Fleet, words: tuple[str, ...], why: str
) -> None:
    with fleet:
        result = fleetfix(*words)
    assert (result.code, result.out) == (1, "")
    assert why in result.err
    assert all(fleet[name].opened == 0 for name in fleet)


@pytest.mark.parametrize("mode", [0o666, 0o622])
def test_a_plan_that_others_may_have_written_is_not_applied(
    plan: Path, fleetfix: Line, fleet: Fleet, mode: int
) -> None:
    plan.chmod(mode)
    opened = [fleet[name].opened for name in fleet]
    with fleet:
        result = fleetfix("apply", str(plan), "--yes")
    assert (result.code, result.out) == (1, "")
    assert "is not applied: others may write to it" in result.err
    assert [fleet[name].opened for name in fleet] == opened


def test_what_is_offered_in_place_of_a_yes_is_there(plan: Path, fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        applied = fleetfix("apply", str(plan))
        run = fleetfix("run", *LAMPS, "--hosts", "gpu*")
    assert "  hint: --yes\n" in applied.err
    assert "  hint: --yes, or --dry-run to see the plan\n" in run.err


def test_nobody_at_a_terminal_must_say_yes(plan: Path, fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        result = fleetfix("apply", str(plan))
        assert (result.code, fleet["gpu01"].runs("do")) == (1, [])
        assert "needs a yes" in result.err


def sealed(plan: Path, **changes: object) -> None:
    """Write other values into a plan file, with the seal that fits them."""
    value = {key: one for key, one in json.loads(plan.read_text()).items() if key != "seal"} | changes
    plan.write_text(json.dumps(value | {"seal": saved_plan._seal(value)}))


def refused(fleetfix: Line, fleet: Fleet, *words: str) -> str:
    """The one line, with its hint, that a plan is refused with; nobody was connected to."""
    asked = [len(fleet[name].executed) for name in fleet]
    with fleet:
        result = fleetfix("apply", *words, "--yes")
    assert (result.code, result.out) == (1, "")
    assert [len(fleet[name].executed) for name in fleet] == asked
    assert [line.startswith("  hint: ") for line in result.err.splitlines()] in ([False, True], [False])
    return result.err.removeprefix("fleetfix: ")


def test_an_old_plan_is_refused_with_its_age(plan: Path, fleetfix: Line, fleet: Fleet) -> None:
    sealed(plan, made=time.time() - 22 * 60)
    assert refused(fleetfix, fleet, "p.json").startswith("p.json is 22 min old; a plan is good for 15 min")
    sealed(plan, made=time.time() - 22 * 60, expires=time.time() + 1e9)
    assert "is 22 min old" in refused(fleetfix, fleet, "p.json")
    sealed(plan, made=time.time() + 3600)
    assert "was made in the future" in refused(fleetfix, fleet, "p.json")


def test_a_plan_is_bound_to_its_playbook(plan: Path, fleetfix: Line, fleet: Fleet, place: Path) -> None:
    text = (place / "lamps.yaml").read_text()
    (place / "lamps.yaml").write_text(text + "# more\n")
    assert "lamps.yaml was edited after p.json was made" in refused(fleetfix, fleet, "p.json")
    (place / "lamps.yaml").unlink()
    assert "there is no file" in refused(fleetfix, fleet, "p.json")


def test_a_plan_is_bound_to_what_the_inventory_says_of_its_hosts(
    plan: Path, fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    text = (place / "hosts.yaml").read_text()
    (place / "hosts.yaml").write_text(text + "# a remark\nvars: {second: left}\n")
    assert "no longer says of these hosts" in refused(fleetfix, fleet, "p.json")
    (place / "hosts.yaml").write_text(text.replace("gpu[01-04]", "gpu[01-03]"))
    assert "has no gpu04 any more" in refused(fleetfix, fleet, "p.json")
    (place / "hosts.yaml").write_text(text + "# a remark\n")
    with fleet:
        assert fleetfix("apply", "p.json", "--yes").code == 0


def test_a_file_that_is_no_good_plan_is_one_line(
    plan: Path, fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    text = plan.read_text()
    for broken in ("", "{", "[" * 100_000, "[]", '{"format": "other"}', "\x00\xff", "3"):
        plan.write_text(broken)
        assert refused(fleetfix, fleet, "p.json").startswith("p.json is no plan of fleetfix\n")
    plan.write_text(text.replace("light right", "light wrong"))
    assert refused(fleetfix, fleet, "p.json").startswith("p.json was changed after it was written\n")
    plan.write_text(text.replace('"v": 1', '"v": 2'))
    assert "was written by another version of fleetfix (format 2)" in refused(fleetfix, fleet, "p.json")
    plan.write_text(text)
    sealed(plan, made=float("nan"))
    assert refused(fleetfix, fleet, "p.json").startswith("p.json is damaged: made\n")
    sealed(plan, hosts=3)
    assert refused(fleetfix, fleet, "p.json").startswith("p.json is damaged")
    assert refused(fleetfix, fleet, "nosuch.json") == "nosuch.json: no such file or directory\n"
    assert refused(fleetfix, fleet, str(place)).endswith("is no regular file\n")
    os.mkfifo(place / "pipe")
    assert refused(fleetfix, fleet, "pipe") == "pipe is no regular file\n"


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("lamps.yaml", "lamps.yaml is there and is no plan of fleetfix"),
        (".", "no file is named"),
        ("state", "state is no regular file"),
        ("nosuch/p.json", "there is no folder"),
        ("lamps.yaml/p.json", "there is no folder"),
        ("/dev/null", "/dev/null is no regular file"),
    ],
)
def test_a_plan_is_saved_over_nothing_but_a_plan(
    out: str, why: str, fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    (place / "state").mkdir(exist_ok=True)
    with fleet:
        result = fleetfix("plan", *LAMPS, "--hosts", "gpu*", "--out", out)
    assert (result.code, result.out) == (1, "")
    assert why in result.err
    assert (place / "lamps.yaml").read_text().startswith("name: lamps")
    assert all(fleet[name].executed == [] for name in fleet)


def test_a_plan_that_was_cut_short_is_not_saved(fleetfix: Line, fleet: Fleet, place: Path) -> None:
    fleet["gpu01"].on("shell.check", lambda args, world: os.kill(os.getpid(), signal.SIGINT))
    with fleet:
        result = fleetfix("plan", *LAMPS, "--hosts", "gpu*", "--out", "p.json")
    assert result.code == 130
    assert not (place / "p.json").exists()
    assert "saved in" not in result.out


def test_a_newer_plan_replaces_the_older(plan: Path, fleetfix: Line, fleet: Fleet) -> None:
    before = plan.read_text()
    with fleet:
        result = fleetfix("plan", *LAMPS, "--hosts", "gpu01", "-o", "p.json", "--detailed-exitcode")
    assert result.code == 6
    assert json.loads(plan.read_text())["hosts"] == ["gpu01"]
    assert plan.read_text() != before


def test_a_resume_of_an_applied_plan_begins_nothing_that_was_not_announced(
    plan: Path, fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    world = fleet["gpu01"].world
    world["hook"] = lambda: (world.pop("hook"), os.kill(os.getpid(), signal.SIGINT))
    with fleet:
        cut = fleetfix("apply", "p.json", "--yes")
        assert cut.code == 130
        fleet["gpu03"].world.update(left=True)
        plan.unlink()
        on = fleetfix("resume", cut.run, "--yes")
    assert {name: len(fleet[name].runs("do")) for name in fleet} == {
        "gpu01": 2, "gpu02": 2, "gpu03": 0, "gpu04": 0,
    }  # fmt: skip
    assert "changed          gpu[01-02] (2)\n" in on.out
    assert "gpu03: the host changed since the plan: now there is less to do in left" in on.out
