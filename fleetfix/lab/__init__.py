"""The lab: a fleet of GPU hosts made on this machine in a second, to rehearse on.

`Lab` holds everything; the functions here are those of the one lab in the user's state folder that
`fleetfix lab` speaks of, and that the inventory name `lab` means.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fleetfix.commands import Json
from fleetfix.errors import LabError
from fleetfix.folders import STATE_VARIABLE
from fleetfix.hostset import HostSet
from fleetfix.lab.faults import FAULTS
from fleetfix.lab.rehearsal import HostStatus, Lab, default_root

__all__ = [
    "FAULTS",
    "HostStatus",
    "Lab",
    "break_host",
    "default_root",
    "down",
    "heal",
    "inventory_path",
    "ssh_command",
    "status",
    "up",
]


@contextlib.contextmanager
def _spoken() -> Iterator[None]:
    """Turn what the system says of files into one line and what to do about it."""
    try:
        yield
    except OSError as error:
        where = error.filename or default_root()
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise LabError(
            f"the lab cannot be used: {where}: {reason}",
            hint=f"set {STATE_VARIABLE} to a folder of your own",
        ) from error


@_spoken()
def up(
    hosts: HostSet | Iterable[str],
    *,
    contaminated: HostSet | Iterable[str] | None = None,
    port: int = 0,
    **more: Any,
) -> tuple[HostStatus, ...]:
    """Make the hosts and start them, all contaminated unless it is said which; returns how they are."""
    lab = Lab(port=port)
    lab.up(hosts, contaminated=contaminated, **more)
    return lab.status()


@_spoken()
def down() -> HostSet:
    """End every process of the lab and remove its files; says which hosts there were."""
    return Lab().down()


@_spoken()
def status() -> tuple[HostStatus, ...]:
    """How each host of the lab is; a LabError where no lab is up."""
    return Lab().status()


@_spoken()
def break_host(name: str, fault: str, **options: Json) -> str:
    """Make a fault on a host and say what an operator would see of it."""
    return Lab().break_host(name, fault, **options)


@_spoken()
def heal(name: str) -> tuple[str, ...]:
    """Take back every fault of a host, newest first, and name them."""
    return Lab().heal(name)


@_spoken()
def ssh_command(name: str) -> list[str]:
    """The command that logs in to a host of the lab."""
    return Lab().ssh_command(name)


def inventory_path() -> Path:
    """Where the inventory called `lab` lies; it is there only while the lab is up."""
    return Lab().inventory_path
