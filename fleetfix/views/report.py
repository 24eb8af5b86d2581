"""A report of a run for those who were not there: one file that needs nothing else.

What hosts said is escaped, and the page allows itself nothing: no script, no foreign resource (a content
security policy in its head says so to the browser).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fleetfix import __version__
from fleetfix.events import GOOD, HostFinished, HostStarted, Record, WaveStarted
from fleetfix.hostset import HostSet, natural
from fleetfix.state import HostState, RunState, fold
from fleetfix.views.amounts import duration, rate, unit, when
from fleetfix.views.grouping import counted
from fleetfix.views.history import host_text
from fleetfix.views.neutral import neutral, one_line
from fleetfix.views.order import order_text
from fleetfix.views.paint import TONES
from fleetfix.views.plan import plan_text, said_of
from fleetfix.views.speeds import Speed, measured_on, speeds
from fleetfix.views.summary import (
    MEANINGS,
    WORST_FIRST,
    evidence,
    left_midway,
    messages,
    stopped_jobs,
    ways_on,
)

GENERATOR = "fleetfix report"
"""By this in its first lines a report is known as one."""

MIDWAY = "midway"
"""A host that was begun and has no outcome: it is at work, or was left so."""

ORDER: tuple[str, ...] = (MIDWAY, *WORST_FIRST)

STORIES = 12
"""Hosts that did not end well whose whole story is told; the others are in the table of outcomes."""

STORY_LINES = 80
"""The last lines of a story that are shown."""

BARS = 64
"""Hosts that have a bar and a speed each; more are told by wave alone."""


@dataclass(frozen=True)
class Row:
    """Hosts that ended alike, and why."""

    outcome: str
    tone: str
    hosts: str
    why: str


@dataclass(frozen=True)
class Bar:
    """A stretch of the run's time, in thousandths of it, with what it was."""

    label: str
    begin: int
    length: int
    tone: str
    said: str


@dataclass(frozen=True)
class SpeedRow:
    """A host's speed before and after, in words, and the shares of the highest rate of all."""

    host: str
    before: str
    after: str
    unit: str
    gain: str
    shares: tuple[int, int]


@dataclass(frozen=True)
class Story:
    """All that happened on a host that did not end well."""

    host: str
    outcome: str
    tone: str
    error: str
    text: str
    cut: int
    """Lines of it that are left out at its beginning."""


@dataclass(frozen=True)
class Report:
    """What a report says, in words that can be shown anywhere."""

    title: str
    run: str
    verdict: str
    tone: str
    asked: tuple[tuple[str, str], ...]
    alarms: tuple[str, ...]
    counts: tuple[tuple[str, int, str], ...]
    rows: tuple[Row, ...]
    waves: tuple[Bar, ...]
    hosts: tuple[Bar, ...]
    lasted: str
    speeds: tuple[SpeedRow, ...]
    speed_lines: tuple[str, ...]
    evidence: tuple[str, ...]
    """Where it lies, and what is not in it."""
    stories: tuple[Story, ...]
    untold: str
    """Hosts that did not end well and have no story here, folded."""
    left_open: tuple[Row, ...]
    ways_on: tuple[str, ...]
    plan: str
    made: str
    version: str = __version__


def report_of(records: Sequence[Record], now: float, *, driven: bool = False) -> Report:
    """Gather a report from a run's records. `driven`: it is still going on; `now` says until when."""
    state = fold(records)
    started = state.started
    assert started is not None
    code = state.ended_with
    end = state.ended_at or (now if driven else records[-1].at)
    hosts = sorted(state.hosts.values(), key=lambda host: natural(host.name))
    bad = sorted((host for host in hosts if _is_bad(host)), key=_worst)
    return Report(
        title=one_line(f"{started.command or started.playbook} on {counted(HostSet(started.hosts))}"),
        run=state.run,
        verdict=_verdict(state, code, driven),
        tone="good" if code == 0 else "warn" if driven else "bad",
        asked=tuple(_asked(state)),
        alarms=tuple(_alarms(state, driven)),
        counts=tuple(_counts(hosts)),
        rows=tuple(_rows(hosts)),
        waves=tuple(_waves(records, state, end)),
        hosts=tuple(_bars(records, state, end)) if len(hosts) <= BARS else (),
        lasted=duration(end - state.began_at),
        speeds=tuple(_speeds(state, hosts)) if len(hosts) <= BARS else (),
        speed_lines=tuple(line.removeprefix("speed").strip() for line in speeds(state)),
        evidence=tuple(line.removeprefix("evidence").strip() for line in evidence(state)),
        stories=tuple(_story(records, host) for host in bad[:STORIES]),
        untold=counted(HostSet(host.name for host in bad[STORIES:])) if bad[STORIES:] else "",
        left_open=tuple(_left_open(bad)),
        ways_on=tuple(map(one_line, ways_on(state) if code != 0 and not driven else ())),
        plan=neutral_lines(plan_text(state)) if not started.command else "",
        made=when(now),
    )


