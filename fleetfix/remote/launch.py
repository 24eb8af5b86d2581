"""Start a job exactly as it was captured, at most once, and independent of this session.

A stub of our own does it: twice forked, in a session of its own. It writes its pid and start time
durably *before* it executes the job, and holds a lock until it does: whoever finds the lock free
knows from the record whether the job runs, at whatever point the starter was killed.
"""

import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import stat
import time

from fleetfix.remote import capture, masking, procs
from fleetfix.remote.api import Refusal, alive, stat_of, write_durably

SETTLE = 1.0  # seconds that a job must live to count as started
LOCK_WAIT = 30.0


def start(ctx, index, entry, by, there, guard=False):
    """(pid of the job with this number, whether it was started now, notes).

    `guard`: it must not begin from step 0. `there()` looks for it under the lock: (pid, start) where it
    runs already. Refuses with `command` when it cannot be executed or ends at once, with the last lines of
    its log.
    """
    folder = os.path.join(ctx.state, "job")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    lock = _locked(lock_path(folder, index), ctx.remaining(LOCK_WAIT))
    try:
        found = there()
        if found:
            return found[0], False, []
        log, notes = _choose_log(ctx, folder, entry)
        record = new_record(ctx, entry, by, log, guard)
        notes += _launch(folder, index, entry, record, log, lock)
    finally:
        os.close(lock)
    record = record_of(folder, index)
    see_it_live(ctx, record, ctx.remaining(SETTLE), masking.values_of(entry["environ"]))
    return record["pid"], True, notes


def wait_for_starter(folder, index, seconds=5.0):
    """Wait while a start is under way: until its stub has become the job, its record proves nothing."""
    try:
        lock = os.open(lock_path(folder, index), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.02)
    finally:
        os.close(lock)


def lock_path(folder, index):
    """The file that is locked while the job with this number is being started."""
    return os.path.join(folder, "starting-%d.lock" % index)


def record_of(folder, index):
    """The start record with this number, or None."""
    return load(os.path.join(folder, record_name(index)))


def keep_record(folder, index, record):
    """Keep a start record durably before this returns."""
    write_durably(os.path.join(folder, record_name(index)), json.dumps(record).encode())


def record_name(index):
    """The name of a start record: `started.json`, `started-1.json`, …"""
    return "started.json" if index == 0 else "started-%d.json" % index


def records_in(folder):
    """[start record] of a run's folder `job`."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    # What a kill left half way to being one (`started.json.PID.tmp`) is none.
    kept = [name for name in names if name.startswith("started") and name.endswith(".json")]
    found = [load(os.path.join(folder, name)) for name in kept]
    return [one for one in found if one]


def runs(record):
    """Whether the process of a start record or a capture still lives, in this boot."""
    boot = record.get("boot")
    if boot is not None and boot != capture.boot_id():
        return False
    return alive(record["pid"], record["start"]) and _has_memory(record["pid"])


def _has_memory(pid):
    """False for a process in the middle of its exit: it has let go of its memory and of the start lock,
    and is no zombie yet."""
    return procs.slurp(pid, "statm").split(b" ")[0] not in (b"", b"0")


def load(path):
    """What a JSON file holds, or None where there is none."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read())
    except (FileNotFoundError, ValueError):
        return None


def _locked(path, seconds):
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > until:
                os.close(lock)
                raise Refusal("command", "the job is being started by another session") from None
        time.sleep(0.02)


def new_record(ctx, entry, by, log, guard):
    """A start record, but for the pid and start time of the process.

    `guard` says that it must go on from where it was: to begin from zero is an error.
    """
    return {
        "boot": capture.boot_id(),
        "run": ctx.run_id,
        "step": ctx.step,
        "by": by,
        "guard": guard,
        "argv": procs.shown(entry["argv"], entry["environ"]),
        "uid": entry["uid"],
        "environment": entry["environment"],
        "unit": entry.get("unit"),
        "log": log,
        "offset": size(log),
        "at": time.time(),
        "of": {"pid": entry.get("pid"), "start": entry.get("start")},
        "steps_seen": entry.get("steps_seen"),
    }


def size(path):
    """Bytes of a file; 0 where there is none."""
    try:
        return os.stat(path).st_size if path else 0
    except OSError:
        return 0


# -- where it writes to -------------------------------------------------------------------------


