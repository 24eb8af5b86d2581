"""Hosts where something else runs the training: a node of Slurm or Kubernetes, a container.

The daemons are stand-ins, by their names and by what they start; see `stand_ins`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetfix.commands import Json
from fleetfix.lab import jobs, namespaces, stock
from fleetfix.lab.layout import Boot
from fleetfix.lab.template import LOG, VENV, job_environment, link_tree, training
from fleetfix.lab.template import write_all as write_files
from fleetfix.lab.trouble import Scene, own, restart_job, stop_job, user_of

SBIN = "/usr/local/sbin"
SPOOL = "/var/spool/slurmd"
JOB = 4711
BUNDLE = "/run/containerd/io.containerd.runtime.v2.task/moby/train"
CONTAINER = "6f1c0de2a9b4"

Options = Mapping[str, Any]


def _install(scene: Scene, source: str, *names: str) -> None:
    """Put a stand-in into the host, under each of its names."""
    text = f"#!{scene.python} -ISB\n".encode() + stock.stand_in(source)
    write_files(scene.disk / "sbin", [(name, text) for name in names])
    for name in names:
        (scene.disk / "sbin" / name).chmod(0o755)


def _start(scene: Scene, *argv: str) -> None:
    """Start a daemon in the host, with nothing of a user's environment."""
    jobs.start(scene.init, scene.python, Boot(argv, "/", {"PATH": f"{SBIN}:/usr/bin:/bin"}, "/dev/null"))


def _end(scene: Scene, *names: str) -> None:
    """End every daemon of these names with all that it started, and remove it from the host."""
    programs = {f"{SBIN}/{name}" for name in names}
    here = scene.lab.processes(scene.name)
    for daemon in here:
        if programs & set(daemon.argv):
            jobs.stop(jobs.below(here, daemon), grace=0)
    for name in names:
        (scene.disk / "sbin" / name).unlink(missing_ok=True)


# -- Slurm -------------------------------------------------------------------------------------------


def slurm_node(scene: Scene, options: Options) -> Json:
    """Hand the host's training to Slurm: it runs as a batch job, of alice's where there is an alice."""
    user, uid, home = user_of(scene, options)
    stop_job(scene, {})
    boot, spool = training(scene.gpus()), f"{SPOOL}/job{JOB:05}"
    environ = {
        **job_environment(user, home),
        "SLURM_JOB_ID": str(JOB),
        "SLURM_JOB_USER": user,
        "SLURM_NODELIST": scene.name,
    }
    script = f"#!/bin/sh\n#SBATCH --nodes=1 --exclusive\n{' '.join(boot.argv)}\n"
    order = {
        "script": f"{spool}/slurm_script",
        "cwd": boot.cwd,
        "env": environ,
        "log": boot.log,
        "uid": uid,
    }
    files = [("slurm_script", script.encode()), ("order.json", json.dumps(order).encode())]
    place = scene.disk / spool.lstrip("/")
    write_files(place, files)
    (place / "order.json").chmod(0o600)
    _give_output(scene, uid)
    _install(scene, "slurmd.py", "slurmd", "slurmstepd")
    _start(scene, f"{SBIN}/slurmd", f"{spool}/order.json")
    scene.await_job()
    return {"user": user, "home": home}


def _give_output(scene: Scene, uid: int) -> None:
    """Let a user's job write its log and its checkpoints; the one user of an ordinary user's lab may."""
    if namespaces.ordinary():
        return
    for folder in ("opt/train/checkpoints", str(Path(LOG).parent).lstrip("/")):
        own(scene.disk / folder, uid)


def leave_slurm(scene: Scene, undo: Json) -> None:
    stop_job(scene, {})
    _end(scene, "slurmd", "slurmstepd")
    shutil.rmtree(scene.disk / SPOOL.lstrip("/"), ignore_errors=True)
    _give_output(scene, 0)
    if undo["user"] != "root":
        shutil.rmtree(scene.disk / f"tmp/torchinductor_{undo['user']}", ignore_errors=True)
        shutil.rmtree(scene.disk / undo["home"].lstrip("/") / ".cache", ignore_errors=True)
    restart_job(scene, None)


# -- Kubernetes --------------------------------------------------------------------------------------


def kubelet(scene: Scene, options: Options) -> None:
    _install(scene, "kubelet.py", "kubelet")
    _start(scene, f"{SBIN}/kubelet")


def leave_kubernetes(scene: Scene, undo: Json) -> None:
    _end(scene, "kubelet")


# -- a container -------------------------------------------------------------------------------------


def container_job(scene: Scene, options: Options) -> None:
    """Move the training into a container, whose image has an environment of its own at the same path."""
    stop_job(scene, {})
    boot, place = training(scene.gpus()), scene.disk / BUNDLE.lstrip("/")
    link_tree(scene.venv, place / "venv")
    (place / "rootfs").mkdir()
    config = {
        "argv": boot.argv,
        "env": dict(boot.env),
        "cwd": boot.cwd,
        "log": boot.log,
        "hostname": CONTAINER,
        "volumes": [(VENV, f"{BUNDLE}/venv"), *((path, path) for path in scene.template.python.hidden)],
    }
    write_files(place, [("config.json", json.dumps(config).encode())])
    (place / "config.json").chmod(0o600)
    _install(scene, "containerd_shim.py", "containerd-shim")
    _start(scene, f"{SBIN}/containerd-shim", BUNDLE)
    scene.await_job()


def leave_container(scene: Scene, undo: Json) -> None:
    stop_job(scene, {})
    _end(scene, "containerd-shim")
    shutil.rmtree(scene.disk / "run/containerd")
    restart_job(scene, None)
