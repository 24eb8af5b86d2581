"""A file server that has stopped answering holds up the one question that needs it, and no other."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fleetfix.commands import Read
from fleetfix.domain.checkpoints import LastCheckpoint, understood
from fleetfix.inventory import Host
from fleetfix.remote.api import stat_of
from tests.contract.place import Place

MNT_DETACH = 2


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system whose server never answers: FUSE, with nobody at the other end."""
    libc, folder = ctypes.CDLL(None, use_errno=True), tmp_path / "hung"
    folder.mkdir()
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"/dev/fuse: {error.strerror}")
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"hung", bytes(folder), b"fuse", 0, options) != 0:
            pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")
        try:
            yield folder
        finally:
            libc.umount2(bytes(folder), MNT_DETACH)
    finally:
        os.close(server)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    here = Place(Host(name="here", address="localhost", transport="local"), tmp_path)
    yield here
    await here.close()


async def test_a_checkpoint_folder_that_hangs_leaves_the_age_unknown(place: Place, hung: Path) -> None:
    program = [sys.executable, "-c", "print(flush=True); input()", "--save", str(hung / "run")]
    with subprocess.Popen(
        program, cwd=place.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        stat = stat_of(trainer.pid)
        assert stat is not None
        args = {"pid": trainer.pid, "start": stat[2]}
        session = await place.open(dry=True)
        late, prompt = await session.read(
            "stop",
            [
                Read(function="checkpoints.last", args=args, timeout=1.0),
                Read(function="shell.check", args={"argv": ["true"]}),
            ],
        )
        trainer.kill()
    assert late.failure is not None
    assert late.failure.kind == "timed_out"
    assert understood(late) == LastCheckpoint(unsure="where it saves does not answer")
    assert prompt.ok
