"""Read what is mounted where."""

import re


def table():
    """[(mount point, file system type)] as this process sees them, in order of mounting."""
    found = []
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            left, _, right = line.decode("utf-8", "surrogateescape").partition(" - ")
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), left.split()[4])
            found.append((point, right.split()[0]))
    return found


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


def kinds_of(paths, table):
    """The types of the file systems that these folders, and all that is mounted below them, lie on."""
    found = {filesystem_of(path, table) for path in paths}
    for point, kind in table:
        found.update({kind} if any(point.startswith(path + "/") for path in paths) else ())
    return sorted(found)
