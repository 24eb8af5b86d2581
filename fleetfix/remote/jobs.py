"""The training job of this host: which it is, where it logs, and what became of it."""

import hashlib
import json
import os

from fleetfix.remote import capture, ending, launch, plain, procs, spans, units
from fleetfix.remote.api import Refusal, all_processes, descendants, read, stat_of, user_name

WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
CONFIGS = (".toml", ".yaml", ".yml", ".json")
FROM_ZERO = "from-zero.json"


# -- helpers for other host modules ---------------------------------------------------------------


def capture_path(ctx, step):
    """Where the capture of a step lies in this run."""
    return capture.path_of(ctx, step)


def captured(ctx, step):
    """{"jobs": [...], "orphans", "boot"} that a step of this run captured before it stopped them."""
    return capture.of_step(ctx, step)


def current(ctx):
    """The live job with the fields of a capture's entry (None where one cannot be read), or None.

    What this run started comes first, else any GPU job; of several the one with most GPUs.
    """
    job = live_job(ctx)
    return capture.look(job) if job else None


def job_environ(ctx, step):
    """(uid, {name: value}) that the live job started with, else that of this run's capture, or None."""
    job = current(ctx)
    if job and job["environ"]:
        return job["uid"], job["environ"]
    found = captured(ctx, step)
    jobs = found["jobs"] if found else []
    return (jobs[0]["uid"], jobs[0]["environ"]) if jobs else None


def log_of_job(ctx):
    """Where the live job logs and where in it this start's output begins, or None.

    {"path", "offset" (bytes), "pid", "start", "uid", "key": what decides its speed, "seconds": its age,
    "first_step", "steps_seen": of a job that this run has started and that is to resume, else None}.
    """
    job = current(ctx)
    if job is None:
        return None
    record = _record_of(ctx, job["pid"], job["start"])
    path = job["log"] or (record["log"] if record else None)
    if path is None:
        return None
    offset = record["offset"] if record and record["log"] == path else 0
    return {
        "path": path,
        "offset": offset if offset <= launch.size(path) else 0,
        "pid": job["pid"],
        "start": job["start"],
        "uid": job["uid"],
        "key": key_of(ctx, job["argv"], job["cwd"], job["uid"], path),
        "seconds": age_of(job["start"]),
        **_resumed(ctx, job),
    }


def _resumed(ctx, job):
    for record in records(ctx):
        if record.get("guard") and (record["pid"], record["start"]) == (job["pid"], job["start"]):
            first = capture.first_step(record["log"], record["offset"])
            return {"first_step": first, "steps_seen": record["steps_seen"]}
    return {"first_step": None, "steps_seen": None}


def key_of(ctx, argv, cwd, uid, log):
    """A digest of what decides a job's speed: its command without its log's path, and its configs."""
    words = [one for one in argv if log not in one and os.path.basename(log) != one]
    files = [os.path.join(cwd or "/", one.split("=", 1)[-1]) for one in words]
    configs = [path for path in files if path.endswith(CONFIGS)]
    try:
        digests = ctx.as_user(uid, _digests, configs) if configs else []
    except (Refusal, OSError):
        digests = []
    return hashlib.sha256(json.dumps([words, digests]).encode()).hexdigest()[:16]


def _digests(paths):
    found = []
    for path in paths:
        try:
            with plain.file(path) as file:
                found.append(hashlib.sha256(file.read(1 << 20)).hexdigest())
        except OSError:
            continue
    return found


def age_of(start):
    """Seconds since a start time of /proc/PID/stat."""
    with open("/proc/uptime") as file:
        return float(file.read().split()[0]) - start / os.sysconf("SC_CLK_TCK")


def live_job(ctx):
    """The live job as `procs.jobs_here` gives it, or None: see `current`."""
    _, jobs = procs.jobs_here()
    jobs = [job for job in jobs if not job["orphan"]]
    ours = [one for one in records(ctx) if launch.runs(one)]
    found = [job for job in jobs if any(_is_of(record, job) for record in ours)]
    if found:
        return max(found, key=_standing)
    if ours:
        return as_job(ours[0]["pid"], ours[0]["start"])
    mine = [job for job in jobs if not job["container"]]
    return max(mine, key=_standing) if mine else None


def _is_of(record, job):
    """Whether a job is what a start record of this run tells of."""
    if [record["pid"], record["start"]] in [[job["pid"], job["start"]], *job["holders"]]:
        return True
    # A unit's main process may be a sudo above the launcher.
    return bool(record.get("unit")) and job["pid"] in dict(descendants(record["pid"]))


