"""Another operator on another machine: a real run of fleetfix that writes to a host, or was cut short.

It has a state folder of its own and a process of its own to drive it, as on another bastion.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fleetfix.commands import Json
from fleetfix.errors import LabError
from fleetfix.folders import STATE_VARIABLE
from fleetfix.lab import namespaces
from fleetfix.lab.namespaces import Started
from fleetfix.lab.trouble import Scene

OPERATOR = "bob"
SECONDS = 30.0
"""How long another run may take to get where it is wanted, or to go back."""

MARK = "/run/other-work"

# It changes something that can be undone, and then waits for what never comes.
PLAYBOOK = f"""
name: other-work
steps:
  - id: mark
    shell: {{check: test -e /run/never, run: touch {MARK}, undo: rm -f {MARK}}}
    within: 24h
    every: 60s
"""

Options = Mapping[str, Any]


def foreign_lease(scene: Scene, options: Options) -> Json:
    """Have another run write to the host, for as long as the fault lasts."""
    new = not _records(scene).exists()
    run, driver = _begin(scene)
    return {"run": run, "pid": driver.pid, "start": driver.start, "new": new}


def unfinished_run(scene: Scene, options: Options) -> Json:
    """Have another run lose its controller when it had changed something."""
    undo = foreign_lease(scene, options)
    _cut(scene, undo)
    return undo


def driver_of(undo: Json) -> Started:
    """The process that drives, or drove, the other run: the one thing of it outside of the host."""
    return Started(undo["pid"], undo["start"])


def go_back(scene: Scene, undo: Json) -> None:
    """End the other run, undo what it did, and remove what the host remembers of it."""
    _cut(scene, undo)
    records, run = _records(scene), undo["run"]
    if (records / "claims" / f"{run}.json").exists():
        _roll_back(scene, run)
    # Where somebody released the run its mark was left.
    Path(f"/proc/{scene.init}/root{MARK}").unlink(missing_ok=True)
    shutil.rmtree(records if undo["new"] else records / "runs" / run, ignore_errors=True)
    shutil.rmtree(_folder(scene), ignore_errors=True)


def _roll_back(scene: Scene, run: str) -> None:
    back = _fleetfix("rollback", run, "--hosts", scene.name, *_with(scene))
    done = subprocess.run(
        back, env=_environ(scene), check=False, capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode != 0:
        raise LabError(f"{scene.name}: run {run} did not go back: {' '.join(done.stderr.split())}")


def _folder(scene: Scene) -> Path:
    """Where the other operator lives: beside the host's disk, not on it."""
    return scene.lab.paths.host(scene.name) / "elsewhere"


def _records(scene: Scene) -> Path:
    return Path(f"/proc/{scene.init}/root/var/lib/fleetfix")


def _fleetfix(*words: str) -> list[str]:
    return [sys.executable, "-m", "fleetfix", *words]


def _with(scene: Scene) -> list[str]:
    return ["-i", str(scene.lab.inventory_path), "--yes"]


def _environ(scene: Scene) -> dict[str, str]:
    home = str(_folder(scene))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    own = {"HOME": home, STATE_VARIABLE: f"{home}/state", "LOGNAME": OPERATOR, "PYTHONPATH": path}
    return {**namespaces.PRIVATE, **own, "PYTHONDONTWRITEBYTECODE": "1"}


def _begin(scene: Scene) -> tuple[str, Started]:
    """Start the other run, and wait until its change is made; (its id, the process that drives it)."""
    folder = _folder(scene)
    folder.mkdir(exist_ok=True)
    playbook, events = folder / "other-work.yaml", folder / "events"
    playbook.write_text(PLAYBOOK)
    run = _fleetfix("run", str(playbook), "--hosts", scene.name, *_with(scene), "--json")
    with open(events, "wb") as out, open(folder / "said", "wb") as err:
        process = subprocess.Popen(
            run,
            env=_environ(scene),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    driver = namespaces.started(process.pid)
    _await(lambda: process.poll() is not None or b'"change_finished"' in events.read_bytes())
    if process.poll() is not None:
        said = " ".join((folder / "said").read_text().split())
        raise LabError(f"{scene.name}: the other run ended: {said}")
    # It outlives us and is not ours to wait for.
    process.returncode = 0
    first = events.read_text().splitlines()[0]
    return str(json.loads(first)["run"]), driver


def _cut(scene: Scene, undo: Json) -> None:
    """Kill the other controller, and wait until its session on the host has let go."""
    driver_of(undo).kill()
    lease = _records(scene) / "lease.json"
    _await(lambda: not lease.exists() or undo["run"] not in lease.read_text())


def _await(claim: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not claim():
        if time.monotonic() > until:
            raise LabError(f"the other run was not where it should be within {SECONDS:g} s")
        time.sleep(0.05)
