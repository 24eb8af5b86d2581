"""What can go wrong on a lab host: a table of faults, each made and taken back from outside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleetfix.commands import Json
from fleetfix.errors import LabError
from fleetfix.lab import daemons, elsewhere, trouble
from fleetfix.lab.namespaces import Started
from fleetfix.scalars import written
from fleetfix.spelling import hint_for

if TYPE_CHECKING:
    from fleetfix.lab.rehearsal import Lab

Make = Callable[[trouble.Scene, Mapping[str, Any]], Json]
MOST = 3600
"""The largest number that an option takes."""

Heal = Callable[[trouble.Scene, Json], None]
ELSEWHERE = ("foreign_lease", "unfinished_run")
"""Faults that another controller makes."""


@dataclass(frozen=True)
class Fault:
    """One fault: what an operator would see, its options with their defaults, and both ways."""

    summary: str
    make: Make
    heal: Heal
    options: Mapping[str, Json]


def _fault(summary: str, make: Make, heal: Heal, **options: Json) -> Fault:
    return Fault(summary, make, heal, options)


def _mark(name: str, summary: str) -> Fault:
    """A fault that the stand-ins on the host ask for by a file in /run/lab/faults."""
    return Fault(summary, lambda scene, _: scene.mark(name), lambda scene, _: scene.unmark(name), {})


def _weather(weather: str, summary: str) -> Fault:
    return Fault(
        summary,
        lambda scene, _: scene.ask("weather", weather=weather),
        lambda scene, _: scene.ask("weather", weather="ok"),
        {},
    )


FAULTS: dict[str, Fault] = {
    # the wire
    "vanish": _weather("vanish", "connections are cut, and new ones get no answer at all"),
    "freeze": _weather("freeze", "connections stay and fall silent; new ones open and say nothing"),
    "refuse": _weather("refuse", "nobody listens: new connections are refused"),
    "drop": _fault(
        "every connection there is now is cut, once",
        lambda scene, _: scene.ask("drop"),
        lambda scene, _: None,
    ),
    "slow": _fault("each direction of the wire takes a while", trouble.slow, trouble.slow_off, seconds=0.2),
    "changed_host_key": _fault(
        "the host shows another key than the one known", trouble.new_key, trouble.old_key
    ),
    # disks
    "full_disk": _fault("/var/lib is full", trouble.fill_disk, trouble.empty_disk),
    "read_only": _fault("/var/lib is read-only", trouble.read_only, trouble.writable),
    # the environment
    "no_repair_source": _fault(
        "the wheelhouse and the caches of pip and uv are gone", trouble.hide_sources, trouble.show_sources
    ),
    "local_patch": _fault(
        "a file of an unrelated package was patched by hand",
        trouble.patch,
        trouble.unpatch,
        file="numpy/linalg.py",
    ),
    "naive_purge": _fault(
        "someone uninstalled the CUDA-13 packages: survivors damaged, job dead",
        trouble.naive_purge,
        trouble.undo_purge,
    ),
    "load_fails": _mark("load_fails", "torch does not import once its own CUDA libraries are back"),
    # the job
    "no_job": _fault("no training runs", trouble.stop_job, trouble.restart_job),
    "foreign_job": _fault(
        "another job, of another user and environment, holds a GPU too",
        trouble.foreign_job,
        trouble.end_foreign_job,
        user="",
        gpu=1,
    ),
    "respawning_job": _fault(
        "whenever the job ends, something starts it again",
        trouble.respawn,
        trouble.stop_respawning,
        how="loop",
    ),
    "slow_after_repair": _mark("slow_after_repair", "training stays slow although all is right"),
    "ignores_term": _mark("ignores_term", "the job does not end at TERM"),
    "forgets_checkpoint": _mark("forgets_checkpoint", "the job starts again from step 0"),
    "stale_lock": _fault("a build killed long ago left its lock", trouble.lock, trouble.unlock),
    "slurm_node": _fault(
        "a node of Slurm, and its training is somebody's job there",
        daemons.slurm_node,
        daemons.leave_slurm,
        user="",
    ),
    "kubelet": _fault("a node of Kubernetes: a kubelet runs", daemons.kubelet, daemons.leave_kubernetes),
    "container_job": _fault(
        "training runs in a container, from an environment of its image",
        daemons.container_job,
        daemons.leave_container,
    ),
    # the GPUs
    "nvidia_smi_hangs": _mark("nvidia_smi_hangs", "nvidia-smi never answers"),
    "driver_mismatch": _fault(
        "the driver's library is newer than the driver: nothing new starts",
        trouble.mismatch,
        trouble.match,
    ),
    "driver_gone": _mark("driver_gone", "nvidia-smi cannot talk to the driver"),
    "gpu_memory_stays": _mark("gpu_memory_stays", "GPU memory that no process owns"),
    # other operators
    "foreign_lease": _fault(
        "another run, of bob on another machine, writes to the host now",
        elsewhere.foreign_lease,
        elsewhere.go_back,
    ),
    "unfinished_run": _fault(
        "another run changed something and lost its controller",
        elsewhere.unfinished_run,
        elsewhere.go_back,
    ),
    # the host's own switch
    "disabled": _fault("/etc/fleetfix/DISABLED is there", trouble.disable, trouble.enable),
}


def make(lab: Lab, name: str, fault: str, options: Mapping[str, Json]) -> str:
    """Make a fault on a host, remember how to take it back, and say what it is."""
    known = FAULTS.get(fault.replace("-", "_"))
    if known is None:
        hint = hint_for(fault.replace("-", "_"), FAULTS) or f"one of {', '.join(FAULTS)}"
        raise LabError(f"no fault is called {fault}", hint=hint)
    for option, value in options.items():
        if option not in known.options:
            has = ", ".join(known.options) or "none"
            hint = hint_for(option, known.options) or f"it has: {has}"
            raise LabError(f"{fault} has no option {option}", hint=hint)
        _require_kind(option, value, known.options[option])
    lab.host(name)
    scene = trouble.Scene(lab, name)
    undo = known.make(scene, {**known.options, **options})
    _save(lab, name, [*_load(lab, name), {"fault": fault.replace("-", "_"), "undo": undo}])
    return f"{name}: {known.summary}"


def _require_kind(option: str, value: Json, default: Json) -> None:
    """Refuse a value of another kind than the default, before anything is done to the host."""
    given = f"--set {option}={written(value) or value}"
    if isinstance(default, str):
        if not isinstance(value, str):
            raise LabError(f"{given}: wanted text")
        return
    kind = int if isinstance(default, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value <= MOST:
        wish = "a whole number" if kind is int else "a number"
        raise LabError(f"{given}: wanted {wish} from 0 to {MOST}")


def heal(lab: Lab, name: str) -> tuple[str, ...]:
    """Take back every fault of a host, newest first."""
    lab.host(name)
    scene = trouble.Scene(lab, name)
    made = _load(lab, name)
    healed = []
    while made:
        last = made.pop()
        FAULTS[last["fault"]].heal(scene, last["undo"])
        _save(lab, name, made)
        healed.append(str(last["fault"]))
    return tuple(healed)


def present(lab: Lab, name: str) -> tuple[str, ...]:
    """The faults that were made on a host and not taken back."""
    return tuple(str(one["fault"]) for one in _load(lab, name))


def drivers(lab: Lab, name: str) -> tuple[Started, ...]:
    """The processes that faults of a host keep outside of it."""
    made = [one for one in _load(lab, name) if one["fault"] in ELSEWHERE]
    return tuple(elsewhere.driver_of(one["undo"]) for one in made)


def _load(lab: Lab, name: str) -> list[dict[str, Json]]:
    try:
        found: list[dict[str, Json]] = json.loads((lab.paths.host(name) / "faults.json").read_text())
    except FileNotFoundError:
        return []
    return found


def _save(lab: Lab, name: str, made: list[dict[str, Json]]) -> None:
    (lab.paths.host(name) / "faults.json").write_text(json.dumps(made))
