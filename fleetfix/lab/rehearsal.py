"""Lab: makes a fleet on this machine, breaks and heals its hosts, and takes it down again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fleetfix.commands import Json
from fleetfix.errors import LabError
from fleetfix.folders import make_private, state_folder
from fleetfix.hostset import HostSet
from fleetfix.lab import control, faults, layout, namespaces, record, stock, witness
from fleetfix.lab.namespaces import Process
from fleetfix.lab.record import HostPlan, HostRecord, LabPlan, LabRecord, Paths, Span
from fleetfix.lab.template import VENV, WHEELHOUSE, Template, drop, find_python, training
from fleetfix.lab.wheel import Installer

START_TIMEOUT = 60.0
JOB_SECONDS = 10.0
"""How long `up` waits for the training jobs of its hosts to be there."""
MOST_HOSTS = 254 * 254

VARS: dict[str, Json] = {"min_tok_s": 19000, "wheelhouse": WHEELHOUSE}
"""Host variables that the lab's inventory gives to every host."""

SHARABLE = ("/opt/", "/root/", "/home/", "/tmp/")
"""Where a folder may lie that all hosts of a lab have in common."""

ALICE = ("alice", 2001, "/home/alice")


@dataclass(frozen=True)
class HostStatus:
    """What `fleetfix lab status` shows of one host. `tok_s` is the median of its last steps."""

    name: str
    address: str
    port: int
    up: bool
    contaminated: bool
    """Whether wheels of CUDA 13 lie in its environment now."""
    faults: tuple[str, ...]
    processes: int
    job: bool
    """Whether its training job runs."""
    tok_s: float | None
    spans: str = ""
    """The hosts that its job spans, this one included."""
    shared: tuple[str, ...] = ()
    """Folders that it has in common with all others."""


