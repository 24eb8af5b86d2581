"""Find compile caches and measure them: where they are, how old, built for what, used by whom.

Whether a cache must go is decided elsewhere. All that looks into a cache runs as the user who owns it.
"""

import heapq
import os
import re
import stat
import time

from fleetfix.remote import elf, environments, jobs, mounts, plain, users
from fleetfix.remote.api import PATH, read, user_environment, user_home, user_name

SECONDS = 12.0  # one cache is walked for at most this long …
ENTRIES = 1500000  # … and over at most this many names
LIBRARIES = 200  # shared objects of a cache whose needs are read: the newest
LOCKS = 20

# -- finding ----------------------------------------------------------------------------------------


@read
def find(ctx, caches, of=None, venv="of-job", also=(), stands_on=(), stands_not_on=()):
    """Every cache of the table that is here, measured, with what its fate depends on."""
    environment = environments.resolve(ctx, venv)
    live = jobs.current(ctx)
    uid, environ, by = _whose(ctx, of, environment)
    gid = environment.get("gid") if environment.get("uid") == uid else None
    site = environment.get("site") or []
    looked = ctx.as_user(uid, _look, caches, environ, uid, list(also), site, gid=gid)
    _add_users(looked["found"], live, uid)
    return {
        "whose": {"uid": uid, "name": user_name(uid), "home": _home(environ, uid), "by": by},
        "environment": {
            "path": environment.get("path"),
            "none": environment.get("none"),
            "changed": _changed(site, stands_on, stands_not_on),
        },
        "toolchain": looked["toolchain"],
        "found": looked["found"],
        "job": live["pid"] if live else None,
        "elsewhere": live is not None and _mounts_of(live["pid"]) != _mounts_of("self"),
    }


def _whose(ctx, of, environment):
    """(uid, environment variables, what says so): of the job, else of who owns the environment."""
    job = jobs.job_environ(ctx, of) if of else None
    if job is not None:
        return job[0], job[1], "the job's environment"
    uid = environment.get("uid", os.geteuid())
    return uid, dict(user_environment(uid), PATH=PATH), "the defaults of %s" % user_name(uid)


def _home(environ, uid):
    return environ.get("HOME") or user_home(uid)


def _mounts_of(pid):
    try:
        return os.readlink("/proc/%s/ns/mnt" % pid)
    except OSError:
        return None


def _add_users(founds, live, uid):
    """Say of each cache which processes use it, and of its lock files which nobody holds."""
    job = users.tree_of(live["pid"]) if live else set()
    seen = users.of_paths([one["real"] for one in founds])
    for one in founds:
        found = [dict(user, of_job=user["pid"] in job) for user in seen[one["real"]]]
        # Who is not of the job comes first: those are the ones that decide.
        one["users"] = [
            {key: user[key] for key in ("pid", "name", "user", "of_job")}
            for user in sorted(found, key=lambda user: user["of_job"])[:5]
        ]
        held = {path for user in found for path in user["paths"]}
        one["locks"] = [path for path in one["locks"] if path not in held]
        # Of other users' processes root alone sees what they hold.
        if os.geteuid() not in (0, uid):
            one["locks"] = []


def _look(caches, environ, uid, also, site):
    """All that is asked of the files, as the user whose they are."""
    places = _places(environ, uid)
    wanted = [(entry, *_resolve(entry, environ, places)) for entry in caches]
    wanted += [({"name": "also", "apart": "", "locks": False}, path, "also") for path in also]
    rows = mounts.rows()
    lock_style = _locks_by_presence(site)
    found = []
    for entry, path, by in wanted:
        one = _measure(entry, path, by, rows)
        if one is not None:
            one["locks"] = one["locks"] if lock_style in (None, True) else []
            if lock_style is None:
                one["locks"] = [lock for lock in one["locks"] if not _built(os.path.dirname(lock))]
            found.append(one)
    return {"found": found, "toolchain": _toolchain(environ, site)}


def _places(environ, uid):
    user = next(
        (environ[name] for name in ("LOGNAME", "USER", "LNAME", "USERNAME") if environ.get(name)), None
    )
    user = user or user_name(uid)
    home = _home(environ, uid)
    return {
        "home": home,
        "cache": environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"),
        "tmp": _temporary(environ),
        "user": user,
        "plain_user": re.sub(r'[\\/:*?"<>|]', "_", user),
    }