def html(report: Report) -> str:
    """The report as a page of its own."""
    return _render("report.html", report)


def markdown(report: Report) -> str:
    """The report as Markdown; what hosts said stands in code blocks, where it means nothing."""
    return _render("report.md", report)


def is_report(head: str) -> bool:
    """Whether a file that begins so is a report."""
    return GENERATOR in head


# -- what it says -----------------------------------------------------------------------------------


def _verdict(state: RunState, code: int | None, driven: bool) -> str:
    if driven:
        return "is running"
    if code is None:
        what = "went back, and did not finish" if state.going_back else "did not finish"
        return f"{what}: its controller ended"
    done = "changed nothing: a dry run" if state.started is not None and state.started.dry else "done"
    meaning = MEANINGS.get(code, done)
    back = "went back: " if state.rolled_back_exit is not None else ""
    return f"{back}{meaning} (exit {code})"


def _asked(state: RunState) -> Iterator[tuple[str, str]]:
    started = state.started
    assert started is not None
    yield "run", state.run
    if started.command:
        yield "command", started.command
    else:
        yield "playbook", f"{started.playbook}, from {started.source} ({started.digest[:12]})"
    yield "hosts", f"{counted(HostSet(started.hosts), 120)}, inventory {started.inventory}"
    yield "by", f"{started.operator} on {started.controller}"
    yield "began", when(state.began_at)
    if started.reason:
        yield "reason", one_line(started.reason)
    if started.plan:
        yield "plan", f"saved by {started.plan}"
    if started.settings:
        yield "settings", one_line(", ".join(f"{key}={value}" for key, value in started.settings.items()))
    if not started.command and any(host.pending for host in state.hosts.values()):
        yield "order", order_text(state, started.policy)


def _alarms(state: RunState, driven: bool) -> Iterator[str]:
    ended = {host.name: host for host in state.hosts.values() if not (driven and host.midway)}
    for line in stopped_jobs(replace(state, hosts=ended)):
        words, _, hosts = line.partition(": ")
        yield f"{words.capitalize()}: {hosts}"
    if state.tripped:
        yield f"The breaker tripped: {one_line(state.tripped)}"
    elif state.halted:
        yield f"Halted: {one_line(state.halted)}"
    if state.interrupted:
        yield "The operator interrupted it"


def _counts(hosts: Sequence[HostState]) -> Iterator[tuple[str, int, str]]:
    found = Counter(_outcome(host) for host in hosts)
    for outcome in ORDER:
        if found[outcome]:
            yield outcome, found[outcome], _tone(outcome)


def _rows(hosts: Sequence[HostState]) -> Iterator[Row]:
    for one in left_midway(hosts):
        yield Row(MIDWAY, _tone(MIDWAY), counted(one.hosts), one.text)
    for outcome in WORST_FIRST:
        for one in messages(outcome, [host for host in hosts if _outcome(host) == outcome]):
            yield Row(outcome, _tone(outcome), counted(one.hosts), one.text)


def _left_open(bad: Sequence[HostState]) -> Iterator[Row]:
    for host in bad:
        left = tuple(shown.summary for shown in host.changes.values())
        for item in host.finished.open if host.finished else left:
            yield Row(_outcome(host), _tone(_outcome(host)), host.name, one_line(item))


def _story(records: Sequence[Record], host: HostState) -> Story:
    lines = neutral_lines(host_text(records, host.name)).split("\n")
    outcome = _outcome(host)
    cut = max(len(lines) - STORY_LINES, 0)
    return Story(host.name, outcome, _tone(outcome), said_of(host), "\n".join(lines[cut:]), cut)


def _is_bad(host: HostState) -> bool:
    return _outcome(host) not in GOOD and _outcome(host) != "not_started"


