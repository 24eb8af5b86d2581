"""Bring every byte that a repair will need to the host, while training still runs.

Parts lie in the state folder of the run, one file per SHA-256. Their folder may be passed, not listed,
by others; the folder above is root's alone, so only a descriptor that root opened leads there.
"""

import hashlib
import os
import shutil
import zipfile
import zlib

from fleetfix.remote import dists, environments, holds, offers, sources
from fleetfix.remote.api import Refusal, no_space, read, user_name, write

SPARE = 16 << 20  # bytes left free on a file system


def folder(ctx):
    """Where the parts of this run lie; None in a dry run, which has none."""
    return None if ctx.state is None else os.path.join(ctx.state, "parts")


def opened(ctx):
    """A descriptor of the parts of this run, or None where nothing was staged."""
    place = folder(ctx)
    if place is None or not os.path.isdir(place):
        return None
    return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def lacking(store, rows):
    """Those of [(path, sha256, size)] that are not staged."""
    return [row for row in rows if store is None or not _staged(store, row[1], row[2])]


def _staged(store, sha, size):
    try:
        found = os.stat(sha, dir_fd=store, follow_symlinks=False).st_size
    except FileNotFoundError:
        return False
    return size is None or found == size


def take(store, sha):
    """(descriptor, mode) of a staged part; the caller closes it."""
    fd = os.open(sha, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=store)
    return fd, 0o755 if os.fstat(fd).st_mode & 0o111 else 0o644


def environment_at(ctx, where):
    """Read an environment; a RECORD that uv removed first is taken from a cache that has this wheel."""
    found = dists.Environment(where["path"], where["site"])
    without = [dist for dist in found.dists if dist.rows is None]
    if without:
        places = sources.Sources(ctx, where)
        for dist in without:
            data = places.record_of(dist)
            if data is not None:
                found.lend(dist, data)
    return found


def found_again(ctx, venv):
    """The environment at the time of a change: it must still be one that may be changed."""
    where = environments.resolve(ctx, venv)
    if "none" in where:
        raise Refusal("blocked", where["none"], where.get("hint", ""))
    if where["kind"] != "venv":
        raise Refusal("blocked", "%s is no virtual environment" % where["path"])
    return where


@read
def find(ctx, venv, repair, purge, wheelhouse=None, quick=False):
    """Which source can serve each package to mend. Nothing is fetched.

    With `quick`, only whether the parts are staged. Returns {"parts": [{info, files, bytes, staged,
    source, tried}], "free": bytes in the environment's file system, "room": bytes where parts go,
    "stuck": why what is to be changed cannot be}.
    """
    where = environments.resolve(ctx, venv)
    if "none" in where:
        return {"none": where["none"], "parts": [], "free": 0, "room": 0, "stuck": None}
    environment = environment_at(ctx, where)
    try:
        mend, go = environment.of(repair), environment.of(purge)
    except KeyError as error:
        raise Refusal("stale_plan", "%s is no longer there" % error.args[0]) from None
    store = opened(ctx)
    places = sources.Sources(ctx, where, wheelhouse)
    try:
        found = [
            _find_one(store, places, dist, dists.wanted(environment, [dist], go), quick) for dist in mend
        ]
    finally:
        if store is not None:
            os.close(store)
    paths = [row[0] for row in dists.wanted(environment, mend, go)] + dists.unowned(environment, go)
    stuck = None if holds.possible(ctx, where["path"]) else "nothing there can be written"
    stuck = stuck or ctx.as_user(where["uid"], _stuck, where["path"], paths, gid=where["gid"])
    return {
        "parts": found,
        "free": _free(where["path"]),
        "room": _free(ctx.home),
        "stuck": stuck and "%s cannot be changed: %s" % (where["path"], stuck),
    }


def _stuck(prefix, paths):
    """Why this process, the owner, cannot replace or remove all of these; None where it can."""
    folders = {os.path.dirname(path) for path in paths}
    for folder in sorted({_existing(os.path.join(prefix, one)) for one in folders}):
        if not os.access(folder, os.W_OK | os.X_OK):
            return _why_not(folder)
    for path in (os.path.join(prefix, one) for one in paths):
        # What is another's could be replaced, but not be given back to them.
        if os.geteuid() != 0 and os.path.lexists(path) and os.lstat(path).st_uid != os.geteuid():
            return "%s belongs to %s" % (path, user_name(os.lstat(path).st_uid))
    return None


def _why_not(folder):
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return "%s is on a file system that is mounted read-only" % folder
    owner = os.stat(folder).st_uid
    if owner != os.geteuid():
        return "%s belongs to %s" % (folder, user_name(owner))
    return "its owner may not write in %s" % folder


