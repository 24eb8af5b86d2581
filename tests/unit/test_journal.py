"""The journal keeps what it said it kept, whatever happens to the process that wrote it."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fleetfix.action import Measurement
from fleetfix.errors import Failure, JournalError
from fleetfix.events import (
    BreakerTripped,
    Event,
    HostFinished,
    HostSaid,
    Record,
    RunFinished,
    RunResumed,
    RunStarted,
    StepFinished,
)
from fleetfix.folders import make_private
from fleetfix.journal import APPLICATION, MIGRATIONS, Journal
from fleetfix.policy import Policy
from fleetfix.state import fold

RUN = "20300102-030405-purge-cu13-abcd"


def started(hosts: tuple[str, ...] = ("gpu01", "gpu02")) -> RunStarted:
    return RunStarted(
        playbook="purge-cu13",
        source="playbooks/purge-cu13.yaml",
        digest="0" * 64,
        inventory="lab",
        hosts=hosts,
        steps=(("stop", "stop the training"),),
        policy=Policy(),
        operator="op",
        controller="desk",
        version="0.1.0",
    )


def records(*events: Event, run: str = RUN, first: int = 1, at: float = 1000.0) -> list[Record]:
    return [Record(run=run, seq=first + n, at=at + n, event=event) for n, event in enumerate(events)]


def proven(rate: float, scope: str = "global") -> StepFinished:
    measured = Measurement.model_validate(
        {"job": "j1", "rate": rate, "scope": scope, "noise": 0.01, "steps": 20}
    )
    return StepFinished(host="gpu01", step="speed", result="ok", measured=measured, proven=True)


def test_what_others_were_given_is_taken_from_them(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    Journal.open(folder).close()
    (folder / "evidence").mkdir(mode=0o755)
    folder.chmod(0o755)
    for name in ("journal.db", "evidence"):
        (folder / name).chmod(0o755)
    Journal.open(folder).close()
    modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in ("journal.db", "evidence")}
    assert modes == {"journal.db": 0o600, "evidence": 0o700}


def test_a_folder_that_others_may_write_to_keeps_no_journal(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(JournalError) as refused:
        Journal.open(folder)
    assert "others may write to it" in refused.value.message
    assert "chmod go-w" in (refused.value.hint or "")
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_keeps_no_journal(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(JournalError, match="belongs to"):
        Journal.open(folder)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.open(tmp_path / "state")


def test_what_was_appended_is_read_back_equal(journal: Journal) -> None:
    kept = records(
        started(), HostSaid(host="gpu01", step="stop", text="\x1b[31m\x00é\u202e"), RunFinished(exit=0)
    )
    journal.append(kept)
    assert list(journal.records(RUN)) == kept
    assert journal.last_seq(RUN) == 3
    assert journal.last_seq("nosuch") == 0
    assert fold(journal.records(RUN)) == fold(kept)


def test_records_of_one_host_come_with_those_of_the_run(journal: Journal) -> None:
    said = [HostSaid(host=f"gpu0{n}", step="stop", text="x") for n in (1, 2)]
    journal.append(records(started(), *said, RunFinished(exit=0)))
    assert [r.seq for r in journal.records(RUN, host="gpu02")] == [1, 3, 4]


def test_folder_and_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        journal = Journal.open(tmp_path / "a" / "state")
        journal.append(records(started()))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in journal.folder.iterdir()}
    assert stat.S_IMODE(journal.folder.stat().st_mode) == 0o700
    assert set(modes.values()) == {0o600}
    assert {"journal.db", "journal.db-wal"} <= set(modes)


def test_a_run_is_listed_with_its_outcomes_and_its_end(journal: Journal) -> None:
    finished = HostFinished(host="gpu01", outcome="failed", failure=Failure(kind="command", message="no"))
    later = HostFinished(host="gpu01", outcome="rolled_back")
    journal.append(records(started(), finished, later, HostFinished(host="gpu02", outcome="ok")))
    (row,) = journal.runs()
    assert (row.exit, row.ended, row.outcomes) == (None, None, {"rolled_back": 1, "ok": 1})
    journal.append(records(RunFinished(exit=2), first=5))
    (row,) = journal.runs()
    assert (row.exit, row.hosts, row.driven) == (2, ("gpu01", "gpu02"), False)
    assert journal.run(RUN) == row


def test_two_writers_of_one_run_are_told_apart(journal: Journal) -> None:
    journal.append(records(started()))
    with pytest.raises(JournalError, match="another process"):
        journal.append(records(HostSaid(host="gpu01", step="stop", text="b"), RunFinished(exit=0)))
    assert journal.last_seq(RUN) == 1


def test_an_append_is_kept_whole_or_not_at_all(journal: Journal) -> None:
    journal.append(records(started()))
    half = [*records(RunFinished(exit=0), first=2), *records(RunFinished(exit=0), first=1)]
    with pytest.raises(JournalError):
        journal.append(half)
    assert [r.seq for r in journal.records(RUN)] == [1]
    assert journal.runs()[0].exit is None


def test_a_run_is_found_by_the_beginning_of_its_id(journal: Journal) -> None:
    with pytest.raises(JournalError, match="no such run is in the journal"):
        journal.find("last")
    other = "20300102-030405-purge-cu13-abzz"
    journal.append(records(started()))
    journal.append(records(started(), run=other, at=2000.0))
    assert journal.find("last") == other
    assert journal.find("20300102-030405-purge-cu13-abc") == RUN
    assert journal.find(RUN) == RUN
    with pytest.raises(JournalError, match="begins more than one run"):
        journal.find("2030")
    for nothing in ("", "%", "20300102-030405-purge-cu13-abx", "x' OR 1=1 --"):
        with pytest.raises(JournalError, match="no run is called"):
            journal.find(nothing)


def test_the_baseline_is_the_median_of_the_newest_proven_rates_of_one_scope(journal: Journal) -> None:
    assert journal.baseline("j1") is None
    rates = [90_000.0, 20_000.0, 20_400.0, 19_800.0, 26_000.0, 20_100.0]
    for n, rate in enumerate(rates):
        journal.append(records(proven(rate), run=f"r{n}", at=1000.0 + n))
    found = journal.baseline("j1")
    assert found is not None
    assert found.rate == 20_100.0
    journal.append(records(proven(2_500.0, "per_gpu"), run="r9", at=2000.0))
    found = journal.baseline("j1")
    assert found is not None
    assert (found.rate, found.scope) == (2_500.0, "per_gpu")


def test_a_measurement_that_proved_nothing_is_no_baseline(journal: Journal) -> None:
    slow = proven(12_800.0).model_copy(update={"proven": False})
    journal.append(records(slow))
    assert journal.baseline("j1") is None


WRITER = """
import sys
from pathlib import Path
from fleetfix.events import HostSaid, Record
from fleetfix.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
for seq in range(1, 100000):
    event = HostSaid(host="gpu01", step="s", text=str(seq))
    journal.append([Record(run="r", seq=seq, at=1.0, event=event)])
    print(seq, flush=True)
