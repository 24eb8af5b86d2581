"""How a run ended, on one screen: what is wrong first, equal messages folded, and how to go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from posixpath import dirname

from fleetfix.events import GOOD, Outcome
from fleetfix.hostset import HostSet
from fleetfix.state import HostState, RunState, to_take_up
from fleetfix.views.amounts import duration
from fleetfix.views.grouping import Group, counted, fold, group
from fleetfix.views.neutral import one_line
from fleetfix.views.paint import PLAIN, Paint
from fleetfix.views.plan import said_of
from fleetfix.views.speeds import speeds

WORST_FIRST: tuple[Outcome, ...] = (
    "rollback_failed", "in_doubt", "rollback_pending", "failed", "unproven", "rolled_back", "cancelled",
    "unfinished", "blocked", "busy", "unreachable", "not_started", "pending", "changed", "ok", "skipped",
)  # fmt: skip

MESSAGES = 10
"""Distinct messages that are shown; a screen has 24 lines."""

NOT_CONFIRMED = "not confirmed"
"""The reason of a halt where the operator saw the plan and said no."""

MEANINGS = {
    1: "could not begin", 2: "a host did not end well", 3: "halted by policy",
    4: "hosts were unreachable", 6: "changes found", 70: "a bug", 130: "interrupted",
}  # fmt: skip


def summary_text(state: RunState, code: int, *, paint: Paint = PLAIN) -> str:
    """Write the end of a run; `code` is the exit code it leads to."""
    lines = [*(paint("bad", line) for line in stopped_jobs(state)), *_outcomes(state, paint)]
    if state.halted and state.halted != state.tripped:
        lines.append(paint("bad", f"halted: {one_line(state.halted)}"))
    if state.tripped:
        lines.append(paint("bad", f"the breaker tripped: {one_line(state.tripped)}"))
    if state.paused_seconds:
        lines.append(f"waited {duration(state.paused_seconds)} for the controller's network")
    lines += speeds(state)
    lines += evidence(state)
    lines += _settled(state)
    if code != 0:
        lines += ways_on(state)
    lines.append(last_line(state, code, paint=paint))
    return "\n".join(lines)


def _settled(state: RunState) -> Iterator[str]:
    """Hosts on which the run is over by somebody's word, whatever it had left open there."""
    committed = HostSet(host.name for host in state.hosts.values() if host.committed)
    released = HostSet(host.name for host in state.hosts.values() if host.released)
    if committed:
        yield f"{'committed':<16} {counted(committed)}: what was done stays, there is no way back"
    kept = ((host.name, one_line(str(why))) for host in state.hosts.values() if (why := host.not_undone))
    for one in group(kept)[:MESSAGES]:
        yield f"{'left as it is':<16} {counted(one.hosts)}: {one.text}"
    if released:
        yield f"{'released':<16} {counted(released)}: left as it was, free for other runs"


def unfinished_text(state: RunState, *, paint: Paint = PLAIN) -> str:
    """Write how far a run came whose controller ended in the middle of it."""
    lines = [paint("bad", line) for line in stopped_jobs(state)]
    what = "the way back" if state.going_back else "it"
    lines.append(paint("bad", f"{what} did not finish: its controller ended"))
    for one in left_midway(state.hosts.values()):
        label = paint("bad", f"{'left midway':<16}")
        lines.append(f"{label} {counted(one.hosts)}{f': {one.text}' if one.text else ''}")
    others = {host.name: host for host in state.hosts.values() if not host.midway}
    lines += _outcomes(replace(state, hosts=others), paint)
    lines += _settled(state)
    if to_take_up(state):
        lines.append(f"go on: {_resume(state)}")
    touched = [
        host for host in state.hosts.values() if host.started and not (host.committed or host.released)
    ]
    if touched:
        lines.append(f"go back: {_rollback(state, touched)}")
    return "\n".join(lines)


def last_line(state: RunState, code: int, *, paint: Paint = PLAIN) -> str:
    """`run ID: 3 changed, 1 ok · 42 s · exit 0`."""
    counts = tally(_tally(state), paint)
    took = f" · {duration(state.ended_at - state.began_at)}" if state.ended_at else ""
    meaning = f" ({_meaning(state, code)})" if code in MEANINGS else ""
    ended = paint("good" if code == 0 else "bad", f"exit {code}")
    return f"run {state.run}: {counts}{took} · {ended}{meaning}"


def _meaning(state: RunState, code: int) -> str:
    return state.halted if code == 3 and state.halted == NOT_CONFIRMED else MEANINGS[code]


def tally(counts: dict[str, int], paint: Paint = PLAIN) -> str:
    """`2 failed, 14 changed`: outcomes that occurred, the worst first."""
    words = [paint.outcome(one, f"{counts[one]} {one}") for one in WORST_FIRST if counts.get(one)]
    return ", ".join(words) or "no hosts"


def _tally(state: RunState) -> dict[str, int]:
    counts: dict[str, int] = {}
    for host in state.hosts.values():
        word = host.outcome or "not_started"
        counts[word] = counts.get(word, 0) + 1
    return counts


