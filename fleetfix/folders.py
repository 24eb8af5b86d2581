"""The user's own folders, as the XDG base directory specification names them.

A relative path in the environment is ignored, as that specification wants it: what is found must not
depend on where a command is given.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

STATE_VARIABLE = "FLEETFIX_STATE_DIR"


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's home: `$HOME`, or what the system has on record."""
    given = environ.get("HOME", "")
    if os.path.isabs(given):
        return Path(given)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("/")


def expanded(path: str | Path) -> Path:
    """Where `~` and `~user` lead, as in a shell: that of a user who is not there stays as it is."""
    return Path(os.path.expanduser(path))


def config_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the configuration, the inventory and the playbooks of the user are."""
    return _base("XDG_CONFIG_HOME", ".config", environ) / "fleetfix"


def state_folder(environ: Mapping[str, str] = os.environ, configured: Path | None = None) -> Path:
    """Where the journal and the lab are: `$FLEETFIX_STATE_DIR`, what is configured, or the usual place."""
    if given := environ.get(STATE_VARIABLE):
        return expanded(given).absolute()
    if configured is not None:
        return expanded(configured).absolute()
    return _base("XDG_STATE_HOME", ".local/state", environ) / "fleetfix"


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone; OSError where it cannot be.

    `mkdir` gives only the last of them the mode that it is told.
    """
    for one in (*reversed(folder.parents), folder):
        if not one.exists():
            one.mkdir(mode=0o700, exist_ok=True)


def _base(variable: str, below_home: str, environ: Mapping[str, str]) -> Path:
    given = environ.get(variable, "")
    return Path(given) if os.path.isabs(given) else home(environ) / below_home
