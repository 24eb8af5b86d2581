"""A stand-in of containerd's shim: runs one command in a container, and ends with it.

`containerd-shim BUNDLE` reads BUNDLE/config.json: argv, env, cwd, log, hostname, volumes. The container
is real as far as the kernel goes, with mounts, processes, a name and a root of its own, but for a cgroup;
its image is the host's own files, with other folders in the place of some.
"""

import ctypes
import json
import os
import socket
import sys

NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000  # mounts, names, ipc, processes
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
OWN = ("proc", "run", "tmp", "root")  # nothing of these is the host's
FROM_HOST = ("/run/lab",)

libc = ctypes.CDLL(None, use_errno=True)


def main():
    bundle = sys.argv[1]
    with open(os.path.join(bundle, "config.json")) as file:
        config = json.load(file)
    did(libc.unshare(NEW), "unshare")
    pid = os.fork()
    if pid == 0:
        try:
            enter(os.path.join(bundle, "rootfs"), config)
            start(config)
        finally:
            os._exit(127)
    sys.exit(0 if os.waitpid(pid, 0)[1] == 0 else 1)


def did(result, what):
    """Raise what the kernel said where it refused."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount(source, target, kind=None, flags=0):
    words = [word.encode() if word else None for word in (source, target, kind)]
    did(libc.mount(*words, ctypes.c_ulong(flags), None), "mount of " + target)


def enter(root, config):
    """Lay out the container's files at `root`, and make that its root."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("overlay", root, "tmpfs")
    for name in os.listdir("/"):
        if name not in OWN:
            show("/" + name, root + "/" + name)
    for name in OWN:
        os.mkdir(root + "/" + name)
    os.chmod(root + "/tmp", 0o1777)
    for path in FROM_HOST:
        show(path, root + path)
    for target, source in config["volumes"]:
        show(source, root + target)
    mount("proc", root + "/proc", "proc")
    os.chdir(root)
    did(libc.pivot_root(b".", b"."), "pivot_root")
    did(libc.umount2(b".", MNT_DETACH), "umount")
    socket.sethostname(config["hostname"])


def show(source, target):
    """Let a path of the host be seen in the container."""
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(source, target, flags=MS_BIND | MS_REC)


def start(config):
    os.setsid()
    os.chdir(config["cwd"])
    log = os.open(config["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.execve(config["argv"][0], config["argv"], config["env"])


main()
