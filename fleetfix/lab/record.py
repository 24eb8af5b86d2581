"""What a lab remembers of itself in its folder: hosts, processes, ports; and where its files lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from fleetfix.commands import Json, Value
from fleetfix.errors import LabError
from fleetfix.lab.namespaces import Started


class ProcessRecord(Value):
    """A process that this lab started, told from any later one by its start time."""

    pid: int
    start: int

    @property
    def process(self) -> Started:
        return Started(self.pid, self.start)


class Span(Value):
    """One training job over several hosts: the first is node 0, where all meet."""

    hosts: tuple[str, ...]
    port: int
    id: str = "llama3-8b"


class HostPlan(Value):
    """One host as `up` lays it out for the server to start."""

    name: str
    address: str
    contaminated: bool


class LabPlan(Value):
    """What the server is told to start."""

    hosts: tuple[HostPlan, ...]
    port: int
    python: str
    installer: Literal["uv", "pip"] = "uv"
    vars: dict[str, Json] = Field(default_factory=dict)
    span: Span | None = None
    shared: tuple[str, ...] = ()
    """Folders that all hosts have in common."""


class HostRecord(HostPlan):
    """One host that is up."""

    init: ProcessRecord


class LabRecord(Value):
    """The lab that is up."""

    version: int = 1
    boot_id: str
    port: int
    python: str
    installer: Literal["uv", "pip"] = "uv"
    server: ProcessRecord
    hosts: tuple[HostRecord, ...]
    span: Span | None = None
    shared: tuple[str, ...] = ()

    def alive(self) -> bool:
        """Whether any of its processes runs."""
        everything = (self.server, *(one.init for one in self.hosts))
        return self.boot_id == boot_id() and any(one.process.alive() for one in everything)

    def host(self, name: str) -> HostRecord:
        """Find a host by name."""
        for one in self.hosts:
            if one.name == name:
                return one
        raise LabError(f"the lab has no host {name}", hint="fleetfix lab status")


class Paths:
    """Where the files of a lab lie below its folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record = root / "lab.json"
        self.inventory = root / "inventory.yaml"
        self.ssh_config = root / "ssh_config"
        self.known_hosts = root / "known_hosts"
        self.client_key = root / "id_ed25519"
        self.init = root / "init.py"
        self.template = root / "template"
        self.control = root / "control.sock"
        self.log = root / "server.log"

    def host(self, name: str) -> Path:
        return self.root / "hosts" / name

    def disk(self, name: str) -> Path:
        return self.host(name) / "disk"

    def spec(self, name: str) -> Path:
        return self.host(name) / "spec.json"

    def shared(self, path: str) -> Path:
        """Where a folder lies that all hosts have in common."""
        return self.root / "shared" / path.lstrip("/")


def boot_id() -> str:
    """This boot of the machine: a record of an earlier one names processes that are long gone."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def load(paths: Paths) -> LabRecord | None:
    """Read the record, or None where no lab is up by this folder."""
    try:
        text = paths.record.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return LabRecord.model_validate_json(text)
    except ValueError as error:
        raise LabError(
            f"{paths.record} is damaged", hint="end the lab's processes by hand, then remove its folder"
        ) from error


def save(paths: Paths, record: LabRecord) -> None:
    """Write the record whole."""
    temporary = paths.record.with_suffix(".tmp")
    temporary.write_text(record.model_dump_json(indent=1) + "\n")
    os.replace(temporary, paths.record)
