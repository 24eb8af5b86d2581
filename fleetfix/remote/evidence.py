"""What a host says of itself now, for whoever asks later what it was like: bounded, and without secrets.

Each item is one text. Nothing on the host is written or changed; what looks like a secret is masked here,
before it leaves the host.
"""

import base64
import os
import platform
import time
import zlib

from fleetfix.remote import capture, ending, environments, masking, mounts, procs
from fleetfix.remote.api import Refusal, all_processes, read, user_name

MOST = 256 * 1024  # bytes of one item
SENT = 56 * 1024  # characters of one item on the wire, compressed
SMI = 30.0  # seconds; 8 GPUs without persistence mode need about 10
TOOL = 15.0
LOG_LINES = 300
KERNEL_LINES = 500
PROCESSES = 400

# What a server of files that does not answer would hold up.
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "vfat"}


class Lacks(Exception):
    """The host has no such thing, or does not show it to this user: that is no failure."""


@read
def take(ctx, item):
    """One item: {"packed": its text, zlib and base64, "cut", "lacks": why there is none, or None}.

    Refuses with `timed_out` where something that should answer does not.
    """
    try:
        text, end = ITEMS[item](ctx)
    except Lacks as why:
        return {"packed": "", "cut": False, "lacks": str(why)[:300]}
    for value in _secrets(ctx):  # one may go over several lines, as keys do
        text = text.replace(value, masking.MASK)
    lines = [masking.masked(line) for line in ctx.hide(text).splitlines()]
    packed, cut = _packed("\n".join(lines) + "\n", end)
    return {"packed": packed, "cut": cut, "lacks": None}


def _secrets(ctx):
    _, jobs = procs.jobs_here()
    pids = {pid for job in jobs for pid in (job["pid"], *(one for one, _ in job["holders"]))}
    found = {value for pid in pids for value in masking.values_of(procs.environ_of(pid))}
    return sorted(found.union(capture.secrets_of_run(ctx)), key=len, reverse=True)


def _packed(text, end):
    """The text made to fit, kept at its `end` ("head" or "tail"), and whether it was cut."""
    whole = len(text)
    text = text[:MOST] if end == "head" else text[-MOST:]
    while True:
        data = zlib.compress(text.encode("utf-8", "replace"), 6)
        packed = base64.b64encode(data).decode("ascii")
        if len(packed) <= SENT:
            return packed, len(text) < whole
        half = len(text) * 3 // 4
        text = text[:half] if end == "head" else text[-half:]


def _asked(ctx, argv, seconds=TOOL):
    """What a program answers, as a Ran."""
    ran = ctx.command(argv, timeout=seconds, limit=MOST)
    if ran.exit is None:
        raise Refusal("timed_out", "%s did not answer within %d s" % (" ".join(argv), seconds))
    if ran.exit == 127:
        raise Lacks("%s is not on this host" % argv[0])
    return ran


def _told(ctx, argv, seconds=TOOL):
    """The text of an answer; where the program was not content, what it says of that and its exit too."""
    ran = _asked(ctx, argv, seconds)
    return ran.text if ran.exit == 0 else "%s%s\n[exit %d]\n" % (ran.text, ran.errors, ran.exit)


def _why(ran):
    said = (ran.errors or ran.text).strip()
    return said.splitlines()[0] if said else "exit %d" % ran.exit


# -- the items --------------------------------------------------------------------------------------