# -- outcomes -------------------------------------------------------------------------------------


def stopped_jobs(state: RunState) -> Iterator[str]:
    """Whose training does not run, as far as the journal tells; nothing is said before this."""
    hosts = [host for host in state.hosts.values() if host.without_its_job]
    unsure = HostSet(host.name for host in hosts if host.midway and host.start_in_flight)
    stopped = HostSet(host.name for host in hosts) - unsure
    if stopped:
        yield f"JOB STOPPED, NOT RESTARTED: {counted(stopped)}"
    if unsure:
        yield f"JOB STOPPED, NOT KNOWN TO RUN AGAIN: {counted(unsure)}"


def left_midway(hosts: Iterable[HostState]) -> list[Group]:
    """The hosts that were begun and have no end, by what was being done there."""
    doing = ((host.name, ": ".join(filter(None, (host.step, host.doing)))) for host in hosts if host.midway)
    return group((name, one_line(text)) for name, text in doing)


def _outcomes(state: RunState, paint: Paint) -> Iterator[str]:
    shown, left = 0, HostSet()
    for outcome in WORST_FIRST:
        hosts = [host for host in state.hosts.values() if (host.outcome or "not_started") == outcome]
        for one in messages(outcome, hosts):
            if outcome in GOOD or shown < MESSAGES:
                yield _message(outcome, one, paint)
            else:
                left |= one.hosts
            shown += outcome not in GOOD
    if left:
        yield f"… and other messages on {counted(left)}: fleetfix show {state.run}"


def messages(outcome: Outcome, hosts: Sequence[HostState]) -> list[Group]:
    """Why hosts ended so: equal reasons folded; none where the outcome says all."""
    if outcome == "not_started" or (outcome in GOOD and outcome != "skipped"):
        return [Group(HostSet(host.name for host in hosts), "")] if hosts else []
    return group((host.name, said_of(host)) for host in hosts)


def _message(outcome: Outcome, one: Group, paint: Paint) -> str:
    label = paint.outcome(outcome, f"{outcome:<16}")
    return f"{label} {counted(one.hosts)}{f': {one.text}' if one.text else ''}"


# -- evidence ---------------------------------------------------------------------------------------


def evidence(state: RunState) -> Iterator[str]:
    """Where evidence lies, and what could not be had; each host has a folder of its own there."""
    kept = [host for host in state.hosts.values() if host.evidence]
    if not kept:
        return
    first = kept[0].evidence[0].folder
    where = first if len(kept) == 1 else f"{dirname(dirname(first))}/HOST"
    yield f"{'evidence':<16} {counted(HostSet(host.name for host in kept))}: in {one_line(where)}"
    gone = [(host.name, one_line(item)) for host in kept for one in host.evidence for item in one.missing]
    for one in group(gone)[:MESSAGES]:
        yield f"{'':<16} {counted(one.hosts)} without {one.text}"


# -- what to do next ------------------------------------------------------------------------------


def ways_on(state: RunState) -> Iterator[str]:
    """What can be done next, a command a line."""
    order = {outcome: place for place, outcome in enumerate(WORST_FIRST)}
    bad = [
        host
        for host in state.hosts.values()
        if host.midway or host.outcome not in (None, "not_started", *GOOD)
    ]
    bad.sort(key=lambda host: -1 if host.outcome is None else order[host.outcome])
    open_ = [host for host in bad if _left_open(host)]
    if bad:
        yield f"look closer: fleetfix show {state.run} {bad[0].name}"
    was_command = state.started is not None and state.started.command
    on = HostSet(to_take_up(state)) if _was_cut_short(state) and not was_command else HostSet()
    if on:
        yield f"go on with {fold(on)}: {_resume(state)}"
    if open_:
        names = HostSet(host.name for host in open_)
        yield f"go back on {fold(names)}: {_rollback(state, open_)}"
    if state.tripped:
        yield "no run changes hosts of this inventory until: fleetfix breaker reset --reason TEXT"


def _resume(state: RunState) -> str:
    return " ".join(["fleetfix resume", state.run, *_given(state.started.secrets if state.started else ())])


def _rollback(state: RunState, hosts: Iterable[HostState]) -> str:
    needed = {name for host in hosts for change in host.changes.values() for name in change.secrets}
    return " ".join(["fleetfix rollback", state.run, *_given(sorted(needed))])


def _given(secrets: Iterable[str]) -> Iterator[str]:
    """The options that give these secrets; where from is the operator's word."""
    return (f"--secret {name}=SOURCE" for name in secrets)


def _was_cut_short(state: RunState) -> bool:
    """Whether the run has hosts that another try may bring to their ends. What its policy has halted
    would halt again."""
    if state.interrupted or state.count("cancelled") or any(host.is_open for host in state.hosts.values()):
        return True
    return state.halted is None and state.count("unreachable", "busy", "not_started") > 0


def _left_open(host: HostState) -> bool:
    if host.committed or host.released:
        return False
    done = host.finished
    if done is None or done.outcome in ("rolled_back", "blocked", "unreachable", "unfinished", "busy"):
        return bool(done is None and host.changes)
    return bool(done.open or host.changes)
