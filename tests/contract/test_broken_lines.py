"""Connections to a real sshd that are cut or fall silent: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import asyncio
import getpass
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetfix.errors import Failure, HostError
from fleetfix.session import HostInfo, Patience, Session, Timers
from tests.contract import sshd
from tests.contract.place import Place, call, change, eventually, kill, read
from tests.contract.relay import Relay
from tests.contract.session_contract import NO_RETURN, ONE, TWO, runner_of

QUICK = Timers(ping=0.1, silence=0.5, orphaned=0.8, reconnect_within=20.0)


@pytest.fixture
async def relay(server: sshd.Server) -> AsyncIterator[Relay]:
    async with Relay(server.port).running() as running:
        yield running


@pytest.fixture
async def place(server: sshd.Server, shared: Path, relay: Relay) -> AsyncIterator[Place]:
    known = server.folder / "known_hosts"
    kind, key = (server.folder / "host_key.pub").read_text().split()[:2]
    before = known.read_text()
    known.write_text(f"{before}[127.0.0.1]:{relay.port} {kind} {key}\n")
    host = server.host(getpass.getuser()).model_copy(update={"port": relay.port})
    here = Place(host, shared)
    yield here
    await here.close()
    known.write_text(before)


class Tells:
    """Watches a line: what it says of it, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def dropped(self, failure: Failure) -> None:
        self.said.append(f"dropped: {failure.message.partition(': ')[2]}")

    def returned(self, info: HostInfo, seconds: float, *, restarted: bool) -> None:
        del info, seconds
        self.said.append("restarted" if restarted else "returned")

    def patience(self) -> Patience:
        return "usual"


def recorded(place: Place, kind: str) -> int:
    """How many records of a kind the host's own log has."""
    log = next(place.root.rglob("host.jsonl"), None)
    lines = log.read_text().splitlines() if log is not None else []
    return sum(json.loads(line)["kind"] == kind for line in lines)


@pytest.mark.parametrize("moment", ["before", "during", "after"])
async def test_a_change_is_made_once_wherever_the_connection_is_cut(
    place: Place, relay: Relay, moment: str
) -> None:
    session = await place.open(timers=QUICK)
    await session.acquire()
    one = change(call("append", path=place.path("f"), text="a"))
    if moment == "during":
        async with place.slow_change(session) as slow:
            relay.cut()
            await eventually(lambda: relay.taken == 2)
            slow.let_go()
            assert slow.task is not None
            assert (await slow.task).value == "slowly"
        assert place.lines("slow") == ["x"]
        return
    relay.hold(up=moment == "before", down=moment == "after")
    asking = asyncio.ensure_future(session.change(ONE, "s", one))
    if moment == "before":
        before = relay.asked
        await eventually(lambda: relay.asked > before)
        assert recorded(place, "begun") == 0
    else:
        await eventually(lambda: recorded(place, "done") == 1)
        assert not asking.done()
    relay.cut()
    assert (await asking).value == "a"
    assert place.lines("f") == ["a"]
    assert recorded(place, "begun") == recorded(place, "done") == 1


async def test_silence_is_noticed_by_both_ends_and_what_ran_meanwhile_is_told(
    place: Place, relay: Relay
) -> None:
    tells = Tells()
    session = await place.open(timers=QUICK, watch=tells)
    async with place.slow_change(session) as slow:
        first = await runner_of(session)
        relay.hold(up=True, down=True)
        await eventually(lambda: len(tells.said) == 1)
        # Nothing gets through, new connections included: the host has to find out by itself.
        slow.let_go()
        await eventually(lambda: recorded(place, "done") == 1)
        await eventually(lambda: not Path(f"/proc/{first}").exists())
        relay.let_go()
        assert slow.task is not None
        assert (await slow.task).value == "slowly"
    assert place.lines("slow") == ["x"]
    assert tells.said[0].startswith("dropped: nothing was heard for")
    assert tells.said[-1] == "returned"


@pytest.mark.parametrize("phase", ["a long change", "nobody asks"])
async def test_a_connection_that_may_not_be_idle_is_kept_in_use(
    place: Place, relay: Relay, phase: str
) -> None:
    session = await place.open(timers=Timers(ping=0.1, reconnect_within=20.0))
    relay.idle = 0.8

    async def a_while() -> None:
        """As many pings as take longer than the relay is patient."""
        before = relay.asked
        await eventually(lambda: relay.asked >= before + 12)

    if phase == "nobody asks":
        await a_while()
        assert (await session.read("s", [read("echo", value=1)]))[0].value == 1
    else:
        async with place.slow_change(session) as slow:
            await a_while()
            slow.let_go()
            assert slow.task is not None
            assert (await slow.task).ok
    assert (relay.taken, relay.idled) == (1, 0)


