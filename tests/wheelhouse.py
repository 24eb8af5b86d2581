"""Small wheels that share paths as the real CUDA wheels do, and environments to install them into."""

import base64
import csv
import hashlib
import itertools
import os
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

from fleetfix.actions import wheel_parts
from fleetfix.commands import Completed
from fleetfix.remote import environments, jobs, parts, wheels
from fleetfix.remote.api import Context

PYTHON = sys.executable
UV = str(Path(sys.executable).parent / "uv")


def shared_object(*needed):
    """The bytes of a 64-bit ELF file whose dynamic section needs these libraries."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in needed)
    offsets = list(itertools.accumulate([1, *(len(name) + 1 for name in needed)]))
    at = 64 + 2 * 56
    table = at + 16 * (len(needed) + 3)
    tags = [(1, offset) for offset in offsets[: len(needed)]] + [(5, table), (10, len(strings)), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    size = table + len(strings)
    head = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    )
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 4096)
    points = struct.pack("<IIQQQQQQ", 2, 6, at, at, at, len(dynamic), len(dynamic), 8)
    return head + load + points + dynamic + strings


def wheel(folder, name, version, files, requires=(), scripts=(), tag="py3-none-any"):
    """Build a wheel file; `files` is {path: text or bytes, or (bytes, mode)}."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    meta += "".join(f"Requires-Dist: {one}\n" for one in requires) + "\nNot a header: x\n"
    entries = dict(files)
    entries[f"{info}/METADATA"] = meta
    entries[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
    if scripts:
        entries[f"{info}/entry_points.txt"] = "[console_scripts]\n" + "".join(f"{one}\n" for one in scripts)
    path = Path(folder) / f"{stem}-{tag}.whl"
    rows = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, content in entries.items():
            data, mode = content if isinstance(content, tuple) else (content, 0o644)
            data = data.encode() if isinstance(data, str) else data
            entry = zipfile.ZipInfo(inside, (2024, 1, 1, 0, 0, 0))
            entry.external_attr = (stat.S_IFREG | mode) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{inside},sha256={digest},{len(data)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,", ""]))
    return path


TORCH = """
import os
_here = os.path.dirname(os.path.dirname(__file__))
for _name in ("nvidia/nccl/lib/libnccl.so.2", "nvidia/nvshmem/lib/libnvshmem_host.so.3"):
    if not os.path.exists(os.path.join(_here, _name)):
        raise ImportError(_name.rpartition("/")[2] + ": cannot open shared object file")
from .version import __version__
from . import version
"""


def nccl(major, version, extra=()):
    files = {
        "nvidia/__init__.py": "",
        "nvidia/nccl/__init__.py": "",
        "nvidia/nccl/include/nccl.h": f"#define NCCL {version}\n",
        "nvidia/nccl/lib/libnccl.so.2": (
            shared_object("libc.so.6") + f"NCCL version {version}+cuda{major}.0".encode(),
            0o755,
        ),
    }
    return {**files, **dict.fromkeys(extra, f"only {version}\n")}


def nvshmem(major):
    return {
        "nvidia/__init__.py": "",
        "nvidia/nvshmem/__init__.py": "",
        "nvidia/nvshmem/lib/libnvshmem_host.so.3": shared_object("libc.so.6")
        + b"nvshmem for CUDA %d" % major,
        "nvidia/nvshmem/include/nvshmem.h": "the same in both\n",
    }


def house(folder):
    """The wheels of the story, in `folder`: {name without version: path}."""
    made = [
        wheel(
            folder,
            "torch",
            "2.9.1",
            {
                "torch/__init__.py": TORCH,
                "torch/version.py": "from typing import Optional\n__version__ = '2.9.1+cu128'\n"
                "debug = False\ncuda: Optional[str] = '12.8'\n",
            },
            requires=[
                'nvidia-nccl-cu12==2.27.5; platform_system == "Linux" and platform_machine == "x86_64"',
                'nvidia-nvshmem-cu12==3.4.5; platform_system == "Linux"',
            ],
            scripts=["torchrun = torch:main"],
        ),
        wheel(folder, "nvidia-nccl-cu12", "2.27.5", nccl(12, "2.27.5")),
        wheel(
            folder,
            "nvidia-nccl-cu13",
            "2.28.9",
            nccl(13, "2.28.9", ["nvidia/nccl/include/nccl_device/core.h"]),
        ),
        wheel(folder, "nvidia-nvshmem-cu12", "3.4.5", nvshmem(12)),
        wheel(folder, "nvidia-nvshmem-cu13", "3.4.5", nvshmem(13)),
        wheel(
            folder,
            "nvidia-cublas",
            "13.1.0.3",
            {
                "nvidia/cu13/lib/libcublas.so.13": shared_object("libcublasLt.so.13"),
                "nvidia/cu13/tool.py": "x = 1\n",
            },
            scripts=["cublas-tool = nvidia.cu13.tool:x"],
        ),
        wheel(
            folder,
            "sglang-kernel",
            "0.4.10",
            {
                "sgl_kernel/__init__.py": "",
                "sgl_kernel/ops.abi3.so": shared_object("libcudart.so.13", "libc.so.6"),
            },
        ),
        wheel(
            folder,
            "plainlib",
            "1.0",
            {"plainlib/__init__.py": "x = 1\n", "plainlib/data.txt": "as shipped\n"},
        ),
    ]
    return {path.name.split("-")[0].replace("_", "-"): path for path in made}


CLEAN = ("torch", "nvidia-nccl-cu12", "nvidia-nvshmem-cu12", "plainlib")
OTHER = ("nvidia-nccl-cu13", "nvidia-nvshmem-cu13", "nvidia-cublas", "sglang-kernel")
PURGE = ("sglang-kernel", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13", "nvidia-cublas")


class Venv:
    """A real virtual environment, filled by real pip or real uv."""

    def __init__(self, path, tool, cache):
        self.path = Path(path)
        self.tool = tool
        self.cache = Path(cache)
        self.python = self.path / "bin/python"
        if tool == "uv":
            self._run([UV, "venv", "-q", "--python", PYTHON, str(path)])
        else:
            self._run([PYTHON, "-m", "venv", "--without-pip", str(path)])
        self.site = next(self.path.glob("lib/python3*/site-packages"))

    def install(self, *files, requested=False):
        """Install wheel files; as if they were required by something else, unless `requested`."""
        names = [str(one) for one in files]
        if self.tool == "uv":
            self._run(
                [
                    UV,
                    "pip",
                    "install",
                    "-q",
                    "--offline",
                    "--no-deps",
                    "--no-index",
                    "--python",
                    self.python,
                    *names,
                ]
            )
        else:
            own = [PYTHON, "-m", "pip", "-q", "--python", self.python, "--cache-dir", self.cache]
            self._run([*own, "install", "--no-index", "--no-deps", *names])
        if not requested:
            for stem in (one.name.split("-") for one in files):
                info = self.site / f"{stem[0]}-{stem[1]}.dist-info"
                for name in ("REQUESTED", "direct_url.json"):
                    forget(info, name)

    def uninstall(self, *names):
        if self.tool == "uv":
            self._run([UV, "pip", "uninstall", "-q", "--python", self.python, *names])
        else:
            self._run([PYTHON, "-m", "pip", "-q", "--python", self.python, "uninstall", "-y", *names])

    def _run(self, argv):
        environ = {
            **os.environ,
            "UV_CACHE_DIR": str(self.cache / "uv"),
            "PIP_CACHE_DIR": str(self.cache / "pip"),
        }
        done = subprocess.run([str(one) for one in argv], capture_output=True, text=True, env=environ)
        assert done.returncode == 0, done.stderr

    def installed(self):
        return sorted(
            path.name.partition("-")[0].replace("_", "-") for path in self.site.glob("*.dist-info")
        )

    def broken(self):
        """Every file that is not as a RECORD says: [(package, path)]."""
        found = []
        for record in self.site.glob("*.dist-info/RECORD"):
            for path, digest, size in csv.reader(record.read_text().splitlines()):
                if not digest:
                    continue
                full = self.site / path
                data = full.read_bytes() if full.exists() else b""
                have = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                if not full.exists() or f"sha256={have}" != digest or len(data) != int(size):
                    found.append((record.parent.name, path))
        return found


def forget(info, name):
    """Make a dist-info as an installation by requirement leaves it: without that file, or its row."""
    if (info / name).exists():
        (info / name).unlink()
        record = info / "RECORD"
        lines = record.read_text().splitlines(keepends=True)
        record.write_text("".join(line for line in lines if f"{info.name}/{name}," not in line))


def snapshot(root, times=False):
    """{path: what it is} of everything below a folder: bytes, mode, link target, and times if asked."""
    found = {}
    for folder, names, files in os.walk(root):
        for name in [*names, *files]:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            kind = stat.S_IFMT(info.st_mode)
            body = None
            if kind == stat.S_IFLNK:
                body = os.readlink(path)
            elif kind == stat.S_IFREG:
                with open(path, "rb") as file:
                    body = hashlib.sha256(file.read()).hexdigest()
            when = info.st_mtime_ns if times and kind != stat.S_IFLNK else None
            found[os.path.relpath(path, root)] = (info.st_mode, info.st_uid, body, when)
    return found


class Host:
    """A host's state folder, and the functions called as the runner calls them."""

    def __init__(self, folder, run="r1"):
        self.home = str(folder)
        self.run = run

    def context(self, step="wheels", change=0, dry=False):
        state = os.path.join(self.home, "runs", self.run)
        if not dry:
            os.makedirs(state, 0o700, exist_ok=True)
        memory = os.path.join(state, "undo", step, str(change))
        return Context(self.run, step, self.home, None if dry else state, None if dry else memory, dry=dry)

    def answer(self, reads):
        return tuple(self._one(read) for read in reads)

    def _one(self, read):
        module, name = read.function.split(".")
        function = getattr(globals()[module], name)
        assert function.effect == "read"
        return Completed(value=function(self.context(), **read.args))

    def probe(self, action):
        """Drive a probe to its facts."""
        probe = action.probe()
        try:
            reads = next(probe)
            while True:
                reads = probe.send(self.answer(reads))
        except StopIteration as end:
            return end.value

    def plan(self, action):
        return action.plan(self.probe(action))

    def call(self, call, step):
        module, name = call.function.split(".")
        function = getattr(globals()[module], name)
        assert function.effect == "write"
        return function(self.context(step), **call.args)

    def apply(self, action):
        """Make the changes of an action; returns its plan."""
        plan = self.plan(action)
        assert plan.blocked is None, plan.blocked
        for change in plan.changes:
            for call in change.do:
                self.call(call, action.kind)
        return plan

    def undo(self, plan, step):
        for change in reversed(plan.changes):
            for call in change.undo:
                self.call(call, step)

    def commit(self, plan, step):
        for change in plan.changes:
            for call in change.commit:
                self.call(call, step)


__all__ = ["environments", "jobs", "parts", "wheel_parts", "wheels"]
