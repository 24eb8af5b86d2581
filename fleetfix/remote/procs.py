"""Which processes hold the GPUs of this host, and the job that each of them belongs to.

A process holds a GPU when it has /dev/nvidiaN open (N a number; nvidiactl and nvidia-uvm alone do
not count), or libcuda mapped. It computes there when it has nvidia-uvm open too, or libcuda mapped:
what reads counters by NVML (gpud, netdata, nvitop) opens the devices and does neither. nvidia-smi hides
some of these and lists others that are not here, so /proc is the first source and nvidia-smi the second.
"""

import json
import os
import re

from fleetfix.remote import masking, units
from fleetfix.remote.api import all_processes, read, stat_of, user_name

DEVICES = re.compile(r"^/dev/nvidia([0-9]+)$")
MEMORY_DEVICE = "/dev/nvidia-uvm"  # every CUDA program has it open: unified memory goes through it
CUDA_DRIVER = re.compile(r"/libcuda\.so(\.[0-9.]+)?$")
ENVIRONMENT = re.compile(r"^(/.*?)/lib(?:64)?/python[0-9.]+/(?:site|dist)-packages/(.+)$")

# These keep a GPU open and compute nothing; killing one of them froze a GPU (NVIDIA/dcgm-exporter#84).
# Believed only when the program is root's, or any job could hide behind such a name.
ALLOWED = {
    "nvidia-persistenced",
    "nv-hostengine",
    "dcgm-exporter",
    "nvidia-fabricmanager",
    "nv-fabricmanager",
    "Xorg",
    "Xwayland",
    "gnome-shell",
    "nvidia-smi",
}
ALLOWED_PREFIX = "nvidia-cuda-mps-"

SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "mksh", "fish", "tcsh", "csh", "ash"}
# Whoever starts programs again by itself: a job below one of these has to be stopped there.
SUPERVISORS = {"supervisord", "runsv", "s6-supervise", "supervise", "monit", "circusd", "pm2", "PM2"}
# Whoever runs the programs of its users: it is no part of their job, and never stopped for it.
NURSERIES = {
    "jupyter-lab", "jupyter-notebook", "jupyter-noteboo", "jupyter-server", "jupyterhub", "jupyterhub-sing",
    "code-server", "gitlab-runner", "Runner.Listener", "Runner.Worker", "runsvc.sh", "buildkite-agent",
    "jenkins-agent", "raylet",
}  # fmt: skip
NURSERY_PROGRAM = re.compile(r"/(code-server|\.?(vscode|cursor)-server|actions-runner)/")
# Where a job ends when looked at from below: sessions, terminals, managers.
CEILINGS = SUPERVISORS | NURSERIES | {
    "sshd", "sshd-session", "login", "agetty", "mosh-server", "tmux", "screen", "SCREEN",
    "cron", "crond", "atd", "anacron", "systemd", "init", "gnome-terminal-", "konsole", "xterm",
    "dockerd", "containerd", "containerd-shim", "conmon", "crio", "runc", "slurmd", "slurmstepd",
    "kubelet", "pbs_mom", "runsvdir", "s6-svscan", "svscan",
}  # fmt: skip
# They run a command for someone and are no job themselves.
PASSAGES = {"sudo", "su", "doas", "runuser", "script"}

SCHEDULER_DAEMONS = {"slurmd": "Slurm", "kubelet": "Kubernetes", "pbs_mom": "PBS"}
# Processes that live in these units without the unit being theirs.
NO_JOB_UNIT = re.compile(
    r"^(ssh|sshd|ssh@.*|cron|crond|atd|docker|containerd|slurmd|kubelet|dbus|gdm|lightdm|getty@.*"
    r"|serial-getty@.*|systemd-.*|user@.*|init|supervisor|supervisord|tmux.*|screen.*)\.service$"
)
CONTAINER = re.compile(r"(?:docker|containerd|libpod|podman|crio|kubepods|lxc)[^\n]*")

ITEMS, LENGTH = 20, 200  # of an argv that is shown: how many, and how long each
REPLY = 48 * 1024  # bytes of a reply that leave room under the 64 KB of a frame


