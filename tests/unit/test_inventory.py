"""Inventory: who is declared, what holds for each host, and where one is looked for."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from fleetfix.errors import DocumentError, FleetfixError, InventoryError, PatternError
from fleetfix.inventory import Host, Inventory

FLEET = """\
vars: {cuda: "12", team: ml}
user: ops
hosts:
  gpu[01-16]: {become: true, vars: {rack: 1}}
  gpu07: {address: 10.0.0.7, port: 2222, user: root, vars: {min_tok_s: 150, rack: 7}}
  2001:db8::1:
groups:
  train: {hosts: "gpu[01-08]", vars: {venv: /opt/train/venv, team: training}}
  canary: {hosts: gpu01, vars: {venv: /opt/canary/venv}, python: /usr/bin/python3.11}
  all-train: {children: [train, canary], vars: {venv: /nowhere, wheelhouse: /srv/wheels}, port: 22}
"""
FLEET = FLEET.replace("hosts: gpu01, ", "hosts: gpu09, ")


def names(hosts: tuple[Host, ...]) -> list[str]:
    return [host.name for host in hosts]


@pytest.fixture
def fleet(write: Any) -> Inventory:
    return Inventory.load(str(write("fleet.yaml", FLEET)))


def complaints(write: Any, text: str) -> tuple[str, ...]:
    path = write("i.yaml", text)
    with pytest.raises(DocumentError) as caught:
        Inventory.load("i.yaml", cwd=path.parent)
    return caught.value.complaints


def test_a_host_is_complete(fleet: Inventory) -> None:
    assert fleet.hosts["gpu07"] == Host(
        name="gpu07",
        address="10.0.0.7",
        port=2222,
        user="root",
        become=True,
        vars={
            "cuda": "12",
            "team": "training",
            "rack": 7,
            "min_tok_s": 150,
            "venv": "/opt/train/venv",
            "wheelhouse": "/srv/wheels",
        },
    )


def test_nearer_wins_file_then_outer_group_then_inner_group_then_host(fleet: Inventory) -> None:
    assert [fleet.hosts[name].vars.get("venv") for name in ("gpu01", "gpu09", "gpu10")] == [
        "/opt/train/venv",
        "/opt/canary/venv",
        None,
    ]
    assert [fleet.hosts[name].port for name in ("gpu01", "gpu07", "gpu10")] == [22, 2222, None]
    assert fleet.hosts["gpu09"].python == "/usr/bin/python3.11"


def test_a_host_is_called_by_its_name_unless_it_has_an_address(fleet: Inventory) -> None:
    assert fleet.hosts["gpu01"].address == "gpu01"
    assert fleet.hosts["2001:db8::1"].address == "2001:db8::1"


def test_groups_hold_what_their_children_hold(fleet: Inventory) -> None:
    assert str(fleet.groups["all-train"]) == "gpu[01-09]"


def test_select_orders_naturally_and_takes_away(fleet: Inventory) -> None:
    assert names(fleet.select("gpu10,@train", "gpu[02-07]")) == ["gpu01", "gpu08", "gpu10"]
    assert names(fleet.select("gpu[01:02]")) == ["gpu01", "gpu02"]


def test_several_patterns_are_a_union_each_read_by_itself(fleet: Inventory) -> None:
    # Joined by commas it would be `gpu02,gpu[01-03]!gpu02`, and gpu02 lost.
    assert names(fleet.select(["gpu02", "gpu[01-03]!gpu02"])) == ["gpu01", "gpu02", "gpu03"]
    assert names(fleet.select("gpu[01-04]", ["gpu01", "gpu[03-04]"])) == ["gpu02"]


@pytest.mark.parametrize("exclude", ["", " ", ["gpu01", ""]])
def test_an_empty_exclusion_is_refused(fleet: Inventory, exclude: str | list[str]) -> None:
    with pytest.raises(FleetfixError, match="--exclude names no hosts"):
        fleet.select("gpu01", exclude)


@pytest.mark.parametrize(
    ("pattern", "exclude", "error"),
    [
        ("", "", "no hosts are named"),
        ("  ", "", "no hosts are named"),
        ("@train", "gpu*", "'@train' leaves no host"),
        ("gpu01!gpu01", "", "'gpu01!gpu01' leaves no host"),
        ("gpu01,gup02", "", "unknown host gup02"),
        ("gpu01", "gup02", "unknown host gup02"),
        ("nosuch*", "", "no host matches nosuch*"),
        ("gpu[01", "", "this bracket is never closed"),
    ],
)
def test_a_selection_is_never_empty_or_guessed(
    fleet: Inventory, pattern: str, exclude: str, error: str
) -> None:
    with pytest.raises(FleetfixError) as caught:
        fleet.select(pattern, [exclude] if exclude else ())
    assert caught.value.message == error
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    "hosts",
    [
        "hosts: gpu[1-3]",
        "hosts: [gpu1, 'gpu[2-3]']",
        "hosts: {'gpu[1-2]': , gpu3: {}}",
        "groups: {g: {hosts: 'gpu[1:3]'}}",
    ],
)
def test_hosts_are_a_pattern_a_list_or_a_mapping(write: Any, hosts: str) -> None:
    assert list(Inventory.load(str(write("i.yaml", hosts))).hosts) == ["gpu1", "gpu2", "gpu3"]


def test_variables_keep_how_they_were_written(write: Any) -> None:
    host = Inventory.load(str(write("i.yaml", "hosts: {a: {vars: {v: 1.10, on: off, n: 7}}}"))).hosts["a"]
    assert (host.vars["v"].text, host.vars["on"], host.vars["n"]) == ("1.10", "off", 7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hosts: {a: {becom: true}}", "i.yaml:1: unknown key 'becom', did you mean become?"),
        ("hosts: {a: {venv: /x}}", "i.yaml:1: unknown key 'venv': a variable goes under vars:"),
        ("hosts:\n  a: {ansible_host: b}", "i.yaml:2: unknown key 'ansible_host': write `address`"),
        ("hosts:\n  a: {port: 99999}", "i.yaml:2: port: wanted at most 65535, not 99999"),
        ("hosts:\n  a: {user: 'x; rm'}", "i.yaml:2: user: wanted a user name, not 'x; rm'"),
        ("hosts:\n  a: {address: -oProxyCommand=x}", "i.yaml:2: address: wanted an address"),
        ("hosts:\n  a: {python: python3}", "i.yaml:2: python: wanted an absolute path"),
        (
            "hosts:\n  a: {transport: telnet}",
            "i.yaml:2: transport: wanted 'asyncssh', 'fabric', 'local' or 'scripted'",
        ),
        ("hosts:\n  a: {ssh_config: nowhere}", "i.yaml:2: ssh_config: there is no file"),
        ("hosts:\n  a: {key_file: nowhere}", "i.yaml:2: key_file: there is no file"),
        ("hosts:\n  gpu[01: {}", "i.yaml:2: gpu[01: this bracket is never closed at character 4"),
        ("hosts: ['*']", "i.yaml:1: *: name hosts here"),
        ("hosts: [{a: {}}]", "i.yaml:1: wanted host names"),
        ("hosts:\n  a[1-2]: {address: b}", "i.yaml:2: address: 2 hosts cannot share one address"),
        (
            "hosts: a\ngroups:\n  g: {address: b, hosts: a}",
            "i.yaml:3: address: a group of hosts has no address",
        ),
        ("hosts: a\ngroups: {g: {children: nope}}", "i.yaml:2: unknown group 'nope'"),
        ("hosts: a\ngroups:\n  g: {children: h}\n  h: {children: g}", "i.yaml:4: group g is inside itself"),
        ("hosts: a\ngroups: {'g h': {}}", "i.yaml:2: 'g h' cannot name a group"),
        ("hosts: {a: , a: }", "i.yaml:1: 'a' is here twice"),
        ("hosts:\n\ta:", "i.yaml:2: a tab where YAML wants spaces"),
        ("", "i.yaml:1: the file is empty"),
        ("- a", "i.yaml:1: wanted a mapping, not a list"),
    ],
)
def test_a_wrong_inventory_says_where(write: Any, text: str, expected: str) -> None:
    assert complaints(write, text)[0].startswith(expected)


def test_all_complaints_come_at_once(write: Any) -> None:
    found = complaints(write, "hots: a\nhosts:\n  b: {prt: 1}\ngroups:\n  g: {hosts: 'c[', become: 3}\n")
    assert [line.split(": ")[0] for line in found] == ["i.yaml:1", "i.yaml:3", "i.yaml:5", "i.yaml:5"]


def test_two_of_equal_strength_that_differ_are_a_complaint(write: Any) -> None:
    groups = "groups:\n  a: {hosts: x, vars: {venv: /a}}\n  b: {hosts: x, vars: {venv: /b}}\n"
    assert complaints(write, groups) == ("i.yaml:3: groups a and b say different vars.venv for x",)
    ranges = "hosts:\n  x[1-2]: {user: a}\n  x[2-3]: {user: b}\n"
    assert complaints(write, ranges) == ("i.yaml:3: user of x2 is another one in i.yaml:2",)


def test_a_contradiction_that_something_nearer_settles_is_none(write: Any) -> None:
    groups = "groups:\n  a: {hosts: x, vars: {venv: /a}}\n  b: {hosts: x, vars: {venv: /b}}\n"
    hosts = "hosts:\n  x: {vars: {venv: /x}}\n  x[1-2]: {user: a}\n  x[2-3]: {user: b}\n  x2: {user: c}\n"
    inventory = Inventory.load(str(write("i.yaml", groups + hosts)))
    assert (inventory.hosts["x"].vars["venv"], inventory.hosts["x2"].user) == ("/x", "c")


def test_no_host_at_all_is_an_error(write: Any) -> None:
    with pytest.raises(InventoryError, match="no host is declared"):
        Inventory.load(str(write("i.yaml", "vars: {a: 1}")))


# -- where it is looked for --------------------------------------------------------------------------


def test_a_folder_is_read_as_one(write: Any, tmp_path: Path) -> None:
    write("inv/a.yaml", "hosts: gpu[1-2]\ngroups: {g: {hosts: gpu1}}")
    write("inv/b.yml", "hosts: gpu3\ngroups: {g: {hosts: gpu3, user: ops}}")
    write("inv/.c.yaml", "broken: [")
    write("inv/README", "not an inventory")
    inventory = Inventory.load("inv", cwd=tmp_path)
    assert (list(inventory.hosts), str(inventory.groups["g"])) == (["gpu1", "gpu2", "gpu3"], "gpu[1,3]")
    assert inventory.hosts["gpu1"].user == "ops"


def test_a_complaint_in_a_folder_names_the_file(write: Any, tmp_path: Path) -> None:
    write("inv/a.yaml", "hosts: gpu1")
    write("inv/b.yaml", "hosts: [")
    write("inv/c.yaml", "host: x")
    with pytest.raises(DocumentError) as caught:
        Inventory.load("inv", cwd=tmp_path)
    assert [line.split(": ")[0] for line in caught.value.complaints] == ["inv/b.yaml:2", "inv/c.yaml:1"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "inv: no *.yaml or *.yml in this folder"),
        (lambda path: None, "there is no inventory 'inv'"),
    ],
)
def test_what_is_no_inventory_says_so(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "inv")
    with pytest.raises(InventoryError) as caught:
        Inventory.load("inv", cwd=tmp_path)
    assert caught.value.message.endswith(message)


def test_hosts_may_be_named_on_the_command_line() -> None:
    inventory = Inventory.load("gpu[01-03],")
    assert list(inventory.hosts) == ["gpu01", "gpu02", "gpu03"]
    with pytest.raises(InventoryError) as caught:
        Inventory.load("gpu[01-03]")
    assert caught.value.hint == "to name hosts here, end with a comma: -i 'gpu[01-03],'"
    with pytest.raises(PatternError):
        Inventory.load("gpu[01,")
    with pytest.raises(InventoryError):
        Inventory.load(",")


def test_a_name_given_by_the_caller_is_an_inventory(write: Any, tmp_path: Path) -> None:
    path = write("somewhere/inventory.yaml", "hosts: gpu01")
    assert list(Inventory.load("lab", named={"lab": path}).hosts) == ["gpu01"]
    with pytest.raises(InventoryError) as caught:
        Inventory.load("lab", named={"lab": tmp_path / "nothing"})
    assert "fleetfix lab up" in caught.value.hint


def test_the_usual_places_are_looked_at_in_order(write: Any, tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path / "home")}
    with pytest.raises(InventoryError, match="no inventory"):
        Inventory.load(env=env, cwd=tmp_path)
    write("home/.config/fleetfix/inventory/all.yaml", "hosts: configured")
    assert list(Inventory.load(env=env, cwd=tmp_path).hosts) == ["configured"]
    write("inventory", "hosts: here").chmod(0o644)
    assert list(Inventory.load(env=env, cwd=tmp_path).hosts) == ["here"]
    env["FLEETFIX_INVENTORY"] = str(write("env.yaml", "hosts: named"))
    assert list(Inventory.load(env=env, cwd=tmp_path).hosts) == ["named"]


def test_an_inventory_that_others_may_write_is_not_picked_up(write: Any, tmp_path: Path) -> None:
    path = write("inventory/a.yaml", "hosts: evil")
    path.parent.chmod(0o755)
    path.chmod(0o666)
    with pytest.raises(InventoryError) as caught:
        Inventory.load(env={"HOME": "/nowhere"}, cwd=tmp_path)
    assert caught.value.message == "./inventory/a.yaml is not used: others may write to it"
    with pytest.raises(InventoryError, match="everybody may write to it"):
        Inventory.load("./inventory", cwd=tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_an_inventory_of_somebody_else_is_not_picked_up(write: Any, tmp_path: Path) -> None:
    path = write("inventory", "hosts: evil")
    path.chmod(0o644)
    os.chown(path, 65534, 65534)
    with pytest.raises(InventoryError, match="it belongs to"):
        Inventory.load(env={"HOME": "/nowhere"}, cwd=tmp_path)
    assert list(Inventory.load("./inventory", cwd=tmp_path).hosts) == ["evil"]


def test_the_digest_is_that_of_the_content(write: Any) -> None:
    one = Inventory.load(str(write("a/i.yaml", "hosts: x")))
    other = Inventory.load(str(write("b/i.yaml", "hosts: x")))
    changed = Inventory.load(str(write("a/i.yaml", "hosts: y")))
    assert one.digest == other.digest != changed.digest


def test_five_thousand_hosts_are_loaded_and_selected_in_a_second(write: Any) -> None:
    hosts = "".join(f"  gpu{n:04d}: {{user: ml, vars: {{rack: {n // 100}}}}}\n" for n in range(5000))
    groups = "".join(f"  r{n}: {{hosts: 'gpu[{n * 100:04d}-{n * 100 + 99:04d}]'}}\n" for n in range(50))
    path = write("big.yaml", f"hosts:\n{hosts}groups:\n{groups}")
    start = time.process_time()
    selected = Inventory.load(str(path)).select("*")
    assert len(selected) == 5000
    assert time.process_time() - start < 3.0  # a second on a quiet machine; three on a shared one
