"""What this host remembers of one run: its log, the locks of what runs, and notes.

`host.jsonl` is written by the runner and by the children it forks for changes, one JSON a line, each
line appended by one write. A line that a crash has torn is passed over. The first record of a kind
stands: what was recorded is never taken back.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import time

from fleetfix.remote.api import Refusal, alive, all_processes, no_space, stat_of

VERSION = 1
RESERVED = 256 * 1024  # bytes kept free for the record of how a change ended
LONGEST = 240 * 1024  # … and the longest such record
NAME = re.compile(r"[A-Za-z0-9_@=:,+][A-Za-z0-9._@=:,+-]*\Z")
BALLAST = 1024 * 1024  # bytes that are freed when the disk is full and something has to be undone
SPARE_FILES = 32  # … and inodes
LOOKED_AT = 5.0  # seconds that a lock is waited for which others only look at
KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


def load(path):
    """The JSON object in a file, or None where there is none, or a torn one."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def checked_name(name, what):
    """A run, step or note name that is safe as one part of a path."""
    if not isinstance(name, str) or len(name) > 120 or not NAME.match(name):
        raise Refusal("bug", "%s is not a %s name" % (json.dumps(name)[:80], what))
    return name


def file_of(id, run):
    """The file name that stands for a change of this run."""
    parts = id.split("/") if isinstance(id, str) else []
    if len(parts) != 4 or parts[0] != run:
        raise Refusal("bug", "%s is not the id of a change of run %s" % (json.dumps(id)[:120], run))
    return "~".join(checked_name(part, "step") for part in parts[1:])


class Records:
    """The folder `runs/RUN` of one run."""

    def __init__(self, home, run):
        self.run = run
        self.folder = os.path.join(home, "runs", run)
        self.log = Log(os.path.join(self.folder, "host.jsonl"))

    def prepare(self):
        for folder in (os.path.dirname(self.folder), self.folder):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        for name in ("locks", "notes", "undo"):
            os.makedirs(os.path.join(self.folder, name), mode=0o700, exist_ok=True)

    def keep_ballast(self):
        """Keep room on the disk that undo can be done with when everything else is full."""
        folder = os.path.join(self.folder, "ballast")
        try:
            os.mkdir(folder, 0o700)
            for number in range(SPARE_FILES):
                fd = _new(os.path.join(folder, str(number)))
                try:
                    if number == 0:
                        os.posix_fallocate(fd, 0, BALLAST)
                finally:
                    os.close(fd)
        except FileExistsError:
            return
        except OSError:
            self.drop_ballast()

    def drop_ballast(self):
        """Give that room back."""
        folder = os.path.join(self.folder, "ballast")
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)

    def is_full(self):
        """Whether there is too little room left here to write down an undo."""
        free = os.statvfs(self.folder)
        no_inodes = free.f_files > 0 and free.f_favail < SPARE_FILES // 2
        return no_inodes or free.f_bavail * free.f_frsize < BALLAST // 2

    def others(self):
        """The records of every other run in the same place."""
        place = os.path.dirname(self.folder)
        home = os.path.dirname(place)
        return [Records(home, name) for name in sorted(os.listdir(place)) if name != self.run]

    def done_again(self, entry):
        """(run, summary) of what another run has changed again since, or (None, ""): to undo this would
        bring back too much."""
        for other in self.others():
            other.log.refresh()
            for newer in other.log.entries.values():
                same = newer.change["key"] == entry.change["key"]
                # By the epoch of the lease: the clock may have been set back between the two.
                later = (newer.epoch, newer.at) > (entry.epoch, entry.at)
                if same and later and newer.undone is None:
                    return other.run, newer.change["summary"]
        return None, ""

    def memory(self, id):
        return os.path.join(self.folder, "undo", file_of(id, self.run))

    def lock(self, id, way):
        return os.path.join(self.folder, "locks", "%s.%s" % (file_of(id, self.run), way))

    def note(self, name):
        return os.path.join(self.folder, "notes", checked_name(name, "note") + ".json")

    @property
    def alive(self):
        """The file that every living session of this run, and each child of it, holds locked."""
        return os.path.join(self.folder, "alive")

    def running(self, entry):
        """The lock file that shows this change, or its undo, to be running now; None where none does."""
        if entry.done is None and held(self.lock(entry.id, "do")):
            return self.lock(entry.id, "do")
        if entry.undoing and held(self.lock(entry.id, "undo")):
            return self.lock(entry.id, "undo")
        return None

    def state(self, entry):
        """What became of a change, in the words of `fleetfix.session.PastState`."""
        if self.running(entry) is not None:
            return "begun"
        if entry.undone is not None:
            return "undone"
        if entry.undoing or entry.undo_failed is not None:
            return "undo_failed"
        if entry.done is None:
            return "in_doubt"
        return "done" if is_ok(entry.done) else "failed"

    def entry(self, id):
        """A change by its id, read anew."""
        self.log.refresh()
        return self.log.entries[id]

    def open_business(self):
        """What this run has begun here and neither undone nor committed, in words.

        Whoever takes a host opens its log first: where nothing can be read of that, it was removed or torn.
        """
        self.log.refresh()
        if self.log.is_blank:
            return [
                "its records are gone or torn: what it had begun is not known any more (%s)" % self.folder
            ]
        entries = self.log.entries.values()
        # Half of a way back is no place to stay: once it goes back, what was committed is open too.
        back = any(entry.undoing or entry.undone is not None for entry in entries)
        return ["in_doubt: %s" % summary for summary in self.log.lost] + [
            "%s: %s" % (self.state(entry), entry.change["summary"])
            for entry in entries
            if entry.undone is None and (back or not entry.committed)
        ]


