"""`~/.config/fleetfix/config.toml`: the operator's own settings."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from fleetfix.commands import Value
from fleetfix.errors import DocumentError
from fleetfix.folders import config_folder
from fleetfix.inventory_sources.trust import distrust_of_place
from fleetfix.spelling import hint_for


class Config(Value):
    """What the file may say."""

    state_dir: Path | None = None
    """Where the journal is kept."""
    become_password: str | None = Field(default=None, pattern=r"^(prompt|(env|file|cmd|keyring):.+)$")
    """Where the password for sudo comes from: a source as for --secret."""
    confirm_above: int = Field(default=50, ge=0)
    """Above this many hosts their number must be typed, or given by --yes-hosts."""
    evidence_days: int = Field(default=90, ge=0)
    """Days that evidence of finished runs is kept; 0 keeps it for ever."""


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    return config_folder(environ) / "config.toml"


def load(environ: Mapping[str, str] = os.environ) -> Config:
    """Read the file; defaults where there is none. DocumentError says all that is wrong with it."""
    path = config_path(environ)
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return Config()
    except OSError as error:
        raise DocumentError((f"{path}: {os.strerror(error.errno or 0).lower()}",)) from error
    except ValueError as error:
        raise DocumentError((f"{path}: {error}",)) from error
    if why := distrust_of_place(path):
        raise DocumentError((f"{path}: {why}",), hint="it names programs and folders: make it yours alone")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise DocumentError(tuple(f"{path}: {_complaint(one)}" for one in error.errors())) from error


def _complaint(error: Mapping[str, object]) -> str:
    place = error["loc"]
    key = str(place[0]) if isinstance(place, tuple) and place else ""
    if error["type"] == "extra_forbidden":
        hint = hint_for(key, Config.model_fields)
        return f"unknown key {key}" + (f": {hint}" if hint else "")
    return f"{key}: {error['msg']}"
