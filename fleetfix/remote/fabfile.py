"""Hold a change open while a function of the author's works on this host from the controller.

The function is not here: it runs beside the controller. What is here is its record: begun before it is
called, done with the controller's word of how it ended. Where no word can come any more, nothing tells.
"""

import fcntl
import json
import os
import signal
import time

from fleetfix.remote import changes
from fleetfix.remote.api import Ran, Refusal, write, write_durably
from fleetfix.remote.loop import SOON

PATIENCE = 180.0  # seconds without any word after which there is no controller that calls the function
SIGN = "waits"


@write
def hold(ctx, **asked):
    """Wait until the controller says how the function has ended."""
    ctx.remember("begun", True)
    return _wait(ctx, asked)


@write
def undo(ctx, **asked):
    """The same for the function that takes it back, where the first one was begun."""
    if not ctx.recall("begun", False):
        return {"undone": False}
    return _wait(ctx, asked)


def _wait(ctx, asked):
    token = "%d-%d" % (os.getpid(), time.time_ns())
    path = os.path.join(ctx.memory, SIGN)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.pwrite(fd, json.dumps({"token": token, "asked": asked}).encode(), 0)
        said = _heard(_word(ctx.memory, token), fd)
    finally:
        os.close(fd)
    if said.get("gone"):
        _end_in_doubt()
    if said.get("failure"):
        raise Refusal(*(str(said["failure"].get(name, "")) for name in ("kind", "message", "hint")))
    streams = [str(said.get(name, "")).encode() for name in ("stdout", "stderr")]
    return Ran(int(said["exit"]), streams[0], streams[1], bool(said.get("cut")))


def _heard(word, sign):
    """The controller's word, once it has come."""
    heard, seen = time.monotonic(), os.fstat(sign).st_mtime_ns
    while not os.path.exists(word):
        time.sleep(0.05)
        stamp = os.fstat(sign).st_mtime_ns
        if stamp != seen:
            heard, seen = time.monotonic(), stamp
        elif time.monotonic() - heard > PATIENCE:
            _end_in_doubt()
    with open(word, "rb") as file:
        said = json.loads(file.read())
    os.unlink(word)
    return said


def _end_in_doubt():
    """End without a record of how it went: that is what nobody knows."""
    os.kill(os.getpid(), signal.SIGKILL)


def _word(memory, token):
    return os.path.join(memory, "word-%s.json" % token)


# -- what the controller asks beside it ---------------------------------------------------------------


def waiting(runner, frame):
    """Wait until a call of this change waits for the controller: {"token", "asked"}, None if none does."""
    memory = runner.records.memory(frame["id"])
    while True:
        # Asked before it is looked for: it may begin to wait, and what is queued may end, between the two.
        over = runner.writing is None and not runner.writes
        found = _living(memory)
        if found is not None or over:
            return found
        yield SOON


def tell(runner, frame):
    """Pass on the controller's word, or only that it still works on it."""
    changes._wet(runner)
    changes._own(runner)
    memory, token, word = runner.records.memory(frame["id"]), str(frame["token"]), frame["word"]
    found = _living(memory)
    if found is None or found["token"] != token:
        return
    if word is None:
        os.utime(os.path.join(memory, SIGN))
    else:
        write_durably(_word(memory, token), json.dumps(word).encode())


def _living(memory):
    """What the sign of a living call says; its lock tells that it lives."""
    try:
        fd = os.open(os.path.join(memory, SIGN), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            return json.loads(os.pread(fd, 1 << 20, 0))
        except ValueError:
            return None  # it is being written
    finally:
        os.close(fd)
    return None
