"""The contract on the local wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetfix.inventory import Host
from tests.contract.place import Place
from tests.contract.session_contract import HostContract


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