async def test_an_idle_connection_is_cut_by_this_relay_and_comes_back(place: Place, relay: Relay) -> None:
    session = await place.open(timers=Timers(ping=60.0, reconnect_within=20.0))
    relay.idle = 0.1
    await eventually(lambda: relay.idled >= 1)
    relay.idle = None
    assert (await session.read("s", [read("echo", value=1)]))[0].value == 1
    assert relay.taken >= 2


@pytest.mark.parametrize(("transport", "on_the_way"), [("asyncssh", [200, 1600]), ("fabric", [])])
async def test_a_connection_that_breaks_before_the_runner_has_begun_is_made_again(
    place: Place, relay: Relay, transport: str, on_the_way: list[int]
) -> None:
    began = place.folder / "began"
    python = place.folder / "python"
    python.write_text(
        f'#!/bin/sh\n[ -e {began} ] || {{ : > {began}; exec sleep 20; }}\nexec /usr/bin/env python3 "$@"\n'
    )
    python.chmod(0o755)
    place.host = place.host.model_copy(update={"python": str(python), "transport": transport})
    relay.cut_after = [*on_the_way]  # within the key exchange, and while logging in
    opening = asyncio.ensure_future(place.open())
    await eventually(began.exists)
    assert relay.taken == len(on_the_way) + 1
    relay.cut()
    session = await opening
    assert (await session.read("s", [read("echo", value=1)]))[0].value == 1
    assert relay.taken == len(on_the_way) + 2


async def test_a_session_that_nobody_needs_comes_back_however_long_it_takes(
    place: Place, relay: Relay
) -> None:
    session = await place.open(timers=NO_RETURN)
    relay.open = False
    relay.cut()
    # Its time to come back is over, many times: nobody has asked for anything yet.
    await eventually(lambda: relay.refused >= 3)
    relay.open = True
    await eventually(lambda: relay.taken >= 2)
    assert (await session.read("s", [read("echo", value=1)]))[0].value == 1


async def test_a_session_that_is_needed_is_given_up_in_its_time(place: Place, relay: Relay) -> None:
    session = await place.open(timers=NO_RETURN)
    relay.open = False
    relay.cut()
    with pytest.raises(HostError) as lost:
        await session.read("s", [read("echo", value=1)])
    assert lost.value.failure.kind == "unreachable"


async def test_a_host_that_has_lost_its_records_does_nothing_a_second_time(
    place: Place, relay: Relay
) -> None:
    session = await place.open(timers=QUICK)
    await session.acquire()
    async with place.slow_change(session) as slow:
        runner, pid = await runner_of(session), slow.pid
        relay.open = False
        kill(runner)
        kill(pid)
        shutil.rmtree(place.home / "runs")
        relay.open = True
        assert slow.task is not None
        with pytest.raises(HostError) as refused:
            await slow.task
    assert refused.value.failure.kind == "in_doubt"
    assert place.lines("slow") == ["x"]
    for write in (
        session.change(TWO, "s", change(call("append", path=place.path("f")))),
        session.undo(ONE),
        session.note("plan", 1),
    ):
        with pytest.raises(HostError) as refused:
            await write
        assert refused.value.failure.kind == "in_doubt", "nothing tells what of it is to be undone"
    assert place.lines("f") == []


async def test_a_restarted_host_is_told_of_and_what_was_under_way_is_in_doubt(
    place: Place, relay: Relay, tmp_path: Path
) -> None:
    tells = Tells()
    session = await place.open(timers=QUICK, watch=tells)
    pretend_another_boot(session)
    async with place.slow_change(session) as slow:
        runner, pid = await runner_of(session), slow.pid
        kill(runner)
        kill(pid)
        assert slow.task is not None
        assert (await slow.task).in_doubt
    assert tells.said[-1] == "restarted"


def pretend_another_boot(session: Session) -> None:
    """Have a session believe that it began before the last boot of this machine, which goes on."""
    session._info = session.info.model_copy(update={"boot_id": "an earlier one"})  # type: ignore[attr-defined]
