"""What the documentation shows works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, get_args

import pytest

from fleetfix.cli.config import Config
from fleetfix.cli.main import app
from fleetfix.commands import Completed
from fleetfix.errors import FailureKind
from fleetfix.events import Event
from fleetfix.inventory import Host, Inventory
from fleetfix.playbook import read

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "text", [text for text in blocks("docs/playbooks.md", "yaml") if text.startswith("name:")]
)
def test_a_playbook_that_is_shown_loads_and_binds(text: str) -> None:
    assert read(text, "docs/playbooks.md").bind(Host(name="gpu01", address="gpu01"), {})


SHOWN = [*blocks("docs/inventories.md", "yaml"), *blocks("README.md", "yaml")]


@pytest.mark.parametrize("text", [text for text in SHOWN if "hosts:" in text and "\nsteps:" not in text])
def test_an_inventory_that_is_shown_loads(text: str, write: Any) -> None:
    assert Inventory.load(str(write("i.yaml", text))).hosts


def test_the_example_inventory_has_the_hosts_of_the_readme_and_reaches_none() -> None:
    example = Inventory.load(str(ROOT / "inventory"))
    named = re.findall(r"--hosts '([^']+)'", (ROOT / "README.md").read_text())
    assert "gpu[01-16]" in named
    for host in example.select(named):
        assert host.address.endswith(".example")


def test_a_check_that_is_shown_does_not_hold_where_its_question_fails(tmp_path: Path) -> None:
    (text,) = [one for one in blocks("docs/playbooks.md", "yaml") if "nvidia-smi -pm 1" in one]
    (step,) = read(text, "docs/playbooks.md").bind(Host(name="gpu01", address="gpu01"), {})
    for answer, code in (
        ("echo Enabled", 0),
        ("echo Disabled", 1),
        ("exit 9", 1),
        ("echo Enabled; exit 9", 1),
    ):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        assert min(subprocess.run(["sh", "-c", step.act.check], env=path).returncode, 1) == code


def test_the_fabfile_that_is_shown_is_one_for_its_playbook(tmp_path: Path) -> None:
    (fabfile,) = [one for one in blocks("docs/playbooks.md", "python") if "# fabfile.py" in one]
    (text,) = [one for one in blocks("docs/playbooks.md", "yaml") if "# exporters.yaml" in one]
    (tmp_path / "fabfile.py").write_text(fabfile)
    (step,) = read(text, str(tmp_path / "exporters.yaml")).bind(Host(name="gpu01", address="gpu01"), {})
    assert (step.act.converges, len(step.act.sha256)) == (True, 64)


def test_the_reference_names_every_event_variable_and_key() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    for event in get_args(get_args(Event)[0]):
        assert f"`{event.model_fields['kind'].default}`" in page
    for key in Config.model_fields:
        assert f"`{key}`" in page
    for file in (ROOT / "fleetfix").rglob("*.py"):
        for variable in re.findall(r"FLEETFIX_[A-Z_]+", file.read_text()):
            assert f"`{variable}`" in page


def test_every_class_of_failure_has_its_cause_and_its_cure() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.*) \|$", page, re.MULTILINE)
    assert [kind for kind, _, _ in rows] == list(dict.fromkeys(kind for kind, _, _ in rows))
    assert {kind for kind, _, _ in rows} == set(get_args(FailureKind))
    assert all(cause and cure for _, cause, cure in rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_is_shown_exists(page: Path) -> None:
    there = {command.name for command in app.registered_commands} | {
        group.name for group in app.registered_groups
    }
    shown = set(re.findall(r"(?:`|^|\$ )fleetfix ([a-z]+)\b", page.read_text(), re.MULTILINE))
    assert shown <= there


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_place_in_a_page_that_is_linked_to_exists(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        other = (page.parent / target).read_text() if target else page.read_text()
        headings = re.findall(r"^#+ (.+)$", other, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}
        assert anchor in anchors, f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_action_that_is_shown_converges(monkeypatch: pytest.MonkeyPatch) -> None:
    action_text, host_text = blocks("docs/writing-an-action.md", "python")
    compile(host_text, "persistence.py", "exec")
    module = types.ModuleType("shown_action")
    monkeypatch.setitem(sys.modules, "shown_action", module)
    exec(action_text, module.__dict__)
    action = module.Persistence()

    def planned(*modes: list[object]) -> Any:
        probe = action.probe()
        (asked,) = next(probe)
        with pytest.raises(StopIteration) as done:
            probe.send((Completed(value={"gpus": list(modes)}),))
        assert asked.function == "persistence.modes"
        return action.plan(done.value.value)

    (change,) = planned([0, True], [1, False]).changes
    assert (change.parts, change.do[0].args) == (("gpu1",), {"gpus": [1], "on": True})
    assert planned([0, True], [1, True]).changes == ()
