"""One command of the operator's: its bytes go to the controller as they come, and no faster than taken.

The runner reads the command's own pipes, and only while the controller has taken what went before: a
command that writes more than anybody reads waits, as it would on a terminal. Nothing here is recorded:
an operator's command is neither repeated nor undone.
"""

import binascii
import errno
import os
import select
import subprocess
import time

from fleetfix.remote import calls
from fleetfix.remote.api import (
    PATH,
    all_processes,
    be_subreaper,
    not_run,
    pack,
    stat_of,
    user_environment,
    user_home,
)
from fleetfix.remote.loop import GRACE

WINDOW = 256 * 1024  # bytes that may be on their way to the controller, both streams together
PIECE = 64 * 1024
SOON = 0.05
QUIET = 0.3  # seconds without a byte after which what the command left behind is not waited for
SEALED = 8  # MFD_NOEXEC_SEAL: what a host asks for that runs nothing from memory (vm.memfd_noexec)


def execute(runner, frame):
    """Run the command of a frame; an operation of the runner. `exit` is negative for a signal."""
    stream = Stream(runner, frame)
    runner.streams[stream.n] = stream
    try:
        keeper = stream.begin(frame)
        born = stat_of(keeper.pid)
        answer = yield keeper
        if "died" in answer:
            left = yield from _end_orphans(runner, born[2] if born else 0)
            ended = "what it ran cannot be ended: %s" % ", ".join(left) if left else "what it ran was ended"
            text = "the command's keeper %s; %s" % (answer["died"], ended)
            answer = calls.failed("hung" if left else "command", text)
        yield from stream.drain()
        return answer
    finally:
        del runner.streams[stream.n]
        stream.close()


def _end_orphans(runner, since):
    """End what a killed keeper has left behind since it was born: it went to the runner, a subreaper.

    What an earlier command of this session has left running on purpose is older, and stays.
    """

    def kill(tell):
        tell({"done": {"value": [name for pid in left for name in calls.end_all_of(pid, GRACE)]}})

    left, named = [], []
    for _ in range(3):  # what is ended may leave others behind
        own = {child.pid for child in runner.children}
        left = [
            pid
            for pid, (_, parent, start) in all_processes().items()
            if parent == os.getpid() and pid not in own and start >= since
        ]
        if not left:
            break
        named = (yield runner.fork("kill", "", kill)).get("value") or []
    return named


class Stream:
    """The pipes of one command, and what the controller has room for."""

    def __init__(self, runner, frame):
        self.runner = runner
        self.n = frame["n"]
        self.room = WINDOW
        self.heard = 0.0
        self.outputs = {}  # descriptors that are open: "out" or "err"
        self.masks = {}  # by descriptor, where there are secrets
        self.input = None
        self.waiting = bytearray()  # input that the command has not taken
        self.complete = False  # no more input comes

    def begin(self, frame):
        """Start the command in a child that keeps its whole tree together."""
        out, for_out = os.pipe()
        err, for_err = os.pipe()
        ends = [for_out, for_err]
        stdin = None
        if frame["fed"]:
            stdin, self.input = os.pipe()
            ends.append(stdin)
            os.set_blocking(self.input, False)
        self.outputs = {out: "out", err: "err"}
        if self.runner.secrets is not None:
            self.masks = {fd: self.runner.secrets.stream() for fd in self.outputs}
        for fd in self.outputs:
            os.set_blocking(fd, False)
            self.runner.watch(fd, select.POLLIN, lambda fd=fd: self._take(fd))
        self.runner.private.update(self.outputs, () if self.input is None else (self.input,))
        be_subreaper()  # of the runner: a command may kill its keeper, and would else run on with nobody
        own = {name: self.runner.secrets.values[name] for name in frame["secrets"]}
        child = self.runner.fork("command", "", _work(frame, own, stdin, for_out, for_err))
        for fd in ends:
            os.close(fd)
        if frame["timeout"]:
            child.call = ("the command", frame["timeout"])
            child.deadline = time.monotonic() + frame["timeout"]
        return child

    # -- output ---------------------------------------------------------------------------------

    def _take(self, fd):
        """Send a piece of what one pipe holds; says whether there may be more."""
        if self.room <= 0 or fd not in self.outputs:
            return False
        try:
            data = os.read(fd, min(PIECE, self.room))
        except BlockingIOError:
            return False
        if not data:
            self._pass_on(fd, self._rest(fd))
            del self.outputs[fd]
            self._let_go(fd)
            return False
        self.heard = time.monotonic()
        self._pass_on(fd, self.masks[fd].take(data) if self.masks else data)
        return True

    def _rest(self, fd):
        """What was kept of a stream because it might have become a secret."""
        return self.masks[fd].end() if self.masks else b""

    def _pass_on(self, fd, data):
        if not data:
            return
        self.room -= len(data)
        if self.room <= 0:
            for one in self.outputs:
                self.runner.unwatch(one)
        self.runner.tell({"n": self.n, "of": self.outputs[fd], "chunk": pack(data)})

    def taken(self, count):
        """The controller has taken so many bytes more."""
        was, self.room = self.room, self.room + count
        if was <= 0 < self.room:
            for fd in self.outputs:
                self.runner.watch(fd, select.POLLIN, lambda fd=fd: self._take(fd))

    def drain(self):
        """Send what is left once the command has ended; what it left behind may hold the pipes."""
        ended = time.monotonic()
        while self.outputs and not self.runner.lost:
            for fd in list(self.outputs):
                while self._take(fd):
                    pass
            quiet = time.monotonic() - max(ended, self.heard)
            if not self.outputs or (self.room > 0 and quiet > QUIET):
                for fd in self.outputs:
                    self._pass_on(fd, self._rest(fd))
                return
            yield SOON

    # -- input ----------------------------------------------------------------------------------

    def feed(self, text, complete):
        """Take input for the command."""
        self.complete = complete
        self.waiting += binascii.a2b_base64(text)
        self._give()

    def _give(self):
        if self.input is None:
            return
        given = 0
        try:
            while self.waiting:
                count = os.write(self.input, self.waiting[:PIECE])
                given += count
                del self.waiting[:count]
        except BlockingIOError:
            self.runner.watch(self.input, select.POLLOUT, self._give)
        except OSError:
            self._end_input()  # the command reads no more: the controller need not send more
            return
        if self.complete and not self.waiting:
            self._end_input()
        elif given:
            if not self.waiting:
                self.runner.unwatch(self.input)
            self.runner.tell({"n": self.n, "want": given})

    def _end_input(self):
        if self.input is not None:
            self._let_go(self.input)
            self.input = None
        self.waiting.clear()

    def close(self):
        self._end_input()
        for fd in self.outputs:
            self._let_go(fd)
        self.outputs.clear()

    def _let_go(self, fd):
        self.runner.unwatch(fd)
        self.runner.private.discard(fd)
        os.close(fd)


