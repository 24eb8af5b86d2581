"""The runner: executes what one controller asks, for the time of one session, and keeps its promises.

Reads run side by side; what writes runs one after another; each in a child of its own. When the
controller is lost, reads end, the change in flight is finished and recorded, and the runner exits.
"""

import binascii
import collections
import gc
import importlib
import json
import os
import select
import sys
import time
import zlib

from fleetfix.remote import calls, changes
from fleetfix.remote.api import (
    PATH,
    SECRET,
    Context,
    Refusal,
    refusal_of,
    secrets_in,
    user_environment,
    user_name,
)
from fleetfix.remote.channel import Channel, Lost
from fleetfix.remote.claims import Claims
from fleetfix.remote.lease import Lease, boot_id, machine_id, told
from fleetfix.remote.ledger import Ledger
from fleetfix.remote.loop import SOON, Loop
from fleetfix.remote.places import Places
from fleetfix.remote.records import Records, checked_name

FULL = 4 * 1024 * 1024  # bytes waiting to be sent at which no further read is begun
AT_ONCE = 8  # reads that run side by side
RENEW = 30.0  # seconds between renewals of the lease
MANY = 20  # runs that are kept in any case
DAY = 86400.0
LOOK_AGAIN = 0.25  # seconds between two looks at another's lease