class Lab:
    """A fleet of namespaced hosts whose files lie below `root`.

    The hosts and their SSH server outlive this process. Several labs can be up at once: each has
    a folder and a port of its own.
    """

    def __init__(self, root: Path | str | None = None, *, port: int = 0) -> None:
        self.root = Path(root) if root is not None else default_root()
        self.paths = Paths(self.root)
        self.port = port

    # -- up and down --------------------------------------------------------------------------------

    def up(
        self,
        hosts: HostSet | Iterable[str],
        *,
        contaminated: HostSet | Iterable[str] | None = None,
        gpus: int = 2,
        installer: Installer = "uv",
        variables: Mapping[str, Json] | None = None,
        spanning: HostSet | Iterable[str] = (),
        shared: Sequence[str] = (),
    ) -> LabRecord:
        """Make the hosts and start them; all contaminated unless it is said which.

        `variables` are added to the host variables of the lab's inventory. Hosts that are `spanning`
        train one job together. `shared` folders lie on all hosts and are one. A LabError where a lab
        is up already, or where hosts cannot be made.
        """
        names = [*hosts]
        bad = set(names if contaminated is None else contaminated)
        together = [*spanning]
        self._refuse(names, bad)
        _refuse_span(names, together)
        _refuse_shared(shared)
        self._clear_away()
        namespaces.check()
        server = self._start_server()
        try:
            given = {**VARS, **({"shared_paths": [*shared]} if shared else {}), **(variables or {})}
            span = Span(hosts=tuple(together), port=_meeting_port()) if together else None
            plan = self._lay_out(names, bad, gpus, installer, given, span, shared)
            self._hand_over(server, plan)
        except BaseException:
            server.terminate()
            server.wait()
            drop(self.root)
            raise
        found = self.record()
        # The server outlives us and is not ours to wait for.
        server.returncode = 0
        self._await_jobs(names)
        return found

    def _await_jobs(self, names: Sequence[str]) -> None:
        """Let every job become one: a fault that is made before would find nothing to act on."""
        until = time.monotonic() + JOB_SECONDS
        while time.monotonic() < until and not all(self.job(name) for name in names):
            time.sleep(0.02)

    def _refuse(self, names: Sequence[str], bad: set[str]) -> None:
        if not names:
            raise LabError("a lab needs at least one host", hint="--hosts 'gpu[01-03]'")
        if len(names) > MOST_HOSTS:
            raise LabError(f"a lab holds at most {MOST_HOSTS} hosts")
        strange = HostSet(bad - set(names))
        if strange:
            raise LabError(f"{strange} cannot be contaminated: not among the hosts of this lab")

    def _clear_away(self) -> None:
        """Refuse where this lab is up; sweep what an earlier one, or an earlier boot, left behind."""
        found = record.load(self.paths)
        if found is not None and found.alive():
            names = HostSet(one.name for one in found.hosts)
            raise LabError(f"this lab is up already, with {names}", hint="fleetfix lab down")
        if self.root.exists():
            self._refuse_strange_folder()
            drop(self.root)

    def _refuse_strange_folder(self) -> None:
        """Never drop a folder that no lab made."""
        marks = {"lab.json", "template", "hosts", "shared", "init.py", "server.log"}
        present = {path.name for path in self.root.iterdir()}
        if present and not present & marks:
            raise LabError(
                f"{self.root} is not a lab's folder and is not empty", hint="give another folder"
            )

    def _start_server(self) -> subprocess.Popen[str]:
        make_private(self.root.parent)
        self.root.mkdir(mode=0o700)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with open(self.paths.log, "w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "fleetfix.lab.server", str(self.root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd="/",
                env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
                start_new_session=True,
            )

    def _lay_out(
        self,
        names: Sequence[str],
        bad: set[str],
        gpus: int,
        installer: Installer,
        variables: Mapping[str, Json],
        span: Span | None,
        shared: Sequence[str],
    ) -> LabPlan:
        python = find_python()
        template = Template(self.paths.template, python, installer)
        template.make()
        self.paths.init.write_bytes(stock.stand_in("init.py"))
        users = () if namespaces.ordinary() else (ALICE,)
        plans = [
            HostPlan(name=name, address=address(at), contaminated=name in bad)
            for at, name in enumerate(names)
        ]
        peers = {one.name: one.address for one in plans if span is not None and one.name in span.hosts}
        for one in plans:
            known = peers if one.name in peers else {}
            layout.make_folders(self.paths.disk(one.name), template.etc, one.name, users, known)
            template.fill(self.paths.disk(one.name), contaminated=one.contaminated)
        disks = [self.paths.disk(one.name) for one in plans]
        caches = [path for path in shared if not (disks[0] / path.lstrip("/")).exists()]
        # What is shared is one before there are caches: to remove a link would date the others anew.
        for path in shared:
            if path not in caches:
                layout.share(path, disks, self.paths.shared(path))
        for one in plans:
            template.fill_caches(self.paths.disk(one.name), contaminated=one.contaminated)
        for path in caches:
            layout.share(path, disks, self.paths.shared(path))
        for one in plans:
            spec = layout.spec(
                self.paths.disk(one.name),
                one.name,
                gpus=gpus,
                keep=python.hidden,
                boot=training(gpus, span, one.name),
                shared={path: self.paths.shared(path) for path in shared},
            )
            layout.write_spec(self.paths.spec(one.name), spec)
        return LabPlan(
            hosts=tuple(plans),
            port=self.port,
            python=python.path,
            installer=installer,
            vars=dict(variables),
            span=span,
            shared=tuple(shared),
        )

    def _hand_over(self, server: subprocess.Popen[str], plan: LabPlan) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            server.stdin.write(plan.model_dump_json() + "\n")
            server.stdin.close()
        answer = _first_line(server.stdout)
        server.stdout.close()
        if not answer:
            tail = self.paths.log.read_text().strip().splitlines()[-1:]
            raise LabError(f"the lab's server did not start: {' '.join(tail)}")
        told: dict[str, Any] = json.loads(answer)
        if "error" in told:
            raise LabError(told["error"], hint=told.get("hint", ""))

    def down(self) -> HostSet:
        """End every process of the lab and remove its folder; says which hosts there were."""
        found = record.load(self.paths)
        if found is None:
            if self.root.exists():
                self._refuse_strange_folder()
                drop(self.root)
            return HostSet()
        if found.alive():
            self._end(found)
        drop(self.root)
        return HostSet(one.name for one in found.hosts)

    def _end(self, found: LabRecord) -> None:
        drivers = [driver for one in found.hosts for driver in faults.drivers(self, one.name)]
        everything = [found.server.process, *drivers, *(one.init.process for one in found.hosts)]
        for driver in drivers:
            driver.kill()
        found.server.process.kill(signal.SIGTERM)
        for one in found.hosts:
            one.init.process.kill()
        if not found.server.process.wait_gone(2.0):
            found.server.process.kill()
        left = [process.pid for process in everything if not process.wait_gone(5.0)]
        if left:
            raise LabError(
                f"processes {left} of the lab do not end", hint="look at them with ps, then down again"
            )

    # -- what there is ------------------------------------------------------------------------------

    def record(self) -> LabRecord:
        """The record of this lab; a LabError where none is up."""
        found = record.load(self.paths)
        if found is None:
            raise LabError("no lab is up", hint="fleetfix lab up --hosts 'gpu[01-03]'")
        if found.boot_id != record.boot_id():
            raise LabError("the machine was restarted since this lab was up", hint="fleetfix lab up again")
        return found

    def host(self, name: str) -> HostRecord:
        """One host of this lab."""
        return self.record().host(name)

    def init(self, name: str) -> int:
        """The pid, on this machine, of a host's first process; a LabError where the host is down."""
        process = self.host(name).init.process
        if not process.alive():
            raise LabError(f"{name} is down", hint="fleetfix lab down, then up")
        return process.pid

    def status(self) -> tuple[HostStatus, ...]:
        """How each host is."""
        found = self.record()
        return tuple(self._status(one, found) for one in found.hosts)

    def _status(self, one: HostRecord, found: LabRecord) -> HostStatus:
        up = one.init.process.alive()
        job = up and self.job(one.name) is not None
        return HostStatus(
            name=one.name,
            address=one.address,
            port=found.port,
            up=up,
            contaminated=self._contaminated(one.name),
            faults=faults.present(self, one.name),
            processes=len(self.processes(one.name)) if up else 0,
            job=job,
            tok_s=self.tok_s(one.name) if job else None,
            spans=str(HostSet(found.span.hosts)) if found.span and one.name in found.span.hosts else "",
            shared=found.shared,
        )

    def _contaminated(self, name: str) -> bool:
        site = "lib/python*/site-packages"
        venv = self.tree(name, VENV)
        return any(venv.glob(f"{site}/nvidia_*_cu13-*.dist-info"))

    def tree(self, name: str, path: str) -> Path:
        """Where on this machine a folder of a host lies: on its disk, or in what all hosts share."""
        for one in self.record().shared:
            if path == one or path.startswith(one + "/"):
                return self.paths.shared(one) / path[len(one) :].lstrip("/")
        return self.paths.disk(name) / path.lstrip("/")

    @property
    def inventory_path(self) -> Path:
        """The inventory of this lab."""
        return self.paths.inventory

    @property
    def ssh_config(self) -> Path:
        """The ssh config of this lab."""
        return self.paths.ssh_config

    def ssh_command(self, name: str) -> list[str]:
        """The command that logs in to a host."""
        self.host(name)
        return [shutil.which("ssh") or "ssh", "-F", str(self.ssh_config), name]

    # -- trouble ------------------------------------------------------------------------------------

    def break_host(self, name: str, fault: str, **options: Json) -> str:
        """Make a fault on a host and say in one line what was done."""
        return faults.make(self, name, fault, options)

    def heal(self, name: str) -> tuple[str, ...]:
        """Take back every fault of a host, newest first, and say which."""
        return faults.heal(self, name)

    def reboot(self, name: str) -> None:
        """Restart a host: new boot id, empty /run, no job, connections cut; its disks stay."""
        spec = json.loads(self.paths.spec(name).read_text())
        layout.write_spec(self.paths.spec(name), {**spec, "boot": None})
        control.ask(self.paths, {"do": "reboot", "host": name})

    # -- witness: looks from outside, by no code that fleetfix uses on hosts -------------------------

    def run(self, name: str, command: str, *, uid: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a shell command inside a host, past SSH."""
        argv = namespaces.enter(self.init(name), ["/bin/sh", "-c", command], uid=uid)
        return subprocess.run(argv, check=False, capture_output=True, text=True, env=namespaces.PRIVATE)

    def files(self, name: str, *, ignore: Iterable[str] = ()) -> dict[str, witness.Seen]:
        """Everything a host owns: path -> kind, mode, owner, size, hash."""
        return witness.files(self.init(name), ignore)

    def processes(self, name: str) -> tuple[Process, ...]:
        """Every process of a host but its first."""
        return namespaces.processes(self.init(name))

    def read(self, name: str, path: str) -> bytes:
        """A file of a host."""
        return witness.inside(self.init(name), path).read_bytes()

    def tok_s(self, name: str, *, last: int = 20) -> float | None:
        """Median tok/s of the last steps that the job logged since it last started, or None."""
        return witness.tok_s(self.init(name), last)

    def job(self, name: str) -> Process | None:
        """The launcher of the training job that uses the host's main environment, or None."""
        for process in self.processes(name):
            if f"{VENV}/bin/torchrun" in process.argv:
                return process
        return None


def default_root() -> Path:
    """Where `fleetfix lab` keeps its lab: below `$FLEETFIX_STATE_DIR`, or in the usual state folder."""
    return state_folder() / "lab"


def address(index: int) -> str:
    """The loopback address of the host at this place, from 0."""
    return f"127.77.{index // 254}.{index % 254 + 1}"


def _refuse_span(names: Sequence[str], together: Sequence[str]) -> None:
    strange = HostSet(set(together) - set(names))
    if strange:
        raise LabError(f"{strange} cannot train one job: not among the hosts of this lab")
    if len(together) == 1:
        raise LabError("a job that spans hosts needs at least two", hint="--spanning 'gpu[01-02]'")


def _refuse_shared(paths: Sequence[str]) -> None:
    for path in paths:
        if not path.startswith(SHARABLE) or os.path.normpath(path) != path:
            places = ", ".join(place.rstrip("/") for place in SHARABLE)
            raise LabError(f"{path} cannot be shared", hint=f"a folder below one of {places}")


def _meeting_port() -> int:
    """A port for the launchers of a job to meet at; between two meetings nobody listens there."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server((address(0), port)):
            return port


def _first_line(file: IO[str]) -> str:
    return file.readline().strip()