def _temporary(environ):
    """The folder that tempfile.gettempdir() finds with these variables."""
    named = [environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)]
    for folder in [*named, "/tmp", "/var/tmp", "/usr/tmp"]:
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return os.path.abspath(folder)
    return "/tmp"


def _resolve(entry, environ, places):
    for variable, suffix in entry["moved_by"]:
        if environ.get(variable):
            return environ[variable].rstrip("/") + suffix, variable
    return entry["default"].format(**places), "default"


def _measure(entry, path, by, rows):
    """What is at a path, or None where nothing is. A relative path is nowhere."""
    if not os.path.isabs(path):
        return None
    path = os.path.normpath(path)
    parent = os.path.realpath(os.path.dirname(path))
    real = os.path.join(parent, os.path.basename(path))
    try:
        status = os.lstat(real)
    except OSError:
        return None
    kind = "link" if stat.S_ISLNK(status.st_mode) else "folder" if stat.S_ISDIR(status.st_mode) else "other"
    found = {
        "name": entry["name"],
        "path": path,
        "real": real,
        "by": by,
        "kind": kind,
        "owner": status.st_uid,
        "owner_name": user_name(status.st_uid),
        "mount": mounts.within(real, [row[:2] for row in rows]),
        "folder": mounts.folder_of(real, rows),
        "movable": _movable(parent, status),
        "locks": [],
    }
    # What a link leads to is measured too, so that a stale one is refused and not overlooked.
    top = os.path.realpath(real) if kind == "link" else real
    if os.path.isdir(top):
        found.update(_walk(top, entry["apart"], entry["locks"]))
    return found


def _movable(parent, status):
    """Whether this process may rename what is in the folder, the sticky bit of /tmp considered."""
    if not os.access(parent, os.W_OK | os.X_OK):
        return False
    above = os.lstat(parent)
    sticky = bool(above.st_mode & stat.S_ISVTX)
    return not sticky or os.geteuid() in (0, status.st_uid, above.st_uid)


class _Sum:
    """What a walk adds up. An artefact is a file that is not empty and is no lock.

    A lock that is taken is dated anew each time, and says nothing of what was compiled.
    """

    def __init__(self):
        self.entries = self.files = self.bytes = self.objects = 0
        self.newest = self.oldest = None
        self.complete = True
        self.libraries = []
        self.locks = []

    def add(self, path, name, status, apart):
        if (
            not stat.S_ISREG(status.st_mode)
            or not status.st_size
            or name == "lock"
            or name.endswith(".lock")
        ):
            return
        self.files += 1
        self.bytes += status.st_blocks * 512
        self.newest = status.st_mtime if self.newest is None else max(self.newest, status.st_mtime)
        self.oldest = status.st_mtime if self.oldest is None else min(self.oldest, status.st_mtime)
        library = name.endswith(".so") or ".so." in name
        self.objects += library or name.endswith(".o")
        if library:
            heapq.heappush(self.libraries, (status.st_mtime, path, apart or ""))
            if len(self.libraries) > LIBRARIES:
                heapq.heappop(self.libraries)


def _walk(top, apart, locks):
    """Count and date what is below a folder. Newest folders first: a walk cut short saw what is new.

    A folder that `apart` matches is for one CUDA by its name: what is built for that one is right there.
    """
    total = _Sum()
    until = time.monotonic() + SECONDS
    device = os.lstat(top).st_dev
    pattern = re.compile(apart) if apart else None
    queue = [(top, None)]
    while queue:
        folder, inside = queue.pop()
        below = []
        for entry, status in _entries(folder):
            total.entries += 1
            if stat.S_ISDIR(status.st_mode):
                if status.st_dev == device:
                    match = pattern.search(entry.name) if pattern else None
                    below.append((status.st_mtime, entry.path, match.group(1) if match else inside))
                continue
            total.add(entry.path, entry.name, status, inside)
            if locks and entry.name == "lock" and stat.S_ISREG(status.st_mode) and len(total.locks) < LOCKS:
                total.locks.append(entry.path)
        queue.extend((path, major) for _, path, major in sorted(below, key=lambda one: one[0]))
        if time.monotonic() > until or total.entries > ENTRIES:
            total.complete = not queue
            break
    return {
        "files": total.files,
        "bytes": total.bytes,
        "newest": total.newest,
        "oldest": total.oldest,
        "complete": total.complete,
        "objects": total.objects,
        "cuda": _cuda_of(total.libraries),
        "locks": total.locks,
    }


