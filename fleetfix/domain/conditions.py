"""What is wrong with a host by its facts, and what helps: one line each, the same for the same trouble."""

from __future__ import annotations

from collections.abc import Iterator

from fleetfix.commands import Value
from fleetfix.domain.host_facts import Disk, GpuState, HostFacts
from fleetfix.domain.nvidia_smi import TroubleKind

GIB = 1 << 30
MIB = 1 << 20

SKEW = 2.0
"""Seconds that a clock may be off: more, and logs and leases of two hosts cannot be compared."""

FULL = 0.01
SMALL = 0.05
SMALL_BYTES = 5 * GIB
"""A file system is full with less free than the first share, or than the second one and these bytes."""

INODES = 0.02
"""The share of inodes with less of which a file system takes no more files soon."""

HELD = 512 * MIB
"""Memory that a GPU may have in use without a process: the driver's own, MIG, a desktop."""

XIDS: dict[int, str] = {
    48: "an uncorrectable memory error",
    62: "a GPU's microcontroller halted",
    64: "a row could not be remapped",
    74: "an NVLink error",
    79: "a GPU fell off the bus",
    92: "many corrected memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "a GPU's GSP does not answer",
    120: "a GPU's GSP failed",
    140: "an unrecovered memory error",
    143: "a GPU did not start up",
}
"""The Xids that tell of hardware or firmware; those that any crash of a program makes are left out."""

_HELP: dict[TroubleKind, str] = {
    "absent": "install the driver, or see which PATH it is in",
    "no_driver": "see `dmesg` and `dkms status`; reboot after an update of the kernel or driver",
    "no_library": "install the driver's user-space packages of the same version",
    "mismatch": "the driver was updated under the running one: reboot, or reload it with no job running",
    "no_devices": "see `lspci -d 10de:` and `dmesg`; reboot",
    "lost": "drain the host and reboot it; a GPU that is lost again wants service",
    "permission": "connect as root (become: true)",
    "reset": "with no job running: nvidia-smi --gpu-reset, or reboot",
    "hung": "drain the host and reboot it; jobs that wait for a GPU cannot be ended",
    "unknown": "run nvidia-smi there",
}


class Condition(Value):
    """Something wrong on a host: `text` says what, `help` what to do, `playbook` which one does it, with
    `settings` as in `--set`."""

    text: str
    help: str = ""
    playbook: str = ""
    settings: tuple[str, ...] = ()


def conditions(facts: HostFacts) -> tuple[Condition, ...]:
    """All that is wrong with a host by its facts."""
    return (*_driver(facts), *_gpus(facts), *_xids(facts), *_jobs(facts), *_system(facts))


def _driver(facts: HostFacts) -> Iterator[Condition]:
    present = max(facts.on_bus, facts.of_driver)
    if facts.trouble is not None:
        if facts.trouble.kind != "absent" or present or facts.module:
            yield Condition(text=facts.trouble.message, help=_HELP[facts.trouble.kind])
        return
    if facts.gpus is None:
        yield Condition(text="nvidia-smi's answer could not be read", help=_HELP["unknown"])
    elif present > len(facts.gpus):
        text = f"nvidia-smi lists {len(facts.gpus)} of {present} GPUs"
        yield Condition(text=text, help=_HELP["lost"], playbook="collect-evidence")


def _gpus(facts: HostFacts) -> Iterator[Condition]:
    held = {number for job in facts.jobs for number in job.gpus}
    for gpu in facts.gpus or ():
        name = f"GPU {gpu.index}"
        if gpu.remap_failed:
            yield Condition(text=f"{name}: a row could not be remapped", help="it wants service")
        elif gpu.remap_pending:
            text = f"{name}: a row waits to be remapped"
            yield Condition(text=text, help="with no job running: nvidia-smi --gpu-reset, or reboot")
        if gpu.uncorrected:
            errors = (
                "1 uncorrected ECC error"
                if gpu.uncorrected == 1
                else f"{gpu.uncorrected} uncorrected ECC errors"
            )
            yield Condition(text=f"{name}: {errors}", help="drain the host and reset the GPU")
        if gpu.slowed:
            yield Condition(
                text=f"{name} is slowed by {' and '.join(gpu.slowed)}", help="look at its cooling and power"
            )
        if _unowned(gpu, held, complete=facts.complete):
            text = f"{name} holds {(gpu.used or 0) // MIB} MiB that no process owns"
            yield Condition(text=text, help="with no job running: nvidia-smi --gpu-reset, or reboot")


def _unowned(gpu: GpuState, held: set[int], *, complete: bool) -> bool:
    """Whether memory stays in use that nobody has; where all processes could be looked at."""
    return complete and not gpu.mig and not gpu.busy and gpu.minor not in held and (gpu.used or 0) > HELD


def _xids(facts: HostFacts) -> Iterator[Condition]:
    for number, times in sorted((facts.xids or {}).items(), key=lambda one: int(one[0])):
        if int(number) in XIDS:
            often = "" if times == 1 else f", {times} times"
            yield Condition(
                text=f"Xid {number} since the boot{often}: {XIDS[int(number)]}",
                help="drain the host and reboot it; again, and it wants service",
                playbook="collect-evidence",
            )


def _jobs(facts: HostFacts) -> Iterator[Condition]:
    for job in facts.jobs:
        if job.orphan:
            text = f"{job.user}'s process {job.pid} ({job.command}) holds GPUs and its job is gone"
            yield Condition(text=text, help="kill it, once nobody wants it")


def _system(facts: HostFacts) -> Iterator[Condition]:
    for disk in facts.disks:
        if full(disk):
            text = f"{disk.path} is full: {disk.free // MIB} MiB of {disk.size / GIB:.1f} GiB free"
            yield Condition(text=text, help="make room: an update or a checkpoint would fail")
        elif disk.inodes_free is not None and disk.inodes_free < INODES:
            yield Condition(text=f"{disk.path} has no inodes left", help="remove small files there")
    if abs(facts.skew) > SKEW:
        side = "ahead of" if facts.skew > 0 else "behind"
        text = f"its clock is {abs(facts.skew):.0f} s {side} this machine's"
        yield Condition(text=text, help="see `chronyc tracking` or `timedatectl` there")


def full(disk: Disk) -> bool:
    """Whether too little is left on a file system."""
    return disk.free < FULL * disk.size or disk.free < min(SMALL * disk.size, SMALL_BYTES)
