"""Where evidence of hosts is kept on the controller: `evidence/RUN/HOST/STEP/` in the state folder.

Folders 0700, files 0600, durable when `keep` returns. Nothing that is there is ever written over, and
what is old goes by `sweep`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote


def keep(folder: Path, run: str, host: str, step: str, files: Mapping[str, bytes]) -> Path:
    """Keep the files of a host, by name, and say in which folder. Raises OSError."""
    above = folder / "evidence" / _name(run) / _name(host)
    above.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = _fresh(above, _name(step))
    for name, content in files.items():
        descriptor = os.open(place / _name(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
    for each in (place, above, above.parent, above.parent.parent):
        _sync(each)
    return place


def sweep(folder: Path, before: float, is_needed: Callable[[str], bool]) -> list[str]:
    """Delete the evidence of each run that was kept before then (seconds since the epoch) and is not
    needed; says of which runs. What cannot be deleted stays for the next time."""
    gone = []
    place = folder / "evidence"
    for each in sorted(place.iterdir()) if place.is_dir() else ():
        if each.is_symlink() or not each.is_dir() or each.lstat().st_mtime >= before:
            continue
        if not is_needed(each.name) and _newest(each) < before:
            shutil.rmtree(each, ignore_errors=True)
            gone.append(each.name)
    return gone


def _newest(folder: Path) -> float:
    times = [folder.lstat().st_mtime]
    for path in folder.rglob("*"):
        with suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(times)


def _fresh(above: Path, name: str) -> Path:
    number = 1
    while True:
        place = above / (name if number == 1 else f"{name}-{number}")
        try:
            place.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return place


def _name(text: str) -> str:
    """A text as one name of a folder or file, whatever is in it."""
    quoted = quote(text, safe=":@ ")
    return quoted if quoted.strip(".") else quoted.replace(".", "%2E") or "%00"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