# -- in the child -----------------------------------------------------------------------------------


def _work(frame, own, stdin, out, err):
    def work(tell):
        begun = time.monotonic()
        code = _run(frame, own, stdin, out, err)
        tell({"done": {"exit": code, "seconds": round(time.monotonic() - begun, 4)}})

    return work


def _run(frame, own, stdin, out, err):
    ends = [out, err] + ([] if stdin is None else [stdin])
    try:
        argv, kept = _argv(frame)
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=out,
            stderr=err,
            cwd=_home(),
            env=dict({"PATH": PATH, "LC_ALL": "C"}, **user_environment(os.geteuid()), **own),
            pass_fds=kept,
            start_new_session=True,
        )
    except OSError as error:
        os.write(
            err, ("%s: %s\n" % (error.filename or "the command", not_run(error.filename, error))).encode()
        )
        return 127 if isinstance(error, FileNotFoundError) else 126
    finally:
        # The end of output is seen only where nobody but the command has these open.
        for fd in ends:
            _close(fd)
    return process.wait()


def _close(fd):
    try:
        os.close(fd)
    except OSError:
        pass


def _argv(frame):
    """The words to start, and the descriptors that go with them.

    A script lies in memory only, and is read there by the program that its first line names, or by sh.
    """
    words = list(frame["argv"])
    if frame["script"] is None:
        return words, ()
    data = binascii.a2b_base64(frame["script"])
    program = data.startswith(b"\x7fELF")
    fd = _in_memory(data, 0 if program else SEALED)
    path = "/proc/self/fd/%d" % fd
    if program:
        return [path, *words], (fd,)
    first = data.split(b"\n", 1)[0].decode("utf-8", "surrogateescape")
    interpreter = first[2:].strip().split(None, 1) if first.startswith("#!") else []
    return [*(interpreter or ["/bin/sh"]), path, *words], (fd,)


def _in_memory(data, flags):
    """A descriptor of these bytes, that no name leads to."""
    ways = (
        lambda: os.memfd_create("script", flags),
        lambda: os.memfd_create("script", 0),  # the kernel does not know the flag
        lambda: os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600),
    )
    fd = _first_of(ways)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _first_of(ways):
    for way in ways:
        try:
            return way()
        except (OSError, AttributeError) as error:
            last = error
    raise OSError(errno.ENOSYS, "no place for a script without a name: %s" % last)


def _home():
    home = user_home(os.geteuid())
    return home if os.path.isdir(home) and os.access(home, os.X_OK) else "/"
