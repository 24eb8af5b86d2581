"""Whatever is typed wrong: exit 1, one line with a hint on stderr, nothing connected, nothing written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fleetfix.transports.scripted import Fleet
from tests.cli.conftest import Line

RUN = ("run", "./lamps.yaml", "-i", "hosts.yaml", "--yes")
ALL = ("--hosts", "gpu*")

TABLE: list[tuple[tuple[str, ...], str]] = [
    (("frobnicate",), "no such command 'frobnicate'"),
    (("rnu",), "run"),
    (("--frobnicate",), "no such option: --frobnicate"),
    (("run",), "missing argument 'PLAYBOOK'"),
    ((*RUN, "--hots", "gpu01"), "no such option: --hots"),
    ((*RUN,), "missing option '--hosts'"),
    ((*RUN, "--hosts"), "requires an argument"),
    ((*RUN, "--hosts", ""), "no hosts are named"),
    ((*RUN, "--hosts", "gpu[01"), "gpu[01"),
    ((*RUN, "--hosts", "gup02"), "gup02"),
    ((*RUN, "--hosts", "@back"), "back"),
    ((*RUN, "--hosts", "nosuch*"), "nosuch*"),
    ((*RUN, *ALL, "-x", "gpu*"), "leaves no host"),
    ((*RUN, *ALL, "-x", "gpu9"), "gpu9"),
    ((*RUN, *ALL, "-x", ""), "--exclude names no hosts"),
    ((*RUN, *ALL, "-x", "gpu01", "-x", " "), "--exclude names no hosts"),
    ((*RUN, *ALL, "-l", ""), "no hosts are named"),
    ((*RUN, *ALL, "-i", "lab"), "--inventory is given twice"),
    ((*RUN, *ALL, "--reason", "a", "--reason", "b"), "--reason is given twice"),
    ((*RUN, *ALL, "-f", "3", "--forks", "3"), "--forks is given twice"),
    ((*RUN, *ALL, "--max-failures", "1", "--max-failures", "2"), "--max-failures is given twice"),
    (("runs", "-n", "1", "-n2"), "--number is given twice"),
    (("lab", "up", "--gpus", "1", "--gpus", "2"), "--gpus is given twice"),
    (("run", "lamp", *ALL, "-i", "hosts.yaml"), "there is no playbook 'lamp'"),
    (("run", "./nosuch.yaml", *ALL, "-i", "hosts.yaml"), "there is no file ./nosuch.yaml"),
    (("run", "./lamps.yaml", *ALL, "-i", "nosuch.yaml"), "there is no inventory 'nosuch.yaml'"),
    (("run", "~nobody-here/x.yaml", *ALL, "-i", "hosts.yaml"), "there is no file ~nobody-here/x.yaml"),
    (("run", "./lamps.yaml", *ALL, "-i", "~nobody-here/hosts.yaml"), "there is no inventory"),
    (("exec", *ALL, "-i", "hosts.yaml", "--secret", "T=file:~nobody-here/t", "--", "x"), "no such file"),
    (("run", "./lamps.yaml", *ALL), "no inventory"),
    (("run", "./broken.yaml", *ALL, "-i", "hosts.yaml"), "broken.yaml:2"),
    (("run", "./lamps.yaml", *ALL, "-i", "broken.yaml"), "broken.yaml:2"),
    (("run", "./when.yaml", *ALL, "-i", "hosts.yaml"), "when"),
    ((*RUN, *ALL, "--set", "second"), "is not KEY=VALUE"),
    ((*RUN, *ALL, "--set", "secnod=x"), "has no variable 'secnod'"),
    ((*RUN, *ALL, "--set", "second=a", "--set", "second=b"), "twice"),
    ((*RUN, *ALL, "--forks", "0"), "wanted at least 1"),
    ((*RUN, *ALL, "--forks", "x"), "wanted a whole number"),
    ((*RUN, *ALL, "--forks"), "hint: fleetfix run --help"),
    ((*RUN, *ALL, "--connect-timeout", "soon"), "'--connect-timeout': 'soon' is no time: for example 30s"),
    (("exec", *ALL, "--connect-timeout", "0", "--", "x"), "'0' is no time: for example 30s or 2m"),
    ((*RUN, *ALL, "--canary", "-1"), "--canary"),
    ((*RUN, *ALL, "--batch", "some"), "--batch"),
    ((*RUN, *ALL, "--batch", "0"), "--batch '0': a batch of at least 1 host"),
    ((*RUN, *ALL, "--batch", "1,0%"), "--batch '0%': a batch of at least 1 host"),
    (("run", "./nobatch.yaml", *ALL, "-i", "hosts.yaml"), "at least 1 host, or of a share above 0%, not 0"),
    ((*RUN, *ALL, "--max-failures", "many"), "--max-failures"),
    ((*RUN, *ALL, "--max-unreachable", "200%"), "--max-unreachable"),
    (("hosts", "gpu17", "-i", "hosts.yaml"), "hint: hosts.yaml has gpu[01-04]"),
    (("hosts", "gpu3", "-i", "hosts.yaml"), "did you mean gpu03?; hosts.yaml has"),
    (("hosts", "zz*", "-i", "hosts.yaml"), "hint: hosts.yaml has gpu[01-04]"),
    (("hosts", "@nope", "-i", "hosts.yaml"), "hint: groups: @front; hosts.yaml has"),
    (("hosts", "gpu[01", "-i", "hosts.yaml"), "hint: as in gpu[01-16]"),
    (("hosts", "gpu[1-5/0]", "-i", "hosts.yaml"), "a step of 0 leads nowhere"),
    (("hosts", "-i", "./host.yaml"), "did you mean hosts.yaml?"),
    (("hosts", "-i", "./zzz.yaml"), "hint: looked for in "),
    (("hosts", "-i", ""), "-i names no inventory"),
    (("hosts", "-i", "lamps.yaml"), "lamps.yaml:5: unknown key 'steps': this looks like a playbook"),
    (("lint", "."), "1 complaint in 1 file"),
    ((*RUN, *ALL, "--set", "second=[1"), "--set 'second=[1': "),
    ((*RUN, *ALL, "--yes-hosts", "3"), "--yes-hosts 3, but 4 hosts"),
    (("run", "./lamps.yaml", *ALL, "-i", "hosts.yaml"), "nobody is at a terminal"),
    (("rollback",), "missing argument 'RUN'"),
    (("hosts", "gpu[1-", "-i", "hosts.yaml"), "gpu[1-"),
    (("lint",), "missing argument"),
    (("lint", "nosuch.yaml"), "1 complaint in 1 file"),
    (("explain", "comand"), "there is no action or check 'comand'"),
    (("lab", "up", "--hosts", "gpu[1-"), "gpu[1-"),
    (("runs", "-n", "9" * 20), "wanted at most 1000000"),
    (("show", "\udcff"), "is not UTF-8 text"),
    ((*RUN, *ALL, "--reason", "\udcff"), "is not UTF-8 text"),
    (("run", "./" + "x" * 5000, *ALL, "-i", "hosts.yaml"), "there is no file"),
    (("run", "./lamps.yaml", *ALL, "-i", "x" * 5000), "there is no inventory"),
]


@pytest.fixture(autouse=True)
def _bad_files(place: Path) -> None:
    (place / "broken.yaml").write_text("name: x\n\tsteps: []\n")
    (place / "nobatch.yaml").write_text(
        "name: x\npolicy: {batch: [1, 0]}\nsteps:\n  - {id: a, command: {argv: [x], always: true}}\n"
    )
    (place / "when.yaml").write_text(
        "name: x\nsteps:\n  - id: a\n    command: {argv: [x], always: true}\n    when: yes\n"
    )


@pytest.mark.parametrize(("words", "said"), TABLE, ids=[" ".join(words) for words, _ in TABLE])
def test_a_wrong_line_is_one_line_and_nothing_is_connected(
    words: tuple[str, ...], said: str, fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    with fleet:
        result = fleetfix(*words)
    assert result.code == 1
    assert said in result.err
    lines = result.err.splitlines()
    # Every complaint on a file begins with its place, where editors look for it.
    assert re.match(r"fleetfix: |\S+:\d+: ", lines[0])
    assert "Traceback" not in result.err
    assert all(re.match(r"fleetfix: |  |\S+:\d+: ", line) for line in lines)
    assert len(lines) <= 4
    assert not (place / "state" / "journal.db").exists()
    assert all(host.opened == 0 for host in fleet.hosts.values())


def test_a_wrong_pattern_shows_the_place(fleetfix: Line) -> None:
    lines = fleetfix(*RUN, "--hosts", "gpu01,gpu[02").err.splitlines()
    assert lines[1] == "  gpu01,gpu[02"
    assert lines[2].strip() == "^"


def test_a_line_without_a_command_shows_help_and_is_an_error(fleetfix: Line) -> None:
    result = fleetfix()
    assert result.code == 1
    assert "Commands:" in result.err


def test_help_and_version_are_no_errors(fleetfix: Line) -> None:
    assert "Commands:" in fleetfix("--help").out
    assert fleetfix("--version").out.startswith("fleetfix ")
    for command in (
        "run",
        "plan",
        "rollback",
        "runs",
        "show",
        "hosts",
        "playbooks",
        "lint",
        "explain",
        "lab",
    ):
        result = fleetfix(command, "--help")
        assert (result.code, result.err) == (0, "")


def test_an_unexpected_error_is_one_line_that_says_where_the_traceback_is(
    fleetfix: Line, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object, **__: object) -> None:
        raise ZeroDivisionError("first\nsecond")

    monkeypatch.setattr("fleetfix.inventory.Inventory.load", explode)
    result = fleetfix("hosts", "-i", "hosts.yaml")
    assert result.code == 70
    assert result.err.splitlines()[0] == "fleetfix: a bug in fleetfix: ZeroDivisionError: first"
    (kept,) = (place / "state" / "crashes").iterdir()
    assert str(kept) in result.err
    assert "Traceback" in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_state_folder_that_cannot_be_made_is_one_line(
    fleetfix: Line, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEETFIX_STATE_DIR", str(place / "lamps.yaml" / "state"))
    result = fleetfix("runs")
    assert result.code == 1
    assert "cannot be written: not a directory" in result.err
    assert "FLEETFIX_STATE_DIR" in result.err.splitlines()[1]


def test_a_damaged_journal_is_one_line(fleetfix: Line, place: Path) -> None:
    (place / "state").mkdir()
    (place / "state" / "journal.db").write_bytes(b"something else entirely" * 100)
    result = fleetfix("runs")
    assert result.code == 1
    assert "is damaged" in result.err
    assert len(result.err.splitlines()) == 2


LAB = (("lab", "up"), ("lab", "status"), ("lab", "down"), ("lab", "heal"), ("lab", "ssh", "gpu01"))


@pytest.mark.parametrize("words", LAB, ids=" ".join)
@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("XDG_STATE_HOME", "/proc"),
        ("XDG_STATE_HOME", "/dev/full"),
        ("HOME", "/dev/null"),
        ("FLEETFIX_STATE_DIR", "/dev/null"),
    ],
)
def test_a_lab_without_a_folder_is_one_line(
    words: tuple[str, ...],
    variable: str,
    folder: str,
    fleetfix: Line,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FLEETFIX_STATE_DIR")
    monkeypatch.setenv(variable, folder)
    result = fleetfix(*words)
    assert result.code == (0 if words == ("lab", "down") else 1)
    assert len(result.err.splitlines()) <= 2
    assert "bug" not in result.err


def test_a_damaged_record_of_a_lab_is_one_line(fleetfix: Line, place: Path) -> None:
    (place / "state" / "lab").mkdir(parents=True)
    (place / "state" / "lab" / "lab.json").write_text("{")
    result = fleetfix("lab", "status")
    assert (result.code, "lab.json is damaged" in result.err) == (1, True)


HEAVY = ("pydantic", "asyncssh", "rich", "yaml", "ClusterShell", "sqlite3", "asyncio")


def test_help_loads_nothing_heavy() -> None:
    code = f"""
import sys
from fleetfix.cli.main import main
main(["--help"])
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
