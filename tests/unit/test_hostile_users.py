"""Users of a host who own what root looks into, and put there what they like, while root works."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from fleetfix.remote import (
    calls,
    dists,
    elf,
    environments,
    holds,
    launch,
    loads,
    parts,
    plain,
    sources,
    wheels,
)
from fleetfix.remote.api import Context, Refusal

USER = 54399  # has no entry anywhere
# The system's own where there is one: the user cannot enter the home that ours may lie in.
PYTHON = os.path.realpath("/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable)
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")


@pytest.fixture
def home():
    """A folder that the user owns, below one that everybody can enter."""
    base = Path("/var/tmp") / f"fleetfix-{uuid.uuid4().hex}"
    (base / "home").mkdir(parents=True)
    base.chmod(0o755)
    yield base / "home"
    shutil.rmtree(base)


def give(path):
    for one in [path, *path.rglob("*")]:
        os.lchown(one, USER, USER)


def environment(path):
    """A virtual environment whose code says as whom it ran, however Python is made to run it."""
    site = path / "lib/python3.11/site-packages"
    (site / "torch").mkdir(parents=True)
    (path / "bin").mkdir()
    (path / "bin/python").symlink_to(PYTHON)
    (path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    told = path.parent / "told"
    say = f"import os; open({str(told)!r}, 'a').write('%d\\n' % os.geteuid())\n"
    for name in ("canary.pth", "sitecustomize.py", "usercustomize.py", "conftest.py", "torch/__init__.py"):
        (site / name).write_text(say)
    for name in ("torch-2.9.1+cu128", "nvidia_cudnn_cu13-9.1"):
        info = site / f"{name}.dist-info"
        info.mkdir()
        project, _, version = name.partition("-")
        (info / "METADATA").write_text(f"Name: {project}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{project}/x.so,sha256={'A' * 43},3\n")
    return told


# -- what is opened -------------------------------------------------------------------------------------


def kinds(folder):
    """Whatever may stand where a file is looked for."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "to-pipe").symlink_to("pipe")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "round").symlink_to("round")
    return [folder / name for name in ("folder", "pipe", "to-pipe", "device", "round", "nothing")]


def test_only_a_regular_file_is_ever_opened(tmp_path, monkeypatch):
    """To open a device is to use it: a watchdog that was opened restarts the machine."""
    paths = kinds(tmp_path)
    asked = []
    opens = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *more, **by: asked.append(flags) or opens(path, flags, *more, **by)
    )
    for path in paths:
        assert plain.text(str(path), 9) is None
        assert dists.read_text(str(path)) is None
        assert dists.hash_file(str(path)) is None
        assert elf.needed(str(path)) == []
        assert sources._infos(str(path)) == frozenset()
    assert all(flags & os.O_PATH for flags in asked)
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert plain.text(str(tmp_path / "link"), 9) == b"x"
    with pytest.raises(OSError, match="regular"):
        plain.opened(str(tmp_path / "link"), follow=False)


@root
def test_no_link_has_root_tell_what_its_user_may_not_read(home, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("root:$y$hash:1:\n")
    secret.chmod(0o600)
    told = environment(home / "env")
    info = home / "env/lib/python3.11/site-packages/torch-2.9.1+cu128.dist-info"
    (info / "INSTALLER").symlink_to(secret)
    log = home / "log"
    log.symlink_to(secret)
    give(home / "env")
    found = dists.read_dist(str(home / "env"), "lib/python3.11/site-packages", info.name)
    assert found.installer == ""
    context = Context("r", "s", str(tmp_path), state=str(tmp_path))
    assert launch._last_lines(context, str(log), {"uid": USER, "offset": 0}) == []
    assert launch._last_lines(context, str(log), {"uid": 0, "offset": 0}) != []
    assert not told.exists()


# -- what runs ------------------------------------------------------------------------------------------


@root
def test_nothing_of_an_environment_ever_runs_as_root(home, tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "_in_use", lambda ctx: [])
    monkeypatch.chdir(home)
    told = environment(home / "env")
    for name in ("nvidia-smi", "python3", "sudo", "uv", "pip"):
        (home / name).write_text(f"#!/bin/sh\nid -u >> {told}\n")
        (home / name).chmod(0o755)
    give(home)
    context = Context("r", "s", str(tmp_path), state=str(tmp_path), deadline=None)
    venv = str(home / "env")
    assert "none" not in wheels.audit(context, venv)
    info = "lib/python3.11/site-packages/torch-2.9.1+cu128.dist-info"
    assert parts.find(context, venv, [info], [])["parts"]
    assert not told.exists()
    assert loads.torch(context, venv)["path"] == venv
    # It ran, to be asked: as its owner, and as nobody else.
    assert set(told.read_text().split()) == {str(USER)}


# -- races ----------------------------------------------------------------------------------------------

RACER = """
import os, sys, time
inside, away, elsewhere = sys.argv[1:]
print("racing", flush=True)
while True:
    os.rename(inside, away)
    os.symlink(elsewhere, inside)
    time.sleep(0.0003)  # else the other would hardly ever find what stands there
    os.unlink(inside)
    os.rename(away, inside)
    time.sleep(0.0003)
"""


@root
def test_a_hold_is_never_led_out_of_the_tree_by_a_user_who_races(home, tmp_path, monkeypatch):
    environment(home / "x/env")
    give(home)
    elsewhere = home.parent / "roots"
    environment(elsewhere / "env")
    before = sorted(str(path) for path in elsewhere.rglob("*"))
    monkeypatch.setattr(holds, "_candidates", lambda ctx, prefix: [str(home / "x"), prefix])
    context = Context("r", "s", str(tmp_path), state=str(tmp_path), memory=str(tmp_path / "m"))
    argv = [PYTHON, "-c", RACER, str(home / "x"), str(home / "y"), str(elsewhere)]
    racer = subprocess.Popen(argv, user=USER, stdout=subprocess.PIPE, cwd="/")
    try:
        assert racer.stdout.readline() == b"racing\n"
        done = 0
        for attempt in range(20_000):
            if done and attempt > 300:
                break
            try:
                held = holds.place(context, str(home / "x/env"), USER)
                os.close(holds.opened(held))
                done += 1
            except (Refusal, OSError):
                pass
            assert sorted(str(path) for path in elsewhere.rglob("*")) == before
    finally:
        racer.kill()
        racer.communicate()
    assert done  # the race was not only lost


# -- what is answered -----------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["NaN", "[" * 100 + "]" * 100, "1e999"])
def test_what_a_user_has_said_ends_a_call_and_not_the_session(said):
    context = Context("r", "s", "/nonexistent")
    answer = calls.perform(context, lambda ctx: json.loads(said), "loads.torch", {})
    assert answer["failure"]["kind"] == "bug"
    assert calls.perform(context, lambda ctx: {"a": [[1]]}, "loads.torch", {})["value"] == {"a": [[1]]}
