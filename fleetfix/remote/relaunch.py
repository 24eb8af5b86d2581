"""Stop the training job so that it can run again exactly as it ran, and start it again, once."""

import json
import os
import pwd
import time

from fleetfix.remote import capture, ending, jobs, launch, masking, procs, units
from fleetfix.remote.api import (
    Refusal,
    alive,
    all_processes,
    descendants,
    stat_of,
    user_environment,
    write,
    write_durably,
)

DYING = 10.0  # seconds that a job may take to end after the part of it on another host has
WATCH_RESTORED = 60.0  # seconds that a job brought back by undo may take to show which step it begins at


@write
def prepare(ctx, targets):
    """Capture these jobs ([{pid, start}]), durably, and stop nothing.

    For a job that spans hosts: the others' processes end by themselves when one host's are stopped.
    Refuses with `stale_plan` where one has ended.
    """
    found = _targets(targets)
    if len(found) < len(targets):
        raise Refusal("stale_plan", "the job ended by itself before it was captured")
    _refuse_unfit(found)
    entries = [capture.take(job) for job in found if not job["orphan"]]
    capture.save(ctx, ctx.step, _merged(ctx, entries), [job["pid"] for job in found if job["orphan"]])
    write_durably(_prepared(ctx), b"{}")
    return {"captured": [job["pid"] for job in found]}


def _prepared(ctx):
    """The file that says that whoever undoes `prepare` starts the jobs again, on all hosts at once."""
    return os.path.join(ctx.state, "job", "prepared-%s" % ctx.step)


@write
def unprepare(ctx):
    """Undo `prepare`: the jobs run, and the capture is dropped. Those of hosts that were stopped took ours
    along, also where nobody stopped it here: one that runs still may be about to end."""
    found = capture.of_step(ctx, ctx.step)
    if found:
        until = time.monotonic() + min(DYING, ctx.remaining())
        while time.monotonic() < until and _all_run(ctx, found["jobs"]):
            time.sleep(0.1)
    answer = _bring_back(ctx, found["jobs"]) if found else {"started": []}
    _unlink(_prepared(ctx))
    return answer


def _all_run(ctx, entries):
    return all(jobs.running(ctx, index, entries, []) for index in range(len(entries)))


@write
def stop(ctx, targets, grace):
    """Capture these jobs ([{pid, start}]), then end them with all their processes within `grace` seconds.

    The capture is durable before the first signal. A job of a systemd unit is stopped by its unit. One
    that was captured before may have ended meanwhile.
    Refuses with `hung` where something cannot be ended, `command` where something starts it again.
    """
    targets = _targets(targets)
    known = {(one["pid"], one["start"]) for one in (capture.of_step(ctx, ctx.step) or {"jobs": []})["jobs"]}
    _refuse_unfit([job for job in targets if (job["pid"], job["start"]) not in known])
    entries = [
        capture.take(job)
        for job in targets
        if not job["orphan"] and (job["pid"], job["start"]) not in known
    ]
    trees = [[job["pid"], job["start"], ending.tree_of(job), job["unit"]] for job in targets]
    own = procs.ancestors()
    if any(pid in own for _, _, tree, _ in trees for pid, _ in tree):
        raise Refusal("blocked", "this session runs inside the job that is to be stopped")
    faces = [[procs.uid_of(pid), procs.argv_of(pid)] for job in targets for pid in _seen_of(job)]
    capture.save(ctx, ctx.step, _merged(ctx, entries), [job["pid"] for job in targets if job["orphan"]])
    ctx.remember("signalled", {"trees": trees, "grace": grace})
    before = all_processes()
    killed = _end_all(ctx, trees, grace)
    ending.watch_for_return(
        [face for face in faces if face[1]], before, min(ending.RESPAWN_WATCH, ctx.remaining())
    )
    return {"stopped": [job["pid"] for job in targets], "killed": killed}


def _refuse_unfit(targets):
    """What a plan has blocked is refused here too: a job may have come to it since."""
    for job in targets:
        if job["inside"] and not job["orphan"]:
            raise Refusal(
                "blocked",
                "%s's job %d runs inside %s" % (job["user"], job["pid"], job["inside"]),
                "end it there, or start it apart from that",
            )
        _refuse_rank(job)


def _refuse_rank(job):
    size = jobs.rank_of(job, procs.environ_of(job["pid"]) or {})
    if size is not None and size > 1 and not job["orphan"]:
        raise Refusal(
            "blocked",
            "%s's job %d is one of %d workers, and no agent is above it" % (job["user"], job["pid"], size),
            "nothing would start them together again: end it by hand",
        )


