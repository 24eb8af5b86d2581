"""Who may write to this host: the places of its records, the lease, the claims, the kill switch.

The lease says who writes now; a claim says that a run has unfinished business here, and survives a
reboot. Both are read in every place where they could be, and written in the place this session uses.
"""

import contextlib
import fcntl
import json
import os
import time

from fleetfix.remote.api import Refusal, user_home, write_durably
from fleetfix.remote.records import Records, alive, checked_name, held_by_anyone, hold_shared, stat_of

LASTS = 120.0  # seconds a lease is good for without being renewed


class Places:
    """Where records can be on this host, best first, under `root` (empty but for tests)."""

    def __init__(self, root=""):
        uid = os.geteuid()
        self.root = root
        if uid == 0:
            self.homes = [root + "/var/lib/fleetfix", root + "/run/fleetfix"]
        else:
            own = user_home(uid) + "/.local/state/fleetfix-host"
            self.homes = [root + own, root + "/run/user/%d/fleetfix-host" % uid]
        self.public = root + "/run/fleetfix.lease"
        self.switch = root + "/etc/fleetfix/DISABLED"

    def expected(self, run):
        """The place this run will use, found without writing: its own, else the first writable."""
        for home in self.homes:
            if os.path.isdir(os.path.join(home, "runs", run)):
                return home
        for home in self.homes:
            if _may_write(home):
                return home
        return self.homes[-1]

    def prepare(self, run):
        """The place this run uses, made and proved writable. A run that has records stays with them."""
        first = self.expected(run)
        others = [home for home in self.homes if home != first]
        if os.path.isdir(os.path.join(first, "runs", run)):
            others = []
            if Records(first, run).is_full():
                Records(first, run).drop_ballast()
        last = None
        for home in [first, *others]:
            try:
                _prove(home)
                return home
            except OSError as error:
                last = error
        raise Refusal(
            "no_space", "no records can be kept on this host: %s" % last, "free space in /var/lib or /run"
        )

    def durable(self, home):
        return home == self.homes[0]

    def disabled(self):
        """What the host's kill switch says, or None where it is not set."""
        try:
            with open(self.switch, "rb") as file:
                text = file.read(500).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            return str(error)
        return text.splitlines()[0] if text else "no reason is given"


def _may_write(path):
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.access(path, os.W_OK | os.X_OK)


def _prove(home):
    os.makedirs(os.path.join(home, "claims"), mode=0o700, exist_ok=True)
    there = os.lstat(home)
    if there.st_uid != os.geteuid() or (there.st_mode & 0o170000) != 0o040000:
        raise PermissionError(1, "belongs to someone else", home)
    os.chmod(home, 0o700)
    probe = os.path.join(home, ".room.%d" % os.getpid())
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, b"\0" * 65536)
            os.fsync(fd)
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)


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


def _load(path):
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def stamp():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Claims:
    """The claims on this host, each with what its run has open."""

    def __init__(self, places):
        self.places = places

    def told_to(self, run):
        """The claims of others behind which something is open, and the run's own."""
        claims = [claim for home in self.places.homes for claim in self._of(home)]
        return [claim for claim in claims if claim["open"] or claim["run"] == run]

    def _of(self, home):
        try:
            names = sorted(os.listdir(os.path.join(home, "claims")))
        except OSError:
            return
        for name in names:
            record = _load(os.path.join(home, "claims", name)) if name.endswith(".json") else None
            if record is not None:
                claim = {
                    key: str(record.get(key, "")) for key in ("run", "operator", "controller", "since")
                }
                claim["open"] = Records(home, checked_name(claim["run"], "run")).open_business()
                yield claim

    def refuse_others(self, run):
        """Raise where another run has unfinished business here."""
        for claim in self.told_to(run):
            if claim["run"] != run:
                raise unfinished(claim)

    def take(self, home, purpose):
        """Write the claim of a run, once."""
        path = os.path.join(home, "claims", purpose["run"] + ".json")
        if not os.path.exists(path):
            record = {"v": 1, "since": stamp()}
            record.update(
                {key: purpose[key] for key in ("run", "playbook", "operator", "controller", "reason")}
            )
            write_durably(path, json.dumps(record).encode())

    def drop(self, home, run):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(home, "claims", run + ".json"))


