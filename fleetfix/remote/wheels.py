"""Audit an environment's CUDA wheels, and mend it byte by byte so that it can be taken back.

`audit` reads; what should go and what should be mended is decided by fleetfix.domain.wheels.
`repair` puts back what staying packages' own RECORDs name, from parts staged before (parts.stage),
then removes what only the going packages own. `restore` is its undo: everything that was replaced or
removed is held as a hard link on the same file system until then.
"""

import json
import os
import platform
import re
import sys
import time

from fleetfix.remote import dists, environments, holds, mounts, parts, tree
from fleetfix.remote.api import Refusal, read, write

LARGEST_REPLY = 60 * 1024
SAMPLES = 5
TOLD = {"requires", "missing", "overwritten", "altered", "shares"}  # what makes any package worth a line
CUDA_NAME = re.compile(r"cu(?:da)?-?1[0-9]", re.I)
DESCRIBED = ("path", "python", "site", "uid", "user", "kind", "by", "beside")


@read
def audit(ctx, venv, purge=(), cuda=None, to_look=False):
    """What is installed, what speaks of CUDA, what is damaged and by whom. See domain.wheels.Audit."""
    where = environments.resolve(ctx, venv, to_look)
    if "none" in where:
        return {"none": where["none"], "hint": where.get("hint", "")}
    found = {"env": {key: where.get(key) for key in DESCRIBED}}
    found["env"]["used_by"] = where.get("used_by", [])
    if where["kind"] != "venv":
        return found
    real = [where["path"], *(os.path.realpath(site) for site in where["site"])]
    found["env"]["others"] = environments.others_of(where["path"])[:10]
    found["env"]["folders"] = mounts.folders_of(real, mounts.rows())[:8]
    environment = parts.environment_at(ctx, where)
    found.update(examine(environment, {dists.normal(name) for name in purge}))
    found["rights"] = os.geteuid() in (0, where["uid"])
    found["machine"] = platform.machine()
    found["python"] = _python_of(where["site"])
    return _fitting(found)


def _python_of(sites):
    for site in sites:
        found = re.search(r"python(3\.\d+)", site)
        if found:
            return found.group(1)
    return "%d.%d" % sys.version_info[:2]


def _fitting(found):
    """Cut what is only told, never what is decided on, until the reply fits; refuse where it does not."""
    plain = set(found.pop("plain"))
    if _too_large(found):
        for dist in found["dists"]:
            for key in ("samples", "installer", "files", "bytes"):
                if dist.get(key) != "conda":
                    dist.pop(key, None)
    if _too_large(found):
        alike = [dist for dist in found["dists"] if dist["info"] in plain and _adds_up(dist)]
        if len(alike) > 1:
            found["dists"] = [dist for dist in found["dists"] if dist not in alike] + [_as_one(alike)]
            found["gathered"] = len(alike)
    if _too_large(found):
        said = "%s: %d packages speak of CUDA or are damaged, too many to decide about at once"
        raise Refusal(
            "blocked", said % (found["env"]["path"], len(found["dists"])), "make this environment again"
        )
    return found


def _too_large(found):
    return len(json.dumps(found)) > LARGEST_REPLY


def _adds_up(dist):
    """Whether nothing is decided about a package itself: it asks for others, or is told of."""
    decided = any(dist.get(key) for key in ("shares", "overwritten", "missing_libraries"))
    return not decided and not any(CUDA_NAME.search(one) for one in dist.get("requires", ()))


def _as_one(alike):
    """What several such packages require, in one line: whom they spare is the same."""
    first = alike[0]
    found = {key: first[key] for key in ("info", "name", "record")}
    found["version"] = "%s and %d others" % (first["version"], len(alike) - 1)
    found["requires"] = sorted({one for dist in alike for one in dist.get("requires", ())})
    for key in ("missing", "altered"):
        found[key] = sum(dist.get(key, 0) for dist in alike)
    return found


def examine(environment, listed):
    """The facts about the packages that matter: those that speak of CUDA, are damaged, or listed."""
    evidence = {dist.info: _evidence(environment, dist) for dist in environment.dists}
    speaking = {
        dist.info
        for dist in environment.dists
        if any(evidence[dist.info])
        or dists.normal(dist.name) in listed
        or dists.SPEAKS_OF_CUDA.search(dists.normal(dist.name))
        or dists.CUDA_LOCAL.search(dist.version)
    }
    names = {dists.normal(dist.name) for dist in environment.dists if dist.info in speaking}
    shown = []
    for dist in environment.dists:
        facts = _facts(environment, dist, dist.info in speaking, names, evidence[dist.info])
        if dist.info in speaking or TOLD & set(facts):
            shown.append(facts)
    return {
        "torch": environment.torch(),
        "count": len(environment.dists),
        "dists": shown,
        "plain": [facts["info"] for facts in shown if facts["info"] not in speaking],
        "leftovers": _leftovers(environment)[:20],
        "eggs": [name for name in environment.eggs if dists.SPEAKS_OF_CUDA.search(dists.normal(name))][:20],
    }


