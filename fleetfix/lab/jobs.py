"""Starts and stops processes on lab hosts, from outside."""

from __future__ import annotations

import json
import signal
import subprocess
import time

from fleetfix.errors import LabError
from fleetfix.lab import namespaces, stock
from fleetfix.lab.layout import Boot, as_json
from fleetfix.lab.namespaces import Process, Started


def start(init: int, python: str, boot: Boot, *, uid: int = 0) -> int:
    """Start a command in a host, detached, and return its pid there."""
    launcher = [
        python,
        "-ISB",
        "-c",
        stock.stand_in("init.py").decode(),
        "launch",
        json.dumps(as_json(boot)),
    ]
    argv = namespaces.enter(init, launcher, uid=uid)
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=namespaces.PRIVATE)
    if done.returncode != 0:
        raise LabError(f"{boot.argv[0]} did not start: {done.stderr.strip().splitlines()[-1:]}")
    return int(done.stdout)


def below(processes: tuple[Process, ...], top: Process) -> tuple[Process, ...]:
    """`top` and every process under it."""
    found = [top]
    for process in found:
        found += [one for one in processes if one.parent == process.outer]
    return tuple(found)


def stop(targets: tuple[Process, ...], *, grace: float = 3.0) -> None:
    """TERM the first of the targets, then KILL what is left of all."""
    handles = [Started(one.outer, one.start) for one in targets]
    if handles and grace:
        handles[0].kill(signal.SIGTERM)
        until = time.monotonic() + grace
        while any(one.alive() for one in handles) and time.monotonic() < until:
            time.sleep(0.02)
    for one in handles:
        one.kill()
    for one in handles:
        if not one.wait_gone(5.0):
            raise LabError(f"process {one.pid} does not end")