def _targets(asked):
    wanted = {(job["pid"], job["start"]) for job in asked}
    _, here = procs.jobs_here()
    held = [job for job in here if (job["pid"], job["start"]) in wanted]
    seen = {(job["pid"], job["start"]) for job in held}
    return held + [jobs.as_job(*one) for one in sorted(wanted - seen) if alive(*one)]


def _seen_of(job):
    return [job["pid"], *(pid for pid, _ in job["holders"])]


def _merged(ctx, entries):
    """These entries after those of an earlier attempt; the same job stays as it was seen first.

    Within one attempt each process is a job of its own, however equal: ranks differ in a variable only.
    An earlier one is matched once, and first by its whole environment.
    """
    before = capture.of_step(ctx, ctx.step)
    kept = list(before["jobs"]) if before else []
    free, new = list(kept), list(entries)
    for whole in (True, False):
        new = [entry for entry in new if not _matched(entry, free, whole)]
    return kept + new


def _matched(entry, free, whole):
    for place, one in enumerate(free):
        alike = capture.look_alike(one, entry)
        if alike and capture.same_environ(one["environ"], entry["environ"], whole):
            del free[place]
            return True
    return False


def _end_all(ctx, trees, grace):
    killed = 0
    for pid, start, tree, unit in trees:
        if unit:
            _systemctl(ctx, "stop", unit, grace + 30)
        killed += ending.end((pid, start), tree, grace, ctx.say)
    return killed


def _systemctl(ctx, verb, unit, seconds, *options):
    ran = ctx.command(["systemctl", verb, *options, unit], timeout=seconds)
    if ran.exit != 0:
        why = (ran.errors or ran.text).strip().split("\n")[-1][:300]
        raise Refusal(
            "command", "systemctl %s %s: %s" % (verb, unit, masking.masked(why) or "no answer in time")
        )


@write
def restore(ctx):
    """Undo `stop`: the jobs it stopped run again, exactly as they ran; nothing where they still do.

    The capture is dropped once they all run: nothing needs it any more. One that begins from step 0 is
    stopped at once, as after any other start. Where `prepare` came before, to undo that starts
    them: then all hosts are as far.
    """
    begun = ctx.recall("signalled")
    entries = capture.of_step(ctx, ctx.step)
    if begun is None or entries is None:
        return {"started": []}
    # A kill in the middle leaves jobs that have been told to end: see that through first, or they
    # would count as running now and be gone in a moment.
    _end_all(
        ctx, [one for one in begun["trees"] if any(alive(*member) for member in one[2])], begun["grace"]
    )
    if os.path.exists(_prepared(ctx)):
        return {"started": []}
    return _bring_back(ctx, entries["jobs"])


def _lacks(ctx, committed):
    """A capture is dropped when its jobs run again, and when the run ended well: else it is missed."""
    if committed or capture.of_step(ctx, ctx.step) is not None or jobs.records(ctx):
        return None
    if ctx.recall("signalled") is None:
        return None
    return "what starts the job again is gone: %s" % capture.path_of(ctx, ctx.step)


restore.lacks = _lacks


def _bring_back(ctx, entries):
    answer = _start_all(ctx, entries, "restore", [], True)
    fresh = [one for one in jobs.records(ctx) if one["by"] == "restore" and one["pid"] in answer["started"]]
    _watch(ctx, fresh, WATCH_RESTORED, True)
    forget(ctx)
    return answer


def _refuse_from_zero(ctx):
    marker = jobs.stopped_from_zero(ctx)
    if marker:
        raise Refusal(
            "command",
            "the job is not started again: it began at step %(first)d instead of %(seen)d" % marker,
            "start it by hand from its checkpoint",
        )


@write
def start(ctx, step, described=None, extra=(), guard=True):
    """Start what `step` captured, or the job that is described, where it does not run; each once.

    `extra` is appended to the command (how this trainer is told to resume). `guard` is kept with it: it
    must not begin from step 0, which later checks look at too. Refuses with `command`
    where a job cannot be executed or ends at once, with the last lines of its log.
    """
    entries = capture.of_step(ctx, step)
    if entries and entries["jobs"]:
        wanted = entries["jobs"]
    elif described and jobs.live_job(ctx) is None:
        wanted = [_described(described)]
    else:
        wanted = []
    return _start_all(ctx, wanted, "start", list(extra), guard)