def _new(path):
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def is_ok(completed):
    """Whether an answer says that all went well."""
    return "failure" not in completed and not completed.get("in_doubt") and completed.get("exit") == 0


class Entry:
    """One change, as the log tells it."""

    def __init__(self, record):
        self.id = record["id"]
        self.step = record["step"]
        self.at = record["t"]
        self.epoch = record.get("epoch", 0)
        self.digest = record["digest"]
        self.change = record["change"]
        self.done = None
        self.undoing = False
        self.undone = None
        self.undo_failed = None
        self.committed = False

    def take(self, record):
        kind = record["kind"]
        if kind == "done" and self.done is None:
            self.done = record["completed"]
        elif kind == "undoing":
            self.undoing = True
        elif kind == "undone" and self.undone is None:
            self.undone, self.undoing = record["completed"], False
        elif kind == "undo_failed":
            self.undo_failed, self.undoing = record["completed"], False
        elif kind == "committed":
            self.committed = True


class Log:
    """host.jsonl, read as far as it is written.

    `lost` holds summaries of changes whose records were removed while the run was at work here: nothing
    is known of them any more.
    """

    def __init__(self, path):
        self.path = path
        self.entries = {}
        self.ended = None
        self.lost = []
        self.is_blank = True
        self._offset = 0

    def refresh(self):
        """Take in what was written since the last time, by whichever process."""
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._forget()
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            self._forget()
            return
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].splitlines():
            self._take(line)

    def _forget(self):
        """The file is another one, or gone: what was read from it can be relied on no more."""
        self.lost += [entry.change["summary"] for entry in self.entries.values() if entry.undone is None]
        self.entries.clear()
        self.is_blank = True
        self._offset = 0

    def modules(self):
        """The host modules whose functions undo or commit a change."""
        kept = [entry.change[way] for entry in self.entries.values() for way in ("undo", "commit")]
        return sorted({call["function"].partition(".")[0] for calls in kept for call in calls})

    def _take(self, line):
        try:
            record = json.loads(line)
            kind = record["kind"]
            self.is_blank = False
            if kind == "lost":
                self.lost = [str(summary) for summary in record["summaries"]]
            elif kind == "begun":
                self.entries.setdefault(record["id"], Entry(record))
            elif kind == "ended":
                self.ended = record["outcome"]
            elif "id" in record:
                self.entries[record["id"]].take(record)
        except (ValueError, KeyError, TypeError):
            return  # torn by a crash, or of a newer version

    def append(self, kind, **fields):
        """Write one record, durably. Raises OSError."""
        record = {"v": VERSION, "t": round(time.time(), 3), "kind": kind}
        record.update(fields)
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                line = b"\n" + line
            if os.write(fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
            os.fsync(fd)
        finally:
            os.close(fd)

    def reserve(self):
        """Keep room on the disk for the record to come. Raises OSError where there is none."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
            if fallocate is None or ctypes.sizeof(ctypes.c_long) < 8:
                return
            size = ctypes.c_longlong(os.fstat(fd).st_size)
            if fallocate(fd, KEEP_SIZE, size, ctypes.c_longlong(RESERVED)) != 0:
                error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), self.path)
                if no_space(error):
                    raise error
        finally:
            os.close(fd)


def shortened(completed):
    """The answer, made to fit the room that was reserved for its record."""
    if len(json.dumps(completed)) <= LONGEST:
        return completed
    short = dict(completed, cut=True)
    for stream in ("stdout", "stderr"):
        text = short.get(stream) or ""
        short[stream] = text[:2000] + "\n[... cut ...]\n" + text[-2000:] if len(text) > 4100 else text
    if len(json.dumps(short)) > LONGEST:
        short["value"] = None
    return short


# -- locks ------------------------------------------------------------------------------------------


def fresh_lock(path):
    """Make a lock that nobody else can hold: a new file, locked before it has its name."""
    temporary = "%s.%d.tmp" % (path, os.getpid())
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    sign_lock(fd)  # until the process that it is for has begun, this one stands for it
    os.rename(temporary, path)
    return fd


def sign_lock(fd):
    """Write into a lock which process it stands for."""
    pid = os.getpid()
    os.pwrite(fd, b"%d %d\n" % (pid, stat_of(pid)[2]), 0)


def holder(path):
    """(pid, start) of the living process that a lock stands for, or None."""
    try:
        with open(path, "rb") as file:
            pid, start = (int(word) for word in file.read(64).split())
    except (OSError, ValueError):
        return None
    return (pid, start) if alive(pid, start) else None


def holders(path):
    """[(pid, start)] of the living processes behind a lock, but this one: the one that signed it, and each
    that has it open. A command that lost the process which began it is among those."""
    found = {pid: start for pid, start in [holder(path) or (0, 0)] if pid}
    for pid, (state, _, start) in all_processes().items():
        if state not in "ZX" and _has_open(pid, path):
            found[pid] = start
    found.pop(os.getpid(), None)
    return sorted(found.items())


def _has_open(pid, path):
    """Whether a process has this file open; asked by name, for to look at files may hang."""
    folder = "/proc/%d/fd/" % pid
    try:
        return any(_target(folder + name) == path for name in os.listdir(folder))
    except OSError:
        return False  # gone, or another user's


def _target(link):
    try:
        return os.readlink(link)
    except OSError:
        return None


def held(path):
    """Whether any process holds this lock for itself."""
    return _refused(path, fcntl.LOCK_SH)


def held_by_anyone(path):
    """Whether any process holds this lock, be it together with others."""
    return _refused(path, fcntl.LOCK_EX)


def _refused(path, kind):
    """Whether a lock of this kind cannot be had now; False where there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def hold_shared(path):
    """Hold a lock together with others, until the descriptor and its copies are closed. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + LOOKED_AT
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return fd
        except OSError as error:
            # Who looks whether it is held has it for a moment, or for good where it was stopped just then.
            if time.monotonic() > until:
                os.close(fd)
                raise OSError(error.errno, "another process keeps it locked", path) from None
        time.sleep(0.01)
