"""Which processes have something below a folder open, mapped, or as the place where they work."""

import os

from fleetfix.remote.api import all_processes, descendants, user_name


def of_paths(folders):
    """{folder: [{"pid", "name", "user", "paths"}]}; `folders` are real paths.

    Of another user's process only root sees anything. This process and those it descends from do not
    count.
    """
    users = {folder: [] for folder in folders}
    if not folders:
        return users
    table = all_processes()
    own = _lineage(table)
    for pid, (state, _, _) in table.items():
        if pid in own or state in "ZX":
            continue
        held = _held(pid, folders)
        for folder in folders:
            below = sorted(path for path in held if path == folder or path.startswith(folder + "/"))
            if below:
                users[folder].append(_described(pid, below))
    return users


def tree_of(pid):
    """The pids of a process and of all below it."""
    return {pid, *(child for child, _ in descendants(pid))}


def _lineage(table):
    own, pid = set(), os.getpid()
    while pid in table and pid not in own:
        own.add(pid)
        pid = table[pid][1]
    return own


def _described(pid, paths):
    try:
        with open("/proc/%d/comm" % pid, "rb") as file:
            name = file.read().decode("utf-8", "backslashreplace").strip()
        user = user_name(os.stat("/proc/%d" % pid).st_uid)
    except OSError:
        name, user = "?", "?"
    return {"pid": pid, "name": name, "user": user, "paths": paths[:50]}


def _held(pid, folders):
    """The paths at or below any of the folders that a process holds."""
    base = "/proc/%d/" % pid
    held = set()
    for name in ("cwd", "root", "exe", *_descriptors(base)):
        try:
            held.add(os.readlink(base + name))
        except OSError:
            continue
    return {path for path in held | _mapped(base, folders) if path.startswith(tuple(folders))}


def _descriptors(base):
    try:
        return ["fd/" + name for name in os.listdir(base + "fd")]
    except OSError:
        return []


def _mapped(base, folders):
    try:
        with open(base + "maps", "rb") as file:
            data = file.read()
    except OSError:
        return set()
    if not any(folder.encode("utf-8", "surrogateescape") in data for folder in folders):
        return set()
    lines = data.decode("utf-8", "surrogateescape").splitlines()
    return {line.split(None, 5)[5] for line in lines if line.count("/")}
