"""The journal: every record of every run on this controller, in one SQLite file.

A record is durable when `append` returns (WAL, synchronous=FULL, one transaction an append). What is
derived from records (the list of runs, the last outcome of each host, measurements) is written in the
same transaction, and so is the digest by which each record covers the one before (`chain`). Readers
never wait for a writer, nor a writer for readers. Folder 0700, files 0600.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import sqlite3
import stat
import statistics
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fleetfix import evidence_folder
from fleetfix.action import Measurement
from fleetfix.chain import (
    NOTHING,
    Head,
    Misfit,
    Row,
    Verified,
    before_first,
    digest_of,
    link_of,
    verify,
    verify_links,
)
from fleetfix.errors import JournalError, UsageError
from fleetfix.events import (
    EVENT,
    BreakerTripped,
    HostFinished,
    Record,
    RollbackStarted,
    RunFinished,
    RunResumed,
    RunStarted,
    StepFinished,
)
from fleetfix.folders import make_private
from fleetfix.inventory_sources.trust import distrust
from fleetfix.runs import BreakerRow, RunRow

APPLICATION = 0x666C6678
"""`flfx`, in the header of the file: no other program's database is taken for a journal."""

BUSY_SECONDS = 20.0
BASELINE_OF = 5
"""A baseline is the median of this many proven measurements, the newest: one lucky run does not
raise the bar for good, and one slow one does not lower it."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE records (
            run TEXT, seq INTEGER, at REAL NOT NULL, v INTEGER NOT NULL, kind TEXT NOT NULL,
            host TEXT, event TEXT NOT NULL, PRIMARY KEY (run, seq)
        ) WITHOUT ROWID""",
        """CREATE TABLE runs (
            run TEXT PRIMARY KEY, playbook TEXT NOT NULL, began REAL NOT NULL, ended REAL,
            exit INTEGER, dry INTEGER NOT NULL, hosts TEXT NOT NULL, operator TEXT NOT NULL,
            controller TEXT NOT NULL, reason TEXT NOT NULL
        ) WITHOUT ROWID""",
        "CREATE INDEX runs_by_time ON runs (began)",
        """CREATE TABLE outcomes (
            run TEXT, host TEXT, outcome TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (run, host)
        ) WITHOUT ROWID""",
        """CREATE TABLE measurements (
            job TEXT, at REAL, run TEXT, host TEXT, scope TEXT NOT NULL, rate REAL NOT NULL,
            measurement TEXT NOT NULL, PRIMARY KEY (job, at, run, host)
        ) WITHOUT ROWID""",
    ),
    (
        """CREATE TABLE breakers (
            inventory TEXT, tripped REAL, run TEXT, reason TEXT NOT NULL,
            reset REAL, reset_by TEXT NOT NULL DEFAULT '', reset_reason TEXT NOT NULL DEFAULT '',
            PRIMARY KEY (inventory, tripped, run)
        ) WITHOUT ROWID""",
    ),
    (
        # Records from before have none: of them nothing tells whether they are as they were written.
        "ALTER TABLE records ADD COLUMN digest TEXT NOT NULL DEFAULT ''",
        """CREATE TABLE chains (
            run TEXT PRIMARY KEY, place INTEGER NOT NULL UNIQUE, first INTEGER NOT NULL,
            start TEXT NOT NULL, link TEXT NOT NULL, seq INTEGER NOT NULL, digest TEXT NOT NULL
        ) WITHOUT ROWID""",
    ),
)
"""Statements that lead from each schema version (`user_version`) to the next; only ever appended to."""

_HEAD = "run, place, first, start, link, seq, digest"

_IS_COMMAND = (
    "EXISTS (SELECT 1 FROM records WHERE records.run = runs.run AND seq = 1 "
    "AND json_extract(event, '$.command') <> '')"
)
"""Whether a run of the table was a command of `exec`."""


