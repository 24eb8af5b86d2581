"""What is known of a host: read from what it answers, for `inspect` to show and `assert` to judge.

What a host does not say is None here, never zero: nothing is wrong, and nothing right, because a
question had no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetfix.action import Probe
from fleetfix.commands import Completed, Json, Read, Value
from fleetfix.domain import log_formats, nvidia_smi, throughput
from fleetfix.domain.log_formats import Scope
from fleetfix.domain.processes import command_of

SURVEY_SECONDS = 150.0
RECENT = 20
"""Measurements of the log whose median is how fast a job trains now."""


class GpuState(Value):
    """One GPU, as nvidia-smi tells it. Memory in bytes, temperature in °C, power in watts."""

    index: int | None
    minor: int | None
    """N of /dev/nvidiaN: another number than the index where nvidia-smi leaves GPUs out."""
    uuid: str | None
    model: str | None
    driver: str | None
    used: int | None = None
    total: int | None = None
    mig: bool | None = None
    persistence: bool | None = None
    ecc: bool | None = None
    uncorrected: int | None = None
    """Uncorrected ECC errors since the driver was loaded."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    slowed: tuple[str, ...] = ()
    """Why its hardware slows it down now: heat, power brake."""
    temperature: float | None = None
    power: float | None = None
    power_limit: float | None = None
    busy: bool = False
    """A process computes on it, by nvidia-smi's list."""


class Disk(Value):
    """A local file system; bytes. `inodes_free` is a share, None where it counts none."""

    path: str
    size: int
    free: int
    inodes_free: float | None = None


class RunningJob(Value):
    """A job that holds GPUs; `gpus` are device numbers, `seconds` its age."""

    pid: int
    user: str
    command: str
    gpus: tuple[int, ...] = ()
    environments: tuple[str, ...] = ()
    seconds: float | None = None
    orphan: bool = False
    scheduler: str | None = None
    unit: str | None = None
    container: bool = False


class UsedEnvironment(Value):
    """An environment that a job uses, as its files say; `cuda` is what its torch was built for."""

    path: str
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None


class TokenRate(Value):
    """How fast the job trains by its own log: tokens per second."""

    rate: float
    scope: Scope


class HostFacts(Value):
    """Everything that one look at a host tells."""

    kernel: str
    uptime: float
    load: float
    cpus: int
    memory: int
    memory_free: int
    disks: tuple[Disk, ...] = ()
    others: tuple[str, ...] = ()
    """Where other file systems are mounted: those of the network are not asked."""
    module: str | None = None
    """The version of the loaded kernel module."""
    on_bus: int = 0
    of_driver: int = 0
    trouble: nvidia_smi.Trouble | None = None
    """Why nvidia-smi gives no answer."""
    cuda: str | None = None
    """The newest CUDA that the driver serves."""
    gpus: tuple[GpuState, ...] | None = None
    xids: dict[str, int] | None = None
    jobs: tuple[RunningJob, ...] = ()
    complete: bool = True
    """Whether the processes of other users could be looked at."""
    schedulers: tuple[str, ...] = ()
    environments: tuple[UsedEnvironment, ...] = ()
    tokens: TokenRate | None = None
    skew: float = 0.0
    """Seconds that its clock is ahead (negative: behind) of the controller's for certain."""

    @property
    def driver(self) -> str | None:
        """The driver's version: what nvidia-smi says, else the loaded module's."""
        said = {gpu.driver for gpu in self.gpus or () if gpu.driver}
        return min(said) if said else self.module

    @property
    def model(self) -> str | None:
        """The model of its GPUs; several are joined."""
        names = sorted({gpu.model for gpu in self.gpus or () if gpu.model})
        return " + ".join(names) or None

    def disk_of(self, path: str) -> Disk | None:
        """The local file system that a path lies on; None where that was not looked at."""
        at = {disk.path: disk for disk in self.disks}
        holding = [one for one in (*at, *self.others) if one in ("/", path) or path.startswith(f"{one}/")]
        return at.get(max(holding, key=len, default=""))


def look() -> Probe[HostFacts]:
    """Ask a host for its facts, in one frame between two looks at the controller's own clock."""
    (sent,) = yield (Read(function="controller.clock"),)
    formats = [{"name": one.name, "rate": one.rate, "step": one.step} for one in log_formats.FORMATS]
    survey, rates, received = yield (
        Read(function="facts.survey", timeout=SURVEY_SECONDS),
        Read(function="logs.find_rates", args={"formats": formats, "log": None}, timeout=60.0),
        Read(function="controller.clock", args={"after": True}),
    )
    return facts_of(survey.answer(), rates, (float(sent.answer()), float(received.answer())))


