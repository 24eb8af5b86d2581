"""Read what nvidia-smi prints: GPUs, compute processes, the process panel, and what went wrong.

Formats as in real captures of drivers 590 to 610 (utkuozdemir/nvidia_gpu_exporter). The exit code
alone proves nothing and errors stand on stdout, so both are read. A cell that is not a value is
unknown, never zero: a failed query must not look like an idle GPU.
"""

from __future__ import annotations

import re
from typing import Literal

from fleetfix.commands import Value

TroubleKind = Literal[
    "absent",
    "no_driver",
    "no_library",
    "mismatch",
    "no_devices",
    "lost",
    "permission",
    "reset",
    "hung",
    "unknown",
]

# What nvidia-smi exits with is NVML's return code (nvidia-ml-py).
_BY_EXIT: dict[int, TroubleKind] = {
    4: "permission",
    6: "no_devices",
    9: "no_driver",
    10: "hung",
    12: "no_library",
    15: "lost",
    16: "reset",
    18: "mismatch",
    126: "absent",
    127: "absent",
}

# First match wins. Seen with exit 0 too.
_BY_TEXT: tuple[tuple[str, TroubleKind], ...] = (
    (r"Driver/library version mismatch", "mismatch"),  # lyulyul/shine-cluster#30, anderskm/gputil#55
    (r"couldn't communicate with the NVIDIA driver", "no_driver"),  # anderskm/gputil#26
    (r"GPU is lost", "lost"),  # meta-llama/llama-models#200
    (r"No devices were found", "no_devices"),  # NVIDIA/open-gpu-kernel-modules#862
    (r"Unable to determine the device handle", "lost"),  # NVIDIA/open-gpu-kernel-modules#387
    (r"Failed to initialize NVML: Insufficient Permissions", "permission"),
    (r"Failed to initialize NVML", "unknown"),  # NVIDIA/nvidia-container-toolkit#48
    (r"couldn't find libnvidia-ml", "no_library"),
    (r"^GPU\s?[0-9A-Fa-f:.]+: Unknown Error", "lost"),
)

_SAID: dict[TroubleKind, str] = {
    "absent": "nvidia-smi is not there",
    "no_driver": "the NVIDIA driver is not loaded",
    "no_library": "the NVML library is missing",
    "mismatch": "driver and libraries are of different versions",
    "no_devices": "no GPU was found",
    "lost": "a GPU is lost",
    "permission": "nvidia-smi has no permission",
    "reset": "a GPU needs a reset",
    "hung": "nvidia-smi does not answer",
    "unknown": "nvidia-smi failed",
}


class Trouble(Value):
    """Why nvidia-smi's answer is no answer, in words and with its own first line."""

    kind: TroubleKind
    message: str


def trouble(exit_code: int | None, text: str) -> Trouble | None:
    """Tell what went wrong, or None. `exit_code` None means it was ended at its deadline."""
    if exit_code is None:
        return _trouble("hung", "")
    for pattern, kind in _BY_TEXT:
        if re.search(pattern, text, re.MULTILINE):
            return _trouble(kind, text)
    if exit_code == 0:
        return None
    return _trouble(_BY_EXIT.get(exit_code, "unknown"), text or f"exit {exit_code}")


def _trouble(kind: TroubleKind, text: str) -> Trouble:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return Trouble(kind=kind, message=f"{_SAID[kind]}: {first[:160]}" if first else _SAID[kind])


class Gpu(Value):
    """One row of `--query-gpu`; None is a cell that held no value. Memory in bytes."""

    index: int | None
    uuid: str | None
    used: int | None
    total: int | None
    mig: bool | None


class App(Value):
    """One row of `--query-compute-apps`; None is a cell that held no value. Memory in bytes."""

    uuid: str | None
    pid: int | None
    name: str
    used: int | None


def parse_gpus(text: str) -> tuple[Gpu, ...] | None:
    """Read the CSV of `--query-gpu`; None where it is not one."""
    rows = rows_of(text, free=None)
    if rows is None or not rows:
        return None
    return tuple(
        Gpu(
            index=number_of(row.get("index")),
            uuid=value_of(row.get("uuid")),
            used=memory_of(row.get("memory.used")),
            total=memory_of(row.get("memory.total")),
            mig={"Enabled": True, "Disabled": False}.get(row.get("mig.mode.current", "")),
        )
        for row in rows
    )


def parse_apps(text: str) -> tuple[App, ...] | None:
    """Read the CSV of `--query-compute-apps`: () where none is listed, None where it is no such CSV.

    The name is not quoted and may hold commas: columns are counted from both ends.
    """
    rows = rows_of(text, free="process_name")
    if rows is None:
        return None
    return tuple(
        App(
            uuid=value_of(row.get("gpu_uuid")),
            pid=number_of(row.get("pid")),
            name=row.get("process_name", ""),
            used=memory_of(row.get("used_gpu_memory")),
        )
        for row in rows
    )


