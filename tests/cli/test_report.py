"""`report`: a file for those who were not there, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetfix.transports.scripted import Fleet
from tests.cli.conftest import Line

LAMPS = ("./lamps.yaml", "-i", "hosts.yaml")


@pytest.fixture
def run(fleetfix: Line, fleet: Fleet) -> str:
    """A run in which gpu01 went back."""
    fleet["gpu01"].world["broken"] = "right"
    with fleet:
        return fleetfix("run", *LAMPS, "--hosts", "gpu*", "--yes", "--reason", "incident 7").run


@pytest.mark.parametrize("name", ["r.html", "r.HTM", "r.md"])
def test_a_report_is_written_in_the_form_that_its_name_says(
    name: str, run: str, fleetfix: Line, place: Path
) -> None:
    result = fleetfix("report", "last", "-o", name)
    assert (result.code, result.out) == (0, "")
    assert result.err == f"report of run {run}: {name}\n"
    text = (place / name).read_text()
    assert text.startswith("<!DOCTYPE html>" if name != "r.md" else "<!-- fleetfix report")
    for said in ("incident 7", "rolled_back", "the right lamp is \\x1b[31mbroken", "left lit"):
        assert said in text
    assert (place / name).stat().st_mode & 0o777 == 0o600


def test_a_report_replaces_a_report_and_nothing_else(run: str, fleetfix: Line, place: Path) -> None:
    (place / "notes.md").write_text("# my notes\n")
    refused = fleetfix("report", run, "-o", "notes.md")
    assert (refused.code, (place / "notes.md").read_text()) == (1, "# my notes\n")
    assert "notes.md is there and is no report of fleetfix" in refused.err
    (place / "r.md").write_text("")
    for _ in range(2):
        assert fleetfix("report", run, "-o", "r.md").code == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("last", "-o", "r.pdf"), "r.pdf: a report is a page or Markdown"),
        (("last", "-o", "nosuch/r.md"), "there is no folder"),
        (("nosuch", "-o", "r.md"), "no run is called 'nosuch'"),
        (("last",), "missing option"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    words: tuple[str, ...], why: str, run: str, fleetfix: Line, place: Path
) -> None:
    result = fleetfix("report", *words)
    assert (result.code, result.out) == (1, "")
    assert why in result.err
    assert not (place / "r.md").exists()
