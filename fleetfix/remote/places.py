"""Where fleetfix keeps its records on this host, and the host's own kill switch."""

import contextlib
import os

from fleetfix.remote.api import Refusal, no_space, refusal_of, user_home
from fleetfix.remote.records import Records

ROOM = 64 * 1024  # bytes that must be free where records are kept


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
                last = last if last is not None and no_space(last) else error
        no = refusal_of(last, "no records can be kept on this host")
        raise no if no.kind == "no_space" else Refusal("blocked", no.message, no.hint)

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
    return os.access(path, os.W_OK | os.X_OK) and _has_room(path)


def _has_room(path):
    free = os.statvfs(path)
    return free.f_bavail * free.f_frsize >= ROOM and not (free.f_files and not free.f_favail)


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
            os.write(fd, b"\0" * ROOM)
            os.fsync(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, home) from None
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)
