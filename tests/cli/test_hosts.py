"""`hosts`: what it shows of an inventory; and hosts chosen by how a run ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetfix.transports.scripted import Fleet
from tests.cli.conftest import Line, lamp_host
from tests.cli.test_complete import offered

ANSWER = {
    "train": {"hosts": ["gpu01", "gpu02"], "vars": {"venv": "/opt/venv"}},
    "windows": ["win01"],
    "bad group": ["gpu02"],
    "_meta": {
        "hostvars": {
            "gpu01": {"ansible_host": "10.0.0.1", "ansible_user": "ops", "ansible_password": "hunter2"},
            "gpu02": {"ansible_password": "hunter3", "note": "\x1b[31mred"},
            "win01": {"ansible_connection": "winrm"},
        }
    },
}


@pytest.fixture
def answer(place: Path) -> Path:
    (place / "hosts.json").write_text(json.dumps(ANSWER))
    return place / "hosts.json"


@pytest.mark.usefixtures("answer")
def test_hosts_shows_what_was_understood_and_what_was_not(fleetfix: Line) -> None:
    result = fleetfix("hosts", "-i", "hosts.json")
    assert result.code == 0
    assert result.out == (
        "gpu01  ops@10.0.0.1  @train\n"
        "gpu02  gpu02  @train\n"
        "win01  cannot be reached: ansible_connection is winrm: fleetfix reaches hosts by ssh  @windows\n"
        "groups: @all 3, @train 2, @windows 1\n"
        "variables: note 1, venv 2\n"
        "not taken:\n"
        "  group 'bad group': no pattern can say this name: letters, digits and _ . - :\n"
        "  gpu[01-02]: ansible_password: a password: keys and the agent log in, and sudo's comes by "
        "$FLEETFIX_BECOME_PASSWORD\n"
        "3 hosts: gpu[01-02],win01 (hosts.json, saved by ansible-inventory --list)\n"
    )
    assert "ansible_password" not in fleetfix("hosts", "win01", "-i", "hosts.json").out


@pytest.mark.usefixtures("answer")
def test_hosts_as_json_says_it_of_each_host(fleetfix: Line) -> None:
    result = fleetfix("hosts", "-i", "hosts.json", "--json")
    gpu01, _, win01 = map(json.loads, result.out.splitlines())
    assert (gpu01["address"], gpu01["groups"]) == ("10.0.0.1", ["all", "train"])
    assert [one["what"] for one in gpu01["not_taken"]] == ["ansible_password"]
    assert win01["refused"].startswith("ansible_connection is winrm")
    assert result.err.startswith("not taken: group 'bad group'")
    assert "hunter" not in result.out + result.err


@pytest.mark.usefixtures("answer")
def test_a_run_over_a_host_that_cannot_be_reached_as_wanted_does_not_begin(fleetfix: Line) -> None:
    result = fleetfix("plan", "./lamps.yaml", "-i", "hosts.json", "-l", "*")
    assert result.code == 1
    assert result.err == (
        "fleetfix: win01: ansible_connection is winrm: fleetfix reaches hosts by ssh\n"
        "  hint: leave out by -x 'win01'\n"
    )


def test_hosts_of_a_run_are_chosen_by_how_they_ended(fleetfix: Line, place: Path) -> None:
    fleet = Fleet(
        {f"gpu0{number}": lamp_host() for number in (1, 3)} | {"gpu02": lamp_host(broken="right")}
    )
    line = ("./lamps.yaml", "-i", "hosts.yaml", "-l", "gpu[01-04]")
    with fleet:
        run = fleetfix("run", *line, "--yes", "--max-failures", "9", "--canary", "0").run
        fleetfix("plan", *line)

    def chosen(pattern: str, *more: str) -> str:
        return fleetfix("hosts", pattern, "-i", "hosts.yaml", *more).out.splitlines()[-1]

    # `last` is the run, not the plan that came after it, but where only plans have what is asked for.
    assert chosen("@failed:last") == "2 hosts: gpu[02,04] (hosts.yaml)"
    assert chosen(f"@rolled_back:{run}") == "1 host: gpu02 (hosts.yaml)"
    assert chosen("@front", "-x", "@changed:last") == "1 host: gpu02 (hosts.yaml)"
    assert chosen("@failed:last!@unreachable:last") == "1 host: gpu02 (hosts.yaml)"
    assert chosen("@pending:last") == "1 host: gpu02 (hosts.yaml)"
    assert offered("fleetfix hosts @failed:", FLEETFIX_INVENTORY="hosts.yaml")[:1] == ["@failed:last"]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("@failed:last", "no such run is in the journal yet"),
        ("@failed:2030", "no run is called '2030' in this journal"),
        ("@faild:last", "unknown group @faild:last"),
        ("@faild:last", "did you mean failed:RUN"),
        ("@failed:", "':' does not join patterns"),
    ],
)
def test_a_run_that_there_is_not_is_said(fleetfix: Line, pattern: str, says: str) -> None:
    result = fleetfix("hosts", pattern, "-i", "hosts.yaml")
    assert result.code == 1
    assert says in result.err


def test_a_host_whose_turn_never_came_has_not_failed(fleetfix: Line) -> None:
    with Fleet({"gpu01": lamp_host(broken="right"), "gpu02": lamp_host()}):
        fleetfix("run", "./lamps.yaml", "-i", "hosts.yaml", "-l", "@front", "--yes")
    for word, host in (("failed", "gpu01"), ("not_started", "gpu02")):
        last = fleetfix("hosts", f"@{word}:last", "-i", "hosts.yaml").out.splitlines()[-1]
        assert last == f"1 host: {host} (hosts.yaml)"


def test_hosts_of_a_command_are_chosen_too(fleetfix: Line, fleet: Fleet) -> None:
    with Fleet({"gpu01": lamp_host()}):
        assert fleetfix("exec", "-i", "hosts.yaml", "-l", "gpu[01-02]", "--", "true").code != 0
    result = fleetfix("hosts", "@unreachable:last", "-i", "hosts.yaml")
    assert result.out.splitlines()[-1] == "1 host: gpu02 (hosts.yaml)"


def test_a_host_of_the_run_that_the_inventory_does_not_know_is_an_error(
    fleetfix: Line, place: Path
) -> None:
    with Fleet({"gpu01": lamp_host(broken="right")}):
        fleetfix("run", "./lamps.yaml", "-i", "hosts.yaml", "-l", "gpu01", "--yes")
    result = fleetfix("hosts", "@failed:last", "-i", "gpu[02-03],")
    assert result.err == (
        "fleetfix: @failed:last has gpu01, which gpu[02-03], does not know\n"
        "  hint: give -i the inventory of that run\n"
    )


def test_an_inventory_is_found_again_from_another_folder(
    fleetfix: Line, place: Path, answer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fleet({"gpu01": lamp_host()}):
        run = fleetfix("plan", "./lamps.yaml", "-i", "hosts.json", "-l", "gpu01").run
    assert json.loads(fleetfix("show", run, "--json").out.splitlines()[0])["event"]["inventory"] == str(
        answer.absolute()
    )


@pytest.mark.usefixtures("answer")
def test_completion_reads_the_inventory_that_is_named_on_the_line() -> None:
    assert offered("fleetfix plan lamps.yaml -i hosts.json -l gpu0") == ["gpu01", "gpu02"]
    assert offered("fleetfix hosts -i hosts.json @t") == ["@train"]
