"""Acting as the owner of something, also as one that no table of users knows."""

import os
import pwd
import shutil
from pathlib import Path

import pytest

from fleetfix.remote import environments, loads
from fleetfix.remote.api import NO_GROUP, Context
from tests.wheelhouse import PYTHON

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")

CONTEXT = Context("r", "s", "/nonexistent")


@pytest.fixture
def stranger():
    """A uid that has no entry."""
    known = {entry.pw_uid for entry in pwd.getpwall()}
    return next(uid for uid in range(54321, 55555) if uid not in known)


def who():
    return [os.getresuid(), os.getresgid(), os.getgroups()]


@pytest.mark.parametrize(("gid", "group"), [(4321, 4321), (None, NO_GROUP), (0, NO_GROUP)])
def test_a_user_without_entry_has_one_group_and_never_roots(stranger, gid, group):
    assert CONTEXT.as_user(stranger, who, gid=gid) == [[stranger] * 3, [group] * 3, []]
    ran = CONTEXT.command(["id", "-G"], uid=stranger, gid=gid)
    assert (ran.exit, ran.text.split()) == (0, [str(group)])


def test_a_known_user_has_the_groups_of_the_table(stranger):
    nobody = pwd.getpwnam("nobody")
    uids, gids, _ = CONTEXT.as_user(nobody.pw_uid, who, gid=4321)
    assert (uids, gids) == ([nobody.pw_uid] * 3, [nobody.pw_gid] * 3)


def test_torch_of_a_user_without_entry_is_asked(stranger, monkeypatch):
    monkeypatch.setattr(environments, "_in_use", lambda ctx: [])
    base = Path("/var/tmp") / f"fleetfix-stranger-{os.getpid()}"
    site = base / "venv/lib/python3.11/site-packages/torch"
    site.mkdir(parents=True)
    try:
        base.chmod(0o755)
        (base / "venv/bin").mkdir()
        (base / "venv/bin/python").symlink_to("/usr/bin/python3" if _system() else PYTHON)
        (base / "venv/pyvenv.cfg").write_text("home = /usr/bin\n")
        for path in [base / "venv", *(base / "venv").rglob("*")]:
            os.lchown(path, stranger, 4321)
        found = loads.torch(CONTEXT, str(base / "venv"))
        assert found["path"] == str(base / "venv")
        assert environments.resolve(CONTEXT, str(base / "venv"))["user"] == str(stranger)
    finally:
        shutil.rmtree(base)


def _system():
    return os.path.exists("/usr/bin/python3")
