"""The live view: what it shows of a run, and that it leaves nothing behind on the terminal."""

from __future__ import annotations

import asyncio
import io
import os
import re
import time
from collections.abc import Iterable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetfix.events import (
    EVENT,
    Event,
    HostFinished,
    HostSaid,
    HostStarted,
    NetworkLost,
    Record,
    RollbackStarted,
    RunFinished,
    RunHalted,
    RunInterrupted,
    RunResumed,
    SoakStarted,
    StepStarted,
    StepWaited,
    WaveStarted,
)
from fleetfix.state import RunState, after, fold
from fleetfix.views.at_work import Row, rows
from fleetfix.views.live import Live, Watched, screen
from fleetfix.views.out import Out
from fleetfix.views.paint import Paint
from fleetfix.views.region import Region, clipped, columns, spread
from tests.cli import stories
from tests.unit.terminal import Terminal
from tests.unit.test_views import CONTROL, golden, hostile

NOW = stories.BEGAN + 600


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def watched(records: Iterable[Record]) -> Watched:
    seen, state = Watched(), RunState()
    for record in records:
        state = after(state, record)
        seen.see(record, state)
    return seen


def at_work(seen: Watched) -> list[Row]:
    return rows(seen.state, seen.since)


def shown(records: Iterable[Record], width: int = 79, height: int = 23) -> str:
    return "\n".join(screen(watched(records), NOW, width, height))


@cache
def working(hosts: int) -> list[Record]:
    """A batch in which so many hosts are at work, all on one of three things."""
    events: list[Event] = [stories.started(f"gpu[001-{hosts:03}]")]
    names = stories.started(f"gpu[001-{hosts:03}]").hosts
    for number, host in enumerate(names):
        events += stories.planned(host, 4000 + number)
    events.append(WaveStarted(name="batch 1", hosts=names))
    for number, host in enumerate(names):
        step = ("stop", "wheels", "speed")[number % 3]
        said = StepWaited(host=host, step=step, reason=f"{number % 7} of 20 steady steps so far")
        events += [HostStarted(host=host), StepStarted(host=host, step=step), said]
    return stories.records(events)


# -- the screen -------------------------------------------------------------------------------------


def test_a_run_in_the_middle_of_it() -> None:
    names = stories.started("gpu[01-06]").hosts
    events: list[Event] = [stories.started("gpu[01-06]")]
    for number, host in enumerate(names[:5]):
        events += stories.planned(host, 4000 + number)
    events += [
        *stories.healthy("gpu06"),
        HostFinished(host="gpu06", outcome="ok"),
        WaveStarted(name="canary", hosts=("gpu01",)),
        HostStarted(host="gpu01"),
        *stories.mended("gpu01", 4001),
        WaveStarted(name="batch 1", hosts=("gpu02", "gpu03", "gpu04")),
        *(HostStarted(host=host) for host in names[1:4]),
        StepStarted(host="gpu02", step="speed"),
        StepWaited(host="gpu02", step="speed", reason="7 of 20 steady steps so far"),
        *stories.failed("gpu03", 4003, "sha256 differs"),
        StepStarted(host="gpu04", step="wheels"),
        HostSaid(host="gpu04", step="wheels", text="replacing 86 files, removing 1,020"),
        RunHalted(reason="1 host failed"),
        RunInterrupted(signal="SIGINT", times=1),
    ]
    golden("live", shown(stories.records(events)))


def test_sixty_four_hosts_at_work_are_folded_into_one_screen() -> None:
    golden("live-64", shown(working(64)))


def test_those_in_trouble_come_first_and_then_the_slowest() -> None:
    events = [record.event for record in working(6)]
    events.append(RollbackStarted(host="gpu004", reason="it broke"))
    found = at_work(watched(stories.records(events)))
    assert [row.host for row in found] == ["gpu004", "gpu001", "gpu002", "gpu003", "gpu005", "gpu006"]
    assert found[0].step == "going back"


def test_the_host_that_keeps_all_others_waiting_is_named() -> None:
    events = [record.event for record in working(6)]
    ends: list[Event] = [
        HostFinished(host=f"gpu00{n}", outcome="changed", touched=True) for n in (1, 2, 3, 4, 6)
    ]
    assert "waits for" not in shown(stories.records([*events, *ends[:2]]))
    assert "batch 1 waits for gpu005 (wheels, 9 min 2 s)" in shown(stories.records([*events, *ends]))


