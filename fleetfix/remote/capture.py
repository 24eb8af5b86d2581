"""What is kept of a job before it is stopped, so that it can be started exactly as it ran.

A capture holds the job's whole environment, secrets included: it stays on the host, 0600, in the
run's folder, and is dropped after success, and after an undo that brought the jobs back. A host that
ended unproven or failed keeps it, for the undo that may still come starts the jobs from it.
"""

import json
import os
import re
import resource
import stat

from fleetfix.remote import masking, plain, procs, spans
from fleetfix.remote.api import Refusal, alive, write_durably

LIMITS = {
    name[len("RLIMIT_") :].lower(): getattr(resource, name)
    for name in dir(resource)
    if name.startswith("RLIMIT_") and name not in ("RLIMIT_OFILE",)
}
# Given to each worker by its agent; wrong for a process that is started without one.
PER_RANK = re.compile(
    r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|ROLE_.*|TORCHELASTIC_.*)$"
)
# What differs with the session or the start that a process came from, and not with what it does.
OF_SESSION = re.compile(
    r"^(_|SHLVL|PWD|OLDPWD|TERM|TERM_.*|COLUMNS|LINES|SSH_.*|XDG_.*|TMUX.*|STY|WINDOW|WINDOWID|DBUS_.*|DISPLAY"
    r"|LS_COLORS|SUDO_.*|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_.*|NOTIFY_SOCKET|WATCHDOG_.*|LISTEN_.*|MANAGERPID)$"
)
# Which of several equal processes it is: what it may use, and which rank it has.
SELECTS = re.compile(
    r"^(CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|.*_RANK|SLURM_PROCID)$|" + PER_RANK.pattern
)
KEPT_IGNORED = (1, 2, 3)  # HUP (nohup), INT and QUIT (a background job of a script)
TAIL = 256 * 1024
STEP = re.compile(
    r"""(?:^|[\s,{"'\[(])(?:step|iter|iteration|global_step)["']?\s*[:=]?\s*([0-9][0-9,]*)""", re.I
)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


# -- the files ----------------------------------------------------------------------------------


def path_of(ctx, step):
    """Where the capture of a step lies in this run."""
    return os.path.join(ctx.state, "job", step + ".json")


def of_step(ctx, step):
    """{"jobs": [...], "boot"} that this run captured in a step, or None."""
    return _load(path_of(ctx, step)) if ctx.state else None


def of_run(ctx):
    """[(step, capture)] of everything this run has captured."""
    folder = os.path.join(ctx.state, "job") if ctx.state else ""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    steps = [name[: -len(".json")] for name in names if name.endswith(".json") and not is_record(name)]
    return [(step, found) for step in steps for found in (_load(path_of(ctx, step)),) if found]


def left_by(ctx, run):
    """The newest capture of jobs that another run left on this host, or None; `run` is its id or "last".

    {"run", "step", "jobs", ...}. It was kept because its jobs were not started again since.
    """
    runs, newest = os.path.join(ctx.home, "runs"), None
    for name in sorted(os.listdir(runs)) if os.path.isdir(runs) else ():
        folder = os.path.join(runs, name, "job")
        if name == ctx.run_id or run not in ("last", name) or not os.path.isdir(folder):
            continue
        for file in sorted(os.listdir(folder)):
            path = os.path.join(folder, file)
            found = _load(path) if file.endswith(".json") and not is_record(file) else None
            if found and found["jobs"]:
                at = os.stat(path).st_mtime
                if newest is None or at >= newest[0]:
                    newest = at, dict(found, run=name, step=file[: -len(".json")])
    if newest is None:
        return None
    boot = newest[1]["boot"]
    return dict(newest[1], jobs=[dict(job, boot=boot) for job in newest[1]["jobs"]])


def path_left(ctx, run, step):
    """Where the capture of a step of another run lies."""
    return os.path.join(ctx.home, "runs", os.path.basename(run), "job", os.path.basename(step) + ".json")


def secrets_of_run(ctx):
    """The values of the secret-looking variables of everything this run has captured."""
    entries = [entry for _, found in of_run(ctx) for entry in found["jobs"]]
    return [value for entry in entries for value in masking.values_of(entry["environ"])]


