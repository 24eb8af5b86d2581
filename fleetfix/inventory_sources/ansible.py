"""Ansible's inventories: programs, saved answers, and INI and YAML by Ansible's own `ansible-inventory`.

INI files, group_vars, host_vars and plugins have rules that only Ansible knows whole; so it is asked.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleetfix.commands import Json
from fleetfix.errors import InventoryError
from fleetfix.inventory_sources import program
from fleetfix.inventory_sources.ansible_json import Listed, declared, looks_like, parse
from fleetfix.inventory_sources.declared import Declared
from fleetfix.inventory_sources.trust import require_trust_to_run

TOOL = "ansible-inventory"
MOST_CALLS = 1000
"""Hosts that a program without `_meta` is asked about, one call each."""
_AT_ONCE = 8
_DATA = frozenset({".yaml", ".yml", ".json", ".ini", ".cfg", ".toml", ".txt", ".md"})
_SECTION = re.compile(r"^\[[A-Za-z0-9_.:-]+\]\s*(?:[#;].*)?$", re.MULTILINE)
_INI_HOST = re.compile(r"^[\w.\[\]:-]+[ \t].*\bansible_\w+\s*=", re.MULTILINE)


def is_program(path: Path) -> bool:
    """Whether a file is meant to be run: executable, and its beginning is that of a program."""
    try:
        if path.suffix in _DATA or not path.is_file() or not path.stat().st_mode & 0o111:
            return False
        with path.open("rb") as file:
            return file.read(4).startswith((b"#!", b"\x7fELF"))
    except OSError:
        return False  # whoever reads it says why it cannot be read


def is_folder(path: Path) -> bool:
    """Whether a folder is laid out as Ansible has it."""
    return any(os.path.isdir(path / name) for name in ("group_vars", "host_vars"))


def is_answer(text: str) -> bool:
    """Whether a text is an answer to `--list` that was saved."""
    return looks_like(text)


def is_ini(text: str) -> bool:
    """Whether a text is an INI inventory: it has sections, or hosts with Ansible's variables."""
    return bool(_SECTION.search(text) or _INI_HOST.search(text))


def is_yaml(value: Any, ours: frozenset[str]) -> bool:
    """Whether what a YAML file holds is laid out as Ansible has it; `ours` are the keys of our files."""
    if not isinstance(value, dict) or not value or ours & set(value):
        return False
    if {"all", "plugin"} & set(value):
        return True
    return all(
        isinstance(one, dict) and one and set(one) <= {"hosts", "children", "vars"}
        for one in value.values()
    )


def from_program(path: Path, shown: str, deadline: float) -> Declared:
    """Ask an inventory program, `--list` once and, where it is an old one, `--host` for each host."""
    require_trust_to_run(path, shown)
    end = time.monotonic() + deadline
    text, _ = program.answer([str(path), "--list"], shown=f"{shown} --list", deadline=deadline)
    listed = parse(text, f"what {shown} --list prints")
    if listed.hostvars is not None:
        return declared(listed, "a program")
    return declared(
        replace(listed, hostvars=_each(path, shown, listed, end)), "a program, called for each host"
    )


def _each(path: Path, shown: str, listed: Listed, end: float) -> Mapping[str, Mapping[str, Json]]:
    hosts = listed.hosts()
    if len(hosts) > MOST_CALLS:
        raise InventoryError(
            f"{shown} would have to be called for each of {len(hosts)} hosts",
            hint="have its --list print _meta with hostvars",
        )

    over = threading.Event()

    def ask(host: str) -> tuple[str, Mapping[str, Json]]:
        name = f"{shown} --host {host}"
        left = max(end - time.monotonic(), 0.1)
        text, _ = program.answer(
            [str(path), "--host", host], shown=name, deadline=left, given_up=over.is_set
        )
        # An empty answer says nothing of the host; many old programs give it.
        found = parse(
            f'{{"_meta": {{"hostvars": {{"host": {text.strip() or "{}"}}}}}}}', f"what {name} prints"
        )
        return host, (found.hostvars or {})["host"]

    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        return dict(pool.map(ask, hosts))
    finally:
        # Where one did not answer, or the operator interrupts, the others are not waited for.
        over.set()
        pool.shutdown(cancel_futures=True)


def from_text(text: str, shown: str) -> Declared:
    """Read a saved answer of `--list`."""
    return declared(parse(text, shown), "saved by ansible-inventory --list")


def through_tool(path: Path, shown: str, deadline: float) -> Declared:
    """Have Ansible itself read a file or folder of its own."""
    tool = program.found(TOOL)
    if tool is None:
        raise InventoryError(
            f"{shown} is an inventory of Ansible, and {TOOL} is not on the PATH",
            hint=f"where Ansible is: {TOOL} -i {shown} --list > hosts.json; then -i hosts.json",
        )
    for each in (path, *(path.iterdir() if path.is_dir() else ())):
        # Ansible runs what is executable in its inventories.
        if each.is_dir() or each.stat().st_mode & 0o111:
            require_trust_to_run(each, shown if each == path else f"{shown}/{each.name}")
    settings = {
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_DEPRECATION_WARNINGS": "0",
        "ANSIBLE_INVENTORY_UNPARSED_FAILED": "1",
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",
    }
    argv = [tool, "-i", str(path), "--list"]
    text, said = program.answer(
        argv,
        shown=f"{TOOL} -i {shown}",
        env=settings,
        deadline=deadline,
        telling="failed to parse inventory: ",  # its last line says only that it failed
    )
    found = declared(parse(text, f"what {TOOL} prints"), f"read by {TOOL}")
    for warning in re.findall(r"^\[WARNING\]:\s*(.+)$", said, re.MULTILINE):
        found.remark(f"{TOOL} warns", warning.strip())
    return found