def _existing(path):
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _find_one(store, places, dist, rows, quick):
    needed = lacking(store, rows)
    found = {
        "info": dist.info,
        "files": len(rows),
        "bytes": sum(row[2] or 0 for row in rows),
        "lack": sum(row[2] or 0 for row in needed),
        "staged": not needed,
        "source": None,
        "tried": [],
        "first": needed[0][0] if needed else None,
    }
    left = {row[1] for row in needed}
    used = []
    for offer in () if quick or not left else places.each(dist):
        served = {sha for sha in left if offer.covers(sha)}
        if served and offer.source not in used:
            used.append(offer.source)
        left -= served
        if not left:
            break
    if not quick and not left and needed:
        found["source"] = ", ".join(used)
    found["tried"] = used
    return found


def _free(path):
    info = os.statvfs(_existing(path))
    return info.f_bavail * info.f_frsize


@write
def stage(ctx, venv, repair, purge, wheelhouse=None):
    """Fetch and check every file that the packages `repair` lack. Returns bytes and sources."""
    where = found_again(ctx, venv)
    environment = environment_at(ctx, where)
    try:
        mend, go = environment.of(repair), environment.of(purge)
    except KeyError as error:
        raise Refusal("stale_plan", "%s is no longer there" % error.args[0]) from None
    ctx.remember("staging", {"folder": folder(ctx), "existed": os.path.isdir(folder(ctx))})
    os.makedirs(folder(ctx), 0o711, exist_ok=True)
    os.chmod(folder(ctx), 0o711)
    places = sources.Sources(ctx, where, wheelhouse)
    store = opened(ctx)
    told = {}
    try:
        wanted = [(dist, lacking(store, dists.wanted(environment, [dist], go))) for dist in mend]
        _room(ctx, sum(row[2] or 0 for _, rows in wanted for row in rows))
        for dist, rows in wanted:
            told[dist.label] = _stage_one(ctx, store, places, dist, rows)
    except OSError as error:
        if no_space(error):
            raise Refusal("no_space", "no room for the parts: %s" % error.strerror) from None
        raise
    finally:
        places.clear()
        os.close(store)
    return {"bytes": sum(row[2] or 0 for _, rows in wanted for row in rows), "sources": told}


def _room(ctx, need):
    free = _free(ctx.state)
    if need and free < need + SPARE:
        raise Refusal(
            "no_space",
            "the parts need %d MiB, %s has %d MiB free" % (need >> 20, ctx.state, free >> 20),
            "make room there",
        )


def _stage_one(ctx, store, places, dist, rows):
    left = {row[1]: row for row in rows}
    used = []
    for offer in places.each(dist) if left else ():
        if isinstance(offer, offers.Remote):
            ctx.say("fetching %s from %s" % (dist.label, offer.source))
            offer = offer.fetch()
        if offer is None:
            continue
        for sha in [sha for sha in left if offer.covers(sha)]:
            if _copy(store, offer, sha):
                del left[sha]
                if offer.source not in used:
                    used.append(offer.source)
        if not left:
            break
    if left:
        path = min(row[0] for row in left.values())
        raise Refusal(
            "blocked",
            "no source for %s: %d files, first %s" % (dist.label, len(left), path),
            "name a wheelhouse that holds this very wheel",
        )
    return ", ".join(used)


def _copy(store, offer, sha):
    """Stage one file if what the source gives has this hash. Says whether it had."""
    found = offer.open(sha)
    if found is None:
        return False
    file, executable = found
    fresh = sha + ".tmp"
    digest = hashlib.sha256()
    with file:
        mode = 0o755 if executable else 0o644
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode, dir_fd=store)
        with os.fdopen(fd, "wb") as out:
            try:
                for data in iter(lambda: file.read(1 << 20), b""):
                    digest.update(data)
                    out.write(data)
            except (ValueError, EOFError, zipfile.BadZipFile, zlib.error):
                pass
            os.fchmod(fd, mode)
            out.flush()
            os.fsync(fd)
    if digest.hexdigest() != sha:
        os.unlink(fresh, dir_fd=store)
        return False
    os.rename(fresh, sha, src_dir_fd=store, dst_dir_fd=store)
    return True


@write
def unstage(ctx):
    """Remove what `stage` brought, and what it was fetching; a no-op where it did nothing."""
    for place in ctx.recall("scratch", []):
        shutil.rmtree(place, ignore_errors=True)
    staging = ctx.recall("staging")
    if staging is not None and not staging["existed"]:
        shutil.rmtree(staging["folder"], ignore_errors=True)
    return {}
