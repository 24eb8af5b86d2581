"""Who may write to this host now: the lease.

It is read in every place where it could be, and written in the place this session uses. Its time is
counted by the clock that runs since boot, which nobody sets: a wall clock that jumps frees no lease
and keeps none.
"""

import contextlib
import fcntl
import json
import os
import time

from fleetfix.remote.api import Refusal
from fleetfix.remote.claims import stamp
from fleetfix.remote.records import Records, alive, held_by_anyone, hold_shared, load, stat_of

LASTS = 120.0  # seconds a lease is good for without being renewed
PATIENCE = 5.0  # seconds to wait for who holds the lock of the lease; it is held for one write
WORDS = ("run", "operator", "controller", "driver", "reason", "since", "boot_id")


def since_boot():
    """Seconds since this host was started, also those in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id():
    return _line("/proc/sys/kernel/random/boot_id")


def machine_id():
    return _line("/etc/machine-id")


def _line(path):
    try:
        with open(path, "rb") as file:
            return file.read(200).decode("ascii", "replace").strip()
    except OSError:
        return ""


class Lease:
    """The one right to write to this host, as this session may hold it."""

    def __init__(self, places, purpose):
        self.places = places
        self.purpose = purpose
        self.epoch = None
        self._home = None
        self._alive = None
        self._left = False

    def current(self):
        """The valid lease on this host, whoever has it, or None.

        Other users cannot look into the home of root: for them, and where root's own records were
        removed, a copy of root's lease lies where all can read it.
        """
        for home in self.places.homes:
            record = _read(os.path.join(home, "lease.json"))
            if record is not None and self._valid(home, record):
                return record
        record = _read(self.places.public)
        return record if record is not None and self._valid(None, record) else None

    def _valid(self, home, record):
        if record["boot_id"] != boot_id():
            return False
        if home is None and os.geteuid() == 0:
            # What root's own records do not tell counts while it is seen to live.
            return alive(record["pid"], record["start"])
        if 0 < record["until"] - since_boot() <= LASTS:
            return True
        # Past its time, but a runner or a change of that run may live still.
        if alive(record["pid"], record["start"]):
            return True
        return home is not None and held_by_anyone(Records(home, record["run"]).alive)

    def in_the_way(self):
        """Why this session may not write now: another run has the lease, or another controller is at work
        on this one. None where it may."""
        other = self.current()
        if other is None:
            return None
        if other["run"] != self.purpose["run"]:
            return lease_held(other)
        if is_at_work(other) and not self._may_supersede(other):
            return at_work(other)
        return None

    def refuse_others(self):
        """Raise who has the lease."""
        refusal = self.in_the_way()
        if refusal is not None:
            raise refusal

    def _may_supersede(self, other):
        """Whether the session that has the lease is one of this very controller, or is to give way."""
        mine = all(other[name] == self.purpose[name] for name in ("controller", "driver"))
        return mine or self.purpose["take_over"]

    def take(self, home):
        """Take the lease, or raise who has it.

        A newer session of the same run and controller takes it over at once, one of another controller
        where nobody is at the other end of the older one any more, or where it was told to.
        """
        with self._locked(home):
            self.refuse_others()
            before = load(os.path.join(home, "lease.json")) or {}
            self._home, self.epoch = home, _whole(before.get("epoch")) + 1
            self._write(stamp())
        if self._alive is not None:
            os.close(self._alive)
        self._alive = hold_shared(Records(home, self.purpose["run"]).alive)

    def is_gone(self):
        """Whether the record of the lease that this session has was removed by somebody."""
        return self.epoch is not None and load(os.path.join(self._home, "lease.json")) is None

    def check(self):
        """Raise where a newer session has taken over. This is the fence before every write."""
        record = load(os.path.join(self._home, "lease.json"))
        if record is None:
            raise Refusal(
                "in_doubt",
                "the records of fleetfix in %s were removed while run %s was at work here"
                % (self._home, self.purpose["run"]),
                "look at the host; then fleetfix release %s" % self.purpose["run"],
            )
        if record.get("epoch") != self.epoch:
            raise Refusal(
                "lease_held", "a newer session has taken over on this host", "let that one finish"
            )

    @contextlib.contextmanager
    def fenced(self):
        """Write within this only: no other session takes the lease before the block has ended."""
        with self._locked(self._home):
            self.check()
            yield

    def renew(self):
        """Make the lease last longer, if it is still this session's. Where that fails, its runner lives."""
        if self.epoch is None:
            return
        with contextlib.suppress(OSError, Refusal), self._locked(self._home):
            record = load(os.path.join(self._home, "lease.json")) or {}
            if record.get("epoch") == self.epoch:
                self._write(str(record.get("since", "")))

    def leave(self):
        """Note that the controller is gone: this session only ends what it has in hand."""
        self._left = True
        self.renew()

    def release(self):
        """Let go of the lease, if it is still this session's; the epoch is kept for the next."""
        if self.epoch is None:
            return
        # Where it cannot be let go, the end of this process frees it soon.
        with contextlib.suppress(OSError, Refusal), self._locked(self._home):
            path = os.path.join(self._home, "lease.json")
            if (load(path) or {}).get("epoch") == self.epoch:
                _replace(path, {"v": 1, "epoch": self.epoch, "run": None}, 0o600)
                if os.geteuid() == 0:
                    os.unlink(self.places.public)
        self.epoch = None
        os.close(self._alive)
        self._alive = None

    def _write(self, since):
        record = {"v": 1, "epoch": self.epoch, "since": since, "until": since_boot() + LASTS}
        names = ("run", "operator", "controller", "driver", "reason")
        record.update({key: self.purpose[key] for key in names})
        pid = os.getpid()
        record.update({"boot_id": boot_id(), "pid": pid, "start": stat_of(pid)[2], "left": self._left})
        _replace(os.path.join(self._home, "lease.json"), record, 0o600)
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(self.places.public), exist_ok=True)
                _replace(self.places.public, record, 0o644)

    @contextlib.contextmanager
    def _locked(self, home):
        """Hold the lock of the lease. Who holds it and was stopped keeps nobody waiting for ever."""
        fd = os.open(
            os.path.join(home, "lease.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            until = time.monotonic() + PATIENCE
            while not _locks(fd):
                if time.monotonic() > until:
                    raise self._stuck(home)
                time.sleep(0.01)
            yield
        finally:
            os.close(fd)

    def _stuck(self, home):
        other = _read(os.path.join(home, "lease.json"))
        if other is None:
            return Refusal("lease_held", "another session of fleetfix holds the lock of this host's lease")
        text = "%s, and its process %d stands still there" % (_who_writes(other), other["pid"])
        return Refusal("lease_held", text, "look at that process on the host")


def _locks(fd):
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def told(record):
    """A lease in words and numbers for the controller; `expires` by the wall clock, for people."""
    names = ("run", "operator", "controller", "driver", "reason", "since", "boot_id", "epoch")
    found = {name: record[name] for name in names}
    found.update(expires=time.time() + record["until"] - since_boot(), at_work=is_at_work(record))
    return found


def _read(path):
    """The lease in a file, every field of it there; None where there is none, or a torn one."""
    record = load(path)
    if record is None or not isinstance(record.get("run"), str):
        return None
    found = {name: str(record.get(name, "")) for name in WORDS}
    found.update({name: _whole(record.get(name)) for name in ("epoch", "pid", "start")})
    until = record.get("until")
    found.update(until=float(until) if isinstance(until, (int, float)) else 0.0)
    found.update(left=bool(record.get("left")))
    return found


def _whole(number):
    return number if isinstance(number, int) else 0


def is_at_work(record):
    """Whether the session that has this lease lives, and its controller is at the other end."""
    return not record["left"] and alive(record["pid"], record["start"])


def lease_held(record):
    return Refusal("lease_held", _who_writes(record), "wait until it has ended, or say --lock-wait 10m")


def at_work(record):
    hint = "fleetfix stop %s there; --take-over takes the run away from it" % record["run"]
    return Refusal("lease_held", _who_writes(record), hint)


def _who_writes(record):
    why = " (%s)" % record["reason"] if record["reason"] else ""
    message = "run %s of %s on %s writes to this host since %s%s"
    return message % (record["run"], record["operator"], record["controller"], record["since"], why)


def _replace(path, record, mode):
    """Replace a file whole. Not synced: after a crash of the host no lease of before it is valid."""
    temporary = "%s.%d.tmp" % (path, os.getpid())
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(json.dumps(record).encode())
    os.chmod(temporary, mode)
    os.rename(temporary, path)
