"""The contract on scripted hosts, so that what engine tests stand on means what real hosts mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.errors import Failure, HostError
from fleetfix.inventory import Host
from fleetfix.session import Session
from fleetfix.transports.scripted import Fleet, ScriptedHost
from tests.contract.command_contract import CommandRefusals
from tests.contract.place import Place, call, change, read
from tests.contract.session_contract import ONE, TWO, SessionPromises


def append(args: dict[str, Any], world: dict[str, Any]) -> Any:
    """What `contract.append` does, in a world instead of on a disk."""
    text = args.get("text", "x")
    world.setdefault(Path(args["path"]).name, []).append(text)
    return text


def remove(args: dict[str, Any], world: dict[str, Any]) -> str:
    """What `contract.remove` does."""
    return "not there" if world.pop(Path(args["path"]).name, None) is None else "removed"


def hosts() -> ScriptedHost:
    """A host whose rules are the contract's host module."""
    host = ScriptedHost()
    host.on("contract.echo", lambda args, world: args.get("value"))
    host.on("contract.append", append).on("contract.remove", remove)
    return host.on("contract.failing", Failure(kind="command", message="it does not work"))


class ScriptedPlace(Place):
    """A scripted host as a place; its files are entries of its world."""

    scripted: ScriptedHost

    def lines(self, name: str) -> list[str]:
        return list(self.scripted.world.get(name, []))


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[ScriptedPlace]:
    here = ScriptedPlace(Host(name="gpu01", address="gpu01", transport="scripted"), tmp_path)
    with Fleet({"gpu01": hosts()}) as fleet:
        here.scripted = fleet["gpu01"]
        here.disable = lambda text: setattr(here.scripted, "disabled", text)
        yield here
        await here.close()


class TestScripted(CommandRefusals, SessionPromises):
    """Ids, undo, lease, claim and dry runs, as on a real host."""


@pytest.fixture
def host(place: ScriptedPlace) -> Iterator[ScriptedHost]:
    return place.scripted  # type: ignore[return-value]


APPEND = change(call("append", path="f"), call("append", path="f"), undo=(call("remove", path="f"),))


async def lost(session: Session, id: str = ONE) -> None:
    with pytest.raises(HostError) as error:
        await session.change(id, "s", APPEND)
    assert error.value.failure.kind == "unreachable"


async def test_lost_before_a_change_nothing_began(place: ScriptedPlace, host: ScriptedHost) -> None:
    host.lose(before=1)
    await lost(await place.open())
    again = await place.open()
    assert await again.past() == ()
    assert (await again.change(ONE, "s", APPEND)).ok
    assert host.writes(ONE) == 2


async def test_lost_after_a_change_it_was_made_once(place: ScriptedPlace, host: ScriptedHost) -> None:
    host.lose(after=1)
    await lost(await place.open())
    again = await place.open()
    assert [one.state for one in await again.past()] == ["done"]
    assert (await again.change(ONE, "s", APPEND)).ok
    assert host.writes(ONE) == 2


async def test_lost_during_a_change_it_is_in_doubt_and_not_repeated(
    place: ScriptedPlace, host: ScriptedHost
) -> None:
    host.lose(during=2, calls=1)
    session = await place.open()
    await session.change(ONE, "s", APPEND)
    await lost(session, TWO)
    again = await place.open()
    assert [one.state for one in await again.past()] == ["done", "in_doubt"]
    assert (await again.change(TWO, "s", APPEND)).in_doubt
    assert host.writes(TWO) == 1
    assert (await again.undo(TWO)).ok


async def test_a_host_that_is_gone_takes_no_connection_until_it_is_back(
    place: ScriptedPlace, host: ScriptedHost
) -> None:
    host.lose(after=1, back=False)
    await lost(await place.open())
    with pytest.raises(HostError):
        await place.open()
    host.accept()
    assert await (await place.open()).past()


async def test_a_dropped_session_leaves_its_change_to_finish(
    place: ScriptedPlace, host: ScriptedHost
) -> None:
    gate = host.gate("contract.append")
    session = await place.open()
    changing = asyncio.create_task(session.change(ONE, "s", APPEND))
    await asyncio.sleep(0.01)
    host.drop()
    with pytest.raises(HostError):
        await changing
    again = await place.open()
    assert [one.state for one in await again.past()] == ["begun"]
    gate.set()
    assert (await again.change(ONE, "s", APPEND)).ok
    assert host.writes(ONE) == 2


async def test_a_reboot_puts_what_ran_in_doubt(place: ScriptedPlace, host: ScriptedHost) -> None:
    host.gate("contract.append")
    session = await place.open()
    before = session.info.boot_id
    changing = asyncio.create_task(session.change(ONE, "s", APPEND))
    await asyncio.sleep(0.01)
    host.reboot()
    with pytest.raises(HostError):
        await changing
    again = await place.open()
    assert again.info.boot_id != before
    assert [one.state for one in await again.past()] == ["in_doubt"]


async def test_cancel_ends_what_waits(place: ScriptedPlace, host: ScriptedHost) -> None:
    host.gate("contract.append")
    host.gate("contract.echo")
    session = await place.open()
    reading = asyncio.create_task(session.read("s", [read("echo", value=1)]))
    changing = asyncio.create_task(session.change(ONE, "s", APPEND))
    await asyncio.sleep(0.01)
    assert await session.cancel() == ()
    answers = [*(await reading), await changing]
    assert [one.failure.kind for one in answers if one.failure] == ["cancelled", "cancelled"]
    assert [one.state for one in await session.past()] == ["failed"]


async def test_a_refused_connection_says_why(place: ScriptedPlace, host: ScriptedHost) -> None:
    host.refuse("auth", "no key is accepted")
    with pytest.raises(HostError) as refused:
        await place.open()
    assert refused.value.failure.kind == "auth"


async def test_a_late_answer_comes(place: ScriptedPlace, host: ScriptedHost) -> None:
    host.late("contract.echo", 0.01)
    (answer,) = await (await place.open()).read("s", [read("echo", value=1)])
    assert answer.value == 1


async def test_a_function_without_a_rule_is_a_bug(place: ScriptedPlace) -> None:
    (answer,) = await (await place.open()).read("s", [read("nothing")])
    assert answer.failure is not None
    assert answer.failure.kind == "bug"
    assert "contract.nothing" in answer.failure.message


async def test_executed_tells_what_ran_for_which_change(place: ScriptedPlace, host: ScriptedHost) -> None:
    session = await place.open()
    await session.read("look", [read("echo")])
    await session.change(ONE, "s", APPEND)
    await session.undo(ONE)
    assert [(one.way, one.id) for one in host.executed] == [
        ("read", None),
        ("do", ONE),
        ("do", ONE),
        ("undo", ONE),
    ]
    assert host.writes_by_id == {ONE: 2}