"""


@pytest.mark.parametrize("lines", [1, 7, 40])
def test_every_append_that_returned_survives_a_kill(tmp_path: Path, lines: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(lines)]
        writer.send_signal(signal.SIGKILL)
        said += [int(line) for line in writer.stdout.read().splitlines()]
    journal = Journal.open(tmp_path)
    kept = [record.seq for record in journal.records("r")]
    assert kept[: len(said)] == said
    assert kept == list(range(1, len(kept) + 1))


def test_readers_see_whole_appends_while_a_run_is_written(tmp_path: Path) -> None:
    writer, reader = Journal.open(tmp_path), Journal.open(tmp_path)
    done = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not done.is_set():
            seen.append(sum(1 for _ in reader.records("r")))
        seen.append(sum(1 for _ in reader.records("r")))

    thread = threading.Thread(target=read)
    thread.start()
    for n in range(40):
        pair = [HostSaid(host="gpu01", step="s", text=str(m)) for m in range(2)]
        writer.append(records(*pair, run="r", first=1 + 2 * n))
    done.set()
    thread.join()
    assert seen == sorted(seen)
    assert seen[-1] == 80
    assert all(count % 2 == 0 for count in seen)


def test_several_processes_make_the_journal_at_once(tmp_path: Path) -> None:
    code = "import sys, pathlib, fleetfix.journal as j; j.Journal.open(pathlib.Path(sys.argv[1]))"
    makers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(4)]
    assert [maker.wait() for maker in makers] == [0, 0, 0, 0]
    assert Journal.open(tmp_path).runs() == ()


def test_a_schema_that_was_cut_short_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = (*MIGRATIONS[0], "this is no SQL")
    monkeypatch.setattr("fleetfix.journal.MIGRATIONS", (broken,))
    with pytest.raises(JournalError):
        Journal.open(tmp_path)
    monkeypatch.undo()
    assert Journal.open(tmp_path).runs() == ()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not a database, but long enough to be looked at " * 40, "damaged"),
        (b"SQLite format 3\0" + b"\xff" * 4096, "journal"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "journal.db").write_bytes(content)
    with pytest.raises(JournalError, match=said) as caught:
        Journal.open(tmp_path)
    assert "\n" not in caught.value.message
    assert (tmp_path / "journal.db").read_bytes() == content


def test_the_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "journal.db") as other:
        other.execute("CREATE TABLE theirs (x)")
    other.close()
    with pytest.raises(JournalError, match="another program"):
        Journal.open(tmp_path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    Journal.open(tmp_path).close()
    with sqlite3.connect(tmp_path / "journal.db") as newer:
        newer.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    newer.close()
    with pytest.raises(JournalError, match="newer fleetfix"):
        Journal.open(tmp_path)


def test_a_folder_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(JournalError, match="cannot be written"):
        Journal.open(tmp_path / "state")


def test_a_full_disk_is_said_and_the_journal_stays_usable(journal: Journal) -> None:
    journal.append(records(started()))
    pages = journal._connection.execute("PRAGMA page_count").fetchone()[0]
    journal._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(JournalError, match="no space"):
        journal.append(records(HostSaid(host="gpu01", step="s", text="x" * 100_000), first=2))
    journal._connection.execute("PRAGMA max_page_count = 1000000")
    journal.append(records(RunFinished(exit=0), first=2))
    assert journal.last_seq(RUN) == 2


def test_the_process_that_drives_a_run_is_known_while_it_does(journal: Journal) -> None:
    other = Journal.open(journal.folder)
    assert other.driver(RUN) is None
    with journal.drive(RUN):
        assert other.driver(RUN) == os.getpid()
    assert other.driver(RUN) is None


def test_a_run_that_is_taken_up_again_is_not_ended_any_more(journal: Journal) -> None:
    ends = [HostFinished(host="gpu01", outcome="cancelled"), HostFinished(host="gpu02", outcome="ok")]
    journal.append(records(started(), *ends, RunFinished(exit=130)))
    resumed = RunResumed(operator="ann", controller="here", hosts=("gpu01",))
    journal.append(records(resumed, first=5))
    (row,) = journal.runs()
    assert (row.exit, row.ended, row.outcomes) == (None, None, {"ok": 1})
    assert [record.event.kind for record in journal.records(RUN, after=4)] == ["run_resumed"]


def test_a_run_is_driven_by_one_process_at_a_time(journal: Journal) -> None:
    other = Journal.open(journal.folder)
    assert not other.driven(RUN)
    with journal.drive(RUN):
        assert other.driven(RUN)
        with pytest.raises(JournalError, match="driven by another process"), other.drive(RUN):
            pass
    assert not other.driven(RUN)
    with other.drive(RUN):
        pass


# -- breakers -------------------------------------------------------------------------------------


def test_a_breaker_holds_its_inventory_until_it_is_reset_with_name_and_reason(journal: Journal) -> None:
    journal.append(records(started(), BreakerTripped(reason="going back failed on gpu01")))
    row = journal.tripped("lab")
    assert row is not None
    assert (row.run, row.reason, row.tripped) == (RUN, "going back failed on gpu01", 1001.0)
    assert journal.tripped("another") is None
    assert journal.reset_breaker("lab", at=2000.0, by="ann", reason="disk replaced") == 1
    assert journal.tripped("lab") is None
    (kept,) = journal.breakers()
    assert (kept.reset, kept.reset_by, kept.reset_reason) == (2000.0, "ann", "disk replaced")
    assert journal.reset_breaker("lab", at=3000.0, by="bob", reason="again") == 0, (
        "what is reset stays as it is"
    )


def test_a_breaker_that_trips_again_holds_again_and_the_holding_come_first(journal: Journal) -> None:
    journal.append(records(started(), BreakerTripped(reason="one")))
    journal.reset_breaker("lab", at=1500.0, by="ann", reason="looked")
    other = RUN[:-4] + "efgh"
    journal.append(records(started(), BreakerTripped(reason="two"), run=other, at=500.0))
    row = journal.tripped("lab")
    assert row is not None
    assert (row.run, row.reason) == (other, "two")
    assert [one.reason for one in journal.breakers()] == ["two", "one"]


def test_a_journal_of_the_first_schema_is_led_to_todays(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with sqlite3.connect(path) as old:
        for statement in MIGRATIONS[0]:
            old.execute(statement)
        old.execute(f"PRAGMA application_id = {APPLICATION}")
        old.execute("PRAGMA user_version = 1")
    old.close()
    with Journal.open(tmp_path) as journal:
        journal.append(records(started(), BreakerTripped(reason="one")))
        assert journal.tripped("lab") is not None


def test_evidence_that_cannot_be_written_is_one_line_and_what_to_do(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "state") as journal:
        kept = journal.keep_evidence("run", "gpu01", "stop", {"kernel.txt": b"x"})
        assert (Path(kept) / "kernel.txt").read_bytes() == b"x"
        assert Path(kept).is_relative_to(tmp_path / "state" / "evidence")
    (tmp_path / "other" / "evidence").parent.mkdir()
    (tmp_path / "other" / "evidence").touch()
    with (
        Journal.open(tmp_path / "other") as journal,
        pytest.raises(JournalError, match="evidence cannot be kept") as error,
    ):
        journal.keep_evidence("run", "gpu01", "stop", {})
    assert "FLEETFIX_STATE_DIR" in error.value.hint


def test_folders_that_are_missing_are_made_for_this_user_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folder = tmp_path / "state" / "fleetfix" / "lab"
    make_private(folder)
    make_private(folder)
    made = (folder, folder.parent, folder.parent.parent)
    assert [stat.S_IMODE(one.stat().st_mode) for one in made] == [0o700] * 3
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
