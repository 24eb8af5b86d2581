"""The same real wheels, mended by the command line over the local wire and over SSH, and rolled back."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract import sshd
from tests.real_wheels.conftest import OTHERS, OURS
from tests.real_wheels.test_real_wheels import audited
from tests.wheelhouse import Venv, snapshot

pytestmark = [pytest.mark.real_wheels, pytest.mark.skipif(os.geteuid() != 0, reason="mends as root")]

PLAYBOOK = """
name: one-cuda
vars: {venv: null, wheelhouse: null}
steps:
  - id: parts
    wheel_parts: {venv: "${{ vars.venv }}", cuda: "12", wheelhouse: "${{ vars.wheelhouse }}"}
    when_pending: [wheels]
  - id: wheels
    cuda_wheels: {venv: "${{ vars.venv }}", cuda: "12"}
"""


@pytest.fixture(params=["local", "ssh"])
def inventory(request, tmp_path):
    """An inventory of this machine, reached by one wire or the other."""
    path = tmp_path / "inventory.yaml"
    if request.param == "local":
        path.write_text("hosts: {here: {transport: local}}\n")
        yield path
        return
    why = sshd.why_not()
    if why:
        pytest.skip(why)
    folder = tmp_path / "sshd"
    folder.mkdir()
    with sshd.server(folder) as server:
        host = {"address": "127.0.0.1", "port": server.port, "user": "root"}
        path.write_text(json.dumps({"ssh_config": str(folder / "ssh_config"), "hosts": {"here": host}}))
        yield path


def fleetfix(home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {"HOME": str(home), "PATH": os.environ["PATH"], "FLEETFIX_STATE_DIR": str(home / "state")}
    argv = [sys.executable, "-m", "fleetfix", *args]
    return subprocess.run(argv, env=environ, cwd=home, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize("order", [(OURS, OTHERS), (OTHERS, OURS)], ids=["cu13-last", "cu12-last"])
def test_real_twins_are_mended_and_rolled_back(
    tool, order, files, cache_environ, inventory, tmp_path, request
):
    venv = Venv(tmp_path / "venv", tool, tmp_path / "cache")
    venv.install(files["torch"])
    for names in order:
        venv.install(*(files[name] for name in names))
    before = snapshot(venv.path, times=True)
    assert audited(venv)
    home = tmp_path / "home"
    home.mkdir()
    playbook = tmp_path / "one-cuda.yaml"
    playbook.write_text(PLAYBOOK)
    own = ["--set", f"venv={venv.path}", "--set", f"wheelhouse={files['torch'].parent}"]
    asked = ["--hosts", "here", "-i", str(inventory), "--yes", "--json"]

    ran = fleetfix(home, "run", str(playbook), *asked, *own)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert audited(venv) == []
    assert set(venv.installed()) == {"torch", *OURS}

    run = json.loads(ran.stdout.splitlines()[0])["run"]
    request.addfinalizer(lambda: shutil.rmtree(f"/var/lib/fleetfix/runs/{run}", ignore_errors=True))
    back = fleetfix(home, "rollback", run, "-i", str(inventory))
    assert back.returncode == 0, back.stderr + back.stdout
    assert snapshot(venv.path, times=True) == before