def _start_all(ctx, entries, by, extra, guard):
    started, already, notes = [], [], []
    for index, entry in enumerate(entries):

        def there(index=index):
            return jobs.running(ctx, index, entries, started + already)

        if entry["unit"]:
            found = there()
            if not found:
                _refuse_from_zero(ctx)
            (already if found else started).append(
                found[0] if found else _start_unit(ctx, index, entry, by, guard)
            )
            notes += [] if found else ["started by its unit " + entry["unit"]]
            continue
        if not there():
            _refuse_from_zero(ctx)
        entry = dict(entry, argv=entry["argv"] + extra)
        pid, fresh, said = launch.start(ctx, index, entry, by, there, guard)
        (started if fresh else already).append(pid)
        notes += said
    return {"started": started, "already": already, "notes": notes}


def _start_unit(ctx, index, entry, by, guard):
    """Start a job by its unit, and keep the same record of it as of one that we start ourselves."""
    unit = entry["unit"]
    # Before acting: whoever undoes this after a kill finds no record yet, and must know what it began.
    ctx.remember("units", sorted({*ctx.recall("units", ()), unit}))
    record = launch.new_record(ctx, entry, by, entry.get("log"), guard)
    _systemctl(ctx, "start", unit, 60)
    pid = units.main_pid(unit)
    stat = stat_of(pid) if pid else None
    if stat is None:
        raise Refusal(
            "command", "the unit %s was started and runs no process" % unit, "systemctl status " + unit
        )
    folder = os.path.join(ctx.state, "job")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    launch.keep_record(folder, index, dict(record, pid=pid, start=stat[2]))
    secrets = masking.values_of(entry["environ"])
    launch.see_it_live(ctx, launch.record_of(folder, index), ctx.remaining(launch.SETTLE), secrets)
    return pid


def _described(job):
    """A capture's entry for a job in the words of a playbook: argv or command, cwd, env, user, log."""
    argv = job.get("argv") or ["/bin/sh", "-c", job["command"]]
    cwd = job.get("cwd") or "/"
    if not os.path.isdir(cwd):
        raise Refusal("blocked", "the job's working directory %s does not exist" % cwd)
    account = _account(job.get("user"), os.stat(cwd).st_uid)
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "SHELL": account.pw_shell}
    environ.update(user_environment(account.pw_uid))
    environ.update({name: str(value) for name, value in (job.get("env") or {}).items()})
    log = job.get("log") or os.path.join(cwd, "fleetfix-job.log")
    out = {"target": log, "flags": os.O_WRONLY | os.O_APPEND, "kind": "file"}
    return {
        "argv": list(argv),
        "program": _which(argv[0], environ["PATH"], cwd),
        "cwd": cwd,
        "environ": environ,
        "uid": account.pw_uid,
        "gid": account.pw_gid,
        "groups": os.getgrouplist(account.pw_name, account.pw_gid),
        "limits": {},
        "umask": 0o022,
        "stdio": [{"fd": 0, "target": None, "flags": 0, "kind": "null"}, dict(out, fd=1), dict(out, fd=2)],
        "environment": None,
        "gpus": [],
        "unit": None,
        "log": log,
        "steps_seen": None,
    }


def _account(name, owner):
    try:
        return pwd.getpwnam(name) if name else pwd.getpwuid(owner if os.geteuid() == 0 else os.geteuid())
    except KeyError:
        raise Refusal("blocked", "there is no user %s on this host" % (name or owner)) from None


def _which(name, path, cwd):
    folders = [""] if "/" in name else path.split(":")
    for folder in folders:
        choice = os.path.join(cwd, folder, name)
        if os.access(choice, os.X_OK) and not os.path.isdir(choice):
            return choice
    raise Refusal("command", "the job's program %s is not there" % name, "PATH is " + path)


@write
def settle(ctx, seconds, guard=True):
    """Wait until what this run started is at work, and stop it at once if it begins from step 0.

    At work: it holds a GPU, and has logged a step where its log showed steps before. Silence for
    `seconds` is no error. Refuses with `verify_failed` when it began from zero, `command` when it died.
    """
    started = [one for one in jobs.records(ctx) if one["step"] == ctx.step and one["by"] == "start"]
    return _watch(ctx, started, seconds, guard)


def _watch(ctx, watched, seconds, guard):
    until = time.monotonic() + min(seconds, ctx.remaining() - 1)
    while True:
        waiting = [one for one in watched if not _at_work(ctx, one, guard)]
        if not waiting or time.monotonic() > until:
            return {"at_work": len(watched) - len(waiting), "waiting": len(waiting)}
        time.sleep(0.2)


def _at_work(ctx, record, guard):
    launch.see_it_live(ctx, record, 0.01, capture.secrets_of_run(ctx))
    seen, first = record.get("steps_seen"), capture.first_step(record["log"], record["offset"])
    if guard and from_zero(first, seen):
        _stop_from_zero(ctx, record, first, seen)
    if seen is not None and first is None:
        return False
    _, here = procs.jobs_here()
    below = {record["pid"], *(dict(descendants(record["pid"])) if record.get("unit") else ())}
    return record["environment"] is None or any(job["pid"] in below for job in here)