def is_record(name):
    """Whether a file of the folder `job` is a start record or a marker, no capture."""
    return name.startswith(("started", "from-zero"))


def save(ctx, step, jobs, orphans=()):
    """Keep a capture durably, readable by its owner alone, before this returns."""
    os.makedirs(os.path.dirname(path_of(ctx, step)), mode=0o700, exist_ok=True)
    content = {"jobs": jobs, "orphans": list(orphans), "boot": boot_id()}
    write_durably(path_of(ctx, step), json.dumps(content).encode())


def _load(path):
    try:
        with open(path, "rb") as file:
            return json.loads(file.read())
    except FileNotFoundError:
        return None


def boot_id():
    """The id of this boot: pids and start times mean nothing in another."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


# -- the process --------------------------------------------------------------------------------


def take(job):
    """Everything needed to start a job (of `procs.jobs_here`) again as it was. Refuses half a truth."""
    entry = look(job)
    if entry is None:
        raise Refusal("stale_plan", "job %d ended by itself before it was stopped" % job["pid"])
    if not entry["environ"] or not entry["program"] or entry["cwd"] is None:
        raise Refusal(
            "blocked", "how job %d was started cannot be read" % job["pid"], "it may have renamed itself"
        )
    return entry


def look(job):
    """What can be read of a job now, None where it cannot; None as a whole when the job is gone."""
    pid, status = job["pid"], procs.status_of(job["pid"])
    environ = procs.environ_of(pid)
    argv = procs.argv_of(pid)
    log = log_of([member for member, _ in job["holders"]] + [pid])
    entry = {
        "pid": pid,
        "start": job["start"],
        "argv": argv,
        "program": program_of(pid, argv, environ or {}),
        "cwd": procs.link(pid, "cwd"),
        "environ": without_rank(environ),
        "ignored": [one for one in KEPT_IGNORED if int(status.get("SigIgn", "0"), 16) >> (one - 1) & 1],
        "stdio": [stdio_of(pid, fd) for fd in (0, 1, 2)],
        "environment": job["environments"][0] if job["environments"] else None,
        "gpus": job["gpus"],
        "unit": job["unit"],
        "span": spans.of_job(job),
        "log": log,
        "steps_seen": last_step(log),
    }
    try:
        entry.update(_rights(pid, status))
    except (OSError, KeyError):
        return None
    return entry if alive(pid, job["start"]) else None


def _rights(pid, status):
    return {
        "uid": int(status["Uid"].split()[1]),
        "gid": int(status["Gid"].split()[1]),
        "groups": [int(one) for one in status["Groups"].split()],
        "limits": limits_of(pid),
        "umask": int(status["Umask"], 8),
        "affinity": sorted(os.sched_getaffinity(pid)),
        "nice": os.getpriority(os.PRIO_PROCESS, pid),
        "oom": int(procs.slurp(pid, "oom_score_adj") or 0),
    }


def without_rank(environ):
    """An environment without what an agent gives to each of its workers, where there was an agent."""
    if not environ or "TORCHELASTIC_RUN_ID" not in environ:
        return environ
    return {name: value for name, value in environ.items() if not PER_RANK.match(name)}


def same_environ(one, other, whole):
    """Whether two environments are of one job: `whole`, or only in what tells it from its like."""
    chosen = [
        {k: v for k, v in each.items() if (not OF_SESSION.match(k) if whole else SELECTS.match(k))}
        for each in (one, other)
    ]
    return chosen[0] == chosen[1]


def look_alike(one, other):
    """Whether two entries are of one user's one command in one folder and of one unit."""
    return all(one[name] == other[name] for name in ("uid", "argv", "cwd", "unit"))


