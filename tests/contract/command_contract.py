"""What a command of the operator's is promised, whatever wire it goes over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleetfix.commands import Ended, Execute
from fleetfix.errors import HostError
from fleetfix.session import Feed, Session, Stream, Timers
from tests.contract.contract import SCATTER
from tests.contract.place import Place, eventually, kill, processes_with, read, token


class Heard:
    """Takes what a command prints."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.err = bytearray()

    async def take(self, stream: Stream, data: bytes) -> None:
        (self.out if stream == "out" else self.err).extend(data)


def sh(script: str, timeout: float | None = 60.0, *, fed: bool = False) -> Execute:
    return Execute(argv=("sh", "-c", script), timeout=timeout, fed=fed)


async def ran(session: Session, command: Execute, feed: Feed | None = None) -> tuple[Ended, Heard]:
    """Run a command to its end."""
    heard = Heard()
    return await session.execute(command, heard.take, feed), heard


class CommandRefusals:
    """Where no command runs; scripted hosts promise it too."""

    async def test_a_dry_session_runs_no_command(self, place: Place) -> None:
        session = await place.open(dry=True)
        with pytest.raises(HostError) as refused:
            await ran(session, sh("echo x"))
        assert refused.value.failure.kind == "blocked"

    async def test_no_command_runs_where_fleetfix_is_switched_off(self, place: Place) -> None:
        assert place.disable is not None
        place.disable("by grace")
        session = await place.open()
        with pytest.raises(HostError) as refused:
            await ran(session, sh("echo x"))
        assert refused.value.failure.kind == "disabled"
        assert "by grace" in refused.value.failure.message