def facts_of(value: Mapping[str, Any], rates: Completed, asked: tuple[float, float]) -> HostFacts:
    """Read the reply of `facts.survey`; `asked` is the controller's clock before and after it."""
    answers = value["gpus"]
    known = {name: (answers[name]["exit"], answers[name]["text"]) for name in ("query", "apps", "table")}
    troubles = [nvidia_smi.trouble(code, text) for code, text in known.values()]
    trouble = next((one for one in troubles if one is not None), None)
    total, free = value["memory"]
    return HostFacts(
        kernel=value["kernel"],
        uptime=value["uptime"],
        load=value["load"],
        cpus=value["cpus"],
        memory=total,
        memory_free=free,
        disks=tuple(map(_disk, value["disks"]["asked"])),
        others=tuple(value["disks"]["others"]),
        module=answers["module"],
        on_bus=answers["on_bus"],
        of_driver=answers["of_driver"],
        trouble=trouble,
        cuda=None if trouble else nvidia_smi.cuda_of(known["table"][1]),
        gpus=None if trouble else _gpus(known["query"][1], known["apps"][1], answers["minors"]),
        xids=value["xids"],
        jobs=tuple(map(_job, value["jobs"])),
        complete=value["complete"],
        schedulers=tuple(value["schedulers"]),
        environments=tuple(UsedEnvironment.model_validate(one) for one in value["environments"]),
        tokens=_tokens(rates),
        skew=_skew(value["clock"], asked),
    )


def _disk(row: list[Any]) -> Disk:
    path, size, free, files, files_free = row
    return Disk(path=path, size=size, free=free, inodes_free=files_free / files if files else None)


def _gpus(query: str, apps: str, minors: Mapping[str, int]) -> tuple[GpuState, ...] | None:
    rows = nvidia_smi.rows_of(query)
    if not rows:
        return None
    busy = {app.uuid for app in nvidia_smi.parse_apps(apps) or ()}
    return tuple(_gpu(row, busy, minors) for row in rows)


def _gpu(row: Mapping[str, str], busy: set[str | None], minors: Mapping[str, int]) -> GpuState:
    uuid = nvidia_smi.value_of(row.get("uuid"))
    index = nvidia_smi.number_of(row.get("index"))
    return GpuState(
        index=index,
        minor=minors.get(uuid or "", index),
        uuid=uuid,
        model=nvidia_smi.value_of(row.get("name")),
        driver=nvidia_smi.value_of(row.get("driver_version")),
        used=nvidia_smi.memory_of(row.get("memory.used")),
        total=nvidia_smi.memory_of(row.get("memory.total")),
        mig=nvidia_smi.flag_of(row.get("mig.mode.current")),
        persistence=nvidia_smi.flag_of(row.get("persistence_mode")),
        ecc=nvidia_smi.flag_of(row.get("ecc.mode.current")),
        uncorrected=nvidia_smi.number_of(row.get("ecc.errors.uncorrected.volatile.total")),
        remap_pending=nvidia_smi.flag_of(row.get("remapped_rows.pending")),
        remap_failed=nvidia_smi.flag_of(row.get("remapped_rows.failure")),
        slowed=tuple(word for name, word in _SLOWED if _active(row, name)),
        temperature=nvidia_smi.measure_of(row.get("temperature.gpu")),
        power=nvidia_smi.measure_of(row.get("power.draw")),
        power_limit=nvidia_smi.measure_of(row.get("power.limit")),
        busy=uuid in busy,
    )


_SLOWED = (("hw_thermal_slowdown", "heat"), ("hw_power_brake_slowdown", "the power brake"))


def _active(row: Mapping[str, str], name: str) -> bool:
    """Drivers before 535.54 call the events throttle reasons."""
    names = (f"clocks_event_reasons.{name}", f"clocks_throttle_reasons.{name}")
    return any(nvidia_smi.flag_of(row.get(one)) for one in names)


def _job(value: Mapping[str, Any]) -> RunningJob:
    kept = {name: value[name] for name in value if name != "argv"}
    return RunningJob.model_validate({**kept, "command": command_of(value["argv"])})


def _tokens(reply: Completed) -> TokenRate | None:
    """The rate by the format that finds most; None where the job's log says none."""
    if not reply.ok or not isinstance(reply.value, dict) or "points" not in reply.value:
        return None
    found: list[tuple[int, TokenRate]] = []
    for one in log_formats.FORMATS:
        points = throughput.points_of(_texts(reply.value["points"].get(one.name)))
        rate = throughput.steady_rate(points[-RECENT:])
        if rate is not None:
            found.append((len(points), TokenRate(rate=rate.rate, scope=one.scope)))
    return max(found, key=lambda one: one[0])[1] if found else None


def _texts(value: Json) -> list[Any]:
    return value if isinstance(value, list) else []


def _skew(clock: list[float], asked: tuple[float, float]) -> float:
    """How far a clock is off for certain, whatever the way to the host and back took."""
    begun, ended = clock
    sent, received = asked
    least, most = ended - received, begun - sent
    return least if least > 0 else min(most, 0.0)