def _entries(folder):
    """(entry, status) of what is in a folder; a folder that is gone or closed is empty."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    yield entry, entry.stat(follow_symlinks=False)
                except OSError:
                    continue
    except OSError:
        return


def _cuda_of(libraries):
    """{CUDA major: how many of these shared objects need libraries of it}, but where they belong."""
    counts = {}
    for _, path, apart in libraries:
        for major in elf.cuda_majors(path):
            if major != apart:
                counts[major] = counts.get(major, 0) + 1
    return counts


# -- what the environment says ------------------------------------------------------------------------


def _changed(site, stands_on, stands_not_on):
    """When what compiled code stands on last changed: the newest of its folders and records, or None."""
    times, others = [], []
    for folder in site:
        for entry, status in _entries(folder):
            if entry.name.endswith(".dist-info"):
                mine = _matches(entry.name, stands_on) and not _matches(entry.name, stands_not_on)
                (times if mine else others).extend(_times(entry.path, os.path.join(entry.path, "RECORD")))
            elif entry.name == "__pycache__":
                others.append(status.st_mtime)
        times.extend(_times(os.path.join(folder, "torch", "lib"), *_library_folders(folder)))
        # A package that was removed leaves no record: only the folder that it was in has changed. Where
        # another package's coming explains that, it says nothing.
        for moment in _times(folder):
            if not any(abs(moment - other) <= 2.0 for other in others):
                times.append(moment)
    return max(times) if times else None


def _library_folders(site):
    """The folders of nvidia/*/ that hold libraries: replaced in place, they change and no record does."""
    for entry, status in _entries(os.path.join(site, "nvidia")):
        if stat.S_ISDIR(status.st_mode):
            for name in ("lib", "bin"):
                yield os.path.join(entry.path, name)


def _times(*paths):
    times = []
    for path in paths:
        try:
            times.append(os.lstat(path).st_mtime)
        except OSError:
            continue
    return times


def _matches(dist_info, patterns):
    name = re.sub(r"[-_.]+", "-", dist_info.partition("-")[0]).lower()
    return any(re.fullmatch(_as_regex(pattern), name) for pattern in patterns)


def _as_regex(pattern):
    """A shell pattern with * and [ ] as a regex; the patterns are ours."""
    return pattern.replace(".", r"\.").replace("*", ".*")


def _text_of(path):
    return plain.text(path, 1 << 20) or b""


def _locks_by_presence(site):
    """Whether torch here takes a `lock` file's presence for a lock; None where that cannot be read.

    Older torch creates it with O_EXCL and waits while it is there; newer locks it with flock, and then a
    file that stays behind is harmless (pytorch/pytorch#189245).
    """
    for folder in site:
        text = _text_of(os.path.join(folder, "torch", "utils", "file_baton.py"))
        if text:
            return b"O_EXCL" in text and b"flock" not in text
    return None


def _built(folder):
    """Whether a build in this folder has ended: then a lock beside it may be one that does no harm."""
    return any(entry.name.endswith(".so") for entry, _ in _entries(folder))


def _toolchain(environ, site):
    path = environ.get("PATH") or PATH
    named = (environ.get("CXX") or "").split()[:1]
    compiler = next(filter(None, (_which(name, path) for name in [*named, "g++", "clang++", "c++"])), None)
    return {"compiler": compiler, "setuptools": _has_setuptools(site)}


def _which(name, path):
    folders = [""] if "/" in name else path.split(":")
    for folder in folders:
        place = os.path.join(folder, name)
        if os.path.isabs(place) and os.path.isfile(place) and os.access(place, os.X_OK):
            return place
    return None


def _has_setuptools(site):
    """True where the environment has setuptools, inherits what it has not, or never asks for it."""
    for folder in site:
        if os.path.isdir(os.path.join(folder, "setuptools")):
            return True
        config = _text_of(os.path.join(folder, "..", "..", "..", "pyvenv.cfg")).lower()
        if re.search(rb"include-system-site-packages\s*=\s*true", config):
            return True
    asking = ("triton/runtime/build.py", "torch/_inductor/cpp_builder.py", "torch/utils/cpp_extension.py")
    texts = (_text_of(os.path.join(folder, name)) for folder in site for name in asking)
    return not any(re.search(rb"^\s*(import|from) setuptools", text, re.M) for text in texts)
