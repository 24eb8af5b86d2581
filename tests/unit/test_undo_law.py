"""The law of undo, over every action that changes something.

Whatever an action plans, the process that makes the change may be killed at any moment: before each
operation on files, each signal, each call. Then undo, by what the host itself has kept, brings the place
back as it was; to undo once more changes nothing; and to make the change anew reaches its goal.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.action import Action, Plan
from fleetfix.actions import KINDS, named
from fleetfix.actions.command import Command
from fleetfix.actions.compile_caches import CompileCaches
from fleetfix.actions.cuda_wheels import CudaWheels
from fleetfix.actions.fabric import Fabric
from fleetfix.actions.gpu_processes import GpuProcesses
from fleetfix.actions.job import Job
from fleetfix.actions.shell import Shell
from fleetfix.actions.wheel_parts import WheelParts
from fleetfix.commands import Call, Change, Completed, Read
from fleetfix.errors import Failure
from fleetfix.remote import ending, environments, fabfile, jobs, launch, relaunch, sources
from fleetfix.remote.api import Context, Ran, Refusal, write_durably
from tests.unit.gpu_host import GpuHost
from tests.wheelhouse import CLEAN, OTHER, UV, Venv, house, snapshot

OPERATIONS = (
    "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "link", "symlink", "write", "pwrite",
    "fsync", "ftruncate", "chmod", "fchmod", "fchown", "utime", "kill", "killpg", "sync",
)  # fmt: skip


class World:
    """A place that an action changes, and its functions called as the runner calls them."""

    points = 20
    """Moments of one change at which it is killed: each one, or the first, the last and others between."""
    action: Action[Any]
    answers: dict[str, Any]
    """What is answered by a stand-in instead of the function, by its name."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.answers = {}
        self._attempt = 0

    def state(self) -> Any:
        """All of the place that undo has to bring back."""
        raise NotImplementedError

    def settled(self) -> None:
        """Wait until what a kill has left behind has come to rest."""

    def context(self, memory: str = "") -> Context:
        state = self.home / "runs/r1"
        state.mkdir(parents=True, exist_ok=True)
        kept = str(state / "undo" / memory) if memory else None
        return Context("r1", self.action.kind, str(self.home), state=str(state), memory=kept)

    def plan(self) -> Plan:
        """Probe and plan."""
        probe = self.action.probe()
        try:
            reads = next(probe)
            while True:
                reads = probe.send(tuple(map(self._answer, reads)))
        except StopIteration as done:
            return self.action.plan(done.value)

    def changes(self) -> tuple[Change, ...]:
        """What is planned here, and what is prepared for it; there has to be something."""
        plan = self.plan()
        assert plan.blocked is None, plan.blocked
        assert plan.changes
        return plan.changes

    def attempt(self) -> str:
        """The id under which a change is made once."""
        self._attempt += 1
        return f"{self._attempt}"

    def make(self, calls: tuple[Call, ...], id: str, tick: Callable[[], None] = lambda: None) -> None:
        """Make calls of a change up to the first that does not end well, as the runner does."""
        for call in calls:
            tick()
            answer = _function(call)(self.context(id), **call.args)
            if isinstance(answer, Ran) and answer.exit != 0:
                break
        tick()

    def _answer(self, read: Read) -> Completed:
        if read.function in self.answers:
            return Completed(value=self.answers[read.function])
        try:
            answer = _function(read)(self.context(), **read.args)
        except Refusal as no:
            return Completed(exit=None, failure=Failure(kind=no.kind, message=no.message))
        if isinstance(answer, Ran):
            return Completed(exit=answer.exit, stdout=answer.text, stderr=answer.errors)
        return Completed(value=answer)


def _function(call: Call) -> Callable[..., Any]:
    module, name = call.function.split(".")
    return getattr(importlib.import_module(f"fleetfix.remote.{module}"), name)  # type: ignore[no-any-return]


# -- the places ---------------------------------------------------------------------------------------


class Environment(World):
    """An environment with the wheels of two CUDAs in it; its parts are staged."""

    def __init__(self, home: Path, tmp: Path, files: dict[str, Path]) -> None:
        super().__init__(home)
        self.venv = Venv(tmp / "venv", "uv", tmp / "cache")
        for names in (CLEAN, OTHER):
            self.venv.install(*(files[name] for name in names))
        known = {"venv": str(self.venv.path), "cuda": "12", "purge": ("sglang-kernel",)}
        self.stage = WheelParts(**known, wheelhouse=str(files["torch"].parent))
        self.cure = CudaWheels(**known)
        self.action = self.stage

    def staged(self) -> Environment:
        (change,) = self.changes()
        self.make(change.do, "parts")
        self.action = self.cure
        return self

    def state(self) -> Any:
        kept = self.home / "runs/r1"
        parts = {} if self.action is self.cure else snapshot(kept / "parts")
        left = [path.name for path in self.venv.path.parent.glob(".fleetfix-*")]
        return snapshot(self.venv.path, times=True), parts, left


