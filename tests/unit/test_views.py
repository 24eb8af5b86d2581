"""What people and programs are shown: golden transcripts, and text of hosts that cannot do harm."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import struct
import termios
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.cli.telling import _whole as told_whole
from fleetfix.events import (
    EVENT,
    ChangeShown,
    ChangeStarted,
    Event,
    EvidenceFile,
    EvidenceKept,
    HostConnected,
    HostFinished,
    HostPlanned,
    HostReleased,
    HostSaid,
    HostStarted,
    Record,
    RunFinished,
    StepFinished,
    StepPlanned,
    StepStarted,
    StepWaited,
    WaveStarted,
)
from fleetfix.runs import RunRow, new_run_id
from fleetfix.state import RunState, after, fold
from fleetfix.views import amounts
from fleetfix.views.fit import broken, fit
from fleetfix.views.history import host_text, run_head, runs_text
from fleetfix.views.json_lines import JsonLines, json_line
from fleetfix.views.lines import SAID_A_SECOND, WAIT_LINES_EVERY, Lines, line_of
from fleetfix.views.neutral import many_lines, neutral, one_line
from fleetfix.views.out import Out
from fleetfix.views.paint import PLAIN, Paint
from fleetfix.views.plan import plan_text
from fleetfix.views.summary import summary_text, unfinished_text
from tests.cli import stories

GOLDEN = Path(__file__).parent.parent / "cli" / "golden"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200b-\u200f]")
SCREEN = 24


def progress(records: Iterable[Record], *, diff: bool = False) -> str:
    stream = io.StringIO()
    out = Out(stream)
    view, state = Lines(out, diff=diff), RunState()
    for record in records:
        state = after(state, record)
        view.see(record, state)
    out.close()
    return stream.getvalue()


def test_a_host_that_is_waited_for_is_named_in_a_pipe_too() -> None:
    stream, now = io.StringIO(), [0.0]
    out = Out(stream)
    view, state = Lines(out, clock=lambda: now[0]), RunState()
    events = [
        stories.started("gpu[01-03]"),
        HostConnected(host="gpu01", user="root", python="3.11.2"),
        HostPlanned(host="gpu02", pending=True),
        HostStarted(host="gpu02"),
        StepStarted(host="gpu02", step="wheels", attempt=1),
        StepWaited(host="gpu02", step="wheels", reason="for nvidia-smi"),
    ]
    for record in stories.records(events, every=0.0):
        now[0] = record.at
        state = after(state, record)
        view.see(record, state)
    began = now[0]
    view.still()
    now[0] = began + 29
    view.still()
    now[0] = began + 125
    view.still()
    view.still()
    out.close()
    told = stream.getvalue().splitlines()[-1]
    assert told.startswith("waits for ")
    for words in (
        "gpu01 (planning, 2 min 5 s)",
        "gpu02 (wheels, 2 min 5 s: for nvidia-smi)",
        "gpu03 (conn",
    ):
        assert words in told
    assert stream.getvalue().count("waits for ") == 1, "not said again at once, and not before"


def summary(records: Iterable[Record]) -> str:
    state = fold(records)
    assert state.exit is not None
    return summary_text(state, state.exit)


def golden(name: str, text: str) -> None:
    """Compare with the transcript; FLEETFIX_GOLDEN=write writes it, to be read and committed."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("FLEETFIX_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text()


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


# -- transcripts ----------------------------------------------------------------------------------


def test_progress_of_a_run_with_all_outcomes() -> None:
    golden("progress", progress(stories.all_outcomes(), diff=True))


def test_summary_of_a_run_with_all_outcomes() -> None:
    golden("summary", summary(stories.all_outcomes()))


def test_plan_with_differences() -> None:
    golden("plan", plan_text(fold(stories.all_outcomes()), diff=True))


def test_the_story_of_one_host() -> None:
    records = stories.all_outcomes()
    golden("host", f"{run_head(fold(records))}\n\n{host_text(records, 'gpu06')}")


