"""What a host module stands on: read/write marks, refusals, and the context of a call.

A function of a host module takes a `Context` and keyword arguments that are JSON, and returns JSON, or
a `Ran`, whose exit and output then become those of the answer. It runs in a process of its own that
the runner forks for the call (or for the whole change), so it may block: its deadline is kept from
outside, by ending its whole process tree. What it prints goes nowhere.
"""

import base64
import ctypes
import errno
import json
import os
import pwd
import select
import signal
import subprocess
import time

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NO_GROUP = 65534  # the group that nothing belongs to
SECRET = "$secret"  # the one key of what stands for a secret in the arguments of a call
IN_KERNEL = 1.0  # seconds after KILL that one in uninterruptible sleep is waited for
OUTPUT_LIMIT = 32 * 1024  # bytes of each stream kept: half at the head, half at the tail


def read(function):
    """Mark a function as one that changes nothing; only these run in a dry-run session."""
    function.effect = "read"
    return function


def write(function):
    """Mark a function as one that may change the host; it runs only as part of a change."""
    function.effect = "write"
    return function


class Refusal(Exception):
    """A function says no: a failure class of fleetfix.errors, one line, and what to do."""

    def __init__(self, kind, message, hint=""):
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.hint = hint


class Ran:
    """How a command ended: `exit` is negative for a signal, None when its deadline ended it.

    `seconds` is that deadline, and `stuck` names the processes that could not be ended.
    """

    def __init__(self, exit, stdout, stderr, cut, seconds=0.0, stuck=()):
        self.exit = exit
        self.stdout = stdout
        self.stderr = stderr
        self.cut = cut
        self.seconds = seconds
        self.stuck = stuck

    @property
    def text(self):
        return self.stdout.decode("utf-8", "backslashreplace")

    @property
    def errors(self):
        return self.stderr.decode("utf-8", "backslashreplace")


def secrets_in(value):
    """The names of the secrets that the arguments of a call have placeholders of."""
    if isinstance(value, dict):
        inside = value.get(SECRET)
        if len(value) == 1 and inside is not None:
            yield from [inside] if isinstance(inside, str) else inside[1::2]
            return
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        yield from secrets_in(item)


class Kept:
    """The head and the tail of a stream of any length, in memory that does not grow."""

    def __init__(self, limit=OUTPUT_LIMIT):
        self.half = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.dropped = 0

    def add(self, data):
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        over = len(self.tail) - self.half
        if over > 0:
            self.dropped += over
            del self.tail[:over]

    def bytes(self):
        if not self.dropped:
            return bytes(self.head + self.tail)
        note = "\n[... %d bytes cut ...]\n" % self.dropped
        return bytes(self.head) + note.encode() + bytes(self.tail)


