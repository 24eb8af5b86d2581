"""Whom a file can have come from: what others may write is neither found by itself nor run."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

from fleetfix.errors import InventoryError


def distrust(path: Path, owners: tuple[int, ...] = ()) -> str:
    """Why others may have put there what stands there, or nothing. It may be these `owners`' too."""
    try:
        status = path.stat()
    except OSError as error:
        return os.strerror(error.errno or 0).lower()
    if status.st_uid not in (0, os.geteuid(), *owners):
        return f"it belongs to {_user_name(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _group_of_one(status)):
        return "others may write to it"
    return ""


def require_trust_to_run(path: Path, shown: str) -> None:
    """Refuse to run a program that another user may have written, or may put in its place."""
    if reason := distrust_of_place(path):
        raise InventoryError(
            f"{shown} is not run: {reason}",
            hint="save what it, or ansible-inventory, prints with --list, and give that",
        )


def distrust_of_place(path: Path, owners: tuple[int, ...] = ()) -> str:
    """Why another user may have written a file, or may put another in its place; or nothing.

    A link counts for what it leads to. Both may belong to these `owners` too.
    """
    real = path.resolve()
    if reason := distrust(real, owners):
        return reason
    if not _sticky(real.parent) and (reason := distrust(real.parent, owners)):
        return f"its folder {real.parent}: {reason}"
    return ""


def open_to_all(path: Path) -> str:
    """Why anybody at all may have written a file or folder, or may put another in its place; or nothing."""
    real = path.resolve()
    for one in (real, real.parent):
        with contextlib.suppress(OSError):
            if one.stat().st_mode & stat.S_IWOTH and not (one != real and _sticky(one)):
                return "everybody may write to it" if one == real else f"everybody may write to {one}"
    return ""


def who_called_sudo() -> tuple[int, ...]:
    """The user who became root by sudo, where one did."""
    called = os.environ.get("SUDO_UID", "")
    return (int(called),) if os.geteuid() == 0 and called.isdecimal() else ()


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