def test_plan_and_summary_of_a_thousand_hosts() -> None:
    state = fold(stories.thousand())
    golden("thousand", f"{plan_text(state)}\n\n{summary_text(state, 2)}")


# -- what every one of them promises --------------------------------------------------------------


def test_a_thousand_hosts_fit_a_screen_with_failures_first() -> None:
    text = summary(stories.thousand())
    assert len(text.splitlines()) <= SCREEN
    assert text.startswith("rolled_back")
    assert "997 changed" in text.splitlines()[-1]


def test_a_thousand_hosts_that_all_fail_differently_fit_a_screen_too() -> None:
    events = [stories.started("gpu[0001-1000]")]
    letters = "abcdefghijklmnopqrstuvwxyz"
    for number, host in enumerate(stories.started("gpu[0001-1000]").hosts):
        word = letters[number % 26] + letters[number // 26 % 26] + letters[number // 676]
        events += stories.rolled_back(host, number, f"the {word} broke")  # type: ignore[arg-type]
    text = summary(stories.records([*events, RunFinished(exit=2)]))
    assert len(text.splitlines()) <= SCREEN
    assert "… and other messages on" in text
    assert "gpu[0011-1000] (990)" in text


def uneven_thousand() -> list[Record]:
    """1,000 hosts whose plans differ in numbers everywhere and in sense here and there."""
    hosts = "gpu[0001-1000]"
    events: list[Event] = [stories.started(hosts)]
    for number, host in enumerate(stories.started(hosts).hosts):
        plan = list(stories.planned(host, 1000 + number, number % 50 + 1))
        if number % 20 == 7:
            events += stories.unreachable(
                host, f"no answer from 10.0.{number // 250}.{number % 250} port 22"
            )
            continue
        if number % 40 == 8:
            why = f"{('alice', 'bob', 'carol')[number % 3]}'s job {number} holds {number % 7} of these GPUs"
            events += [StepPlanned(host=host, step="stop", pending=True, blocked=why)]
            events += [HostFinished(host=host, outcome="blocked", reason=why, step="stop")]
            continue
        if number % 3 == 0:
            events += stories.healthy(host)
            events += [HostFinished(host=host, outcome="ok")]
            continue
        files, packages = number % 90 + 1, number % 4 + 1
        many = f"repair {files} files of {packages} packages, remove {number % 17 + 2} packages"
        wheels = stories.WHEELS.model_copy(update={"summary": many})
        if number % 100 == 11:
            wheels = wheels.model_copy(update={"summary": f"{many}, and torch {'.'.join(str(number))}"})
        plan[4] = StepPlanned(host=host, step="wheels", pending=True, changes=(wheels,))
        events += plan
    return stories.records(events, every=0.01)


def test_a_thousand_plans_fit_a_screen_whatever_they_differ_in() -> None:
    text = plan_text(fold(uneven_thousand()))
    golden("plan-thousand", text)
    assert len(text.splitlines()) <= 40
    assert sum(len(line) > 160 for line in text.splitlines()) == 0


def test_a_dry_run_tells_of_hosts_that_are_given_up_once_and_folded() -> None:
    events: list[Event] = [stories.started("gpu[0001-1000]", dry=True)]
    for host in stories.started("gpu[0001-1000]").hosts:
        events += stories.unreachable(host, f"{host}: no answer within 15 s")
    records = stories.records([*events, RunFinished(exit=4)], every=0.01)
    assert "no answer" not in progress(records), "the plan tells it"
    plan = plan_text(fold(records))
    assert plan.count("no answer within 15 s") == 1
    assert len(plan.splitlines()) <= SCREEN


def test_of_two_long_plans_none_is_hidden_whose_members_are_mended_by_one() -> None:
    first, second = list(stories.planned("gpu01", 1)), list(stories.planned("gpu02", 2))
    for number, event in enumerate(second):
        if isinstance(event, StepPlanned):
            second[number] = event.model_copy(update={"notes": (*event.notes, "made by gpu01", "for all")})
    text = plan_text(fold(stories.records([stories.started("gpu[01-02]"), *first, *second])))
    assert len(text.splitlines()) > 24
    assert {"gpu01:", "gpu02:"} <= set(text.splitlines())


def test_a_survey_of_hosts_that_do_not_answer_is_no_silence() -> None:
    hosts = stories.started("gpu[01-30]").hosts
    events: list[Event] = [stories.started("gpu[01-30]", dry=True)]
    for host in hosts[:-1]:
        events += stories.unreachable(host, "no answer")
    events += stories.planned(hosts[-1], 7)
    told = progress(stories.records(events, every=1.0)).splitlines()
    counts = [line for line in told if line.startswith("planned ")]
    assert counts[0] == "planned 0 of 30 hosts, 5 given up"
    assert len(counts) >= 5
    assert not any("gpu01" in line for line in told[1:])


def test_of_three_long_plans_that_differ_in_counts_none_is_hidden() -> None:
    events: list[Event] = [stories.started("gpu[01-03]")]
    for number, host in enumerate(("gpu01", "gpu02", "gpu03"), 4):
        many = stories.WHEELS.model_copy(update={"summary": f"repair {number} files of {number} packages"})
        plan = list(stories.planned(host, number))
        plan[4] = StepPlanned(host=host, step="wheels", pending=True, changes=(many,) * 9)
        events += plan
    text = plan_text(fold(stories.records(events)))
    assert "gpu[01-03] (3):" in text.splitlines()
    assert text.count("repair 4 to 6 files of 4 to 6 packages") == 9
    assert "other plan" not in text


@pytest.mark.parametrize(("diff", "whole"), [(False, False), (True, True)])
def test_a_long_plan_of_a_run_that_went_on_is_told_where_it_is_asked_for(diff: bool, whole: bool) -> None:
    events = [record.event for record in uneven_thousand()]
    state = fold(stories.records([*events, RunFinished(exit=0)]))
    text = told_whole(state, driven=False, diff=diff, paint=PLAIN)
    assert ("nvidia-nccl-cu12 2.26.2" in text) is whole
    assert (f"fleetfix show {stories.RUN} --diff" in text) is not whole
    assert whole or len(text.splitlines()) <= SCREEN


def test_what_rests_on_the_word_of_its_author_is_said() -> None:
    run = stories.stop_change(1).model_copy(update={"summary": "run `x`"})
    planned = [
        StepPlanned(host="gpu01", step="stop", pending=True, changes=(run,), by_word=True),
        StepPlanned(host="gpu01", step="wheels", pending=False, own_check=True),
        HostPlanned(host="gpu01", pending=True),
    ]
    lines = plan_text(fold(stories.records([stories.started("gpu01"), *planned]))).splitlines()
    assert "by the author's word, verified by nothing: stop" in lines
    assert "asked by the author's own check, which ran on these hosts: wheels" in lines


def stopping(host: str, *ages: float, note: str = "") -> list[Event]:
    """A host whose jobs would be stopped, with the ages of their last checkpoints."""
    change = stories.stop_change(len(host)).model_copy(update={"job": "stops", "checkpoint_ages": ages})
    notes = (note,) if note else ()
    return [
        StepPlanned(host=host, step="stop", pending=True, changes=(change,), notes=notes),
        HostPlanned(host=host, pending=True),
    ]


def test_hosts_whose_checkpoints_differ_in_age_alone_are_one_and_the_oldest_is_named() -> None:
    events = [
        stories.started("gpu[01-05]"),
        *stopping("gpu01", 45.0),
        *stopping("gpu02", 3 * 3600.0 + 1201.0),
        *stopping("gpu03", 719.0),
        *stopping("gpu04", 60.0, 9 * 86400.0),  # two jobs
        *stopping("gpu05", note="no checkpoint of alice's job 4 (torchrun) was found"),
    ]
    text = plan_text(fold(stories.records(events)))
    assert "\ngpu[01-03] (3):\n" in text
    assert "8 GPUs, last checkpoint 45 s to 3 h 20 min ago  [compensable]" in text
    assert "8 GPUs, oldest last checkpoint 9 d ago  [compensable]" in text
    assert "note: no checkpoint of alice's job 4 (torchrun) was found" in text
    assert "oldest last checkpoint: 9 d ago, on gpu04; not known on gpu05" in text.splitlines()
    alone = plan_text(fold(stories.records([stories.started("gpu[01-02]"), *stopping("gpu01")])))
    assert "last checkpoint: known of no job that is stopped, gpu01" in alone.splitlines()


def test_a_plan_that_stops_no_job_says_nothing_of_checkpoints() -> None:
    planned = StepPlanned(host="gpu01", step="wheels", pending=True, changes=(stories.WHEELS,))
    events = [stories.started("gpu01"), planned, HostPlanned(host="gpu01", pending=True)]
    assert "checkpoint" not in plan_text(fold(stories.records(events)))


def test_a_stopped_job_heads_the_summary() -> None:
    assert summary(stories.all_outcomes()).splitlines()[0] == "JOB STOPPED, NOT RESTARTED: gpu[06-07] (2)"


def test_the_summary_says_how_to_go_on() -> None:
    text = summary(stories.all_outcomes())
    assert f"fleetfix show {stories.RUN} gpu06" in text
    assert f"go back on gpu[06-07]: fleetfix rollback {stories.RUN}" in text
    assert text.splitlines()[-1].endswith("exit 130 (interrupted)")


def test_a_run_that_did_nothing_is_two_lines() -> None:
    events = [stories.started("gpu[01-02]")]
    events += [event for host in ("gpu01", "gpu02") for event in stories.healthy(host)]  # type: ignore[misc]
    ends = [
        EVENT.validate_python({"kind": "host_finished", "host": f"gpu0{n}", "outcome": "ok"})
        for n in (1, 2)
    ]
    records = stories.records([*events, *ends, RunFinished(exit=0)])
    assert summary(records).splitlines() == [
        "ok               gpu[01-02] (2)",
        f"run {stories.RUN}: 2 ok · 11 s · exit 0",
    ]


def test_a_host_with_nothing_to_do_still_tells_what_was_found() -> None:
    found = {
        "kind": "step_planned",
        "host": "gpu01",
        "step": "wheels",
        "pending": False,
        "notes": ["a patch"],
    }
    slow = {"step": "speed", "verdict": "fail", "reason": "12.8K tok/s", "notes": []}
    planned = [EVENT.validate_python(found), EVENT.validate_python(found | slow)]
    ends = [EVENT.validate_python({"kind": "host_planned", "host": "gpu01", "pending": False})]
    text = plan_text(fold(stories.records([stories.started("gpu01"), *planned, *ends])))
    assert text.splitlines()[-3:] == [
        "gpu01: nothing to do",
        "  gpu01: wheels: note: a patch",
        "  gpu01: speed: fail: 12.8K tok/s",
    ]


def test_a_measurement_of_another_scope_is_not_compared() -> None:
    slow, fast = stories.measured(12_800), stories.measured(2_500).model_copy(update={"scope": "per_gpu"})
    steps = [
        {
            "kind": "step_finished",
            "host": "gpu01",
            "step": step,
            "result": "ok",
            "measured": one.model_dump(),
        }
        for step, one in (("before", slow), ("speed", fast))
    ]
    events = [stories.started("gpu01"), *(EVENT.validate_python(one) for one in steps), RunFinished(exit=0)]
    records = stories.records(events)
    assert "12.8K tok/s before, 2.50K tok/s/GPU after: not comparable" in summary(records)


# -- hostile text ---------------------------------------------------------------------------------

HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202egnp.exe\u2066\u200b\ud800\n[red]markup[/red]\x00"


def hostile(value: object) -> object:
    """The same story, with every text that a host could have said made hostile."""
    if isinstance(value, dict):
        free = (
            "message",
            "hint",
            "reason",
            "text",
            "stdout",
            "stderr",
            "summary",
            "before",
            "after",
            "blocked",
        )
        return {
            k: HOSTILE + v if k in free and isinstance(v, str) else hostile(v) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [hostile(item) for item in value]
    return value


def test_nothing_that_a_host_says_reaches_the_terminal_raw() -> None:
    records = [
        record.model_copy(update={"event": EVENT.validate_python(hostile(record.event.model_dump()))})
        for record in stories.all_outcomes()
    ]
    state = fold(records)
    texts = [
        progress(records, diff=True),
        plan_text(state, diff=True),
        summary_text(state, 2),
        run_head(state),
        *(host_text(records, host) for host in state.hosts),
        *(json_line(record) for record in records),
    ]
    for text in texts:
        assert not CONTROL.search(text)
        assert "\ud800" not in text
    assert "\\x1b[2J" in texts[0]


@given(st.text())
def test_neutral_text_is_one_harmless_line(text: str) -> None:
    line = neutral(text)
    assert not CONTROL.search(line)
    assert "\n" not in line
    line.encode()


def test_plain_words_stay_as_they_are() -> None:
    words = "torch läuft, 日本語, 12.8K → 20.1K tok/s, [bold]not markup[/bold], C:\\x1b"
    assert neutral(words) == words
    assert one_line("  a \n\t b ") == "a b"
    assert len(one_line("x" * 10_000)) == 600
    assert many_lines("a\tb\r\nc\n") == ["a   b", "c"]
    assert many_lines("") == []


# -- JSON -----------------------------------------------------------------------------------------


def test_json_lines_are_records_and_nothing_else() -> None:
    stream = io.StringIO()
    out = Out(stream)
    view, records = JsonLines(out), stories.all_outcomes()
    for record in records:
        view.see(record, RunState())
    out.close()
    read = [Record.model_validate_json(line) for line in stream.getvalue().splitlines()]
    assert read == records
    assert stream.getvalue().isascii()


def test_json_takes_what_is_no_unicode() -> None:
    line = json_line(stories.records([HostSaid(host="gpu01", step="s", text="\ud800\n")])[0])
    assert json.loads(line)["event"]["text"] == "\ud800\n"


# -- lines ----------------------------------------------------------------------------------------


def test_a_step_that_waits_long_is_told_of_now_and_then() -> None:
    waits = [
        EVENT.validate_python(
            {"kind": "step_waited", "host": "gpu01", "step": "idle", "reason": f"waits {n}"}
        )
        for n in range(60)
    ]
    told = progress(stories.records([stories.started("gpu01"), *waits])).count("waits: ")
    assert told == 60 / WAIT_LINES_EVERY


def test_a_host_that_talks_too_much_is_cut_off() -> None:
    said = [HostSaid(host="gpu01", step="s", text=str(n)) for n in range(500)]
    lines = progress(stories.records([stories.started("gpu01"), *said], every=0.0)).splitlines()
    assert len(lines) == 1 + SAID_A_SECOND


def test_a_failure_is_told_once() -> None:
    text = progress(
        stories.records([stories.started("gpu03"), *stories.rolled_back("gpu03", 1, "disk broke")])
    )
    assert text.count("wheels: failed: disk broke") == 1


def test_healthy_hosts_make_no_noise() -> None:
    events = [stories.started("gpu01"), *stories.healthy("gpu01")]
    assert len(progress(stories.records(events)).splitlines()) == 1


@pytest.mark.parametrize("record", stories.all_outcomes(), ids=lambda record: record.event.kind)
def test_every_event_is_one_line_or_none(record: Record) -> None:
    line = line_of(record, fold(stories.all_outcomes()))
    assert line is None or (line.strip() and "\n" not in line)


# -- colours --------------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_that_want_them() -> None:
    assert Paint.for_stream(_Terminal(), {}).on
    assert not Paint.for_stream(_Terminal(), {"NO_COLOR": "1"}).on
    assert Paint.for_stream(_Terminal(), {"NO_COLOR": ""}).on
    assert not Paint.for_stream(_Terminal(), {"TERM": "dumb"}).on
    assert not Paint.for_stream(io.StringIO(), {}).on


def test_colours_change_no_word() -> None:
    state = fold(stories.all_outcomes())
    colour = summary_text(state, 130, paint=Paint(True))
    assert re.sub(r"\x1b\[\d*m", "", colour) == summary_text(state, 130, paint=PLAIN)
    assert colour != summary_text(state, 130)


# -- a stream that never holds a run up -----------------------------------------------------------


def test_a_reader_that_stops_reading_does_not_hold_the_run_up() -> None:
    reading, writing = os.pipe()
    out = Out(os.fdopen(writing, "w"))

    def write() -> None:
        for _ in range(200):
            out.line("x" * 4096)

    run = threading.Thread(target=write)
    run.start()
    run.join(10.0)
    held_up = run.is_alive()
    received = bytearray()

    def drain() -> None:
        while len(received) < 200 * 4097 and (data := os.read(reading, 65536)):
            received.extend(data)

    reader = threading.Thread(target=drain)
    reader.start()
    run.join()
    out.close()
    reader.join()
    os.close(reading)
    out._stream.close()
    assert not held_up
    assert len(received) == 200 * 4097


def test_a_reader_that_leaves_ends_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    out = Out(stream)
    for _ in range(10):
        out.line("x" * 100_000)
    out.close()
    stream.close()


# -- history and amounts --------------------------------------------------------------------------


def row(**fields: object) -> RunRow:
    known: dict[str, object] = {
        "run": stories.RUN, "playbook": "purge-cu13", "began": 1_900_000_000.0, "ended": None, "exit": None,
        "dry": False, "hosts": ("gpu01", "gpu02"), "operator": "op", "controller": "desk", "reason": "",
    }  # fmt: skip
    return RunRow(**(known | fields))  # type: ignore[arg-type]


def test_the_list_of_runs_tells_running_from_dead() -> None:
    text = runs_text([
        row(driven=True),
        row(reason="incident 7"),
        row(exit=2, outcomes={"changed": 1, "failed": 1}),
        row(exit=0, dry=True),
    ])  # fmt: skip
    running, dead, ended, dry = text.splitlines()
    assert "running" in running
    assert "not finished" in dead
    assert dead.endswith("(incident 7)")
    assert ended.endswith("gpu[01-02]  1 failed, 1 changed")
    assert "dry run" in dry


def test_run_ids_sort_by_time_and_name_the_playbook() -> None:
    from datetime import UTC, datetime

    at = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert re.fullmatch(r"20300102-030405-purge-cu13-[0-9a-z]{4}", new_run_id("purge-cu13", at))
    assert re.fullmatch(r"20300102-030405-a-b-[0-9a-z]{4}", new_run_id("../A b!", at))
    assert len({new_run_id("x", at)[-4:] for _ in range(50)}) > 40


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (amounts.rate(12_800), "12.8K"),
        (amounts.rate(999.6), "1.00K"),
        (amounts.rate(9_996), "10.0K"),
        (amounts.rate(1_240_000), "1.24M"),
        (amounts.rate(87.25), "87.2"),
        (amounts.rate(0), "0.0"),
        (amounts.size(1023), "1023 B"),
        (amounts.size(1024), "1.0 KiB"),
        (amounts.size(1024**3 - 1), "1.0 GiB"),
        (amounts.duration(0.04), "0.0 s"),
        (amounts.duration(59.6), "1 min"),
        (amounts.duration(252), "4 min 12 s"),
        (amounts.duration(7_500), "2 h 5 min"),
        (amounts.count(1, "host"), "1 host"),
        (amounts.count(0, "host"), "0 hosts"),
    ],
)
def test_amounts_read_well(shown: str, expected: str) -> None:
    assert shown == expected


