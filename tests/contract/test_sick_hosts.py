"""A handful of hosts, each sick in its own way, in one run: each is named, and none holds another up."""

from __future__ import annotations

import asyncio
import functools
import getpass
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from fleetfix.actions.shell import Shell
from fleetfix.engine.fleetrun import Interrupts, run_fleet
from fleetfix.inventory import Host
from fleetfix.policy import Policy, Share
from fleetfix.recorder import Recorder
from fleetfix.session import open_session
from tests.contract import sshd
from tests.engine.toys import Shelf, request, step

ALL = Share.parse("100%")


@asynccontextmanager
async def listening(says: bytes) -> AsyncIterator[int]:
    """Somebody who takes connections, says this, and then nothing ever again."""
    until_the_end = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        await until_the_end.wait()
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        until_the_end.set()
        server.close()


async def test_each_sick_host_is_named_for_what_it_is_and_the_well_one_is_mended(
    server: sshd.Server, shared: Path
) -> None:
    hangs = shared / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 9\n")
    hangs.chmod(0o755)
    async with listening(b"") as silent, listening(b"SSH-2.0-OpenSSH_9.6\r\n") as banner:
        base = server.host(getpass.getuser())
        sick = {
            "silent": base.model_copy(update={"port": silent}),
            "banner": base.model_copy(update={"port": banner}),
            "python": base.model_copy(update={"python": str(hangs)}),
            "none": base.model_copy(update={"python": "/nonexistent/python3"}),
            "refused": base.model_copy(update={"port": 1}),
        }
        hosts = [one.model_copy(update={"name": name}) for name, one in sick.items()]
        hosts.append(Host(name="well", address="localhost", transport="local"))
        mark = shared / "mark"
        asked = request(
            [host.name for host in hosts],
            [step("mark", Shell(run=f"touch {mark}", check=f"test -e {mark}", undo=f"rm {mark}"))],
            policy=Policy(canary=0, batch=(ALL,), max_failures=ALL, max_unreachable=ALL),
        )
        shelf = Shelf()
        state = await run_fleet(
            replace(asked, hosts=tuple(hosts)),
            Recorder(asked.run, shelf),
            shelf,
            interrupts=Interrupts(),
            opener=functools.partial(open_session, connect_timeout=4.0, root=str(shared / "root")),
        )
    ends = {name: host.finished for name, host in state.hosts.items()}
    kinds = {name: end.failure.kind for name, end in ends.items() if end is not None and end.failure}
    ssh = ("silent", "banner", "refused")
    assert kinds == {**dict.fromkeys(ssh, "unreachable"), "python": "no_python", "none": "no_python"}
    outcomes = {name: end.outcome for name, end in ends.items() if end is not None}
    assert outcomes == {
        **dict.fromkeys(ssh, "unreachable"),
        "python": "blocked",
        "none": "blocked",
        "well": "changed",
    }
    assert len({end.reason.partition(": ")[2] for end in ends.values() if end is not None}) == len(hosts)
    assert state.exit == 2
    assert mark.exists()
