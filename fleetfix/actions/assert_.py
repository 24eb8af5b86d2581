"""assert: a host is as it should be, by its facts."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from fleetfix.action import Check, Probe, Verdict
from fleetfix.commands import Bytes, Seconds
from fleetfix.domain.conditions import conditions
from fleetfix.domain.host_facts import HostFacts, look

GIB = 1 << 30


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str | int | float) and not isinstance(value, bool) else value


Word = Annotated[str, StringConstraints(min_length=1)]
Words = Annotated[
    tuple[Word, ...],
    BeforeValidator(_one_or_many, json_schema_input_type=str | list[str]),
    Field(min_length=1),
]
"""One pattern or a list of them, of which one must fit; `*` stands for anything, `?` for one character."""

Path = Annotated[str, StringConstraints(pattern=r"^/")]

Claim = tuple[bool | None, str]
"""Whether a claim holds, None where nothing tells; and what is the case."""


class Assert(Check[HostFacts]):
    """Claim that a host is as it should be: every fact that is given must hold.

    What is null is not claimed. A fact that the host does not tell is unknown, and unknown never counts
    as true.
    """

    kind: ClassVar[str] = "assert"
    modules: ClassVar[tuple[str, ...]] = ("facts", "logs")

    gpus: Annotated[int, Field(ge=0)] | None = None
    """So many GPUs, by nvidia-smi; and no more of them on the bus."""
    gpu_model: Words | None = None
    """The model of every GPU: "NVIDIA H200"."""
    gpu_memory: Bytes | None = None
    """Every GPU has at least so much."""
    driver: Words | None = None
    """The version of the driver: "570.*"."""
    driver_cuda: Words | None = None
    """The newest CUDA that the driver serves."""
    kernel: Words | None = None
    persistence: bool | None = None
    """The persistence mode of every GPU."""
    ecc: bool | None = None
    mig: bool | None = None
    environment: Words | None = None
    """The path of every Python environment that a job uses; of those too the next two are asked."""
    python: Words | None = None
    torch: Words | None = None
    disk_free: dict[Path, Bytes] | None = None
    """At least so much room where these local paths lie: {/var: 5GiB, /dev/shm: 16GiB}."""
    memory_free: Bytes | None = None
    load_below: Annotated[float, Field(gt=0)] | None = None
    """The load of the last minute, divided by the CPUs."""
    clock_within: Seconds | None = None
    """Its clock is no further from this machine's, as far as the way there and back lets one tell."""
    job: bool | None = None
    """Whether a job runs on GPUs."""
    sound: bool | None = None
    """True: `fleetfix inspect` would show no condition."""

    @model_validator(mode="after")
    def _claims_something(self) -> Assert:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise ValueError("it claims nothing: give a fact, such as `gpus: 8`")
        if self.sound is False:
            raise ValueError("`sound: false` makes no sense: leave it out")
        return self

    def probe(self) -> Probe[HostFacts]:
        return look()

    def judge(self, facts: HostFacts) -> Verdict:
        claims = list(self._claims(facts))
        wrong = [said for holds, said in claims if holds is False]
        untold = [said for holds, said in claims if holds is None]
        if wrong:
            return Verdict(result="fail", reason="; ".join(wrong))
        if untold:
            return Verdict(result="unknown", reason="; ".join(untold))
        return Verdict(result="pass", reason="; ".join(said for _, said in claims))

    def _claims(self, facts: HostFacts) -> Iterator[Claim]:
        yield from self._of_gpus(facts)
        yield from self._of_environments(facts)
        yield from self._of_room(facts)
        if self.kernel is not None:
            yield _fits("kernel", facts.kernel, self.kernel)
        if self.job is not None:
            there = bool(facts.jobs)
            said = "a job runs on GPUs" if there else "no job runs on GPUs"
            yield (there == self.job if there or facts.complete else None), said
        if self.clock_within is not None:
            said = (
                f"its clock is {abs(facts.skew):.1f} s off" if facts.skew else "its clock agrees with ours"
            )
            yield abs(facts.skew) <= self.clock_within, said
        if self.sound:
            found = conditions(facts)
            yield not found, "; ".join(one.text for one in found) or "nothing is wrong with it"

    def _of_gpus(self, facts: HostFacts) -> Iterator[Claim]:
        untold = facts.trouble.message if facts.trouble else "nvidia-smi's answer could not be read"
        if self.gpus is not None:
            yield _gpu_count(facts, self.gpus, untold)
        if self.driver is not None:
            yield _fits("driver", facts.driver, self.driver)
        if self.driver_cuda is not None:
            yield _fits("the driver's CUDA", facts.cuda, self.driver_cuda)
        if self.gpu_model is not None:
            models = {gpu.model for gpu in facts.gpus or ()}
            for model in sorted(models, key=str) or [None]:
                yield _fits("GPU model", model, self.gpu_model)
        if self.gpu_memory is not None:
            least = min((gpu.total or 0 for gpu in facts.gpus or ()), default=0)
            holds = least >= self.gpu_memory if least else None
            yield holds, _room("a GPU has", least, self.gpu_memory) if least else untold
        for name in ("persistence", "ecc", "mig"):
            wanted = getattr(self, name)
            if wanted is not None:
                yield _switched(facts, name, on=wanted)

    def _of_environments(self, facts: HostFacts) -> Iterator[Claim]:
        for name, wanted, read in _OF_ENVIRONMENTS:
            patterns = getattr(self, wanted)
            if patterns is None:
                continue
            if not facts.environments:
                yield None, f"no job runs here whose {name} could be asked"
            for one in facts.environments:
                yield _fits(name, getattr(one, read), patterns)

    def _of_room(self, facts: HostFacts) -> Iterator[Claim]:
        for path, least in (self.disk_free or {}).items():
            disk = facts.disk_of(path)
            if disk is None:
                yield None, f"{path} is on no local file system that could be asked"
            else:
                yield disk.free >= least, _room(f"{path} has", disk.free, least, "free")
        if self.memory_free is not None:
            free = facts.memory_free
            yield free >= self.memory_free, _room("memory has", free, self.memory_free, "free")
        if self.load_below is not None:
            load = facts.load / max(facts.cpus, 1)
            yield load < self.load_below, f"the load a CPU is {load:.2f} (wanted below {self.load_below:g})"