def rows_of(text: str, free: str | None = None) -> list[dict[str, str]] | None:
    """The rows of a CSV answer by their fields, or None where it is none; `free` may hold commas."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    # `memory.used [MiB]` names its unit; a value names it again.
    header = [re.sub(r"\s*\[[^]]*\]$", "", name.strip()) for name in lines[0].split(",")]
    if not {"uuid", "gpu_uuid"} & set(header):
        return None
    rows = [_cells(line, header, free) for line in lines[1:]]
    return None if any(row is None for row in rows) else [row for row in rows if row is not None]


def _cells(line: str, header: list[str], free: str | None) -> dict[str, str] | None:
    cells = [cell.strip() for cell in line.split(",")]
    if free in header:
        at, after = header.index(free), len(header) - header.index(free) - 1
        if len(cells) < len(header):
            return None
        name = ",".join(line.split(",")[at : len(cells) - after]).strip()
        cells = [*cells[:at], name, *cells[len(cells) - after :]]
    return dict(zip(header, cells, strict=True)) if len(cells) == len(header) else None


_DIGITS = "[0-9]{1,18}"
"""A number that something was counted in; what has more digits is no count."""


def value_of(cell: str | None) -> str | None:
    """A cell that holds a value: not `[N/A]`, `[Unknown Error]`, `[Insufficient Permissions]`…"""
    return None if not cell or cell == "N/A" or cell.startswith("[") else cell


def number_of(cell: str | None) -> int | None:
    """A cell as a whole number, or None."""
    value = value_of(cell)
    return int(value) if value is not None and re.fullmatch(_DIGITS, value) else None


def memory_of(cell: str | None) -> int | None:
    """A cell as bytes, or None."""
    match = re.fullmatch(rf"({_DIGITS})(?: (MiB|KiB|GiB))?", value_of(cell) or "")
    if match is None:
        return None
    return int(match[1]) * {"KiB": 1 << 10, None: 1 << 20, "MiB": 1 << 20, "GiB": 1 << 30}[match[2]]


def measure_of(cell: str | None) -> float | None:
    """The number of a cell with a unit (`628.41 W`), or None."""
    match = re.match(rf"({_DIGITS}(?:\.[0-9]+)?)(?: |$)", value_of(cell) or "")
    return float(match[1]) if match else None


def flag_of(cell: str | None) -> bool | None:
    """`Enabled`, `Active` and `Yes` as True, their contraries as False, anything else as None."""
    words = {
        "Enabled": True,
        "Active": True,
        "Yes": True,
        "Disabled": False,
        "Not Active": False,
        "No": False,
    }
    return words.get(cell or "")


def cuda_of(text: str) -> str | None:
    """The CUDA version of the driver, as the head of the plain table says it: `13.1`."""
    match = re.search(r"CUDA Version:\s*([0-9]+\.[0-9]+)", text)
    return match[1] if match else None


class PanelRow(Value):
    """One process of the panel: `kind` C (compute), G (graphics), C+G or M+C (MPS)."""

    gpu: int
    pid: int
    kind: str
    name: str


class Panel(Value):
    """The process panel of the plain table.

    `empty`: neither a process nor "No running processes found". Processes exist there, in another
    PID namespace (NVIDIA/nvidia-docker#1460).
    """

    rows: tuple[PanelRow, ...]
    empty: bool


_PANEL_ROW = re.compile(
    r"^\|\s+(\d+)\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d+)\s+(C\+G|M\+C|C|G|M)\s+(.*?)\s+\S+\s*\|$"
)


def parse_panel(text: str) -> Panel | None:
    """Read the process panel of `nvidia-smi`'s table, or None where the text holds none."""
    _, found, panel = text.partition("| Processes:")
    if not found:
        return None
    lines = [line.rstrip() for line in panel.splitlines()]
    matches = [match for match in map(_PANEL_ROW.match, lines) if match]
    rows = tuple(PanelRow(gpu=int(m[1]), pid=int(m[2]), kind=m[3], name=m[4]) for m in matches)
    return Panel(rows=rows, empty=not rows and "No running processes found" not in panel)


# What cuInit answers (cuda.h).
_CUDA: dict[int, str] = {
    3: "CUDA is not initialised",
    34: "libcuda is a stub",
    46: "the GPUs are busy or unavailable",
    100: "CUDA finds no GPU",
    101: "CUDA finds no valid GPU",
    802: "the system is not yet initialised (is nvidia-fabricmanager running?)",
    803: "driver and libcuda are of different versions",
    804: "this libcuda does not support this GPU",
    999: "CUDA fails for an unknown reason",
}


def why_nothing_can_start(
    exit_code: int | None, text: str, cuda_found: bool, cuda_code: int | None
) -> str | None:
    """Say why no new GPU job could start here, or None where one could.

    Under a driver mismatch running jobs work on and no new one starts: stopping one is a one-way
    door. Without a libcuda where we look, nvidia-smi alone decides.
    """
    found = trouble(exit_code, text)
    if found is not None:
        return found.message
    if parse_gpus(text) is None:
        return "nvidia-smi does not list a GPU"
    if not cuda_found or cuda_code == 0:
        return None
    if cuda_code is None:
        return "CUDA does not initialise: no answer"
    return f"CUDA does not initialise: {_CUDA.get(cuda_code, 'error')} ({cuda_code})"
