"""The disk of a lab host: its folders, its /etc, and the mounts that its first process makes."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

FOLDERS = {
    "tmp": 0o1777,
    "root": 0o700,
    "home": 0o755,
    "opt": 0o755,
    "run": 0o755,
    "var": 0o755,
    "etc": 0o755,
    "sbin": 0o755,
    "dev": 0o755,
}
BELOW = (
    "var/log/train", "var/cache", "var/tmp", "var/spool", "var/lib",
    "etc/fleetfix",
)  # fmt: skip

# What a host shares with the machine's /etc: enough for shells, the loader, names and TLS. Nothing
# secret (no shadow, no ssh, no sudoers of the machine).
ETC = (
    "bash.bashrc", "ca-certificates.conf", "csh.cshrc", "csh.login", "debian_version", "environment",
    "host.conf", "inputrc", "ld.so.cache", "ld.so.conf", "locale.alias", "localtime", "login.defs",
    "magic", "networks", "nsswitch.conf", "os-release", "pip.conf", "profile", "protocols",
    "resolv.conf", "services", "shells", "ssl/certs/ca-certificates.crt", "timezone", "uv",
)  # fmt: skip
# Folders of it that hosts see as they are, read-only: some hold hundreds of links.
ETC_KEPT = ("/etc/alternatives", "/etc/fish", "/etc/ld.so.conf.d", "/etc/profile.d", "/etc/terminfo")

# A small file system of its own for the state of programs: the place that a full disk fills.
STATE_SIZE = "96m"
LARGEST = 1 << 20

Passwd = tuple[str, int, str]
"""name, uid, home"""


@dataclass(frozen=True)
class Boot:
    """The command that starts with the host."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    log: str
    nofile: int = 65536


def as_json(boot: Boot) -> dict[str, Any]:
    """A command as the host's first process reads it."""
    return {**vars(boot), "argv": list(boot.argv), "env": dict(boot.env)}


def make_etc(target: Path) -> None:
    """Copy what hosts share of the machine's /etc; what cannot be read is left out."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ETC:
        _copy(Path("/etc") / name, target / name)
    for path in _kept():
        (target / os.path.basename(path)).mkdir()


def _kept() -> tuple[str, ...]:
    return tuple(path for path in ETC_KEPT if os.path.isdir(path) and not os.path.islink(path))


def _copy(source: Path, target: Path) -> None:
    try:
        if source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.readlink(source))
        elif source.is_dir():
            for child in sorted(source.iterdir()):
                _copy(child, target / child.name)
        elif source.is_file() and source.stat().st_size <= LARGEST:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    except PermissionError:
        return


def make_folders(
    disk: Path,
    etc: Path,
    name: str,
    users: Sequence[Passwd],
    peers: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Make the folders of a host's disk, with an /etc of its own.

    `peers` are the addresses of the hosts that it knows by name, itself included.
    """
    for folder, mode in FOLDERS.items():
        (disk / folder).mkdir(parents=True)
        (disk / folder).chmod(mode)
    for folder in BELOW:
        (disk / folder).mkdir(parents=True, exist_ok=True)
    (disk / "var/tmp").chmod(0o1777)
    (disk / "var/run").symlink_to("/run")
    (disk / "var/lock").symlink_to("/run/lock")
    shutil.copytree(etc, disk / "etc", symlinks=True, dirs_exist_ok=True)
    for _, uid, home in users:
        (disk / home.lstrip("/")).mkdir(parents=True)
        os.chown(disk / home.lstrip("/"), uid, uid)
    _write_identity(disk / "etc", name, users, peers)
    (disk / "root/.bashrc").write_text("# A host of the fleetfix lab.\nPS1='\\u@\\h:\\w# '\n")
    new_boot(disk)


def _write_identity(etc: Path, name: str, users: Sequence[Passwd], peers: Mapping[str, str]) -> None:
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    rows = [f"root:x:0:0:root:/root:{shell}", "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"]
    rows += [f"{user}:x:{uid}:{uid}:{user}:{home}:{shell}" for user, uid, home in users]
    known = {name: "127.0.1.1", **peers}
    groups = ["root:x:0:", "tty:x:5:", "nogroup:x:65534:", *(f"{user}:x:{uid}:" for user, uid, _ in users)]
    files = {
        "hostname": f"{name}\n",
        "hosts": "127.0.0.1 localhost\n" + "".join(f"{at} {one}\n" for one, at in known.items()),
        "machine-id": f"{uuid.uuid4().hex}\n",
        "passwd": "\n".join(rows) + "\n",
        "group": "\n".join(groups) + "\n",
    }
    for path, text in files.items():
        (etc / path).unlink(missing_ok=True)
        (etc / path).write_text(text)


def new_boot(disk: Path) -> None:
    """Give the next start of this host a boot id of its own, and an empty /run."""
    shutil.rmtree(disk / "run")
    for folder in ("run/lock", "run/lab/faults"):
        (disk / folder).mkdir(parents=True)
    (disk / "run/lock").chmod(0o1777)
    (disk / "run/lab/boot_id").write_text(f"{uuid.uuid4()}\n")


def share(path: str, disks: Sequence[Path], folder: Path) -> None:
    """Make `folder` what lies at `path` on the first disk, and leave a mount point on each."""
    places = [disk / path.lstrip("/") for disk in disks]
    folder.parent.mkdir(parents=True, exist_ok=True)
    if places[0].exists():
        os.rename(places[0], folder)
    folder.mkdir(exist_ok=True)
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)


def keep_state(disk: Path, init: int) -> None:
    """Before a host goes down, keep a copy of its /var/lib, which lives in memory."""
    # Not at its place: to remove a mount point here would unmount it in the host.
    shutil.rmtree(disk / "var/lib.kept", ignore_errors=True)
    shutil.copytree(f"/proc/{init}/root/var/lib", disk / "var/lib.kept", symlinks=True)


def give_state(disk: Path) -> None:
    """When a host is down, put the copy where its next start finds it."""
    shutil.rmtree(disk / "var/lib")
    os.rename(disk / "var/lib.kept", disk / "var/lib")


def spec(
    disk: Path,
    name: str,
    *,
    gpus: int,
    keep: Sequence[str],
    boot: Boot | None,
    shared: Mapping[str, Path] = MappingProxyType({}),
) -> dict[str, Any]:
    """What `stand_ins/init.py` is told: the mounts, the devices, and what boots.

    `shared` says, by the path on the host, which folder of this machine lies there.
    """
    sbin = "/usr/local/sbin" if os.path.isdir("/usr/local/sbin") else "/usr/local/bin"
    binds = [
        (f"/{folder}", folder) for folder in ("tmp", "root", "home", "opt", "run", "var", "etc", "dev")
    ]
    return {
        "hostname": name,
        "root": str(disk),
        "keep": [*_kept(), *keep],
        "binds": [*binds, (sbin, "sbin")],
        "tmpfs": [("/var/lib", "var/lib", STATE_SIZE)],
        "shared": [(target, str(source)) for target, source in shared.items()],
        "gpus": ["nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(gpus))],
        "boot": None if boot is None else as_json(boot),
    }


def write_spec(path: Path, value: Mapping[str, Any]) -> None:
    """Keep the spec beside the disk, where the host itself cannot reach it."""
    path.write_text(json.dumps(value))
