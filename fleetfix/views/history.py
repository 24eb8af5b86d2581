"""What the journal tells of past runs: the list of them, one run, one host of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fleetfix.chain import Misfit, Verified
from fleetfix.commands import said_of_exit
from fleetfix.events import (
    ChangeFinished,
    ChangeFound,
    ChangeStarted,
    ChangeUndone,
    CommandEnded,
    ConnectionDropped,
    ConnectionReturned,
    EvidenceKept,
    HostCommitted,
    HostConnected,
    HostFinished,
    HostLost,
    HostNotUndone,
    HostReleased,
    HostSaid,
    LeaseAwaited,
    Record,
    RollbackFinished,
    RollbackStarted,
    RunResumed,
    RunStarted,
    StepFinished,
    StepPlanned,
    StepStarted,
)
from fleetfix.hostset import HostSet
from fleetfix.runs import RunRow
from fleetfix.state import RunState
from fleetfix.views.amounts import count, duration, rate, size, unit, when
from fleetfix.views.checkpoints import said_of_change
from fleetfix.views.grouping import counted, fold
from fleetfix.views.lines import awaited, found, returned, settled
from fleetfix.views.neutral import many_lines, one_line
from fleetfix.views.paint import PLAIN, Paint
from fleetfix.views.plan import why_ended
from fleetfix.views.summary import tally

OUTPUT_LINES = 20
"""Last lines of one change's output that are shown; the JSON has what the journal has."""


def runs_text(rows: Sequence[RunRow], paint: Paint = PLAIN) -> str:
    """List runs, one a line, the newest first."""
    if not rows:
        return "no run is in the journal yet"
    table = [(row.run, when(row.began), how_it_ended(row), fold(HostSet(row.hosts), 32)) for row in rows]
    widths = [max(len(line[column]) for line in table) for column in range(4)]
    lines = []
    for row, line in zip(rows, table, strict=True):
        words = [f"{word:<{width}}" for word, width in zip(line, widths, strict=True)]
        lines.append("  ".join([*words, *_more(row, paint)]).rstrip())
    return "\n".join(lines)


def _more(row: RunRow, paint: Paint) -> Iterator[str]:
    if row.dry:
        yield "dry run"
    if row.outcomes:
        yield tally(row.outcomes, paint)
    if row.reason:
        yield f"({one_line(row.reason, 60)})"


def how_it_ended(row: RunRow) -> str:
    """`exit 0`, `running`, or `not finished` where its controller died."""
    if row.exit is not None and not row.driven:
        return f"exit {row.exit}"
    return "running" if row.driven else "not finished"


def misfit_text(misfit: Misfit) -> str:
    """The first thing of a run that is not as it was written, in one line."""
    record = "" if misfit.seq is None else f"record {misfit.seq} "
    return f"run {one_line(misfit.run)}: {record}{one_line(misfit.why)}"


def verified_text(found: Sequence[Verified], misfits: Sequence[Misfit]) -> str:
    """What came of going over the journal, in a few lines."""
    older = [one for one in found if one.older]
    fit = f"{count(sum(one.covered for one in found), 'record')} of {count(len(found), 'run')} fit"
    lines = [f"{fit}; {count(len(misfits), 'misfit')}" if misfits else f"{fit} the chain"]
    if older:
        records = count(sum(one.older for one in older), "record")
        lines.append(
            f"{records} of {count(len(older), 'run')} are older than the chain: nothing tells of them"
        )
    return "\n".join(lines)