def _system(ctx):
    known = {
        "host": platform.node(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "boot id": capture.boot_id(),
        "machine id": _line("/etc/machine-id"),
        "kernel": " ".join((platform.system(), platform.release(), platform.version(), platform.machine())),
        "system": _release(),
        "up, seconds": _line("/proc/uptime").split(" ")[0],
        "load": _line("/proc/loadavg"),
        "driver": _line("/proc/driver/nvidia/version") or _line("/sys/module/nvidia/version"),
        "python": platform.python_version(),
    }
    lines = ["%-12s %s" % pair for pair in known.items()]
    return "\n".join([*lines, "", *_text("/proc/meminfo").splitlines()[:25]]), "head"


def _release():
    for line in _text("/etc/os-release").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return ""


def _line(path):
    return (_text(path).splitlines() or [""])[0]


def _text(path):
    try:
        with open(path, "rb") as file:
            return file.read(MOST).decode("utf-8", "replace")
    except OSError:
        return ""


def _smi(ctx):
    return _told(ctx, ["nvidia-smi", "-q"], SMI), "head"


def _topology(ctx):
    return _told(ctx, ["nvidia-smi", "topo", "-m"], SMI), "head"


def _kernel(ctx):
    ran = _asked(ctx, ["dmesg", "--ctime"])
    if ran.exit != 0:
        return _journal(ctx, "0", _why(ran)), "tail"
    return "\n".join(ran.text.splitlines()[-KERNEL_LINES:]), "tail"


def _kernel_before(ctx):
    return _journal(ctx, "-1"), "tail"


def _journal(ctx, boot, why=""):
    options = ["-k", "-b", boot, "-n", str(KERNEL_LINES), "--no-pager", "-o", "short-iso"]
    ran = _asked(ctx, ["journalctl", *options])
    if ran.exit != 0:
        raise Lacks(why or "journalctl: " + _why(ran))
    return ran.text


def _processes(ctx):
    """Who holds GPUs, with all that is theirs, and what waits in the kernel and cannot be ended."""
    _, jobs = procs.jobs_here()
    gpus = {pid: job["gpus"] for job in jobs for pid, _ in job["holders"]}
    theirs = {pid for job in jobs for pid, _ in ending.tree_of(job)} | {job["pid"] for job in jobs}
    table = all_processes()
    stuck = {pid for pid, (state, _, _) in table.items() if state == "D"}
    lines = [
        "%8s %8s %-12s %s %10s %7s %-8s %s" % ("pid", "ppid", "user", "s", "rss KiB", "threads", "gpus", "")
    ]
    for pid in sorted(theirs | stuck)[:PROCESSES]:
        if pid not in table:
            continue
        state, ppid, _ = table[pid]
        status = procs.status_of(pid)
        uid = procs.uid_of(pid)
        words = procs.shown_of(pid) or ["[%s]" % procs.comm_of(pid)]
        if pid in stuck:
            words.append("(waits in %s)" % (procs.slurp(pid, "wchan").decode("ascii", "replace") or "?"))
        fields = (
            *(pid, ppid, "?" if uid is None else user_name(uid), state),
            *(status.get("VmRSS", "?").split(" ")[0], status.get("Threads", "?")),
            *(",".join(map(str, gpus.get(pid, ()))) or "-", " ".join(words)),
        )
        lines.append("%8s %8s %-12s %s %10s %7s %-8s %s" % fields)
    return "\n".join(lines), "head"


def _mounts(ctx):
    return _text("/proc/self/mounts"), "head"


def _disk(ctx):
    """Room on local file systems: one on a server that does not answer would hold this up."""
    lines, seen = ["%12s %12s %10s %s" % ("size MiB", "free MiB", "free nodes", "mounted on")], set()
    for point, kind in mounts.table():
        if kind not in LOCAL:
            continue
        try:
            found, device = os.statvfs(point), os.stat(point).st_dev
        except OSError:
            continue
        if device in seen or not found.f_blocks:
            continue
        seen.add(device)
        size, free = (blocks * found.f_frsize >> 20 for blocks in (found.f_blocks, found.f_bavail))
        lines.append("%12d %12d %10d %s (%s)" % (size, free, found.f_favail, point, kind))
    return "\n".join(lines), "head"


def _packages(ctx):
    """What is installed in each environment that a job uses, or used before this run stopped it."""
    _, jobs = procs.jobs_here()
    used = {path for job in jobs for path in job["environments"]}
    used |= {job["environment"] for _, found in capture.of_run(ctx) for job in found["jobs"]} - {None}
    if not used:
        raise Lacks("no job says which environment is in use")
    lines = []
    for path in sorted(used):
        lines.append("# " + path)
        for site in environments.sites_of(path):
            names = [name[: -len(".dist-info")] for name in os.listdir(site) if name.endswith(".dist-info")]
            lines += sorted(("==".join(name.rsplit("-", 1)) for name in names), key=str.lower)
    return "\n".join(lines), "head"


def _job_log(ctx):
    """The last lines of what each job prints, read with the rights of its user."""
    _, jobs = procs.jobs_here()
    logs = {capture.log_of([pid for pid, _ in job["holders"]] + [job["pid"]]): job["uid"] for job in jobs}
    for _, found in capture.of_run(ctx):
        logs.update({job["log"]: job["uid"] for job in found["jobs"]})
    logs.pop(None, None)
    if not logs:
        raise Lacks("no job runs here whose output goes to a file")
    lines = []
    for path, uid in sorted(logs.items()):
        lines += ["# " + path, *ctx.as_user(uid, capture.read_log, path)[-LOG_LINES:]]
    return "\n".join(lines), "tail"


def _pci(ctx):
    return _told(ctx, ["lspci", "-d", "10de:", "-vv"]), "head"


def _network(ctx):
    return _told(ctx, ["ip", "-s", "link"]), "head"


def _infiniband(ctx):
    return _told(ctx, ["ibstat"]), "head"


def _units(ctx):
    return _told(ctx, ["systemctl", "--failed", "--no-legend", "--no-pager"]), "head"


ITEMS = {
    "system": _system,
    "nvidia-smi": _smi,
    "kernel": _kernel,
    "processes": _processes,
    "mounts": _mounts,
    "disk": _disk,
    "packages": _packages,
    "job-log": _job_log,
    "topology": _topology,
    "kernel-before": _kernel_before,
    "pci": _pci,
    "network": _network,
    "infiniband": _infiniband,
    "units": _units,
}
