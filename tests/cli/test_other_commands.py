"""hosts, playbooks, lint, explain; where the state lives."""

from __future__ import annotations

import json
import os
import pwd
import socket
import sqlite3
from pathlib import Path

import pytest

from fleetfix.cli.conduct import operator
from fleetfix.cli.state_dir import file_system_of, state_dir
from fleetfix.commands import Json
from fleetfix.errors import JournalError
from fleetfix.folders import config_folder, state_folder
from fleetfix.journal import Journal
from fleetfix.lab import default_root
from fleetfix.transports.scripted import Fleet, World
from tests.cli.conftest import Line


def test_hosts_shows_the_selection_and_its_groups(fleetfix: Line) -> None:
    result = fleetfix("hosts", "gpu[02-03]", "-i", "hosts.yaml")
    lines = result.out.splitlines()
    assert lines[0].startswith("gpu02  gpu02")
    assert lines[0].endswith("@front")
    assert lines[-1] == "2 hosts: gpu[02-03] (hosts.yaml)"
    read = [json.loads(line) for line in fleetfix("hosts", "-i", "hosts.yaml", "--json").out.splitlines()]
    assert [one["name"] for one in read] == ["gpu01", "gpu02", "gpu03", "gpu04"]
    assert read[0]["groups"] == ["front"]


def test_lint_says_ok_or_every_complaint_with_its_line(fleetfix: Line, place: Path) -> None:
    assert fleetfix("lint", "lamps.yaml").out == "lamps.yaml: ok\n"
    (place / "bad.yaml").write_text("name: bad\nstep: []\nsteps:\n  - id: a\n    comand: {argv: [x]}\n")
    result = fleetfix("lint", "bad.yaml", "lamps.yaml")
    assert result.code == 1
    assert "bad.yaml:2: " in result.out
    assert "bad.yaml:5: " in result.out
    assert "lamps.yaml: ok" in result.out