def test_a_plan_that_waits_for_one_host_says_so() -> None:
    events: list[Event] = [
        stories.started("gpu[01-03]"),
        *stories.healthy("gpu01"),
        *stories.healthy("gpu03"),
    ]
    text = shown(stories.records(events))
    assert "2 of 3 planned" in text
    assert "the plan waits for gpu02 (connecting, 9 min 59 s)" in text


def test_a_run_that_is_taken_up_again_is_told_from_then_on() -> None:
    events = [record.event for record in working(3)]
    before = stories.records([*events, RunInterrupted(signal="SIGINT", times=1), RunFinished(exit=130)])
    on = RunResumed(operator="op", controller="desk", hosts=("gpu002",))
    state = after(fold(before), record := Record(run=stories.RUN, seq=99, at=NOW - 7, event=on))
    seen = Watched()
    seen.see(record, state)
    text = "\n".join(screen(seen, NOW, 79, 23))
    assert re.match(r"purge-cu13 on gpu\[001-003\] \(3\) +7 s\n", text)
    assert "SIGINT" not in text


def test_a_soak_and_a_lost_network_are_said() -> None:
    names = stories.started("gpu[01-02]").hosts
    events: list[Event] = [stories.started("gpu[01-02]")]
    events += [event for host in names for event in stories.planned(host, 1)]
    events += [
        WaveStarted(name="canary", hosts=("gpu01",)),
        HostFinished(host="gpu01", outcome="changed"),
        SoakStarted(wave="canary", seconds=900.0),
    ]
    assert "canary soaks: 5 min 18 s until the next batch" in shown(stories.records(events))
    events += [WaveStarted(name="batch 1", hosts=("gpu02",)), NetworkLost(dropped=1, open=1)]
    text = shown(stories.records(events))
    assert "until the next batch" not in text
    assert "the controller's own network is lost" in text


def test_a_host_that_has_nothing_to_do_is_not_at_work() -> None:
    records = stories.records([stories.started("gpu[01-02]"), *stories.healthy("gpu01")])
    assert [row.host for row in at_work(watched(records))] == ["gpu02"]


@pytest.mark.parametrize("hosts", [1, 3, 40, 300])
@settings(deadline=None, max_examples=40)
@given(width=st.integers(39, 200), height=st.integers(9, 60), cut=st.integers(1, 2000))
def test_it_never_leaves_its_screen(hosts: int, width: int, height: int, cut: int) -> None:
    lines = screen(watched(working(hosts)[:cut]), NOW, width, height)
    assert 0 < len(lines) <= height
    assert all(columns(line) <= width for line in lines)


def test_every_story_fits_at_every_moment() -> None:
    seen, state = Watched(), RunState()
    for record in stories.all_outcomes():
        state = after(state, record)
        seen.see(record, state, Paint(True))
        lines = screen(seen, NOW, 79, 23, Paint(True))
        assert len(lines) <= 23
        assert max(columns(line) for line in lines) <= 79


def test_nothing_that_a_host_says_moves_the_cursor() -> None:
    seen, state = Watched(), RunState()
    for record in stories.all_outcomes():
        event = EVENT.validate_python(hostile(record.event.model_dump()))
        state = after(state, record.model_copy(update={"event": event}))
        seen.see(record.model_copy(update={"event": event}), state)
        assert not CONTROL.search("\n".join(screen(seen, NOW, 200, 50)))


# -- lines that fit ---------------------------------------------------------------------------------


@given(st.text(st.sampled_from("ab日é→ "), max_size=60), st.integers(1, 50))
def test_what_is_cut_fits_and_says_so(text: str, width: int) -> None:
    coloured = f"\x1b[31m{text}\x1b[0m"
    for whole in (text, coloured):
        cut = clipped(whole, width)
        assert columns(cut) <= width
        if columns(whole) > width:
            assert "…" in cut
        else:
            assert cut == whole
    assert clipped(coloured, width).endswith("\x1b[0m")


