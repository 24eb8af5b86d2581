"""gpu_idle: nothing computes on the GPUs, nothing holds them, and their memory is free.

Utilization is no evidence: idle GPUs have been seen at 100 % (Datura-ai/lium-io#1140). What is odd is
unknown, never idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from os.path import basename
from typing import Any, ClassVar, Literal

from pydantic import Field

from fleetfix.action import Check, Probe, Verdict
from fleetfix.commands import Bytes, Read, Value
from fleetfix.domain import nvidia_smi
from fleetfix.domain.nvidia_smi import App, Gpu, Panel

MIB = 1 << 20


class Holder(Value):
    """A job that holds GPUs by /proc; `gpus` are device numbers."""

    pid: int
    user: str
    argv: tuple[str, ...]
    gpus: tuple[int, ...]


class Who(Value):
    """A process that nvidia-smi lists and that is there."""

    uid: int
    user: str
    argv: tuple[str, ...]
    allowed: bool
    """It is one of the services that may keep a GPU open."""


class IdleFacts(Value):
    """What nvidia-smi and /proc say; None where an answer could not be read."""

    trouble: str | None = None
    gpus: tuple[Gpu, ...] | None = None
    apps: tuple[App, ...] | None = None
    panel: Panel | None = None
    holders: tuple[Holder, ...] = ()
    listed: dict[int, Who | None] = Field(default_factory=dict)
    minors: dict[str, int] = Field(default_factory=dict)
    selected: tuple[int, ...] | None = None
    complete: bool = True


class GpuIdle(Check[IdleFacts]):
    """The GPUs are idle: by nvidia-smi's list, by who holds the devices, and by memory."""

    kind: ClassVar[str] = "gpu_idle"
    modules: ClassVar[tuple[str, ...]] = ("gpus",)

    gpus: Literal["of-job", "all"] | tuple[int, ...] = "of-job"
    """of-job: those of the job that was stopped, else of the one that runs, else all."""
    memory_below: Bytes = 64 * MIB
    """Memory in use that still counts as idle. MIG keeps 55 to 59 MiB, a desktop about 200."""

    def probe(self) -> Probe[IdleFacts]:
        wanted = self.gpus if isinstance(self.gpus, str) else list(self.gpus)
        (reply,) = yield (Read(function="gpus.survey", args={"gpus": wanted}, timeout=90.0),)
        return _facts(reply.answer())

    def judge(self, facts: IdleFacts) -> Verdict:
        if facts.trouble is not None:
            return Verdict(result="unknown", reason=facts.trouble)
        busy = next(self._busy(facts), None)
        if busy is not None:
            return Verdict(result="fail", reason=busy)
        odd = next(self._odd(facts), None)
        if odd is not None:
            return Verdict(result="unknown", reason=odd)
        return Verdict(result="pass", reason=self._said(facts))

    def _said(self, facts: IdleFacts) -> str:
        chosen = self._chosen(facts)
        most = max((gpu.used or 0 for gpu in chosen), default=0) // MIB
        end = "" if facts.complete else "; processes of other users could not be looked at"
        return f"{len(chosen)} GPUs idle, at most {most} MiB in use{end}"

    def _chosen(self, facts: IdleFacts) -> tuple[Gpu, ...]:
        gpus = facts.gpus or ()
        if facts.selected is None:
            return gpus
        return tuple(gpu for gpu in gpus if _minor(gpu, facts) in (None, *facts.selected))

    def _busy(self, facts: IdleFacts) -> Iterator[str]:
        uuids = {gpu.uuid for gpu in self._chosen(facts)}
        for app in facts.apps or ():
            who = facts.listed.get(app.pid) if app.pid is not None else None
            if app.uuid in uuids and who is not None and not who.allowed:
                yield f"{who.user}'s process {app.pid} ({_short(who.argv)}) computes on a GPU"
        for holder in facts.holders:
            if holder.gpus and (facts.selected is None or set(holder.gpus) & set(facts.selected)):
                yield f"{holder.user}'s process {holder.pid} ({_short(holder.argv)}) holds a GPU"
        for gpu in self._chosen(facts):
            if gpu.used is not None and gpu.used >= self.memory_below:
                yield f"GPU {gpu.index} has {gpu.used // MIB} MiB in use"

    def _odd(self, facts: IdleFacts) -> Iterator[str]:
        chosen = self._chosen(facts)
        if facts.gpus is None or facts.apps is None:
            yield "nvidia-smi's answer could not be read"
        if not chosen:
            yield "nvidia-smi lists none of these GPUs"
        if facts.selected is not None:
            missing = set(facts.selected) - {_minor(gpu, facts) for gpu in chosen}
            if missing and chosen:
                yield f"nvidia-smi does not list GPU {min(missing)}"
        for gpu in chosen:
            if gpu.used is None:
                yield f"GPU {gpu.index} does not say how much memory is in use"
        uuids = {gpu.uuid for gpu in chosen}
        for app in facts.apps or ():
            if app.pid is None or app.uuid is None:
                yield "nvidia-smi lists a process that it may not name"
            elif app.uuid in uuids and facts.listed.get(app.pid) is None:
                yield f"nvidia-smi lists pid {app.pid}, which is not here: of a container, or an orphan"
        if facts.panel is not None and facts.panel.empty:
            yield "nvidia-smi's process panel is empty: processes are hidden in another PID namespace"


def _minor(gpu: Gpu, facts: IdleFacts) -> int | None:
    return facts.minors.get(gpu.uuid or "", gpu.index)


def _short(argv: tuple[str, ...]) -> str:
    return " ".join(basename(word) for word in argv[:2])[:60]


def _facts(value: dict[str, Any]) -> IdleFacts:
    answers = {name: (value[name]["exit"], value[name]["text"]) for name in ("gpus", "apps", "table")}
    troubles = [nvidia_smi.trouble(code, text) for code, text in answers.values()]
    first = next((one for one in troubles if one is not None), None)
    return IdleFacts(
        trouble=first.message if first else None,
        gpus=None if first else nvidia_smi.parse_gpus(answers["gpus"][1]),
        apps=None if first or value["apps"]["cut"] else nvidia_smi.parse_apps(answers["apps"][1]),
        panel=None if first else nvidia_smi.parse_panel(answers["table"][1]),
        holders=tuple(Holder.model_validate(one) for one in value["jobs"]),
        listed={int(pid): Who.model_validate(who) if who else None for pid, who in value["listed"].items()},
        minors=value["minors"],
        selected=None if value["selected"] is None else tuple(value["selected"]),
        complete=value["complete"],
    )