def test_the_journal_is_verified_and_the_first_record_that_does_not_fit_is_told(
    fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    with fleet:
        first = fleetfix("run", "lamps.yaml", "--hosts", "gpu01", "-i", "hosts.yaml", "--yes").run
        fleetfix("exec", "--hosts", "gpu01", "-i", "hosts.yaml", "--", "true")
    whole = fleetfix("runs", "--verify")
    assert (whole.code, whole.err) == (0, "")
    assert "of 2 runs fit the chain" in whole.out
    with sqlite3.connect(place / "state/journal.db") as journal:
        journal.execute("UPDATE records SET at = at + 1 WHERE seq = 9 AND run = ?", (first,))
    journal.close()
    edited = fleetfix("runs", "--verify", first)
    assert edited.code == 2
    assert edited.out.startswith(f"run {first}: record 9 is not as it was written")
    assert fleetfix("runs", "--verify", "last").code == 0
    told = [json.loads(line) for line in fleetfix("runs", "--verify", "--json").out.splitlines()]
    assert {one["misfit"] and one["misfit"]["seq"] for one in told} == {9, None}
    refused = fleetfix("runs", first)
    assert (refused.code, f"fleetfix show {first}" in refused.err) == (1, True)


def test_what_hosts_keep_of_the_journal_tells_that_it_was_written_anew(
    fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    on = ("--hosts", "gpu[01-02]", "-i", "hosts.yaml")

    def entries(args: dict[str, Json], world: World) -> object:
        who = {"operator": operator(), "controller": socket.gethostname()}
        kept = [(run, anchor) for run, anchor in fleet["gpu01"].anchors]
        lines = [{"t": 1.0, "kind": "ended", "run": run, "anchor": anchor, **who} for run, anchor in kept]
        return {"lines": [*lines, {"t": 2.0, "kind": "ended", "run": "of-somebody", "anchor": "1:x"}]}

    fleet["gpu01"].on("ledger_lines.last", entries)
    with fleet:
        first = fleetfix("run", "lamps.yaml", *on[:1], "gpu01", *on[2:], "--yes").run
        second = fleetfix("run", "lamps.yaml", *on[:1], "gpu02", *on[2:], "--yes").run
        whole = fleetfix("runs", "--verify", "--hosts", "gpu01", "-i", "hosts.yaml")
        assert (whole.code, whole.out.endswith("fit the chain\n")) == (0, True)
        anew(place / "state", first)
        assert fleetfix("runs", "--verify").code == 0
        told = fleetfix("runs", "--verify", first, "--hosts", "gpu01", "-i", "hosts.yaml")
        assert (told.code, f"run {first}: gpu01 keeps a head of it" in told.out) == (2, True)
        silent = fleetfix("runs", "--verify", second, "--connect-timeout", "5s", *on[:1], "gpu02", *on[2:])
        assert (silent.code, "not read: gpu02" in silent.out) == (2, False)
        (place / "state/journal.db").unlink()
        gone = fleetfix("runs", "--verify", *on)
    assert gone.code == 2
    assert f"run {first}: gpu01 has it as yours from this machine" in gone.out
    assert "gpu02: its ledger was not read" in gone.out
    assert second not in gone.out
    assert fleetfix("runs", "--hosts", "gpu01").code == 1


def anew(state: Path, run: str) -> None:
    """Write the journal anew with another time in one run, as whoever has the program can."""
    with Journal.open(state) as journal:
        kept = {one: list(journal.records(one)) for one in journal.every_run()}
    for file in state.glob("journal.db*"):
        file.unlink()
    with Journal.open(state) as journal:
        for one, records in kept.items():
            later = 1.0 if one == run else 0.0
            journal.append([record.model_copy(update={"at": record.at + later}) for record in records])


def test_lint_takes_a_whole_path_whatever_its_ending(fleetfix: Line, place: Path) -> None:
    whole = (place / "lamps.yaml").absolute().rename(place.absolute() / "lamps")
    assert fleetfix("lint", str(whole)).out == f"{whole}: ok\n"


def test_lint_knows_an_inventory_a_folder_and_a_step_without_an_action(fleetfix: Line, place: Path) -> None:
    assert "hosts.yaml:1: this looks like an inventory" in fleetfix("lint", "hosts.yaml").out
    assert "is a folder, not a file" in fleetfix("lint", ".").out
    (place / "bad.yaml").write_text("name: x\nsteps:\n  - {id: a, frobnicate: {}}\n")
    assert "the step has no action: one of gpu_processes, " in fleetfix("lint", "bad.yaml").out
    (place / "bad.yaml").write_text("name: x\nsteps: []\n")
    assert "wanted a list of at least 1, not an empty list" in fleetfix("lint", "bad.yaml").out
    (place / "bad.yaml").write_text("summary: x\n")
    assert ":1: 'name' is missing and 'steps' is missing" in fleetfix("lint", "bad.yaml").out


def test_a_variable_of_the_environment_that_names_no_inventory_is_named(
    fleetfix: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEETFIX_INVENTORY", "/nope")
    assert "fleetfix: $FLEETFIX_INVENTORY: there is no inventory '/nope'" in fleetfix("hosts").err


def test_playbooks_lists_what_has_a_name(fleetfix: Line, place: Path) -> None:
    folder = place / "home" / ".config" / "fleetfix" / "playbooks"
    folder.mkdir(parents=True)
    (folder / "lamps.yaml").write_text((place / "lamps.yaml").read_text())
    (folder / "bad.yaml").write_text("steps: 1\n")
    result = fleetfix("playbooks")
    assert "Both lamps are lit." in result.out
    assert "does not load" in next(line for line in result.out.splitlines() if line.startswith("bad"))
    assert "purge-cu13" in result.out
    names = [json.loads(line)["name"] for line in fleetfix("playbooks", "--json").out.splitlines()]
    assert {"bad", "lamps", "purge-cu13"} <= set(names)


def test_explain_tells_an_action_and_its_parameters(fleetfix: Line) -> None:
    result = fleetfix("explain", "command")
    assert result.out.startswith("command (action)")
    assert "argv" in result.out
    assert "required" in result.out
    assert "Run without a check, each time" in result.out, "what the code says of a parameter"


@pytest.mark.parametrize(
    ("control", "says"),
    [
        ("hosts", "a pattern, as for --hosts"),
        ("as_user", "`shell` or `command`"),
        ("evidence", "best_effort"),
    ],
)
def test_explain_tells_a_control_of_a_step(fleetfix: Line, control: str, says: str) -> None:
    result = fleetfix("explain", control)
    assert result.out.startswith(f"{control} (how a step is run)")
    assert says in result.out
    assert control in fleetfix("explain").out


MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:30 / /home rw - nfs4 server:/home rw
31 30 8:2 / /home/local\\040disk rw - xfs /dev/sdb rw
32 22 0:31 / /mnt rw - ext4 /dev/sdc rw
33 32 0:32 / /mnt rw - lustre mgs:/scratch rw
34 22 0:33 / /srv rw shared:1 master:2 - fuse.sshfs host:/srv rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/var/lib/x", "ext4"),
        ("/home/me/.local/state", "nfs4"),
        ("/home/local disk/x", "xfs"),
        ("/homework", "ext4"),
        ("/mnt/x", "lustre"),
        ("/srv", "fuse.sshfs"),
    ],
)
def test_the_file_system_under_a_folder_is_known(folder: str, kind: str, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert file_system_of(Path(folder), mounts) == kind


def test_a_journal_on_a_network_file_system_is_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    for folder in ("/home/me", "/mnt/x", "/srv/x"):
        with pytest.raises(JournalError, match="network file system"):
            state_dir({"FLEETFIX_STATE_DIR": folder}, mounts)
    assert state_dir({"FLEETFIX_STATE_DIR": "/var/x"}, mounts) == Path("/var/x")


def test_the_state_folder_is_moved_by_environment_then_configuration(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert state_dir(home) == tmp_path / ".local" / "state" / "fleetfix"
    assert state_dir(home | {"XDG_STATE_HOME": str(tmp_path / "x")}) == tmp_path / "x" / "fleetfix"
    config = tmp_path / ".config" / "fleetfix" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'state_dir = "{tmp_path}/moved"\n')
    assert state_dir(home) == tmp_path / "moved"
    assert state_dir(home | {"FLEETFIX_STATE_DIR": str(tmp_path / "given")}) == tmp_path / "given"


def test_relative_folders_of_the_environment_are_ignored(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert state_folder(home | {"XDG_STATE_HOME": "rel"}) == tmp_path / ".local/state/fleetfix"
    assert config_folder(home | {"XDG_CONFIG_HOME": "rel"}) == tmp_path / ".config/fleetfix"
    real = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert config_folder({"HOME": "rel"}) == config_folder({}) == real / ".config/fleetfix"


def test_the_lab_lies_in_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETFIX_STATE_DIR", str(tmp_path / "given"))
    assert default_root() == tmp_path / "given" / "lab"
    monkeypatch.delenv("FLEETFIX_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "x"))
    assert default_root() == tmp_path / "x" / "fleetfix" / "lab"


def test_a_home_that_is_no_folder_has_no_configuration(
    fleetfix: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    assert fleetfix("runs").code == 0
    assert fleetfix("playbooks").code == 0
    assert fleetfix("hosts", "-i", "hosts.yaml").code == 0


def test_the_ledger_of_each_host_is_shown_and_no_host_is_lost(fleetfix: Line, fleet: Fleet) -> None:
    line = {
        "t": 1.0,
        "kind": "begun",
        "run": "r1",
        "operator": "ada",
        "controller": "bastion",
        "reason": "night shift",
        "change": "r1/left/1/0",
        "step": "left",
        "summary": "light the left lamp",
    }
    fleet["gpu01"].on("ledger_lines.last", {"lines": [line], "more": False, "torn": 0})
    fleet["gpu02"].refuse()
    on = ("ledger", "--hosts", "gpu[01-02]", "-i", "hosts.yaml")
    with fleet:
        shown, told = fleetfix(*on), fleetfix(*on, "--json")
    assert (shown.code, told.code) == (4, 4)
    assert "r1 by ada on bastion: night shift" in shown.out
    assert "left: light the left lamp: begun, and nothing tells how it ended" in shown.out
    assert "gpu02:\n  connection refused" in shown.out
    first, second = (json.loads(one) for one in told.out.splitlines())
    assert (first["host"], first["change"], second["failure"]["kind"]) == (
        "gpu01",
        "r1/left/1/0",
        "unreachable",
    )


@pytest.mark.parametrize(
    "command", [("run", "lamps.yaml", "--hosts", "gpu01"), ("resume", "last"), ("rollback", "last")]
)
def test_a_time_to_wait_that_is_none_is_refused_before_anything_begins(
    fleetfix: Line, command: tuple[str, ...]
) -> None:
    said = fleetfix(*command, "--lock-wait", "never")
    assert said.code == 1
    assert "--lock-wait 'never': a time such as" in said.err