class Caches(World):
    """A compile cache that is older than its environment, and a dead lock in another."""

    def __init__(self, home: Path, tmp: Path) -> None:
        super().__init__(home)
        self.folder = tmp / "caches"
        for name in ("old", "locked"):
            (self.folder / name / "ab").mkdir(parents=True)
            (self.folder / name / "ab/entry").write_text(name)
        os.utime(self.folder / "old/ab/entry", (1, 1))
        self.action = CompileCaches(
            which="all", names=(), also=(str(self.folder / "old"),), toolchain="ignore"
        )

    def state(self) -> Any:
        return snapshot(self.folder, times=True)


class Script(World):
    """What an author's script makes, whose undo is the author's too."""

    def __init__(self, home: Path, tmp: Path, kind: str) -> None:
        super().__init__(home)
        self.folder = tmp / "place"
        self.folder.mkdir()
        (self.folder / "switch").write_text("off")
        at = str(self.folder / "switch")
        do, back = f"printf on >{at}", f"printf off >{at}"
        check = f"grep -q on {at}"
        if kind == "shell":
            self.action = Shell.model_validate({"run": do, "check": check, "undo": back})
        else:
            words = {name: ["sh", "-c", text] for name, text in (("argv", do), ("check", check))}
            self.action = Command.model_validate({**words, "undo": ["sh", "-c", back]})

    def state(self) -> Any:
        return snapshot(self.folder)


class Function(World):
    """What a function of an author's fabfile makes; a thread stands for the controller that calls it."""

    def __init__(self, home: Path, tmp: Path) -> None:
        super().__init__(home)
        self.folder = tmp / "place"
        self.folder.mkdir()
        (self.folder / "switch").write_text("off")
        words = {"file": "/fabfile.py", "sha256": "0" * 64, "do": "on", "check": "is_on", "undo": "off"}
        self.action = Fabric.model_validate(words)
        self._answered: set[str] = set()

    def state(self) -> Any:
        return snapshot(self.folder)

    def make(self, calls: tuple[Call, ...], id: str, tick: Callable[[], None] = lambda: None) -> None:
        over = threading.Event()
        memory = self.context(id).memory
        caller = threading.Thread(target=self._call, args=(Path(str(memory)), over), daemon=True)
        caller.start()
        super().make(calls, id, tick)
        over.set()
        caller.join()

    def _call(self, memory: Path, over: threading.Event) -> None:
        while not over.wait(0.01):
            try:
                waits = json.loads((memory / fabfile.SIGN).read_text())
            except (OSError, ValueError):
                continue
            token = waits["token"]
            if token in self._answered or not token.startswith(f"{os.getpid()}-"):
                continue
            self._answered.add(token)
            fd = os.open(self.folder / "switch", os.O_WRONLY | os.O_TRUNC)
            os.write(fd, waits["asked"]["function"].encode())
            os.close(fd)
            write_durably(str(memory / f"word-{token}.json"), json.dumps({"exit": 0}).encode())

    def _answer(self, read: Read) -> Completed:
        return Completed(value=(self.folder / "switch").read_text() == "on")


class Training(World):
    """A host that trains: a job that has its environment mapped and a GPU open."""

    points = 7  # to stop a job and to start it takes its time

    def __init__(self, host: GpuHost, *, together: bool = False, stopped: bool = False) -> None:
        super().__init__(host.root / "state")
        self.host, self.together, self.runs = host, together, not stopped
        self.venv = host.environment()
        smi = {"exit": 0, "text": "index, uuid\n0, GPU-stands-in\n", "cut": False}
        self.answers = {
            "gpus.start_possible": {"smi": smi, "cuda": {"found": True, "code": 0}},
            "gpus.survey": {"listed": {}},
            "checkpoints.last": None,
        }
        self.action = GpuProcesses.model_validate({"using": str(self.venv), "grace": 5})
        host.train(self.venv)
        if stopped:
            (change,) = self.changes()
            self.make(change.do, "stop")
            self.action = Job.model_validate({"from": self.action.kind})

    def changes(self) -> tuple[Change, ...]:
        found = super().changes()
        prepared = [change.prepare for change in found if change.prepare is not None]
        return tuple(prepared) if self.together else found

    def settled(self) -> None:
        folder = self.home / "runs/r1/job"
        if folder.is_dir():
            launch.wait_for_starter(str(folder), 0)

    def state(self) -> Any:
        """The jobs that run: as what, where and with which environment."""
        time.sleep(0.2)  # one that was told to end would be gone by then
        return [
            (_slurp(pid, "cmdline"), os.readlink(f"/proc/{pid}/cwd"), _slurp(pid, "environ"))
            for pid in self.host.marked()
        ]


