"""How each fault is made on a lab host and taken back; the table of them is `faults.FAULTS`.

Everything is done from outside: to the host's disk, to its processes, or by its server. A function
that makes a fault returns what its counterpart needs to take it back, as JSON.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetfix.commands import Json
from fleetfix.errors import LabError
from fleetfix.lab import control, jobs, namespaces, stock
from fleetfix.lab.layout import Boot, as_json
from fleetfix.lab.namespaces import Process
from fleetfix.lab.template import VENV, Python, Template, find_python, job_environment, link_tree, training
from fleetfix.lab.template import write_all as write_files

if TYPE_CHECKING:
    from fleetfix.lab.rehearsal import Lab

Options = Mapping[str, Any]

SUPERVISE = "/opt/train/supervise.sh"
ALICE_UID = 2001


class Scene:
    """One host of a lab, as faults see it."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.name = name
        self.disk = lab.paths.disk(name)
        self.held = lab.paths.host(name) / "held"
        """Where things are kept that a fault has taken from the host."""

    @property
    def init(self) -> int:
        return self.lab.init(self.name)

    @property
    def python(self) -> str:
        return self.lab.record().python

    @property
    def template(self) -> Template:
        found: Python = find_python()
        return Template(self.lab.paths.template, found, self.lab.record().installer)

    @property
    def venv(self) -> Path:
        return self.lab.tree(self.name, VENV)

    @property
    def training(self) -> Boot:
        """The training job as it is started here."""
        return training(self.gpus(), self.lab.record().span, self.name)

    @property
    def peers(self) -> list[Scene]:
        """The hosts that train one job with this one; itself, where none do."""
        span = self.lab.record().span
        names = span.hosts if span is not None and self.name in span.hosts else (self.name,)
        return [Scene(self.lab, name) for name in names]

    @property
    def site(self) -> Path:
        return self.venv / self.template.site

    def mark(self, name: str) -> None:
        """Tell the stand-ins on the host to misbehave."""
        folder = self.disk / "run/lab/faults"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()

    def unmark(self, name: str) -> None:
        (self.disk / "run/lab/faults" / name).unlink(missing_ok=True)

    def ask(self, do: str, **more: Json) -> None:
        """Give an order to the lab's server."""
        control.ask(self.lab.paths, {"do": do, "host": self.name, **more})

    def hold(self, path: Path) -> str:
        """Take something from the host and keep it; returns where it was."""
        self.held.mkdir(exist_ok=True)
        os.rename(path, self.held / path.name)
        return str(path)

    def give_back(self, was: str) -> None:
        """Put back what `hold` took."""
        os.makedirs(os.path.dirname(was), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.held / os.path.basename(was), was)

    def gpus(self) -> int:
        return len(list(Path(f"/proc/{self.init}/root/dev").glob("nvidia[0-9]*")))

    def await_job(self, seconds: float = 10.0) -> None:
        """Wait until the host's job has its first GPU open: before that it is no job yet."""
        until = time.monotonic() + seconds
        while not any(namespaces.has_open(one, "/dev/nvidia0") for one in self.lab.processes(self.name)):
            if time.monotonic() > until:
                raise LabError(f"{self.name}: the job did not start", hint="fleetfix lab heal")
            time.sleep(0.02)

    def run(self, command: str) -> None:
        """Run a command inside the host; a LabError where it fails."""
        done = self.lab.run(self.name, command)
        if done.returncode != 0:
            raise LabError(f"{self.name}: {' '.join(done.stderr.split())}")


# -- the wire ----------------------------------------------------------------------------------------


def slow(scene: Scene, options: Options) -> None:
    scene.ask("weather", weather="ok", delay=options["seconds"])


def slow_off(scene: Scene, undo: Json) -> None:
    scene.ask("weather", weather="ok")


def new_key(scene: Scene, options: Options) -> None:
    scene.ask("new_key")


def old_key(scene: Scene, undo: Json) -> None:
    scene.ask("old_key")


# -- disks -------------------------------------------------------------------------------------------