class Runner(Loop):
    """One session on this host."""

    def __init__(self, hello, channel):
        super().__init__(channel, float(hello["orphaned"]))
        said = hello["purpose"]
        names = ("run", "playbook", "operator", "controller", "driver", "reason")
        self.purpose = {name: str(said.get(name, "")) for name in names}
        self.purpose["take_over"] = bool(said.get("take_over"))
        self.run = checked_name(self.purpose["run"], "run")
        self.dry = bool(said["dry"])
        self.again = bool(hello.get("again"))  # this session has written here before its line broke
        self.places = Places(str(hello["root"]))
        self.home = self.places.expected(self.run)
        self.records = Records(self.home, self.run)
        self.lease = Lease(self.places, self.purpose)
        self.claims = Claims(self.places)
        self.ledger = Ledger(self.home, self.purpose)
        self.renewed = time.monotonic()
        self.reads = collections.deque()
        self.writes = collections.deque()
        self.writing = None
        self.writing_for = None  # the number of the frame that asked for it
        self.in_flight = False
        self.secrets = None  # what calls are made whole with, and what is masked in their answers
        self.streams = {}  # commands whose output goes to the controller, by the number of their frame

    def serve(self):
        """Answer until the controller is gone and nothing is in flight."""
        while not (self.lost and self.writing is None and not self.children):
            self.turn()
        self.lease.release()

    # -- frames ---------------------------------------------------------------------------------

    def handle(self, frame):
        op, n = frame.get("op"), frame.get("n")
        if op == "ping":
            self.tell({"pong": frame.get("t")}, first=True)
        elif op == "sources":
            self._learn(frame["modules"])
        elif op == "secrets":
            module = importlib.import_module("fleetfix.remote.redaction")
            self.secrets = module.Secrets(frame["values"], frame["needles"])
        elif op == "read":
            for i, call in enumerate(frame["reads"]):
                self.reads.append((n, i, frame["step"], call))
            self._begin_reads()
        elif op in ("taken", "feed"):
            self._pass_on(op, frame)
        elif op in changes.WRITES:
            self.writes.append((n, self._answered(n, changes.WRITES[op], frame)))
            self._next_write()
        else:
            self.resume(self._answered(n, AT_SIGHT.get(op, Runner.unknown), frame))

    def misunderstood(self, frame, error):
        """Refuse a frame that is none; what else this session has in hand goes on."""
        self.tell({"n": frame.get("n"), "error": _broken(error)})

    def _answered(self, n, operation, frame):
        """Run an operation, and send its answer or its refusal as the reply to frame `n`."""
        try:
            value = operation(self, frame)
            if hasattr(value, "send"):
                value = yield from value
            self.tell({"n": n, "reply": value})
        except Refusal as no:
            self.tell({"n": n, "error": calls.failure(no.kind, no.message, no.hint)})
        except OSError as error:
            no = refusal_of(error, "the records of fleetfix")
            self.tell({"n": n, "error": calls.failure(no.kind, no.message, no.hint)})
        except Exception as error:
            self.tell({"n": n, "error": _broken(error)})

    def unknown(self, frame):
        raise Refusal("bug", "the runner knows no %r" % (frame.get("op"),))

    def _learn(self, modules):
        """Take in sources of host modules, for the imports to come."""
        for name, packed in modules.items():
            source = zlib.decompress(binascii.a2b_base64(packed))
            sys.modules["fleetfix.remote"].sent_sources[name] = source.decode()

    # -- the loop's seams -----------------------------------------------------------------------

    def on_time(self, now):
        if now - self.renewed > RENEW:
            self.renewed = now
            self.lease.renew()
        self._begin_reads()

    def ended(self, operation):
        if operation is self.writing:
            self.writing = None
            self._next_write()

    def waits(self, operation, child):
        if operation is self.writing:
            self.in_flight = child is not None

    def _next_write(self):
        while self.writing is None and self.writes:
            self.writing_for, self.writing = self.writes.popleft()
            self.resume(self.writing)

    def lose(self):
        """End reads, drop what has not begun, and leave the change in flight to finish."""
        super().lose()
        self.lease.leave()
        self.reads.clear()
        self.writes.clear()
        for child in list(self.children):
            if child.kind in calls.FOLLOWERS and child.ending is None:
                self.end(child, "cancelled")
        self._drop_writing()

    def _drop_writing(self):
        """Give up what is to be written while it only waits; says whether there was such a thing."""
        if self.writing is None or self.in_flight:
            return False
        self.sleeping = [item for item in self.sleeping if item[1] is not self.writing]
        self.writing.close()
        self.writing = None
        return True

    # -- reads ----------------------------------------------------------------------------------

    def _begin_reads(self):
        while self.reads and self._reading() < AT_ONCE and self.channel.waiting < FULL:
            self.resume(self._one_read(*self.reads.popleft()))

    def _reading(self):
        return sum(1 for child in self.children if child.kind == "read" and not child.finished)

    def _one_read(self, n, i, step, call):
        name = call["function"]
        try:
            function = self.function(name)
            if function.effect != "read":
                raise Refusal("blocked", "%s is not marked as one that only reads" % name)
            self.require_secrets([call])
            answer = yield self.fork("read", step, self._reading_child(step, call, function))
            if "died" in answer:
                answer = calls.failed("command", "%s %s" % (name, answer["died"]))
        except Refusal as no:
            answer = calls.failed(no.kind, no.message, no.hint)
        self.tell({"n": n, "i": i, "reply": answer})

    def _reading_child(self, step, call, function):
        def work(tell):
            tell({"call": call["function"], "timeout": call["timeout"]})
            context = self.context(step, call["timeout"], tell.say)
            answer = calls.perform(context, function, call["function"], call["args"])
            calls.end_own_children()
            tell({"done": answer})

        return work

    def context(self, step, timeout, say, memory=None, lock=None):
        """What a function may know and use."""
        return Context(
            self.run,
            step,
            self.home,
            state=None if self.dry else self.records.folder,
            memory=memory,
            dry=self.dry,
            deadline=time.monotonic() + timeout,
            say=say,
            lock=lock,
            homes=self.places.homes,
            secrets=self.secrets,
        )

    def require_secrets(self, todo):
        """Refuse calls that need a secret which this session was not given."""
        needed = {name for call in todo for name in secrets_in(call["args"])}
        missing = sorted(needed.difference(self.secrets.values if self.secrets else ()))
        if missing:
            hint = " ".join("--secret %s=…" % name for name in missing)
            raise Refusal("blocked", "this needs secrets: %s" % ", ".join(missing), hint)

    def function(self, name):
        """Find a function of a host module by its call name."""
        module, _, function = name.partition(".")
        try:
            found = getattr(importlib.import_module("fleetfix.remote." + module), function, None)
        except Exception as error:
            text = "%s cannot be loaded: %s: %s" % (module, type(error).__name__, error)
            raise Refusal("bug", text) from error
        if getattr(found, "effect", None) not in ("read", "write"):
            raise Refusal("bug", "no host module has a function %s" % name)
        return found

    # -- answered at sight ----------------------------------------------------------------------

    def info(self, frame=None):
        """What this host is, and what fleetfix has here."""
        uid = os.geteuid()
        lease = self.lease.current()
        return {
            "python": "%d.%d.%d" % sys.version_info[:3],
            "uid": uid,
            "user": user_name(uid),
            "hostname": os.uname().nodename,
            "boot_id": boot_id(),
            "machine_id": machine_id(),
            "now": time.time(),
            "home": self.home,
            "durable": self.places.durable(self.home),
            "disabled": self.places.disabled(),
            "claims": self.claims.told_to(self.run),
            "lease": lease and told(lease),
            "sweep_due": sweep_due(self.home),
        }

    def await_lease(self, frame):
        """Wait until no other run has the lease, at most so long; then say anew what this host is."""
        until = time.monotonic() + float(frame["seconds"])
        while not self.lost and time.monotonic() < until:
            other = self.lease.current()
            if other is None or other["run"] == self.run:
                break
            yield LOOK_AGAIN
        return self.info()

    def past(self, frame):
        """Send each change of this run; answer with their number."""
        log = self.records.log
        log.refresh()
        for entry in log.entries.values():
            item = {"id": entry.id, "step": entry.step, "at": entry.at, "state": self.records.state(entry)}
            item.update({name: entry.change[name] for name in ("key", "summary", "risk")})
            item.update(job=entry.change.get("job", ""), completed=entry.done)
            item["secrets"] = sorted(set(secrets_in(entry.change["undo"])))
            self.tell({"n": frame["n"], "item": item})
        return len(log.entries)

    def modules(self, frame):
        """The host modules that undo and commit of this run's changes call."""
        self.records.log.refresh()
        return self.records.log.modules()

    def execute(self, frame):
        """Run one command of the operator's; an operation."""
        if self.dry:
            raise Refusal("blocked", "this session is a dry run: the host runs no command")
        changes.refuse_where_disabled(self)
        self.require_secrets([{"args": [{SECRET: name} for name in frame["secrets"]]}])
        return importlib.import_module("fleetfix.remote.streaming").execute(self, frame)

    def waiting(self, frame):
        """What a call of a change waits for; an operation."""
        return importlib.import_module("fleetfix.remote.fabfile").waiting(self, frame)

    def say(self, frame):
        """Pass a word of the controller's on to a call that waits for it."""
        return importlib.import_module("fleetfix.remote.fabfile").tell(self, frame)

    def _pass_on(self, op, frame):
        stream = self.streams.get(frame["of"])
        if stream is not None and op == "taken":
            stream.taken(int(frame["bytes"]))
        elif stream is not None:
            stream.feed(frame["data"], bool(frame["end"]))

    def recall(self, frame):
        try:
            with open(self.records.note(frame["name"]), "rb") as file:
                return json.loads(file.read())
        except FileNotFoundError:
            return None
        except ValueError:
            text = "what run %s kept here under %r is torn" % (self.run, frame["name"])
            hint = "look at the host; then fleetfix rollback, or release, %s" % self.run
            raise Refusal("command", text, hint) from None

    def cancel(self, frame):
        """End every running call, also of a lost session of this run; answer with what cannot be ended."""
        self._drop_waiting()
        running = [child for child in self.children if child.kind != "kill" and not child.finished]
        killers = [self.end(child, "cancelled") for child in running if child.ending is None]
        named = []
        for killer in killers:
            named += (yield killer).get("value") or []
        while any(not child.finished for child in running):
            yield SOON
        named += [one for child in running for one in child.hung]
        named += yield from changes.end_strays(self)
        return list(dict.fromkeys(named))

    def _drop_waiting(self):
        """Answer what has not begun as cancelled."""
        while self.reads:
            n, i, _, _ = self.reads.popleft()
            self.tell({"n": n, "i": i, "reply": calls.failed("cancelled", "it was not begun")})
        while self.writes:
            n, operation = self.writes.popleft()
            operation.close()
            self.tell({"n": n, "error": calls.failure("cancelled", "it was not begun")})
        if self._drop_writing():
            self.tell({"n": self.writing_for, "error": calls.failure("cancelled", "it was not begun")})


