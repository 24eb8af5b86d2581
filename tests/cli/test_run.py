"""From a command line to what happened on hosts, in the journal, on stdout and in the exit code."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from pathlib import Path

import pytest

from fleetfix.cli import consent
from fleetfix.cli.going_back import _ended
from fleetfix.commands import Completed, Json
from fleetfix.errors import Failure
from fleetfix.events import ChangeShown, Record
from fleetfix.inventory import Host
from fleetfix.journal import Journal
from fleetfix.state import HostState, RunState
from fleetfix.transports.scripted import Fleet, World
from tests.cli.conftest import Line, lamp_host
from tests.engine.test_evidence import packed
from tests.unit.terminal import Terminal

LAMPS = ("./lamps.yaml", "-i", "hosts.yaml")
ALL = ("--hosts", "gpu*")


def test_a_run_mends_hosts_and_a_second_one_touches_none(fleetfix: Line, fleet: Fleet, place: Path) -> None:
    with fleet:
        first = fleetfix("run", *LAMPS, *ALL, "--yes", "--reason", "incident 7")
        second = fleetfix("run", *LAMPS, *ALL, "--yes")
    assert (first.code, second.code) == (0, 0)
    assert all(host.world == {"left": True, "right": True} for host in fleet.hosts.values())
    assert first.out.startswith("changed          gpu[01-04] (4)\nrun ")
    assert second.out.startswith("ok               gpu[01-04] (4)\nrun ")
    assert "canary: gpu01" in first.err
    assert "gpu01 left: run `light left`" in first.err
    with Journal.open(place / "state") as journal:
        newest, oldest = journal.runs()
        assert (newest.run, oldest.run) == (second.run, first.run)
        assert (oldest.exit, oldest.reason, oldest.outcomes) == (0, "incident 7", {"changed": 4})
        assert not oldest.driven


def test_a_plan_changes_nothing_and_says_what_would_be_done(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        plain = fleetfix("plan", *LAMPS, *ALL, "--check")
        detailed = fleetfix("plan", *LAMPS, *ALL, "--detailed-exitcode", "--set", "second=left")
        dry = fleetfix("run", *LAMPS, *ALL, "--check")
    assert (plain.code, detailed.code, dry.code) == (0, 6, 0)
    assert all(host.runs("do") == [] for host in fleet.hosts.values())
    assert "gpu[01-04] (4):\n  left       light the left lamp\n             run `light left`" in plain.out
    assert "nothing was changed" in plain.out
    assert "order: canary of 1, then batches of 3; halts at the 1st host that fails" in plain.out


def test_a_plan_where_nothing_is_to_do_exits_0(fleetfix: Line, fleet: Fleet) -> None:
    for host in fleet.hosts.values():
        host.world.update(left=True, right=True)
    with fleet:
        assert fleetfix("plan", *LAMPS, *ALL, "--detailed-exitcode").code == 0


def test_a_failed_host_is_rolled_back_and_halts_the_run(fleetfix: Line, fleet: Fleet) -> None:
    fleet["gpu01"].world["broken"] = "right"
    with fleet:
        result = fleetfix("run", *LAMPS, *ALL, "--yes")
    assert result.code == 3
    assert fleet["gpu01"].world == {"broken": "right", "left": False, "right": False}
    assert all(fleet[name].runs("do") == [] for name in ("gpu02", "gpu03", "gpu04"))
    lines = result.out.splitlines()
    assert lines[0].startswith(
        "rolled_back      gpu01: right: the right lamp is \\x1b[31mbroken\\x1b[0m (a new bulb)"
    )
    assert "\x1b" not in result.out + result.err
    assert f"look closer: fleetfix show {result.run} gpu01" in lines


def test_json_is_records_on_stdout_and_nothing_else(fleetfix: Line, fleet: Fleet, place: Path) -> None:
    fleet["gpu02"].world["broken"] = "left"
    with fleet:
        result = fleetfix("run", *LAMPS, "--hosts", "@front", "--yes", "--json")
    records = [Record.model_validate_json(line) for line in result.out.splitlines()]
    assert result.err == ""
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert records[-1].event.kind == "run_finished"
    with Journal.open(place / "state") as journal:
        assert list(journal.records(records[0].run)) == records


def test_json_and_an_error_keep_stdout_clean(fleetfix: Line) -> None:
    result = fleetfix("run", *LAMPS, "--hosts", "nosuch", "--yes", "--json")
    assert (result.code, result.out) == (1, "")


def test_settings_policy_and_exclusion_of_the_command_line_count(
    fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    options = ("--canary", "2", "--batch", "1,50%", "--max-failures", "10%", "--forks", "7", "-x", "gpu04")
    with fleet:
        result = fleetfix("run", *LAMPS, "--limit", "gpu*", *options, "--set", "second=left", "--yes")
    with Journal.open(place / "state") as journal:
        started = next(journal.records(result.run)).event
    assert started.kind == "run_started"
    assert started.hosts == ("gpu01", "gpu02", "gpu03")
    assert started.settings == {"second": "left"}
    policy = started.policy
    assert (policy.canary, policy.forks, str(policy.max_failures)) == (2, 7, "10%")
    assert [str(share) for share in policy.batch] == ["1", "50%"]
    assert str(policy.max_unreachable) == "50%"
    assert "right" not in fleet["gpu01"].world


def test_patterns_that_are_given_twice_are_taken_together(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        result = fleetfix("run", *LAMPS, "-l", "gpu[01-03]!gpu03", "--limit", "gpu[03-04]", "--yes")
        assert "gpu[01-04] (4)" in result.out
        result = fleetfix("plan", *LAMPS, *ALL, "-x", "gpu01", "-x", "gpu[02-03]")
        assert result.err.splitlines()[0].endswith("lamps on gpu04 (dry run: nothing is changed)")
        assert fleetfix("rollback", "last", "-l", "gpu01", "-l", "gpu04").out.count("gpu[01,04]") == 1


# -- the operator's word --------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """At a terminal, where these lines are typed one after the other; then its end."""
    typed: list[str] = []

    async def line() -> str:
        return typed.pop(0) if typed else ""

    monkeypatch.setattr(consent, "at_terminal", lambda: True)
    monkeypatch.setattr(consent, "_typed", line)
    return typed


def test_an_interrupted_survey_connects_to_no_further_host(fleetfix: Line, fleet: Fleet) -> None:
    def asked(args: dict[str, Json], world: World) -> Completed:
        os.kill(os.getpid(), signal.SIGINT)
        return Completed(exit=1)

    fleet["gpu01"].on("shell.check", asked)
    with fleet:
        result = fleetfix("plan", *LAMPS, *ALL, "--forks", "1")
    assert result.code == 130
    assert (fleet["gpu03"].opened, fleet["gpu04"].opened) == (0, 0)
    assert " not_started" in result.out.splitlines()[-1]
    assert "unreachable" not in result.out


@pytest.mark.parametrize(
    ("typed", "runs"), [("y\n", True), ("YES\n", True), ("\n", False), ("", False), ("no\n", False)]
)
def test_at_a_terminal_a_run_is_asked_for_with_its_plan_and_before_any_change(
    typed: str, runs: bool, answers: list[str], fleetfix: Line, fleet: Fleet
) -> None:
    fleet["gpu04"].world.update(left=True, right=True)
    answers.append(typed)
    with fleet:
        result = fleetfix("run", *LAMPS, *ALL)
    plan, question = result.err.index("plan: lamps on gpu[01-04]"), result.err.index("go on with")
    assert plan < result.err.index("run `light left`") < question
    assert "go on with 3 hosts gpu[01-03]? [y/N] " in result.err
    assert result.err.count("plan: ") == 1
    assert result.code == (0 if runs else 3)
    assert bool(fleet["gpu01"].runs("do")) == runs
    if not runs:
        assert "not_started      gpu[01-03] (3)" in result.out
        assert result.out.splitlines()[-1].endswith("exit 3 (not confirmed)")
        assert "halted: not confirmed; nothing was changed" in result.err


def test_where_nothing_is_to_do_nobody_is_asked(answers: list[str], fleetfix: Line, fleet: Fleet) -> None:
    for host in fleet.hosts.values():
        host.world.update(left=True, right=True)
    with fleet:
        result = fleetfix("run", *LAMPS, *ALL)
    assert (result.code, "go on with" in result.err) == (0, False)


LOOK = """
name: look
steps:
  - id: keep
    collect: {what: light}