class Journal:
    """An open journal. Safe to use from several threads; one process drives a run, many may read it."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder = folder
        self.path = folder / "journal.db"
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """Open the journal of this folder; folder, file and schema are made where they lack.

        Raises JournalError: the folder cannot be written, the file is no journal, is damaged, or was
        made by a newer fleetfix.
        """
        path = folder / "journal.db"
        with _spoken(path):
            _make_private(folder, path)
            connection = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                _prepare(connection, path)
            except BaseException:
                connection.close()
                raise
        return cls(folder, connection)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- writing ----------------------------------------------------------------------------------

    def append(self, records: Sequence[Record]) -> None:
        """Keep records; they are durable when this returns, all of them or none."""
        with self._lock, _spoken(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                heads: dict[str, Head] = {}
                for record in records:
                    self._keep(record, heads)
                for head in heads.values():
                    self._connection.execute(
                        "INSERT OR REPLACE INTO chains VALUES (?, ?, ?, ?, ?, ?, ?)",
                        (head.run, head.place, head.first, head.start, head.link, head.seq, head.digest),
                    )
                self._connection.execute("COMMIT")
            except BaseException:
                # After some errors (a full disk) SQLite has rolled back by itself.
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    def _keep(self, record: Record, heads: dict[str, Head]) -> None:
        event = record.event
        text = json.dumps(event.model_dump(mode="json"), separators=(",", ":"))
        row = Row(record.seq, record.at, record.v, event.kind, getattr(event, "host", None), text, "")
        digest = self._chained(record.run, row, heads)
        try:
            self._connection.execute(
                "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (record.run, *row[:-1], digest)
            )
        except sqlite3.IntegrityError as error:
            raise JournalError(
                f"run {record.run} is written by another process too (record {record.seq} is taken)",
                hint="let that process end before this run is taken up again",
            ) from error
        self._derive(record)

    def _chained(self, run: str, row: Row, heads: dict[str, Head]) -> str:
        """The digest of a record that is to be kept; the head of its run moves on to it."""
        head = heads.get(run) or self._head(run)
        if head is None:
            digest = digest_of(before_first(run), run, row)
            last = self._connection.execute(
                "SELECT place, link FROM chains ORDER BY place DESC LIMIT 1"
            ).fetchone()
            # Of the runs that begin in this very transaction the last is not in the table yet.
            place, link = max([last or (0, NOTHING), *((one.place, one.link) for one in heads.values())])
            head = Head(run, place + 1, row.seq, digest, "", row.seq, digest)
            head.link = link_of(link, head)
        else:
            digest = digest_of(head.digest, run, row)
            head.seq, head.digest = row.seq, digest
        heads[run] = head
        return digest

    def _head(self, run: str) -> Head | None:
        row = self._connection.execute(f"SELECT {_HEAD} FROM chains WHERE run = ?", (run,)).fetchone()
        return None if row is None else Head(*row)

    def _derive(self, record: Record) -> None:
        event, execute = record.event, self._connection.execute
        match event:
            case RunStarted():
                execute(
                    "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, NULL, NULL, ?, ?, ?, ?, ?)",
                    (
                        *(record.run, event.playbook, record.at, event.dry, json.dumps(event.hosts)),
                        *(event.operator, event.controller, event.reason),
                    ),
                )
            case RunResumed():
                execute("UPDATE runs SET ended = NULL, exit = NULL WHERE run = ?", (record.run,))
                for host in event.hosts:
                    execute("DELETE FROM outcomes WHERE run = ? AND host = ?", (record.run, host))
            case RunFinished():
                execute(
                    "UPDATE runs SET ended = ?, exit = ? WHERE run = ?", (record.at, event.exit, record.run)
                )
            case BreakerTripped():
                execute(
                    "INSERT OR IGNORE INTO breakers (inventory, tripped, run, reason) VALUES (?, ?, ?, ?)",
                    (self._inventory_of(record.run), record.at, record.run, event.reason),
                )
            case HostFinished():
                execute(
                    "INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?)",
                    (record.run, event.host, event.outcome, record.at),
                )
            case RollbackStarted():
                execute(
                    "UPDATE outcomes SET outcome = 'rollback_pending', at = ? WHERE run = ? AND host = ?",
                    (record.at, record.run, event.host),
                )
            case StepFinished(measured=Measurement() as measured, proven=True):
                execute(
                    "INSERT OR REPLACE INTO measurements VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        *(measured.job, record.at, record.run, event.host, measured.scope, measured.rate),
                        measured.model_dump_json(),
                    ),
                )

    def keep_evidence(self, run: str, host: str, step: str, files: Mapping[str, bytes]) -> str:
        """Keep files of a host beside the journal, durably, and say in which folder."""
        try:
            return str(evidence_folder.keep(self.folder, run, host, step, files))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            message = f"evidence cannot be kept in {self.folder}: {reason}"
            raise JournalError(message, hint=_ELSEWHERE) from error

    def sweep_evidence(self, before: float) -> list[str]:
        """Delete evidence that was kept before then (seconds since the epoch), but none of a run that
        is not over; says of which runs."""

        def is_needed(run: str) -> bool:
            row = self.run(run)
            return row is not None and (row.exit is None or row.driven or bool(_OPEN & row.outcomes.keys()))

        return evidence_folder.sweep(self.folder, before, is_needed)

    def _inventory_of(self, run: str) -> str:
        query = "SELECT event FROM records WHERE run = ? AND kind = 'run_started' ORDER BY seq DESC LIMIT 1"
        row = self._connection.execute(query, (run,)).fetchone()
        return "" if row is None else str(json.loads(row[0])["inventory"])

    def reset_breaker(self, inventory: str, *, at: float, by: str, reason: str) -> int:
        """Let runs change hosts of this inventory again; says how many trips that settles."""
        query = (
            "UPDATE breakers SET reset = ?, reset_by = ?, reset_reason = ?"
            " WHERE inventory = ? AND reset IS NULL"
        )
        with self._lock, _spoken(self.path):
            return self._connection.execute(query, (at, by, reason, inventory)).rowcount

    @contextlib.contextmanager
    def drive(self, run: str) -> Iterator[None]:
        """Hold a run for this process; JournalError where another one of this controller drives it.

        The kernel lets go of the hold when the process ends, however it ends.
        """
        with _spoken(self.path):
            self._hold(run).parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self._hold(run), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalError(
                    f"run {run} is being driven by another process of this machine",
                    hint=f"fleetfix watch {run}, or fleetfix stop {run}",
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
            yield
            with contextlib.suppress(OSError):
                self._hold(run).unlink()
        finally:
            os.close(descriptor)

    def driven(self, run: str) -> bool:
        """Whether a process of this controller drives the run now."""
        try:
            descriptor = os.open(self._hold(run), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def driver(self, run: str) -> int | None:
        """The process of this controller that drives the run now; None where none does."""
        if not self.driven(run):
            return None
        try:
            return int(self._hold(run).read_text())
        except (OSError, ValueError):
            return None

    def _hold(self, run: str) -> Path:
        return self.folder / "driven" / run.replace("/", "_")

    # -- reading ----------------------------------------------------------------------------------

    def records(self, run: str, *, host: str | None = None, after: int = 0) -> Iterator[Record]:
        """Tell the records of a run, oldest first; with `host`, those of it and of the run itself; those
        that come `after` a number."""
        query = "SELECT seq, at, v, event FROM records WHERE run = ? AND seq > ? "
        query += "AND (host IS NULL OR host = ?) ORDER BY seq" if host is not None else "ORDER BY seq"
        values = (run, after) if host is None else (run, after, host)
        for seq, at, v, text in self._ask(query, values):
            try:
                event = EVENT.validate_json(text)
            except ValueError as error:
                raise JournalError(
                    f"record {seq} of run {run} cannot be read by this fleetfix (schema {v})",
                    hint="it was written by a newer version: upgrade this one",
                ) from error
            yield Record(v=v, run=run, seq=seq, at=at, event=event)

    def runs(self, limit: int = 20) -> tuple[RunRow, ...]:
        """List runs, the newest first."""
        query = "SELECT * FROM runs ORDER BY began DESC, run DESC LIMIT ?"
        return tuple(self._row(row) for row in self._ask(query, (limit,)))

    def every_run(self) -> tuple[str, ...]:
        """The id of each run that anything here is about, also of one that is no longer listed."""
        query = (
            "SELECT run FROM runs UNION SELECT run FROM chains UNION SELECT run FROM records ORDER BY run"
        )
        return tuple(str(row[0]) for row in self._ask(query, ()))

    def run(self, run: str) -> RunRow | None:
        """Tell of one run, by its whole id."""
        rows = self._ask("SELECT * FROM runs WHERE run = ?", (run,))
        return self._row(rows[0]) if rows else None

    def find(self, text: str, *, dry: bool = True, commands: bool | None = None) -> str:
        """Find the one run whose id is, or begins with, this; `last` is the newest.

        Without `dry`, `last` passes over what has nothing to go back on: dry runs and, but where they
        are wanted, commands. Raises JournalError where there is none or more than one, UsageError where
        it is a command and none is wanted.
        """
        commands = dry if commands is None else commands
        if text == "last":
            query = f"SELECT run FROM runs WHERE dry <= ? AND (? OR NOT {_IS_COMMAND})"
            newest = self._ask(f"{query} ORDER BY began DESC, run DESC LIMIT 1", (dry, commands))
            if not newest:
                raise JournalError("no such run is in the journal yet", hint="`fleetfix run` makes one")
            return str(newest[0][0])
        rows = self._ask(
            "SELECT run FROM runs WHERE substr(run, 1, ?) = ? ORDER BY run = ? DESC, began DESC LIMIT 4",
            (len(text), text, text),
        )
        found = [str(row[0]) for row in rows]
        if not found or not text:
            raise JournalError(
                f"no run is called {text!r} in this journal", hint="`fleetfix runs` lists them"
            )
        if len(found) > 1 and found[0] != text:
            listed = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
            raise JournalError(f"{text!r} begins more than one run: {listed}", hint="give more of the id")
        if not commands and self._ask(f"SELECT 1 FROM runs WHERE run = ? AND {_IS_COMMAND}", (found[0],)):
            raise UsageError(f"run {found[0]} was a command: there is nothing in it to take up or undo")
        return found[0]

    def outcomes(self, run: str) -> dict[str, str]:
        """How each host of a run ended, as far as the run came."""
        return dict(self._ask("SELECT host, outcome FROM outcomes WHERE run = ?", (run,)))

    def head(self, run: str) -> str:
        """The head of a run's chain, `SEQ:DIGEST`, as its hosts keep it; empty where it has none."""
        with self._lock, _spoken(self.path):
            head = self._head(run)
        return "" if head is None else head.anchor

    def verify(self, run: str) -> Verified:
        """Go over the records of a run, and what is listed of it, for what is not as it was written."""
        with self._lock, _spoken(self.path), self._at_one_moment():
            columns = "seq, at, v, kind, host, event, digest"
            ask = self._connection.execute
            rows = ask(f"SELECT {columns} FROM records WHERE run = ? ORDER BY seq", (run,))
            found = verify(run, self._head(run), (Row(*row) for row in rows))
            if found.misfit is None and not self._listed_as_recorded(run):
                misfit = Misfit(run, None, "the list of runs says otherwise than its records")
                found = dataclasses.replace(found, misfit=misfit)
        return found

    @contextlib.contextmanager
    def _at_one_moment(self) -> Iterator[None]:
        """Read what stood together, whatever another process writes meanwhile."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("ROLLBACK")

    def _listed_as_recorded(self, run: str) -> bool:
        """Whether what is listed beside the records (runs, outcomes, trips, rates) says what they say."""
        ask = self._connection.execute
        query = f"SELECT at, event FROM records WHERE run = ? AND kind IN {_LISTED} ORDER BY seq"
        try:
            due = _as_listed((at, json.loads(text)) for at, text in ask(query, (run,)))
        except (ValueError, KeyError, TypeError):
            return False  # of a record that no chain covers
        columns = "playbook, began, ended, exit, dry, hosts, operator, controller, reason"
        measured = "SELECT at, host, job, scope, rate, measurement FROM measurements WHERE run = ?"
        found = _Listed(
            run=ask(f"SELECT {columns} FROM runs WHERE run = ?", (run,)).fetchone(),
            outcomes=dict(ask("SELECT host, outcome FROM outcomes WHERE run = ?", (run,))),
            trips=set(ask("SELECT tripped, reason FROM breakers WHERE run = ?", (run,))),
            rates={tuple(of): _read(text) for *of, text in ask(measured, (run,))},
        )
        return found == due

    def verify_links(self) -> Misfit | None:
        """Go over the beginnings of all runs: whether a whole run is gone."""
        heads = self._ask(f"SELECT {_HEAD} FROM chains ORDER BY place", ())
        return verify_links(Head(*row) for row in heads)

    def fits(self, run: str, anchor: str) -> bool:
        """Whether what a host keeps of a run's chain is what stands here."""
        seq, _, digest = anchor.partition(":")
        if not seq.isdigit() or len(seq) > 15:
            return False
        query = "SELECT 1 FROM records WHERE run = ? AND seq = ? AND digest = ?"
        return bool(digest and self._ask(query, (run, int(seq), digest)))

    def last_seq(self, run: str) -> int:
        """The number of the run's last record; 0 where it has none."""
        return int(self._ask("SELECT coalesce(max(seq), 0) FROM records WHERE run = ?", (run,))[0][0])

    def breakers(self, limit: int = 100) -> tuple[BreakerRow, ...]:
        """Every trip of a breaker: those that hold runs now first, then the newest first."""
        query = (
            "SELECT inventory, tripped, run, reason, reset, reset_by, reset_reason FROM breakers"
            " ORDER BY reset IS NOT NULL, tripped DESC LIMIT ?"
        )
        return tuple(BreakerRow(*row) for row in self._ask(query, (limit,)))

    def tripped(self, inventory: str) -> BreakerRow | None:
        """The first trip that still holds runs on this inventory; None where none does."""
        query = (
            "SELECT inventory, tripped, run, reason, reset, reset_by, reset_reason FROM breakers"
            " WHERE inventory = ? AND reset IS NULL ORDER BY tripped LIMIT 1"
        )
        rows = self._ask(query, (inventory,))
        return BreakerRow(*rows[0]) if rows else None

    def baseline(self, job: str) -> Measurement | None:
        """The rate that this job has proven: the median one of the newest few, all of one scope."""
        rows = self._ask(
            "SELECT measurement FROM measurements WHERE job = ? ORDER BY at DESC LIMIT ?",
            (job, BASELINE_OF),
        )
        proven = [Measurement.model_validate_json(row[0]) for row in rows]
        alike = [one for one in proven if one.scope == proven[0].scope]
        if not alike:
            return None
        middle = statistics.median_low(one.rate for one in alike)
        return next(one for one in alike if one.rate == middle)

    def _row(self, row: tuple[Any, ...]) -> RunRow:
        run, playbook, began, ended, exit, dry, hosts, operator, controller, reason = row
        counts = self._ask("SELECT outcome, count(*) FROM outcomes WHERE run = ? GROUP BY outcome", (run,))
        return RunRow(
            run=run,
            playbook=playbook,
            began=began,
            ended=ended,
            exit=exit,
            dry=bool(dry),
            hosts=tuple(json.loads(hosts)),
            operator=operator,
            controller=controller,
            reason=reason,
            driven=self.driven(run),
            outcomes=dict(counts),
        )

    def _ask(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        with self._lock, _spoken(self.path):
            return self._connection.execute(query, values).fetchall()


_LISTED = (
    "('run_started', 'run_resumed', 'run_finished', 'host_finished', 'breaker_tripped', 'step_finished')"
)


@dataclasses.dataclass
class _Listed:
    """What the tables beside the records have of a run."""

    run: tuple[object, ...] | None = None
    outcomes: dict[str, str] = dataclasses.field(default_factory=dict)
    trips: set[tuple[object, ...]] = dataclasses.field(default_factory=set)
    rates: dict[tuple[object, ...], object] = dataclasses.field(default_factory=dict)


def _as_listed(events: Iterable[tuple[float, Any]]) -> _Listed:
    """What those tables have by its records."""
    due = _Listed()
    begun: tuple[object, ...] = ()
    ended: tuple[float | None, int | None] = (None, None)
    for at, event in events:
        match event["kind"]:
            case "host_finished":
                due.outcomes[event["host"]] = event["outcome"]
            case "run_finished":
                ended = at, event["exit"]
            case "breaker_tripped":
                due.trips.add((at, event["reason"]))
            case "step_finished":
                of = event.get("measured")
                if of is not None and event.get("proven"):
                    due.rates[at, event["host"], of["job"], of["scope"], of["rate"]] = of
            case "run_resumed":
                ended = None, None
                for host in event["hosts"]:
                    due.outcomes.pop(host, None)
            case _:
                ended = None, None
                by = event["operator"], event["controller"], event.get("reason", "")
                begun = event["playbook"], at, event.get("dry", False), json.dumps(event["hosts"]), *by
    if begun:
        due.run = (*begun[:2], *ended, *begun[2:])
    return due


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


# -- making and opening ---------------------------------------------------------------------------


def _make_private(folder: Path, path: Path) -> None:
    """Make folder and file so that nobody else ever could open them; SQLite copies the file's mode."""
    made = not folder.exists()
    make_private(folder)
    if made:
        folder.chmod(0o700)
    if why := distrust(folder):
        raise JournalError(
            f"the state folder {folder} is not private: {why}",
            hint=f"chmod go-w {folder}, or {_ELSEWHERE}",
        )
    _close_to_others(folder)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _close_to_others(folder: Path) -> None:
    """Take from others what a copy or a restored backup has given them of what is ours."""
    for name, mode in _PRIVATE.items():
        with contextlib.suppress(FileNotFoundError):
            place = folder / name
            status = place.stat()
            if stat.S_IMODE(status.st_mode) & 0o077 and status.st_uid == os.geteuid():
                place.chmod(mode)


_PRIVATE = {
    **dict.fromkeys(("journal.db", "journal.db-wal", "journal.db-shm"), 0o600),
    **dict.fromkeys(("evidence", "detached", "driven", "crashes"), 0o700),
}
"""What is kept in the state folder, and the mode of each."""


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if _version(connection, path) < len(MIGRATIONS):
        _migrate(connection, path)


def _version(connection: sqlite3.Connection, path: Path) -> int:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application != APPLICATION and tables:
        raise JournalError(f"{path} is a database of another program", hint="name another state_dir")
    if version > len(MIGRATIONS):
        raise JournalError(
            f"{path} was written by a newer fleetfix (schema {version})", hint="upgrade this one"
        )
    return version


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Lead the schema to today's in one transaction: a kill leaves the old one whole."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have been first.
        for step in MIGRATIONS[_version(connection, path) :]:
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _spoken(path: Path) -> Iterator[None]:
    """Turn what SQLite and the system say into one line and what to do about it."""
    try:
        yield
    except sqlite3.Error as error:
        raise _meaning(path, str(error)) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise JournalError(f"the journal {path} cannot be written: {reason}", hint=_ELSEWHERE) from error


def _meaning(path: Path, said: str) -> JournalError:
    for part, (message, hint) in _MEANINGS.items():
        if part in said.lower():
            return JournalError(f"the journal {path} {message}", hint=hint)
    return JournalError(f"the journal {path} cannot be used: {said}")


_OPEN = frozenset({"in_doubt", "rollback_pending", "rollback_failed", "cancelled"})
"""Outcomes of hosts on which a run is not over, whatever its exit code."""

_ELSEWHERE = "set FLEETFIX_STATE_DIR, or state_dir in config.toml, to a folder of your own"
_DAMAGED = "move it aside: what was done on hosts stands in the hosts' own logs"
_MEANINGS = {
    "not a database": ("is damaged, or no journal at all", _DAMAGED),
    "malformed": ("is damaged", _DAMAGED),
    "locked": ("is held by another process", "wait for it; one transaction takes milliseconds"),
    "disk is full": ("cannot be written: no space is left", "make room; nothing goes on without a journal"),
    "readonly": ("cannot be written: it is read-only", _ELSEWHERE),
    "unable to open": ("cannot be opened", _ELSEWHERE),
    "disk i/o": ("cannot be used: the disk under it fails", _ELSEWHERE),
}
