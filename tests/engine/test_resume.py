"""A run that is taken up again: from its journal, or from what its hosts say of themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from fleetfix.events import Record
from fleetfix.policy import Policy, Share
from fleetfix.state import RunState, fold
from fleetfix.transports.scripted import Fleet, ScriptedHost
from tests.engine.toys import Lit, Once, Shelf, Switch, play, resume, step, toy_host

STEPS = [
    step("before", Lit(name="eyes")),
    step("stop", Switch(name="job", on=False, key="stop:job", job="stops"), when_pending=("a", "b")),
    step("idle", Lit(name="idle"), when_changed=("stop",)),
    step("a", Switch(name="a")),
    step("bell", Once(name="bell"), when_changed=("a",)),
    step("b", Switch(name="b")),
    step("sound", Lit(name="sound"), when_changed=("a", "b")),
    step("train", Switch(name="job", key="start", job="starts", follows="stop")),
    step("lamp", Lit(name="lamp")),
]
"""The shape of the main job: stop, prove idle, mend twice, something by word, prove, start, prove."""

POLICY = Policy(canary=1, batch=(Share.parse("100%"),), max_unreachable=Share.parse("100%"), forks=1)


def host(**world: Any) -> ScriptedHost:
    """A host whose `idle` holds exactly while its job is stopped."""
    made = toy_host(a=False, b=False, job=True, eyes=True, sound=True, lamp=True)
    made.world.update(world)
    made.on(
        "toy.get", lambda args, now: not now["job"] if args["name"] == "idle" else now.get(args["name"])
    )
    return made


def two() -> Fleet:
    return Fleet({"gpu01": host(), "gpu02": host()})


WELL = {"a": True, "b": True, "job": True, "eyes": True, "sound": True, "lamp": True, "bell": 1}


class Cut:
    """Ends the controller as kill -9 does: no record more, no word more to a host, no answer heard.

    What a host does at that moment it does to its end.
    """

    def __init__(self, fleet: Fleet, *, at_record: int = 0, at_call: int = 0) -> None:
        self.fleet = fleet
        self.shelf = Shelf()
        self.calls = 0
        self.happened = False
        self._at_record, self._at_call = at_record, at_call
        self._append = self.shelf.append
        self.shelf.append = self._keep  # type: ignore[method-assign]
        for name in fleet:
            self._listen(fleet[name])

    def _keep(self, records: Sequence[Record]) -> None:
        left = self._at_record - len(self.shelf.records) if self._at_record else len(records)
        if self.happened:
            return
        self._append(records[:left])
        if len(records) >= left and self._at_record:
            self._playing.get_loop().call_soon_threadsafe(self._kill)

    def _listen(self, host: ScriptedHost) -> None:
        execute = host.execute

        async def counted(*words: Any) -> Any:
            self.calls += 1
            if self.calls == self._at_call:
                self._kill()
            return await execute(*words)

        host.execute = counted  # type: ignore[method-assign]

    def _kill(self) -> None:
        if not self.happened:
            self.happened = True
            for name in self.fleet:
                self.fleet[name].drop()
            self._playing.cancel()

    async def play(self) -> Shelf:
        """Play up to the cut; the journal as it is then."""
        return await self._up_to_the_cut(play(self.fleet, STEPS, shelf=self.shelf, policy=POLICY))

    async def resume(self) -> Shelf:
        """Resume up to the cut."""
        return await self._up_to_the_cut(resume(self.fleet, STEPS, self.shelf, policy=POLICY))

    async def _up_to_the_cut(self, work: Coroutine[Any, Any, Any]) -> Shelf:
        self._playing = asyncio.ensure_future(work)
        with contextlib.suppress(asyncio.CancelledError):
            await self._playing
        self.shelf.append = self._append  # type: ignore[method-assign]
        for _ in range(20):
            await asyncio.sleep(0)
        return self.shelf


async def whole_length() -> tuple[int, int]:
    """How many records, and how many calls on hosts, a run that nothing cuts has."""
    whole = Cut(two())
    return len((await whole.play()).records), whole.calls


def set_once(fleet: Fleet) -> None:
    """No change was made twice: the host counts."""
    for name in fleet:
        made = Counter(
            (one.function, *sorted(one.args.items())) for one in fleet[name].executed if one.way == "do"
        )
        assert set(made.values()) == {1}, (name, made)
        assert not fleet[name].runs("undo")


def outcomes(state: RunState) -> dict[str, str | None]:
    return {name: host.outcome for name, host in state.hosts.items()}


# -- cut anywhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same", "elsewhere"])
@pytest.mark.parametrize("what", ["at_record", "at_call"])
async def test_a_controller_that_is_killed_anywhere_leaves_a_run_that_can_be_finished(
    what: str, elsewhere: bool
) -> None:
    records, calls = await whole_length()
    for place in range(1, (records if what == "at_record" else calls) + 1):
        fleet = two()
        shelf = await Cut(fleet, **{what: place}).play()
        if not elsewhere and not shelf.records:
            continue  # nobody knows of a run yet
        state = await resume(fleet, STEPS, shelf, elsewhere=elsewhere, policy=POLICY)
        assert {fleet[name].world.get("job") for name in fleet} == {True}, place
        assert [fleet[name].world for name in fleet] == [WELL, WELL], place
        set_once(fleet)
        assert set(outcomes(state).values()) <= {"changed", "ok"}, (place, outcomes(state))
        assert state.exit == 0, place
        assert [fleet[name].claims for name in fleet] == [{}, {}], place


async def test_cut_again_and_again_it_still_comes_to_its_end() -> None:
    fleet = two()
    shelf = await Cut(fleet, at_record=30).play()
    for _ in range(20):
        if fold(shelf.records).exit is not None:
            break
        cut = Cut(fleet, at_record=len(shelf.records) + 37)
        cut.shelf.records += shelf.records
        await cut.resume()
        shelf = cut.shelf
    assert fold(shelf.records).exit == 0
    assert [fleet[name].world for name in fleet] == [WELL, WELL]
    set_once(fleet)
