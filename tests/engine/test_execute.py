"""One command over scripted hosts: every host ends with one result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fleetfix.commands import Ended, Execute
from fleetfix.engine.context import Interrupts
from fleetfix.engine.execute import CommandRequest, run_command
from fleetfix.errors import Failure
from fleetfix.events import CommandEnded, Record
from fleetfix.inventory import Host
from fleetfix.recorder import Recorder
from fleetfix.session import Feed, Stream, Take
from fleetfix.state import RunState, fold
from fleetfix.transports.scripted import Fleet
from fleetfix.transports.scripted_session import ScriptedSession
from fleetfix.views.command import command_summary

NAMES = ("gpu01", "gpu02", "gpu03", "gpu04")


class Kept:
    """A journal in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def append(self, records: Any) -> None:
        self.records += records

    def head(self, run: str) -> str:
        return ""


class Try:
    """One command on four hosts, and what was heard of it."""

    def __init__(self, *, forks: int = 64) -> None:
        self.fleet = Fleet(NAMES)
        for name in NAMES:
            self.fleet[name].executes(("out", name.encode() + b"\n"))
        self.journal = Kept()
        self.interrupts = Interrupts()
        self.heard: dict[str, bytes] = {}
        self.forks = forks

    async def take(self, host: str, stream: Stream, data: bytes) -> None:
        self.heard[host] = self.heard.get(host, b"") + data

    async def run(self, timeout: float | None = None) -> RunState:
        request = CommandRequest(
            run="r1",
            command=Execute(argv=("sh", "-c", "hostname"), timeout=timeout),
            said="hostname",
            hosts=tuple(Host(name=name, address=name, transport="scripted") for name in NAMES),
            inventory="i",
            operator="grace",
            controller="bastion",
            forks=self.forks,
        )
        with self.fleet:
            return await run_command(
                request, Recorder("r1", self.journal), self.take, interrupts=self.interrupts
            )


def outcomes(state: RunState) -> dict[str, str | None]:
    return {name: host.outcome for name, host in state.hosts.items()}


async def forever(command: Execute, stdin: bytes, take: Take) -> int:
    await asyncio.Event().wait()
    return 0


async def test_every_host_ends_with_its_own_exit_code_and_the_journal_has_it() -> None:
    one = Try()
    one.fleet["gpu02"].executes(("err", b"no\n"), exit=3)
    one.fleet["gpu03"].executes(exit=-9)
    state = await one.run()
    assert outcomes(state) == {"gpu01": "ok", "gpu02": "failed", "gpu03": "failed", "gpu04": "ok"}
    assert state.exit == 2
    assert one.heard == {"gpu01": b"gpu01\n", "gpu02": b"no\n", "gpu04": b"gpu04\n"}
    told = fold(one.journal.records)
    assert told.hosts == state.hosts
    ends = {r.event.host: r.event for r in one.journal.records if isinstance(r.event, CommandEnded)}
    assert {name: end.exit for name, end in ends.items()} == {
        "gpu01": 0,
        "gpu02": 3,
        "gpu03": -9,
        "gpu04": 0,
    }
    assert (ends["gpu01"].stdout_bytes, ends["gpu02"].stderr_bytes) == (6, 3)
    assert told.started is not None
    assert (told.started.command, told.started.playbook) == ("hostname", "exec")
    assert "no\\n" not in "".join(record.model_dump_json() for record in one.journal.records)


async def test_only_unreachable_is_told_apart_from_failed() -> None:
    one = Try()
    one.fleet["gpu04"].refuse()
    state = await one.run()
    assert outcomes(state)["gpu04"] == "unreachable"
    assert state.exit == 4


async def test_a_host_that_is_lost_while_it_runs_is_in_doubt_and_not_asked_again() -> None:
    one = Try()
    one.fleet["gpu01"].program = forever
    running = asyncio.ensure_future(one.run())
    await until(lambda: len(one.fleet["gpu01"].commands) > 0)
    one.fleet["gpu01"].vanish()
    state = await running
    assert outcomes(state)["gpu01"] == "in_doubt"
    assert "nothing tells how far" in state.hosts["gpu01"].finished.reason  # type: ignore[union-attr]
    assert len(one.fleet["gpu01"].commands) == 1
    assert state.exit == 2


async def test_a_command_that_nobody_keeps_any_more_is_in_doubt() -> None:
    one = Try()

    async def killed(
        self: ScriptedSession, command: Execute, take: Take, feed: Feed | None = None
    ) -> Ended:
        return Ended(failure=Failure(kind="command", message="the command's keeper was killed by signal 9"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedSession, "execute", killed)
        state = await one.run()
    assert set(outcomes(state).values()) == {"in_doubt"}
    assert "nothing tells how far" in state.hosts["gpu01"].finished.reason  # type: ignore[union-attr]
    assert "4 in doubt" in command_summary(state, state.exit)
    assert state.exit == 2


async def test_what_runs_too_long_is_ended() -> None:
    one = Try()
    one.fleet["gpu02"].program = forever
    state = await one.run(timeout=0.05)
    failure = state.hosts["gpu02"].command.failure  # type: ignore[union-attr]
    assert (outcomes(state)["gpu02"], failure and failure.kind) == ("failed", "timed_out")


@pytest.mark.parametrize("times", [1, 2])
async def test_an_interrupt_ends_what_runs_and_begins_no_other(times: int) -> None:
    one = Try(forks=2)
    for name in NAMES:
        one.fleet[name].program = forever
    running = asyncio.ensure_future(one.run())
    await until(lambda: all(one.fleet[name].commands for name in NAMES[:2]))
    for _ in range(times):
        one.interrupts.interrupt("SIGINT")
    state = await running
    assert set(outcomes(state).values()) == {"cancelled"}
    assert state.exit == 130
    assert not one.fleet["gpu03"].commands
    assert not one.fleet["gpu04"].commands


async def test_forks_bound_how_many_hosts_run_at_once() -> None:
    one, now, most = Try(forks=2), 0, 0

    async def counted(command: Execute, stdin: bytes, take: Take) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return 0

    for name in NAMES:
        one.fleet[name].program = counted
    assert (await one.run()).exit == 0
    assert most == 2


async def test_the_kill_switch_of_a_host_blocks_it() -> None:
    one = Try()
    one.fleet["gpu01"].disabled = "by grace"
    state = await one.run()
    assert outcomes(state)["gpu01"] == "blocked"
    assert not one.fleet["gpu01"].commands


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)
