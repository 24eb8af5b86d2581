"""Functions of a fabfile on a real host: called at most once, recorded, undone, ended with who calls."""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetfix.actions.fabric import Fabric, FabricFacts
from fleetfix.commands import Change, Completed
from fleetfix.engine.functions import WithFunctions
from fleetfix.transports.fabfiles import Fabfiles
from tests.contract import sshd
from tests.contract.place import Place, eventually, processes_with, token

ONE = "r1/s/1/0"
FABFILE = """
import os, subprocess, sys, time
from fabric import Connection, task

def fine(c: Connection, folder, text="x"):
    return c.run(f"grep -qx {text} {folder}/f", warn=True, hide=True)

def unsure(c, folder, text="x"):
    return None

@task
def write(c, folder, text="x"):
    print("to", c.host)
    c.run(f"echo {text} >>{folder}/f; echo said")

def fail(c, folder, text="x"):
    c.run("echo out; echo why >&2; exit 3", hide=True)

def leave(c, folder, text="x"):
    subprocess.Popen(["sleep", text])
    sys.exit(4)

def hang(c, folder, text="x"):
    c.run(f"echo begun >>{folder}/f")
    subprocess.run(["sleep", text])

def clear(c, folder, text="x"):
    c.run(f"rm {folder}/f")
"""


class Site:
    """A host, and a fabfile beside it."""

    def __init__(self, place: Place, file: Path) -> None:
        self.place = place
        self.file = file
        self.functions = Fabfiles()

    def action(self, do: str, text: str = "x", check: str = "fine", timeout: float = 30.0) -> Fabric:
        return Fabric.model_validate(
            {
                "file": str(self.file),
                "sha256": hashlib.sha256(self.file.read_bytes()).hexdigest(),
                "do": do,
                "check": check,
                "undo": "clear",
                "args": {"folder": str(self.place.folder), "text": text},
                "timeout": timeout,
            }
        )

    async def open(self, *actions: Fabric) -> WithFunctions:
        session = await self.place.open()
        keys = frozenset(action.key for action in actions)
        return WithFunctions(session, self.place.host, self.functions, keys)


def change_of(action: Fabric) -> Change:
    (change,) = action.plan(FabricFacts(fine=False)).changes
    return change


async def facts_of(session: WithFunctions, action: Fabric) -> FabricFacts:
    probe = action.probe()
    replies = await session.read("s", next(probe))
    try:
        probe.send(replies)
    except StopIteration as done:
        facts: FabricFacts = done.value
        return facts
    raise AssertionError("it asks once")


@pytest.fixture
async def site(server: sshd.Server, shared: Path, tmp_path: Path) -> AsyncIterator[Site]:
    place = Place(server.host(getpass.getuser()), shared)
    file = tmp_path / "fabfile.py"
    file.write_text(FABFILE)
    yield Site(place, file)
    await place.close()


async def test_a_function_is_called_once_recorded_verified_and_undone(site: Site) -> None:
    write, unsure = site.action("write"), site.action("write", check="unsure")
    session = await site.open(write)
    assert (await facts_of(session, write)).fine is False
    assert "unsure returned None" in (await facts_of(session, unsure)).trouble
    first = await session.change(ONE, "s", change_of(write))
    assert (first.exit, first.stdout) == (0, "to 127.0.0.1\nsaid\n")
    assert await session.change(ONE, "s", change_of(write)) == first
    assert site.place.lines("f") == ["x"]
    assert (await facts_of(session, write)).fine is True
    assert [one.state for one in await session.past()] == ["done"]
    assert (await session.undo(ONE)).ok
    assert (await session.undo(ONE)).ok
    assert site.place.lines("f") == []


async def test_what_goes_wrong_in_a_function_is_one_line_of_it(site: Site) -> None:
    word = token()
    fail, leave, hang = (
        site.action("fail"),
        site.action("leave", word),
        site.action("hang", word, timeout=4.0),
    )
    session = await site.open(fail, leave, hang)
    failed, left, late = [
        await session.change(f"r1/s/1/{number}", "s", change_of(action))
        for number, action in enumerate((fail, leave, hang))
    ]
    line = 1 + FABFILE.splitlines().index('    c.run("echo out; echo why >&2; exit 3", hide=True)')
    said = f"fabfile.py:{line}: `echo out; echo why >&2; exit 3`: exit 3: why"
    assert (failed.exit, failed.stderr.splitlines()[-1]) == (1, said)
    assert left.stderr.splitlines()[-1].endswith("exit 4")
    assert late.failure is not None
    assert late.failure.kind == "timed_out"
    assert processes_with(word) == [], "what a function has started here ends with it"
    site.file.write_text(FABFILE + "\n# edited\n")
    again = await session.change("r1/s/2/0", "s", change_of(fail))
    assert again.failure is not None
    assert "is another one than when the run began" in again.failure.message


async def test_a_controller_that_goes_leaves_its_function_in_doubt_and_it_is_not_called_again(
    site: Site,
) -> None:
    word = token()
    hang = site.action("hang", word)
    first = await site.open(hang)
    changing = asyncio.create_task(first.change(ONE, "s", change_of(hang)))
    await eventually(lambda: site.place.lines("f") == ["begun"] and processes_with(word) != [])
    changing.cancel()
    await first.close()
    await eventually(lambda: processes_with(word) == [])
    second = await site.open(hang)
    await second.past()
    again = await second.change(ONE, "s", change_of(hang))
    assert again.in_doubt
    assert site.place.lines("f") == ["begun"]
    assert [one.state for one in await second.past()] == ["in_doubt"]
    assert (await second.undo(ONE)).ok
    assert not (site.place.folder / "f").exists()


CONTROLLER = """
import asyncio, json, sys
from fleetfix.engine.functions import Asked
from fleetfix.inventory import Host
from fleetfix.transports.fabfiles import Fabfiles
host, asked = json.loads(sys.argv[1])
asyncio.run(Fabfiles().call(Host.model_validate(host), Asked.of(asked)))
"""


async def test_a_controller_that_is_killed_takes_its_function_and_all_it_has_started_with_it(
    site: Site,
) -> None:
    word = token()
    (call,) = change_of(site.action("hang", word)).do
    said = json.dumps([site.place.host.model_dump(mode="json"), call.args])
    controller = await asyncio.create_subprocess_exec(sys.executable, "-c", CONTROLLER, said)
    await eventually(lambda: processes_with(word) != [])
    controller.kill()
    await controller.wait()
    await eventually(lambda: processes_with(word) == [])


class Uncalled:
    """Calls nothing, and knows if it should have."""

    async def call(self, host: object, asked: object) -> Completed:
        raise AssertionError(f"{asked} was called")


async def test_a_host_does_not_choose_what_is_called_here(site: Site) -> None:
    write = site.action("write")
    session = await site.open(write)
    await session.change(ONE, "s", change_of(write))
    await session.close()
    other = WithFunctions(await site.place.open(), site.place.host, Uncalled(), frozenset({"fabric:0"}))
    await other.past()
    undone = await other.undo(ONE)
    assert undone.failure is not None
    assert undone.failure.kind == "blocked"
    assert "clear of" in undone.failure.message
    assert site.place.lines("f") == ["x"]
