"""Where this machine lets a process open few files, a fleet is refused or gone through more slowly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def limited(files: int, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = f'ulimit -n {files}; exec {sys.executable} -m fleetfix "$@"'
    home = {**os.environ, "HOME": str(tmp_path), "FLEETFIX_STATE_DIR": str(tmp_path / "state")}
    return subprocess.run(
        ["sh", "-c", command, "sh", *arguments], capture_output=True, text=True, timeout=120, env=home
    )


def test_a_run_over_more_hosts_than_it_may_open_files_for_is_refused_before_it_begins(
    tmp_path: Path,
) -> None:
    done = limited(
        64, tmp_path, "run", "stop-gpu-jobs", "-i", "gpu[001-100],", "--hosts", "*", "--yes-hosts", "100"
    )
    assert done.returncode == 1
    assert "this process may open 64 files, and a run over 100 hosts needs" in done.stderr
    assert "ulimit -Hn" in done.stderr


def test_a_command_goes_to_fewer_hosts_at_once_and_says_so(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yaml"
    inventory.write_text("transport: local\nhosts: gpu[01-10]\n")
    done = limited(56, tmp_path, "exec", "-i", str(inventory), "--hosts", "*", "-b", "--", "echo", "here")
    assert done.returncode == 0, done.stderr
    assert "fleetfix: 4 hosts at once, not 64: this process may open 56 files" in done.stderr
    assert "gpu[01-10]" in done.stdout
    none = limited(40, tmp_path, "exec", "-i", str(inventory), "--hosts", "gpu01", "--", "true")
    assert none.returncode == 1
    assert "a single host needs" in none.stderr