def _slurp(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


# -- the law ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return house(tmp_path_factory.mktemp("house"))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuHost]:
    monkeypatch.setattr(ending, "RESPAWN_WATCH", 0.05)
    monkeypatch.setattr(launch, "SETTLE", 0.1)
    monkeypatch.setattr(relaunch, "DYING", 0.2)
    with GpuHost(tmp_path, monkeypatch) as host:
        yield host


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    kind, _, way = request.param.partition(" ")
    home = tmp_path / "state"
    match kind:
        case "gpu_processes" | "job":
            place = request.getfixturevalue("host")
            return Training(place, together=way == "together", stopped=kind == "job")
        case "wheel_parts" | "cuda_wheels":
            if not os.path.exists(UV):
                pytest.skip("uv is not installed")
            monkeypatch.setattr(environments, "_in_use", lambda ctx: [])
            monkeypatch.setattr(sources.Sources, "index_has", lambda self, dist: False)
            environ = {"UV_CACHE_DIR": str(tmp_path / "none"), "PIP_CACHE_DIR": str(tmp_path / "none")}
            monkeypatch.setattr(jobs, "job_environ", lambda ctx, step: (os.geteuid(), environ))
            monkeypatch.setattr(os, "sync", lambda: None)  # of all disks of the machine
            made = Environment(home, tmp_path, request.getfixturevalue("files"))
            return made if kind == "wheel_parts" else made.staged()
        case "compile_caches":
            return Caches(home, tmp_path)
        case "fabric":
            return Function(home, tmp_path)
        case _:
            return Script(home, tmp_path, kind)


ROWS = (
    "gpu_processes",
    "gpu_processes together",
    "job",
    "wheel_parts",
    "cuda_wheels",
    "compile_caches",
    "shell",
    "command",
    "fabric",
)


def test_every_action_is_under_the_law() -> None:
    acting = {kind for kind in KINDS if issubclass(named(kind), Action)}
    assert acting == {row.partition(" ")[0] for row in ROWS}, "a new action needs a row"


@pytest.mark.parametrize("world", ROWS, indirect=True)
def test_undo_is_right_after_a_kill_at_any_moment_of_do(world: World) -> None:
    before = world.state()
    operations = _whole(world)
    assert operations >= 2
    for stop in _points(operations, world.points):
        for change in world.changes():
            id = world.attempt()
            ended = _die_at(lambda tick, id=id, do=change.do: world.make(do, id, tick), stop)
            assert ended is None or ended < stop
            world.settled()
            for _ in range(2):
                world.make(change.undo, id)
            assert world.state() == before, f"killed before operation {stop} of {operations}"
            _forget(world)
    _whole(world)


def _whole(world: World) -> int:
    """Make each change to its end, see that it reached its goal, and undo it; how many operations."""
    before, most = world.state(), 0
    changes = [(world.attempt(), change) for change in world.changes()]
    for id, change in changes:
        ended = _die_at(lambda tick, id=id, do=change.do: world.make(do, id, tick), 0)
        assert ended is not None
        most = max(most, ended)
    world.settled()
    if not getattr(world, "together", False):
        assert world.plan().changes == (), "it has not reached its goal"
    for id, change in reversed(changes):
        world.make(change.undo, id)
    assert world.state() == before
    _forget(world)
    return most


def _forget(world: World) -> None:
    """The next change begins with nothing of this one, as that of another run would."""
    shutil.rmtree(world.home / "runs/r1/undo", ignore_errors=True)


def _points(operations: int, most: int) -> list[int]:
    """Which operations the change dies before: each one, or the ends and some between."""
    if operations <= most:
        return list(range(1, operations + 1))
    return sorted({1 + round(n * (operations - 1) / (most - 1)) for n in range(most)})


def _die_at(work: Callable[[Callable[[], None]], None], stop: int) -> int | None:
    """Do it in a process that is killed before its operation `stop`, with what it works through.

    Answers how many operations there were where it came to its end.
    """
    counter = mmap.mmap(-1, 8)
    pid = os.fork()
    if pid == 0:
        try:
            work(_killing(counter, stop))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), f"it ended by itself: {status}"
    return None if status else int.from_bytes(counter[:8], "little")


def _killing(counter: mmap.mmap, stop: int) -> Callable[[], None]:
    """Count every operation of this process and of those it forks; kill it, and whoever counts, at one."""
    main, kill = os.getpid(), os.kill

    def tick() -> None:
        count = int.from_bytes(counter[:8], "little") + 1
        counter[:8] = count.to_bytes(8, "little")
        if count == stop:
            for pid in (main, os.getpid()):
                kill(pid, signal.SIGKILL)

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            tick()
            return real(*args, **kwargs)

        return operation

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    real_open = os.open

    def opening(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            tick()
        return real_open(path, flags, *args, **kwargs)

    os.open = opening  # type: ignore[assignment]
    return tick