# -- hosts that were well all along -----------------------------------------------------------------


def well_all_along() -> list[Record]:
    rate = stories.measured(20_000)
    done = StepFinished(
        host="gpu01",
        step="speed",
        result="ok",
        measured=rate,
        proven=True,
        reason="20,000 tok/s, at least 19,000 wanted: recovered",
    )
    events = [
        *stories.healthy("gpu01"),
        done,
        HostFinished(host="gpu01", outcome="ok"),
        RunFinished(exit=0),
    ]
    return stories.records([stories.started("gpu01"), *events])


def test_a_host_that_was_never_slow_has_not_recovered() -> None:
    records = well_all_along()
    told = host_text(records, "gpu01")
    assert "at least 19,000 wanted: as fast as wanted" in told
    assert "recovered" not in told
    assert "speed" not in progress(records), "of a fleet most hosts are well: the summary tells of them"
    assert "speed            gpu01: 20.0K tok/s\n" in summary(records)
    assert "recovered" in progress(stories.all_outcomes())


# -- evidence ---------------------------------------------------------------------------------------


def kept(host: str, *missing: str) -> EvidenceKept:
    file = EvidenceFile(name="kernel.txt", bytes=2048, sha256="ab12" * 16)
    return EvidenceKept(
        host=host,
        step="reset",
        folder=f"/state/evidence/r/{host}/reset",
        files=(file,),
        cut=("kernel",),
        missing=missing,
        lacking=("pci: lspci is not on this host",),
    )


