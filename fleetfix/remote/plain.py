"""Open regular files where somebody else decides what stands there.

To open a device or a pipe may already do something: a watchdog starts to count, a tape goes back, a reader
waits for ever. Whoever owns a tree can put a link to one of these in the place of any file.
"""

import errno
import os
import stat


def opened(path, follow=True):
    """A descriptor to read a regular file by; OSError for anything else, which is not opened at all."""
    seen = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(seen).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return os.open("/proc/self/fd/%d" % seen, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(seen)


def file(path, follow=True):
    """A regular file, to read bytes from; OSError for anything else."""
    return os.fdopen(opened(path, follow), "rb")


def text(path, most):
    """At most so many bytes of a regular file, or None."""
    try:
        with file(path) as found:
            return found.read(most)
    except OSError:
        return None
