"""The action that docs/writing-an-action.md shows works as it says: written down, known, run on a lab."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleetfix.errors import LabError
from fleetfix.lab import namespaces

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/writing-an-action.md").read_text()


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[number]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources in which the page was followed to the letter."""
    try:
        namespaces.check()
    except LabError as error:
        pytest.skip(f"no lab here: {error}")
    package = tmp_path / "checkout" / "fleetfix"
    shutil.copytree(ROOT / "fleetfix", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "actions/persistence.py").write_text(block("python"))
    (package / "remote/persistence.py").write_text(block("python", 1))
    kinds = package / "actions/__init__.py"
    kinds.write_text(kinds.read_text().replace("    # checks\n", block("text") + "    # checks\n"))
    return package.parent


def test_the_action_that_is_shown_works_on_the_lab(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "persistence.yaml").write_text(block("yaml"))
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "fleetfix"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m fleetfix "$@"\n')
    command.chmod(0o755)
    script = block("sh")
    assert script.startswith("fleetfix lab up")
    environ = {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(checkout),
        "FLEETFIX_STATE_DIR": str(tmp_path / "state"),
        "HOME": str(tmp_path),
    }

    def run(lines: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-exc", lines], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=240
        )

    try:
        done = run(script)
    finally:
        run("fleetfix lab down")
    assert done.returncode == 0, done.stdout + done.stderr
    ends = [line for line in done.stdout.splitlines() if re.match(r"(changed|rolled_back|ok) ", line)]
    assert [line.split()[0] for line in ends] == ["changed", "rolled_back", "changed", "ok"], done.stdout
    assert "turn persistence mode on: GPU 1" in done.stderr
