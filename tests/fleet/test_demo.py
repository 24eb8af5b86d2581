"""`make demo` tells its story to the end, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleetfix.errors import LabError
from fleetfix.lab import namespaces
from tests.fleet.conftest import until

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parent.parent.parent
Demo = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    """Start the demo over a few hosts, in a process group of its own."""
    try:
        namespaces.check()
    except LabError as error:
        pytest.skip(f"no lab here: {error}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "tmp").mkdir()
    command = tmp_path / "bin" / "fleetfix"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m fleetfix "$@"\n')
    command.chmod(0o755)
    started: list[subprocess.Popen[str]] = []

    def start(**hosts: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["sh", str(ROOT / "scripts/demo.sh")],
            env={
                **os.environ,
                **{f"DEMO_{name.upper()}": value for name, value in hosts.items()},
                "PATH": f"{command.parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "HOME": str(tmp_path),
                "TMPDIR": str(tmp_path / "tmp"),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=60)


def of_lab(folder: Path) -> list[str]:
    """The processes whose lab lies below a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"XDG_STATE_HOME={folder}".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_it_tells_its_story_to_the_end(demo: Demo, tmp_path: Path) -> None:
    process = demo(hosts="gpu[01-04]", sick="gpu[02-03]", broken="gpu03", taken="gpu04")
    told, _ = process.communicate(timeout=240)
    assert process.returncode == 0, told
    ends = [line.split()[:2] for line in told.splitlines()]
    for end in (
        ["rolled_back", "gpu03:"],
        ["blocked", "gpu04:"],
        ["changed", "gpu02"],
        ["ok", "gpu[01-04]"],
    ):
        assert end in ends, told
    assert "12.8K → 20.0K tok/s/GPU" in told
    assert [line for line in told.splitlines() if line.startswith(("# ", "$ ")) and len(line) > 110] == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert of_lab(tmp_path) == []


def test_interrupted_it_leaves_nothing_behind(demo: Demo, tmp_path: Path) -> None:
    process = demo(hosts="gpu01", sick="gpu01", broken="gpu01", taken="gpu01")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("$ fleetfix plan"):
            break
    assert of_lab(tmp_path), "the lab is up"
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert list((tmp_path / "tmp").iterdir()) == []
    until(lambda: not of_lab(tmp_path), "the end of the lab's processes")
