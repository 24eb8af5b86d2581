"""Where playbooks are kept: those that fleetfix ships, those of the user, or any file by its path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fleetfix.errors import PlaybookError
from fleetfix.folders import config_folder, expanded
from fleetfix.spelling import hint_for, hint_for_file

_SUFFIXES = (".yaml", ".yml")


def find(name_or_path: str, *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Path:
    """The file of a playbook. With a `/` or a suffix it is a path, else a name; PlaybookError if none.

    A name that exists twice is an error: what runs must not depend on the order of folders.
    """
    if "/" in name_or_path or name_or_path.endswith(_SUFFIXES):
        path = (cwd or Path.cwd()) / expanded(name_or_path)
        if not _exists(path):
            beside = [one.name for one in _in(path.parent)]
            hint = hint_for_file(path.name, beside) or f"looked for in {path.parent}"
            raise PlaybookError(f"there is no file {name_or_path}", hint=hint)
        return path
    known = available(env)
    places = known.get(name_or_path, ())
    if len(places) > 1:
        both = " and ".join(str(place) for place in places)
        raise PlaybookError(
            f"two playbooks are named {name_or_path}: {both}", hint="rename one, or give a path"
        )
    if not places:
        hint = hint_for(name_or_path, known) or "fleetfix playbooks lists them; a file needs its path"
        raise PlaybookError(f"there is no playbook {name_or_path!r}", hint=hint)
    return places[0]


def available(env: Mapping[str, str] | None = None) -> dict[str, tuple[Path, ...]]:
    """Every playbook that has a name, with the places it is found at."""
    found: dict[str, tuple[Path, ...]] = {}
    for folder in (shipped(), configured(env)):
        for path in _in(folder):
            if path.suffix in _SUFFIXES and not path.name.startswith("."):
                found[path.stem] = (*found.get(path.stem, ()), path)
    return dict(sorted(found.items()))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        raise PlaybookError(f"{path}: permission denied") from None
    except (OSError, ValueError):  # a name that no file can have
        return False


def _in(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise PlaybookError(f"{folder}: {os.strerror(error.errno or 0).lower()}") from error


def shipped() -> Path:
    """The folder of the shipped playbooks: inside the package, or beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "playbooks"
    return inside if inside.is_dir() else package.parent / "playbooks"


def configured(env: Mapping[str, str] | None = None) -> Path:
    """The user's own folder, `~/.config/fleetfix/playbooks`."""
    return config_folder(os.environ if env is None else env) / "playbooks"
