"""What a source of lost files offers: a folder, a wheel, earlier holds, or something to fetch first.

Each offer answers `covers(sha256)` and `open(sha256)`, which gives (binary file, executable) or None.
"""

import json
import os
import stat
import zipfile

from fleetfix.remote import dists, plain


class Folder:
    """An unpacked wheel: `site-packages` of one package in the uv cache, or a --target folder."""

    def __init__(self, source, folder, info):
        self.source = source
        self.folder = folder
        self.paths = {}
        data = dists.read_text(os.path.join(folder, info, "RECORD"))
        rows, _ = dists.read_record(data, "") if data else ((), 0)
        for path, sha, size in rows:
            if sha is not None and size_of(os.path.join(folder, path)) == size:
                self.paths[sha] = path

    def covers(self, sha):
        return sha in self.paths

    def open(self, sha):
        """(an open binary file, whether it may be executed), or None."""
        return open_plain(os.path.join(self.folder, self.paths[sha]))


class Wheel:
    """A wheel file: a zip whose own RECORD says what it holds."""

    def __init__(self, source, path, info):
        self.source = source
        self.path = path
        self.paths = {}
        self.archive = None
        try:
            fd = plain.opened(path)
            try:
                self.archive = zipfile.ZipFile("/proc/self/fd/%d" % fd)
            finally:
                os.close(fd)
            for name, (sha, _) in dists.wheel_rows(self.archive, info).items():
                if sha is not None:
                    self.paths[sha] = name
        except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError):
            pass

    def covers(self, sha):
        return sha in self.paths

    def open(self, sha):
        try:
            entry = self.archive.getinfo(self.paths[sha])
            return self.archive.open(entry), bool((entry.external_attr >> 16) & 0o111)
        except (OSError, KeyError, zipfile.BadZipFile, NotImplementedError):
            return None


class Held:
    """What earlier runs hold on this host."""

    source = "a hold of an earlier run"

    def __init__(self, home):
        self.paths = {}
        for folder, _, names in os.walk(os.path.join(home, "runs")):
            if "manifest.json" in names and "hold.json" in names:
                self._add(folder)

    def _add(self, folder):
        try:
            with open(folder + "/hold.json", "rb") as file:
                held = json.loads(file.read())
            with open(folder + "/manifest.json", "rb") as file:
                entries = json.loads(file.read())["entries"]
            found = {
                one["sha256"]: (os.path.join(held["folder"], one["name"]), bool(one["mode"] & 0o111))
                for one in entries
                if one["kind"] == "file"
            }
        except (OSError, ValueError, KeyError, TypeError):
            return
        self.paths.update((sha, one) for sha, one in found.items() if os.path.isfile(one[0]))

    def covers(self, sha):
        return sha in self.paths

    def open(self, sha):
        path, executable = self.paths[sha]
        found = open_plain(path)
        return found and (found[0], executable)


class Remote:
    """A wheel that must be fetched first; what it holds is known only then."""

    def __init__(self, source, fetch):
        self.source = source
        self.fetch = fetch
        """() -> Folder or Wheel, or None where it cannot be had."""

    def covers(self, _):
        return True


def size_of(path):
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def open_plain(path):
    try:
        found = plain.file(path, follow=False)
    except OSError:
        return None
    return found, bool(os.fstat(found.fileno()).st_mode & 0o111)
