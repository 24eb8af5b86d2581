"""The runner's loop: one process without threads that waits for its channel, its children and time.

An operation is a generator that yields what it waits for, a `Child` or a number of seconds, and is sent
the child's answer. The loop itself never waits for anything else: even to end a child's tree, which may
take seconds, is the work of another child.
"""

import os
import select
import signal
import time

from fleetfix.remote import calls
from fleetfix.remote.channel import Lost

GRACE = 1.0  # seconds between TERM and KILL
SOON = 0.05
ENDED_WITHIN = 20.0  # seconds that it may take to end a tree, and to see what cannot be ended


class Loop:
    """Children, sleepers and the channel of one session."""

    def __init__(self, channel, orphaned):
        self.channel = channel
        self.orphaned = orphaned
        self.heard = time.monotonic()
        self.lost = False
        self.children = []
        self.sleeping = []
        self.by_fd = {}
        self.watched = {}
        self.private = set()  # descriptors that no child may keep
        self.poll = select.poll()
        self.poll.register(channel.source, select.POLLIN)
        self._listen_to_signals()

    def _listen_to_signals(self):
        self.wake, wake = os.pipe()
        self.foreign = [self.wake, wake]
        for fd in self.foreign:
            os.set_blocking(fd, False)
        self.poll.register(self.wake, select.POLLIN)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._told_to_end)

    def _told_to_end(self, number, frame):
        self.heard = float("-inf")  # as if the controller had been silent for too long

    # -- what the runner adds -------------------------------------------------------------------

    def handle(self, frame):
        """Take one frame."""
        raise NotImplementedError

    def misunderstood(self, frame, error):
        """A frame could not be taken."""

    def lose(self):
        """The controller is gone."""
        self.lost = True
        for fd in (self.channel.source, self.channel.sink):
            self._ignore(fd)

    def on_time(self, now):
        """Called at each turn."""

    def ended(self, operation):
        """An operation has come to its end."""

    def waits(self, operation, child):
        """An operation waits for a child, or for time (None)."""

    # -- turning --------------------------------------------------------------------------------

    def turn(self):
        """Wait for one thing to happen, and see to all that has."""
        for fd, _ in self.poll.poll(self._patience() * 1000):
            if fd == self.channel.source:
                self._guarded(self._hear)
            elif fd == self.wake:
                os.read(self.wake, 4096)
            elif fd in self.watched:
                self.watched[fd]()
            elif fd in self.by_fd:
                self._listen(self.by_fd[fd])
        self._reap()
        self._keep_time()
        self._guarded(self._flush)

    def _patience(self):
        now = time.monotonic()
        due = [now + 5.0] if self.lost else [now + 5.0, self.heard + self.orphaned]
        due += [child.deadline for child in self.children if child.deadline is not None]
        due += [item[0] for item in self.sleeping]
        return max(min(due) - now, 0.0) + 0.001

    def _guarded(self, action):
        if self.lost:
            return
        try:
            action()
        except Lost:
            self.lose()

    def _hear(self):
        for frame in self.channel.receive():
            self.heard = time.monotonic()
            try:
                self.handle(frame)
            except Lost:
                raise
            except Exception as error:
                self.misunderstood(frame, error)

    def _flush(self):
        self.channel.flush()
        if self.channel.waiting:
            self.poll.register(self.channel.sink, select.POLLOUT)
        else:
            self._ignore(self.channel.sink)

    def _ignore(self, fd):
        try:
            self.poll.unregister(fd)
        except KeyError:
            pass

    def _keep_time(self):
        now = time.monotonic()
        if not self.lost and now - self.heard > self.orphaned:
            self.lose()
        for child in list(self.children):
            if child.deadline is None or now < child.deadline or child.ending is not None:
                continue
            if child.kind == "kill":
                self._give_up(child)
            else:
                self.end(child, "timed_out")
        for item in [item for item in self.sleeping if item[0] <= now]:
            self.sleeping.remove(item)
            self.resume(item[1], item[2])
        self.on_time(now)

    def tell(self, frame, first=False):
        """Send a frame, if there is still someone to send it to."""
        if not self.lost:
            try:
                self.channel.send(frame, first)
            except Lost:
                # Who tells may be the very operation that losing would close: that waits for the turn.
                self.heard = float("-inf")

    # -- operations -----------------------------------------------------------------------------

    def resume(self, operation, value=None):
        """Let an operation go on until it waits again."""
        try:
            waits_for = operation.send(value)
        except StopIteration:
            self.ended(operation)
            return
        if not isinstance(waits_for, calls.Child):
            self.waits(operation, None)
            self.sleeping.append((time.monotonic() + waits_for, operation, None))
        elif waits_for.finished:
            self.sleeping.append((time.monotonic(), operation, waits_for.result))
        else:
            self.waits(operation, waits_for)
            waits_for.waiters.append(operation)

    def watch(self, fd, event, handler):
        """Call `handler` whenever this descriptor is ready, until `unwatch`."""
        self.watched[fd] = handler
        self.poll.register(fd, event)

    def unwatch(self, fd):
        if self.watched.pop(fd, None) is not None:
            self._ignore(fd)

    # -- children -------------------------------------------------------------------------------

    def fork(self, kind, step, work):
        foreign = self.private.union(self.foreign, self.by_fd)
        child = calls.fork(kind, step, work, foreign)
        self.children.append(child)
        self.by_fd[child.fd] = child
        self.poll.register(child.fd, select.POLLIN)
        return child

    def _listen(self, child):
        try:
            data = os.read(child.fd, 262144)
        except BlockingIOError:
            return
        if not data:
            self._hang_up(child)
        for message in child.take(data):
            if "say" in message:
                self.tell({"say": message["say"], "step": child.step})
            elif "call" in message:
                child.call = (message["call"], message["timeout"])
                child.deadline = time.monotonic() + message["timeout"] + calls.SLACK
            else:
                child.result = message["done"]
                child.deadline = None
        self._settle(child)

    def _hang_up(self, child):
        if child.fd in self.by_fd:
            self.poll.unregister(child.fd)
            del self.by_fd[child.fd]
            os.close(child.fd)
            child.fd = -1  # the next child may get the same number, before this one is reaped

    def _reap(self):
        for child in list(self.children):
            if child.status is None:
                try:
                    pid, status = os.waitpid(child.pid, os.WNOHANG)
                except ChildProcessError:
                    pid, status = child.pid, 0
                if pid:
                    child.status = status
                    if child.fd in self.by_fd:
                        self._listen(child)
                    self._settle(child)

    def _settle(self, child):
        """Let whoever waits for a child go on, once it is known how it ended."""
        gone = child.status is not None
        if child.ending is not None:
            known = child.killed and (gone or child.hung)
            if known and child.result is None:
                child.result = _ended(child)
        else:
            if gone and child.result is None:
                child.result = {"died": _how(child.status)}
            known = child.result is not None
        if known and not child.finished:
            child.finished = True
            for waiter in child.waiters:
                self.resume(waiter, child.result)
        if child.finished and (gone or child.hung):
            self._hang_up(child)
            if child in self.children:
                self.children.remove(child)

    def end(self, child, why):
        """End a child's whole tree by another child, so that this loop never waits."""
        child.ending = why
        child.deadline = None

        def kill(tell):
            tell({"call": "kill", "timeout": ENDED_WITHIN})
            tell({"done": {"value": calls.end_all_of(child.pid, GRACE)}})

        def seen():
            answer = yield killer
            child.killed = True
            child.hung = tuple(answer.get("value") or ())
            self._settle(child)

        killer = self.fork("kill", child.step, kill)
        self.resume(seen())
        return killer

    def _give_up(self, killer):
        """Wait no longer for a child that ends others: it hangs itself, in what it reads of them."""
        killer.deadline = None
        killer.result = {"value": ["what runs there: process %d, which ends it, hangs too" % killer.pid]}
        killer.ending, killer.killed, killer.hung = "hung", True, (str(killer.pid),)
        os.kill(killer.pid, signal.SIGKILL)
        self._settle(killer)


def _ended(child):
    if child.ending == "timed_out":
        return {"exit": None, "failure": calls.late(*child.call, child.hung)}
    return calls.ended_as_asked(child.hung)


def _how(status):
    if os.WIFSIGNALED(status):
        return "was killed by signal %d" % os.WTERMSIG(status)
    return "ended without an answer (exit %d)" % os.WEXITSTATUS(status)
