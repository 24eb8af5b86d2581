"""The report of a run: whole, harmless, and the same whatever hosts say."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterable
from html.parser import HTMLParser

import pytest

from fleetfix.events import EVENT, HostFinished, Record, RunFinished
from fleetfix.views.report import STORIES, html, is_report, markdown, report_of
from tests.cli import stories
from tests.unit.test_views import CONTROL, collected, golden, hostile, killed

NOW = stories.BEGAN + 1000
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "footer", "h1", "h2", "h3", "p", "span"),
    *("dl", "dt", "dd", "div", "table", "tr", "th", "td", "pre", "code", "svg", "rect"),
}


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


class Page(HTMLParser):
    """What a browser makes of a page: its tags with their attributes, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def made_hostile(records: Iterable[Record]) -> list[Record]:
    return [
        record.model_copy(update={"event": EVENT.validate_python(hostile(record.event.model_dump()))})
        for record in records
    ]


def scripted(value: object) -> object:
    """A story in which every text of a host tries to become markup."""
    bad = "</pre></td><script>alert(1)</script><img src=x onerror=alert(1)>`|\n\n# head\n[a](javascript:b) "
    if isinstance(value, dict):
        free = ("message", "hint", "reason", "text", "stdout", "stderr", "summary", "blocked")
        return {k: bad + v if k in free and isinstance(v, str) else scripted(v) for k, v in value.items()}
    return [scripted(item) for item in value] if isinstance(value, list | tuple) else value


def made_scripted(records: Iterable[Record]) -> list[Record]:
    return [
        record.model_copy(update={"event": EVENT.validate_python(scripted(record.event.model_dump()))})
        for record in records
    ]


def test_a_report_in_markdown() -> None:
    text = markdown(report_of(stories.all_outcomes(), NOW))
    golden("report.md", re.sub(r"fleetfix (report )?\d+\.\d+\S*", r"fleetfix \1VERSION", text))


def test_a_page_says_what_was_asked_what_happened_and_how_to_go_on() -> None:
    words = Page(html(report_of(stories.all_outcomes(), NOW))).words
    for said in (
        "purge-cu13 on gpu[01-14] (14)",
        "interrupted (exit 130)",
        "Job stopped, not restarted: gpu[06-07] (2)",
        "Halted: 3 hosts failed, 2 may",
        "op on desk",
        "incident 7",
        "stop: alice's job 123 uses the environment",
        f"go back on gpu[06-07]: fleetfix rollback {stories.RUN}",
        "+57 %",
        "wheels.repair: sha256 differs (look at /opt/train/venv)",
        "58 s: gpu[02-03,06-09,12] (7): 1 rollback_failed",
        "point of no return: none",
    ):
        assert said in words, said


def test_a_page_needs_nothing_and_allows_nothing() -> None:
    text = html(report_of(stories.all_outcomes(), NOW))
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= TAGS
    for _, attributes in page.tags:
        assert not {"src", "href", "style", "srcset", "action"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


@pytest.mark.parametrize("made", [made_hostile, made_scripted])
def test_nothing_that_a_host_says_becomes_markup(made: object) -> None:
    records = made(stories.all_outcomes())  # type: ignore[operator]
    text = html(report_of(records, NOW))
    plain = Page(html(report_of(stories.all_outcomes(), NOW)))
    assert {tag for tag, _ in Page(text).tags} == {tag for tag, _ in plain.tags}
    assert not CONTROL.search(text)
    text.encode()


def test_nothing_that_a_host_says_becomes_markdown() -> None:
    text = markdown(report_of(made_scripted(stories.all_outcomes()), NOW))
    plain = markdown(report_of(stories.all_outcomes(), NOW))
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert heads == [line for line in plain.splitlines() if line.startswith("#")]
    for line in text.splitlines():
        if line.startswith("    ") or "<script>" not in line:
            continue
        # Outside of code blocks it stands between fences that are longer than any inside.
        code = re.findall(r"(?<!`)(`+) (?:(?!\1`).)*? \1(?!`)", line)
        assert code
        assert "<script>" not in re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", line)
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4)


def test_a_thousand_hosts_are_a_page_that_can_be_read() -> None:
    text = html(report_of(stories.thousand(), NOW))
    assert len(text) < 20_000
    assert "median of 997" in Page(text).words
    assert not report_of(stories.thousand(), NOW).hosts


def test_of_many_that_went_wrong_the_first_are_told_and_the_others_named() -> None:
    events = [stories.started("gpu[01-30]")]
    for number, host in enumerate(stories.started("gpu[01-30]").hosts):
        events += stories.rolled_back(host, number, f"disk {chr(97 + number % 26)} broke")  # type: ignore[arg-type]
    report = report_of(stories.records([*events, RunFinished(exit=2)]), NOW)
    assert [story.host for story in report.stories] == [f"gpu{n:02}" for n in range(1, STORIES + 1)]
    assert report.untold == f"gpu[{STORIES + 1}-30] ({30 - STORIES})"
    assert f"fleetfix show {stories.RUN} HOST" in Page(html(report)).words


def test_a_run_that_goes_on_or_never_ended_is_told_as_far_as_it_came() -> None:
    records = stories.all_outcomes()[:-20]
    assert report_of(records, NOW, driven=True).verdict == "is running"
    assert report_of(records, NOW, driven=True).ways_on == ()
    assert report_of(records, NOW).verdict == "did not finish: its controller ended"
    assert "did not finish" in html(report_of(records, NOW))


def test_a_dry_run_says_that_nothing_was_changed() -> None:
    events = [stories.started("gpu01", dry=True), *stories.planned("gpu01", 1)]
    end = [HostFinished(host="gpu01", outcome="pending"), RunFinished(exit=0)]
    report = report_of(stories.records([*events, *end]), NOW)
    assert report.verdict == "changed nothing: a dry run (exit 0)"
    assert report.waves[0].length == 1000
    assert html(report)
    assert markdown(report)


def test_a_report_is_known_by_its_beginning() -> None:
    report = report_of(stories.all_outcomes(), NOW)
    assert is_report(html(report)[:4096])
    assert is_report(markdown(report)[:4096])
    assert not is_report("# notes")


def test_a_report_says_where_evidence_lies_and_what_is_not_in_it() -> None:
    report = report_of(collected("gpu01", "gpu02"), NOW)
    for text in (markdown(report), html(report)):
        assert "gpu[01-02] (2): in /state/evidence/r/HOST" in text
        assert "gpu[01-02] (2) without nvidia-smi: nvidia-smi -q did not answer within 30 s" in text
    assert "Evidence" not in markdown(report_of(stories.all_outcomes(), NOW))


def test_a_host_that_was_left_midway_is_told_so_and_its_stopped_job_first() -> None:
    report = report_of(killed(), NOW)
    assert report.alarms[0] == "Job stopped, not restarted: gpu01"
    assert [(row.outcome, row.hosts) for row in report.rows] == [
        ("midway", "gpu01"),
        ("not_started", "gpu02"),
    ]
    assert [story.host for story in report.stories] == ["gpu01"]
    assert [row.why for row in report.left_open] == ["stop job torchrun (pid 4211): 8 GPUs"]
    assert not report_of(killed(), NOW, driven=True).alarms
    assert "gpu01" in html(report)
