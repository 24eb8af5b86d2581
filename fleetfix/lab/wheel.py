"""A stand-in wheel: its files, its metadata with a true RECORD, installed or packed as `.whl`."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Installer = Literal["uv", "pip"]


@dataclass(frozen=True)
class Wheel:
    """One distribution. Paths of `files` are relative to site-packages; `requested` says that a
    person named it, so that its dist-info holds REQUESTED."""

    name: str
    version: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    scripts: Mapping[str, str] = field(default_factory=dict)
    requested: bool = False
    platform: str = "any"

    @property
    def stem(self) -> str:
        """`nvidia_nccl_cu12-2.27.5`: how its dist-info and its wheel file begin."""
        return f"{re.sub(r'[-_.]+', '_', self.name)}-{self.version}"

    @property
    def dist_info(self) -> str:
        """The folder of its metadata in site-packages."""
        return f"{self.stem}.dist-info"

    @property
    def file_name(self) -> str:
        """The name of its wheel file."""
        return f"{self.stem}-py3-none-{self.platform}.whl"

    def metadata(self) -> dict[str, bytes]:
        """The dist-info files that come out of the wheel, without RECORD."""
        lines = ["Metadata-Version: 2.1", f"Name: {self.name}", f"Version: {self.version}"]
        lines += ["Summary: stand-in of the fleetfix lab"]
        lines += [f"Requires-Dist: {one}" for one in self.requires]
        wheel = ["Wheel-Version: 1.0", "Generator: fleetfix-lab", "Root-Is-Purelib: true"]
        wheel += [f"Tag: py3-none-{self.platform}"]
        files = {"METADATA": _text(lines), "WHEEL": _text(wheel)}
        if self.scripts:
            entries = ["[console_scripts]", *(f"{name} = {to}" for name, to in self.scripts.items())]
            files["entry_points.txt"] = _text(entries)
        return {f"{self.dist_info}/{name}": data for name, data in files.items()}

    def archive(self) -> bytes:
        """The `.whl` file. Equal wheels give equal bytes."""
        files = {**self.files, **self.metadata()}
        files[f"{self.dist_info}/RECORD"] = _record(files, f"{self.dist_info}/RECORD")
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bundle:
            for path, data in files.items():
                bundle.writestr(zipfile.ZipInfo(path, (2025, 11, 12, 0, 0, 0)), data)
        return target.getvalue()

    def installed(self, installer: Installer, python: str) -> dict[str, bytes]:
        """All that the installer leaves in site-packages, RECORD last; scripts as `../../../bin/x`.

        `python` is the interpreter of the environment, for the first line of scripts.
        """
        files = {**self.files, **self.metadata()}
        for name, target in self.scripts.items():
            files[f"../../../bin/{name}"] = _script(python, target)
        files[f"{self.dist_info}/INSTALLER"] = b"uv" if installer == "uv" else b"pip\n"
        if self.requested:
            files[f"{self.dist_info}/REQUESTED"] = b""
        record = f"{self.dist_info}/RECORD"
        # uv writes RECORD sorted; pip in the order of the wheel, its own files at the end.
        order = sorted(files) if installer == "uv" else list(files)
        files[record] = _record({path: files[path] for path in order}, record)
        return files


def hash_of(data: bytes) -> str:
    """A file's hash as RECORD writes it: `sha256=` and unpadded URL-safe base64."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


def _record(files: Mapping[str, bytes], own: str) -> bytes:
    rows = [f"{path},{hash_of(data)},{len(data)}" for path, data in files.items()]
    return _text([*rows, f"{own},,"])


def _script(python: str, target: str) -> bytes:
    module, _, function = target.partition(":")
    lines = [f"#!{python}", "import sys", f"from {module} import {function}", f"sys.exit({function}())"]
    return _text(lines)


def _text(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()
