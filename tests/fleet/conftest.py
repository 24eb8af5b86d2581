"""A lab of its own for each test, and the real command line over it, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from fleetfix.errors import LabError
from fleetfix.hostset import HostSet
from fleetfix.lab import Lab, namespaces
from fleetfix.lab.witness import JOB_WRITES
from tests.fleet import independent

RUN_SECONDS = 240.0

Files = dict[str, Any]


@dataclass
class Ran:
    """How a command of fleetfix ended."""

    exit: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a run with --json."""
        return [json.loads(line)["event"] for line in self.out.splitlines()]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def outcomes(self) -> dict[str, str]:
        return {event["host"]: event["outcome"] for event in self.of("host_finished")}

    @property
    def told(self) -> str:
        """Why each host ended as it did, for the message of a failed assertion."""
        ends = [
            f"{e['host']}: {e['outcome']}: {e['step']}: {e['reason']}" for e in self.of("host_finished")
        ]
        return "\n".join([self.err, *ends])

    def finished(self, host: str) -> dict[str, Any]:
        return next(event for event in self.of("host_finished") if event["host"] == host)

    @property
    def run_id(self) -> str:
        return str(json.loads(self.out.splitlines()[0])["run"])


@dataclass
class Site:
    """A lab, an operator's home, and the command line between them."""

    lab: Lab
    home: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def environ(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH") if name in os.environ}
        state = str(self.home / "state")
        return {**kept, "HOME": str(self.home), "FLEETFIX_STATE_DIR": state, "NO_COLOR": "1"}

    def argv(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "fleetfix", *args]

    def __call__(self, *args: str, timeout: float = RUN_SECONDS) -> Ran:
        """Run a command of fleetfix to its end."""
        done = subprocess.run(
            self.argv(*args),
            env=self.environ(),
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def run(self, hosts: str, *more: str, playbook: str = "purge-cu13") -> Ran:
        """Run a playbook over hosts of the lab, with events on stdout."""
        return self("run", playbook, "--hosts", hosts, "-i", self.inventory, "--yes", "--json", *more)

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start a command in a process group of its own; it is ended with the test."""
        process = subprocess.Popen(
            self.argv(*args),
            env=self.environ(),
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    @property
    def inventory(self) -> str:
        return str(self.lab.inventory_path)

    def set_vars(self, host: str, **variables: Any) -> None:
        """Give a host variables in the lab's inventory."""
        path = self.lab.inventory_path
        held = yaml.safe_load(path.read_text())
        held["hosts"][host].setdefault("vars", {}).update(variables)
        path.write_text(yaml.safe_dump(held))

    def pid(self, host: str) -> int:
        return self.lab.init(host)

    def job(self, host: str) -> independent.Job:
        """The one training job of a host."""
        (found,) = independent.jobs(self.pid(host))
        return found

    def wait_for_speed(self, host: str, low: float, high: float) -> float:
        """Wait until the job logs a rate between two."""
        return until(lambda: _between(self.lab.tok_s(host), low, high), f"{host} at {low:g}-{high:g} tok/s")

    def files(self, host: str) -> Files:
        """Every file of a host but those that a running job or fleetfix's own records write."""
        return self.lab.files(host, ignore=(*JOB_WRITES, "/var/lib/fleetfix"))

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait(10)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self.lab.down()


def _between(rate: float | None, low: float, high: float) -> float | None:
    return rate if rate is not None and low <= rate <= high else None


T = TypeVar("T")


def until(look: Callable[[], T | None], what: str, seconds: float = 30.0) -> T:
    """Look until there is something; fail with what was waited for when there never is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail(f"waited {seconds:g} s in vain for {what}")


def step_began(process: subprocess.Popen[str], step: str) -> str:
    """Read the events of a run that was started with --json until a step begins; the run's id."""
    assert process.stdout is not None
    for line in process.stdout:
        record = json.loads(line)
        if record["event"]["kind"] == "step_started" and record["event"]["step"] == step:
            return str(record["run"])
    pytest.fail(f"the run ended before {step}: {process.stderr and process.stderr.read()}")


def said(process: subprocess.Popen[str], kind: str) -> bool:
    """Read the events of a run that was started with --json until one of this kind, or to the end."""
    assert process.stdout is not None
    return any(f'"{kind}"' in line for line in process.stdout)


Make = Callable[..., Site]


def _sites(folder: Path) -> Iterator[Make]:
    """Make labs below a folder, and end them."""
    try:
        namespaces.check()
    except LabError as error:
        pytest.skip(f"no lab here: {error}")
    made: list[Site] = []

    def make(hosts: str, *, contaminated: list[str] | None = None, **more: Any) -> Site:
        number = len(made)
        home = folder / f"home{number}"
        home.mkdir()
        lab = Lab(home / "state" / "lab")  # where `-i lab` looks for it
        one = Site(lab, home)
        made.append(one)
        lab.up(HostSet.parse(hosts), contaminated=contaminated, **more)
        return one

    yield make
    for one in made:
        one.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Make]:
    """Make labs for one test: `site("gpu[01-03]", contaminated=["gpu01"])`."""
    yield from _sites(tmp_path)


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Make labs for all tests of a file, each of which has hosts of its own there."""
    yield from _sites(tmp_path_factory.mktemp("shared"))
