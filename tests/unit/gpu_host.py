"""A host with GPUs made of plain files, Python environments made of a few files, and real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetfix.remote import procs
from fleetfix.remote.api import Context, alive, stat_of

MARK = "FLEETFIX_TEST_HOST"
# The system's own where there is one: a test's other users cannot enter the home that ours may lie in.
PYTHON = os.path.realpath("/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable)

TRAIN = r"""
import ctypes, json, mmap, os, resource, signal, subprocess, sys, time

options = json.loads(sys.argv[1])
held = []

def hold(path):
    file = open(path, "rb")
    held.append((file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))

def dump(path):
    fds = {fd: os.readlink("/proc/self/fd/" + fd) for fd in os.listdir("/proc/self/fd")
           if os.path.exists("/proc/self/fd/" + fd)}
    status = dict(line.rstrip("\n").split(":\t", 1) for line in open("/proc/self/status") if ":\t" in line)
    umask = os.umask(0); os.umask(umask)
    state = {
        "argv": open("/proc/self/cmdline").read().rstrip("\0").split("\0"), "cwd": os.getcwd(),
        "environ": dict(os.environ), "umask": umask, "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0), "oom": open("/proc/self/oom_score_adj").read().strip(),
        "uid": os.getresuid(), "gid": os.getresgid(), "groups": sorted(os.getgroups()),
        "limits": {name: resource.getrlimit(getattr(resource, name))
                   for name in dir(resource) if name.startswith("RLIMIT_")},
        "ignored": int(status["SigIgn"], 16) & 7, "blocked": int(status["SigBlk"], 16), "fds": fds,
        "prefix": sys.prefix, "leader": os.getsid(0) == os.getpid(), "pid": os.getpid(),
    }
    with open(path + ".tmp", "w") as file:
        json.dump(state, file)
    os.rename(path + ".tmp", path)

if "name" in options:
    ctypes.CDLL(None).prctl(15, options["name"].encode(), 0, 0, 0)
for path in options.get("maps", ()):
    hold(path)
for path in options.get("devices", ()):
    held.append(open(path, "rb"))
if options.get("term") == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "on_term" in options:
    def ended(*_):
        time.sleep(options.get("saves_for", 0))
        with open(options["on_term"], "a") as file:
            file.write("%d\n" % os.getpid())
        sys.exit(0)
    signal.signal(signal.SIGTERM, ended)
for child in options.get("forks", ()):
    if os.fork() == 0:
        if child.get("twice") and os.fork():
            os._exit(0)
        if child.get("setsid"):
            os.setsid()
        if "name" in child:
            ctypes.CDLL(None).prctl(15, child["name"].encode(), 0, 0, 0)
        if child.get("term") == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dump(child["dump"])
        while True:
            time.sleep(60)
python = sys.executable or os.readlink("/proc/self/exe")
for child in options.get("spawns", ()):
    subprocess.Popen([python, sys.argv[0], json.dumps(child)], start_new_session=True)
if "step" in options:
    step = options["step"]
    try:
        step = int(open(options["checkpoint"]).read())
    except (KeyError, OSError):
        pass
    print("step: %d  tps: 10" % step, flush=True)
    print("step: %d  tps: 10" % (step + 1), flush=True)
if "dump" in options:
    dump(options["dump"])
if "exit" in options:
    print("about to fail", flush=True)
    sys.exit(options["exit"])
while True:
    time.sleep(60)
