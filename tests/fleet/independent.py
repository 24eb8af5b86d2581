"""Bears witness about a host without any of fleetfix's code: /proc, hashlib and csv only.

`pid` is, on this machine, the first process of the host whose files and processes are looked at.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

VENV = "/opt/train/venv"


def root(pid: int) -> Path:
    return Path(f"/proc/{pid}/root")


def site_packages(pid: int, venv: str = VENV) -> Path:
    (found,) = (root(pid) / venv.lstrip("/")).glob("lib/python3*/site-packages")
    return found


def damaged(pid: int, venv: str = VENV) -> list[str]:
    """Every file that a RECORD names and that is missing or has other bytes."""
    site = site_packages(pid, venv)
    wrong = []
    for record in sorted(site.glob("*.dist-info/RECORD")):
        with record.open(newline="") as file:
            for path, sha, _ in csv.reader(file):
                if sha and not _holds(site / path, sha):
                    wrong.append(f"{record.parent.name}: {path}")
    for folder in site.glob("*.dist-info"):
        if not (folder / "RECORD").exists():
            wrong.append(f"{folder.name}: no RECORD")
    return wrong


def _holds(path: Path, sha: str) -> bool:
    try:
        digest = hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return False
    return sha == "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def distributions(pid: int, venv: str = VENV) -> dict[str, str]:
    """Name -> version of everything installed, as the dist-info folders say."""
    found = {}
    for folder in site_packages(pid, venv).glob("*.dist-info"):
        text = (folder / "METADATA").read_text()
        name = re.search(r"^Name: (.*)$", text, re.M)
        version = re.search(r"^Version: (.*)$", text, re.M)
        assert name is not None
        assert version is not None
        found[name[1].lower().replace("_", "-")] = version[1]
    return found


def required(pid: int, venv: str = VENV) -> set[str]:
    """Every name that some installed distribution requires."""
    names = set()
    for metadata in site_packages(pid, venv).glob("*.dist-info/METADATA"):
        for found in re.findall(r"^Requires-Dist: ([A-Za-z0-9._-]+)", metadata.read_text(), re.M):
            names.add(found.lower().replace("_", "-"))
    return names


def torch_imports(pid: int, venv: str = VENV) -> str:
    """What a fresh interpreter of the environment says; ends with `ok 12.8` where torch loads."""
    code = "import torch; print('ok', torch.version.cuda)"
    argv = ["nsenter", f"--target={pid}", "--mount", "--pid"]
    if os.geteuid() != 0:
        argv += ["--user", "--preserve-credentials"]
    argv += ["--", f"{venv}/bin/python", "-I", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr).strip()


@dataclass(frozen=True)
class Job:
    """A training job's launcher as the kernel shows it. Pids are this machine's."""

    pid: int
    start: int
    argv: tuple[str, ...]
    cwd: str
    environ: tuple[str, ...]
    limits: str
    umask: str


def jobs(pid: int, venv: str = VENV) -> list[Job]:
    """Every launcher of a training job in the pid namespace of the host."""
    namespace = os.readlink(f"/proc/{pid}/ns/pid")
    found = {
        int(one.name): _parent(one)
        for one in Path("/proc").iterdir()
        if one.name.isdigit() and _is_launcher(one, namespace, venv)
    }
    # A worker looks like its launcher until it has become what it was forked for.
    seen = (_job(pid) for pid, parent in found.items() if parent not in found)
    return [job for job in seen if job is not None]


def _parent(one: Path) -> int:
    try:
        return int((one / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _is_launcher(one: Path, namespace: str, venv: str) -> bool:
    try:
        argv = (one / "cmdline").read_bytes().split(b"\0")
        return f"{venv}/bin/torchrun".encode() in argv and os.readlink(one / "ns/pid") == namespace
    except OSError:
        return False


def _job(pid: int) -> Job | None:
    """A job; None where it ended while it was looked at."""
    try:
        return _read_job(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None


def _read_job(pid: int) -> Job:
    here = Path(f"/proc/{pid}")
    umask = re.search(r"^Umask:\s*(\d+)", (here / "status").read_text(), re.M)
    return Job(
        pid=pid,
        start=int((here / "stat").read_text().rpartition(")")[2].split()[19]),
        argv=tuple((here / "cmdline").read_bytes().decode().rstrip("\0").split("\0")),
        cwd=os.readlink(here / "cwd").replace(os.readlink(here / "root").rstrip("/"), "", 1),
        environ=tuple(sorted((here / "environ").read_bytes().decode().rstrip("\0").split("\0"))),
        limits=(here / "limits").read_text(),
        umask=umask[1] if umask else "",
    )


def first_steps(pid: int, log: str = "/var/log/train/train.log") -> list[int]:
    """The steps of the log, in order; a job from scratch shows as a fall to 1."""
    text = (root(pid) / log.lstrip("/")).read_bytes()
    return [int(found) for found in re.findall(rb"step:\s*(\d+) ", text)]
