"""Change files below one folder by descriptors that follow no link on the way.

Every change here is made as the owner of the tree (`Context.as_user`), and every folder on the way
is opened with O_NOFOLLOW: a link that somebody puts there while we work leads nowhere.
"""

import errno
import hashlib
import os
import stat

from fleetfix.remote.api import Refusal

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
BLOCK = 1 << 20

watcher = None
"""Called before each change of the file system: tests stop the process there."""


def _about_to():
    if watcher is not None:
        watcher()


class Tree:
    """A folder and the folders below it, held open while they are used again and again."""

    def __init__(self, root):
        self.root = root
        self._open = {"": os.open(root, FOLDER)}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for fd in self._open.values():
            os.close(fd)
        self._open = {}

    # -- finding ------------------------------------------------------------------------------

    def folder(self, path, make=False):
        """The descriptor of a folder below the root, or None where there is none."""
        if path in self._open:
            return self._open[path]
        parent, name = os.path.split(path)
        above = self.folder(parent, make)
        if above is None:
            return None
        fd = self._enter(above, name, path, make)
        if fd is not None:
            if len(self._open) > 200:
                self._close_leaf(parent)
            self._open[path] = fd
        return fd

    def _enter(self, above, name, path, make):
        try:
            return os.open(name, FOLDER, dir_fd=above)
        except FileNotFoundError:
            if not make:
                return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise Refusal(
                "blocked",
                "%s is not a folder of its own" % os.path.join(self.root, path),
                "fleetfix changes nothing through a link; put a real folder there",
            ) from None
        _about_to()
        try:
            os.mkdir(name, 0o755, dir_fd=above)
        except FileExistsError:
            pass
        return os.open(name, FOLDER, dir_fd=above)

    def _close_leaf(self, keep):
        """Close one folder that is on nobody's way, to stay below the limit of open files."""
        for path in sorted(self._open, key=len, reverse=True):
            if path and not (keep + "/").startswith(path + "/"):
                os.close(self._open.pop(path))
                return

    def at(self, path, make=False):
        """(descriptor of the folder, name in it) of a path, or (None, name)."""
        parent, name = os.path.split(path)
        return self.folder(parent, make), name

    def stat(self, path):
        """`lstat` of a path below the root, or None where nothing is."""
        fd, name = self.at(path)
        if fd is None:
            return None
        try:
            return os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def names(self, path):
        """The names in a folder, sorted; [] where there is none."""
        fd = self.folder(path)
        return [] if fd is None else sorted(os.listdir(fd))

    def files(self, path):
        """Every path below a folder that is no folder."""
        found = []
        for name in self.names(path):
            below = path + "/" + name
            info = self.stat(below)
            if info is None:
                continue
            found += self.files(below) if stat.S_ISDIR(info.st_mode) else [below]
        return found

    def target(self, path):
        """What a link points to."""
        fd, name = self.at(path)
        return os.readlink(name, dir_fd=fd)

    def open(self, path):
        """Open a regular file for reading; the caller closes the descriptor."""
        fd, name = self.at(path)
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)

    def sha256(self, path):
        """The SHA-256 of a regular file, as hex."""
        fd = self.open(path)
        try:
            return digest(fd)
        finally:
            os.close(fd)

    # -- changing -----------------------------------------------------------------------------

    def link_to(self, path, other_fd, other_name):
        """Give the file at `path` a second name elsewhere on the same file system."""
        fd, name = self.at(path)
        _about_to()
        os.link(name, other_name, src_dir_fd=fd, dst_dir_fd=other_fd, follow_symlinks=False)

    def link_from(self, other_fd, other_name, path):
        """Give a file elsewhere on the same file system the name `path` here."""
        fd, name = self.at(path, make=True)
        _about_to()
        os.link(other_name, name, src_dir_fd=other_fd, dst_dir_fd=fd, follow_symlinks=False)

    def symlink(self, target, path):
        """Make a symbolic link."""
        fd, name = self.at(path, make=True)
        _about_to()
        os.symlink(target, name, dir_fd=fd)

    def write(self, path, source_fd, mode):
        """Copy an open file to a new file at `path`; returns the SHA-256 of what was written."""
        fd, name = self.at(path, make=True)
        _about_to()
        out = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd
        )
        try:
            _about_to()
            found = copy(source_fd, out)
            os.fchmod(out, mode)
            os.fsync(out)
        finally:
            os.close(out)
        return found

    def rename(self, path, new):
        """Rename within one folder, over what stands at the new name."""
        fd, name = self.at(path)
        _about_to()
        os.rename(name, os.path.basename(new), src_dir_fd=fd, dst_dir_fd=fd)

    def unlink(self, path):
        """Remove a file or link; nothing where there is none."""
        fd, name = self.at(path)
        if fd is None:
            return
        try:
            os.stat(name, dir_fd=fd, follow_symlinks=False)
            _about_to()
            os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            pass

    def remove_folder(self, path):
        """Remove a folder if it is empty. Says whether it is gone."""
        fd, name = self.at(path)
        if fd is None:
            return True
        own = self._open.pop(path, None)
        if own is not None:
            os.close(own)
        try:
            _about_to()
            os.rmdir(name, dir_fd=fd)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                return False
            raise
        return True

    def set_folder(self, path, mode, mtime):
        """Give a folder its mode and its time (ns) back."""
        fd = self.folder(path)
        if fd is None:
            return
        now = os.fstat(fd)
        if stat.S_IMODE(now.st_mode) != mode:
            os.fchmod(fd, mode)
        if now.st_mtime_ns != mtime:
            os.utime(fd, ns=(now.st_atime_ns, mtime))

    def set_file(self, path, mode, mtime):
        """Give a regular file its mode and its time (ns) back."""
        fd = self.open(path)
        try:
            now = os.fstat(fd)
            os.fchmod(fd, mode)
            os.utime(fd, ns=(now.st_atime_ns, mtime))
        finally:
            os.close(fd)


def digest(fd):
    """The SHA-256 of an open file from its beginning, as hex."""
    found, at = hashlib.sha256(), 0
    while True:
        data = os.pread(fd, BLOCK, at)
        if not data:
            return found.hexdigest()
        found.update(data)
        at += len(data)


def copy(source, out):
    """Copy an open file from its beginning to the end of another; returns the SHA-256 as hex."""
    found, at = hashlib.sha256(), 0
    while True:
        data = os.pread(source, BLOCK, at)
        if not data:
            return found.hexdigest()
        found.update(data)
        at += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(out, view) :]
