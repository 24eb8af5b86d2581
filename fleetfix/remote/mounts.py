"""Read what is mounted where."""

import re


def table():
    """[(mount point, file system type)] as this process sees them, in order of mounting."""
    return [(point, kind) for point, kind, _, _ in rows()]


def rows():
    """[(mount point, file system type, source, the path within it)] in order of mounting."""
    found = []
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            left, _, right = line.decode("utf-8", "surrogateescape").partition(" - ")
            root, point = (_plain(one) for one in left.split()[3:5])
            kind, source = right.split()[:2]
            found.append((point, kind, _plain(source), root))
    return found


def _plain(word):
    """A word of mountinfo without its escapes for blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), word)


def within(path, table):
    """The first mount point at a path or below it, or None."""
    return next((point for point, _ in table if point == path or point.startswith(path + "/")), None)


def filesystem_of(path, table):
    """The type of the file system that a path is on."""
    best, kind = "", ""
    for point, type_ in table:
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and len(point) >= len(best):
            best, kind = point, type_
    return kind


def folder_of(path, rows):
    """Where a folder lies: {"path", "filesystem", "source", "inside"}.

    `source` is what is mounted there, and `inside` the folder's path within that.
    """
    best = None
    for row in rows:
        inside = row[0] == "/" or path == row[0] or path.startswith(row[0] + "/")
        if inside and (best is None or len(row[0]) >= len(best[0])):
            best = row
    point, kind, source, root = best or ("/", "", "", "/")
    below = path[len(point.rstrip("/")) :]
    inside = root.rstrip("/") + below or "/"
    return {"path": path, "filesystem": kind, "source": source, "inside": inside}


def folders_of(paths, rows):
    """Where these folders lie, and each that something is mounted on below them; each file system once."""
    below = {row[0] for row in rows if any(row[0].startswith(path + "/") for path in paths)}
    found = {}
    for path in [*paths, *sorted(below)]:
        one = folder_of(path, rows)
        found.setdefault((one["filesystem"], one["source"]), one)
    return list(found.values())