def _leftovers(environment):
    """The `~x` folders that pip left behind and that no package here can prove to be its own."""
    proven = {path for dist in environment.dists for path in dists.stashed(environment, dist)}
    known = {dist.info for dist in environment.dists}
    found = []
    for folder in environment.leftovers:
        inside = [path for path in proven if path.startswith(folder + "/")]
        if folder not in known and not inside:
            found.append(folder)
    return found


def _evidence(environment, dist):
    return dists.path_majors(dist), dists.elf_majors(environment, dist)


def _facts(environment, dist, thorough, names, evidence):
    shares, missing, libraries, overwritten, altered, samples = {}, 0, 0, {}, 0, []
    size = 0
    for path, sha, length in dist.rows or ():
        if sha is None:
            continue
        size += length or 0
        rivals = environment.rivals(dist, path, sha)
        for other in rivals:
            shares[other.info] = shares.get(other.info, 0) + 1
        state = environment.state(dist, path, sha, length, thorough)
        if state == "ok" or (state == "missing" and dists.elsewhere(dist, path)):
            continue
        if state == "missing":
            missing += 1
            libraries += ".so" in os.path.basename(path)
        elif rivals:
            key = tuple(sorted(other.info for other in rivals))
            overwritten[key] = overwritten.get(key, 0) + 1
        else:
            altered += 1
            if len(samples) < SAMPLES:
                samples.append(path[-120:])
    facts = {
        "info": dist.info,
        "name": dist.name,
        "version": dist.version,
        "record": dist.record,
        "paths": evidence[0],
        "needs": evidence[1],
        "requires": _requires(dist, names),
        "shares": shares,
        "missing": missing,
        "missing_libraries": libraries,
        "overwritten": [{"by": list(key), "files": count} for key, count in sorted(overwritten.items())],
        "altered": altered,
        "samples": samples,
        "requested": dist.requested,
        "direct": dist.direct,
        "installer": dist.installer,
        "files": len(dist.rows or ()),
        "bytes": size,
        "outside": dist.outside,
        "borrowed": dist.borrowed,
    }
    keep = ("info", "name", "version", "record")  # the rest is empty by default
    return {key: value for key, value in facts.items() if value or key in keep}


def _requires(dist, names):
    """The requirements that speak of packages that matter here, without their version ranges."""
    found = []
    for text in dist.requires:
        match = re.match(r"([A-Za-z0-9._-]+)\s*(\[[^\]]*\])?", text)
        if match and dists.normal(match.group(1)) in names:
            marker = text.partition(";")[2].strip()
            found.append(match.group(0).replace(" ", "") + ("; " + marker[:200] if marker else ""))
    return sorted(set(found))


# -- repair -----------------------------------------------------------------------------------------


@write
def repair(ctx, venv, repair=(), purge=(), records=None):
    """Make the environment as its staying packages' RECORDs say, without the packages `purge`.

    `repair` and `purge` are dist-info paths, `records` the digest of each one's RECORD as planned: a
    RECORD that changed since is a stale plan.
    """
    work = ctx.recall("work")
    if work is None:
        work = _work(ctx, venv, repair, purge, records or {})
    environments.refuse_in_use(work["prefix"])
    ctx.say("replacing %d files, removing %d" % (len(work["restore"]), len(work["remove"])))
    store = parts.opened(ctx)
    try:
        _ready(store, work)
        ctx.remember("work", work)
        held = _hold(ctx, work)
        ctx.as_user(
            work["uid"], _replace, work["prefix"], held["tag"], work["restore"], store, gid=work.get("gid")
        )
        ctx.as_user(
            work["uid"], _remove, work["prefix"], work["remove"], work["sites"], gid=work.get("gid")
        )
    finally:
        if store is not None:
            os.close(store)
    os.sync()
    return {"restored": len(work["restore"]), "removed": len(work["remove"]), "hold": held["folder"]}


def _work(ctx, venv, repair, purge, records):
    """What is to be replaced and removed, file by file; the same for a call that is made again."""
    where = parts.found_again(ctx, venv)
    environment = parts.environment_at(ctx, where)
    mend, go = _as_planned(environment, repair, purge, records)
    restore = dists.wanted(environment, mend, go)
    _one_truth(restore, mend)
    return {
        "prefix": environment.prefix,
        "sites": environment.sites,
        "uid": where["uid"],
        "gid": where["gid"],
        "restore": restore,
        "remove": dists.unowned(environment, go),
    }