"""


@pytest.mark.parametrize("above", [50, 2])
def test_what_can_change_nothing_runs_without_a_yes(
    fleetfix: Line, fleet: Fleet, place: Path, above: int
) -> None:
    (place / "look.yaml").write_text(LOOK)
    (place / "home/.config/fleetfix").mkdir(parents=True)
    (place / "home/.config/fleetfix/config.toml").write_text(f"confirm_above = {above}\n")
    for host in fleet.hosts.values():
        host.on("evidence.take", lambda args, world: packed(f"{args['item']}\n"))
    with fleet:
        looked = fleetfix("run", "./look.yaml", "-i", "hosts.yaml", *ALL)
        mended = fleetfix("run", *LAMPS, *ALL)
    assert looked.code == 0, looked.err
    assert "ok               gpu[01-04]" in looked.out
    assert mended.code == 1
    assert all(host.runs("do") == [] for host in fleet.hosts.values())


def test_json_at_a_terminal_asks_on_stderr(answers: list[str], fleetfix: Line, fleet: Fleet) -> None:
    answers.append("y\n")
    with fleet:
        result = fleetfix("run", *LAMPS, *ALL, "--json")
    assert result.code == 0
    assert "plan: lamps" in result.err
    assert all(json.loads(line) for line in result.out.splitlines())


@pytest.mark.parametrize(
    ("words", "typed", "code"),
    [
        ((), "4\n", 0),
        ((), "y\n", 3),
        (("--yes",), "", 1),
        (("--yes-hosts", "4"), "", 0),
        (("--yes", "--yes-hosts", "4"), "", 0),
        (("--yes", "--yes-hosts", "5"), "", 1),
    ],
)
def test_above_the_limit_the_number_of_hosts_must_be_said(
    words: tuple[str, ...],
    typed: str,
    code: int,
    answers: list[str],
    fleetfix: Line,
    fleet: Fleet,
    place: Path,
) -> None:
    config = place / "home" / ".config" / "fleetfix" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("confirm_above = 3\n")
    answers.append(typed)
    with fleet:
        assert fleetfix("run", *LAMPS, *ALL, *words).code == code
    assert (fleet["gpu01"].opened > 0) == (code != 1)
    assert bool(fleet["gpu01"].runs("do")) == (code == 0)


@pytest.mark.parametrize(("typed", "undone"), [("y\n", True), ("\n", False), ("", False)])
def test_a_rollback_at_a_terminal_is_asked_for(
    typed: str, undone: bool, fleetfix: Line, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "@front", "--yes")
        monkeypatch.setattr(consent, "at_terminal", lambda: True)
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        back = fleetfix("rollback", "last")
        assert back.code == (0 if undone else 1)
        assert f"undo run {done.run} on 2 hosts gpu[01-02]? [y/N] " in back.err
        assert "gpu[01-02] (2): undo: run `light left`" in back.err
        assert fleet["gpu01"].world["left"] is not undone
        again = fleetfix("rollback", "last", "--yes")
        assert (again.code, "[y/N]" in again.err) == (0, False)
    assert fleet["gpu01"].world["left"] is False


def test_going_back_says_what_becomes_of_the_job_that_the_run_started() -> None:
    def host(name: str, *jobs: str) -> HostState:
        shown = [ChangeShown(key="k", summary="s", risk="compensable", job=job) for job in jobs]  # type: ignore[arg-type]
        return HostState(name, changes={f"r/s/1/{n}": one for n, one in enumerate(shown)})

    states = [
        host("gpu01", "stops", "starts"),
        host("gpu02", "starts"),
        host("gpu03", "stops"),
        host("gpu04"),
    ]
    known = RunState(run="r", hosts={one.name: one for one in states})
    hosts = tuple(Host(name=one.name, address=one.name) for one in states)
    assert list(_ended(known, hosts)) == [
        "gpu01: the job that the run started is ended, and is started again as it ran before",
        "gpu02: the job that the run started is ended, and nothing is started in its place",
    ]


def at_a_real_terminal(place: Path, typed: bytes, *words: str, term: str = "xterm") -> tuple[int, str]:
    """Run fleetfix on a terminal of its own, 80 by 24, and type this at its question."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.environ["TERM"] = term
        os.execv(sys.executable, [sys.executable, "-m", "fleetfix", *words])
    shown = b""
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:
            break
        if not data:
            break
        shown += data
        if typed and b"[y/N] " in shown:
            os.write(terminal, typed)
            typed = b""
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("typed", "code", "changed"),
    [(b"y\n", 0, True), (b"n\n", 3, False), (b"\x03", 3, False), (b"\x04", 3, False)],
)
def test_on_a_real_terminal_yes_is_yes_and_all_else_is_no(
    typed: bytes, code: int, changed: bool, place: Path
) -> None:
    (place / "mark.yaml").write_text(
        "name: mark\nsteps:\n  - id: mark\n"
        f"    command: {{argv: [touch, {place}/mark], check: [test, -e, {place}/mark]}}\n"
    )
    (place / "here.yaml").write_text("hosts:\n  here: {transport: local}\n")
    ended, shown = at_a_real_terminal(place, typed, "run", "./mark.yaml", "-i", "here.yaml", "-l", "here")
    assert (ended, (place / "mark").exists()) == (code, changed), shown


