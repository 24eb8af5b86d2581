"""The chain over the journal tells the first record that is not as it was written."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetfix.events import (
    BreakerTripped,
    HostFinished,
    HostSaid,
    Record,
    RunFinished,
    RunResumed,
    RunStarted,
)
from fleetfix.journal import APPLICATION, MIGRATIONS, Journal
from tests.unit.test_journal import proven, records, started

RUNS = tuple(f"20300102-03040{n}-purge-cu13-abcd" for n in range(3))


def one_run(run: str) -> list[Record]:
    said = [HostSaid(host=f"gpu0{n % 2 + 1}", step="stop", text=f"line {n}") for n in range(6)]
    ends = [HostFinished(host=f"gpu0{n}", outcome="ok") for n in (1, 2)]
    return records(started(), *said, *ends, RunFinished(exit=0), run=run)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A journal in which three runs went on side by side."""
    folder = tmp_path / "state"
    whole = [one_run(run) for run in RUNS]
    with Journal.open(folder) as journal:
        journal.append([of_run[0] for of_run in whole])
        for at in range(1, len(whole[0])):
            journal.append([of_run[at] for of_run in whole])
    return folder


def edit(folder: Path, *statements: str) -> None:
    with sqlite3.connect(folder / "journal.db") as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def told(folder: Path, run: str = RUNS[1]) -> tuple[int | None, str]:
    with Journal.open(folder) as journal:
        misfit = journal.verify(run).misfit
        others = [journal.verify(one).misfit for one in RUNS if one != run]
    assert others == [None, None]
    assert misfit is not None
    return misfit.seq, misfit.why


def test_what_nobody_touched_fits(folder: Path) -> None:
    with Journal.open(folder) as journal:
        found = [journal.verify(run) for run in RUNS]
        assert journal.verify_links() is None
        assert journal.every_run() == RUNS
    assert [(one.covered, one.older, one.misfit) for one in found] == [(10, 0, None)] * 3


OF_RUN = f"run = '{RUNS[1]}'"
SWAP = f"UPDATE records SET seq = CASE seq WHEN 4 THEN -5 ELSE -4 END WHERE {OF_RUN} AND seq IN (4, 5)"


@pytest.mark.parametrize(
    ("statements", "seq", "why"),
    [
        ((f"UPDATE records SET event = replace(event, 'line 2', 'line x') WHERE {OF_RUN}",), 4, "written"),
        ((f"UPDATE records SET at = at + 1 WHERE {OF_RUN} AND seq = 7",), 7, "written"),
        ((f"UPDATE records SET host = 'gpu03' WHERE {OF_RUN} AND seq = 8",), 8, "written"),
        ((f"UPDATE records SET at = 'long ago' WHERE {OF_RUN} AND seq = 7",), 7, "written"),
        ((f"DELETE FROM records WHERE {OF_RUN} AND seq = 6",), 6, "is missing"),
        ((f"DELETE FROM records WHERE {OF_RUN} AND seq = 1",), 1, "is missing"),
        ((SWAP, f"UPDATE records SET seq = -seq WHERE {OF_RUN} AND seq < 0"), 4, "written"),
        ((f"DELETE FROM records WHERE {OF_RUN} AND seq > 7",), 8, "cut off"),
        ((f"DELETE FROM records WHERE {OF_RUN}",), 1, "cut off"),
        ((f"DELETE FROM chains WHERE {OF_RUN}",), 1, "chain"),
        ((f"UPDATE runs SET exit = 2 WHERE {OF_RUN}",), None, "list of runs"),
        ((f"UPDATE runs SET operator = 'eve' WHERE {OF_RUN}",), None, "list of runs"),
        ((f"UPDATE runs SET hosts = '[]' WHERE {OF_RUN}",), None, "list of runs"),
        ((f"DELETE FROM runs WHERE {OF_RUN}",), None, "list of runs"),
        (
            (f"UPDATE outcomes SET outcome = 'failed' WHERE {OF_RUN} AND host = 'gpu02'",),
            None,
            "list of runs",
        ),
    ],
)
def test_the_first_record_that_does_not_fit_is_told(
    folder: Path, statements: tuple[str, ...], seq: int | None, why: str
) -> None:
    edit(folder, *statements)
    said = told(folder)
    assert said[0] == seq
    assert why in said[1]


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM breakers",
        "UPDATE breakers SET tripped = 1.0",
        "DELETE FROM measurements",
        "UPDATE measurements SET measurement = replace(measurement, '20000', '12800')",
        "UPDATE measurements SET measurement = 'x'",
    ],
)
def test_a_trip_or_a_rate_that_is_not_as_recorded_is_told(tmp_path: Path, statement: str) -> None:
    folder = tmp_path / "state"
    with Journal.open(folder) as journal:
        journal.append(records(started(), proven(20000), BreakerTripped(reason="two lost"), run=RUNS[1]))
        assert journal.verify(RUNS[1]).misfit is None
        journal.reset_breaker("lab", at=2000.0, by="ann", reason="disk replaced")
        assert journal.verify(RUNS[1]).misfit is None
    edit(folder, statement)
    assert "list of runs" in told(folder)[1]


