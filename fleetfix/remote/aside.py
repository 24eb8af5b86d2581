"""Move a folder or file out of the way, put it back byte for byte, or drop it for good.

A rename inside one folder: at any moment either the old name or the new one is there, whole. It runs
as the owner, through descriptors that follow no link, and only on what the change remembered by its
inode; so it is right after a kill at any point.
"""

import errno
import os
import stat

from fleetfix.remote import mounts, users
from fleetfix.remote.api import Refusal, user_name, write

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DEEPEST = 200

watcher = None
"""Called before each change of the file system: tests stop the process there."""


def _about_to():
    if watcher is not None:
        watcher()


@write
def move(ctx, path, uid):
    """Rename `path` to a sibling that says whose work it is; refuse a mount, a link, one in use.

    `path` is real (no link on the way) and belongs to `uid`. Once more after it was done, it does
    nothing.
    """
    kept = ctx.recall("aside")
    if kept is None:
        _refuse_unsafe(path)
        kept = ctx.as_user(uid, _choose, path, uid, ctx.run_id)
        if kept is None:
            return {"moved": None}
        ctx.remember("aside", kept)
    moved = ctx.as_user(uid, _move, kept)
    if moved:
        ctx.remember("moved", True)
    return {"moved": kept["trash"] if moved else None}


@write
def put_back(ctx, path, uid):
    """Give what `move` moved its name again; what was made at its place since then is removed.

    What was dropped, because the run had ended well, is not put back: a cache is made again.
    """
    kept = ctx.recall("aside")
    if kept is None:
        return {"put_back": False}
    if ctx.recall("dropped"):
        note = "%s is not put back: it was deleted when the run had ended well, and is made anew" % path
        return {"put_back": False, "note": note}
    busy = bool(users.of_paths([path])[path]) or mounts.within(path, mounts.table()) is not None
    return ctx.as_user(uid, _put_back, kept, ctx.recall("moved", False), not busy)


def _lacks(ctx, committed):
    kept = ctx.recall("aside")
    if kept is None or ctx.recall("dropped") or not ctx.recall("moved", False):
        return None
    try:
        there = [_identity(None, kept[name]) == kept["identity"] for name in ("trash", "path")]
    except OSError:
        return None  # who owns it may look, and root may not: the undo tells
    return None if any(there) else "%s is gone: nothing to put back at %s" % (kept["trash"], kept["path"])


put_back.lacks = _lacks


@write
def drop(ctx, path, uid):
    """Delete what `move` moved, at idle priority. Ended half way, it goes on at the next call."""
    kept = ctx.recall("aside")
    if kept is None or mounts.within(kept["trash"], mounts.table()) is not None:
        return {"dropped": False}
    ctx.remember("dropped", True)
    return {"dropped": ctx.as_user(uid, _drop, kept, idle=True)}


def _refuse_unsafe(path):
    mount = mounts.within(path, mounts.table())
    if mount is not None:
        raise Refusal("blocked", "%s is a mount point" % mount, "unmount it, or clear it by hand")
    found = users.of_paths([path])[path]
    if found:
        first = found[0]
        message = "%s is in use by %s's %s (pid %d)" % (path, first["user"], first["name"], first["pid"])
        raise Refusal("blocked", message, "stop it first")


# -- as the owner -------------------------------------------------------------------------------------


def _parent(path):
    parent = os.path.dirname(path)
    if os.path.realpath(parent) != parent:
        raise Refusal("stale_plan", "%s is no longer where it was: a link stands on the way" % path)
    return os.open(parent, FOLDER)


def _identity(parent, name):
    """[device, inode] of a name in an open folder, or None."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return [status.st_dev, status.st_ino]


def _choose(path, uid, run):
    name = os.path.basename(path)
    try:
        parent = _parent(path)
    except FileNotFoundError:
        return None
    try:
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
            raise Refusal("blocked", "%s is neither a folder nor a file" % path)
        if status.st_uid != uid:
            raise Refusal("blocked", "%s belongs to %s" % (path, user_name(status.st_uid)))
        trash = _free_name(parent, "%s.fleetfix-trash.%s" % (name, run))
        return {
            "path": path,
            "trash": os.path.join(os.path.dirname(path), trash),
            "newer": os.path.join(os.path.dirname(path), _free_name(parent, trash + ".newer")),
            "identity": [status.st_dev, status.st_ino],
        }
    finally:
        os.close(parent)


def _free_name(parent, name):
    number, free = 1, name
    while _identity(parent, free) is not None:
        number += 1
        free = "%s.%d" % (name, number)
    return free


def _names(kept):
    return (os.path.basename(kept[key]) for key in ("path", "trash", "newer"))


def _move(kept):
    """Rename, where what was remembered is still at its name. Says whether it is at the new one now."""
    name, trash, _ = _names(kept)
    parent = _parent(kept["path"])
    try:
        if _identity(parent, trash) == kept["identity"]:
            return True
        if _identity(parent, name) != kept["identity"]:
            return False
        _rename(parent, name, trash)
        return True
    finally:
        os.close(parent)


def _rename(parent, old, new):
    _about_to()
    os.rename(old, new, src_dir_fd=parent, dst_dir_fd=parent)
    _about_to()
    os.fsync(parent)


def _put_back(kept, moved, remove):
    name, trash, newer = _names(kept)
    parent = _parent(kept["path"])
    try:
        done = _identity(parent, trash) == kept["identity"]
        if done:
            if _identity(parent, name) is not None:
                _rename(parent, name, newer)
            _rename(parent, trash, name)
        elif moved and _identity(parent, name) != kept["identity"]:
            raise Refusal(
                "command", "%s is gone: nothing to put back at %s" % (kept["trash"], kept["path"])
            )
        left = _identity(parent, newer) is not None
        if left and remove:
            _remove(parent, newer)
        return {"put_back": done, "left": kept["newer"] if left and not remove else None}
    finally:
        os.close(parent)


def _drop(kept):
    parent = _parent(kept["path"])
    try:
        trash = os.path.basename(kept["trash"])
        if _identity(parent, trash) != kept["identity"]:
            return False
        _remove(parent, trash)
        return True
    finally:
        os.close(parent)


def _remove(parent, name, device=None, depth=0):
    """Delete a name and all below it, never through a link, never on another file system."""
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if device is not None and status.st_dev != device:
        raise OSError(errno.EXDEV, "on another file system", name)
    if not stat.S_ISDIR(status.st_mode):
        _about_to()
        os.unlink(name, dir_fd=parent)
        return
    if depth > DEEPEST:
        raise OSError(errno.ELOOP, "nested too deeply", name)
    folder = _open_folder(parent, name, status)
    try:
        for entry in os.listdir(folder):
            _remove(folder, entry, status.st_dev, depth + 1)
    finally:
        os.close(folder)
    _about_to()
    os.rmdir(name, dir_fd=parent)


def _open_folder(parent, name, status):
    """Open a folder to empty it; the owner may have closed it to themselves, as read-only trees are."""
    wanted = stat.S_IRWXU
    if stat.S_IMODE(status.st_mode) & wanted != wanted:
        os.chmod(name, stat.S_IMODE(status.st_mode) | wanted, dir_fd=parent)
    folder = os.open(name, FOLDER, dir_fd=parent)
    opened = os.fstat(folder)
    if (opened.st_dev, opened.st_ino) != (status.st_dev, status.st_ino):
        os.close(folder)
        raise OSError(errno.ESTALE, "changed while it was being deleted", name)
    return folder