def sweep_due(home):
    """Whether the time of anything that is held here is over, or old runs were not looked for lately."""
    folder = os.path.join(home, "holds")
    if any(_until(os.path.join(folder, name)) <= time.time() for name in _names(folder)):
        return True
    return len(_names(os.path.join(home, "runs"))) > MANY and not _is_fresh(os.path.join(home, "swept"))


def _names(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _is_fresh(path):
    try:
        return abs(time.time() - os.stat(path).st_mtime) < DAY
    except OSError:
        return False


def _until(path):
    try:
        with open(path, "rb") as file:
            return float(json.loads(file.read()).get("until", 0))
    except (OSError, ValueError, AttributeError, TypeError):
        return float("inf")


def _broken(error):
    text = "the runner broke: %s: %s (%s)" % (type(error).__name__, error, calls.place_of(error))
    return calls.failure("bug", text)


AT_SIGHT = {
    "hello": Runner.info,
    "await_lease": Runner.await_lease,
    "past": Runner.past,
    "modules": Runner.modules,
    "recall": Runner.recall,
    "execute": Runner.execute,
    "cancel": Runner.cancel,
    "waiting": Runner.waiting,
    "tell": Runner.say,
}


def main():
    """Wait for the greeting, then serve."""
    channel = Channel()
    try:
        frames = _first(channel)
    except Lost:
        return
    os.chdir("/")
    os.umask(0o022)
    os.environ.clear()
    os.environ.update({"PATH": PATH, "LC_ALL": "C"})
    os.environ.update(user_environment(os.geteuid()))
    gc.freeze()  # what is here now is never garbage: children need not copy it to find that out
    runner = Runner(frames[0], channel)
    for frame in frames[1:]:
        runner.handle(frame)
    runner.serve()


def _first(channel):
    poll = select.poll()
    poll.register(channel.source, select.POLLIN)
    frames = []
    until = time.monotonic() + 60.0
    while not frames:
        if not poll.poll(max(until - time.monotonic(), 0) * 1000):
            raise Lost("no greeting")
        frames = channel.receive()
    return frames
