"""A step's `timeout` bounds all of it: the questions, the change, its proof and its undo."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from fleetfix.commands import Completed, Read
from fleetfix.engine import hostrun
from fleetfix.engine.context import Interrupts
from fleetfix.errors import Failure, HostError
from fleetfix.policy import Policy, Share
from fleetfix.transports.scripted import Fleet, ScriptedHost
from fleetfix.transports.scripted_session import ScriptedSession
from tests.engine.toys import Shelf, Switch, play, step, toy_host

WITHIN = 0.1
ALL = Share.parse("100%")


def hangs_at(where: Literal["probe", "change", "verify", "undo"]) -> ScriptedHost:
    """A host that never answers one question, once its survey is over."""
    host, asked = toy_host(a=False, b=False), {"get": 0}

    async def get(args: dict[str, Any], world: dict[str, Any]) -> Any:
        if args["name"] == "a":
            return world["a"]
        asked["get"] += 1
        if (where, asked["get"]) in (("probe", 2), ("verify", 3)):
            await asyncio.Event().wait()
        return world["b"]

    async def set_(args: dict[str, Any], world: dict[str, Any]) -> None:
        on = args["to"]
        if args["name"] == "b" and ((where == "change" and on) or (where == "undo" and not on)):
            await asyncio.Event().wait()
        # What is to be undone is a change that did not reach its goal.
        world[args["name"]] = on and not (where == "undo" and args["name"] == "b")

    host.on("toy.get", get)
    host.on("toy.set", set_)
    return host


def steps() -> list[Any]:
    return [step("a", Switch(name="a")), step("b", Switch(name="b"), timeout=WITHIN)]


async def test_no_question_of_the_survey_has_more_time_than_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    async def read(self: ScriptedSession, step: str, reads: Sequence[Read]) -> tuple[Completed, ...]:
        asked.extend(one.timeout for one in reads)
        return await answer(self, step, reads)

    answer = ScriptedSession.read
    monkeypatch.setattr(ScriptedSession, "read", read)
    state, _ = await play(Fleet({"gpu01": toy_host(a=True, b=True)}), steps())
    assert state.exit == 0
    assert sorted(asked) == [WITHIN, Read(function="toy.get").timeout]


@pytest.mark.parametrize("forks", [1, 4])
async def test_a_host_that_hangs_anywhere_in_a_step_ends_in_time_and_holds_no_other_up(forks: int) -> None:
    sick = {f"gpu-{where}": hangs_at(where) for where in ("probe", "change", "verify")}
    fleet = Fleet({**sick, "gpu-well": toy_host(a=False, b=False)})
    policy = Policy(canary=0, batch=(ALL,), max_failures=ALL, max_unreachable=ALL, forks=forks)
    state, shelf = await play(fleet, steps(), policy=policy)
    assert state.hosts["gpu-well"].outcome == "changed"
    for where, doing in (("probe", ""), ("change", "turn b on"), ("verify", "turn b on")):
        done = state.hosts[f"gpu-{where}"].finished
        assert done is not None
        assert done.failure is not None
        assert (done.outcome, done.failure.kind, done.step) == ("rolled_back", "timed_out", "b")
        assert done.failure.message.startswith("not done within 0.1 s")
        assert doing in done.failure.message
        assert fleet[f"gpu-{where}"].world["a"] is False, "what was done before is undone"
    assert state.exit != 0
    assert_nothing_runs(shelf)


async def test_an_undo_that_hangs_ends_in_time_and_the_older_ones_are_undone_all_the_same() -> None:
    fleet = Fleet({"gpu01": hangs_at("undo")})
    state, shelf = await play(fleet, steps())
    done = state.hosts["gpu01"].finished
    assert done is not None
    assert done.failure is not None
    assert (done.outcome, done.failure.kind) == ("rollback_failed", "verify_failed")
    (stuck,) = (one.failure for one in shelf.of("change_undone") if not one.ok)
    assert stuck.kind == "timed_out"
    assert "undo of turn b on" in stuck.message
    assert "undo of turn b on" in done.reason, "both errors are told"
    assert fleet["gpu01"].world["a"] is False
    assert_nothing_runs(shelf)


def assert_nothing_runs(shelf: Shelf) -> None:
    """Every step and change that was begun has its end in the journal."""
    began = [(one.host, one.step) for one in shelf.of("step_started")]
    assert {(one.host, one.step) for one in shelf.of("step_finished")} == set(began)
    assert {one.host for one in shelf.of("host_started")} <= {one.host for one in shelf.of("host_finished")}
    assert shelf.events[-1].kind == "run_finished"


async def test_an_interrupt_does_not_wait_for_a_host_that_hangs_in_the_survey(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hostrun, "ANSWERS_WITHIN", 0.05)
    interrupts, hung = Interrupts(), toy_host(a=False)

    async def never(args: dict[str, Any], world: dict[str, Any]) -> None:
        interrupts.interrupt("SIGINT")
        await asyncio.Event().wait()

    hung.on("toy.get", never)
    fleet = Fleet({"gpu01": hung, "gpu02": toy_host(a=False)})
    state, shelf = await asyncio.wait_for(play(fleet, steps()[:1], interrupts=interrupts), 5)
    assert {name: host.outcome for name, host in state.hosts.items()} == dict.fromkeys(fleet, "not_started")
    assert state.exit == 130
    assert_nothing_runs(shelf)


async def test_a_way_back_that_the_operator_cuts_short_keeps_what_had_gone_wrong_first() -> None:
    interrupts, host = Interrupts(), toy_host(a=False, b=False)

    async def set_(args: dict[str, Any], world: dict[str, Any]) -> None:
        if args["name"] == "b":
            raise HostError(Failure(kind="no_space", message="no space left on /var"))
        if not args["to"]:
            interrupts.interrupt("SIGINT")
            interrupts.interrupt("SIGINT")
            await asyncio.Event().wait()
        world["a"] = True

    host.on("toy.set", set_)
    state, _ = await play(Fleet({"gpu01": host}), steps(), interrupts=interrupts)
    done = state.hosts["gpu01"].finished
    assert done is not None
    assert done.failure is not None
    assert (done.outcome, done.failure.kind) == ("cancelled", "no_space")
    assert done.reason == "no space left on /var; ended by the operator while it went back"
    assert "turn a on" in done.open