class Context:
    """What one call may know and use.

    run, step     the ids of the run and of the step this call belongs to
    state         the folder of this run on the host, `…/runs/RUN`; None in a dry run
    memory        the folder of this change, `…/runs/RUN/undo/ID`; None for reads
    home          the state folder of fleetfix on this host, `/var/lib/fleetfix` or the user's own
    homes         the places where that can be
    dry           whether the session may change anything
    deadline      time.monotonic() at which the call is ended
    """

    def __init__(
        self,
        run,
        step,
        home,
        state=None,
        memory=None,
        dry=False,
        deadline=None,
        say=None,
        lock=None,
        homes=(),
        secrets=None,
    ):
        self.run_id = run
        self.step = step
        self.home = home
        self.homes = homes or (home,)
        self.state = state
        self.memory = memory
        self.dry = dry
        self.deadline = deadline
        self._say = say
        self._lock = lock
        self._secrets = secrets

    # -- secrets ------------------------------------------------------------------------------

    def resolve(self, args):
        """The arguments of a call with the secrets in their places."""
        return args if self._secrets is None else self._secrets.resolve(args)

    def hide(self, text):
        """A text with every secret of this session masked; before it is packed, say, or cut."""
        return text if self._secrets is None else self._secrets.hide(text)

    def hidden(self, value):
        """An answer with every secret of this session masked in it."""
        return value if self._secrets is None else self._secrets.hidden(value)

    # -- what undo will need ------------------------------------------------------------------

    def remember(self, key, value):
        """Keep `value` (JSON) for undo, durably, before this returns."""
        os.makedirs(self.memory, mode=0o700, exist_ok=True)
        write_durably(os.path.join(self.memory, key + ".json"), json.dumps(value).encode())

    def recall(self, key, default=None):
        """What `remember` kept under this key in this change, or `default`."""
        try:
            with open(os.path.join(self.memory, key + ".json"), "rb") as file:
                return json.loads(file.read())
        except FileNotFoundError:
            return default

    # -- acting -------------------------------------------------------------------------------

    def remaining(self, most=None):
        """Seconds until the deadline of the call, at most `most`."""
        left = 3600.0 if self.deadline is None else self.deadline - time.monotonic()
        return max(left if most is None else min(left, most), 0.05)

    def say(self, text):
        """Tell the operator, while the call runs, in one line."""
        if self._say is not None:
            self._say(self.hide(str(text)))

    def command(
        self, argv, timeout=None, env=None, cwd="/", stdin=b"", uid=None, gid=None, limit=OUTPUT_LIMIT
    ):
        """Run a command without a shell and wait for it and its output; its tree ends by `timeout`.

        The environment is LC_ALL=C and a known PATH, plus `env`. With `uid` it runs as that user, `gid` as
        for `become`. A missing program is exit 127, as in a shell. What it prints has this session's
        secrets masked.
        """
        environment = {"PATH": PATH, "LC_ALL": "C", "HOME": "/"}
        before = None
        if uid is not None:
            environment.update(user_environment(uid))
            if os.geteuid() != uid:
                before = become(uid, gid)
        environment.update(env or {})
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                cwd=cwd,
                preexec_fn=before,
                start_new_session=True,
                pass_fds=() if self._lock is None else (self._lock,),
            )
        except FileNotFoundError:
            return Ran(127, b"", ("%s: not found\n" % argv[0]).encode(), False)
        except PermissionError as error:
            return Ran(126, b"", ("%s: %s\n" % (argv[0], not_run(argv[0], error))).encode(), False)
        return _converse(process, stdin, self.remaining(timeout), limit, self._secrets)

    def as_user(self, uid, function, *args, idle=False, gid=None):
        """Call `function(*args)` in a child that is that user, and return its JSON result.

        For everything done in a tree that a user owns: what the user may not do, a link placed
        there cannot make root do either. A Refusal or OSError of the child is raised here. With
        `idle` it gets processor and disk only when nobody else wants them. `gid` as for `become`.
        """
        if os.geteuid() == uid and idle:
            return _in_child(be_idle, function, args)
        if os.geteuid() == uid:
            return function(*args)
        if os.geteuid() != 0:
            raise Refusal("blocked", "this needs the rights of %s" % user_name(uid), "use become: true")
        turn = become(uid, gid)
        return _in_child((lambda: (be_idle(), turn())) if idle else turn, function, args)


def not_run(program, error):
    """Why a program was not executed, from the OSError that says so."""
    try:
        noexec = error.errno == errno.EACCES and os.statvfs(program).f_flag & os.ST_NOEXEC
    except (OSError, TypeError):
        noexec = False
    return "its file system is mounted noexec" if noexec else error.strerror


def _converse(process, stdin, seconds, limit, secrets=None):
    talk, deadline, stuck = _Talk(process, stdin, limit, secrets), time.monotonic() + seconds, ()
    late = not talk.until(deadline)
    if not late:
        try:
            process.wait(max(deadline - time.monotonic(), 0.05))
        except subprocess.TimeoutExpired:
            late = True
    if late:
        stuck = [name_of(pid) for pid, _ in _end_command(process)]
    talk.close()
    code = None if late else process.returncode
    return Ran(code, talk.out.bytes(), talk.err.bytes(), talk.cut, seconds, stuck)


