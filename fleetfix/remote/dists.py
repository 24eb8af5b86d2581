"""Read what is installed in an environment from its *.dist-info folders, as data only.

Nothing of the environment runs. Paths are relative to the prefix of the environment, so that
`site-packages/x.py` and `../../../bin/x` of a RECORD are named alike.
"""

import base64
import binascii
import csv
import hashlib
import io
import os
import re
import stat
import zipfile

from fleetfix.remote import elf, plain

LARGEST_TEXT = 64 << 20  # bytes of a RECORD or METADATA that are read at most
ELF_FILES = 24  # shared objects of one package whose needs are read, largest first

INSTALLER = re.compile(rb"\s*([A-Za-z0-9._-]{1,40})\s*\Z")  # a word, lest any file be told by a link there
CUDA_PATH = re.compile(r"(?:^|/)nvidia/cu(1[0-9])/")
SPEAKS_OF_CUDA = re.compile(
    r"^(?:nvidia|cuda|cupy|torch|triton|nixl|nvshmem|sgl|sglang|flashinfer|mooncake)|cu(?:da)?-?1[0-9]"
)
CUDA_LOCAL = re.compile(r"\+.*?(?:cu|cuda)?1[0-9]")
TORCH_CUDA = re.compile(r"""^cuda\s*(?::[^=\n]*)?=\s*(?:['"]([0-9.]+)['"]|None)""", re.M)


class Dist:
    """One installed package: what its dist-info folder says."""

    def __init__(self, info, site):
        self.info = info  # path of the dist-info folder, relative to the prefix
        self.site = site
        self.name = self.version = ""
        self.named = False  # whether METADATA says name and version
        self.requires = []
        self.rows = None  # [(path, sha256 hex or None, size or None)]; None without a RECORD
        self.record = None  # digest of RECORD
        self.recorded_at = 0  # ctime (ns) of RECORD
        self.requested = self.direct = False
        self.installer = ""
        self.borrowed = False  # its rows come from a cache: only what hashes right is its own
        self.outside = 0  # rows that lead out of the environment; nothing touches these

    @property
    def label(self):
        return "%s %s" % (self.name, self.version)