"""


class GpuHost:
    """Devices, environments and jobs below one folder; every process of it is ended on leaving."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.mark = uuid.uuid4().hex
        self.children: list[subprocess.Popen[bytes]] = []
        (root / "dev").mkdir()
        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            (root / "dev" / name).touch(mode=0o666)
        monkeypatch.setattr(procs, "DEVICES", re.compile(re.escape(str(root)) + r"/dev/nvidia([0-9]+)$"))
        # A lab that is up meanwhile may have a stand-in slurmd, which is seen from here.
        monkeypatch.setattr(procs, "scheduler_daemons", list)
        monkeypatch.setattr(procs, "MEMORY_DEVICE", str(root / "dev" / "nvidia-uvm"))
        # The machine that runs the tests may have GPU jobs of its own.
        monkeypatch.setattr(
            procs, "CUDA_DRIVER", re.compile(re.escape(str(root)) + r"/libcuda\.so[0-9.]*$")
        )
        self.script = root / "train.py"
        self.script.write_text(TRAIN)

    def __enter__(self) -> GpuHost:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.marked():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for child in self.children:
            if child.stdin is not None:
                child.stdin.close()
            child.wait(10)

    def marked(self) -> list[int]:
        """The living processes of this host, by a variable in their environment."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and f"{MARK}={self.mark}".encode() in procs.slurp(int(name), "environ"):
                stat = stat_of(int(name))
                if stat is not None and stat[0] not in "ZX":
                    found.append(int(name))
        return found

    def device(self, number: int) -> str:
        return str(self.root / "dev" / f"nvidia{number}")

    def memory_device(self) -> str:
        """What every program that computes has open beside its GPU."""
        return str(self.root / "dev" / "nvidia-uvm")

    def environment(self, name: str = "venv") -> Path:
        """An environment whose Python runs and whose torch is one file that can be mapped."""
        venv = self.root / name
        library = venv / "lib" / "python3.11" / "site-packages" / "torch" / "lib" / "libtorch_cuda.so"
        if not library.exists():
            library.parent.mkdir(parents=True)
            library.write_bytes(b"\x7fELF" + b"\0" * 8192)
            (venv / "bin").mkdir()
            base = PYTHON
            (venv / "bin" / "python").symlink_to(base)
            (venv / "pyvenv.cfg").write_text(f"home = {os.path.dirname(base)}\n")
        return venv

    def library(self, venv: Path) -> str:
        return str(venv / "lib" / "python3.11" / "site-packages" / "torch" / "lib" / "libtorch_cuda.so")

    def path(self, name: str) -> Path:
        return self.root / name

    def options(self, venv: Path, gpu: int | None = 0, **more: Any) -> dict[str, Any]:
        devices = [] if gpu is None else [self.device(gpu), self.memory_device()]
        return {"maps": [self.library(venv)], "devices": devices, **more}

    def argv(self, venv: Path, options: dict[str, Any]) -> list[str]:
        return [str(venv / "bin" / "python"), str(self.script), json.dumps(options)]

    def environ(self, **more: str) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", MARK: self.mark, **more}

    def start(
        self, argv: list[str], env: dict[str, str] | None = None, **how: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process of this host; `env` is added to what marks it."""
        how.setdefault("stdin", subprocess.DEVNULL)
        how.setdefault("stdout", subprocess.DEVNULL)
        how.setdefault("stderr", subprocess.DEVNULL)
        child = subprocess.Popen(argv, env=self.environ(**(env or {})), start_new_session=True, **how)
        self.children.append(child)
        return child

    def train(self, venv: Path, gpu: int | None = 0, env: dict[str, str] | None = None, **more: Any) -> int:
        """Start a job that has the environment mapped and the GPU open; returns its pid, at work."""
        how = more.pop("how", {})
        dump = self.path(f"dump-{uuid.uuid4().hex[:8]}")
        options = self.options(venv, gpu, dump=str(dump), **more)
        child = self.start(self.argv(venv, options), env, **how)
        self.wait(dump.exists)
        return child.pid

    def wait(self, true: Callable[[], Any], seconds: float = 20.0) -> Any:
        """Wait until something is so, and return it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = true()
            if found:
                return found
            time.sleep(0.01)
        raise AssertionError("it did not come to be")

    def context(self, step: str = "stop", run: str = "run-1", change: str | None = None) -> Context:
        """The context of a call of a change, with folders of its own run."""
        home = self.root / "state"
        state = home / "runs" / run
        memory = state / "undo" / (change or step)
        memory.mkdir(parents=True, exist_ok=True)
        return Context(run, step, str(home), state=str(state), memory=str(memory))

    def gone(self, pid: int) -> bool:
        stat = stat_of(pid)
        return stat is None or not alive(pid, stat[2])
