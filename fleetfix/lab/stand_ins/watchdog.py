"""A keeper that is no parent of what it keeps: whenever the job is gone, it starts it again."""

import json
import os
import sys
import time


def main():
    boot = json.loads(sys.argv[1])
    wanted = os.path.basename(boot["argv"][1]).encode()
    while True:
        if not running(wanted):
            start(boot)
        time.sleep(0.5)


def running(wanted):
    for name in os.listdir("/proc"):
        try:
            with open("/proc/%s/cmdline" % name, "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if len(words) > 1 and os.path.basename(words[1]) == wanted:
            return True
    return False


def start(boot):
    """Start it as a grandchild, so that its parent is the first process of the host."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    os.setsid()
    if os.fork() == 0:
        os.chdir(boot["cwd"])
        log = os.open(boot["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.execve(boot["argv"][0], boot["argv"], boot["env"])
    os._exit(0)


main()