def _worst(host: HostState) -> int:
    return ORDER.index(_outcome(host))


def _outcome(host: HostState) -> str:
    return MIDWAY if host.midway else host.outcome or "not_started"


def _tone(outcome: str) -> str:
    return TONES.get(outcome, "bad")


def neutral_lines(text: str) -> str:
    """Every line of a text made harmless; they are so already where a view wrote them."""
    return "\n".join(neutral(line) for line in text.split("\n"))


# -- its time ---------------------------------------------------------------------------------------


def _waves(records: Sequence[Record], state: RunState, end: float) -> Iterator[Bar]:
    began = [(record.at, record.event) for record in records if isinstance(record.event, WaveStarted)]
    ended = {r.event.host: r.at for r in records if isinstance(r.event, HostFinished)}
    first = began[0][0] if began else end
    if state.started is not None and not state.started.command:
        yield _bar("plan", state.began_at, first, state, end, "faint", duration(first - state.began_at))
    for at, wave in began:
        last = max((ended.get(host, end) for host in wave.hosts), default=at)
        found = Counter(_outcome(state.hosts[host]) for host in wave.hosts if host in state.hosts)
        worst = next((outcome for outcome in ORDER if found[outcome]), "ok")
        told = ", ".join(f"{found[outcome]} {outcome}" for outcome in ORDER if found[outcome])
        said = f"{duration(max(last - at, 0))}: {counted(HostSet(wave.hosts))}: {told}"
        yield _bar(wave.name, at, max(last, at), state, end, _tone(worst), said)


def _bars(records: Sequence[Record], state: RunState, end: float) -> Iterator[Bar]:
    began = {r.event.host: r.at for r in records if isinstance(r.event, HostStarted)}
    ended = {r.event.host: r.at for r in records if isinstance(r.event, HostFinished)}
    for name in sorted(began, key=natural):
        last = max(ended.get(name, end), began[name])
        outcome = _outcome(state.hosts[name])
        said = f"{duration(last - began[name])}: {outcome}"
        yield _bar(name, began[name], last, state, end, _tone(outcome), said)


def _bar(label: str, begin: float, last: float, state: RunState, end: float, tone: str, said: str) -> Bar:
    whole = max(end - state.began_at, 0.001)
    at = min(round(1000 * (begin - state.began_at) / whole), 1000)
    length = max(min(round(1000 * (last - begin) / whole), 1000 - at), 4)
    return Bar(label, at, length, tone, said)


# -- its speeds -------------------------------------------------------------------------------------


def _speeds(state: RunState, hosts: Sequence[HostState]) -> Iterator[SpeedRow]:
    found = [(host.name, speed) for host in hosts if (speed := measured_on(state, host)) is not None]
    rates = [side.rate for _, speed in found for side in speed.sides if side is not None]
    for name, speed in found:
        yield _speed_row(name, speed, max(rates))


def _speed_row(host: str, speed: Speed, highest: float) -> SpeedRow:
    before, after = speed.sides
    last = after or before
    assert last is not None
    comparable = before is not None and after is not None and before.scope == after.scope
    gain = f"{(after.rate / before.rate - 1) * 100:+.0f} %" if comparable and before and after else ""
    shares = [round(1000 * side.rate / highest) if side and highest else 0 for side in speed.sides]
    told = [rate(side.rate) if side else "-" for side in speed.sides]
    return SpeedRow(host, told[0], told[1], unit(last), gain, (shares[0], shares[1]))


# -- its form ---------------------------------------------------------------------------------------


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        # Everything is escaped in a page; in Markdown what is foreign stands in code blocks.
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["code"] = _code_span
    templates.filters["cell"] = _cell
    return templates


def _render(name: str, report: Report) -> str:
    style = (Path(__file__).parent / "templates" / "report.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    template: Any = _templates().get_template(name)
    return str(template.render(r=report, style=style, style_digest=digest, generator=GENERATOR))


def _code_span(text: str) -> str:
    """A text as a code span of Markdown, whatever it holds: its fence is longer than any inside."""
    words = text.strip()
    if "`" not in words:
        return f"`{words}`" if words else ""
    fence = "`" * (max(len(run) for run in re.findall("`+", words)) + 1)
    return f"{fence} {words} {fence}"


def _cell(text: str) -> str:
    """A code span inside a table, where a bar would begin the next cell."""
    return _code_span(text).replace("|", "\\|")