# -- one process --------------------------------------------------------------------------------


def text(data):
    """Bytes of /proc as text that gives the same bytes back."""
    return data.decode("utf-8", "surrogateescape")


def slurp(pid, name):
    """The content of /proc/PID/NAME, or b"" when it is gone or closed to us."""
    try:
        with open("/proc/%d/%s" % (pid, name), "rb") as file:
            return file.read()
    except OSError:
        return b""


def link(pid, name):
    """Where /proc/PID/NAME points, or None."""
    try:
        return os.readlink("/proc/%d/%s" % (pid, name))
    except OSError:
        return None


def argv_of(pid):
    """The command line of a process as a list; empty for a kernel thread or one that is gone."""
    data = slurp(pid, "cmdline")
    return [text(part) for part in data.rstrip(b"\0").split(b"\0")] if data.strip(b"\0") else []


def environ_of(pid):
    """The environment a process was started with, or None when it cannot be read or is overwritten.

    A process that renames itself (setproctitle) overwrites this memory with zeros.
    """
    data = slurp(pid, "environ")
    pairs = [text(part).partition("=") for part in data.split(b"\0") if b"=" in part]
    return {name: value for name, _, value in pairs if name} or None


def status_of(pid):
    """{field: value} of /proc/PID/status, or {} when it is gone."""
    lines = slurp(pid, "status").decode("utf-8", "replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def comm_of(pid):
    """The kernel's short name of a process (15 characters)."""
    return text(slurp(pid, "comm").rstrip(b"\n"))


def uid_of(pid):
    """The effective uid of a process, or None when it is gone."""
    fields = status_of(pid).get("Uid", "").split()
    return int(fields[1]) if len(fields) == 4 else None


def group_of(pid):
    """The process group of a process, or 0 when it is gone."""
    data = slurp(pid, "stat")
    return int(data[data.rindex(b")") + 2 :].split()[2]) if b")" in data else 0


def undeleted(path):
    """A path of /proc without the kernel's mark for a file that is gone."""
    return path[: -len(" (deleted)")] if path.endswith(" (deleted)") else path


def mapped(pid):
    """{path: (device, inode)} of the files mapped by a process; OSError when closed to us."""
    return _mapped_in(_maps(pid))


def _maps(pid):
    with open("/proc/%d/maps" % pid, "rb") as file:
        return file.read()


def _mapped_in(maps):
    found = {}
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(b"/"):
            found[text(fields[5])] = (text(fields[3]), int(fields[4]))
    return found


def environment_in(paths):
    """The Python environment that mapped libraries come from: the one with torch, else with most."""
    weights = {}
    for path in paths:
        match = ENVIRONMENT.match(undeleted(path))
        if match and ".so" in os.path.basename(match.group(2)):
            weight = 1000 if match.group(2).startswith("torch/lib/") else 1
            weights[match.group(1)] = weights.get(match.group(1), 0) + weight
    return max(sorted(weights), key=weights.get) if weights else None


def environment_of(pid):
    """The prefix of the Python environment whose libraries a process has mapped, or None.

    /proc/PID/exe leads to the base interpreter and argv[0] may be plain `python`: only the maps tell.
    """
    try:
        return environment_in(mapped(pid))
    except OSError:
        return None


def devices_of(pid):
    """(numbers N of the /dev/nvidiaN that a process has open, whether it has nvidia-uvm open too).

    OSError when it is closed to us.
    """
    minors, memory = set(), False
    for name in os.listdir("/proc/%d/fd" % pid):
        target = link(pid, "fd/" + name) or ""
        match = DEVICES.match(target)
        if match:
            minors.add(int(match.group(1)))
        memory = memory or target == MEMORY_DEVICE
    return minors, memory


def is_allowed(pid):
    """Whether a process is one of the services that may keep a GPU open, by its root-owned program."""
    name = os.path.basename(undeleted(link(pid, "exe") or ""))
    if name not in ALLOWED and not name.startswith(ALLOWED_PREFIX):
        return False
    try:
        status = os.stat("/proc/%d/exe" % pid)
    except OSError:
        return False
    return status.st_uid == 0 and not status.st_mode & 0o022


# -- the job above a process --------------------------------------------------------------------


def ancestors():
    """The pids of this call, of the runner and of all above it: no job, and never signalled."""
    table, pid, found = all_processes(), os.getpid(), set()
    while pid > 0 and pid not in found:
        found.add(pid)
        pid = table[pid][1] if pid in table else 0
    return found


def interactive_shell(argv):
    """Whether a command line is a shell that someone types into, not one that runs a script."""
    if not argv or os.path.basename(argv[0]).lstrip("-") not in SHELLS:
        return False
    options = argv[1:]
    if "-i" in options:
        return True
    return all(one.startswith("-") and ("c" not in one or one.startswith("--")) for one in options)


def names_of(pid):
    """The names a process goes by: its kernel name and the first word of its command line."""
    argv = argv_of(pid)
    first = os.path.basename(argv[0].split(":")[0].split(" ")[0]) if argv else ""
    return {comm_of(pid), comm_of(pid).split(":")[0].split(" ")[0], first}


def ceiling(pid, own):
    """Whether no job reaches up to this process: init, a session, a manager, or the runner itself."""
    if pid == 1 or pid in own or names_of(pid) & CEILINGS:
        return True
    return interactive_shell(argv_of(pid)) or nursery_of(pid) is not None


def nursery_of(pid):
    """The name of what runs its users' programs (an IDE, a notebook, a CI runner), or None."""
    argv = argv_of(pid)
    name = next(iter(sorted(names_of(pid) & NURSERIES)), None)
    match = None if name else NURSERY_PROGRAM.search(" ".join(argv[:2]))
    return match.group(1) if match else name


def launcher_of(pid, table, own):
    """(launcher, the process above it): the highest ancestor that still belongs to the job."""
    top = at = pid
    while True:
        above = table[at][1] if at in table else 0
        if above not in table or ceiling(above, own):
            return top, above
        at = above
        if not names_of(at) & PASSAGES:
            top = at


def cgroup_of(pid):
    """The cgroup paths of a process, one a line."""
    lines = slurp(pid, "cgroup").decode("utf-8", "replace").splitlines()
    return "\n".join(sorted({line.split(":", 2)[2] for line in lines if line.count(":") >= 2}))


def scheduler_of(cgroup, environ):
    """The scheduler's job that a process is part of, in words, or None."""
    match = re.search(r"slurm[^\n]*/job_([0-9]+)", cgroup)
    if match:
        return "Slurm job " + match.group(1)
    if "kubepods" in cgroup:
        return "a Kubernetes pod"
    for variable, name in (("SLURM_JOB_ID", "Slurm"), ("PBS_JOBID", "PBS"), ("LSB_JOBID", "LSF")):
        if (environ or {}).get(variable):
            return "%s job %s" % (name, environ[variable])
    return None


def units_of(cgroup):
    """(system unit, user unit) in whose cgroup a process lives; sessions and managers are neither."""
    for path in cgroup.split("\n"):
        parts = [part for part in path.split("/") if part.endswith((".service", ".scope"))]
        if not parts or not parts[-1].endswith(".service") or NO_JOB_UNIT.match(parts[-1]):
            continue
        return (None, parts[-1]) if "/user.slice/" in path else (parts[-1], None)
    return None, None


def placed(pid, table, cgroup, own_cgroup):
    """(unit, user unit, what it only runs inside of) of a launcher.

    A unit is the job's own only where the launcher is its main process: stopping the unit of an IDE or
    a CI runner would end that, and starting it again would never start the job.
    """
    unit, user_unit = units_of(cgroup)
    if unit is not None and unit in own_cgroup:
        unit = None  # the unit that runs the runner too is no job's own
    name = unit or user_unit
    if name is None:
        return None, None, _nursery_above(pid, table)
    if _is_main(pid, table, cgroup, unit):
        return unit, user_unit, None
    return None, None, "unit " + name


def _nursery_above(pid, table):
    above = table[pid][1] if pid in table else 0
    return nursery_of(above) if above > 1 else None


def _is_main(pid, table, cgroup, unit):
    chain = {pid}
    above = table[pid][1] if pid in table else 0
    while names_of(above) & PASSAGES:  # ExecStart=sudo -u alice torchrun …
        chain.add(above)
        above = table[above][1] if above in table else 0
    main = units.main_pid(unit) if unit else None
    return main in chain if main else _only_top(cgroup, table) in chain


def _only_top(cgroup, table):
    """The process of a unit that its manager started, where there is exactly one; else None."""
    ours = units_of(cgroup)
    members = {pid for pid in table if table[pid][0] not in "ZX" and units_of(cgroup_of(pid)) == ours}
    tops = [pid for pid in members if table[pid][1] not in members]
    if len(tops) != 1:
        return None
    above = table[tops[0]][1]
    return tops[0] if above == 1 or comm_of(above) == "systemd" else None


def in_container(pid, cgroup, own_cgroup):
    """Whether a process lives in a container that this runner is not in itself."""
    match = CONTAINER.search(cgroup)
    if match and match.group(0) not in own_cgroup:
        return True
    space = link(pid, "ns/pid")
    if space is not None and space != link(os.getpid(), "ns/pid"):
        return True
    try:
        root, ours = os.stat("/proc/%d/root" % pid), os.stat("/")
    except OSError:
        return False
    return (root.st_dev, root.st_ino) != (ours.st_dev, ours.st_ino)


# -- all of them --------------------------------------------------------------------------------


def shown(argv, environ=None):
    """An argv as it may be shown: cut, and without secrets, those that `environ` holds included."""
    argv = masking.masked_argv(argv[:ITEMS], masking.values_of(environ))
    return [one if len(one) <= LENGTH else one[: LENGTH - 1] + "…" for one in argv]


def shown_of(pid):
    """The argv of a process as it may be shown."""
    return shown(argv_of(pid), environ_of(pid))


def survey():
    """(complete, [holder]) of every process that holds a GPU. Not complete: some were closed to us.

    Under hidepid the processes of others are not even listed: init's own is among them.
    """
    table, own = all_processes(), ancestors()
    own_cgroup = cgroup_of(os.getpid())
    kernel = 2 if comm_of(2) == "kthreadd" else -1
    complete, found = os.geteuid() == 0 or 1 in table, []
    for pid in sorted(table):
        if pid in own or table[pid][0] in "ZX" or kernel in (pid, table[pid][1]):
            continue
        try:
            (gpus, memory), maps = devices_of(pid), _maps(pid)
        except PermissionError:
            complete = False
            continue
        except OSError:
            continue
        if not gpus and b"/libcuda.so" not in maps:
            continue  # nearly all processes of a host: taking their maps apart would cost seconds
        maps = _mapped_in(maps)
        driver = any(CUDA_DRIVER.search(path) for path in maps)
        if (gpus or driver) and not is_allowed(pid):
            one = _holder(pid, table, own, own_cgroup, gpus, maps)
            found.append(dict(one, computes=memory or driver))
    return complete, [one for one in found if one["uid"] is not None]


def _holder(pid, table, own, own_cgroup, gpus, maps):
    top, above = launcher_of(pid, table, own)
    cgroup, uid = cgroup_of(pid), uid_of(pid)
    unit, user_unit = units_of(cgroup)
    return {
        "pid": pid,
        "start": table[pid][2],
        "ppid": table[pid][1],
        "uid": uid,
        "user": None if uid is None else user_name(uid),
        "exe": link(pid, "exe"),
        "comm": comm_of(pid),
        "argv": shown_of(pid),
        "cwd": link(pid, "cwd"),
        "cgroup": cgroup[:LENGTH],
        "gpus": sorted(gpus),
        "environment": environment_in(maps),
        "launcher": {"pid": top, "start": table[top][2], "argv": shown_of(top)},
        "above": {"pid": above, "names": sorted(names_of(above)), "argv": shown_of(above)},
        "scheduler": scheduler_of(cgroup, environ_of(pid)),
        "unit": unit,
        "user_unit": user_unit,
        "container": in_container(pid, cgroup, own_cgroup),
    }


@read
def holders(ctx):
    """Every process that holds a GPU, allow-listed services left out, monitors not (`computes` is false).

    {"complete": whether every process could be looked at, "left_out": how many did not fit,
    "processes": [{pid, start, ppid, uid, user, exe, comm, argv, cwd, cgroup, gpus, environment,
    launcher, above, scheduler, unit, user_unit, container, computes}]}
    """
    complete, found = survey()
    kept = list(found)
    if _too_big(kept):
        kept = [dict(one, argv=one["argv"][:3], cgroup="") for one in kept]
    while _too_big(kept):
        kept = kept[: len(kept) * 3 // 4]
    return {"complete": complete, "processes": kept, "left_out": len(found) - len(kept)}


def _too_big(found):
    return len(json.dumps(found)) > REPLY


def jobs_here():
    """(complete, [job]): see `jobs_of`."""
    complete, found = survey()
    return complete, jobs_of(found)


def monitors_in(found):
    """The holders of a survey that only watch GPUs, and belong to no job."""
    busy = {one["launcher"]["pid"] for one in found if one["computes"]}
    return [one for one in found if one["launcher"]["pid"] not in busy]


def jobs_of(found):
    """[job] of the holders of a survey by their top launcher, oldest first; monitors are no jobs.

    A job: {pid, start, uid, user, argv, cwd, environments, gpus, holders: [[pid, start]], above,
    scheduler, unit, user_unit, inside (what it only runs inside of), container, supervisor, orphan}.
    `argv` is whole here.
    """
    jobs, busy = {}, {one["launcher"]["pid"] for one in found if one["computes"]}
    for one in found:
        if one["launcher"]["pid"] not in busy:
            continue
        jobs.setdefault(one["launcher"]["pid"], []).append(one)
    table, own_cgroup = all_processes(), cgroup_of(os.getpid())
    listed = [_job(pid, members, table, own_cgroup) for pid, members in sorted(jobs.items())]
    live = {(job["uid"], tuple(job["argv"])) for job in listed if not _left_behind(job)}
    for job in listed:
        job["orphan"] = _left_behind(job) and (
            _is_worker(job["pid"], job["argv"]) or (job["uid"], tuple(job["argv"])) in live
        )
    return sorted(listed, key=lambda job: (job["start"], job["pid"]))


def _job(pid, members, table, own_cgroup):
    first = members[0]
    uid = uid_of(pid)
    uid = first["uid"] if uid is None else uid
    above = first["above"]
    supervised = bool(set(above["names"]) & SUPERVISORS)
    unit, user_unit, inside = placed(pid, table, cgroup_of(pid), own_cgroup)

    def said(field):
        return next((one[field] for one in members if one[field]), None)

    return {
        "pid": pid,
        "start": first["launcher"]["start"],
        "uid": uid,
        "user": user_name(uid),
        "argv": argv_of(pid) or first["launcher"]["argv"],
        "cwd": link(pid, "cwd"),
        "environments": sorted({one["environment"] for one in members if one["environment"]}),
        # A helper of the job that reads counters has all GPUs open, also those of others.
        "gpus": sorted({gpu for one in members if one["computes"] for gpu in one["gpus"]}),
        "holders": [[one["pid"], one["start"]] for one in members],
        "above": above,
        "scheduler": said("scheduler"),
        "unit": unit,
        "user_unit": user_unit,
        "inside": inside,
        "container": any(one["container"] for one in members),
        "supervisor": above if supervised else None,
    }


def _left_behind(job):
    """Whether the process that forked this one is gone: it leads no group, and its leader is dead."""
    leader = group_of(job["pid"])
    if leader == job["pid"]:
        return False
    stat = stat_of(leader)
    return stat is None or stat[0] in "ZX"


def _is_worker(pid, argv):
    return comm_of(pid).startswith("pt_data_worker") or any("multiprocessing" in one for one in argv)


def scheduler_daemons():
    """Names of schedulers whose daemon runs here as root: their jobs come back unasked."""
    found = set()
    for pid in all_processes():
        name = SCHEDULER_DAEMONS.get(comm_of(pid))
        if name and uid_of(pid) == 0:
            found.add(name)
    return sorted(found)
