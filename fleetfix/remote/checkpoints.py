"""How long ago a running job saved its last checkpoint: by names and times of files, never by contents.

Where it saves is what its options, its configuration and the lines of its log name; where these lead to
none, the folders that are usually used below its working directory. All is looked at as the job's user,
to a bounded depth and number of entries; below the folder itself no link is followed.
"""

import errno
import itertools
import os
import re
import stat
import time

from fleetfix.remote import capture, jobs, plain, procs
from fleetfix.remote.api import Refusal, alive, descendants, read, user_home

PROCESSES = 16  # of a job, whose options are looked at
ENTRIES = 3000  # names that are looked at in all
DEPTH = 4
RUNS = 20  # folders of earlier runs that are looked at side by side, the newest first
CONFIGS, CONFIG = 4, 256 * 1024  # files, and bytes of each
AHEAD = 60.0  # seconds by which a file server's clock may be ahead

# Options and keys that name where is saved, the last word of a dotted one.
SAVES = re.compile(
    r"^(?:save|(?:save|output|out|work)_?(?:dir|path|folder)|output|dump_folder|default_root_dir"
    r"|(?:save_)?(?:checkpoint|ckpt)s?(?:_(?:save_)?(?:dir|folder|path|root))?)$"
)
SECTION = re.compile(r"^(?:save_)?(?:model_)?(?:checkpoint|ckpt)(?:s|ing|er)?$")
IN_SECTION = re.compile(r"^(?:(?:save_)?(?:folder|dir|path)|dirpath)$")
NOWHERE = {"", "true", "false", "yes", "no", "on", "off", "none", "null", "~", "{", "[", "|", ">"}
REMOTE = re.compile(r"^([a-z][a-z0-9+.-]*)://", re.I)

HEAD = re.compile(r"^\s*\[+\s*([A-Za-z0-9_.-]+)\s*\]+\s*(?:#.*)?$")
PAIR = re.compile(r"""^(\s*)(?:-\s+)?["']?([A-Za-z0-9_.-]+)["']?\s*[:=]\s*(.*?)\s*,?\s*$""")
QUOTED = re.compile(r"""^(["'])(.*?)\1""")

# One checkpoint, a folder or a file; the file that says which one is complete; a file of one.
ONE = re.compile(r"^(?:checkpoint|ckpt|step|iter|iteration|global_?step|epoch)[-_=.]?[0-9]", re.I)
POINTER = re.compile(r"^(?:latest|latest_checkpointed_iteration\.txt)$")
FILE = re.compile(r"\.(?:pt|pth|ckpt|safetensors|distcp|nemo)$")
UNFINISHED = re.compile(r"^(?:tmp|\.)|[._-](?:tmp|temp|part|partial|incomplete)$", re.I)

USUAL = ("checkpoint", "checkpoints", "ckpt", "ckpts")
OF_RUNS = ("outputs", "lightning_logs")
LIKE = re.compile(r"^(?:checkpoint|ckpt)", re.I)


@read
def last(ctx, pid, start, lines=()):
    """When a running job last saved: {"age", "running", "unsure"}, seconds by this host's clock.

    `age` is None where no checkpoint was found; `unsure` says then, in a few words, why there may be one
    all the same. `running` is the job's own age. `lines` are regexes for what trainers log when they
    save, with a group `path`.
    """
    uid = procs.uid_of(pid)
    if uid is None or not alive(pid, start):
        raise Refusal("stale_plan", "job %d ended by itself" % pid)
    members = [pid, *(one for one, _ in descendants(pid)[: PROCESSES - 1])]
    places = []
    for one in members:
        place = [procs.argv_of(one), procs.link(one, "cwd")]
        if place[0] and place[1] and place not in places:
            places.append(place)
    log = capture.log_of([*members[1:], pid])
    found = ctx.as_user(uid, _found, places, log, list(lines))
    return dict(found, running=jobs.age_of(start))


