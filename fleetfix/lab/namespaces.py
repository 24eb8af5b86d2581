"""Namespaces by util-linux: makes hosts, enters them, and sees their processes from outside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetfix.errors import LabError

DOCKER = (
    "docker run --rm -it --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined --cap-add SYS_ADMIN IMAGE"
)
PRIVATE = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True)
class Started:
    """A process by pid and start time (ticks since boot): never mistaken for a later one."""

    pid: int
    start: int

    def alive(self) -> bool:
        """Whether it runs still (a zombie does not)."""
        stat = stat_of(self.pid)
        return stat is not None and stat[2] == self.start and stat[0] not in "ZX"

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Signal it, if it is still the same process."""
        if self.alive():
            try:
                os.kill(self.pid, signum)
            except ProcessLookupError:
                return

    def wait_gone(self, seconds: float) -> bool:
        """Wait until it is gone; False when it is not by then."""
        until = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True


def started(pid: int) -> Started:
    """Name a living process; a LabError where it is gone already."""
    stat = stat_of(pid)
    if stat is None:
        raise LabError(f"process {pid} of the lab ended while it was starting")
    return Started(pid, stat[2])


def stat_of(pid: int) -> tuple[str, int, int] | None:
    """(state, parent, start time in ticks), or None where there is no such process."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may itself hold blanks and parentheses.
    fields = data[data.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[1]), int(fields[19])


def ordinary() -> bool:
    """Whether this is an ordinary user, whose hosts need a user namespace."""
    return os.geteuid() != 0


def unshare(argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` as the first process of a new host."""
    user = ["--user", "--map-root-user"] if ordinary() else []
    return [_tool("unshare"), *user, "--mount", "--uts", "--ipc", "--pid", "--fork", "--", *argv]


def enter(init: int, argv: Sequence[str], *, uid: int = 0) -> list[str]:
    """The command that runs `argv` inside the host whose first process is `init`."""
    user = ["--user", "--preserve-credentials"] if ordinary() else []
    identity = ["--setuid", str(uid), "--setgid", str(uid)] if uid else []
    spaces = ["--mount", "--uts", "--ipc", "--pid"]
    return [_tool("nsenter"), "--target", str(init), *user, *spaces, *identity, "--", *argv]


def check() -> None:
    """See that hosts can be made here, or say in one line what stands in the way and what to do."""
    probe = "mount -t tmpfs tmpfs /tmp && mount -t proc proc /proc"
    argv = unshare(["/bin/sh", "-c", probe])
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=PRIVATE)
    if done.returncode != 0:
        raise LabError(f"hosts cannot be made here: {_first_line(done.stderr)}", hint=remedy())


def _tool(name: str) -> str:
    path = shutil.which(name, path=PRIVATE["PATH"])
    if path is None:
        raise LabError(f"the lab needs `{name}`", hint="install util-linux (Linux only)")
    return path


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "unshare failed without a word"


def remedy() -> str:
    """What to do where namespaces are refused."""
    for name, wanted in (
        ("kernel/apparmor_restrict_unprivileged_userns", "0"),
        ("kernel/unprivileged_userns_clone", "1"),
    ):
        path = Path("/proc/sys") / name
        if ordinary() and path.exists() and path.read_text().strip() != wanted:
            return f"sudo sysctl -w {name.replace('/', '.')}={wanted}, or run the lab as root"
    return f"namespaces are not allowed; in a container: {DOCKER}"


# -- what runs in a host -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A process of a host: `pid` as the host sees it, `outer` as this machine sees it."""

    pid: int
    outer: int
    parent: int
    start: int
    uid: int
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.pid} {' '.join(self.argv)}"


def processes(init: int) -> tuple[Process, ...]:
    """Every living process of the host whose first process is `init`, but for that: containers included."""
    space, depth = _space(init), len(_pids_of(init))
    if space is None:
        return ()
    found = {}
    for pid in _all_pids():
        # The process of a container has a pid in each namespace that it is seen from.
        if pid != init and (_space(pid) == space or len(_pids_of(pid)) > depth):
            process = _look(pid, depth)
            if process is not None:
                found[pid] = process
    here = [one for one in found.values() if _belongs(one, found, space)]
    return tuple(sorted(here, key=lambda one: one.pid))


def _belongs(one: Process, found: dict[int, Process], space: str) -> bool:
    """Whether a process is in a namespace, or below a process that is."""
    while _space(one.outer) != space:
        above = found.get(one.parent)
        if above is None:
            return False
        one = above
    return True


def has_open(process: Process, path: str) -> bool:
    """Whether a process has a file of its host open."""
    folder = f"/proc/{process.outer}/fd"
    try:
        return any(os.readlink(f"{folder}/{fd}") == path for fd in os.listdir(folder))
    except OSError:
        return False


def _pids_of(pid: int) -> tuple[int, ...]:
    """The pids of a process in every namespace that it is seen from, the outermost first."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ()
    line = next((line for line in status.splitlines() if line.startswith("NSpid:")), "")
    return tuple(int(word) for word in line.split()[1:])


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _space(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _look(pid: int, depth: int) -> Process | None:
    stat = stat_of(pid)
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        argv = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if stat is None or stat[0] in "ZX":
        return None
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    words = tuple(word.decode("utf-8", "surrogateescape") for word in argv.rstrip(b"\0").split(b"\0"))
    inner = int(fields["NSpid"].split()[depth - 1])
    return Process(inner, pid, stat[1], stat[2], int(fields["Uid"].split()[0]), words)