def from_zero(first, seen):
    """Whether a first step after a start is so far below the last one before that nothing was resumed.

    A checkpoint lies some way back; a tenth of the way, with 100 steps lost, is no checkpoint.
    """
    return first is not None and seen is not None and first * 10 <= seen and seen - first >= 100


def _stop_from_zero(ctx, record, first, seen):
    job = jobs.as_job(record["pid"], record["start"])
    marker = os.path.join(ctx.state, "job", jobs.FROM_ZERO)
    write_durably(marker, json.dumps({"first": first, "seen": seen}).encode())
    # No TERM: told to end, a trainer would save its first steps over the checkpoint that it did not read.
    if record.get("unit"):
        _systemctl(ctx, "kill", record["unit"], 30, "--signal=SIGKILL")
        _systemctl(ctx, "stop", record["unit"], 60)
    ending.kill((job["pid"], job["start"]), ending.tree_of(job))
    raise Refusal(
        "verify_failed",
        "restarted from zero: stopped at step %d (it had reached %d)" % (first, seen),
        "give job: the arguments that make it resume, or resume: none",
    )


@write
def unstart(ctx, step=None, grace=30.0):
    """Undo `start`: what this step started is ended; nothing where it started nothing.

    Where the capture of `step` was dropped, because the run had ended well, the jobs are captured anew
    first: whoever undoes the stop after this can start them again.
    """
    records = [one for one in jobs.records(ctx) if one["by"] == "start" and one["step"] == ctx.step]
    running = [(jobs.as_job(one["pid"], one["start"]), one) for one in records if launch.runs(one)]
    if running and step is not None and capture.of_step(ctx, step) is None:
        taken = [capture.take(dict(job, unit=record.get("unit") or job["unit"])) for job, record in running]
        capture.save(ctx, step, taken, [])
    for job, record in running:
        _end_started(ctx, job, record, grace)
    # A kill between the unit's start and its record leaves the name of the unit alone.
    for unit in ctx.recall("units", ()):
        if units.main_pid(unit):
            _systemctl(ctx, "stop", unit, grace + 30)
    return {"ended": [job["pid"] for job, _ in running]}


def _end_started(ctx, job, record, grace):
    _end_all(ctx, [[job["pid"], job["start"], ending.tree_of(job), record.get("unit")]], grace)


@write
def forget(ctx):
    """Drop the capture of this step, with the secrets in it, once its jobs were started again.

    Where a run ends well and leaves them stopped, as it was asked to, the capture is the way back.
    """
    entries = capture.of_step(ctx, ctx.step) or {"jobs": []}
    folder = os.path.join(ctx.state, "job")
    for index in range(len(entries["jobs"])):
        if launch.record_of(folder, index) is None and not jobs.running(ctx, index, entries["jobs"]):
            return {"kept": len(entries["jobs"])}
    _unlink(capture.path_of(ctx, ctx.step))
    return {"kept": 0}


def _unlink(path):
    """Remove a file, and what a kill left half way to being it: that holds the same secrets."""
    folder, name = os.path.split(path)
    for one in os.listdir(folder) if os.path.isdir(folder) else ():
        if one == name or (one.startswith(name + ".") and one.endswith(".tmp")):
            try:
                os.unlink(os.path.join(folder, one))
            except FileNotFoundError:
                pass


@write
def adopt(ctx, run, step, name):
    """Take over, under `name`, the jobs that a step of another run captured and left stopped."""
    if capture.of_step(ctx, name) is not None:
        return {"adopted": 0}
    found = capture.left_by(ctx, run)
    if found is None or found["step"] != step:
        raise Refusal("stale_plan", "what run %s stopped was started or dropped meanwhile" % run)
    capture.save(ctx, name, found["jobs"])
    return {"adopted": len(found["jobs"])}


@write
def disown(ctx, run, step, name):
    """Undo `adopt`: the jobs are the other run's to start again, where it still keeps them.

    That one of them began from zero is no reason for another run not to try.
    """
    if os.path.exists(capture.path_left(ctx, run, step)):
        _unlink(capture.path_of(ctx, name))
        _unlink(os.path.join(ctx.state, "job", jobs.FROM_ZERO))
    return {}


@write
def forget_adopted(ctx, run, step, name):
    """Drop an adopted capture, and the one it was taken from: its jobs run again."""
    _unlink(capture.path_of(ctx, name))
    _unlink(capture.path_left(ctx, run, step))
    return {}