def test_both_ends_of_a_line_are_kept() -> None:
    assert spread("left", "right", 20) == "left           right"
    assert spread("a long text to the left", "right", 20) == "a long text…   right"


# -- the terminal -----------------------------------------------------------------------------------


class Screen(io.StringIO):
    """A stream whose words go to a terminal in memory."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal

    def write(self, text: str) -> int:
        self.terminal.write(text)
        return len(text)


FRAME = st.lists(st.text(st.sampled_from("xyz "), max_size=70), min_size=1, max_size=8)


@given(st.lists(st.tuples(FRAME, st.booleans(), st.integers(24, 60)), min_size=1, max_size=8))
def test_only_the_last_drawing_stands_below_what_was_said(
    steps: list[tuple[list[str], bool, int]],
) -> None:
    terminal = Terminal(60, 40)
    out = Out(Screen(terminal))
    region = Region(out)
    said: list[str] = []
    out.line("before")
    for number, (lines, says, width) in enumerate(steps):
        out.close()
        terminal.resize(width)
        if says:
            region.clear(width)
            said.append(f"said {number}")
            out.line(said[-1])
        region.draw(lines, width)
    out.close()
    drawn = [clipped(line, width - 1).rstrip() for line in lines]
    while drawn and not drawn[-1]:
        drawn.pop()
    assert terminal.text == ["before", *said, *drawn]
    region.clear(width)
    out.line("after")
    out.close()
    assert terminal.text == ["before", *said, "after"]


async def test_a_run_leaves_the_run_and_its_plan_and_no_screen() -> None:
    terminal = Terminal(80, 24)
    out = Out(Screen(terminal))
    live = Live(out, lambda: os.terminal_size((80, 24)), clock=lambda: NOW)
    state = RunState()
    async with live.kept_fresh():
        for record in stories.all_outcomes():
            state = after(state, record)
            live.see(record, state)
            while not out.idle:
                await asyncio.sleep(0)
            live.refresh()
    out.close()
    text = terminal.text
    assert text[0] == f"run {stories.RUN}: purge-cu13 on gpu[01-14] (14)"
    assert text[1].startswith("plan: purge-cu13")
    assert text[-1].endswith("cannot be reached or are blocked") or "halts at" in "".join(text[-3:])
    assert not re.search(r"ended|at work|to come", "\n".join(text))


async def test_while_somebody_is_asked_nothing_is_drawn() -> None:
    terminal = Terminal(80, 24)
    out = Out(Screen(terminal))
    live = Live(out, lambda: os.terminal_size((80, 24)), clock=lambda: NOW)
    records = working(3)
    state = RunState()
    for record in records:
        state = after(state, record)
        live.see(record, state)
    live.pause()
    out.words("go on? ")
    live.refresh()
    out.close()
    assert terminal.text[-1] == "go on?"
    live.go_on()
    live.refresh()
    out.close()
    assert "at work" in "\n".join(terminal.text)


class Stuck:
    """A stream that is written to, and knows how often."""

    idle = False

    def __init__(self) -> None:
        self.written: list[str] = []

    def words(self, text: str) -> None:
        self.written.append(text)

    def line(self, text: str) -> None:
        self.words(text)


def test_a_terminal_that_does_not_keep_up_gets_no_more() -> None:
    out = Stuck()
    live = Live(out, lambda: os.terminal_size((80, 24)), clock=lambda: NOW)  # type: ignore[arg-type]
    state = RunState()
    for record in working(3):
        state = after(state, record)
        live.see(record, state)
    before = len(out.written)
    live.refresh()
    assert len(out.written) == before


def test_nothing_is_drawn_where_nothing_has_changed() -> None:
    out, at = Stuck(), [NOW]
    out.idle = True
    live = Live(out, lambda: os.terminal_size((80, 24)), clock=lambda: at[0])  # type: ignore[arg-type]
    state = RunState()
    for record in working(3):
        state = after(state, record)
        live.see(record, state)
    drawn = []
    for moment in (0.0, 0.1, 0.2, 1.3):
        at[0] = NOW + moment
        live._not_before = 0.0
        live.refresh()
        drawn.append(len(out.written))
    assert drawn[1] == drawn[0] == drawn[2] == drawn[3] - 1
