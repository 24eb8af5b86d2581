"""How a script is run that lies nowhere: by its first line, on hosts of every kind."""

from __future__ import annotations

import base64
import os
import subprocess
from typing import Any

import pytest

from fleetfix.remote import streaming


def start(script: bytes, *words: str) -> str:
    """Run a script as the host would; what it prints."""
    argv, kept = streaming._argv({"argv": list(words), "script": base64.b64encode(script).decode()})
    try:
        done = subprocess.run(argv, pass_fds=kept, capture_output=True, text=True, check=True)
    finally:
        for fd in kept:
            os.close(fd)
    return done.stdout


def refuse(*args: Any) -> int:
    raise OSError(38, "Function not implemented")


def seals_unknown(name: str, flags: int) -> int:
    return refuse() if flags else os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)


@pytest.mark.parametrize("memfd", [None, seals_unknown, refuse])
def test_a_script_runs_whatever_the_kernel_knows(memfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if memfd is not None:
        monkeypatch.setattr(os, "memfd_create", memfd)
    assert start(b"echo $1-$#", "a", "b c") == "a-2\n"
    assert start(b"#!/usr/bin/env -S sh -e\nfalse || echo $-") == "e\n"
    assert start(b"#!  /bin/cat\nbody\n") == "#!  /bin/cat\nbody\n"


def test_a_program_runs_too() -> None:
    with open("/bin/echo", "rb") as file:
        assert start(file.read(), "hello") == "hello\n"


def test_a_command_without_a_script_is_its_words() -> None:
    assert streaming._argv({"argv": ["ls", "-l"], "script": None}) == (["ls", "-l"], ())
