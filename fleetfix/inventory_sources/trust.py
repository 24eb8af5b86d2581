"""Whom a file can have come from: what others may write is neither found by itself nor run."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from fleetfix.errors import InventoryError


def distrust(path: Path) -> str:
    """Why others may have put there what stands there, or nothing."""
    try:
        status = path.stat()
    except OSError as error:
        return os.strerror(error.errno or 0).lower()
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to {_user_name(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _group_of_one(status)):
        return "others may write to it"
    return ""


def require_trust_to_run(path: Path, shown: str) -> None:
    """Refuse to run a program that another user may have written, or may put in its place."""
    real = path.resolve()
    where, reason = shown, distrust(real)
    if not reason and not _sticky(real.parent):
        where, reason = str(real.parent), distrust(real.parent)
    if reason:
        raise InventoryError(
            f"{shown} is not run: {'' if where == shown else f'its folder {where}: '}{reason}",
            hint="save what it, or ansible-inventory, prints with --list, and give that",
        )


def _sticky(folder: Path) -> bool:
    """Whether only the owner of a file may replace it here, as in /tmp."""
    try:
        status = folder.stat()
    except OSError:
        return False
    return bool(status.st_mode & stat.S_ISVTX) and status.st_uid in (0, os.geteuid())


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _group_of_one(status: os.stat_result) -> bool:
    """Whether the file's group is the private group of its owner, as most systems give each user."""
    try:
        group, owner = grp.getgrgid(status.st_gid), pwd.getpwuid(status.st_uid)
    except KeyError:
        return False
    return (
        status.st_gid == owner.pw_gid
        and group.gr_name == owner.pw_name
        and not set(group.gr_mem) - {owner.pw_name}
    )
