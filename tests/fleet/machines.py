"""Real OpenSSH servers, each in network, mount, process and host name spaces of its own.

The machines hang on a bridge in a network of their own, in which the controller runs too: nothing of it
touches the network of the machine that the tests run on. Needs root, iproute2 and OpenSSH.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.contract import sshd

PYTHON = "/usr/bin/python3"

_SSHD = """\
Port 22
HostKey /srv/ssh/host_key
AuthorizedKeysFile /srv/ssh/authorized_keys
PidFile /srv/sshd.pid
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
PermitRootLogin yes
MaxStartups 100
"""

_SSH = """\
Host *
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile none
"""

# The first process of a machine: mounts what is its own, runs sshd, collects what has ended. It ends, and
# everything on the machine with it, when whoever started it is gone. SIGUSR1 starts sshd once more.
_INIT = r"""
import ctypes, os, select, signal, socket, subprocess, sys

server, folder, name = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)

def mount(source, target, kind=None, flags=0, data=None):
    words = [word.encode() if word else None for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), data.encode() if data else None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)

with open(folder + "/pid.new", "w") as file:
    file.write(os.readlink("/proc/self"))
os.rename(folder + "/pid.new", folder + "/pid")
BIND, REC, PRIVATE = 4096, 16384, 1 << 18
mount("none", "/", flags=REC | PRIVATE)
mount(folder + "/lib", "/var/lib", flags=BIND | REC)
mount(folder + "/srv", "/srv", flags=BIND)
boot = os.open(folder + "/boot_id", os.O_PATH)
mount("proc", "/proc", "proc")
mount("/proc/self/fd/%d" % boot, "/proc/sys/kernel/random/boot_id", flags=BIND)
mount("tmpfs", "/run", "tmpfs", data="size=4m,mode=0755")
mount("tmpfs", "/tmp", "tmpfs", data="size=4m,mode=1777")
os.mkdir("/run/sshd", 0o755)
socket.sethostname(name)

