"""One real sshd for the whole suite, and accounts with each login shell."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract import sshd


@pytest.fixture(scope="session")
def server() -> Iterator[sshd.Server]:
    """An sshd on this machine."""
    reason = sshd.why_not()
    if reason is not None:
        pytest.skip(reason)
    with sshd.folder_for_all() as folder, sshd.server(folder) as running:
        yield running


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every account of this machine may write to."""
    with sshd.folder_for_all(0o777) as folder:
        yield folder


@pytest.fixture(scope="session")
def as_root() -> None:
    """Skip where accounts cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("accounts for this test are made with useradd: run it as root")


@pytest.fixture(scope="module")
def ordinary(as_root: None) -> Iterator[str]:
    """An account without rights."""
    name = f"ff{uuid.uuid4().hex[:6]}"
    with sshd.folder_for_all() as folder, sshd.account(name, "/bin/sh", folder):
        yield name