def test_a_record_that_was_added_is_told(folder: Path) -> None:
    columns = "run, 11, at, v, kind, host, event, digest"
    edit(folder, f"INSERT INTO records SELECT {columns} FROM records WHERE {OF_RUN} AND seq = 10")
    assert told(folder)[0] == 11


def test_a_run_that_is_gone_as_a_whole_is_told(folder: Path) -> None:
    for table in ("records", "runs", "outcomes", "chains"):
        edit(folder, f"DELETE FROM {table} WHERE {OF_RUN}")
    with Journal.open(folder) as journal:
        gone = journal.verify_links()
    assert gone is not None
    assert RUNS[0] in gone.why


def test_the_first_run_that_is_gone_is_told_and_a_beginning_that_was_moved(folder: Path) -> None:
    edit(folder, f"DELETE FROM chains WHERE run = '{RUNS[0]}'")
    with Journal.open(folder) as journal:
        gone = journal.verify_links()
    assert gone is not None
    assert "first run" in gone.why
    edit(folder, "UPDATE chains SET place = place - 1")
    with Journal.open(folder) as journal:
        moved = journal.verify_links()
    assert moved is not None
    assert "beginning" in moved.why


def test_a_head_that_a_host_keeps_fits_only_the_record_that_it_was_taken_at(folder: Path) -> None:
    with Journal.open(folder) as journal:
        anchor = journal.head(RUNS[1])
        assert journal.head("nosuch") == ""
        journal.append(
            records(RunResumed(operator="op", controller="desk", hosts=()), run=RUNS[1], first=11)
        )
        assert journal.fits(RUNS[1], anchor)
        assert journal.head(RUNS[1]) != anchor
        for strange in ("", "10", "10:", "x:y", "9:" + anchor.partition(":")[2], anchor[:-1], "9" * 400):
            assert not journal.fits(RUNS[1], strange)
        assert not journal.fits(RUNS[0], anchor)


def rewritten(folder: Path, change: Callable[[Record], Record]) -> None:
    """The journal written anew, as whoever has the program can."""
    with Journal.open(folder) as journal:
        kept = {run: list(journal.records(run)) for run in RUNS}
    (folder / "journal.db").unlink()
    with Journal.open(folder) as journal:
        for run in RUNS:
            journal.append([change(record) for record in kept[run]])


def test_a_journal_written_anew_fits_itself_and_not_the_head_that_a_host_keeps(folder: Path) -> None:
    with Journal.open(folder) as journal:
        anchors = {run: journal.head(run) for run in RUNS}
    rewritten(folder, lambda record: record)
    with Journal.open(folder) as journal:
        assert all(journal.fits(run, anchor) for run, anchor in anchors.items())
    rewritten(folder, lambda record: record.model_copy(update={"at": record.at + 1}))
    with Journal.open(folder) as journal:
        assert [journal.verify(run).misfit for run in RUNS] == [None] * 3
        assert not any(journal.fits(run, anchor) for run, anchor in anchors.items())


def test_the_chain_of_an_older_journal_begins_where_it_is_first_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    run = RUNS[0]
    with sqlite3.connect(folder / "journal.db") as old:
        for step in MIGRATIONS[:2]:
            for statement in step:
                old.execute(statement)
        for record in one_run(run)[:4]:
            event = record.event
            text = json.dumps(event.model_dump(mode="json"))
            row = (run, record.seq, record.at, 1, event.kind, getattr(event, "host", None), text)
            old.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        begun = one_run(run)[0]
        assert isinstance(begun.event, RunStarted)
        hosts = json.dumps(begun.event.hosts)
        listed = (run, "purge-cu13", begun.at, None, None, 0, hosts, "op", "desk", begun.event.reason)
        old.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", listed)
        old.execute("PRAGMA user_version = 2")
        old.execute(f"PRAGMA application_id = {APPLICATION}")
    old.close()
    with Journal.open(folder) as journal:
        assert journal.verify(run).older == 4
        journal.append(one_run(run)[4:])
        found = journal.verify(run)
        assert (found.covered, found.older, found.misfit) == (6, 4, None)
        assert journal.verify_links() is None
    edit(folder, "UPDATE records SET event = replace(event, 'line 4', 'line x')")
    with Journal.open(folder) as journal:
        misfit = journal.verify(run).misfit
    assert misfit is not None
    assert misfit.seq == 6