def _choose_log(ctx, folder, entry):
    """(the file its output goes to, notes): its own one, else one beside that its user may write."""
    notes = []
    for stream in entry["stdio"][1:]:
        if stream["kind"] not in ("file", "null", "closed"):
            notes.append("fd %d led to a %s, which ended with the job" % (stream["fd"], stream["kind"]))
    kept = os.path.join(folder, "output.log")
    wanted = [stream["target"] for stream in entry["stdio"][1:] if stream["kind"] == "file"]
    if not notes and not wanted:
        return entry.get("log"), notes
    choices = [*wanted, entry.get("log"), os.path.join(entry["cwd"], "fleetfix-%s.log" % ctx.run_id)]
    for path in choices:
        if path and ctx.as_user(entry["uid"], _can_append, path):
            return path, notes + (["its output goes to " + path] if notes else [])
    return kept, [*notes, "its output goes to " + kept]


def _can_append(path):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o644))
    except OSError:
        return False
    return stat.S_ISREG(os.stat(path).st_mode)


# -- the starter --------------------------------------------------------------------------------


def _launch(folder, index, entry, record, log, lock):
    answer_r, answer_w = os.pipe()
    go_r, go_w = os.pipe()
    adopts = _adopt_orphans(False)
    child = os.fork()
    if child == 0:
        try:
            os.close(answer_r)
            os.close(go_w)
            if os.fork() == 0:
                _stub(folder, index, entry, record, log, (answer_w, go_r, lock))
        finally:
            os._exit(0)
    os.close(answer_w)
    os.close(go_r)
    os.waitpid(child, 0)
    _adopt_orphans(adopts)
    try:
        with os.fdopen(answer_r, "r", encoding="utf-8", errors="replace") as answers:
            return _talk(answers, go_w, record["run"], index)
    finally:
        os.close(go_w)


def _adopt_orphans(wanted):
    """Be a subreaper or not, and say what it was before.

    A call adopts what it starts, to end it with itself. The job must go to init instead: a call that
    is cancelled later must not take it along.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(37, ctypes.byref(before), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    libc.prctl(36, int(wanted), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    return bool(before.value)


def _talk(answers, go, run, index):
    notes, ready = [], False
    for line in answers:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "ready":
            ready = True
            notes += _scope(run, index, int(rest))
            os.write(go, b"go")
        elif word == "note":
            notes.append(rest)
        elif word == "error":
            raise Refusal("command", "the job could not be started: " + masking.masked(rest))
    if not ready:
        raise Refusal("command", "the job could not be started: its stub was killed")
    return notes


def _scope(run, index, pid):
    """Move a process into a scope of its own, as systemd-run does, or the session's end would end it."""
    if os.geteuid() != 0 or not os.path.isdir("/run/systemd/system") or procs.comm_of(1) != "systemd":
        return []
    manager = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
    name = "fleetfix-job-%s-%d-%d.scope" % (run, index, pid)
    asked = ["StartTransientUnit", "ssa(sv)a(sa(sv))", name, "fail", "1", "PIDs", "au", "1", str(pid), "0"]
    code = _quiet(["busctl", "call", *manager, *asked])
    return [] if code == 0 else ["no systemd scope could be made for it: it runs in a session of its own"]


def _quiet(argv):
    child = os.fork()
    if child == 0:
        try:
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.execvp(argv[0], argv)
        finally:
            os._exit(127)
    return os.waitpid(child, 0)[1]