def collected(*hosts: str) -> list[Record]:
    hung = "nvidia-smi: nvidia-smi -q did not answer within 30 s"
    events: list[Event] = [stories.started(",".join(hosts))]
    for host in hosts:
        events += [*stories.healthy(host), kept(host, hung), HostFinished(host=host, outcome="ok")]
    return stories.records([*events, RunFinished(exit=0)])


def test_the_summary_says_where_evidence_lies_and_what_is_not_in_it() -> None:
    told = summary(collected("gpu01", "gpu02"))
    assert "evidence         gpu[01-02] (2): in /state/evidence/r/HOST\n" in told
    assert "gpu[01-02] (2) without nvidia-smi: nvidia-smi -q did not answer within 30 s\n" in told
    assert "in /state/evidence/r/gpu01/reset\n" in summary(collected("gpu01"))


def test_the_story_of_a_host_names_each_file_of_evidence() -> None:
    told = host_text(collected("gpu01"), "gpu01")
    assert "evidence kept in /state/evidence/r/gpu01/reset:" in told
    assert "kernel.txt (2.0 KiB, a part of it, sha256 ab12ab12ab12ab12)" in told
    assert "missing nvidia-smi: nvidia-smi -q did not answer" in told
    assert "not here pci: lspci is not on this host" in told