def _standing(job):
    """Of several jobs the one with most GPUs is the host's job, before and after it was stopped."""
    return len(job["gpus"]), -job["pid"]


def as_job(pid, start):
    """A live process as a job of `procs.jobs_here`, also where it holds no GPU (yet, or any more)."""
    uid = procs.uid_of(pid)
    tree = [pid] + [one for one, _ in ending.tree_of({"pid": pid, "start": start, "holders": []})]
    environments = {path for path in (procs.environment_of(one) for one in tree) if path}
    table, own_cgroup = all_processes(), procs.cgroup_of(os.getpid())
    unit, user_unit, inside = procs.placed(pid, table, procs.cgroup_of(pid), own_cgroup)
    return {
        "pid": pid,
        "start": start,
        "uid": uid,
        "user": None if uid is None else user_name(uid),
        "argv": procs.argv_of(pid),
        "cwd": procs.link(pid, "cwd"),
        "environments": sorted(environments),
        "gpus": [],
        "holders": [],
        "unit": unit,
        "user_unit": user_unit,
        "inside": inside,
        "container": False,
        "orphan": False,
    }


def records(ctx):
    """The start records of this run."""
    return launch.records_in(os.path.join(ctx.state, "job")) if ctx.state else []


def _record_of(ctx, pid, start):
    """The start record of a process, of this run or an earlier one."""
    runs = os.path.join(ctx.home, "runs")
    folders = [os.path.join(runs, run, "job") for run in _names(runs)]
    if ctx.state:
        folders.append(os.path.join(ctx.state, "job"))
    for folder in folders:
        for record in launch.records_in(folder):
            if (record["pid"], record["start"]) == (pid, start) and launch.runs(record):
                return record
    return None


def _names(folder):
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


# -- questions ------------------------------------------------------------------------------------


@read
def found(ctx):
    """The GPU jobs of this host, reduced: {"complete", "jobs": [...], "left_out", "schedulers",
    "monitors"}; these, {pid, user, argv}, have GPUs open and compute nothing.

    Of each job: pid, start, uid, user, argv (cut), environments, gpus, holders (how many), orphan,
    scheduler, unit, user_unit, inside, supervisor, container, and what stands against starting it again:
    unreadable, cwd_gone, rank_of (workers whose agent is gone), uv_run, runner (it holds this session).
    span: see `spans.of_job`.
    """
    complete, holders = procs.survey()
    jobs, own = procs.jobs_of(holders), procs.ancestors()
    watching = [{name: one[name] for name in ("pid", "user")} for one in procs.monitors_in(holders)]
    return {
        "complete": complete,
        "jobs": [_reduced(job, own) for job in jobs[:40]],
        "left_out": max(len(jobs) - 40, 0),
        "schedulers": procs.scheduler_daemons(),
        "monitors": [dict(one, argv=procs.shown_of(one["pid"])[:4]) for one in watching[:10]],
    }


def _reduced(job, own):
    environ = procs.environ_of(job["pid"])
    tree = ending.tree_of(job)
    kept = ("pid", "start", "uid", "user", "environments", "gpus", "orphan", "scheduler", "unit")
    reduced = {name: job[name] for name in (*kept, "user_unit", "inside", "container")}
    reduced.update(
        argv=procs.shown(job["argv"], environ)[:8],
        holders=len(job["holders"]),
        processes=len(tree),
        supervisor=" ".join(job["supervisor"]["argv"])[:80] if job["supervisor"] else None,
        shell=job["above"]["pid"] if procs.interactive_shell(job["above"]["argv"]) else None,
        unreadable=not environ or not capture.program_of(job["pid"], job["argv"], environ),
        cwd_gone=(job["cwd"] or "").endswith(" (deleted)"),
        rank_of=rank_of(job, environ or {}),
        uv_run=_uv_run(tree, environ or {}),
        span=spans.of_job(job),
        runner=any(pid in own for pid, _ in tree),
    )
    return reduced


def rank_of(job, environ):
    """World size of a job that is one of its workers, with no agent above it; else None.

    One that torchrun started (its launcher is gone), or one that was started by hand as a rank: it holds
    the GPU itself. A torchrun that is given WORLD_SIZE holds none.
    """
    sizes = [environ[name] for name in WORLD_SIZES if environ.get(name, "").isdigit()]
    size = int(sizes[0]) if sizes else 1
    if "TORCHELASTIC_RUN_ID" in environ:
        return size
    worker = not job["holders"] or job["pid"] in dict(job["holders"])
    return size if worker and size > 1 else None