@pytest.mark.timeout(60)
@pytest.mark.parametrize("typed", [b"y\n", b""])
def test_at_a_real_terminal_the_run_is_live_and_leaves_its_plan_and_summary(
    typed: bytes, place: Path
) -> None:
    slow_mark(place)
    words = ("run", "./mark.yaml", "-i", "here.yaml", "-l", "here", *(() if typed else ("--yes",)))
    ended, shown = at_a_real_terminal(place, typed, *words)
    assert ended == 0, shown
    assert "1 at work" in shown
    terminal = Terminal(80, 24)
    terminal.write(shown)
    text = "\n".join(terminal.text)
    assert [line.split()[0] for line in terminal.text if line][:2] == ["run", "plan:"]
    assert "at work" not in text
    assert "exit 0" in text.splitlines()[-1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("term", "words"), [("dumb", ()), ("xterm", ("--progress", "plain"))])
def test_where_no_screen_is_wanted_there_are_lines(term: str, words: tuple[str, ...], place: Path) -> None:
    slow_mark(place)
    ended, shown = at_a_real_terminal(
        place, b"", "run", "./mark.yaml", "-i", "here.yaml", "-l", "here", "--yes", *words, term=term
    )
    assert ended == 0, shown
    assert "canary: here" in shown
    assert "at work" not in shown
    assert not re.search(r"\x1b\[\d*[A-LN-Z]", shown)


