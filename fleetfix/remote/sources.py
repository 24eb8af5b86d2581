"""The places a host can take a lost file from: each offers bytes, none is trusted.

Whatever a source gives is hashed against the RECORD of the installed package; what does not match is
as if it were not there (a file of the uv cache is changed by whoever wrote into an environment that
shares it by hard links).
"""

import html
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile

from fleetfix.remote import dists, jobs, offers, plain
from fleetfix.remote.api import user_home

FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
ASK = 8.0  # seconds that a question to an index or wheelhouse may take
PASSED = re.compile(
    r"^(?:https?_proxy|no_proxy|all_proxy|ssl_cert_(?:file|dir)|requests_ca_bundle"
    r"|pip_(?!no_|require).*|uv_(?!cache_dir|python|project).*)$",
    re.I,
)


class Sources:
    """All places to look at for the packages of one environment, in the order they are tried."""

    def __init__(self, ctx, where, wheelhouse=None):
        self.ctx = ctx
        self.where = where
        self.wheelhouse = wheelhouse
        known = jobs.job_environ(ctx, ctx.step)
        self.environ = known[1] if known and known[0] == where["uid"] else {}
        self.home = self.environ.get("HOME") or user_home(where["uid"])
        self._held = None
        self._bodies = None
        self.scratch = []

    def each(self, dist):
        """Yield what may hold the files of a package. A peer of the fleet would stand before the index."""
        yield self.held()
        yield from self._uv_cache(dist)
        yield from self._pip_cache(dist)
        yield from self._wheelhouse(dist)
        yield from self._index(dist)

    def held(self):
        if self._held is None:
            self._held = offers.Held(self.ctx.home)
        return self._held

    def record_of(self, dist):
        """The RECORD that a package's wheel brings, from a cache; None where none has it."""
        info = os.path.basename(dist.info)
        for offer in self._uv_cache(dist):
            return dists.read_text(os.path.join(offer.folder, info, "RECORD"))
        for offer in self._pip_cache(dist):
            try:
                return offer.archive.read(info + "/RECORD")
            except (OSError, KeyError, AttributeError, zipfile.BadZipFile):
                continue
        return None

    # -- caches -------------------------------------------------------------------------------

    def _uv_cache(self, dist):
        root = os.path.join(self.uv_cache(), "archive-v0")
        info = os.path.basename(dist.info)
        for name in _listed(root):
            if os.path.isdir(os.path.join(root, name, info)):
                yield offers.Folder("the uv cache", os.path.join(root, name), info)

    def uv_cache(self):
        """The folder of the uv cache of the environment's owner."""
        return (
            self.environ.get("UV_CACHE_DIR")
            or self._uv_toml("cache-dir")
            or os.path.join(self.environ.get("XDG_CACHE_HOME") or self.home + "/.cache", "uv")
        )

    def _uv_toml(self, key):
        for path in (self.home + "/.config/uv/uv.toml", "/etc/uv/uv.toml"):
            text = (dists.read_text(path, 1 << 16) or b"").decode("utf-8", "replace")
            found = re.search(r"""^%s\s*=\s*["']([^"'\n]+)["']""" % re.escape(key), text, re.M)
            if found:
                return found.group(1)
        return None

    def pip_cache(self):
        """The folder of the pip cache of the environment's owner."""
        return self.environ.get("PIP_CACHE_DIR") or os.path.join(
            self.environ.get("XDG_CACHE_HOME") or self.home + "/.cache", "pip"
        )

    def _pip_cache(self, dist):
        info = os.path.basename(dist.info)
        for path, inside in self._cached_wheels():
            if info in inside:
                yield offers.Wheel("the pip cache", path, info)

    def _cached_wheels(self):
        """[(path, {dist-info folders in it})] of every wheel in pip's cache."""
        if self._bodies is None:
            self._bodies = []
            for part, end in (("http-v2", ".body"), ("wheels", ".whl")):
                for folder, _, names in os.walk(os.path.join(self.pip_cache(), part)):
                    for name in sorted(names):
                        if name.endswith(end):
                            path = os.path.join(folder, name)
                            self._bodies.append((path, _infos(path)))
        return self._bodies

    # -- wheelhouse ---------------------------------------------------------------------------

    def _wheelhouse(self, dist):
        place = self.wheelhouse
        if not place:
            return
        if place.startswith("file://"):
            place = urllib.parse.unquote(urllib.parse.urlsplit(place).path)
        info = os.path.basename(dist.info)
        if not place.startswith(("http://", "https://")):
            for folder in (place, os.path.join(place, dists.normal(dist.name))):
                for name in _listed(folder):
                    if _is_wheel_of(name, dist):
                        yield offers.Wheel("the wheelhouse", os.path.join(folder, name), info)
            return
        for url in self._linked(place.rstrip("/") + "/", dist):
            yield offers.Remote("the wheelhouse", lambda url=url: self._download(url, info))

    def _linked(self, place, dist):
        """The URLs of a package's wheels that a page, or the page of that package, links to."""
        for page in (place, place + dists.normal(dist.name) + "/"):
            try:
                with urllib.request.urlopen(page, timeout=self.ctx.remaining(ASK)) as answer:
                    text, base = answer.read(16 << 20).decode("utf-8", "replace"), answer.url
            except (OSError, ValueError, urllib.error.URLError):
                continue
            for link in re.findall(r"""href\s*=\s*["']([^"']+)["']""", text, re.I):
                url = urllib.parse.urljoin(base, html.unescape(link)).partition("#")[0]
                name = urllib.parse.unquote(url.rpartition("/")[2])
                if _is_wheel_of(name, dist) and url.startswith(("http://", "https://")):
                    yield url

    def _download(self, url, info):
        path = os.path.join(self._scratch(), "fetched.whl")
        try:
            answer = urllib.request.urlopen(url, timeout=self.ctx.remaining(60))
            with answer, os.fdopen(os.open(path, FRESH, 0o600), "wb") as file:
                shutil.copyfileobj(answer, file, 1 << 20)
        except (OSError, ValueError, urllib.error.URLError):
            return None
        return offers.Wheel("the wheelhouse", path, info)

    # -- index --------------------------------------------------------------------------------

    def _index(self, dist):
        if self.index_has(dist):
            yield offers.Remote("the package index", lambda: self._from_index(dist))

    def index_has(self, dist):
        """Whether the owner's package index answers and knows this version; nothing is downloaded."""
        pin = "%s==%s" % (dist.name, dist.version)
        pip, uv = self._pip(), self._uv()
        if pip is not None:
            argv = [
                *pip,
                "index",
                "versions",
                dist.name,
                "--retries",
                "0",
                "--timeout",
                "5",
                "--no-cache-dir",
            ]
            ran = self._as_owner(argv, ASK)
            return (
                ran.exit == 0
                and re.search(r"[\s,:]%s(?:,|\s|$)" % re.escape(dist.version), ran.text) is not None
            )
        if uv is not None:
            argv = [uv, "pip", "compile", "-", "--no-deps", "--no-cache", "--quiet", "--no-header"]
            ran = self._as_owner([*argv, "--python", self.where["python"]], ASK, stdin=pin.encode())
            return ran.exit == 0 and pin.lower() in ran.text.lower()
        return False

    def _from_index(self, dist):
        pin, folder = "%s==%s" % (dist.name, dist.version), self._scratch(owners=True)
        info = os.path.basename(dist.info)
        pip, uv = self._pip(), self._uv()
        if pip is not None:
            argv = [
                *pip,
                "download",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--no-cache-dir",
                "-d",
                folder,
                pin,
            ]
            if self._as_owner(argv, None).exit != 0:
                return None
            wheel = next((name for name in _listed(folder) if name.endswith(".whl")), None)
            return wheel and offers.Wheel("the package index", os.path.join(folder, wheel), info)
        argv = [
            uv,
            "pip",
            "install",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--no-cache",
            "--link-mode",
            "copy",
        ]
        argv += ["--target", folder, "--python", self.where["python"], pin]
        if self._as_owner(argv, None).exit != 0:
            return None
        return offers.Folder("the package index", folder, info)

    def _pip(self):
        for site in self.where["site"]:
            if os.path.isfile(os.path.join(site, "pip/__main__.py")):
                return [
                    self.where["python"],
                    "-I",
                    "-B",
                    "-m",
                    "pip",
                    "--no-input",
                    "--disable-pip-version-check",
                ]
        return None

    def _uv(self):
        for folder in (
            self.where["path"] + "/bin",
            self.home + "/.local/bin",
            self.home + "/.cargo/bin",
            "/usr/local/bin",
            "/usr/bin",
            *(one for one in self.environ.get("PATH", "").split(":") if one.startswith("/")),
        ):
            if os.access(folder + "/uv", os.X_OK):
                return folder + "/uv"
        return None

    def _as_owner(self, argv, timeout, stdin=b""):
        passed = {key: value for key, value in self.environ.items() if PASSED.match(key)}
        passed["PYTHONDONTWRITEBYTECODE"] = "1"
        return self.ctx.command(
            argv,
            timeout=timeout,
            env=passed,
            stdin=stdin,
            uid=self.where["uid"],
            gid=self.where.get("gid"),
            cwd="/",
        )

    def _scratch(self, owners=False):
        """A fresh folder, on disk rather than in memory; removed with `clear`.

        Only one that pip or uv fills, as the owner, is the owner's: in what is theirs we write nothing.
        """
        folder = tempfile.mkdtemp(prefix="fleetfix-", dir="/var/tmp")
        self.scratch.append(folder)
        self.ctx.remember("scratch", self.scratch)
        if owners and os.geteuid() == 0:
            os.chown(folder, self.where["uid"], -1)
        return folder

    def clear(self):
        """Remove what was fetched."""
        for folder in self.scratch:
            shutil.rmtree(folder, ignore_errors=True)
        self.scratch = []


def _listed(folder):
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _archive(file):
    """The wheel that an open file is: it begins as one, lest an archive behind anything else be read."""
    if file.read(4) != b"PK\x03\x04":
        raise zipfile.BadZipFile("no wheel")
    return zipfile.ZipFile(file)


def _infos(path):
    try:
        with plain.file(path) as file, _archive(file) as archive:
            return frozenset(name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError):
        return frozenset()


def _is_wheel_of(name, dist):
    parts = name[:-4].split("-") if name.endswith(".whl") else ()
    return (
        len(parts) in (5, 6)
        and dists.normal(parts[0]) == dists.normal(dist.name)
        and parts[1].replace("_", "-") == dist.version.replace("_", "-")
    )
