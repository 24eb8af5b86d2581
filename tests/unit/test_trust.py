"""Files that others may write to, or may put another in the place of, are not what the operator means."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetfix import playbook
from fleetfix.cli import config
from fleetfix.errors import DocumentError, InventoryError, PlaybookError
from fleetfix.inventory import Inventory

Write = Callable[[str, str], Path]
PLAYBOOK = "name: p\nsteps:\n  - {id: a, shell: {run: 'true', always: true}}\n"
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shared"
    made.mkdir(mode=0o755)
    (made / "p.yaml").write_text(PLAYBOOK)
    (made / "hosts.yaml").write_text("hosts:\n  gpu01: {}\n")
    for one in made.iterdir():
        one.chmod(0o644)
    return made


def test_what_is_ones_own_is_read(folder: Path) -> None:
    assert playbook.load(str(folder / "p.yaml")).name == "p"
    assert "gpu01" in Inventory.load(str(folder / "hosts.yaml")).hosts


@pytest.mark.parametrize("reach", ["file", "folder", "through a link", "link in a sticky folder"])
def test_a_playbook_that_others_may_write_is_not_run(folder: Path, tmp_path: Path, reach: str) -> None:
    path = folder / "p.yaml"
    (path if reach == "file" else folder).chmod(0o777)
    if reach.endswith("link"):
        path = tmp_path / "mine.yaml"
        path.symlink_to(folder / "p.yaml")
    if "sticky" in reach:
        folder.chmod(0o777)
        tmp_path.chmod(0o1777)
    with pytest.raises(PlaybookError, match=r"is not run: .*others may write to it"):
        playbook.load(str(path))


def test_a_folder_in_which_only_owners_replace_files_is_no_trouble(folder: Path) -> None:
    folder.chmod(0o1777)
    assert playbook.load(str(folder / "p.yaml")).name == "p"


@root
def test_a_playbook_of_another_user_is_run_only_for_who_called_sudo(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(folder / "p.yaml", 54399, 54399)
    with pytest.raises(PlaybookError, match="belongs to uid 54399"):
        playbook.load(str(folder / "p.yaml"))
    monkeypatch.setenv("SUDO_UID", "54399")
    assert playbook.load(str(folder / "p.yaml")).name == "p"


@pytest.mark.parametrize("what", ["hosts.yaml", "."])
def test_an_inventory_that_everybody_may_write_is_not_used_by_any_word(folder: Path, what: str) -> None:
    (folder / what).chmod(0o777)
    with pytest.raises(InventoryError, match="everybody may write to"):
        Inventory.load(str(folder / "hosts.yaml"))


def test_a_configuration_that_others_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "fleetfix").mkdir(mode=0o700)
    path = tmp_path / "fleetfix/config.toml"
    path.write_text("confirm_above = 3\n")
    path.chmod(0o600)
    assert config.load().confirm_above == 3
    path.chmod(0o666)
    with pytest.raises(DocumentError, match="others may write to it"):
        config.load()