def slow_mark(place: Path) -> None:
    """A playbook that takes long enough to be looked at."""
    mark = place / "mark"
    (place / "mark.yaml").write_text(
        "name: mark\nsteps:\n  - id: mark\n"
        f"    shell: {{run: 'sleep 1.2; touch {mark}', check: 'test -e {mark}', undo: 'rm {mark}'}}\n"
    )
    (place / "here.yaml").write_text("hosts:\n  here: {transport: local}\n")


def test_a_wrong_configuration_is_told_with_its_file(fleetfix: Line, place: Path) -> None:
    config = place / "home" / ".config" / "fleetfix" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("confirm_abov = 3\n")
    result = fleetfix("run", *LAMPS, *ALL, "--yes")
    assert result.code == 1
    assert "config.toml: unknown key confirm_abov: did you mean confirm_above?" in result.err


# -- history and the way back ---------------------------------------------------------------------


def test_a_run_is_told_from_the_journal(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, *ALL, "--yes")
    runs = fleetfix("runs")
    assert runs.out.startswith(done.run)
    assert "4 changed" in runs.out
    listed = json.loads(fleetfix("runs", "--json").out)
    assert (listed["run"], listed["exit"], listed["outcomes"]) == (done.run, 0, {"changed": 4})
    whole = fleetfix("show", "last")
    assert "changed          gpu[01-04] (4)" in whole.out
    host = fleetfix("show", done.run, "gpu02")
    assert "run `light left` [compensable]" in host.out
    assert "left lit" in host.out
    assert "gpu01" not in host.out.split("\n\n", 2)[2]
    assert [json.loads(line)["seq"] for line in fleetfix("show", done.run, "--json").out.splitlines()][
        :2
    ] == [1, 2]


