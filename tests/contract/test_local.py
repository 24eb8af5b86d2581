"""The contract on the local wire."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetfix.inventory import Host
from fleetfix.transports import local
from tests.contract.command_contract import CommandContract
from tests.contract.place import Place
from tests.contract.secret_contract import SecretContract
from tests.contract.session_contract import HostContract, SessionPromises

OLDEST = ("/usr/bin/python3.8", "/root/.pyenv/versions/3.8.18/bin/python3")


def disable(root: Path, text: str) -> None:
    """Set the kill switch below this root."""
    path = root / "etc/fleetfix/DISABLED"
    path.parent.mkdir(parents=True)
    path.write_text(text + "\n")


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    here = Place(Host(name="here", address="localhost", transport="local"), tmp_path)
    here.disable = lambda text: disable(here.root, text)
    yield here
    await here.close()


class TestLocal(HostContract):
    """Every promise, over a process on this machine."""


class TestLocalCommands(CommandContract):
    """What a command of the operator's is promised, on this machine."""


class TestLocalSecrets(SecretContract):
    """What is promised of secrets, on this machine."""


class TestLocalWithTheOldestPython(CommandContract, SessionPromises):
    """What every session promises, by a runner on Python 3.8."""

    @pytest.fixture
    async def place(self, tmp_path: Path) -> AsyncIterator[Place]:
        found = [path for path in OLDEST if os.access(path, os.X_OK)]
        if not found:
            pytest.skip("no Python 3.8 here")
        here = Place(Host(name="here", address="localhost", transport="local", python=found[0]), tmp_path)
        here.disable = lambda text: disable(here.root, text)
        yield here
        await here.close()


class Deaf:
    """Hears nothing."""

    def data(self, data: bytes) -> None: ...
    def errors(self, data: bytes) -> None: ...
    def ended(self, how: str) -> None: ...


async def test_a_start_that_is_cut_short_leaves_no_pipe_open() -> None:
    before = os.listdir("/proc/self/fd")
    for turns in range(1, 50):
        starting = asyncio.ensure_future(local.connect("exec cat", Deaf()))
        for _ in range(turns):
            await asyncio.sleep(0)
        if starting.done():
            await starting.result().close()
            break
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        assert len(os.listdir("/proc/self/fd")) <= len(before), turns
    assert turns > 2
