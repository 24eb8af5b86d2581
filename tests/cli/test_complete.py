"""What TAB offers in a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetfix.transports.scripted import Fleet
from tests.cli.conftest import Line


def offered(line: str, **environ: str) -> list[str]:
    """Ask as bash does, with the cursor at the end of the line."""
    words = line.split(" ")
    asked = {"_FLEETFIX_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", "from fleetfix.cli.main import run; run()"],
        env={**os.environ, **asked, **environ},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("fleetfix run pur", ["purge-cu13"]),
        ("fleetfix lint ./la", ["./lamps.yaml"]),
        ("fleetfix run lamps.yaml -l gpu03", ["gpu03"]),
        ("fleetfix run lamps.yaml --hosts @", ["@front"]),
        ("fleetfix plan lamps.yaml -l gpu01,@f", ["gpu01,@front"]),
        ("fleetfix hosts gpu0", ["gpu01", "gpu02", "gpu03", "gpu04"]),
        ("fleetfix run lamps.yaml --set ", ["second="]),
        ("fleetfix run lamps.yaml --secret ", ["become="]),
        ("fleetfix run lamps.yaml -i hos", ["hosts.yaml"]),
        ("fleetfix run lamps.yaml -i la", ["lab", "lamps.yaml"]),
        ("fleetfix run lamps.yaml -i ssh", ["ssh-config:"]),
        ("fleetfix explain cuda", ["cuda_wheels"]),
        ("fleetfix lab break gpu01 --fault vani", ["vanish"]),
        ("fleetfix show ", []),
    ],
)
def test_names_are_offered(line: str, wanted: list[str]) -> None:
    assert offered(line, FLEETFIX_INVENTORY="hosts.yaml") == wanted


def test_runs_are_offered_the_newest_first(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        first = fleetfix("plan", "./lamps.yaml", "-i", "hosts.yaml", "-l", "gpu01").run
    assert offered("fleetfix rollback ") == ["last", first]


def test_the_hosts_of_the_run_that_is_named_are_offered(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        run = fleetfix("plan", "./lamps.yaml", "-i", "hosts.yaml", "-l", "gpu[01-02]").run
    assert offered(f"fleetfix show {run} ") == ["gpu01", "gpu02"]
    assert offered("fleetfix show last gpu02") == ["gpu02"]
    assert offered("fleetfix rollback last --hosts gpu01,") == ["gpu01,gpu01", "gpu01,gpu02"]
    assert offered("fleetfix show nosuch ") == []


def test_saved_plans_are_offered_and_no_other_file(fleetfix: Line, fleet: Fleet, place: Path) -> None:
    (place / "folder").mkdir()
    with fleet:
        fleetfix("plan", "./lamps.yaml", "-i", "hosts.yaml", "-l", "gpu01", "-o", "p.json")
        fleetfix("plan", "./lamps.yaml", "-i", "hosts.yaml", "-l", "gpu01", "-o", "folder/q.json")
    (place / "other.json").write_text("{}")
    assert offered("fleetfix apply ") == ["folder/", "p.json", "state/"]
    assert offered("fleetfix apply folder/") == ["folder/q.json"]
    assert offered(f"fleetfix apply {place}/p") == [f"{place}/p.json"]


def test_what_is_broken_offers_nothing_and_says_nothing(place: Path) -> None:
    (place / "bad.yaml").write_text("hosts: [\n")
    assert offered("fleetfix hosts g", FLEETFIX_INVENTORY="bad.yaml") == []
    assert offered("fleetfix hosts g", FLEETFIX_INVENTORY="nosuch") == []
    assert offered("fleetfix show 2", FLEETFIX_STATE_DIR="/dev/null") == []
    assert not (place / "state").exists()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["hosts", "@", "fr"], ["@front"]),
        (["hosts", "@"], ["@front"]),
        (["hosts", "gpu01,", "@", "fr"], ["@front"]),
        (["hosts", "gpu01", "@", "fr"], []),
        (["plan", "lamps.yaml", "--hosts", "gpu0[1-2]!", "@", "f"], ["@front"]),
        (["hosts", "-x", "@", "failed", ":"], ["last"]),
        (["hosts", "-x", "@", "failed", ":", "la"], ["last"]),
        (["hosts", "-x", "gpu01,", "@", "failed", ":", "la"], ["last"]),
        (["hosts", "-i", "state.json", "@", "state", ":", "i"], ["idle"]),
        (["hosts", "-i", "state.json", "@", "state", ":"], ["drain", "idle"]),
        (["hosts", "-i", "ssh-config", ":", "-l", "x"], []),
    ],
)
def test_names_are_offered_where_bash_has_broken_them(
    words: list[str], wanted: list[str], place: Path, fleetfix: Line, fleet: Fleet
) -> None:
    """As bash itself has them: broken at @ and at a colon, blanks forgotten, one a line."""
    with fleet:
        fleetfix("plan", "./lamps.yaml", "-i", "hosts.yaml", "-l", "gpu01")
    groups = {"state:idle": ["a"], "state:drain": ["a"], "_meta": {"hostvars": {}}}
    (place / "state.json").write_text(json.dumps(groups))
    line = ["fleetfix", *words]
    found = offered("\n".join(line), COMP_CWORD=str(len(line) - 1), FLEETFIX_INVENTORY="hosts.yaml")
    assert sorted(one for one in found if "2" not in one) == wanted