def test_asking_for_an_unknown_host_or_run_says_so(fleetfix: Line, fleet: Fleet) -> None:
    assert "no such run is in the journal yet" in fleetfix("show", "last").err
    with fleet:
        fleetfix("run", *LAMPS, *ALL, "--yes")
    result = fleetfix("show", "last", "gpu9")
    assert (result.code, "has no host gpu9" in result.err) == (1, True)
    assert fleetfix("show", "2099").code == 1


def test_a_rollback_undoes_what_the_run_did(
    fleetfix: Line, fleet: Fleet, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet["gpu03"].world["left"] = True
    with fleet:
        done = fleetfix("run", *LAMPS, *ALL, "--yes")
        monkeypatch.chdir("/")
        back = fleetfix("rollback", done.run[:20])
    assert back.code == 0
    assert back.out.splitlines()[0] == "rolled_back      gpu[01-04] (4)"
    assert "look closer" not in back.out
    assert fleet["gpu01"].world == {"left": False, "right": False}
    assert fleet["gpu03"].world == {"left": True, "right": False}
    told = fleetfix("show", done.run, "gpu01").out
    assert "run `light left` [compensable] undone" in told


def test_a_rollback_that_fails_says_so(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "@front", "--yes")
        fleet["gpu02"].world["stuck"] = "left"
        back = fleetfix("rollback", "last")
    assert back.code == 2
    assert back.out.splitlines()[0].startswith("rollback_failed  gpu02: the left lamp stays lit")
    assert "gpu02 left: NOT undone" in back.err
    assert fleet["gpu02"].world["right"] is False
    assert done.run in back.out.splitlines()[-1]
    shown = fleetfix("show", done.run).out.splitlines()
    assert f"go back on gpu02: fleetfix rollback {done.run}" in shown
    assert "exit 2" in shown[-1]


def test_a_host_that_cannot_be_taken_back_any_more_says_what_is_missing(
    fleetfix: Line, fleet: Fleet
) -> None:
    with fleet:
        fleetfix("run", *LAMPS, "--hosts", "@front", "--yes")
        fleet["gpu02"].gone["left"] = "the hold is gone"
        back = fleetfix("rollback", "last")
    assert back.code == 2
    (said,) = [line for line in back.err.splitlines() if "left as it is" in line]
    assert said.startswith("gpu02")
    assert "cannot be undone any more: run `light left`: the hold is gone" in said
    (why,) = [line for line in back.out.splitlines() if line.startswith("left as it is")]
    assert "gpu02: cannot be undone any more: run `light left`: the hold is gone" in why
    assert (fleet["gpu01"].world["left"], fleet["gpu02"].world["left"]) == (False, True)


def test_a_rollback_keeps_to_the_hosts_that_the_run_touched(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "@front", "--yes")
        strange = fleetfix("rollback", done.run, "--hosts", "gpu03")
        one = fleetfix("rollback", done.run, "--hosts", "gpu02")
    assert (strange.code, "did not touch gpu03" in strange.err) == (1, True)
    assert one.code == 0
    assert fleet["gpu01"].world["left"] is True
    assert fleet["gpu02"].world["left"] is False


def test_a_run_of_another_machine_is_undone_by_its_whole_id(
    fleetfix: Line, fleet: Fleet, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "gpu01", "--yes")
        monkeypatch.setenv("FLEETFIX_STATE_DIR", str(place / "elsewhere"))
        unknown = fleetfix("rollback", done.run, "-i", "hosts.yaml")
        back = fleetfix("rollback", done.run, "-i", "hosts.yaml", "--hosts", "gpu01")
    assert (unknown.code, "--hosts" in unknown.err) == (1, True)
    assert back.code == 0
    assert fleet["gpu01"].world == {"left": False, "right": False}
    assert "1 rolled_back" in fleetfix("runs").out


def test_nothing_touched_is_nothing_to_undo(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        dry = fleetfix("plan", *LAMPS, *ALL)
        result = fleetfix("rollback", dry.run)
    assert (result.code, "touched no host" in result.err) == (1, True)


def test_the_last_run_to_undo_is_never_a_dry_one(fleetfix: Line, fleet: Fleet) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "gpu01", "--yes")
        dry = fleetfix("plan", *LAMPS, *ALL)
        assert fleetfix("rollback", "last").run == done.run
    assert fleetfix("show", "last").out.startswith(f"run {dry.run}")


def test_a_run_whose_controller_died_is_told_as_unfinished(
    fleetfix: Line, fleet: Fleet, place: Path
) -> None:
    with fleet:
        done = fleetfix("run", *LAMPS, "--hosts", "@front", "--yes")
    dead = "20300101-000000-lamps-dead"
    with Journal.open(place / "state") as journal:
        records = [record.model_copy(update={"run": dead}) for record in journal.records(done.run)]
        kinds = [record.event.kind for record in records]
        journal.append(records[: kinds.index("change_started") + 1])
    listed = next(line for line in fleetfix("runs").out.splitlines() if line.startswith(dead))
    assert "not finished" in listed
    told = fleetfix("show", dead[:8]).out.splitlines()
    assert "it did not finish: its controller ended" in told
    assert "left midway      gpu01: left: run `light left`" in told
    assert f"go back: fleetfix rollback {dead}" in told


# -- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_first_signal_starts_no_further_host(
    number: signal.Signals, fleetfix: Line, fleet: Fleet
) -> None:
    fleet["gpu01"].world["hook"] = lambda: os.kill(os.getpid(), number)
    with fleet:
        result = fleetfix("run", *LAMPS, *ALL, "--yes")
    assert result.code == 130
    assert f"{number.name}: hosts at work go to a safe point" in result.err
    assert all(fleet[name].runs("do") == [] for name in ("gpu02", "gpu03", "gpu04"))
    assert result.out.splitlines()[-1].endswith("exit 130 (interrupted)")


