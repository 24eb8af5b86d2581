"""The look at a host, on the host: what it asks, what it leaves alone, and that it gives way to others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetfix.remote import facts, mounts
from fleetfix.remote.api import Ran

ROOT = Path(__file__).parents[2]

CALL = """
import ctypes, json, os, sys
sys.path.insert(0, sys.argv[1])
from fleetfix.remote import audits, facts
from fleetfix.remote.api import Context
context = Context("r1", "s", "/nonexistent", None, None, dry=True)
answer = facts.survey(context) if sys.argv[2] == "facts" else audits.environment(context, "/nonexistent")
number = {"x86_64": 252, "aarch64": 31}.get(os.uname().machine)
idle = ctypes.CDLL(None).syscall(number, 1, 0) >> 13 if number else 3
print(json.dumps([os.nice(0), idle, answer]))
"""


@pytest.mark.parametrize("what", ["facts", "audit"])
def test_a_look_gives_way_to_everybody_else(what: str) -> None:
    done = subprocess.run([sys.executable, "-c", CALL, str(ROOT), what], capture_output=True, check=True)
    nice, class_of_disk, answer = json.loads(done.stdout)
    assert (nice, class_of_disk) == (19, 3)
    if what == "facts":
        assert answer["kernel"] == os.uname().release
        assert answer["disks"]["asked"][0][0] == "/"
        assert answer["clock"][0] <= answer["clock"][1]


def test_a_file_system_of_the_network_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [("/", "ext4"), ("/home", "nfs4"), ("/var", "ext4"), ("/proc", "proc"), ("/data", "fuse.s3fs")]
    asked: list[str] = []
    real = os.statvfs

    def statvfs(path: str) -> Any:
        asked.append(path)
        return real("/")

    monkeypatch.setattr(mounts, "table", lambda: table)
    monkeypatch.setattr(os, "statvfs", statvfs)
    found = facts._disks()
    assert not {"/home", "/data", "/proc"} & set(asked)
    assert "/home" in found["others"]
    assert "/data" in found["others"]
    assert "/proc" not in found["others"]
    # Folders of one file system are told once.
    devices = [os.stat(row[0]).st_dev for row in found["asked"]]
    assert len(devices) == len(set(devices))


class Smi:
    """A context whose nvidia-smi is a table of answers; None is one that does not answer in time."""

    def __init__(self, **answers: str | None) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def command(self, argv: list[str], timeout: float, limit: int) -> Ran:
        option = (argv[1:] or ["table"])[0].removeprefix("--").partition("=")[0]
        self.asked.append(" ".join(argv[1:]))
        text = self.answers.get(option.replace("-", "_"), "")
        return Ran(None if text is None else 0, (text or "").encode(), b"", False)


def test_only_fields_that_this_nvidia_smi_knows_are_asked_for() -> None:
    smi = Smi(help_query_gpu='"ecc.mode.current"\n text\n"temperature.gpu" or "temp"\n"unheard_of"\n')
    facts._gpus(smi)
    (query,) = [one for one in smi.asked if one.startswith("--query-gpu=")]
    fields = query.partition("=")[2].partition(" ")[0].split(",")
    assert fields == [*facts.FIELDS, "ecc.mode.current", "temperature.gpu"]


def test_an_nvidia_smi_that_hangs_is_asked_once() -> None:
    smi = Smi(help_query_gpu=None)
    found = facts._gpus(smi)
    assert smi.asked == ["--help-query-gpu"]
    assert found["query"]["exit"] is None
    later = Smi(help_query_gpu='"x"', query_gpu=None)
    facts._gpus(later)
    assert len(later.asked) == 2