def fill_disk(scene: Scene, options: Options) -> None:
    """Write until there is no space, as root, into the host's small file system."""
    block = bytes(64 * 1024)
    with open(f"/proc/{scene.init}/root/var/lib/filler", "ab", buffering=0) as file:
        while block:
            try:
                file.write(block)
            except OSError:
                block = block[: len(block) // 2]


def empty_disk(scene: Scene, undo: Json) -> None:
    Path(f"/proc/{scene.init}/root/var/lib/filler").unlink(missing_ok=True)


def read_only(scene: Scene, options: Options) -> None:
    scene.run("mount -n -o remount,bind,ro /var/lib")


def writable(scene: Scene, undo: Json) -> None:
    scene.run("mount -n -o remount,bind,rw /var/lib")


# -- the environment ---------------------------------------------------------------------------------


def hide_sources(scene: Scene, options: Options) -> list[str]:
    places = ("opt/wheelhouse", "root/.cache/uv", "root/.cache/pip")
    return [scene.hold(scene.disk / place) for place in places if (scene.disk / place).exists()]


def show_sources(scene: Scene, undo: Json) -> None:
    for was in undo:
        scene.give_back(was)


def patch(scene: Scene, options: Options) -> str:
    """Patch a file as a careful person does: a copy, changed, put in its place."""
    file = scene.site / options["file"]
    # A path that leads out of the environment could be a file of this machine.
    inside = file.resolve().is_relative_to(scene.site.resolve())
    if not inside or not file.is_file():
        raise LabError(f"{scene.name}: {options['file']} is not in the environment")
    was = scene.hold(file)
    file.write_bytes((scene.held / file.name).read_bytes() + b"\n# patched by hand: see our ticket\n")
    return was


def unpatch(scene: Scene, undo: Json) -> None:
    scene.give_back(undo)


def naive_purge(scene: Scene, options: Options) -> None:
    """Do what an uninstaller does with every CUDA-13 package: remove each file of its RECORD."""
    stop_job(scene, {})
    for wheel in stock.foreign():
        for file in _record(scene.site / wheel.dist_info):
            (scene.site / file).unlink(missing_ok=True)
    _drop_empty(scene.site)


def _record(dist_info: Path) -> Iterator[str]:
    try:
        text = (dist_info / "RECORD").read_text()
    except FileNotFoundError:
        return
    for row in csv.reader(text.splitlines()):
        yield row[0]


def _drop_empty(folder: Path) -> None:
    for here, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(here)


def undo_purge(scene: Scene, undo: Json) -> None:
    shutil.rmtree(scene.venv)
    link_tree(scene.template.folder / "contaminated", scene.venv)
    restart_job(scene, None)


# -- the job -----------------------------------------------------------------------------------------


def stop_job(scene: Scene, options: Options) -> None:
    launcher = scene.lab.job(scene.name)
    if launcher is not None:
        jobs.stop(jobs.below(scene.lab.processes(scene.name), launcher))


def restart_job(scene: Scene, undo: Json) -> None:
    """Start training where none runs; a job that spans hosts, on all of them."""
    for one in scene.peers:
        if one.lab.job(one.name) is None:
            jobs.start(one.init, one.python, one.training)


def respawn(scene: Scene, options: Options) -> Json:
    """Let a supervisor run the job: a shell loop above it, or a watchdog that is no parent of it."""
    if options["how"] not in ("loop", "watchdog"):
        raise LabError(f"--set how={options['how']}: a job respawns by a loop or a watchdog")
    stop_job(scene, {})
    boot = scene.training
    if options["how"] == "watchdog":
        keeper = [scene.python, "-c", stock.stand_in("watchdog.py").decode(), json.dumps(as_json(boot))]
    else:
        line = f"{' '.join(boot.argv)} >>{boot.log} 2>&1 </dev/null"
        script = f"#!/bin/sh\ncd {boot.cwd} || exit 1\nwhile :; do\n  {line}\n  sleep 0.5\ndone\n"
        write_files(scene.disk, [(SUPERVISE.lstrip("/"), script.encode())])
        keeper = ["/bin/sh", SUPERVISE]
    keep = Boot(keeper, boot.cwd, boot.env, "/dev/null", boot.nofile)
    return {"pid": jobs.start(scene.init, scene.python, keep)}


def stop_respawning(scene: Scene, undo: Json) -> None:
    """End the supervisor alone; the job goes on without."""
    _end(scene, [one for one in scene.lab.processes(scene.name) if one.pid == undo["pid"]])
    (scene.disk / SUPERVISE.lstrip("/")).unlink(missing_ok=True)
    restart_job(scene, None)


def _end(scene: Scene, targets: list[Process]) -> None:
    jobs.stop(tuple(targets), grace=0)


def foreign_job(scene: Scene, options: Options) -> Json:
    """Start alice's job from alice's environment; as an ordinary user, by the one user there is."""
    user, uid, _ = user_of(scene, options)
    if options["gpu"] >= scene.gpus():
        raise LabError(f"--set gpu={options['gpu']}: {scene.name} has GPUs 0 to {scene.gpus() - 1}")
    home = "/home/alice"  # also where root plays alice
    venv = f"{home}/venv"
    place = scene.disk / home.lstrip("/")
    scene.template.environment(place / "venv", stock.clean(), venv)
    write_files(place / "run", [("train.py", stock.stand_in("train.py")), ("mine.toml", b"[job]\n")])
    write_files(place / "run/csrc", [(f"fused_adam.cu{n}.o", stock.extension(n)) for n in (12, 13)])
    if uid:
        own(place, uid)
    env = {**job_environment(user, home, venv), "CUDA_VISIBLE_DEVICES": str(options["gpu"])}
    argv = [f"{venv}/bin/python", "train.py", "--config", "mine.toml"]
    env["LOCAL_RANK"] = str(options["gpu"])
    pid = jobs.start(scene.init, scene.python, Boot(argv, f"{home}/run", env, f"{home}/train.log"), uid=uid)
    return {"pid": pid}


def user_of(scene: Scene, options: Options) -> tuple[str, int, str]:
    """(name, uid, home) of whose job it shall be: alice's, or root's where the lab has no other user."""
    alone = namespaces.ordinary()
    user = options["user"] or ("root" if alone else "alice")
    if user not in ("root", "alice") or (user == "alice" and alone):
        raise LabError(
            f"{user} is no user of {scene.name}", hint="a lab of root has alice; others have root only"
        )
    return ("alice", ALICE_UID, "/home/alice") if user == "alice" else ("root", 0, "/root")


def own(folder: Path, uid: int) -> None:
    """Give a folder with all that is in it to a user."""
    os.lchown(folder, uid, uid)
    for here, names, files in os.walk(folder):
        for name in (*names, *files):
            os.lchown(os.path.join(here, name), uid, uid)


def end_foreign_job(scene: Scene, undo: Json) -> None:
    mine = [one for one in scene.lab.processes(scene.name) if one.argv[0].startswith("/home/alice/venv/")]
    _end(scene, mine)
    for path in (scene.disk / "home/alice").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def lock(scene: Scene, options: Options) -> None:
    for folder in (scene.disk / "root/.cache/torch_extensions").glob("*/fused_adam"):
        (folder / "lock").touch()


def unlock(scene: Scene, undo: Json) -> None:
    for file in (scene.disk / "root/.cache/torch_extensions").glob("*/fused_adam/lock"):
        file.unlink(missing_ok=True)


# -- the GPUs and the switch -------------------------------------------------------------------------


def mismatch(scene: Scene, options: Options) -> None:
    scene.mark("driver_mismatch")
    write_files(scene.disk / "opt/nvidia/lib", [("libcuda.so.1", stock.driver(803))])


def match(scene: Scene, undo: Json) -> None:
    scene.unmark("driver_mismatch")
    write_files(scene.disk / "opt/nvidia/lib", [("libcuda.so.1", stock.driver(0))])


def disable(scene: Scene, options: Options) -> None:
    write_files(scene.disk / "etc/fleetfix", [("DISABLED", b"by the lab\n")])


def enable(scene: Scene, undo: Json) -> None:
    (scene.disk / "etc/fleetfix/DISABLED").unlink(missing_ok=True)