class CommandContract(CommandRefusals):
    """Needs a host with processes and files."""

    async def test_bytes_of_both_streams_arrive_as_they_were_written(self, place: Place) -> None:
        session = await place.open()
        ended, heard = await ran(session, sh(r"printf '\000\377x'; printf 'a\n\033[31m' >&2; exit 7"))
        assert (ended.exit, ended.failure) == (7, None)
        assert (bytes(heard.out), bytes(heard.err)) == (b"\0\xffx", b"a\n\x1b[31m")

    async def test_a_megabyte_without_a_line_end_arrives_whole(self, place: Place) -> None:
        session = await place.open()
        ended, heard = await ran(session, sh(r"head -c 1000000 /dev/zero | tr '\000' a"))
        assert (ended.exit, bytes(heard.out)) == (0, b"a" * 1_000_000)

    async def test_output_comes_while_the_command_runs(self, place: Place) -> None:
        session = await place.open()
        heard = Heard()
        waits = sh(f"echo begun; until test -e {place.path('go')}; do sleep 0.02; done; echo over")
        running = asyncio.ensure_future(session.execute(waits, heard.take))
        await eventually(lambda: bytes(heard.out) == b"begun\n")
        Path(place.path("go")).touch()
        assert (await running).exit == 0
        assert bytes(heard.out) == b"begun\nover\n"

    async def test_a_signal_and_a_missing_program_are_answers(self, place: Place) -> None:
        session = await place.open()
        killed, _ = await ran(session, sh("kill -KILL $$"))
        missing, heard = await ran(session, Execute(argv=("/no/such/program",)))
        assert (killed.exit, missing.exit) == (-9, 127)
        assert b"No such file" in heard.err

    async def test_a_command_that_kills_its_keeper_has_no_exit_and_leaves_nothing(
        self, place: Place
    ) -> None:
        session = await place.open()
        word = token()
        ended, _ = await ran(
            session, sh(f"setsid sleep {word} & (sleep {word} &); kill -KILL $PPID; sleep {word}")
        )
        assert (ended.exit, ended.failure and ended.failure.kind) == (None, "command")
        assert processes_with(word) == []

    async def test_input_is_closed_unless_given_and_given_whole(self, place: Place) -> None:
        session = await place.open()
        data = bytes(range(256)) * 4096
        _, empty = await ran(session, sh("wc -c"))
        ended, fed = await ran(session, sh("cat", fed=True), lambda at, most: data[at : at + most])
        assert (empty.out.split(), ended.exit, bytes(fed.out)) == ([b"0"], 0, data)

    async def test_a_command_that_reads_no_input_ends_all_the_same(self, place: Place) -> None:
        session = await place.open()
        ended, heard = await ran(session, sh("head -c 3", fed=True), lambda at, most: b"x" * most)
        assert (ended.exit, bytes(heard.out)) == (0, b"xxx")

    @pytest.mark.parametrize("first", ["#!/bin/sh -e", "echo no first line names a program", "#! /bin/sh"])
    async def test_a_script_runs_by_its_first_line_and_leaves_nothing(
        self, place: Place, first: str
    ) -> None:
        session = await place.open()
        script = f"{first}\necho $1-$2\nls -l $0 >&2\n".encode()
        ended, heard = await ran(session, Execute(argv=("a", "b c"), script=script))
        assert ended.exit == 0
        assert heard.out.endswith(b"a-b c\n")
        assert b"memfd" in heard.err

    async def test_nothing_is_kept_on_the_host(self, place: Place) -> None:
        session = await place.open()
        await ran(session, sh("echo x"))
        await ran(session, Execute(script=b"echo x"))
        await session.close()
        assert [path for path in place.root.rglob("*") if "etc" not in path.parts] == []

    async def test_it_sees_nothing_of_the_operators_environment(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPERATOR_SECRET", "x")
        _, heard = await ran(await place.open(), sh("env"))
        names = {line.partition(b"=")[0].decode() for line in heard.out.splitlines()}
        assert names - {"PWD", "OLDPWD", "SHLVL", "_"} == {"PATH", "LC_ALL", "HOME", "USER", "LOGNAME"}

    async def test_the_host_does_not_run_ahead_of_who_reads(self, place: Place) -> None:
        session = await place.open()
        stuck = asyncio.Event()

        async def take(stream: Stream, data: bytes) -> None:
            await stuck.wait()

        steps = place.path("steps")
        script = f"while :; do head -c 65536 /dev/zero; echo x >>{steps}; done"
        running = asyncio.ensure_future(session.execute(sh(script), take))
        await eventually(lambda: len(place.lines("steps")) >= 4)
        (answer,) = await session.read("s", [read("echo", value="the line is free")])
        assert answer.value == "the line is free"
        await session.cancel()
        # What is on its way, 256 KiB, and what the pipe holds.
        assert len(place.lines("steps")) <= 6
        stuck.set()
        ended = await running
        assert ended.failure is not None
        assert ended.failure.kind == "cancelled"

    async def test_cancel_and_a_deadline_end_the_whole_tree(self, place: Place) -> None:
        session, word = await place.open(), token()
        script = SCATTER % {"token": word}
        heard = Heard()
        running = asyncio.ensure_future(session.execute(sh(script), heard.take))
        await eventually(lambda: len(processes_with(word)) >= 4)
        assert await session.cancel() == ()
        assert processes_with(word) == []
        assert (await running).failure is not None
        late, _ = await ran(session, sh(script, timeout=0.3))
        assert late.failure is not None
        assert late.failure.kind == "timed_out"
        assert processes_with(word) == []

    async def test_a_lost_controller_ends_the_command(self, place: Place) -> None:
        session, word = await place.open(), token()
        running = asyncio.ensure_future(session.execute(sh(f"sleep {word}"), Heard().take))
        await eventually(lambda: len(processes_with(word)) > 0)
        await session.close()
        await eventually(lambda: processes_with(word) == [])
        with pytest.raises(HostError):
            await running

    async def test_a_lost_runner_takes_the_command_with_it_and_it_is_not_run_again(
        self, place: Place
    ) -> None:
        session = await place.open(timers=Timers(reconnect_within=5.0))
        word = token()
        (answer,) = await session.read("", [read("who")])
        script = f"echo x >>{place.path('times')}; sleep {word}"
        running = asyncio.ensure_future(session.execute(sh(script), Heard().take))
        await eventually(lambda: len(processes_with(word)) > 0)
        kill(int(answer.value["runner"]))
        with pytest.raises(HostError) as lost:
            await running
        assert lost.value.failure.kind == "unreachable"
        await eventually(lambda: processes_with(word) == [])
        await session.read("", [read("who")])
        assert place.lines("times") == ["x"]

    async def test_what_it_leaves_running_is_left(self, place: Place) -> None:
        session, word = await place.open(), token()
        ended, heard = await ran(session, sh(f"setsid sleep {word} & echo started"))
        try:
            assert (ended.exit, bytes(heard.out)) == (0, b"started\n")
            await session.close()
            assert len(processes_with(word)) > 0
        finally:
            for pid in processes_with(word):
                kill(pid)
