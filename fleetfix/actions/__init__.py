"""The actions and checks that a playbook may name: one YAML key, one class, one file.

`KINDS` is the whole list. A kind lives in `fleetfix/actions/<kind>.py`, or in `<kind>_.py` where its name
is a word of Python's, in the class named here. It is imported when a playbook names it: reading one
playbook does not pay for all actions.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from keyword import iskeyword
from typing import Any

from fleetfix.action import Action, Check

AnyKind = type[Action[Any]] | type[Check[Any]]

KINDS: dict[str, str] = {
    # actions
    "gpu_processes": "GpuProcesses",
    "wheel_parts": "WheelParts",
    "cuda_wheels": "CudaWheels",
    "compile_caches": "CompileCaches",
    "job": "Job",
    "shell": "Shell",
    "command": "Command",
    "fabric": "Fabric",
    # checks
    "gpu_idle": "GpuIdle",
    "torch_loads": "TorchLoads",
    "job_libs": "JobLibs",
    "throughput": "Throughput",
    "assert": "Assert",
    "collect": "Collect",
}
"""Each kind with the name of its class."""


@cache
def named(kind: str) -> AnyKind:
    """The class of a kind; KeyError where there is none."""
    module = f"{kind}_" if iskeyword(kind) else kind
    found: AnyKind = getattr(import_module(f"{__name__}.{module}"), KINDS[kind])
    return found