def _found(places, log, lines):
    walk = _Walk(time.time())
    for path in [*_named(places, walk), *_logged(places, log, lines)]:
        walk.root(path)
    if walk.newest is None:
        for cwd in dict.fromkeys(cwd for _, cwd in places):
            for path in _usual(cwd):
                walk.root(path)
    age = None if walk.newest is None else max(walk.now - walk.newest, 0.0)
    return {"age": age, "unsure": walk.unsure if age is None else None}


# -- where it saves ---------------------------------------------------------------------------------


def _named(places, walk):
    """The folders that options name, and the files of configuration among them."""
    found, configs = [], []
    for argv, cwd in places:
        for key, value in _options(argv):
            found += _saves(key, value, cwd, walk)
        words = [word.split("=", 1)[-1] for word in argv]
        configs += [(os.path.join(cwd, word), cwd) for word in words if word.endswith(jobs.CONFIGS)]
    for path, cwd in list(dict.fromkeys(configs))[:CONFIGS]:
        for key, value in _pairs(_text_of(path)):
            found += _saves(key, value, cwd, walk)
    return found


def _options(argv):
    """(key, value) of `--key value`, `--key=value`, `key=value` and `+key=value`."""
    for place, word in enumerate(argv):
        following = argv[place + 1] if place + 1 < len(argv) else "-"
        if "=" in word:
            yield tuple(word.split("=", 1))
        elif word.startswith("-") and not following.startswith("-"):
            yield word, following


def _saves(key, value, cwd, walk):
    words = key.lstrip("-+").lower().replace("-", "_").split(".")
    inside = len(words) > 1 and SECTION.match(words[-2]) and IN_SECTION.match(words[-1])
    if not inside and words[-2:] != ["run", "dir"] and not SAVES.match(words[-1]):
        return []
    value = value.strip().strip("\"'")
    remote = REMOTE.match(value)
    if remote:
        walk.doubt("it saves to %s" % remote.group(1).lower())
    if "$" in value:
        walk.doubt("a variable names where it saves")
    if remote or value.lower() in NOWHERE or value.isdigit() or "$" in value or "\0" in value:
        return []
    if value.startswith("~/"):
        value = user_home(os.geteuid()) + value[1:]
    return [os.path.join(cwd, value)]


def _text_of(path):
    return (plain.text(path, CONFIG) or b"").decode("utf-8", "replace")


def _pairs(text):
    """(dotted key, value) of the lines of TOML, YAML or JSON that hold one; good enough to find folders."""
    table, above = "", []  # above: [(indent, key)] of what the line lies in
    for line in text.splitlines():
        head = HEAD.match(line)
        if head:
            table, above = head.group(1), []
            continue
        pair = PAIR.match(line)
        if not pair:
            continue
        indent, key, value = len(pair.group(1)), pair.group(2), pair.group(3)
        above = [one for one in above if one[0] < indent]
        if value in ("", "{") or value.startswith(("#", "&")):
            above.append((indent, key))
            continue
        quoted = QUOTED.match(value)
        value = quoted.group(2) if quoted else value.split(" #")[0]
        yield ".".join([*filter(None, [table]), *(one[1] for one in above), key]), value


def _logged(places, log, lines):
    """The last path that each kind of line in the log names."""
    if log is None:
        return []
    patterns, found = [re.compile(line) for line in lines], {}
    cwd = places[-1][1] if places else "/"
    for line in capture.read_log(log):
        for place, pattern in enumerate(patterns):
            match = pattern.search(line)
            if match and "\0" not in match.group("path"):
                found[place] = os.path.join(cwd, match.group("path"))
    return list(found.values())


def _usual(cwd):
    """The folders below a working directory that checkpoints are usually in; runs have theirs each."""
    yield from (os.path.join(cwd, name) for name in USUAL)
    level = [os.path.join(cwd, name) for name in OF_RUNS]
    for _ in range(DEPTH - 1):
        found = sorted((one for path in level for one in _folders(path)), reverse=True)[:RUNS]
        yield from (path for _, path in found if LIKE.match(os.path.basename(path)))
        level = [path for _, path in found if not LIKE.match(os.path.basename(path))]