def test_the_plan_says_on_which_hosts_a_step_counts() -> None:
    change = ChangeShown(key="x", summary="write x", risk="reversible")
    planned = [
        StepPlanned(host="gpu01", step="first", pending=True, changes=(change,)),
        HostPlanned(host="gpu01", pending=True),
    ]
    steps = (("first", "the first host writes"), ("other", ""))
    begun = stories.started("gpu01", steps=steps, only={"first": "gpu01", "other": ""})
    told = plan_text(fold(stories.records([begun, *planned])))
    assert "first      the first host writes  [only on gpu01]" in told
    assert "on none of these hosts by their own `hosts`: other" in told


# -- the width of a terminal ------------------------------------------------------------------------


def test_long_lines_break_between_words_and_go_on_under_their_beginning() -> None:
    text = "  wheels     repair 21 files of 4 packages, remove 18 packages, and say so\nshort"
    assert broken(text, 44) == (
        "  wheels     repair 21 files of 4 packages,\n             remove 18 packages, and say so\nshort"
    )


@given(st.text(st.sampled_from("ab /-"), max_size=200).map(lambda text: "x" + text), st.integers(40, 90))
def test_breaking_loses_no_word_and_keeps_to_the_width(line: str, width: int) -> None:
    lines = broken(line, width).split("\n")
    assert " ".join(lines).split() == line.split()
    assert all(len(one.rstrip()) <= width or len(one.split()) == 1 for one in lines)


