"""Where the journal lives: a private folder on a disk of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from fleetfix.cli.config import load
from fleetfix.errors import JournalError
from fleetfix.folders import STATE_VARIABLE, state_folder

MOUNTS = Path("/proc/self/mountinfo")

NETWORK = frozenset(
    {
        *("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "afs", "coda", "ncpfs"),
        *("lustre", "gpfs", "ceph", "beegfs", "panfs", "pvfs2", "wekafs", "glusterfs"),
        *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.juicefs", "fuse.gcsfuse"),
        *(
            "fuse.s3fs",
            "fuse.rclone",
            "fuse.goofys",
            "fuse.moosefs",
            "fuse.mfs",
            "fuse.quobyte",
            "fuse.daos",
        ),
    }
)
"""File systems whose locks and shared memory SQLite cannot trust (sqlite.org/wal.html, section 9)."""


def state_dir(environ: Mapping[str, str] = os.environ, mounts: Path = MOUNTS) -> Path:
    """Say the folder of the journal; JournalError where it lies on a network file system."""
    given = environ.get(STATE_VARIABLE)
    folder = state_folder(environ, None if given else load(environ).state_dir)
    kind = file_system_of(folder, mounts)
    if kind in NETWORK:
        raise JournalError(
            f"the state folder {folder} is on a network file system ({kind}), where a journal is not safe",
            hint=f"set {STATE_VARIABLE}, or state_dir in config.toml, to a folder on a local disk",
        )
    return folder


def file_system_of(folder: Path, mounts: Path = MOUNTS) -> str:
    """The kind of the file system that a folder lies on, or will; empty where nothing tells."""
    place = folder.resolve()
    found = ("", "")
    try:
        for mount, kind in _mounts(mounts.read_text(errors="surrogateescape")):
            inside = place == Path(mount) or Path(mount) in place.parents
            # Of two mounts on one place the later hides the earlier.
            if inside and len(mount) >= len(found[0]):
                found = (mount, kind)
    except OSError:
        return ""
    return found[1]


def _mounts(text: str) -> Iterator[tuple[str, str]]:
    """Mount point and kind, line by line (proc(5), mountinfo)."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) > 4 and after:
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
            yield point, after.split(" ")[0]