def _folders(path):
    try:
        with os.scandir(path) as entries:
            names = list(itertools.islice(entries, ENTRIES))
        return [
            (one.stat(follow_symlinks=False).st_mtime, one.path)
            for one in names
            if one.is_dir(follow_symlinks=False)
        ]
    except OSError:
        return []


# -- what lies there --------------------------------------------------------------------------------


class _Walk:
    """The newest checkpoint in some folders, and what kept it from being sure."""

    def __init__(self, now):
        self.now = now
        self.newest = None
        self.unsure = None
        self.left = ENTRIES
        self.seen = set()

    def doubt(self, why):
        self.unsure = self.unsure or why

    def root(self, path):
        """Look at a folder, at one checkpoint, or at a file that is one; a link to it is followed."""
        try:
            status = os.stat(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                self.doubt("its folder cannot be looked at: %s" % error.strerror)
            return
        if (status.st_dev, status.st_ino) in self.seen:
            return
        self.seen.add((status.st_dev, status.st_ino))
        if stat.S_ISREG(status.st_mode):
            self._count(status.st_mtime)
        elif stat.S_ISDIR(status.st_mode) and ONE.match(os.path.basename(os.path.normpath(path))):
            self._count(self._saved_at(path))
        elif stat.S_ISDIR(status.st_mode):
            self._folder(path, DEPTH)

    def _count(self, at):
        if at is None:
            return
        if at > self.now + AHEAD:
            self.doubt("its time is in the future")
        elif self.newest is None or at > self.newest:
            self.newest = at

    def _list(self, path):
        found = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if self.left <= 0:
                        self.doubt("there is too much to look at")
                        break
                    self.left -= 1
                    found.append(entry)
        except OSError as error:
            self.doubt("its folder cannot be looked at: %s" % error.strerror)
        return found

    def _folder(self, path, depth):
        """Count what is newest in a folder of checkpoints, or in one that has some below it."""
        pointers, files, ones, others = [], [], [], []
        for entry in self._list(path):
            kind, at = _kind_and_time(entry)
            if kind is None or UNFINISHED.search(entry.name):
                continue
            if POINTER.match(entry.name) and kind != "folder":
                pointers.append(at)  # written, or pointed anew, when a checkpoint is complete
            elif kind == "folder" and (ONE.match(entry.name) or FILE.search(entry.name)):
                ones.append((at, entry.path))
            elif kind == "folder":
                others.append((at, entry.path))
            elif kind == "file" and (FILE.search(entry.name) or ONE.match(entry.name)):
                files.append(at)
        for at in pointers or files:
            self._count(at)
        for _, one in () if pointers else sorted(ones, reverse=True)[:3]:
            self._count(self._saved_at(one))
        for _, one in sorted(others, reverse=True) if depth > 1 else ():
            self._folder(one, depth - 1)

    def _saved_at(self, path, depth=2):
        """When one checkpoint, a folder, was written; None while it is not whole."""
        times, names, below = [], set(), []
        for entry in self._list(path):
            kind, at = _kind_and_time(entry)
            names.add(entry.name)
            if kind == "folder":
                below.append(entry.path)
            elif kind == "file" and entry.name == ".metadata":
                return at  # torch.distributed.checkpoint writes it last
            elif kind == "file" and not UNFINISHED.search(entry.name):
                times.append(at)
        if any(name.endswith(".distcp") for name in names):
            return None
        times += [at for one in below if depth > 1 for at in [self._saved_at(one, depth - 1)] if at]
        return max(times, default=None)


def _kind_and_time(entry):
    """("folder" | "file" | "link", mtime) of an entry itself; (None, 0) for anything else."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None, 0
    for kind, is_it in (("folder", stat.S_ISDIR), ("file", stat.S_ISREG), ("link", stat.S_ISLNK)):
        if is_it(status.st_mode):
            return kind, status.st_mtime
    return None, 0
