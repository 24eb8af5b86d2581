"""Whose an environment is: whoever can change its code decides as whom it may run."""

import os
import stat

from fleetfix.remote.api import user_name

LINKS = 40  # links followed on the way to one path, as the kernel does


def why_nobodys(prefix, python, sites):
    """Why an environment has no one owner, as (reason, hint); None where it has.

    `prefix` is a real path. Nothing of an environment may run as root unless root alone can change it:
    what it holds, its interpreter, and every folder on the way there.
    """
    parts = _parts(prefix, python, sites)
    for name, path in parts:
        if os.path.realpath(os.path.dirname(path)) != os.path.dirname(path):
            return "%s: a link stands on the way to its %s" % (prefix, name), "put a real folder there"
    uid = os.lstat(prefix).st_uid
    for name, path in parts:
        other = os.lstat(path).st_uid
        if other != uid:
            said = (prefix, name, user_name(other), user_name(uid))
            return "%s has mixed owners: %s belongs to %s, the environment to %s" % said, _chown(
                uid, prefix
            )
    return _open_to_others([prefix, python, *(path for _, path in parts)]) if uid == 0 else None


def _chown(uid, prefix):
    return "find out who changed it, then: chown -R %s %s" % (user_name(uid), prefix)


def _parts(prefix, python, sites):
    """[(name, path)] of what decides which code an environment runs; no folder of these is a link."""
    found = [("pyvenv.cfg", prefix + "/pyvenv.cfg"), ("bin", prefix + "/bin")]
    found.append(("bin/" + os.path.basename(python), python))
    for site in sorted(map(os.path.realpath, sites)):
        # A link such as lib64 -> lib is another name of what stands here by its own.
        folder = os.path.relpath(site, prefix).split("/")
        for number in range(1, len(folder) + 1):
            name = "/".join(folder[:number])
            shown = "site-packages" if number == len(folder) else name
            if (shown, prefix + "/" + name) not in found:
                found.append((shown, prefix + "/" + name))
    return [(name, path) for name, path in found if os.path.lexists(path)]


def _open_to_others(paths):
    trusted = _roots()
    for path in dict.fromkeys(step for one in paths for step in way_to(one)):
        info = os.lstat(path)
        if info.st_uid not in trusted:
            return _not_roots(path, "belongs to " + user_name(info.st_uid))
        if stat.S_ISLNK(info.st_mode) or (stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX):
            continue  # of a folder like /tmp nobody takes away what is another's
        if info.st_mode & 0o002:
            return _not_roots(path, "can be written by everybody")
        if info.st_mode & 0o020 and info.st_gid not in trusted:
            return _not_roots(path, "can be written by group %d" % info.st_gid)
    return None


def _not_roots(path, why):
    return "%s %s: what runs from there would run as root" % (path, why), "make it root's alone"


def _roots():
    """The ids that are root's; in a user namespace also the one that stands for whom it does not know."""
    try:
        with open("/proc/self/uid_map", "rb") as file:
            whole = file.read().split()[2:3] == [b"4294967295"]
    except OSError:
        whole = True
    return {0} if whole else {0, 65534}


def way_to(path):
    """Every folder and link that decides what a path means, from `/` on, and what it means."""
    found, left, at, links = ["/"], path.strip("/").split("/"), "", 0
    while left:
        name = left.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            at = os.path.dirname(at).rstrip("/")
            continue
        step = at + "/" + name
        if not os.path.lexists(step):
            break
        found.append(step)
        if os.path.islink(step) and links < LINKS:
            links += 1
            target = os.readlink(step)
            at = "" if target.startswith("/") else at
            left = target.strip("/").split("/") + left
        else:
            at = step
    return found