def test_colours_count_nothing_for_the_width() -> None:
    line = f"{Paint(True)('bad', 'halted')}: " + "w" * 30
    assert broken(line, 40) == line


def test_what_is_no_terminal_is_never_broken() -> None:
    assert fit("x " * 500, io.StringIO()) == "x " * 500


def test_what_was_measured_before_a_host_went_back_is_not_told_as_its_speed() -> None:
    events = [*stories.mended("gpu01", 1), HostFinished(host="gpu01", outcome="rolled_back")]
    state = fold(stories.records([stories.started("gpu01"), *events, RunFinished(exit=0)]))
    assert "speed" not in summary_text(state, 0)


def test_the_list_of_runs_has_no_empty_columns() -> None:
    row = RunRow("r-1", "p", 0.0, 1.0, 0, False, ("gpu01",), "me", "here", "why")
    (line,) = runs_text([row]).splitlines()
    assert "exit 0  gpu01  (why)" in line


def killed(*, starting: bool = False) -> list[Record]:
    """A run whose controller died: gpu01 was stopped and not started again, gpu02 never begun."""
    stop = stories.stop_change(4211).model_copy(update={"job": "stops"})
    start = ChangeShown(key="start", summary="start it again", risk="compensable", job="starts")
    events: list[Event] = [
        stories.started("gpu[01-02]"),
        *stories.planned("gpu01", 4211),
        *stories.planned("gpu02", 4212),
        WaveStarted(name="canary", hosts=("gpu01",)),
        HostStarted(host="gpu01"),
        *stories.changed("gpu01", "stop", stop),
        StepStarted(host="gpu01", step="idle"),
    ]
    if starting:
        events.append(
            ChangeStarted(host="gpu01", step="train", change=f"{stories.RUN}/train/1/0", shown=start)
        )
    return stories.records(events)


