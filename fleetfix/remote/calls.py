"""One call in a process of its own: forked, answered over a pipe, ended as a whole tree.

A child has its own session, is a subreaper, so that nothing it starts is lost from its tree, and has
neither the runner's channel nor its pipes. A child that reads ends all it started before it answers;
a child that makes a change leaves what the change has started, and records its own answer.
"""

import ctypes
import json
import os
import signal
import struct
import time

from fleetfix.remote.api import Ran, Refusal, be_subreaper, end_below, end_tree, name_of, refusal_of

LARGEST = 64 * 1024  # bytes of a value
DEEPEST = 48  # levels of a value
SAYS = 20  # lines a second that a call may tell the operator
SLACK = 0.5  # seconds that a function has, after its deadline, to answer by itself
FOLLOWERS = ("read", "command")  # kinds of children that end with the runner, whatever ends it
LATER = 5.0  # seconds after which a child without a runner keeps its deadline itself


class Late(BaseException):
    """The deadline passed and there was no runner to keep it."""


class Child:
    """A forked call, as the runner sees it."""

    def __init__(self, pid, fd, kind, step):
        self.pid = pid
        self.fd = fd
        self.kind = kind
        self.step = step
        self.deadline = None
        self.call = ("it", 0.0)  # the name of the call that it is at, and the seconds it has
        self.buffer = bytearray()
        self.result = None
        self.status = None
        self.killed = False
        self.ending = None  # why its tree is being ended: a failure class
        self.hung = ()
        self.finished = False
        self.waiters = []

    def take(self, data):
        """The whole messages in what has arrived."""
        self.buffer += data
        while len(self.buffer) >= 4:
            (size,) = struct.unpack_from(">I", self.buffer)
            if len(self.buffer) < 4 + size:
                return
            yield json.loads(bytes(self.buffer[4 : 4 + size]))
            del self.buffer[: 4 + size]


def fork(kind, step, work, foreign, lock=None):
    """Fork a child that calls `work(tell)` and return it. `foreign` are descriptors it must not keep."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_child(kind, reader, writer, work, foreign)
    os.close(writer)
    os.set_blocking(reader, False)
    return Child(pid, reader, kind, step)


def _be_child(kind, reader, writer, work, foreign):
    tell = _Teller(writer)
    try:
        _stand_alone(kind, [reader, *foreign])
        work(tell)
    except BaseException as error:
        tell({"done": failed("bug", "the call broke: %s: %s" % (type(error).__name__, error))})
    finally:
        os._exit(0)


def _stand_alone(kind, foreign):
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd, inheritable=True)
    os.close(nothing)
    for fd in foreign:
        os.close(fd)
    be_subreaper()
    if kind in FOLLOWERS:
        _end_with_runner()


def _end_with_runner():
    """Have a killed runner take this child with it, and all that it started."""

    def end(number, frame):
        end_below(os.getpid())
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


class _Teller:
    """The pipe to the runner. A runner that is gone is no reason to stop."""

    def __init__(self, fd):
        self.fd = fd
        self._said = []

    def __call__(self, message):
        data = json.dumps(message).encode()
        data = struct.pack(">I", len(data)) + data
        try:
            while data:
                data = data[os.write(self.fd, data) :]
        except OSError:
            pass

    def say(self, text):
        now = time.monotonic()
        self._said = [at for at in self._said if now - at < 1.0]
        if len(self._said) < SAYS:
            self._said.append(now)
            self({"say": str(text)[:500]})


# -- answering --------------------------------------------------------------------------------------


def perform(context, function, name, args):
    """Call one function and give its answer, whatever happens, as the fields of a Completed."""
    begun = time.monotonic()
    try:
        answer = _fields(name, context.hidden(function(context, **context.resolve(args))))
    except Refusal as no:
        answer = failed(no.kind, context.hide(str(no.message)), context.hide(str(no.hint)))
    except Late:
        answer = failed("timed_out", "%s ran past its deadline" % name)
    except OSError as error:
        no = refusal_of(error, name)
        answer = failed(no.kind, context.hide(str(no.message)), context.hide(str(no.hint)))
    except BaseException as error:
        text = "%s broke: %s: %s (%s)" % (name, type(error).__name__, error, place_of(error))
        answer = failed("bug", context.hide(text))
    answer["seconds"] = round(time.monotonic() - begun, 4)
    return answer


def place_of(error):
    """Where an error arose, as file:line."""
    step = error.__traceback__
    while step.tb_next is not None:
        step = step.tb_next
    return "%s:%d" % (os.path.basename(step.tb_frame.f_code.co_filename), step.tb_lineno)


def _fields(name, value):
    if isinstance(value, Ran):
        answer = {"exit": value.exit, "stdout": value.text, "stderr": value.errors, "cut": value.cut}
        if value.exit is None:
            answer["failure"] = late(name, value.seconds, value.stuck)
        return answer
    try:
        size = len(json.dumps(value, allow_nan=False))
    except (ValueError, RecursionError):
        size = -1
    if size < 0 or _deeper(value, DEEPEST):
        return failed("bug", "%s answered with what cannot be carried" % name)
    if size > LARGEST:
        return failed("bug", "%s answered with %d bytes; at most %d are carried" % (name, size, LARGEST))
    return {"exit": 0, "value": value}


def late(name, seconds, stuck):
    """The failure of what ran past its deadline; `stuck` names what of it could not be ended."""
    seconds = round(seconds, 1) or seconds  # what was left of a call's time may be no round number
    if not stuck:
        return failure("timed_out", "%s was not done within %g s, and was ended" % (name, seconds))
    text = "%s was not done within %g s, and cannot be ended: %s" % (name, seconds, ", ".join(stuck))
    return failure("hung", text, STUCK)


def ended_as_asked(stuck):
    """The answer of what was cancelled; `stuck` names what of it could not be ended."""
    if stuck:
        return failed("hung", "it cannot be ended: %s" % ", ".join(stuck), STUCK)
    return failed("cancelled", "it was ended as asked")


STUCK = "it waits in the kernel, for a device or a file server, and ends only with that, or with a reboot"


def _deeper(value, levels):
    """Whether a value has more levels: it may come from a process of a user that was asked."""
    level = [value] if isinstance(value, (dict, list, tuple)) else []
    while level and levels:
        levels -= 1
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, (dict, list, tuple))
        ]
    return bool(level)


def failure(kind, message, hint=""):
    return {"kind": kind, "message": str(message).replace("\n", " ")[:2000], "hint": hint}


def failed(kind, message, hint=""):
    """The fields of a Completed that did not end well."""
    return {"exit": None, "failure": failure(kind, message, hint)}


def end_own_children():
    """End what a read has left running. Costs one system call where it left nothing."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
    end_below(os.getpid())


def keep_deadline_alone(seconds):
    """Have this child end its call by itself, should the runner be gone when the deadline comes."""

    def late(number, frame):
        end_below(os.getpid())
        raise Late()

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds + SLACK + LATER if seconds else 0)


# -- ending -----------------------------------------------------------------------------------------


def end_all_of(pid, grace):
    """End a child and all below it; name what cannot be ended. The child itself does nothing more."""
    try:
        os.kill(pid, signal.SIGSTOP)
    except (ProcessLookupError, PermissionError):
        pass
    end_below(pid, grace)
    return [name_of(one) for one, _ in end_tree(pid)]
