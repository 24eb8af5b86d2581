"""Disks that are full, without inodes or read-only: told for what they are, and gone back from."""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fleetfix.actions.shell import Shell
from fleetfix.commands import Execute
from fleetfix.engine.fleetrun import Interrupts, run_fleet
from fleetfix.errors import HostError
from fleetfix.inventory import Host
from fleetfix.recorder import Recorder
from fleetfix.remote import api
from fleetfix.session import open_session
from tests.contract.command_contract import ran
from tests.contract.place import Place, call, change
from tests.contract.session_contract import ONE
from tests.engine.toys import Shelf, request, step

HERE = Host(name="here", address="localhost", transport="local")
VAR, RUN = "var/lib/fleetfix", "run/fleetfix"


class Disks:
    """File systems of a host, mounted below its root."""

    def __init__(self, root: Path, stack: contextlib.ExitStack) -> None:
        self._root = root
        self._stack = stack

    def mount(self, where: str, options: str) -> Path:
        """Mount a small file system there."""
        path = self._root / where
        path.mkdir(parents=True)
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True, text=True
        )
        if made.returncode:
            pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
        self._stack.callback(subprocess.run, ["umount", "-l", path], check=True)
        return path

    def full(self, where: str) -> None:
        """One without a byte left."""
        path = self.mount(where, "size=2m")
        with contextlib.suppress(OSError), (path / "big").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)


@pytest.fixture
def disks(place: Place) -> Iterator[Disks]:
    with contextlib.ExitStack() as stack:
        yield Disks(place.root, stack)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    here = Place(HERE, tmp_path)
    yield here
    await here.close()


async def test_where_the_state_folder_is_full_a_host_says_before_that_a_reboot_makes_it_unknown(
    place: Place, disks: Disks
) -> None:
    disks.full(VAR)
    session = await place.open()
    assert not session.info.durable
    made = change(call("append", path=place.path("f")), undo=(call("remove", path=place.path("f")),))
    assert (await session.change(ONE, "s", made)).ok
    assert (await session.undo(ONE)).ok


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ("full", "no_space", "no space left on"),
        ("size=4m,nr_inodes=1", "no_space", "no inodes left on"),
        ("size=4m,ro", "blocked", "read-only"),
    ],
)
async def test_where_no_records_can_be_kept_nothing_is_done_and_the_cause_is_said(
    place: Place, disks: Disks, options: str, kind: str, words: str
) -> None:
    for where in (VAR, RUN):
        disks.full(where) if options == "full" else disks.mount(where, options)
    session = await place.open()
    with pytest.raises(HostError) as refused:
        await session.change(ONE, "s", change(call("append", path=place.path("f"))))
    failure = refused.value.failure
    assert failure.kind == kind
    assert words in failure.message
    assert failure.hint
    assert place.lines("f") == []


@pytest.mark.parametrize(
    ("options", "use_up"),
    [
        ("size=8m", "cat /dev/zero >$D/big"),
        ("size=8m,nr_inodes=200", "i=0; while : >$D/$i; do i=$((i+1)); done"),
    ],
)
async def test_a_disk_that_fills_up_in_a_change_takes_the_host_back_although_it_stays_full(
    place: Place, disks: Disks, options: str, use_up: str
) -> None:
    disk = disks.mount("var/lib", options)
    mark = place.path("mark")
    steps = [
        step("mark", Shell(run=f"echo x >{mark}", check=f"test -e {mark}", undo=f"rm {mark}")),
        step("fill", Shell(run=f"D={disk}; {use_up}", check="false", undo=f"echo again >{disk}/small")),
    ]
    shelf, asked = Shelf(), request(["here"], steps)
    state = await run_fleet(
        asked.__class__(**{**vars(asked), "hosts": (HERE,)}),
        Recorder(asked.run, shelf),
        shelf,
        interrupts=Interrupts(),
        opener=functools.partial(open_session, root=str(place.root)),
    )
    done = state.hosts["here"].finished
    assert done is not None
    assert done.failure is not None
    assert (done.outcome, done.failure.kind, done.step) == ("rolled_back", "no_space", "fill")
    assert "No space left on device" in done.failure.message
    assert not Path(mark).exists()
    assert state.exit == 3
    assert [event.ok for event in shelf.of("change_undone")] == [True, True]
    assert list(Path(place.root).rglob("claims/*.json")) == [], "nothing is left open"


async def test_a_program_that_a_mount_forbids_to_execute_says_so(place: Place, disks: Disks) -> None:
    tool = disks.mount("opt", "size=1m,noexec") / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    ended, heard = await ran(await place.open(), Execute(argv=(str(tool),)))
    assert ended.exit == 126
    assert b"mounted noexec" in heard.err
    assert "mounted noexec" in api.Context("r1", "s", "/").command([str(tool)]).errors


def test_what_the_system_refuses_is_said_with_what_helps() -> None:
    def said(number: int, path: str | None = None) -> tuple[str, str, str]:
        no = api.refusal_of(OSError(number, "Words of the system", path), "it")
        return no.kind, no.message, no.hint

    assert said(122)[0] == "no_space"  # a quota: no file system here has one to use up
    assert "quota" in said(122)[1]
    assert said(30, "/opt/venv/x") == ("command", "it: words of the system: /opt/venv/x", api.HELPS[30])
    assert "dmesg" in said(5)[2]
    assert said(13, "/x")[0] == "command"