def test_a_second_signal_cancels_what_runs(fleetfix: Line, fleet: Fleet) -> None:
    async def forever(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)

    fleet["gpu01"].on("shell.run", forever)
    with fleet:
        result = fleetfix("run", *LAMPS, *ALL, "--yes")
    assert result.code == 130
    assert "SIGINT again: everything that runs is cancelled now" in result.err
    assert "cancelled        gpu01" in result.out


def test_an_interrupt_at_the_question_does_nothing(
    fleetfix: Line, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupt() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)
        return "y"

    monkeypatch.setattr(consent, "at_terminal", lambda: True)
    monkeypatch.setattr(consent, "_typed", interrupt)
    with fleet:
        result = fleetfix("run", *LAMPS, *ALL)
    assert result.code == 3
    assert all(host.runs("do") == [] for host in fleet.hosts.values())


def test_signals_mean_what_they_did_before_once_the_run_is_over(fleetfix: Line, fleet: Fleet) -> None:
    before = signal.getsignal(signal.SIGINT)
    with fleet:
        fleetfix("run", *LAMPS, *ALL, "--yes")
    assert signal.getsignal(signal.SIGINT) == before


def test_hosts_that_cannot_be_reached_exit_4(fleetfix: Line) -> None:
    with Fleet({"gpu01": lamp_host()}) as fleet:
        result = fleetfix("run", *LAMPS, "--hosts", "@front", "--yes")
    assert result.code == 4
    assert "unreachable      gpu02: " in result.out
    assert fleet["gpu01"].world["left"] is True


def test_a_journal_that_fails_stops_the_run_before_the_change(
    fleetfix: Line, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleetfix.errors import JournalError

    keep = Journal.append

    def fail(journal: Journal, records: list[Record]) -> None:
        if any(record.event.kind == "change_started" for record in records):
            raise JournalError("the journal cannot be written: no space is left")
        keep(journal, records)

    monkeypatch.setattr(Journal, "append", fail)
    with fleet:
        result = fleetfix("run", *LAMPS, *ALL, "--yes")
    assert result.code == 1
    assert result.err.splitlines()[-1] == "fleetfix: the journal cannot be written: no space is left"
    assert all(host.runs("do") == [] for host in fleet.hosts.values())


def test_a_host_that_refuses_is_blocked_with_its_words(fleetfix: Line, fleet: Fleet) -> None:
    fleet["gpu01"].on("shell.check", Failure(kind="blocked", message="a container: mend its image"))
    with fleet:
        result = fleetfix("plan", *LAMPS, "--hosts", "@front")
    assert "blocked: gpu01: left: a container: mend its image" in result.out
    assert result.code == 2