_OF_ENVIRONMENTS = (
    ("environment", "environment", "path"),
    ("Python", "python", "python"),
    ("torch", "torch", "torch"),
)


_SWITCH = {True: "on", False: "off"}


def _fits(name: str, value: str | None, patterns: tuple[str, ...]) -> Claim:
    if value is None:
        return None, f"{name} is not known"
    wanted = " or ".join(patterns)
    holds = any(fnmatchcase(value, pattern) for pattern in patterns)
    return holds, f"{name} is {value}" + ("" if holds else f" (wanted {wanted})")


def _gpu_count(facts: HostFacts, wanted: int, untold: str) -> Claim:
    if facts.gpus is None:
        none = facts.trouble is not None and facts.trouble.kind in ("absent", "no_devices")
        gone = none and not facts.on_bus
        return (wanted == 0 if gone else None), "no GPU is here" if gone else untold
    here = len(facts.gpus)
    if facts.on_bus > here:
        return False, f"nvidia-smi lists {here} of {facts.on_bus} GPUs"
    return here == wanted, f"{here} GPUs" + ("" if here == wanted else f" (wanted {wanted})")


def _switched(facts: HostFacts, name: str, *, on: bool) -> Claim:
    label = {"persistence": "persistence mode", "ecc": "ECC", "mig": "MIG"}[name]
    states = {getattr(gpu, name) for gpu in facts.gpus or ()}
    if not states or None in states:
        return None, f"{label} is not told"
    if states == {on}:
        return True, f"{label} is {_SWITCH[on]}"
    return False, f"{label} is {_SWITCH[not on]} (wanted {_SWITCH[on]})"


def _room(what: str, have: int, wanted: int, end: str = "") -> str:
    said = f"{what} {have / GIB:.1f} GiB {end}".rstrip()
    return said if have >= wanted else f"{said} (wanted {wanted / GIB:.1f} GiB)"
