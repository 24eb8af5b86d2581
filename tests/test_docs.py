"""What the documentation shows works."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fleetfix.commands import Completed
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


@pytest.mark.parametrize("text", [text for text in blocks("docs/playbooks.md", "yaml") if "hosts:" in text])
def test_an_inventory_that_is_shown_loads(text: str, write: Any) -> None:
    assert Inventory.load(str(write("i.yaml", text))).hosts


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
