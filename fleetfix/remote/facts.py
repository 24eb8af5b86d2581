"""What a host is and how it fares. Only read, and only when nobody else wants the machine.

Nothing is decided here: answers of nvidia-smi go as they are, and domain/host_facts.py reads them.
"""

import glob
import os
import re
import time

from fleetfix.remote import dists, environments, gpus, jobs, mounts
from fleetfix.remote.api import be_idle, read

ANSWER = 20.0  # seconds; 8 GPUs without persistence mode need about 10
TEXT = 8 * 1024
PLACES = ("/", "/tmp", "/var", "/home", "/opt", "/dev/shm")
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs"}
AT_PLACES = LOCAL | {"tmpfs", "ramfs", "overlay"}  # elsewhere these are sockets, and what containers see
SYSTEM = ("/proc", "/sys", "/run", "/dev/")
MOST_DISKS = 16

# The first is asked always; of the others those that this nvidia-smi knows, for one unknown field spoils
# the whole answer.
FIELDS = ("index", "uuid", "name", "driver_version", "memory.used", "memory.total", "mig.mode.current")
MORE = (
    "persistence_mode",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "clocks_event_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_event_reasons.hw_power_brake_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
    "temperature.gpu",
    "power.draw",
    "power.limit",
)
APPS = "--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory"
XID = re.compile(rb"NVRM: Xid \([^)]*\): (\d+)")
LONGEST_LOG = 64 * 1024 * 1024  # bytes of the kernel's log that are looked at


@read
def survey(ctx):
    """Everything of this host that `inspect` shows and `assert` judges. See domain.host_facts.HostFacts."""
    begun = time.time()
    be_idle()
    live = jobs.found(ctx)
    found = {
        "kernel": os.uname().release,
        "uptime": _first_number("/proc/uptime"),
        "load": os.getloadavg()[0],
        "cpus": len(os.sched_getaffinity(0)),
        "memory": _memory(),
        "disks": _disks(),
        "gpus": _gpus(ctx),
        "xids": _xids(),
        "complete": live["complete"],
        "schedulers": live["schedulers"],
        "jobs": [_reduced(job) for job in live["jobs"]],
        "environments": _environments(live["jobs"]),
    }
    # The host's clock at both ends: between them lies what the controller's clock said.
    found["clock"] = [begun, time.time()]
    return found


def _first_number(path):
    with open(path) as file:
        return float(file.read().split()[0])


def _memory():
    with open("/proc/meminfo") as file:
        pairs = (line.partition(":") for line in file)
        sizes = {name: int(value.split()[0]) * 1024 for name, _, value in pairs}
    return [sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)]


# -- disks ------------------------------------------------------------------------------------------


def _disks():
    """{"asked": [[path, bytes, bytes free, files, files free]] of local file systems, each once, "others"}.

    One of the network is not asked: a server that is away would hold this process for good. `others` are
    the places where such ones, and any more, are mounted.
    """
    table = mounts.table()
    local = {point for point, kind in table if kind in LOCAL}
    asked, seen, known = [], set(), set()
    for path in [*PLACES, *sorted(local, key=lambda one: (one.count("/"), one))]:
        if mounts.filesystem_of(path, table) not in AT_PLACES or len(asked) == MOST_DISKS:
            continue
        try:
            device, info = os.stat(path).st_dev, os.statvfs(path)
        except OSError:
            continue
        known.add(path)
        if device not in seen and info.f_blocks:
            seen.add(device)
            sizes = [info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize]
            asked.append([path, *sizes, info.f_files, info.f_favail])
    others = {point for point, _ in table if point not in known and not point.startswith(SYSTEM)}
    shallow = sorted(others, key=lambda one: (one.count("/"), one))
    return {"asked": asked, "others": shallow[:128]}


# -- GPUs -------------------------------------------------------------------------------------------


def _gpus(ctx):
    """What the bus, the driver and nvidia-smi say: three counts that should be one."""
    found = {
        "module": _line("/sys/module/nvidia/version"),
        "on_bus": _on_bus(),
        "of_driver": len(glob.glob("/proc/driver/nvidia/gpus/*")),
        "minors": gpus.minors(),
    }
    known = _smi(ctx, ["--help-query-gpu"])
    if known["exit"] is None:
        # A query that hangs waits in the kernel: the next would hang beside it.
        return dict(found, query=known, apps=known, table=known)
    words = set(re.findall(r'"([a-z0-9_.]+)"', known["text"])) if known["exit"] == 0 else set()
    fields = FIELDS + tuple(one for one in MORE if one in words)
    found["query"] = _smi(ctx, ["--query-gpu=" + ",".join(fields), "--format=csv"])
    late = found["query"]["exit"] is None
    found["apps"] = found["query"] if late else _smi(ctx, [APPS, "--format=csv"])
    found["table"] = found["query"] if late else _smi(ctx, [])
    return found


def _smi(ctx, options):
    limit = 256 * 1024 if options == ["--help-query-gpu"] else TEXT
    ran = ctx.command(["nvidia-smi", *options], timeout=ANSWER, limit=limit)
    return {"exit": ran.exit, "text": ran.text if ran.text.strip() else ran.errors, "cut": ran.cut}


def _on_bus():
    """How many NVIDIA GPUs (display and 3D controllers) are on the PCI bus."""
    count = 0
    for folder in glob.glob("/sys/bus/pci/devices/*"):
        kind = _line(folder + "/class") or ""
        if _line(folder + "/vendor") == "0x10de" and kind.startswith(("0x0300", "0x0302")):
            count += 1
    return count


def _line(path):
    try:
        with open(path) as file:
            return file.readline(200).strip()
    except OSError:
        return None


def _xids():
    """{Xid: how often} in the kernel's log since it was started, None where that cannot be read."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    found, left = {}, LONGEST_LOG
    try:
        while left > 0:
            try:
                record = os.read(fd, 8192)
            except BrokenPipeError:
                continue  # this record was overwritten meanwhile: the next one is there
            except OSError:
                break
            if not record:
                break
            left -= len(record)
            match = XID.search(record)
            if match:
                number = match.group(1).decode()
                found[number] = found.get(number, 0) + 1
    finally:
        os.close(fd)
    return found


# -- jobs -------------------------------------------------------------------------------------------


def _reduced(job):
    names = ("pid", "user", "argv", "gpus", "environments", "orphan", "scheduler", "unit", "container")
    return dict({name: job[name] for name in names}, seconds=_age(job["start"]))


def _age(start):
    try:
        return round(jobs.age_of(start), 1)
    except OSError:
        return None


def _environments(found):
    """The environments that jobs use: path, Python and torch, read as text. Nothing of them runs."""
    paths = sorted({path for job in found if not job["container"] for path in job["environments"]})
    return [_environment(path) for path in paths[:4]]


def _environment(path):
    told = {"path": path, "python": None, "torch": None, "cuda": None}
    for site in environments.sites_of(path):
        version = re.search(r"python(3\.\d+)", site)
        told["python"] = told["python"] or (version.group(1) if version else None)
        for info in glob.glob(os.path.join(glob.escape(site), "torch-*.dist-info")):
            told["torch"] = os.path.basename(info)[len("torch-") : -len(".dist-info")][:60]
            text = dists.read_text(os.path.join(site, "torch/version.py"), 1 << 16)
            cuda = dists.TORCH_CUDA.search(text.decode("utf-8", "replace")) if text else None
            told["cuda"] = cuda.group(1) if cuda else None
    return told
