"""Whose code an environment is: nothing runs as root that somebody else can change."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.remote import environments, loads
from fleetfix.remote.api import Context

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make environments of others")

PYTHON = os.path.realpath("/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable)


@pytest.fixture
def nobody() -> int:
    try:
        return pwd.getpwnam("nobody").pw_uid
    except KeyError:
        pytest.skip("no user nobody here")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user may enter, gone afterwards."""
    monkeypatch.setattr(environments, "_in_use", lambda ctx: [])
    folder = Path("/var/tmp") / f"fleetfix-owners-{os.getpid()}"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


def environment(place: Path, uid: int, python: str = PYTHON) -> Path:
    """An environment whose Python runs, all of it of one owner."""
    venv = place / "venv"
    site = venv / "lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin/python").symlink_to(python)
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\n")
    own(venv, uid)
    return venv


def own(venv: Path, uid: int) -> None:
    for path in [venv, *venv.rglob("*")]:
        os.lchown(path, uid, -1)


CONTEXT: Any = Context("r", "s", "/nonexistent")  # type: ignore[no-untyped-call]


def resolve(venv: Path) -> dict[str, Any]:
    found: dict[str, Any] = environments.resolve(CONTEXT, str(venv))
    return found


def test_an_environment_of_one_owner_is_that_owners(place: Path, nobody: int) -> None:
    assert resolve(environment(place, nobody))["uid"] == nobody


def test_an_environment_of_roots_is_roots(place: Path) -> None:
    assert resolve(environment(place, 0))["uid"] == 0


def test_a_site_that_leads_to_roots_packages_makes_nothing_roots(place: Path, nobody: int) -> None:
    venv = environment(place, nobody)
    site = venv / "lib/python3.11/site-packages"
    site.rmdir()
    site.symlink_to("/usr/lib/python3/dist-packages")
    own(venv, nobody)
    assert resolve(venv).get("uid") != 0
    assert "no site-packages" in resolve(venv)["hint"]


def test_python_of_another_never_runs_as_root(place: Path, nobody: int) -> None:
    ran = place / "ran"
    ran.mkdir()
    ran.chmod(0o777)
    own_python = place / "python"
    own_python.write_text(f"#!/bin/sh\nid -u > {ran}/uid\n")
    own_python.chmod(0o755)
    os.chown(own_python, nobody, -1)
    venv = environment(place, nobody, str(own_python))
    os.chown(venv / "lib/python3.11/site-packages", 0, -1)
    assert "mixed owners" in loads.torch(CONTEXT, str(venv))["none"]
    own(venv, 0)
    assert "would run as root" in loads.torch(CONTEXT, str(venv))["none"]
    assert not (ran / "uid").exists()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("lib/python3.11/site-packages", "site-packages belongs to root, the environment to nobody"),
        ("lib/python3.11", "lib/python3.11 belongs to root, the environment to nobody"),
        ("bin", "bin belongs to root, the environment to nobody"),
        ("bin/python", "bin/python belongs to root, the environment to nobody"),
        ("pyvenv.cfg", "pyvenv.cfg belongs to root, the environment to nobody"),
        (".", "pyvenv.cfg belongs to nobody, the environment to root"),
    ],
)
def test_mixed_owners_are_named(part: str, said: str, place: Path, nobody: int) -> None:
    venv = environment(place, nobody)
    os.lchown(venv / part, 0, -1)
    assert resolve(venv)["none"].endswith("has mixed owners: " + said)
    assert "chown -R" in resolve(venv)["hint"]


@pytest.mark.parametrize("part", [".", "bin", "lib/python3.11/site-packages", "pyvenv.cfg", ".."])
def test_what_everybody_may_write_is_not_roots_alone(part: str, place: Path) -> None:
    venv = environment(place, 0)
    (venv / part).chmod(0o757)
    assert "can be written by everybody" in resolve(venv)["none"]


def test_what_a_group_may_write_is_not_roots_alone(place: Path, nobody: int) -> None:
    venv = environment(place, 0)
    (venv / "bin").chmod(0o775)
    assert resolve(venv)["uid"] == 0  # the group is root's
    os.chown(venv / "bin", 0, pwd.getpwuid(nobody).pw_gid)
    (venv / "bin").chmod(0o775)
    assert "can be written by group" in resolve(venv)["none"]


def test_who_owns_a_folder_above_owns_what_root_would_run(place: Path, nobody: int) -> None:
    venv = environment(place, 0)
    os.chown(place, nobody, -1)
    assert f"{place} belongs to nobody" in resolve(venv)["none"]


def test_a_sticky_folder_above_is_no_danger(place: Path) -> None:
    place.chmod(0o1777)
    assert resolve(environment(place, 0))["uid"] == 0


def test_a_bin_that_is_a_link_is_refused(place: Path, nobody: int) -> None:
    venv = environment(place, nobody)
    (venv / "bin").rename(place / "elsewhere")
    (venv / "bin").symlink_to(place / "elsewhere")
    own(venv, nobody)
    assert "a link stands on the way" in resolve(venv)["none"]
