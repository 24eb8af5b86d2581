"""Hold files as hard links on their own file system, so that a change can be taken back exactly.

pip and uv replace files by a new inode, and so do we: a second name keeps the old bytes, mode, owner
and times without copying. The hold lies in a folder that only root (or the user we run as) can enter;
inside it a folder of the tree's owner, for everything in the tree is done as that owner.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
import time

from fleetfix.remote import tree
from fleetfix.remote.api import Refusal, write, write_durably

NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


def place(ctx, prefix, uid):
    """Choose a folder for a hold: {"outer", "folder", "tag"}. Nothing is made yet.

    Under the state folder where a hard link can reach it; else beside the environment, as far up as
    the link reaches. Bind mounts of one file system have one st_dev and refuse links all the same,
    so it is tried.
    """
    tag = hashlib.sha256(("%s %s %s" % (ctx.run_id, ctx.step, ctx.memory)).encode()).hexdigest()[:12]
    for parent in _candidates(ctx, prefix):
        outer = os.path.join(parent, ".fleetfix-" + tag)
        if _reaches(prefix, outer, uid):
            return {"outer": outer, "folder": outer + "/files", "tag": tag, "uid": uid, "of": prefix}
    raise Refusal(
        "blocked", "no place to hold the files of %s" % prefix, "make the folder above it writable"
    )


def possible(ctx, prefix):
    """Whether there will be a place for a hold, as far as that can be said without writing."""
    home, device = ctx.home, os.stat(prefix).st_dev
    while not os.path.isdir(home):
        home = os.path.dirname(home)
    folders = [home, *_beside(prefix)]
    return any(os.stat(one).st_dev == device and os.access(one, os.W_OK | os.X_OK) for one in folders)


def _candidates(ctx, prefix):
    yield ctx.memory
    yield from _beside(prefix)


def _beside(prefix):
    above, found = os.path.dirname(prefix), []
    while above not in ("/", ""):
        found.append(above)
        above = os.path.dirname(above)
    device = os.stat(prefix).st_dev
    for folder in reversed(found):
        if os.stat(folder).st_dev == device:
            yield folder
    yield prefix


def _reaches(prefix, outer, uid):
    """Whether a file of the environment can be linked into a new folder there; leaves nothing."""
    parent, name = os.path.split(outer)
    try:
        above = _above(parent, prefix)
    except OSError:
        return False
    try:
        with tree.Tree(prefix) as source:
            return _links(source, above, name)
    finally:
        os.close(above)


def _links(source, above, name):
    """Whether the `pyvenv.cfg` of a tree can be linked into a new folder of this name."""
    try:
        fd = _own_folder(above, name)
    except (OSError, Refusal):
        return False
    try:
        if os.fstat(fd).st_dev != os.fstat(source.folder("")).st_dev:
            return False
        os.link("pyvenv.cfg", "probe", src_dir_fd=source.folder(""), dst_dir_fd=fd, follow_symlinks=False)
        os.unlink("probe", dir_fd=fd)
        return True
    except FileNotFoundError:
        return True
    except OSError as error:
        # Where the file system knows no hard links, the hold is a copy, beside the environment.
        return error.errno not in (errno.EXDEV, errno.EROFS, errno.EACCES)
    finally:
        os.close(fd)
        try:
            os.rmdir(name, dir_fd=above)
        except OSError:
            pass


def _above(parent, prefix):
    """A descriptor of the folder that a hold lies in; beside an environment no link leads there.

    The folders above an environment may be its owner's, who can put a link in the place of each.
    """
    if prefix is None or not (prefix + "/").startswith(parent.rstrip("/") + "/"):
        os.makedirs(parent, mode=0o700, exist_ok=True)
        return os.open(parent, tree.FOLDER)
    fd = os.open("/", tree.FOLDER)
    for name in parent.split("/"):
        if name:
            try:
                below = os.open(name, tree.FOLDER, dir_fd=fd)
            finally:
                os.close(fd)
            fd = below
    return fd


def _own_folder(above, name):
    """A descriptor of a folder, made if need be, that is ours and that nobody else may enter."""
    try:
        os.mkdir(name, 0o700, dir_fd=above)
    except FileExistsError:
        pass
    fd = os.open(name, tree.FOLDER, dir_fd=above)
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        os.close(fd)
        raise Refusal("blocked", "a folder of the hold, %s, is not ours" % name, "remove it")
    return fd


def opened(held):
    """A descriptor of the inner folder, made if need be, that belongs to the tree's owner.

    The outer folder may stand where the owner of the tree can rename things: it is used only if it
    is ours and nobody else may enter it.
    """
    parent, name = os.path.split(held["outer"])
    above = _above(parent, held.get("of"))
    try:
        outer = _own_folder(above, name)
    finally:
        os.close(above)
    try:
        try:
            os.mkdir("files", 0o700, dir_fd=outer)
        except FileExistsError:
            pass
        inner = os.open("files", tree.FOLDER, dir_fd=outer)
    finally:
        os.close(outer)
    if os.geteuid() == 0:
        os.fchown(inner, held["uid"], -1)
    return inner


def temporary(path, tag, use=""):
    """The name, beside `path`, under which a file is written before it is renamed into place."""
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    return os.path.join(os.path.dirname(path), ".fleetfix-%s-%s%s.tmp" % (tag, name, use))


# -- as the owner -----------------------------------------------------------------------------------


def fill(prefix, fd, paths):
    """Hold each path; returns the manifest: what each was, and the folders on the way to it."""
    entries, folders, absent = [], {}, set()
    with tree.Tree(prefix) as place:
        for number, path in enumerate(paths):
            entries.append(_hold_one(place, fd, path, "%d" % number))
            above = os.path.dirname(path)
            while above and above not in folders and above not in absent:
                info = place.stat(above)
                if info is None:
                    absent.add(above)
                else:
                    folders[above] = [stat.S_IMODE(info.st_mode), info.st_mtime_ns]
                above = os.path.dirname(above)
    os.fsync(fd)
    return {"entries": entries, "folders": folders, "absent": sorted(absent)}


def _hold_one(place, fd, path, name):
    info = place.stat(path)
    if info is None:
        return {"path": path, "kind": "absent"}
    if stat.S_ISLNK(info.st_mode):
        return {"path": path, "kind": "link", "target": place.target(path)}
    if not stat.S_ISREG(info.st_mode):
        raise Refusal("blocked", "%s is neither file nor link" % os.path.join(place.root, path))
    found = {
        "path": path,
        "kind": "file",
        "name": name,
        "sha256": place.sha256(path),
        "mode": stat.S_IMODE(info.st_mode),
        "mtime": info.st_mtime_ns,
    }
    try:
        os.unlink(name, dir_fd=fd)
    except FileNotFoundError:
        pass
    try:
        place.link_to(path, fd, name)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        _copy_out(place, path, fd, name)
        found["copied"] = True
    return found


def _copy_out(place, path, fd, name):
    source = place.open(path)
    out = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd)
    try:
        tree.copy(source, out)
        os.fsync(out)
    finally:
        os.close(source)
        os.close(out)


def put_back(prefix, fd, tag, manifest):
    """Make every path of a manifest what it was; returns how many had to be changed."""
    count = 0
    with tree.Tree(prefix) as place:
        for entry in manifest["entries"]:
            place.unlink(temporary(entry["path"], tag))
            place.unlink(temporary(entry["path"], tag, "-undo"))
        for entry in manifest["entries"]:
            count += _put_back_one(place, fd, tag, entry)
        for folder in sorted(manifest["absent"], key=lambda one: -one.count("/")):
            place.remove_folder(folder)
        for folder in sorted(manifest["folders"], key=lambda one: -one.count("/")):
            place.set_folder(folder, *manifest["folders"][folder])
        for entry in manifest["entries"]:
            if entry["kind"] == "file" and place.sha256(entry["path"]) != entry["sha256"]:
                raise Refusal("verify_failed", "%s is not as it was" % os.path.join(prefix, entry["path"]))
    return count


def _put_back_one(place, fd, tag, entry):
    path, now = entry["path"], place.stat(entry["path"])
    if entry["kind"] == "absent":
        if now is None:
            return 0
        _forget_byte_code(place, path)
        place.unlink(path)
        return 1
    if entry["kind"] == "link":
        if now is not None and stat.S_ISLNK(now.st_mode) and place.target(path) == entry["target"]:
            return 0
    elif _is_held(now, fd, entry):
        return 0
    fresh = temporary(path, tag, "-undo")
    if entry["kind"] == "link":
        place.symlink(entry["target"], fresh)
    elif entry.get("copied"):
        _copy_in(place, fd, entry, fresh)
    else:
        place.link_from(fd, entry["name"], fresh)
    place.rename(fresh, path)
    return 1


def _forget_byte_code(place, path):
    """Remove what Python compiled of a module that was not there before."""
    folder, name = os.path.split(path)
    cache = os.path.join(folder, "__pycache__")
    if name.endswith(".py") and place.stat(cache) is not None:
        for one in place.names(cache):
            if one.startswith(name[:-2]) and one.endswith(".pyc"):
                place.unlink(cache + "/" + one)
        place.remove_folder(cache)


def _is_held(now, fd, entry):
    """Whether the file in the tree still is the one that is held."""
    if now is None:
        return False
    held = os.stat(entry["name"], dir_fd=fd, follow_symlinks=False)
    if (held.st_ino, held.st_dev) == (now.st_ino, now.st_dev):
        return True
    return bool(entry.get("copied")) and now.st_mtime_ns == entry["mtime"] and now.st_size == held.st_size


def _copy_in(place, fd, entry, fresh):
    source = os.open(entry["name"], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        place.write(fresh, source, 0o600)
    finally:
        os.close(source)
    place.set_file(fresh, entry["mode"], entry["mtime"])


def gone(held, manifest):
    """What of a hold is not there any more, in one line, or None."""
    try:
        names = set(os.listdir(held["folder"]))
    except OSError:
        return "the hold %s is gone: it was dropped, or removed by hand" % held["folder"]
    files = [entry for entry in manifest["entries"] if entry["kind"] == "file"]
    missing = [entry["path"] for entry in files if entry["name"] not in names]
    if not missing:
        return None
    return "%d files of the hold %s are gone, %s first" % (len(missing), held["folder"], missing[0])


# -- letting go -------------------------------------------------------------------------------------


def drop(held):
    """Remove a hold."""
    shutil.rmtree(held["outer"], ignore_errors=True)


def expire(ctx, held, until):
    """Note that a hold may go after `until` (seconds since the epoch); returns that time."""
    folder = os.path.join(ctx.home, "holds")
    os.makedirs(folder, 0o700, exist_ok=True)
    note = dict(held, until=until, run=ctx.run_id)
    write_durably(os.path.join(folder, held["tag"] + ".json"), json.dumps(note).encode())
    return until


@write
def sweep(ctx):
    """Remove the holds whose time is over."""
    _drop_where(ctx, lambda note: note.get("until", 0) <= time.time())


@write
def drop_of_run(ctx):
    """Remove the holds of this run that are kept for a while, whatever their time."""
    return {"dropped": _drop_where(ctx, lambda note: note.get("run") == ctx.run_id)}


def _drop_where(ctx, over):
    dropped = 0
    folder = os.path.join(ctx.home, "holds")
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        try:
            with open(path, "rb") as file:  # a note, or what a kill left half way to being one
                note = json.loads(file.read())
        except (OSError, ValueError):
            continue
        if over(note):
            drop(note)
            os.unlink(path)
            dropped += 1
    return dropped
