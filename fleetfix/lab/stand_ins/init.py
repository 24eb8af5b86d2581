"""The first process of a lab host: lays out its mounts, starts what boots with it, and reaps.

Runs as pid 1 of new mount, UTS and pid namespaces (and a user namespace where an ordinary user made
the lab), by the system's Python without site-packages. Argument: the path of a JSON file that
`fleetfix.lab.layout` wrote. Reports once, as one JSON line on standard output. `launch JSON` starts
one command in a host that is up, detached.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE = 1024, 2048, 4096, 16384, 1 << 18
MS_RELATIME = 1 << 21
MNT_DETACH = 2
KEPT_FLAGS = {
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": MS_NOATIME,
    "nodiratime": MS_NODIRATIME,
    "relatime": MS_RELATIME,
}
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}

libc = ctypes.CDLL(None, use_errno=True)


def main():
    if sys.argv[1] == "launch":
        # Not a first process: a command of the lab that starts something and is gone.
        print(start(json.loads(sys.argv[2])))
        return
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    report = {"pid": int(os.readlink("/proc/self"))}
    try:
        lay_out(spec)
    except OSError as error:
        report["error"] = "%s: %s" % (error.filename or spec["hostname"], error.strerror)
    answer = os.dup(1)
    quiet()
    if "error" not in report and spec.get("boot"):
        report["job"] = start(spec["boot"])
    os.write(answer, (json.dumps(report) + "\n").encode())
    os.close(answer)
    if "error" in report:
        sys.exit(1)
    reap()


# -- mounts ------------------------------------------------------------------------------------------


def lay_out(spec):
    root = spec["root"]
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    kept = {path: os.open(path, os.O_PATH) for path in spec["keep"]}
    # Bound onto itself first: this one mount stays writable when everything else is made read-only.
    mount(root, root, flags=MS_BIND)
    make_dev(root, spec)
    shared = [(target, source) for target, source in spec.get("shared", ())]
    for _, source in shared:
        mount(source, source, flags=MS_BIND)
    read_only([root, *(source for _, source in shared)])
    common = [(target, os.open(source, os.O_PATH | os.O_DIRECTORY)) for target, source in shared]
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY)
    for target, source in spec["binds"]:
        mount("/proc/self/fd/%d/%s" % (folder, source), target, flags=MS_BIND | MS_REC)
    for target, source, size in spec["tmpfs"]:
        mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=%s" % size)
        bring_back("/proc/self/fd/%d/%s" % (folder, source), target)
    for target, fd in common:
        mount("/proc/self/fd/%d" % fd, target, flags=MS_BIND)
        libc.umount2(b"/proc/self/fd/%d" % fd, MNT_DETACH)
        os.close(fd)
    for path, fd in kept.items():
        mount("/proc/self/fd/%d" % fd, path, flags=MS_BIND)
    # Where the lab's folder can still be seen, the host must not find its own disk there twice.
    libc.umount2(b"/proc/self/fd/%d" % folder, MNT_DETACH)
    os.close(folder)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("/run/lab/boot_id", "/proc/sys/kernel/random/boot_id", flags=MS_BIND)
    protect_kernel()
    socket.sethostname(spec["hostname"])
    os.chdir("/")


def bring_back(kept, target):
    """Copy what the disk keeps of a file system that lives in memory."""
    if os.listdir(kept):
        import shutil

        shutil.copytree(kept, target, symlinks=True, dirs_exist_ok=True)


def mount(source, target, kind=None, flags=0, data=None):
    """mount(2); an OSError that names the target."""
    words = [word.encode() if word else None for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), data.encode() if data else None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "mount of " + target)


def make_dev(root, spec):
    """Build /dev in the host's own folder: real device nodes by bind, the GPUs as plain files."""
    dev = root + "/dev"
    mount("tmpfs", dev, "tmpfs", MS_NOSUID, "mode=0755,size=1m")
    for name in DEVICES:
        os.close(os.open(dev + "/" + name, os.O_CREAT | os.O_WRONLY, 0o666))
        mount("/dev/" + name, dev + "/" + name, flags=MS_BIND)
    for name, target in LINKS.items():
        os.symlink(target, dev + "/" + name)
    for name in spec["gpus"]:
        path = dev + "/" + name
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
        os.chmod(path, 0o666)
    os.mkdir(dev + "/pts")
    mount("devpts", dev + "/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    os.mkdir(dev + "/shm")
    mount("tmpfs", dev + "/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=64m")


def read_only(own):
    """Make every mount that came with the machine read-only; what cannot be reached is left."""
    for point, options in mount_points():
        if any(point == one or point.startswith(one + "/") for one in own):
            continue
        flags = MS_REMOUNT | MS_BIND | MS_RDONLY
        for word in options.split(","):
            flags |= KEPT_FLAGS.get(word, 0)
        done = libc.mount(None, point.encode(), None, ctypes.c_ulong(flags), None) == 0
        if not done and point == "/":
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "read-only remount of /")


def mount_points():
    """[(path, options)] of this namespace."""
    with open("/proc/self/mountinfo", "rb") as file:
        rows = [line.split(b" ") for line in file]
    return [(unescape(row[4]), row[5].decode()) for row in rows]


def unescape(path):
    """A path of mountinfo, where blanks and backslashes are octal escapes."""
    raw = path.decode("latin-1").encode("latin-1").decode("unicode_escape").encode("latin-1")
    return os.fsdecode(raw)


def protect_kernel():
    """A host that runs as the machine's root must not turn the machine's own switches."""
    for path in ("/proc/sys", "/proc/sysrq-trigger"):
        if libc.mount(path.encode(), path.encode(), None, ctypes.c_ulong(MS_BIND | MS_REC), None) == 0:
            flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
            libc.mount(None, path.encode(), None, ctypes.c_ulong(flags), None)


# -- processes ---------------------------------------------------------------------------------------


def quiet():
    """Let go of what started this process: its pipes and its session."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def start(boot):
    """Start the command that boots with the host, as a child in a session of its own."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        os.umask(0o022)
        soft = min(boot["nofile"], resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
        os.chdir(boot["cwd"])
        log = os.open(boot["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.execve(boot["argv"][0], boot["argv"], boot["env"])
    finally:
        os._exit(127)


def reap():
    """Collect every child and orphan of this host, for as long as it is up."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait({signal.SIGCHLD})


main()
