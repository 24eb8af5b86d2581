"""Which Python environment a step is about: the one the job really maps, or a path that is given."""

import glob
import os

from fleetfix.remote import capture, ending, owners, procs
from fleetfix.remote import users as holders
from fleetfix.remote.api import Refusal, all_processes, read, user_name

SITES = ("lib/python3*/site-packages", "lib64/python3*/site-packages")
SYSTEM_SITES = ("lib/python3*/dist-packages", "local/lib/python3*/dist-packages")


def resolve(ctx, venv, to_look=False):
    """The environment that `venv` ("of-job" or an absolute path) means here.

    {"path", "python", "site": [...], "uid", "gid", "user", "kind": "venv"|"conda"|"system"|"container",
    "by", "used_by": the live jobs that map it}, or {"none": one line, "hint"}. Only reads; nothing runs.
    A path that no job maps while another is mapped is refused, but for who only means `to_look`: it is told
    as "beside".
    """
    used = _in_use(ctx)
    if venv == "of-job":
        return _of_job(used)
    return _given(venv, used, to_look)


@read
def find(ctx, venv):
    """`resolve`, as a question of the controller."""
    return resolve(ctx, venv)


@read
def users(ctx, path):
    """Who uses an environment, or any folder, on this host: ["alice's python (pid 12)"]."""
    who = set(_living(_in_use_now(), path) + others_of(path))
    for one in holders.of_paths([os.path.realpath(path)])[os.path.realpath(path)]:
        who.add("%s's %s (pid %d)" % (one["user"], one["name"], one["pid"]))
    return sorted(who)[:20]


def _in_use(ctx):
    """[(environment, who, container, live)] of the live GPU jobs and of what this run has stopped."""
    used = _in_use_now()
    for step, captured in capture.of_run(ctx):
        for job in captured["jobs"]:
            if job["environment"]:
                used.append((job["environment"], "capture of step " + step, False, False))
    return used


def _in_use_now():
    _, jobs = procs.jobs_here()
    used = []
    for job in jobs:
        who = "job %d of %s" % (job["pid"], job["user"])
        used += [(path, who, job["container"], True) for path in job["environments"]]
        if not job["environments"]:
            used.append((None, who, job["container"], True))
    return used


def _of_job(used):
    paths = sorted({path for path, _, _, _ in used if path})
    if len(paths) > 1:
        each = ["%s (%s)" % (path, next(who for one, who, _, _ in used if one == path)) for path in paths]
        return _none("%d environments are in use: %s" % (len(paths), ", ".join(each)), "give venv: a path")
    if not paths:
        without = [who for path, who, _, live in used if live and path is None]
        if without:
            return _none(without[0] + " maps no Python environment", "give venv: a path")
        return _none("nothing here says which environment", "no job is running: give venv: a path")
    _, who, container, live = next(one for one in used if one[0] == paths[0])
    by = "job " + who.split()[1] if live else who
    return _described(paths[0], by, container, _living(used, paths[0]))


def _given(venv, used, to_look):
    if not venv.startswith("/"):
        return _none("%s is not an absolute path" % venv, "give venv: an absolute path, or of-job")
    path = os.path.realpath(venv)
    if not os.path.isdir(path):
        return _none("there is no environment at %s" % venv, "give the path of an environment that exists")
    inside = [(path, who, container, live) for one, who, container, live in used if _same(one, path)]
    if inside:
        return _described(path, "given", inside[0][2], _living(used, path))
    others = sorted({(who, one) for one, who, _, live in used if live and one})
    if others:
        found = ", ".join("%s uses %s" % pair for pair in others[:3])
        if to_look:
            return dict(_described(path, "given", False, []), beside=found)
        return _none("no job uses %s: %s" % (venv, found), "give the path the job uses, or of-job")
    return _described(path, "given", False, [])


def refuse_in_use(path, back=False):
    """Refuse to change an environment that a process uses: it would load what it did not start with.

    On the way `back` only a GPU job counts: half a repair is worse for a notebook than the whole way.
    """
    users = _living(_in_use_now(), path) or ([] if back else others_of(path))
    if users:
        raise Refusal("blocked", "%s uses %s" % (", ".join(users[:3]), path), "stop it first")


def others_of(path):
    """Who uses an environment beside the GPU jobs and all that is theirs: ["alice's python (pid 12)"].

    What has libraries of it mapped, or was started as a program of it: a notebook, a job that waits for
    its peers or still imports torch, an installation.
    """
    _, jobs = procs.jobs_here()
    known = procs.ancestors() | {pid for job in jobs for pid, _ in ending.tree_of(job)}
    found = []
    for pid, (state, _, _) in sorted(all_processes().items()):
        if pid not in known and state not in "ZX" and _uses(pid, path):
            found.append("%s's %s (pid %d)" % (user_name(procs.uid_of(pid)), procs.comm_of(pid), pid))
    return found


def _uses(pid, path):
    inside = path + "/"
    program = (procs.argv_of(pid) or [""])[0].startswith(inside + "bin/")
    if not program and inside.encode("utf-8", "surrogateescape") not in procs.slurp(pid, "maps"):
        return False
    try:
        # In a container the same path may be another folder.
        return os.path.samefile("/proc/%d/root%s" % (pid, path), path) and procs.uid_of(pid) is not None
    except PermissionError:
        return True
    except OSError:
        return False


def _living(used, path):
    return sorted({who for one, who, _, live in used if live and _same(one, path)})


def _same(one, path):
    return one is not None and (one == path or os.path.realpath(one) == path)


def _none(reason, hint):
    return {"none": reason, "hint": hint}


def _described(path, by, container, users):
    path = os.path.realpath(path)
    if container:
        site, kind = [], "container"
    else:
        kind = kind_of(path)
        site = sites_of(path, SITES + SYSTEM_SITES if kind == "system" else SITES)
        if not site or python_of(path) is None:
            return _none("%s is no Python environment" % path, "it has no bin/python or no site-packages")
        nobodys = owners.why_nobodys(path, python_of(path), site) if kind == "venv" else None
        if nobodys:
            return _none(*nobodys)
    uid, gid = (0, 0) if container else (os.lstat(path).st_uid, os.lstat(path).st_gid)
    return {
        "path": path,
        "python": python_of(path) or os.path.join(path, "bin/python"),
        "site": site,
        "uid": uid,
        "gid": gid,
        "user": user_name(uid),
        "kind": kind,
        "by": by,
        "used_by": users,
    }


def kind_of(path):
    """What made an environment: `venv` (pip, uv, virtualenv), `conda`, or `system` for all others."""
    if os.path.exists(os.path.join(path, "pyvenv.cfg")):
        return "venv"
    return "conda" if os.path.isdir(os.path.join(path, "conda-meta")) else "system"


def python_of(path):
    """The interpreter of an environment, or None."""
    for name in ("bin/python", "bin/python3"):
        if os.path.exists(os.path.join(path, name)):
            return os.path.join(path, name)
    return None


def sites_of(path, patterns=SITES):
    """The site-packages folders of an environment, each once however it is linked.

    One that a link leads out of the environment to is none of its own: another's rights count there.
    """
    found, top = {}, os.path.realpath(path)
    for pattern in patterns:
        for site in sorted(glob.glob(os.path.join(glob.escape(path), pattern))):
            real = os.path.realpath(site)
            if os.path.isdir(site) and real.startswith(top + "/"):
                found.setdefault(real, site)
    return list(found.values())