def run_head(state: RunState) -> str:
    """Who ran what, where and when."""
    started = state.started
    if started is None:
        return f"run {state.run}"
    lines = [
        f"run {state.run}",
        f"  command    {one_line(started.command)}"
        if started.command
        else f"  playbook   {started.playbook}, from {started.source} ({started.digest[:12]})",
        f"  hosts      {counted(HostSet(started.hosts))}, inventory {started.inventory}",
        f"  by         {started.operator} on {started.controller}, {when(state.began_at)}",
    ]
    if started.plan:
        lines.append(f"  plan       saved by {started.plan}")
    if started.settings:
        told = ", ".join(f"{key}={value}" for key, value in started.settings.items())
        lines.append(f"  settings   {one_line(told)}")
    if started.reason:
        lines.append(f"  reason     {one_line(started.reason)}")
    return "\n".join(lines + (["  dry run: nothing was changed"] if started.dry else []))


# -- one host -------------------------------------------------------------------------------------


def host_text(records: Iterable[Record], host: str, paint: Paint = PLAIN) -> str:
    """Tell all that happened on one host, in order, with the state of each change's undo."""
    own = [record for record in records if _of(record, host)]
    undone = {r.event.change: r.event for r in own if isinstance(r.event, ChangeUndone)}
    began = next((r.at for r in own if isinstance(r.event, RunStarted)), own[0].at if own else 0.0)
    lines: list[str] = []
    touched, back_at, before = False, 0.0, began
    for record in own:
        at = f"+{duration(record.at - began)}"
        touched = touched or isinstance(record.event, ChangeStarted)
        match record.event:
            case RollbackStarted():
                back_at = record.at
                told = [f"{paint('warn', 'going back')}: {one_line(record.event.reason)}"]
            case ChangeUndone():
                told = [_undone(record.event, record.at - before, paint)]
            case RollbackFinished():
                told = [f"  {paint.outcome(record.event.result)} after {duration(record.at - back_at)}"]
            case _:
                told = list(_told(record, undone, paint, touched=touched))
        before = record.at
        lines += [f"{at:>13}  {told[0]}", *(f"{'':13}  {more}" for more in told[1:])] if told else []
    return "\n".join(lines)


def _of(record: Record, host: str) -> bool:
    if isinstance(record.event, RunResumed):
        return host in record.event.hosts
    return getattr(record.event, "host", host) == host


def _told(record: Record, undone: dict[str, ChangeUndone], paint: Paint, *, touched: bool) -> Iterator[str]:
    event = record.event
    match event:
        case HostConnected():
            durable = "" if event.durable else ", records do not survive a reboot"
            yield one_line(f"connected as {event.user}, Python {event.python}{durable}")
        case ConnectionDropped():
            yield f"{paint('warn', 'connection dropped')}: {one_line(event.reason)}; tried again"
        case ConnectionReturned() | LeaseAwaited():
            yield awaited(event) if isinstance(event, LeaseAwaited) else returned(event)
        case HostLost():
            yield f"{paint('bad', 'lost')}: {one_line(str(event.failure))}"
        case StepPlanned():
            yield from _planned(event)
        case StepStarted():
            yield paint(
                "strong", f"{event.step}" + (f", attempt {event.attempt}" if event.attempt > 1 else "")
            )
        case ChangeStarted():
            undo = _undo_state(undone.get(event.change), paint)
            yield f"  {said_of_change(event.shown)} [{event.shown.risk}] {undo}".rstrip()
        case ChangeFinished():
            yield from _change_finished(event, paint)
        case StepFinished():
            yield _step_finished(event, paint, touched=touched)
        case EvidenceKept():
            yield f"  evidence kept in {one_line(event.folder)}:"
            for file in event.files:
                part = ", a part of it" if file.name.removesuffix(".txt") in event.cut else ""
                yield f"    {file.name} ({size(file.bytes)}{part}, sha256 {file.sha256[:16]})"
            yield from (f"    {paint('warn', 'missing')} {one_line(one)}" for one in event.missing)
            yield from (f"    not here {one_line(one)}" for one in event.lacking)
        case HostSaid():
            yield f"  {event.step}: {one_line(event.text)}" if event.step else one_line(event.text)
        case CommandEnded():
            yield _command_ended(event, paint)
        case ChangeFound() | HostCommitted() | HostReleased() | HostNotUndone() | RunResumed():
            yield _afterwards(event)
        case HostFinished():
            yield from _finished(event, paint)