class _Talk:
    """The three pipes of a command, fed and read together so that neither side ever waits."""

    def __init__(self, process, stdin, limit, secrets=None):
        self.process = process
        self.out, self.err = Kept(limit), Kept(limit)
        self.kept = {process.stdout.fileno(): self.out, process.stderr.fileno(): self.err}
        # Masked as it comes: what is cut out of the middle may leave one half of a secret.
        self.masks = {} if secrets is None else {fd: secrets.stream() for fd in self.kept}
        self.files = {process.stdout.fileno(): process.stdout, process.stderr.fileno(): process.stderr}
        self.feed = memoryview(stdin)
        self.poll = select.poll()
        for fd in self.kept:
            self.poll.register(fd, select.POLLIN)
        if stdin:
            self.files[process.stdin.fileno()] = process.stdin
            self.poll.register(process.stdin, select.POLLOUT)
        else:
            process.stdin.close()
        for fd in self.files:
            os.set_blocking(fd, False)

    @property
    def cut(self):
        return bool(self.out.dropped or self.err.dropped)

    def until(self, deadline):
        """Talk until every pipe is closed, or the command is gone; False where the deadline came first."""
        while self.files:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            gone = self.process.poll() is not None
            # The command is gone; a child it left behind may hold the pipes open for ever.
            ready = self.poll.poll((min(left, 0.2) if gone else left) * 1000)
            if gone and not ready:
                return True
            for fd, _ in ready:
                if not (self._take(fd) if fd in self.kept else self._give(fd)):
                    self.poll.unregister(fd)
                    self.files.pop(fd).close()
        return True

    def _take(self, fd):
        data = os.read(fd, 65536)
        self.kept[fd].add(self.masks[fd].take(data) if self.masks else data)
        return data

    def _give(self, fd):
        try:
            self.feed = self.feed[os.write(fd, self.feed[:65536]) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return False
        return len(self.feed) > 0

    def close(self):
        for fd, mask in self.masks.items():
            self.kept[fd].add(mask.end())
        for file in self.files.values():
            file.close()


def _end_command(process):
    """End a command and all that came from it, also what it detached; [(pid, start)] of what cannot end."""
    born = stat_of(process.pid)
    left = end_tree(process.pid)
    process.poll()
    # Detached processes were handed to this one, a subreaper: more of them for as long as any is ended.
    while born is not None:
        strays = [one for one in _children_since(born[2]) if one not in left]
        if not strays:
            break
        for pid, _ in strays:
            left += end_tree(pid)
    return left


def _children_since(start):
    """[(pid, start)] of the living children of this process that were started then or later."""
    return [
        (pid, its)
        for pid, (state, ppid, its) in all_processes().items()
        if ppid == os.getpid() and its >= start and state not in "ZX"
    ]


def become(uid, gid=None):
    """Make a function that turns the calling child into that user for good, groups included.

    A user who has no entry (a directory service that does not answer, a container's user) gets the
    group `gid`, that of the file or process in question, and no other; never root's.
    """
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        entry, group = None, gid or NO_GROUP
    else:
        group = entry.pw_gid

    def turn():
        if entry is None:
            os.setgroups([])
        else:
            os.initgroups(entry.pw_name, group)
        os.setresgid(group, group, group)
        os.setresuid(uid, uid, uid)

    return turn


def be_idle():
    """Give this process the lowest priority for the processor, and the idle class for the disk."""
    os.nice(19)
    ioprio_set = {"x86_64": 251, "aarch64": 30}.get(os.uname().machine)
    if ioprio_set is not None:
        ctypes.CDLL(None).syscall(ioprio_set, 1, 0, 3 << 13)  # IOPRIO_WHO_PROCESS, self, CLASS_IDLE


def user_name(uid):
    """The name of a user, or its number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def user_home(uid):
    """The home folder of a user, or `/`."""
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return "/"


def user_environment(uid):
    """HOME, USER and LOGNAME of a user."""
    return {"HOME": user_home(uid), "USER": user_name(uid), "LOGNAME": user_name(uid)}


def _in_child(turn, function, args):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            be_subreaper()
            turn()
            _write_all(writer, json.dumps(_answer(function, args)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    if not data:
        raise Refusal("bug", "%s broke when run as its owner" % function.__name__)
    answer = json.loads(data)
    if "refusal" in answer:
        raise Refusal(*answer["refusal"])
    if "oserror" in answer:
        raise OSError(*answer["oserror"])
    return answer["value"]


def _answer(function, args):
    try:
        return {"value": function(*args)}
    except Refusal as no:
        return {"refusal": [no.kind, no.message, no.hint]}
    except OSError as error:
        return {"oserror": [error.errno, error.strerror, error.filename]}
    except Exception as error:
        message = "%s broke when run as its owner: %s: %s"
        return {"refusal": ["bug", message % (function.__name__, type(error).__name__, error), ""]}


def _write_all(fd, data):
    while data:
        data = data[os.write(fd, data) :]


# -- durable files ----------------------------------------------------------------------------------


def write_durably(path, data, mode=0o600):
    """Put `data` at `path` by a temporary file and rename; durable when this returns."""
    temporary = "%s.%d.tmp" % (path, os.getpid())
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise
    sync_folder(os.path.dirname(path))


def sync_folder(path):
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- process trees ----------------------------------------------------------------------------------


def stat_of(pid):
    """(state, ppid, start time in ticks) of a process, or None. Right for any command name."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            data = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold blanks and parentheses itself: fields count from the last one.
    fields = data[data.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[1]), int(fields[19])


def alive(pid, start):
    """Whether the process with this pid and start time exists and is not a zombie."""
    stat = stat_of(pid)
    return stat is not None and stat[2] == start and stat[0] not in "ZX"


def all_processes():
    """{pid: (state, ppid, start)} of every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = stat_of(int(name))
            if stat is not None:
                found[int(name)] = stat
    return found


def descendants(root, table=None):
    """[(pid, start)] of every living process below `root`, parents first; `root` is not in it."""
    table = all_processes() if table is None else table
    children = {}
    for pid, (_, ppid, _) in table.items():
        children.setdefault(ppid, []).append(pid)
    found, queue = [], [root]
    while queue:
        for child in children.get(queue.pop(0), ()):
            queue.append(child)
            if table[child][0] not in "ZX":
                found.append((child, table[child][2]))
    return found


def end_tree(root, grace=0.0):
    """End `root` and all below it, and return [(pid, start)] of those that cannot be ended.

    TERM first when there is a grace (seconds), then KILL until nothing is left. `root` goes last, so
    that what its children leave behind still has it, a subreaper, as parent; it is stopped meanwhile, for
    a loop would start its next child at once.
    """
    own = _self(root)
    if grace > 0:
        for pid, start in [*descendants(root), own]:
            send(pid, start, signal.SIGTERM)
        _until(lambda: not _living(root), grace, 0.02)
    send(own[0], own[1], signal.SIGSTOP)
    left = end_below(root)
    send(own[0], own[1], signal.SIGKILL)
    begun = time.monotonic()
    _until(lambda: _reap(root) or not alive(*own) or _waits_in_kernel([own], begun), 5.0)
    # What could not be ended is no longer below `root` once that is gone.
    return [one for one in [own, *left] if alive(*one)]


def end_below(root, grace=0.0):
    """End all below `root` but not `root`, and return [(pid, start)] of those that cannot be ended."""
    if grace > 0:
        for pid, start in descendants(root):
            send(pid, start, signal.SIGTERM)
        _until(lambda: not descendants(root), grace, 0.02)

    def kill():
        left = descendants(root)
        for pid, start in left:
            send(pid, start, signal.SIGKILL)
        return not left or _waits_in_kernel(left, begun)

    begun = time.monotonic()
    _until(kill, 5.0)
    return descendants(root)


def _until(true, seconds, pause=0.005):
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(pause)


def _waits_in_kernel(left, begun):
    """Whether all that is left waits there, for a device or a file server, and may do so for ever."""
    return time.monotonic() > begun + IN_KERNEL and all((stat_of(pid) or "X")[0] == "D" for pid, _ in left)


def _self(root):
    stat = stat_of(root)
    return (root, stat[2] if stat else -1)


def name_of(pid):
    """A process as people know it: its pid and the name of its program."""
    try:
        with open("/proc/%d/comm" % pid, "rb") as file:
            return "%d %s" % (pid, file.read(64).decode("utf-8", "backslashreplace").strip())
    except OSError:
        return str(pid)


def _living(root):
    own = _self(root)
    return ([own] if alive(*own) else []) + descendants(root)


def _reap(pid):
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def send(pid, start, signum):
    """Signal a process only if it is still the same one. Says whether it was signalled."""
    if not alive(pid, start):
        return False
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def be_subreaper():
    """Have orphans below this process become its children, so that none is lost from its tree."""
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def escape(data):
    """Bytes as text: UTF-8 where it is, `\\xNN` where it is not."""
    return data.decode("utf-8", "backslashreplace")


def pack(data):
    """Bytes as JSON text."""
    return base64.b64encode(data).decode("ascii")


# -- what the system refuses ------------------------------------------------------------------------

USUAL = ("/", "/var/lib", "/var/tmp", "/tmp", "/run", "/dev/shm")  # where disks are full, and local
NEARLY = 64 * 1024  # bytes below which a file system counts as full


def no_space(error):
    """Whether an OSError says that a file system or quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def refusal_of(error, what):
    """A Refusal that tells an OSError as what it is, with what helps. `what` was being done."""
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    where = ": " + path if path else ""
    if error.errno == errno.EDQUOT:
        text = "the disk quota of %s is used up%s" % (user_name(os.geteuid()), where)
        return Refusal("no_space", "%s: %s" % (what, text), "make room, or raise the quota")
    if error.errno == errno.ENOSPC:
        lacks = _lacking(path) if path else ""
        full = "" if path else _full_places()
        place = _mounted_at(path) if path else ""
        text = "no %s left%s%s%s" % (lacks or "space", " on " + place if place else "", where, full)
        df = "df -i" if lacks else "df -h"
        return Refusal("no_space", "%s: %s" % (what, text), "make room there: %s %s" % (df, place or "-l"))
    text = "%s%s" % ((error.strerror or str(error)).lower(), where)
    return Refusal("command", "%s: %s" % (what, text), HELPS.get(error.errno, ""))


HELPS = {
    errno.EROFS: "it is mounted read-only, or went so after an error: look at dmesg",
    errno.EIO: "the disk below it fails: look at dmesg",
    errno.ESTALE: "the file server has forgotten it: mount it again",
}


def _mounted_at(path):
    """Where the file system of a path is mounted."""
    path = os.path.abspath(path)
    while path != "/" and not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _lacking(path):
    """Whether it is inodes that a file system lacks."""
    try:
        free = os.statvfs(_mounted_at(path))
    except OSError:
        return ""
    return "inodes" if free.f_files and not free.f_favail and free.f_bavail else ""


def _full_places():
    full = []
    for place in USUAL:
        try:
            free = os.statvfs(place)
        except OSError:
            continue
        if free.f_blocks and (
            free.f_bavail * free.f_frsize < NEARLY or (free.f_files and not free.f_favail)
        ):
            full.append(place)
    return " (full: %s)" % ", ".join(full) if full else ""
