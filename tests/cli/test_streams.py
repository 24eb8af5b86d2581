"""Streams that are closed, full or left: a run goes on to its end and keeps its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Shell = Callable[[str], subprocess.CompletedProcess[str]]

PLAYBOOK = """\
name: mark
steps:
  - id: mark
    command: {argv: [touch, "%s"], check: [test, -e, "%s"], undo: [rm, -f, "%s"]}
"""
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")


@pytest.fixture
def shell(place: Path) -> Shell:
    """Run a shell line in which $F is fleetfix, on a host that is this machine."""
    mark = place / "mark"
    (place / "mark.yaml").write_text(PLAYBOOK % (mark, mark, mark))
    (place / "fails.yaml").write_text(
        "name: fails\nsteps:\n  - {id: a, on_failure: stop, command: {argv: ['false'], always: true}}\n"
    )
    (place / "here.yaml").write_text("hosts:\n  here: {transport: local}\n")
    (place / "wrong.yaml").write_text("name: 1!\nsteps: []\n")

    def line(text: str) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "F": f"{sys.executable} -m fleetfix",
            "TMPDIR": str(place),
            "R": "run ./mark.yaml -i here.yaml -l here --yes",
            "B": "run ./fails.yaml -i here.yaml -l here --yes",
        }
        # pipefail is bash's: the code that counts is that of fleetfix, not of head.
        argv = ["bash", "-c", f"set -o pipefail; {text}"]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)

    return line


@pytest.mark.parametrize(
    "end",
    [">&-", "2>&-", "<&-", ">&- 2>&- <&-", "| true", "2>&1 | head -1", "--json >&-", "--json | true"]
    + [pytest.param(end, marks=FULL) for end in (">/dev/full", "2>/dev/full", "--json >/dev/full")],
)
def test_a_run_keeps_its_exit_code_whatever_becomes_of_its_streams(
    end: str, shell: Shell, place: Path
) -> None:
    good = shell(f"$F $R {end}")
    assert (good.returncode, (place / "mark").exists()) == (0, True), good.stderr
    bad = shell(f"$F $B {end}")
    assert bad.returncode == 3, bad.stderr
    assert "bug" not in good.stderr + bad.stderr
    assert not (place / "state" / "crashes").exists()


@pytest.mark.parametrize("words", ["hosts -i here.yaml", "runs", "show last", "playbooks", "explain"])
def test_what_only_shows_ends_quietly_when_nobody_reads(words: str, shell: Shell) -> None:
    shell("$F $R")
    for end in ("| true", "| head -c 1 >/dev/null", ">&-"):
        done = shell(f"$F {words} {end}")
        assert (done.returncode, done.stderr) == (0, "")


def test_what_is_wrong_stays_wrong_when_nobody_reads(shell: Shell) -> None:
    for end in ("| true", ">&-", ">&- 2>&-"):
        assert shell(f"$F lint wrong.yaml {end}").returncode == 1


@FULL
def test_what_only_shows_says_that_it_could_not(shell: Shell) -> None:
    done = shell("$F hosts -i here.yaml >/dev/full")
    assert done.returncode == 1
    assert done.stderr == "fleetfix: not all could be written to stdout: no space left on device\n"


def test_no_file_gets_the_number_of_a_closed_stream(shell: Shell, place: Path) -> None:
    code = (
        "import os, sys; from fleetfix.cli import streams; streams.take(); print(os.open('mark.yaml', 0))"
    )
    done = shell(f'{sys.executable} -c "{code}" <&- 2>&-')
    assert int(done.stdout) > 2


@FULL
@pytest.mark.parametrize("how", ["", "--gather", "--json"])
def test_a_command_goes_on_where_its_output_is_lost_and_all_is_not_well_then(
    how: str, shell: Shell, place: Path
) -> None:
    done = shell(f"$F exec {how} -i here.yaml --hosts here -- 'seq 99999; touch {place}/over' >/dev/full")
    assert (done.returncode, (place / "over").exists()) == (1, True)
    told, said = done.stderr.splitlines()
    assert told.endswith("exit 1 (output was lost)")
    assert said == "fleetfix: not all could be written to stdout: no space left on device"
    assert shell(f"$F exec {how} -i here.yaml --hosts here -- 'seq 9; exit 3' >/dev/full").returncode == 2