def normal(name):
    """A package name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_text(path, most=LARGEST_TEXT):
    """The bytes of a regular file, or None."""
    return plain.text(path, most)


class Environment:
    """The packages of an environment, and who claims which path."""

    def __init__(self, prefix, site):
        self.prefix = os.path.realpath(prefix)
        self.sites = sorted({os.path.realpath(one) for one in site})
        self.dists = []
        self.leftovers = []
        self.eggs = []
        for one in self.sites:
            if one.startswith(self.prefix + "/"):
                self._read_site(one)
        self._hashes = {}
        self.claims = {}
        for dist in self.dists:
            self._claim(dist)

    def _claim(self, dist):
        for path, sha, size in dist.rows or ():
            self.claims.setdefault(path, []).append((dist, sha, size))

    def lend(self, dist, record):
        """Give a package without RECORD the one of its wheel."""
        dist.rows, dist.outside = read_record(record, dist.site)
        dist.borrowed = True
        dist.record = "borrowed " + hashlib.sha256(record).hexdigest()[:16]
        self._claim(dist)

    def _read_site(self, site):
        inside = os.path.relpath(site, self.prefix)
        for name in sorted(os.listdir(site)):
            if name.startswith("~"):
                self.leftovers.append(inside + "/" + name)
            if name.endswith(".dist-info") and os.path.isdir(os.path.join(site, name)):
                dist = read_dist(self.prefix, inside, name)
                if dist.named or not name.startswith("~"):
                    self.dists.append(dist)
            elif name.endswith((".egg-info", ".egg-link")):
                self.eggs.append(name)

    def of(self, infos):
        """The packages with these dist-info paths, in that order; KeyError names a missing one."""
        table = {dist.info: dist for dist in self.dists}
        return [table[info] for info in infos]

    def full(self, path):
        return os.path.join(self.prefix, path)

    # -- the state of files -------------------------------------------------------------------

    def sha256(self, path):
        """The SHA-256 of an installed file, through a link (uv --link-mode symlink), or None."""
        if path not in self._hashes:
            self._hashes[path] = hash_file(self.full(path))
        return self._hashes[path]

    def state(self, dist, path, sha, size, thorough=False):
        """`ok`, `missing` or `differs`: whether a file is as this package's RECORD says.

        The bytes are read only of suspects: another package claims the path with other bytes, or the
        file was changed after the RECORD was written. A hard link made by uv for another environment
        sets ctime too, so with several links only mtime counts.
        """
        full = self.full(path)
        try:
            info = os.stat(full)
        except FileNotFoundError:
            return "missing"
        except OSError:
            return "differs"
        if not stat.S_ISREG(info.st_mode):
            return "differs"
        if size is not None and info.st_size != size:
            return "differs"
        if sha is None:
            return "ok"
        changed = info.st_mtime_ns > dist.recorded_at or (
            info.st_nlink == 1 and info.st_ctime_ns > dist.recorded_at
        )
        contested = any(other not in (None, sha) for _, other, _ in self.claims[path])
        if (thorough and changed) or contested:
            return "ok" if self.sha256(path) == sha else "differs"
        return "ok"

    def rivals(self, dist, path, sha):
        """The other packages that claim this path with other bytes."""
        return [
            other
            for other, theirs, size in self.claims[path]
            if other is not dist and theirs is not None and theirs != sha
        ]

    def torch(self):
        """{"version", "cuda"} as torch/version.py says, read as text; None without torch."""
        for dist in self.dists:
            if normal(dist.name) == "torch":
                text = read_text(os.path.join(self.prefix, dist.site, "torch/version.py"), 1 << 16)
                found = TORCH_CUDA.search(text.decode("utf-8", "replace")) if text else None
                return {
                    "version": dist.version,
                    "cuda": found.group(1) if found else None,
                    "said": bool(found),
                }
        return None


def hash_file(path):
    """The SHA-256 of a regular file as hex, or None."""
    try:
        fd = plain.opened(path)
    except OSError:
        return None
    with os.fdopen(fd, "rb", buffering=0) as file:
        found = hashlib.sha256()
        while True:
            data = file.read(1 << 20)
            if not data:
                return found.hexdigest()
            found.update(data)


def read_dist(prefix, site, name):
    """The Dist of one dist-info folder; one that pip renamed to `~x` has its name from METADATA."""
    dist = Dist(site + "/" + name, site)
    folder = os.path.join(prefix, site, name)
    _read_metadata(dist, folder, name)
    said = INSTALLER.match(read_text(folder + "/INSTALLER", 200) or b"")
    dist.installer = said.group(1).decode() if said else ""
    dist.requested = os.path.lexists(folder + "/REQUESTED")
    dist.direct = os.path.lexists(folder + "/direct_url.json")
    record = read_text(folder + "/RECORD")
    if record is not None:
        dist.record = hashlib.sha256(record).hexdigest()[:16]
        dist.recorded_at = os.stat(folder + "/RECORD").st_ctime_ns
        dist.rows, dist.outside = read_record(record, site)
    return dist


def _read_metadata(dist, folder, name):
    stem = name[: -len(".dist-info")]
    dist.name, _, dist.version = stem.partition("-")
    text = read_text(folder + "/METADATA", 1 << 20)
    for line in (text or b"").decode("utf-8", "replace").splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        key, value = key.lower(), value.strip()
        if key == "name":
            dist.name = value
        elif key == "version":
            dist.version = value
            dist.named = True
        elif key == "requires-dist":
            dist.requires.append(value)


def read_record(data, site):
    """([(path relative to the prefix, sha256 hex or None, size or None)], rows outside)."""
    rows, outside = [], 0
    for row in csv.reader(io.StringIO(data.decode("utf-8", "surrogateescape"), newline="")):
        if not row or not row[0]:
            continue
        path = os.path.normpath(os.path.join(site, row[0]))
        if path.startswith(("../", "/")) or path in ("..", ".") or "\0" in path:
            outside += 1
            continue
        sha = _sha(row[1]) if len(row) > 1 else None
        size = int(row[2]) if len(row) > 2 and row[2].isdigit() else None
        rows.append((path, sha, size))
    return rows, outside


def _sha(text):
    if not text.startswith("sha256="):
        return None
    try:
        raw = base64.urlsafe_b64decode(text[7:] + "=" * (-len(text[7:]) % 4))
    except (binascii.Error, ValueError):
        return None
    return raw.hex() if len(raw) == 32 else None


def wheel_rows(archive, info):
    """{path in the wheel: (sha256 hex, size)} of an open wheel, by its own RECORD; {} without one."""
    try:
        data = archive.read(info + "/RECORD")
    except (KeyError, zipfile.BadZipFile, OSError):
        return {}
    rows, _ = read_record(data, "")
    return {path: (sha, size) for path, sha, size in rows}


# -- evidence ---------------------------------------------------------------------------------------


def path_majors(dist):
    """The CUDA majors that the paths of a package speak of: nvidia/cu13/lib/…"""
    found = (CUDA_PATH.search(path) for path, _, _ in dist.rows or ())
    return sorted({match.group(1) for match in found if match})


def elf_majors(environment, dist):
    """The CUDA majors that the shared objects of a package need."""
    objects = [row for row in dist.rows or () if ".so" in os.path.basename(row[0])]
    objects.sort(key=lambda row: -(row[2] or 0))
    found = set()
    for path, _, _ in objects[:ELF_FILES]:
        found.update(elf.cuda_majors(environment.full(path)))
    return sorted(found)


# -- what a repair has to put back ------------------------------------------------------------------


def wanted(environment, repair, purge):
    """[(path, sha256, size)] that the packages `repair` lack, given that the packages `purge` go.

    A file counts where it is missing, or where it differs and a package that goes claims it. One
    that differs and is claimed by nobody who goes was changed by somebody else: it is left alone.
    """
    going = set(map(id, purge))
    found = {}
    for dist in repair:
        for path, sha, size in dist.rows or ():
            if sha is None or path in found:
                continue
            state = environment.state(dist, path, sha, size, thorough=True)
            if state == "missing" and elsewhere(dist, path):
                continue
            contested = any(id(one) in going for one in environment.rivals(dist, path, sha))
            if state == "missing" or (state == "differs" and contested):
                found[path] = (path, sha, size)
    return [found[path] for path in sorted(found)]


def elsewhere(dist, path):
    """Whether a file lies outside of site-packages, such as a script that the installer wrote."""
    return not path.startswith(dist.site + "/")


def unowned(environment, purge):
    """[path] of files of the packages `purge` that no other package claims, dist-info last.

    The byte code of modules that go is among them; so is all that lies in their dist-info folders.
    """
    going = set(map(id, purge))
    kept = {
        p for p, claims in environment.claims.items() if any(id(one) not in going for one, _, _ in claims)
    }
    files, last = [], []
    for dist in purge:
        for path, sha, _ in dist.rows or ():
            if path in kept or path.startswith(dist.info + "/"):
                continue
            if dist.borrowed and environment.sha256(path) != sha:
                continue
            files.append(path)
            files += [one for one in _byte_code(environment, path) if one not in kept]
        files += stashed(environment, dist)
        last += _info_files(environment, dist)
    there = [path for path in dict.fromkeys(files) if os.path.lexists(environment.full(path))]
    return there + last


def stashed(environment, dist):
    """[path] of files that pip moved into `~x` folders while it removed this package.

    pip renames what it removes beside itself first. A file there is this package's if its bytes are.
    """
    if not os.path.basename(dist.info).startswith("~"):
        return []
    own = {sha for _, sha, _ in dist.rows or () if sha is not None}
    above = {dist.site}
    for path, _, _ in dist.rows or ():
        folder = os.path.dirname(path)
        while folder.startswith(dist.site + "/"):
            folder = os.path.dirname(folder)
            above.add(folder)
    found = []
    for folder in sorted(above):
        for name in _stashes(environment.full(folder)):
            for inside, _, names in os.walk(environment.full(folder + "/" + name)):
                relative = os.path.relpath(inside, environment.prefix)
                found += [
                    one for one in (relative + "/" + each for each in sorted(names)) if one not in found
                ]
    proven = {path for path in found if environment.sha256(path) in own}
    return [path for path in found if path in proven or _module_of(path) in proven]


def _module_of(path):
    """The module that a file of byte code was compiled from, or None."""
    folder, name = os.path.split(path)
    if not name.endswith(".pyc") or os.path.basename(folder) != "__pycache__":
        return None
    return os.path.join(os.path.dirname(folder), name.partition(".")[0] + ".py")


def _stashes(folder):
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [name for name in names if name.startswith("~") and not name.endswith(".dist-info")]


def _byte_code(environment, path):
    folder, name = os.path.split(path)
    if not name.endswith(".py"):
        return []
    cache = folder + "/__pycache__"
    stem = name[:-3] + "."
    try:
        names = sorted(os.listdir(environment.full(cache)))
    except OSError:
        return []
    return [cache + "/" + one for one in names if one.startswith(stem) and one.endswith(".pyc")]


def _info_files(environment, dist):
    """Everything in a dist-info folder; RECORD goes last, it is what makes the rest provable."""
    found = []
    for folder, names, files in os.walk(environment.full(dist.info)):
        inside = os.path.relpath(folder, environment.prefix)
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]
        found += [inside + "/" + name for name in sorted(files + links)]
    record = dist.info + "/RECORD"
    return [path for path in found if path != record] + [path for path in found if path == record]