def serve(*_):
    subprocess.Popen([server, "-D", "-f", "/srv/ssh/sshd_config"],
                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

woken, wake = os.pipe()
for fd in (woken, wake):
    os.set_blocking(fd, False)
signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.signal(signal.SIGUSR1, serve)
serve()
while 0 not in select.select([0, woken], [], [])[0]:
    os.read(woken, 4096)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


def why_not() -> str | None:
    """Why no machines can be made here, or None."""
    if os.geteuid() != 0:
        return "machines in namespaces of their own need root"
    for tool in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"no {tool} here"
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return "this kernel does not tell the children of a process"
    if not os.access(PYTHON, os.X_OK) or not os.path.isdir("/srv"):
        return f"no {PYTHON}, or no /srv, here"
    return sshd.why_not()


@dataclass
class Machine:
    """One of them. Files below `srv` lie at /srv on it, files below `lib` at /var/lib."""

    network: Network
    name: str
    number: int
    small: bool = False
    """Its /var/lib is a file system of its own, of four MiB."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        return self.network.folder / self.name

    @property
    def srv(self) -> Path:
        return self.folder / "srv"

    @property
    def lib(self) -> Path:
        """Seen by way of the process that keeps the network: file systems of machines are mounted there."""
        return Path(f"/proc/{self.network.keeper.pid}/root{self.folder}/lib")

    @property
    def address(self) -> str:
        return f"10.77.{self.number // 200}.{self.number % 200 + 2}"

    @property
    def mac(self) -> str:
        return f"02:00:00:00:{self.number // 200:02x}:{self.number % 200 + 2:02x}"

    @property
    def link(self) -> str:
        """The controller's end of its cable."""
        return f"to{self.number}"

    # -- up and down --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Lay out what lasts."""
        for path in (self.srv / "ssh", self.folder / "lib"):
            path.mkdir(parents=True)
        for name in ("host_key", "authorized_keys", "sshd_config"):
            shutil.copy(self.network.folder / name, self.srv / "ssh" / name)
        (self.srv / "ssh/host_key").chmod(0o600)
        if self.small:
            where = str(self.folder / "lib")
            self.network.run("mount", "-n", "-t", "tmpfs", "-o", "size=4m", "tmpfs", where, space="--mount")

    def boot(self) -> None:
        """Start it, with a boot id of its own; `Network.plug` gives it its network."""
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        for stale in (self.folder / "pid", self.srv / "sshd.pid"):
            stale.unlink(missing_ok=True)
        spaces = ["--mount", "--net", "--uts", "--pid", "--fork", "--kill-child"]
        init = [PYTHON, "-ISBc", _INIT, sshd.SSHD, str(self.folder), self.name]
        self.process = subprocess.Popen(
            [
                *("nsenter", f"--target={self.network.keeper.pid}", "--mount", "--"),
                *("unshare", *spaces, "--", *init),
            ],
            stdin=subprocess.PIPE,
            cwd="/",
        )

    @property
    def pid(self) -> int:
        """Its first process, as this machine sees it."""
        return int((self.folder / "pid").read_text())

    def down(self) -> None:
        """Switch it off: everything on it is gone at once, and says nothing to anybody."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()

    def reboot(self) -> None:
        """Switch it off and on again; its disks stay."""
        was = self.pid
        self.down()
        until(lambda: _state(was) in "ZX", f"{self.name} to be down")
        self.boot()
        self.network.plug([self])

    # -- processes ----------------------------------------------------------------------------------

    def processes(self) -> dict[int, tuple[str, ...]]:
        """What runs on it, but for its first process: arguments by pid, as this machine numbers them."""
        found = {}
        waiting = _children(self.pid)
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):
                argv = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                if _state(pid) not in "ZX":
                    found[pid] = tuple(word.decode(errors="replace") for word in argv)
                waiting += _children(pid)
        return found

    def servers(self) -> list[int]:
        """The sshd that listens, and those of its connections."""
        return [pid for pid in self.processes() if _comm(pid).startswith("sshd")]

    def listener(self) -> int | None:
        return next((pid for pid in self.servers() if _parent(pid) == self.pid), None)

    def connections(self) -> list[int]:
        return [pid for pid in self.servers() if _parent(pid) != self.pid]

    def runner(self) -> int:
        """The runner, or what is about to become it."""
        found = {pid for pid, argv in self.processes().items() if {"-I", "-S", "-B"} <= {*argv}}
        (top,) = (pid for pid in found if _parent(pid) not in found)
        return top

    def left_behind(self) -> list[str]:
        """What runs on it that is not its own: nothing, once nobody is at work there."""
        own = {self.pid, *self.servers()}
        return [" ".join(argv)[:80] for pid, argv in self.processes().items() if pid not in own]

    def run(self, *argv: str, space: str) -> None:
        """Run a command in one of its name spaces."""
        _run("nsenter", f"--target={self.pid}", space, "--", *argv)

    # -- faults -------------------------------------------------------------------------------------

    def cut(self) -> None:
        """End every connection, as a firewall does that is told so."""
        for pid in self.connections():
            _kill(pid, signal.SIGKILL)

    def reset(self) -> None:
        """End every connection with a reset."""
        sockets = [held for pid in self.connections() for held in _sockets_of(pid)]
        self.cut()
        until(lambda: not self.connections(), "its connections to end")
        for held in sockets:
            held.close()

    def silence(self, *, on: bool = True) -> None:
        """Pull the cable: what is sent goes nowhere, and nobody says so."""
        self.network.run("ip", "link", "set", self.link, "down" if on else "up", space="--net")

    def refuse(self) -> None:
        """End sshd and its connections: nobody listens."""
        for pid in self.servers():
            _kill(pid, signal.SIGKILL)

    def listen(self) -> None:
        """Have sshd listen again, if it does not."""
        if self.listener() is None:
            (self.srv / "sshd.pid").unlink(missing_ok=True)
            _kill(self.pid, signal.SIGUSR1)
            until((self.srv / "sshd.pid").exists, "sshd to listen again")

    def stop(self, *, on: bool = True) -> None:
        """Stop sshd and its connections where they are, as a machine does that has run out of memory."""
        for pid in self.servers():
            _kill(pid, signal.SIGSTOP if on else signal.SIGCONT)

    def slow(self, *, on: bool = True) -> None:
        """Let a quarter of a megabit a second through, each way."""
        shape = ["tbf", "rate", "256kbit", "burst", "4kb", "latency", "10s"] if on else []
        verb = "add" if on else "del"
        self.network.run("tc", "qdisc", verb, "dev", self.link, "root", *shape, space="--net")
        self.run("tc", "qdisc", verb, "dev", "eth0", "root", *shape, space="--net")

    def fill(self) -> None:
        """Fill its /var/lib."""
        block = bytes(64 * 1024)
        with open(self.lib / "filler", "ab", buffering=0) as file:
            while block:
                try:
                    file.write(block)
                except OSError:
                    block = block[: len(block) // 2]

    def empty(self) -> None:
        (self.lib / "filler").unlink(missing_ok=True)

    def make_read_only(self) -> None:
        """Make its /var/lib read-only for whatever opens a file there from now on."""
        self.run("mount", "-n", "--bind", "/var/lib", "/var/lib", space="--mount")
        self.run("mount", "-n", "-o", "remount,bind,ro", "/var/lib", space="--mount")

    def make_writable(self) -> None:
        self.run("umount", "-n", "/var/lib", space="--mount")


@dataclass
class Network:
    """Machines, the bridge between them, and the network that the controller is in."""

    folder: Path
    keeper: subprocess.Popen[bytes]
    machines: list[Machine] = field(default_factory=list)

    def run(self, *argv: str, space: str, stdin: str | None = None) -> None:
        """Run a command in one of the keeper's name spaces."""
        _run("nsenter", f"--target={self.keeper.pid}", space, "--", *argv, stdin=stdin)

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` where the machines can be reached."""
        return ["nsenter", f"--target={self.keeper.pid}", "--net", "--", *argv]

    def add(self, names: Sequence[str], small: Sequence[str] = ()) -> None:
        """Make machines and start them; returns when sshd listens on each."""
        new = [
            Machine(self, name, len(self.machines) + number, small=name in small)
            for number, name in enumerate(names)
        ]
        for machine in new:
            machine.prepare()
            machine.boot()
        self.machines += new
        self.plug(new)

    def plug(self, machines: Sequence[Machine]) -> None:
        """Give machines that have just booted their network, and wait until sshd listens there."""
        for machine in machines:
            until((machine.folder / "pid").exists, f"{machine.name} to boot")
        lines = []
        for one in machines:
            peer = f"peer name eth0 address {one.mac} netns {one.pid}"
            lines += [
                f"link add {one.link} type veth {peer}",
                f"link set {one.link} master br0 up",
                # Known for good: else a cable that is pulled would be told of after some seconds.
                f"neigh replace {one.address} lladdr {one.mac} dev br0 nud permanent",
            ]
        self.run("ip", "-batch", "-", space="--net", stdin="\n".join(lines) + "\n")
        for one in machines:
            own = f"addr add {one.address}/16 dev eth0\nlink set eth0 up\nlink set lo up\n"
            argv = ("nsenter", f"--target={one.pid}", "--net", "--", "ip", "-batch", "-")
            _run(*argv, stdin=own)
        for one in machines:
            until((one.srv / "sshd.pid").exists, f"sshd to listen on {one.name}")

    def close(self) -> None:
        for machine in self.machines:
            if machine.process is not None and machine.process.poll() is None:
                machine.down()
        assert self.keeper.stdin is not None
        self.keeper.stdin.close()
        self.keeper.wait(10)


@contextlib.contextmanager
def network(folder: Path) -> Iterator[Network]:
    """A network for machines, below this folder, until the end of the block."""
    for name in ("host_key", "key"):
        made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(made, check=True)
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    (folder / "sshd_config").write_text(_SSHD)
    (folder / "ssh_config").write_text(_SSH.format(folder=folder))
    (folder / "known_hosts").write_text("* " + (folder / "host_key.pub").read_text())
    script = (
        "ip link set lo up && ip link add br0 type bridge forward_delay 0"
        " && ip addr add 10.77.0.1/16 dev br0 && ip link set br0 up && echo up && exec cat"
    )
    keeper = subprocess.Popen(
        ["unshare", "--net", "--mount", "--", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    made_network = Network(folder, keeper)
    try:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"up\n", "the network could not be made"
        yield made_network
    finally:
        made_network.close()
        assert keeper.stdout is not None
        keeper.stdout.close()


def until(true: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Wait until something holds; fail with what was waited for where it never does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain for {what}"
        time.sleep(0.01)


def _run(*argv: str, stdin: str | None = None) -> None:
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(pid: int) -> list[int]:
    """What it has started, or was left to it: whatever runs on a machine is below its first process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _state(pid: int) -> str:
    try:
        return _stat(pid)[0]
    except OSError:
        return "X"


def _parent(pid: int) -> int:
    try:
        return int(_stat(pid)[1])
    except OSError:
        return -1


def _sockets_of(pid: int) -> list[socket.socket]:
    """The TCP connections of a process, in our hands too, set to end with a reset when the last lets go."""
    held = []
    pidfd = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                fd = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, int(name), 0)  # pidfd_getfd
                if fd >= 0 and (one := socket.socket(fileno=fd)).family == socket.AF_INET:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    held.append(one)
                elif fd >= 0:
                    one.close()
    finally:
        os.close(pidfd)
    return held
