"""A file server that has stopped answering holds up the one question that needs it, and no other.

Where it has taken the question before it stopped, whoever asked cannot be killed: the kernel waits.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fleetfix.commands import Ended, Execute, Read
from fleetfix.domain.checkpoints import LastCheckpoint, understood
from fleetfix.inventory import Host
from fleetfix.remote.api import stat_of
from tests.contract.command_contract import ran
from tests.contract.place import Place, call, change, eventually, processes_with, read

MNT_DETACH = 2
FUSE_INIT = 26


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
def frozen(hung: Path) -> Iterator[Path]:
    """The same with a server that takes every question and answers none: who asks is in D state."""
    (server,) = (int(name) for name in os.listdir("/proc/self/fd") if _leads_to(name, "/dev/fuse"))

    stopped, stop = os.pipe()

    def take() -> None:
        while server in select.select([server, stopped], [], [])[0]:
            _, kind, unique = struct.unpack_from("<IIQ", os.read(server, 1 << 20))
            if kind == FUSE_INIT:
                said = struct.pack("<IIIIHHII28x", 7, 31, 65536, 0, 16, 12, 65536, 1)
                os.write(server, struct.pack("<IiQ", 16 + len(said), 0, unique) + said)

    taking = threading.Thread(target=take)
    taking.start()
    yield hung
    os.close(stop)  # nobody reads from the server then: to close it lets go of all who wait
    taking.join()
    os.close(stopped)


def _leads_to(descriptor: str, path: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == path
    except OSError:
        return False


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


async def test_what_cannot_be_killed_is_named_and_never_said_to_have_ended(
    place: Place, frozen: Path
) -> None:
    session, other = await place.open(), await place.open("r2")
    look = change(call("stat", timeout=0.5, path=str(frozen / "x")))

    async def cancelled() -> tuple[Ended, tuple[str, ...]]:
        running = asyncio.create_task(ran(other, Execute(argv=("stat", str(frozen / "y")))))
        await eventually(lambda: bool(processes_with(str(frozen / "y"))))
        named = await other.cancel()
        return (await running)[0], named

    (late, prompt), changed, (ended, named) = await asyncio.gather(
        session.read("s", [read("look", timeout=0.5, path=str(frozen / "x")), read("echo", value=1)]),
        session.change("r1/s/1/0", "s", look),
        cancelled(),
    )
    assert prompt.value == 1
    for answer, name in ((late, "python"), (changed, "stat")):
        assert answer.failure is not None
        assert answer.failure.kind == "hung"
        assert name in answer.failure.message
        assert "within 0.5 s" in answer.failure.message
    assert ended.failure is not None
    assert ended.failure.kind == "hung"
    assert named == tuple(f"{pid} stat" for pid in processes_with(str(frozen / "y")))