def test_a_job_that_is_left_stopped_heads_what_is_told_of_a_run_that_never_ended() -> None:
    lines = unfinished_text(fold(killed())).split("\n")
    assert lines[0] == "JOB STOPPED, NOT RESTARTED: gpu01"
    assert "left midway      gpu01: idle" in lines
    assert "not_started      gpu02" in lines
    assert f"go back: fleetfix rollback {stories.RUN}" in lines
    released = HostReleased(host="gpu01", operator="op", controller="desk")
    given_up = [*killed(), Record(run=stories.RUN, seq=99, at=0.0, event=released)]
    assert "go back" not in unfinished_text(fold(given_up))
    starting = unfinished_text(fold(killed(starting=True))).split("\n")
    assert starting[0] == "JOB STOPPED, NOT KNOWN TO RUN AGAIN: gpu01"


def test_json_is_one_line_a_record_on_a_narrow_terminal_too() -> None:
    ours, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    told = stories.records(stories.planned("gpu01", 7))
    with os.fdopen(terminal, "w") as stream:
        out = Out(stream)
        for record in told:
            JsonLines(out).see(record, RunState())
        out.line("a line for people is broken where the terminal ends, at a blank")
        out.close()
        lines = os.read(ours, 65536).decode().splitlines()
    os.close(ours)
    assert [json.loads(line)["seq"] for line in lines[: len(told)]] == [record.seq for record in told]
    assert len(lines) == len(told) + 2


def test_a_plan_says_whom_an_ordinary_users_run_holds_off() -> None:
    users = {"gpu01": "ann", "gpu02": "ann", "gpu03": "root"}
    changes = (ChangeShown(key="a", summary="turn a on", risk="reversible"),)
    events: list[Event] = [stories.started("gpu[01-03]")]
    for host, user in users.items():
        events += [
            HostConnected(host=host, user=user, python="3.11.2"),
            StepPlanned(host=host, step="wheels", pending=True, changes=changes),
            HostPlanned(host=host, pending=True),
        ]
    text = plan_text(fold(stories.records(events)))
    assert "gpu[01-02]: as ann, which holds off that user's runs alone" in text
    assert "as root" not in text
