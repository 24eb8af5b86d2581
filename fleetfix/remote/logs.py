"""Read from a job's log what a regex finds in it, since the job's start, and nothing more."""

import os
import re

from fleetfix.remote import jobs, plain
from fleetfix.remote.api import Refusal, read

TAIL = 16 * 1024 * 1024  # bytes at the end of the log that are looked at
LINE = 8192  # characters of a line that are looked at
REPLY = 40 * 1024  # characters of points in one reply

COLOURS = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
PREFIX = re.compile(r"^(?:\s*\[(?:default|rank)?\d*\]:\s?|\s*\((?:\w+ )?pid=\d+\)\s|\s*\d+:\s(?=\S))")


@read
def find_rates(ctx, formats, log=None, last=600):
    """The points of each format in the log of the running job: [[step or None, rate], ...] as texts.

    `formats` is [{"name", "rate", "step"}], regexes with a group of that name. `log` overrides where
    the job's own output goes; it is read from its start then, unless it is the same file.
    """
    patterns = [_compiled(each) for each in formats]
    job = jobs.log_of_job(ctx) or _without_log(ctx, log)
    if job is None:
        return {"none": "no job runs here", "job": None}
    names = ("pid", "key", "seconds", "first_step", "steps_seen")
    known = {name: job.get(name) for name in names}
    path = log or job["path"]
    if path is None:
        return {"none": "the job's output goes to no file: say where its log is with `log`", "job": known}
    offset = job["offset"] if job["path"] and os.path.realpath(path) == os.path.realpath(job["path"]) else 0
    return dict(ctx.as_user(job["uid"], _scan, path, offset, patterns, last), job=known)


def _without_log(ctx, log):
    """A live job whose own output goes to no file, as `jobs.log_of_job` would say it; else None."""
    live = jobs.current(ctx)
    if live is None:
        return None
    key = jobs.key_of(ctx, live["argv"], live["cwd"], live["uid"], log or "\0")
    return dict(live, path=None, offset=0, key=key, seconds=jobs.age_of(live["start"]))


def _compiled(each):
    try:
        return (
            each["name"],
            re.compile(each["rate"]),
            re.compile(each["step"]) if each.get("step") else None,
        )
    except re.error as error:
        raise Refusal("command", "the pattern of %s: %s" % (each["name"], error)) from error


def _scan(path, offset, patterns, last):
    points = {name: [] for name, _, _ in patterns}
    matched = dict.fromkeys(points, 0)
    try:
        file = plain.file(path)
    except OSError as error:
        return {"none": "the log %s cannot be read: %s" % (path, error.strerror)}
    status = os.fstat(file.fileno())
    with file:
        # A log that is shorter than where this start began was emptied or replaced meanwhile.
        offset = offset if offset <= status.st_size else 0
        start = max(offset, status.st_size - TAIL)
        file.seek(start)
        for line in _lines(file, status.st_size - start, partial=start > offset):
            for name, rate, step in patterns:
                match = rate.search(line)
                if match:
                    matched[name] += 1
                    points[name].append([_group(step, "step", line, match), match.group("rate")[:40]])
                    if len(points[name]) > 2 * last:
                        del points[name][:-last]
    kept = {name: _fitting(each[-last:], len(points)) for name, each in points.items()}
    return {
        "log": path,
        "points": kept,
        "whole": {name: start == offset and matched[name] == len(kept[name]) for name in kept},
    }


def _fitting(points, among):
    """The last points that fit into a reply."""
    room = REPLY // among
    for place in range(len(points) - 1, -1, -1):
        room -= len(points[place][0] or "null") + len(points[place][1]) + 8
        if room < 0:
            return points[place + 1 :]
    return points


def _group(step, name, line, match):
    if step is None:
        return (match.groupdict().get(name) or "")[:20] or None
    found = step.search(line)
    return found.group(name)[:20] if found else None


def _lines(file, size, partial):
    """The lines of the next `size` bytes, without colours and prefixes; the last one only if it ended.

    A progress bar writes its states over one another with \\r: each is a line. `partial` says that the
    first one began before.
    """
    rest = b""
    left = size
    while left > 0:
        block = file.read(min(left, 1 << 20))
        if not block:
            break
        left -= len(block)
        pieces = re.split(rb"[\r\n]", rest + block)
        rest = pieces.pop()
        if len(rest) > 1 << 20:
            rest = rest[-LINE:]
        for piece in pieces:
            if partial:
                partial = False
                continue
            if piece:
                yield cleaned(piece[:LINE].decode("utf-8", "replace"))


def cleaned(line):
    """A line without terminal colours, and without the prefix that says which rank it is of."""
    line = COLOURS.sub("", line)
    return PREFIX.sub("", line)