def program_of(pid, argv, environ):
    """The path to execute: what argv[0] means there, when it is the program that really runs.

    None when the process has overwritten its command line. The path matters and not only the file: a
    venv's `python` is a link to a base interpreter, which finds the venv by the link's own place.
    """
    exe = procs.link(pid, "exe")
    if not argv or exe is None:
        return None
    cwd = procs.link(pid, "cwd") or "/"
    folders = [""] if "/" in argv[0] else environ.get("PATH", "/usr/bin:/bin").split(":")
    choices = [os.path.join(cwd, folder, argv[0]) for folder in folders]
    environment = procs.environment_of(pid)
    if environment:
        choices += [os.path.join(environment, "bin", name) for name in ("python", "python3")]
    for choice in choices:
        try:
            if os.path.samestat(os.stat(choice), os.stat("/proc/%d/exe" % pid)):
                return choice
        except OSError:
            continue
    if len(argv) == 1 and (" " in argv[0] or "::" in argv[0]):
        return None
    return procs.undeleted(exe)


def limits_of(pid):
    """{name: [soft, hard]} of every resource limit; -1 is unlimited."""
    found = {}
    for name, number in LIMITS.items():
        try:
            found[name] = list(resource.prlimit(pid, number))
        except (OSError, ValueError):
            continue
    return found


def stdio_of(pid, fd):
    """{fd, target, flags, kind} of a standard stream: what it leads to and how it was opened."""
    target = procs.link(pid, "fd/%d" % fd)
    if target is None:
        return {"fd": fd, "target": None, "flags": 0, "kind": "closed"}
    fields = dict(
        line.split(":", 1)
        for line in procs.slurp(pid, "fdinfo/%d" % fd).decode().splitlines()
        if ":" in line
    )
    flags = int(fields.get("flags", "0").strip(), 8)
    return {"fd": fd, "target": procs.undeleted(target), "flags": flags, "kind": _kind(pid, fd, target)}


def _kind(pid, fd, target):
    try:
        mode = os.stat("/proc/%d/fd/%d" % (pid, fd)).st_mode
    except OSError:
        return "other"
    if target == "/dev/null":
        return "null"
    if stat.S_ISREG(mode):
        return "file" if target.startswith("/") else "other"
    if stat.S_ISFIFO(mode):
        return "pipe"
    if stat.S_ISCHR(mode):
        return "tty" if target.startswith(("/dev/pts/", "/dev/tty", "/dev/console")) else "other"
    return "other"


# -- the log ------------------------------------------------------------------------------------


def log_of(pids):
    """The regular file that the first of these processes writes its output to, or None.

    Behind a pipe: the file that `tee` at its other end writes.
    """
    for pid in pids:
        for fd in (1, 2):
            stream = stdio_of(pid, fd)
            if stream["kind"] == "file":
                return stream["target"]
    for pid in pids:
        stream = stdio_of(pid, 1)
        if stream["kind"] == "pipe":
            return _behind(stream["target"])
    return None


def _behind(pipe):
    for name in os.listdir("/proc"):
        if not name.isdigit() or procs.comm_of(int(name)) != "tee":
            continue
        if procs.link(int(name), "fd/0") == pipe:
            for fd in range(3, 10):
                stream = stdio_of(int(name), fd)
                if stream["kind"] == "file":
                    return stream["target"]
    return None


def read_log(path, offset=0, most=TAIL, tail=True):
    """Up to `most` bytes of a log from `offset` (its end with `tail`) as lines; [] when unreadable."""
    try:
        file = plain.file(path)
    except OSError:
        return []
    with file:
        status = os.fstat(file.fileno())
        start = offset if status.st_size >= offset else 0
        file.seek(max(start, status.st_size - most) if tail else start)
        text = file.read(most).decode("utf-8", "replace")
    return [ESCAPES.sub("", line) for line in re.split(r"[\r\n]+", text) if line.strip()]


def steps_in(lines):
    """Every step counter that lines of a training log show, in order."""
    found = []
    for line in lines:
        match = STEP.search(line)
        if match:
            found.append(int(match.group(1).replace(",", "") or 0))
    return found


def last_step(log):
    """The last step counter in a log, or None."""
    steps = steps_in(read_log(log)) if log else []
    return steps[-1] if steps else None


def first_step(log, offset):
    """Where the steps in a log begin from `offset` on: the highest of the first three, or None.

    One counter alone may be something else (a configuration, a warm-up): two are wanted.
    """
    steps = steps_in(read_log(log, offset, tail=False))[:3] if log else []
    return max(steps) if len(steps) > 1 else None
