"""The secrets of this process: their values, in memory alone, and what keeps them out of all it says.

A command reads them before anything connects; sessions give them to the hosts; whatever this process writes
down or shows goes through `masked`. Nothing here writes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetfix.redaction import Mask

BECOME = "become"
"""The password for sudo, among the secrets of a command; no playbook may use it."""

BECOME_VARIABLE = "FLEETFIX_BECOME_PASSWORD"

_values: dict[str, str] = {}
_confined: dict[str, frozenset[str]] = {}
_become: str | None = None
_mask: Mask | None = None


def hold(values: Mapping[str, str]) -> None:
    """Hold secrets, by name, for this command and its sessions."""
    _values.update(values)
    _look_for_them()


def confine(names: Mapping[str, frozenset[str]]) -> None:
    """Give each of these hosts only the secrets named for it."""
    _confined.update(names)


def hold_become_password(text: str) -> None:
    """Hold the password for sudo; it goes to a host only where sudo asks for it there."""
    global _become
    _become = text
    _look_for_them()


def take_from_environment() -> None:
    """Hold the password for sudo of the environment, and leave it to no process that begins here."""
    text = os.environ.pop(BECOME_VARIABLE, None)
    if text is not None:
        hold_become_password(text)


def held() -> dict[str, str]:
    """The values that this process has, by name."""
    return dict(_values)


def held_for(host: str) -> dict[str, str]:
    """The values that a session on this host is given, by name."""
    names = _confined.get(host, _values.keys())
    return {name: value for name, value in _values.items() if name in names}


def become_password() -> str | None:
    """The password for sudo, where there is one."""
    take_from_environment()
    return _become


def mask() -> Mask | None:
    """What finds every value that this process holds; None where it holds none."""
    return _mask


def masked(text: str) -> str:
    """A text without any value that this process holds."""
    return text if _mask is None else _mask(text)


def forget() -> None:
    """Hold nothing any more."""
    global _become, _mask
    _values.clear()
    _confined.clear()
    _become = _mask = None


def _look_for_them() -> None:
    global _mask
    from fleetfix.redaction import Mask  # not before there is a secret: --help has none

    values = [*_values.values(), *([_become] if _become is not None else [])]
    _mask = Mask(values)