def see_it_live(ctx, record, seconds, secrets):
    """Refuse with `command` and the last lines of its log when a started job ends within `seconds`.

    `secrets` are values that must not stand in them.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not runs(record):
            lines = _last_lines(ctx, record["log"], record)
            last = " | ".join(masking.masked(line.strip(), secrets)[:300] for line in lines)
            said = "the job ended at once" + (": " + last if last else "")
            raise Refusal("command", said, record["log"] or "it wrote no log")
        time.sleep(0.05)


def _last_lines(ctx, log, record):
    """What a job wrote last, read as its user: a link in the place of its log tells nothing of others."""
    if log is None:
        return []
    ours = os.path.dirname(log) == os.path.join(ctx.state, "job")
    read = capture.read_log
    lines = read(log, record["offset"]) if ours else ctx.as_user(record["uid"], read, log, record["offset"])
    return lines[-3:]


# -- the stub: all below runs in the process that becomes the job ---------------------------------


def _stub(folder, index, entry, record, log, kept):
    answer, go, _ = kept
    try:
        os.setsid()
        _close_all_but(kept)
        record.update(pid=os.getpid(), start=stat_of(os.getpid())[2])
        keep_record(folder, index, record)
        os.write(answer, b"ready %d\n" % os.getpid())
        if os.read(go, 2) != b"go":
            os._exit(1)  # the starter is gone: what it did not see started must not run
        _become_the_job(folder, entry, log, answer)
    except BaseException as error:
        said = "error %s" % (error.strerror if isinstance(error, OSError) and error.strerror else error)
        if isinstance(error, OSError) and error.filename:
            said += ": %s" % os.fsdecode(error.filename)
        os.write(answer, said.replace("\n", " ").encode("utf-8", "replace") + b"\n")
    finally:
        os._exit(127)


def _close_all_but(kept):
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass
    for fd in kept:
        os.set_inheritable(fd, False)


def _become_the_job(folder, entry, log, answer):
    program = os.fsencode(entry["program"])
    argv = [one.encode("utf-8", "surrogateescape") for one in entry["argv"]]
    environ = {k.encode("utf-8", "surrogateescape"): v for k, v in entry["environ"].items()}
    environ = {k: v.encode("utf-8", "surrogateescape") for k, v in environ.items()}
    for note in _take_rights(entry):
        os.write(answer, b"note %s\n" % note.encode())
    held = None
    if log is not None and os.path.dirname(log) == folder:
        held = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _become(entry)
    os.chdir(entry["cwd"])
    os.umask(entry["umask"])
    _connect(entry["stdio"], log, held)
    _default_signals(entry.get("ignored", ()))
    os.execve(program, argv, environ)


def _take_rights(entry):
    """Set what may need root, and say what could not be set."""
    notes = []
    for what, action in (
        ("oom_score_adj", lambda: _write("/proc/self/oom_score_adj", entry.get("oom"))),
        ("nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, entry["nice"])),
        ("affinity", lambda: os.sched_setaffinity(0, entry["affinity"])),
    ):
        try:
            if entry.get({"oom_score_adj": "oom"}.get(what, what)) is not None:
                action()
        except OSError as error:
            notes.append("%s could not be set: %s" % (what, error.strerror))
    for name, pair in entry["limits"].items():
        number = capture.LIMITS.get(name)
        try:
            if number is not None and list(resource.getrlimit(number)) != pair:
                resource.setrlimit(number, tuple(pair))
        except (OSError, ValueError) as error:
            notes.append("limit %s could not be set to %s: %s" % (name, pair, error))
    return notes


def _write(path, value):
    with open(path, "w") as file:
        file.write(str(value))


def _become(entry):
    if os.geteuid() == 0:
        # Root of an unprivileged user namespace may set no groups, and need not where they are the same.
        if sorted(os.getgroups()) != sorted(entry["groups"]):
            os.setgroups(entry["groups"])
        os.setresgid(entry["gid"], entry["gid"], entry["gid"])
        os.setresuid(entry["uid"], entry["uid"], entry["uid"])
    elif os.geteuid() != entry["uid"]:
        raise Refusal("blocked", "the job is another user's, and this session is not root")


def _connect(stdio, log, held):
    opened = {}
    for stream in stdio:
        fd = _opened(stream, log, held, opened)
        os.dup2(fd, stream["fd"])
    for fd in set(opened.values()):
        if fd > 2:
            os.close(fd)


def _opened(stream, log, held, opened):
    last = None
    for path, flags in _choices(stream, log):
        try:
            if path not in opened:
                opened[path] = held if held is not None and path == log else os.open(path, flags, 0o666)
            return opened[path]
        except OSError as error:
            last = error
    raise last


def _choices(stream, log):
    """[(path, flags)] that a standard stream may lead to, the best first."""
    null = ("/dev/null", os.O_RDWR)
    if stream["fd"] == 0:
        return [(stream["target"], os.O_RDONLY), null] if stream["kind"] == "file" else [null]
    if stream["kind"] in ("null", "closed"):
        return [null]
    # Append, whatever it was: the log of before must not be cut, and two writers must not overwrite.
    mode = stream["flags"] & os.O_ACCMODE or os.O_WRONLY
    flags = mode | os.O_APPEND | os.O_CREAT | os.O_NOCTTY | os.O_CLOEXEC
    paths = [stream["target"]] if stream["kind"] == "file" else []
    return [(path, flags) for path in [*paths, log] if path] or [null]


def _default_signals(ignored):
    # Python itself ignores PIPE and XFSZ, which a job would inherit.
    for number in range(1, signal.NSIG):
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        try:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        except (OSError, ValueError):
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
