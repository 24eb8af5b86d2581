"""Gives a login on a lab host a terminal of that host: arguments are rows, columns, and the command."""

import fcntl
import os
import pty
import select
import struct
import sys
import termios


def main():
    rows, columns = int(sys.argv[1]), int(sys.argv[2])
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(sys.argv[3], sys.argv[3:])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    carry(terminal)
    os.close(terminal)
    code = os.waitpid(pid, 0)[1]
    return os.WEXITSTATUS(code) if os.WIFEXITED(code) else 128 + os.WTERMSIG(code)


def carry(terminal):
    """Both ways, until the command has closed its end, or nobody reads our output any more."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(terminal, select.POLLIN)
    poll.register(1, 0)
    while True:
        for fd, _ in poll.poll():
            if fd == 1:
                return
            data = take(fd)
            if not data and fd == terminal:
                return
            if not data:
                poll.unregister(0)
            give(1 if fd == terminal else terminal, data)


def take(fd):
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""


def give(fd, data):
    while data:
        data = data[os.write(fd, data) :]


sys.exit(main())