def unfinished(claim):
    run = claim["run"]
    message = "run %s of %s on %s left work open here since %s: %s"
    filled = message % (
        run,
        claim["operator"],
        claim["controller"],
        claim["since"],
        "; ".join(claim["open"][:5]),
    )
    return Refusal(
        "unfinished",
        filled,
        "fleetfix resume, rollback or release %s" % run,
    )


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
        """The valid lease on this host, whoever has it, or None."""
        for home in self.places.homes:
            record = _load(os.path.join(home, "lease.json"))
            if record is not None and record.get("run") and self._valid(home, record):
                return record
        if os.geteuid() != 0:
            record = _load(self.places.public)
            if record is not None and record.get("run") and self._valid(None, record):
                return record
        return None

    def _valid(self, home, record):
        if record.get("boot_id") != boot_id():
            return False
        if record.get("expires", 0) > time.time():
            return True
        # Past its time, but a runner or a change of that run may live still.
        return home is not None and held_by_anyone(Records(home, str(record["run"])).alive)

    def refuse_others(self):
        """Raise who has the lease: another run, or another controller that is at work on this one."""
        other = self.current()
        if other is None:
            return
        if other["run"] != self.purpose["run"]:
            raise lease_held(other)
        if is_at_work(other) and not self._may_supersede(other):
            raise at_work(other)

    def _may_supersede(self, other):
        """Whether the session that has the lease is one of this very controller, or is to give way."""
        mine = all(other.get(name, "") == self.purpose[name] for name in ("controller", "driver"))
        return mine or self.purpose["take_over"]

    def take(self, home):
        """Take the lease, or raise who has it.

        A newer session of the same run and controller takes it over at once, one of another controller
        where nobody is at the other end of the older one any more, or where it was told to.
        """
        with _locked(home):
            self.refuse_others()
            before = _load(os.path.join(home, "lease.json")) or {}
            self._home, self.epoch = home, int(before.get("epoch", 0)) + 1
            self._write(stamp())
        if self._alive is None:
            self._alive = hold_shared(Records(home, self.purpose["run"]).alive)

    def check(self):
        """Raise where a newer session has taken over. This is the fence before every write."""
        record = _load(os.path.join(self._home, "lease.json")) or {}
        if record.get("epoch") != self.epoch:
            raise Refusal(
                "lease_held", "a newer session has taken over on this host", "let that one finish"
            )

    @contextlib.contextmanager
    def fenced(self):
        """Write within this only: no other session takes the lease before the block has ended."""
        with _locked(self._home):
            self.check()
            yield

    def renew(self):
        """Make the lease last longer, if it is still this session's."""
        if self.epoch is None:
            return
        with _locked(self._home):
            record = _load(os.path.join(self._home, "lease.json")) or {}
            if record.get("epoch") == self.epoch:
                self._write(record["since"])

    def leave(self):
        """Note that the controller is gone: this session only ends what it has in hand."""
        self._left = True
        with contextlib.suppress(OSError):  # a full disk: the end of this process tells it soon
            self.renew()

    def release(self):
        """Let go of the lease, if it is still this session's; the epoch is kept for the next."""
        if self.epoch is None:
            return
        with _locked(self._home):
            record = _load(os.path.join(self._home, "lease.json")) or {}
            if record.get("epoch") == self.epoch:
                _replace(
                    os.path.join(self._home, "lease.json"),
                    {"v": 1, "epoch": self.epoch, "run": None},
                    0o600,
                )
                if os.geteuid() == 0:
                    with contextlib.suppress(OSError):
                        os.unlink(self.places.public)
        self.epoch = None
        os.close(self._alive)
        self._alive = None

    def _write(self, since):
        record = {"v": 1, "epoch": self.epoch, "since": since, "expires": time.time() + LASTS}
        names = ("run", "operator", "controller", "driver", "reason")
        record.update({key: self.purpose[key] for key in names})
        pid = os.getpid()
        record.update({"boot_id": boot_id(), "pid": pid, "start": stat_of(pid)[2], "left": self._left})
        _replace(os.path.join(self._home, "lease.json"), record, 0o600)
        if os.geteuid() == 0:
            # Other users cannot look into the home of root: this tells them that root writes here.
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(self.places.public), exist_ok=True)
                _replace(self.places.public, record, 0o644)


def is_at_work(record):
    """Whether the session that has this lease lives, and its controller is at the other end."""
    return not record.get("left") and alive(int(record["pid"]), record.get("start"))


def lease_held(record):
    return Refusal("lease_held", _who_writes(record), "wait until it has ended")


def at_work(record):
    hint = "fleetfix stop %s there; --take-over takes the run away from it" % record["run"]
    return Refusal("lease_held", _who_writes(record), hint)


def _who_writes(record):
    why = " (%s)" % record["reason"] if record.get("reason") else ""
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


@contextlib.contextmanager
def _locked(home):
    fd = os.open(
        os.path.join(home, "lease.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