def _ready(store, work):
    """Refuse where a part is not staged, or the file system has no room for the new files."""
    lacking = parts.lacking(store, work["restore"])
    if lacking:
        raise Refusal("blocked", "no part for %s" % lacking[0][0], "stage the parts first: wheel_parts")
    need = sum(size or 0 for _, _, size in work["restore"]) + parts.SPARE
    info = os.statvfs(work["prefix"])
    free = info.f_bavail * info.f_frsize
    if free < need:
        raise Refusal(
            "no_space",
            "%s has %d MiB free, the repair needs %d MiB" % (work["prefix"], free >> 20, need >> 20),
        )


def _as_planned(environment, repair, purge, records):
    try:
        mend, go = environment.of(repair), environment.of(purge)
    except KeyError as error:
        raise Refusal("stale_plan", "%s is no longer there" % error.args[0]) from None
    for dist in mend + go:
        if dist.info in records and records[dist.info] != dist.record:
            raise Refusal("stale_plan", "%s was installed again since the plan" % dist.label)
    return mend, go


def _one_truth(restore, mend):
    """Refuse where two packages to mend name different bytes for one path."""
    chosen = {path: sha for path, sha, _ in restore}
    for dist in mend:
        for path, sha, _ in dist.rows or ():
            if sha is not None and chosen.get(path, sha) != sha:
                raise Refusal("blocked", "two staying packages claim other bytes of %s" % path)


def _hold(ctx, work):
    """Hold all that will be replaced or removed; durable before the first change in the tree."""
    held = ctx.recall("hold")
    if held is None:
        held = holds.place(ctx, work["prefix"], work["uid"])
        ctx.remember("hold", held)
    if ctx.recall("manifest") is None:
        holds.sweep(ctx)
        paths = list(dict.fromkeys([path for path, _, _ in work["restore"]] + list(work["remove"])))
        fd = holds.opened(held)
        try:
            manifest = ctx.as_user(work["uid"], holds.fill, work["prefix"], fd, paths, gid=work.get("gid"))
        finally:
            os.close(fd)
        ctx.remember("manifest", manifest)
    return held


def _replace(prefix, tag, restore, store):
    with tree.Tree(prefix) as place:
        for path, sha, _ in restore:
            temporary = holds.temporary(path, tag)
            place.unlink(temporary)
            source, mode = parts.take(store, sha)
            try:
                written = place.write(temporary, source, mode)
            finally:
                os.close(source)
            if written != sha:
                place.unlink(temporary)
                raise Refusal("verify_failed", "the staged part of %s is damaged" % path)
            place.rename(temporary, path)


def _remove(prefix, remove, sites):
    keep = {os.path.relpath(site, prefix) for site in sites} | {
        "",
        "bin",
        "lib",
        "lib64",
        "include",
        "share",
    }
    with tree.Tree(prefix) as place:
        for path in remove:
            place.unlink(path)
        folders = {os.path.dirname(path) for path in remove}
        for folder in sorted(folders, key=lambda one: (-one.count("/"), one)):
            while folder not in keep:
                if not place.remove_folder(folder):
                    break
                folder = os.path.dirname(folder)


# -- undo and commit --------------------------------------------------------------------------------


@write
def restore(ctx):
    """Put back every byte that `repair` replaced or removed; a no-op where it did nothing."""
    work, held = ctx.recall("work"), ctx.recall("hold")
    if work is None or held is None:
        return {"restored": 0}
    manifest = ctx.recall("manifest")
    if manifest is None:
        holds.drop(held)
        return {"restored": 0}
    if not os.path.isdir(held["folder"]):
        if ctx.recall("undone"):
            return {"restored": 0}
        raise Refusal("blocked", "the hold %s is gone: it was committed" % held["folder"])
    environments.refuse_in_use(work["prefix"], back=True)
    fd = holds.opened(held)
    try:
        count = ctx.as_user(
            work["uid"], holds.put_back, work["prefix"], fd, held["tag"], manifest, gid=work.get("gid")
        )
    finally:
        os.close(fd)
    os.sync()
    ctx.remember("undone", {"at": time.time()})
    holds.drop(held)
    return {"restored": count}


def _lacks(ctx, committed):
    held, manifest = ctx.recall("hold"), ctx.recall("manifest")
    if held is None or manifest is None or ctx.recall("undone"):
        return None
    return holds.gone(held, manifest)


restore.lacks = _lacks


@write
def settle(ctx, keep=7 * 24 * 3600.0):
    """Let a hold go after `keep` seconds: at once for 0, else at a later repair on this host."""
    held = ctx.recall("hold")
    if held is None:
        return {"kept": None}
    if keep <= 0:
        holds.drop(held)
        return {"kept": None}
    return {"kept": holds.expire(ctx, held, time.time() + keep)}