def _uv_run(tree, environ):
    """The `uv run` in a job that would install again what its lock file says, or None.

    It re-syncs the environment before it starts the program, unless told not to.
    """
    if environ.get("UV_NO_SYNC", "") not in ("", "0", "false"):
        return None
    for pid, _ in tree:
        argv = procs.argv_of(pid)
        runs = argv and os.path.basename(argv[0]) == "uv" and "run" in argv[1:]
        if runs and not {"--no-sync", "--no-project"} & set(argv):
            return " ".join(procs.shown(argv, environ))[:120]
    return None


@read
def state(ctx, step, run=None):
    """What became of the jobs captured in `step`, and of what this run started.

    With `run`, where this run has captured none: of those that the other run ("last": any) left stopped,
    and "left" is {run, step} then.

    {"captured": [{argv, user, alive, unit, steps_seen, span}], "orphans",
    "current": {pid, argv, user} | None,
    "started": [{pid, alive, log, first_step, steps_seen, notes}], "from_zero": what was stopped | None}
    """
    entries = captured(ctx, step) or {"jobs": [], "orphans": []}
    left = capture.left_by(ctx, run) if run is not None and not entries["jobs"] else None
    entries = left or entries
    live = live_job(ctx)
    here = {"pid": live["pid"], "argv": procs.shown_of(live["pid"])[:8]} if live else None
    return {
        "captured": _fates(ctx, entries["jobs"]),
        "left": {"run": left["run"], "step": left["step"]} if left else None,
        "orphans": len(entries["orphans"]),
        "current": here,
        "started": [_progress(record) for record in records(ctx)],
        "from_zero": stopped_from_zero(ctx),
    }


def _fates(ctx, entries):
    taken, fates = set(), []
    for index, entry in enumerate(entries):
        if ctx.state:
            launch.wait_for_starter(os.path.join(ctx.state, "job"), index)
        found = running(ctx, index, entries, taken)
        taken.update(found[:1] if found else ())
        fates.append(
            {
                "argv": procs.shown(entry["argv"], entry["environ"])[:8],
                "user": user_name(entry["uid"]),
                "alive": found is not None,
                "unit": entry["unit"],
                "steps_seen": entry["steps_seen"],
                "span": entry.get("span"),
            }
        )
    return fates


def _progress(record):
    return {
        "pid": record["pid"],
        "alive": launch.runs(record),
        "log": record["log"],
        "first_step": capture.first_step(record["log"], record["offset"]),
        "steps_seen": record.get("steps_seen"),
    }


def stopped_from_zero(ctx):
    """{"first", "seen"} of a job that this run stopped because it began from step 0, or None."""
    return launch.load(os.path.join(ctx.state, "job", FROM_ZERO)) if ctx.state else None


def running(ctx, index, entries, taken=()):
    """(pid, start) of the process that is the job with this number now, whoever started it, or None.

    `taken` are pids that were found to be earlier ones of these entries.
    """
    entry = entries[index]
    known = [_known(ctx, number, one) for number, one in enumerate(entries)]
    if known[index]:
        return known[index]
    main = units.main_pid(entry["unit"]) if entry["unit"] else None
    if main and stat_of(main):
        return main, stat_of(main)[2]
    others = {*taken, *(one[0] for one in known if one)}
    twins = sum(capture.look_alike(entry, one) for one in entries) > 1
    for pid in sorted(ending.pids() - others):
        if _is_it(pid, entry, twins):
            return pid, (stat_of(pid) or (None, 0, 0))[2]
    return None


def _known(ctx, index, entry):
    record = launch.record_of(os.path.join(ctx.state, "job"), index) if ctx.state else None
    for one in (record, entry):
        if one and one.get("pid") and launch.runs(one):
            return one["pid"], one["start"]
    return None


def _is_it(pid, entry, twins):
    """Whether a process is this job; where it has `twins`, in every variable, else it may be another's."""
    if procs.argv_of(pid) != entry["argv"] or procs.uid_of(pid) != entry["uid"]:
        return False
    environ = capture.without_rank(procs.environ_of(pid)) or entry["environ"]
    same = capture.same_environ(environ, entry["environ"], twins)
    stat = stat_of(pid)
    return same and procs.link(pid, "cwd") == entry["cwd"] and stat is not None and stat[0] not in "ZX"