def _afterwards(
    event: ChangeFound | HostCommitted | HostReleased | HostNotUndone | RunResumed,
) -> str:
    if isinstance(event, HostNotUndone):
        return f"left as it is: {one_line(str(event.failure))}"
    if isinstance(event, ChangeFound):
        return f"  {event.step}: {found(event)}"
    why = f" ({one_line(event.reason)})" if event.reason else ""
    if isinstance(event, RunResumed):
        return f"the run was taken up again, by {event.operator} on {event.controller}{why}"
    return f"{settled(event)}, by {event.operator} on {event.controller}{why}"


def _command_ended(event: CommandEnded, paint: Paint) -> str:
    said = "nothing" if event.exit is None else said_of_exit(event.exit)
    if event.failure is not None:
        said = one_line(str(event.failure))
    printed = f"{size(event.stdout_bytes)} on stdout, {size(event.stderr_bytes)} on stderr, not kept"
    return f"{paint('good' if event.exit == 0 else 'bad', said)} after {duration(event.seconds)}: {printed}"


def _planned(event: StepPlanned) -> Iterator[str]:
    if event.blocked:
        yield f"plan {event.step}: blocked: {one_line(event.blocked)}"
    elif event.pending:
        what = "; ".join(said_of_change(change) for change in event.changes)
        yield f"plan {event.step}: {what or event.verdict or 'will be checked'}"
    yield from (f"plan {event.step}: note: {one_line(note)}" for note in event.notes)


def _undo_state(undone: ChangeUndone | None, paint: Paint) -> str:
    if undone is None:
        return ""
    return paint("warn", "undone") if undone.ok else paint("bad", "NOT undone")


def _undone(event: ChangeUndone, seconds: float, paint: Paint) -> str:
    """A change that was taken back; how long it took is the time since the record before it."""
    word = "undone" if event.ok else paint("bad", "NOT undone")
    why = f": {one_line(str(event.failure))}" if event.failure else ""
    return f"  {event.step}: {word} in {duration(seconds)}: {one_line(event.summary)}{why}"


def _change_finished(event: ChangeFinished, paint: Paint) -> Iterator[str]:
    if event.ok:
        yield f"  done in {duration(event.seconds)}"
    else:
        why = one_line(str(event.failure)) if event.failure else f"exit {event.exit}"
        ended = f", exit {event.exit}" if event.exit and event.failure else ""
        yield f"  {paint('bad', 'failed')} after {duration(event.seconds)}{ended}: {why}"
    for name, text in (("stdout", event.stdout), ("stderr", event.stderr)):
        lines = many_lines(text)
        if lines:
            left = f" (last {OUTPUT_LINES} of {len(lines)} lines)" if len(lines) > OUTPUT_LINES else ""
            cut = " (cut on the host)" if event.cut else ""
            yield f"  {name}{left}{cut}:"
            yield from (f"    {line}" for line in lines[-OUTPUT_LINES:])


def _step_finished(event: StepFinished, paint: Paint, *, touched: bool) -> str:
    reason = "" if event.result == "changed" else why_ended(event, touched=touched)
    measured = f" [{rate(event.measured.rate)} {unit(event.measured)}]" if event.measured else ""
    took = f" ({duration(event.seconds)})" if event.seconds >= 1 else ""
    return f"  {paint.outcome(event.result)}{f': {reason}' if reason else ''}{measured}{took}"


def _finished(event: HostFinished, paint: Paint) -> Iterator[str]:
    why = one_line(str(event.failure)) if event.failure else one_line(event.reason)
    where = f" at {event.step}" if event.step and event.failure else ""
    yield paint.outcome(event.outcome) + where + (f": {why}" if why else "")
    if event.job_stopped:
        yield paint("bad", "JOB STOPPED, NOT RESTARTED")
    yield from (f"left open: {one_line(item)}" for item in event.open)
