"""Real CUDA wheels from the package index, real pip and real uv: contaminated, mended, taken back.

Opt-in (`-m real_wheels`): about 800 MB are downloaded once, into a folder that is removed after.
`FLEETFIX_REAL_WHEELS` names a folder that holds them already.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetfix.actions.cuda_wheels import CudaWheels
from fleetfix.actions.wheel_parts import WheelParts
from fleetfix.remote import environments, jobs, sources
from tests.real_wheels.conftest import OTHERS, OURS
from tests.wheelhouse import Host, Venv, snapshot

pytestmark = pytest.mark.real_wheels

AUDIT = Path(__file__).parent / "audit_independent.py"


@pytest.fixture
def caches(monkeypatch, cache_environ, tmp_path):
    monkeypatch.setattr(jobs, "job_environ", lambda ctx, step: (os.geteuid(), cache_environ))
    monkeypatch.setattr(environments, "_in_use", lambda ctx: [])
    return tmp_path / "cache"


def audited(venv):
    done = subprocess.run(
        [sys.executable, "-I", str(AUDIT), str(venv.path)], capture_output=True, text=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize("order", [(OURS, OTHERS), (OTHERS, OURS)], ids=["cu13-last", "cu12-last"])
def test_real_twins_are_mended_and_taken_back(tool, order, files, caches, tmp_path, monkeypatch):
    monkeypatch.setattr(sources.Sources, "index_has", lambda self, dist: False)
    venv = Venv(tmp_path / "venv", tool, caches)
    venv.install(files["torch"])
    for names in order:
        venv.install(*(files[name] for name in names))
    before = snapshot(venv.path, times=True)
    assert audited(venv)

    host = Host(tmp_path / "state")
    stage = WheelParts(venv=str(venv.path), cuda="12", wheelhouse=str(files["torch"].parent))
    cure = CudaWheels(venv=str(venv.path), cuda="12")
    host.apply(stage)
    plan = host.apply(cure)
    assert audited(venv) == []
    assert set(venv.installed()) == {"torch", *OURS}
    assert host.plan(cure).changes == ()

    host.undo(plan, "cuda_wheels")
    assert snapshot(venv.path, times=True) == before


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_real_cure_by_hand_is_repaired(tool, files, caches, tmp_path, monkeypatch):
    monkeypatch.setattr(sources.Sources, "index_has", lambda self, dist: False)
    venv = Venv(tmp_path / "venv", tool, caches)
    venv.install(*(files[name] for name in ("torch", *OURS)))
    venv.install(*(files[name] for name in OTHERS))
    venv.uninstall(*OTHERS)
    assert len(audited(venv)) == 61

    host = Host(tmp_path / "state")
    host.apply(WheelParts(venv=str(venv.path), cuda="12", wheelhouse=str(files["torch"].parent)))
    (change,) = host.apply(CudaWheels(venv=str(venv.path), cuda="12")).changes
    assert change.summary == "repair 61 files of 2 packages"
    assert audited(venv) == []


@pytest.mark.parametrize("with_pip", [True, False], ids=["pip-in-it", "uv-only"])
def test_the_package_index_serves_where_nothing_else_does(with_pip, files, caches, tmp_path):
    venv = Venv(tmp_path / "venv", "pip", caches)
    if with_pip:
        subprocess.run([venv.python, "-m", "ensurepip", "--default-pip"], check=True, capture_output=True)
    venv.install(files["torch"], files["nvidia-nvshmem-cu12"])
    venv.install(files["nvidia-nvshmem-cu13"])
    host = Host(tmp_path / "state")
    stage = WheelParts(venv=str(venv.path), cuda="12")
    assert [part.source for part in host.probe(stage).parts] == ["the package index"]
    host.apply(stage)
    host.apply(CudaWheels(venv=str(venv.path), cuda="12"))
    assert audited(venv) == []
