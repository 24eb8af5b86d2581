"""exec: what is shown, on which stream, and what the exit code says."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetfix.cli import run_command
from fleetfix.commands import HOST_PATH, Execute
from fleetfix.session import Take
from fleetfix.transports.scripted import Fleet
from fleetfix.views.command import LONGEST_LINE, Gathered, Kept, Lines, Live, shown
from fleetfix.views.paint import Paint
from tests.cli.conftest import Line
from tests.contract.place import processes_with, token

ALL = ("exec", "--hosts", "gpu*", "-i", "hosts.yaml")


@pytest.fixture
def talking(fleet: Fleet) -> Fleet:
    """Four hosts of which the third fails."""
    for name in fleet:
        fleet[name].executes(("out", b"same\n"))
    fleet["gpu03"].executes(("out", b"other\n"), ("err", b"oh no\n"), exit=3)
    return fleet


def test_lines_come_after_their_host_each_on_its_own_stream(fleetfix: Line, talking: Fleet) -> None:
    with talking:
        result = fleetfix(*ALL, "uptime")
    assert sorted(result.out.splitlines()) == ["gpu01: same", "gpu02: same", "gpu03: other", "gpu04: same"]
    said = result.err.splitlines()
    assert said[:2] == ["gpu03: oh no", "exit 3       gpu03"]
    assert said[2].startswith("4 hosts: 1 with exit 3, 3 ok · ")
    assert said[2].endswith(" · exit 2 (a host did not end well)")
    assert result.code == 2


def test_a_program_that_is_not_found_says_where_it_was_looked_for(fleetfix: Line, talking: Fleet) -> None:
    for name in talking:
        talking[name].executes(("err", b"sh: 1: nvcc: not found\n"), exit=127)
    with talking:
        result = fleetfix(*ALL, "-b", "nvcc")
    assert f"gpu[01-04] (4): not found in PATH, which is {HOST_PATH}" in " ".join(result.err.split())


def test_who_has_not_ended_is_named_where_no_output_tells(
    fleetfix: Line, talking: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_command, "PROGRESS_SECONDS", 0.05)
    monkeypatch.setattr(run_command, "QUIET", 0.0)

    async def slow(command: Execute, stdin: bytes, take: Take) -> int:
        await asyncio.sleep(0.3)
        return 0

    talking["gpu02"].program = slow
    with talking:
        result = fleetfix(*ALL, "uptime")
    assert "3 of 4 hosts ended; not yet: gpu02" in result.err


def test_words_are_joined_as_ssh_does_and_later_options_are_the_commands(
    fleetfix: Line, talking: Fleet
) -> None:
    with talking:
        fleetfix(*ALL, "uptime", "-p", "--hosts", "x")
        fleetfix(*ALL, "--timeout", "2m", "--", "echo $HOME | wc -c")
    first, second = talking["gpu01"].commands
    assert first == Execute(argv=("/bin/sh", "-c", "uptime -p --hosts x"))
    assert second == Execute(argv=("/bin/sh", "-c", "echo $HOME | wc -c"), timeout=120.0)


def test_gathered_output_stands_once_under_its_hosts(fleetfix: Line, talking: Fleet) -> None:
    with talking:
        result = fleetfix(*ALL, "-b", "uptime")
    rule = "-" * 15
    assert result.out.splitlines() == [
        *(rule, "gpu[01-02,04] (3)", rule, "same"),
        *(rule, "gpu03", rule, "other"),
    ]
    assert result.err.splitlines()[:4] == [rule, "gpu03, stderr", rule, "oh no"]


def test_json_has_one_object_a_host_with_the_exact_result(fleetfix: Line, talking: Fleet) -> None:
    talking["gpu01"].executes(("out", b"\xff\x00"), exit=-15)
    talking["gpu02"].refuse()
    with talking:
        result = fleetfix(*ALL, "--json", "uptime")
    told = {one["host"]: one for one in map(json.loads, result.out.splitlines())}
    assert {name: (one["result"], one["exit"], one["signal"]) for name, one in told.items()} == {
        "gpu01": ("signal", None, 15),
        "gpu02": ("unreachable", None, None),
        "gpu03": ("exit", 3, None),
        "gpu04": ("ok", 0, None),
    }
    assert base64.b64decode(told["gpu01"]["stdout_base64"]) == b"\xff\x00"
    assert (told["gpu03"]["stdout"], told["gpu03"]["stderr"]) == ("other\n", "oh no\n")
    assert told["gpu02"]["failure"]["message"] == "connection refused"


def test_no_host_is_lost_from_the_summary(fleetfix: Line, talking: Fleet) -> None:
    async def forever(command: Execute, stdin: bytes, take: Take) -> int:
        await asyncio.Event().wait()
        return 0

    talking["gpu01"].refuse("host_key", "another key than the one known")
    talking["gpu02"].program = forever
    with talking:
        result = fleetfix(*ALL, "--timeout", "50ms", "uptime")
    lines = result.err.splitlines()
    assert [line.split()[0:2] for line in lines[1:-1]] == [["exit", "3"], ["timed", "out"], ["host", "key"]]
    assert lines[-1].startswith("4 hosts: 1 with exit 3, 1 timed out, 1 host key, 1 ok · ")


def test_interrupted_every_host_is_accounted_for(fleetfix: Line, talking: Fleet) -> None:
    async def interrupt(command: Execute, stdin: bytes, take: Take) -> int:
        await take("out", b"begun\n")
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
        return 0

    talking["gpu02"].program = interrupt
    with talking:
        result = fleetfix(*ALL, "--forks", "1", "x")
    assert result.out.splitlines() == ["gpu01: same", "gpu02: begun"]
    said = result.err.splitlines()
    assert "cancelled    gpu02: it was ended as asked" in said
    assert "cancelled    gpu[03-04] (2): it was not begun" in said
    assert said[-1].startswith("4 hosts: 3 cancelled, 1 ok · ")
    assert result.code == 130


def test_hosts_are_hostile(fleetfix: Line, fleet: Fleet) -> None:
    for name in fleet:
        fleet[name].executes(("out", b"\x1b[2Jpwn\xff\tx\r\n"))
    with fleet:
        live, gathered = fleetfix(*ALL, "x"), fleetfix(*ALL, "-b", "x")
    assert live.out.splitlines()[0].endswith(": \\x1b[2Jpwn\\xff\tx")
    assert "\\x1b[2Jpwn\\xff\tx\n" in gathered.out
    assert "\x1b" not in live.out + gathered.out


def test_a_script_and_input_go_to_every_host(fleetfix: Line, fleet: Fleet, place: Path) -> None:
    async def cat(command: Execute, stdin: bytes, take: Take) -> int:
        await take("out", stdin)
        return 0

    for name in fleet:
        fleet[name].program = cat
    (place / "s.sh").write_bytes(b"#!/bin/sh\nexit 1\n")
    (place / "in").write_text("hello\n")
    with fleet:
        result = fleetfix(*ALL, "--script", "s.sh", "--stdin", "in", "a", "b c")
    assert sorted(result.out.splitlines()) == [f"gpu0{n}: hello" for n in (1, 2, 3, 4)]
    wanted = Execute(argv=("a", "b c"), script=b"#!/bin/sh\nexit 1\n", fed=True)
    assert fleet["gpu04"].commands == [wanted]


def test_runs_and_show_tell_of_it_and_going_back_passes_it_over(fleetfix: Line, talking: Fleet) -> None:
    with talking:
        fleetfix(*ALL, "--reason", "looking", "API_TOKEN=hunter2secret uptime")
        assert "(looking)" in fleetfix("runs").out
        shown = fleetfix("show", "last")
        assert "  command    API_TOKEN=" in shown.out
        assert "hunter2secret" not in shown.out
        assert "exit 3       gpu03" in shown.out
        watched = fleetfix("watch", "last")
        assert ("exit 3       gpu03" in watched.out, watched.code) == (True, 2)
        host = fleetfix("show", "last", "gpu03").out
        assert "exit 3 after 0.0 s: 6 B on stdout, 6 B on stderr, not kept" in host
        assert "no such run is in the journal yet" in fleetfix("rollback", "last").err
        run = json.loads(fleetfix("runs", "--json").out)["run"]
        refused = fleetfix("rollback", run, "--yes")
        assert (refused.code, "was a command" in refused.err) == (1, True)


def test_what_a_killed_controller_left_is_not_told_as_an_end(
    fleetfix: Line, talking: Fleet, place: Path
) -> None:
    with talking:
        fleetfix(*ALL, "--forks", "1", "uptime")
    with sqlite3.connect(place / "state" / "journal.db") as journal:
        kinds = [kind for (kind,) in journal.execute("SELECT kind FROM records ORDER BY seq")]
        last = [n for n, kind in enumerate(kinds, 1) if kind == "host_started"][2]
        journal.execute("DELETE FROM records WHERE seq > ?", (last,))
    for way in ("show", "watch"):
        told = fleetfix(way, "last").out.splitlines()
        assert told[-3:] == [
            "not known    gpu03",
            "not begun    gpu04",
            "4 hosts: 1 not known, 1 not begun, 2 ok · it did not finish: its controller ended",
        ]
        # It is a command: nothing goes on with it, and nothing goes back.
        assert not [line for line in told if "resume" in line or "rollback" in line]

    fleetfix("report", "last", "-o", "r.md")
    told = (place / "r.md").read_text()
    assert ("midway" in told, "fleetfix show" in told) == (True, True)
    assert "fleetfix resume" not in told


def test_hosts_that_did_not_end_well_are_named_however_many(fleetfix: Line, place: Path) -> None:
    names = [f"n{number:03}" for number in range(1, 200, 2)]
    (place / "many.yaml").write_text("transport: scripted\nhosts: [" + ", ".join(names) + "]\n")
    fleet = Fleet(names)
    for name in names:
        fleet[name].refuse("unreachable", "no answer")
    with fleet:
        result = fleetfix("exec", "--hosts", "*", "-i", "many.yaml", "--yes-hosts", "100", "uptime")
    missing = [name for name in names if name.removeprefix("n") not in result.err]
    assert (missing, result.code) == ([], 4)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "no command is given"),
        (("  ",), "no command is given"),
        (("--timeout", "soon", "x"), "--timeout 'soon' is no time"),
        (("--timeout", "0", "x"), "--timeout '0' is no time"),
        (("--script", "nope"), "--script nope: no such file or directory"),
        (("--stdin", "nope", "x"), "--stdin nope: no such file or directory"),
        (("--stdin", ".", "x"), "--stdin .: is a directory"),
        (("--yes-hosts", "3", "x"), "--yes-hosts 3, but 4 hosts would be reached"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_runs(
    words: tuple[str, ...], complaint: str, fleetfix: Line, talking: Fleet
) -> None:
    with talking:
        result = fleetfix(*ALL, *words)
    assert result.code == 1
    assert result.err.startswith(f"fleetfix: {complaint}")
    assert not talking["gpu01"].opened


def test_a_host_may_take_as_long_as_is_said(fleetfix: Line, place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        (place / "silent.yaml").write_text(f"port: {port}\nhosts: {{gpu01: {{address: 127.0.0.1}}}}\n")
        result = fleetfix(
            "exec", "-i", "silent.yaml", "--hosts", "*", "--connect-timeout", "1.5s", "--", "true"
        )
    assert result.code == 4
    assert "it takes the connection and gives no SSH greeting within 1.5 s" in result.err


def test_many_hosts_must_be_meant(fleetfix: Line, talking: Fleet, place: Path) -> None:
    folder = place / "home/.config/fleetfix"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("confirm_above = 3\n")
    with talking:
        refused = fleetfix(*ALL, "x")
        assert (refused.code, talking["gpu01"].opened) == (1, 0)
        assert "--yes-hosts 4" in refused.err
        assert fleetfix(*ALL, "--yes-hosts", "4", "x").code == 2


# -- as a process, on this machine ----------------------------------------------------------------


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(place: Path) -> Start:
    (place / "here.yaml").write_text("hosts:\n  here: {transport: local}\n")

    def begin(*words: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "fleetfix", "exec", "-i", "here.yaml", "--hosts", "here", *words]
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    return begin


def test_a_reader_that_leaves_ends_the_command(start: Start) -> None:
    process = start("yes")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"here: y\n"
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait(30) == 130
    assert said.startswith("cancelled    here: it was ended as asked\n")
    process.stderr.close()


def test_a_signal_ends_the_command_and_sees_it_gone(start: Start) -> None:
    word = token()
    process = start(f"trap '' TERM; setsid sleep {word} & echo begun; while :; do sleep {word}; done")
    assert process.stdout is not None
    assert process.stdout.readline() == b"here: begun\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert processes_with(word) == []


def test_memory_stays_flat_however_much_is_printed_and_slowly_read(start: Start) -> None:
    process = start("yes 0123456789012345678901234567890123456789 | head -c 100000000")
    assert process.stdout is not None
    count, most = 0, 0
    while data := os.read(process.stdout.fileno(), 1 << 20):
        count += len(data)
        most = max(most, _resident(process.pid))
    process.communicate(timeout=30)
    assert count > 100_000_000
    assert most < 120 << 20


def _resident(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()
    return int(pages[1]) * resource.getpagesize() if len(pages) > 1 else 0


# -- pieces ---------------------------------------------------------------------------------------


def test_lines_are_cut_where_they_end_whatever_the_pieces() -> None:
    data = ("één\n" * 100 + "x" * (3 * LONGEST_LINE) + "é\nrest").encode()
    for size in (1, 7, 1000, 10**6):
        lines = Lines()
        blocks = [lines.add(data[at : at + size]) for at in range(0, len(data), size)]
        found = b"".join([*blocks, lines.end()]).removesuffix(b"\n").split(b"\n")
        assert found[:100] == ["één".encode()] * 100
        assert b"".join(found[100:-1]).decode() == "x" * (3 * LONGEST_LINE) + "é"
        assert max(map(len, found)) <= LONGEST_LINE
        assert found[-1] == b"rest"
    assert shown(b"a\tb\r\n\rc\x1b\r") == "a\tb\n\\rc\\x1b"


class Sink:
    """Takes what a view writes."""

    def __init__(self) -> None:
        self.text = ""

    def words(self, text: str) -> None:
        self.text += text

    async def drained(self) -> None:
        pass


async def test_on_a_terminal_names_are_aligned_and_coloured_by_stream() -> None:
    out, err = Sink(), Sink()
    paint = Paint(True)
    live = Live(
        ["gpu1", "gpu10"],
        {"out": out, "err": err},  # type: ignore[dict-item]
        {"out": paint, "err": paint},
        aligned={"out": True, "err": False},
    )
    await live.take("gpu1", "out", b"a\nb\nhal")
    await live.take("gpu10", "out", b"c\n")
    await live.take("gpu1", "err", b"no\n")
    assert out.text == ("\x1b[1mgpu1:\x1b[0m  a\n\x1b[1mgpu1:\x1b[0m  b\n\x1b[1mgpu10:\x1b[0m c\n")
    assert err.text == "\x1b[31mgpu1:\x1b[0m no\n"
    live.end("gpu1")
    assert out.text.endswith("\x1b[1mgpu1:\x1b[0m  hal\n")


def test_what_is_gathered_is_cut_in_the_middle_and_said_to_be() -> None:
    kept = Kept(10)
    for piece in (b"01234567", b"89", b"abcdef"):
        kept.add(piece)
    assert kept.data == b"01234\n[... 6 bytes cut ...]\nbcdef"


async def test_equal_outputs_of_many_hosts_are_one_block() -> None:
    gathered = Gathered(1000)
    for n in range(1000):
        await gathered.take(f"gpu{n:04}", "out", b"odd\n" if n == 500 else b"even\n")
    first, second = gathered.blocks("out")
    assert first.splitlines()[1] == "gpu[0000-0499,0501-0999] (999)"
    assert second.splitlines()[1:] == ["gpu0500", "-" * 15, "odd"]
