"""The plan of a run, folded: what would be done where, what it risks, what is not known yet."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace

from fleetfix.commands import RISK_ORDER
from fleetfix.events import GOOD, ChangeShown, RunStarted, StepFinished, StepPlanned
from fleetfix.hostset import HostSet
from fleetfix.state import HostState, RunState, goes_on
from fleetfix.views.amounts import count, size
from fleetfix.views.checkpoints import oldest, said_of_change
from fleetfix.views.grouping import Group, counted, fold, group
from fleetfix.views.neutral import many_lines, one_line
from fleetfix.views.order import order_text
from fleetfix.views.paint import PLAIN, Paint, Tone

STEP_WIDTH = 10
DIFF_LINES = 200
"""Lines of one change's difference that are shown."""

PLANS = 4
"""Distinct plans from which on those that differ in counts alone are folded too."""

PLAN_LINES = 24
"""Lines that all plans together may take; the first two are always shown whole."""

REASONS = 8
"""Lines on hosts that are given up, and on hosts with nothing to do."""


def plan_text(state: RunState, *, diff: bool = False, paint: Paint = PLAIN) -> str:
    """Write the plan that a survey found; hosts that cannot be worked on come first.

    Of a run that was taken up again and goes on: what is left to do. Of one that has ended: what there
    was to do before anything was changed.
    """
    started = state.started
    if started is None:
        return "nothing was planned"
    shown = _of_now(state)
    lines = [_head(started, HostSet(shown.hosts))]
    lines += _given_up(shown, paint)
    lines += _work(shown, started, paint, diff)
    lines += _begun(shown)
    lines += _idle(shown)
    lines += _terms(shown, started, order_text(state if goes_on(state) else shown, started.policy), paint)
    return "\n".join(lines)


def _of_now(state: RunState) -> RunState:
    """The hosts that the plan is about, with their plans."""
    if goes_on(state):
        return replace(state, hosts={name: state.hosts[name] for name in state.taken_up})
    if state.taken_up:
        return replace(state, hosts={name: _as_before(host) for name, host in state.hosts.items()})
    return state


def _as_before(host: HostState) -> HostState:
    """A host with the plan from before it was touched: the one for what was left says less."""
    steps = {
        id: replace(step, planned=step.before) if step.before else step for id, step in host.steps.items()
    }
    had = host.started and any(step.before is not None and step.before.pending for step in steps.values())
    return replace(host, steps=steps, pending=True if had else host.pending)


def _head(started: RunStarted, hosts: HostSet) -> str:
    digest = f" ({started.digest[:12]})" if started.digest else ""
    return f"plan: {started.playbook} on {counted(hosts)}, from {started.source}{digest}"


# -- hosts that are given up ----------------------------------------------------------------------


def _given_up(state: RunState, paint: Paint) -> Iterator[str]:
    shown, left = 0, HostSet()
    for outcome, found in refusals(state).items():
        for one in group(found, most=PLANS):
            if shown < REASONS:
                yield f"{paint.outcome(outcome)}: {counted(one.hosts)}: {one.text}"
            else:
                left |= one.hosts
            shown += 1
    if left:
        yield f"… and other reasons on {counted(left)}: fleetfix show {state.run} {next(iter(left))}"


def refusals(state: RunState) -> dict[str, list[tuple[str, str]]]:
    """Hosts that the survey gave up, with the reason, by outcome."""
    found: dict[str, list[tuple[str, str]]] = {}
    for host in state.hosts.values():
        if host.started:
            continue
        word, reason = _refusal(host)
        if word:
            found.setdefault(word, []).append((host.name, reason))
    return found


def _refusal(host: HostState) -> tuple[str, str]:
    done = host.finished
    if host.awaits:
        return "waits", one_line(f"run {host.awaits} writes there: it is planned when that has ended")
    if done is not None and done.outcome not in GOOD and done.outcome not in ("not_started", "cancelled"):
        return done.outcome, said_of(host)
    blocked = [step.planned for step in host.steps.values() if step.planned and step.planned.blocked]
    if blocked and (done is None or done.outcome not in GOOD):
        return "blocked", one_line(f"{blocked[0].step}: {blocked[0].blocked}")
    return "", ""


def said_of(host: HostState) -> str:
    """Why a host ended as it did: step, message and hint, on one neutral line."""
    done = host.finished
    failure = (done.failure if done else None) or host.first_failure
    step = f"{done.step}: " if done and done.step else ""
    if failure is None:
        return one_line(step + (done.reason if done else ""))
    hint = f" ({failure.hint})" if failure.hint else ""
    # The reason may go on where the first failure ends: and going back failed too.
    more = done is not None and done.reason.startswith(failure.message)
    return one_line(step + (done.reason if done and more else failure.message) + hint)


def why_ended(event: StepFinished, *, touched: bool) -> str:
    """Why a step ended as it did. A host that was never changed has not recovered: it was well."""
    reason = one_line(event.reason or (str(event.failure) if event.failure else ""))
    if not touched and reason.endswith(": recovered"):
        return reason.removesuffix("recovered") + "as fast as wanted"
    return reason


# -- hosts with something to do -------------------------------------------------------------------


def _work(state: RunState, started: RunStarted, paint: Paint, diff: bool) -> Iterator[str]:
    names = {step: _where(step, name, started) for step, name in started.steps}
    plans = _alike(state, started, diff, PLANS)
    if not diff and sum(len(list(_plan(one, names, paint))) for one in plans) > PLAN_LINES:
        # Counts are given as a range rather than a plan be left out.
        plans = _alike(state, started, diff, 1)
    lines: list[str] = []
    shown = 0
    for one in plans:
        own = list(_plan(one, names, paint))
        if shown > 1 and not diff and len(lines) + len(own) > PLAN_LINES:
            break
        lines += own
        shown += 1
    yield from lines
    if others := plans[shown:]:
        left = HostSet(host for one in others for host in one.hosts)
        more = "another plan" if len(others) == 1 else f"{len(others)} other plans"
        yield ""
        yield f"… and {more} on {counted(left)}: fleetfix show {state.run} {next(iter(left))}"


def _plan(one: Group, names: dict[str, str], paint: Paint) -> Iterator[str]:
    """One plan, under the hosts that have it."""
    yield ""
    yield paint("strong", f"{counted(one.hosts)}:")
    last = ""
    for line in one.text.split("\n"):
        step, _, text = line.partition("\t")
        yield from _labelled(step if step != last else "", names, text, paint)
        last = step or last


def _where(step: str, name: str, started: RunStarted) -> str:
    """A step's name, with the hosts that it counts on where these are not all of the run."""
    if step not in started.only:
        return name
    said = f"[only on {started.only[step]}]"
    return said if not name or name == step else f"{name}  {said}"


def _labelled(step: str, names: dict[str, str], text: str, paint: Paint) -> Iterator[str]:
    """A line under its step's label; where the step has a name, the name stands beside the label."""
    name = names.get(step, "")
    if step and name and name != step:
        yield f"  {step:<{STEP_WIDTH}} {name}"
    label = step if not name or name == step else ""
    yield f"  {label:<{STEP_WIDTH}} {_toned(text, paint)}"


def _toned(text: str, paint: Paint) -> str:
    tones: dict[str, Tone] = {"-": "bad", "+": "good"}
    if text.startswith("note: "):
        return paint("faint", text)
    mark = text[2:3] if text.startswith("  ") else ""
    return paint(tones[mark], text) if mark in tones else text


def _alike(state: RunState, started: RunStarted, diff: bool, most: int) -> list[Group]:
    refused = {host for found in refusals(state).values() for host, _ in found}
    plans = (
        (host.name, "\n".join(_of_host(host, started, diff)))
        for host in state.hosts.values()
        if host.pending and host.name not in refused and not _goes_back(host)
    )
    return group(plans, most=most)


def _of_host(host: HostState, started: RunStarted, diff: bool) -> Iterator[str]:
    """A host's plan, one `step<TAB>text` a line; lines without a step go on from the one before."""
    planned = [host.steps[step].planned for step, _ in started.steps if step in host.steps]
    steps = [step for step in planned if step is not None]
    for step in steps:
        yield from _of_step(step, diff)
    if checks := [step.step for step in steps if step.verdict == "will be checked"]:
        yield f"checks\t{', '.join(checks)}"


def _of_step(planned: StepPlanned, diff: bool) -> Iterator[str]:
    if planned.verdict in ("fail", "unknown"):
        yield f"{planned.step}\t{planned.verdict}{_because(planned)}"
    if planned.pending:
        for change in planned.changes:
            yield f"{planned.step}\t{_of_change(change)}"
            if diff:
                yield from (f"\t  {line}" for line in _difference(change))
    for note in planned.notes:
        yield f"{planned.step}\tnote: {one_line(note)}"


def _because(planned: StepPlanned) -> str:
    return f": {one_line(planned.reason)}" if planned.reason else ""


def _of_change(change: ChangeShown) -> str:
    risk = "" if change.risk == "reversible" else f"  [{change.risk}]"
    fetched = f"  [fetches {size(change.fetch_bytes)}]" if change.fetch_bytes else ""
    return said_of_change(change) + risk + fetched


def _difference(change: ChangeShown) -> Iterator[str]:
    before, after = many_lines(change.before), many_lines(change.after)
    lines = list(difflib.unified_diff(before, after, n=2, lineterm=""))[3:]
    for line in lines[:DIFF_LINES]:
        yield "…" if line.startswith("@@") else line
    if len(lines) > DIFF_LINES:
        yield f"… {len(lines) - DIFF_LINES} lines more"


def _goes_back(host: HostState) -> bool:
    return host.is_open and host.going_back


def _begun(state: RunState) -> Iterator[str]:
    """Hosts of a run that is taken up again on which it had begun, and no plan says what comes."""
    if not goes_on(state):
        return
    begun = [host for host in state.hosts.values() if host.is_open and host.started]
    back = HostSet(host.name for host in begun if host.going_back)
    rest = HostSet(host.name for host in begun if host.pending is False) - back
    for hosts, what in (
        (back, "goes on going back"),
        (rest, "nothing more to change; the rest is checked"),
    ):
        if hosts:
            yield ""
            yield f"{counted(hosts)}: begun before: {what}"


def _idle(state: RunState) -> Iterator[str]:
    begun = goes_on(state)
    idle = HostSet(
        host.name
        for host in state.hosts.values()
        if host.pending is False and not _refusal(host)[0] and not (begun and host.started)
    )
    if idle:
        yield ""
        yield f"{counted(idle)}: nothing to do"
    notes = [
        (host.name, note) for host in state.hosts.values() if host.name in idle for note in _notes(host)
    ]
    folded = group(notes, most=PLANS)
    for one in folded[:REASONS]:
        yield f"  {counted(one.hosts)}: {one.text}"
    if left := HostSet(host for one in folded[REASONS:] for host in one.hosts):
        yield f"  … and other notes on {counted(left)}: fleetfix show {state.run} {next(iter(left))}"


def _notes(host: HostState) -> Iterator[str]:
    for step in host.steps.values():
        if step.planned is not None:
            if step.planned.verdict in ("fail", "unknown"):
                yield f"{step.planned.step}: {step.planned.verdict}{_because(step.planned)}"
            yield from (f"{step.planned.step}: note: {one_line(note)}" for note in step.planned.notes)


# -- the terms of the whole run -------------------------------------------------------------------


MOST_COHORTS = 3


def _as_one(state: RunState) -> Iterator[str]:
    """The hosts that go together; of many cohorts the first."""
    cohorts: dict[str, list[str]] = {}
    for host, name in state.cohorts.items():
        cohorts.setdefault(name, []).append(host)
    for name, hosts in list(cohorts.items())[:MOST_COHORTS]:
        yield f"as one: {counted(HostSet(hosts))}, by {one_line(name)}"
    if len(cohorts) > MOST_COHORTS:
        yield f"as one: {count(len(cohorts) - MOST_COHORTS, 'more cohort')}"


def _terms(state: RunState, started: RunStarted, order: str, paint: Paint) -> Iterator[str]:
    pending = [host for host in state.hosts.values() if host.pending and not _goes_back(host)]
    if not pending:
        return
    yield ""
    fetched = [sum(change.fetch_bytes for change in _changes(host)) for host in pending]
    if any(fetched):
        yield f"to fetch: {size(sum(fetched))} in all, at most {size(max(fetched))} a host"
    if cost := oldest((host.name, change) for host in pending for change in _changes(host)):
        yield cost
    yield from _by_word(state, started, paint)
    yield from _risks(pending, started, paint)
    if nowhere := [step for step, hosts in started.only.items() if not hosts]:
        yield paint("warn", f"on none of these hosts by their own `hosts`: {', '.join(nowhere)}")
    yield from _as_one(state)
    yield f"order: {order}"
    if lost := [host.name for host in pending if host.connected and not host.durable]:
        yield paint(
            "warn",
            f"{fold(lost)}: records lie where a reboot loses them; after one, what was done is unknown",
        )
    for one in group((host.name, host.user) for host in pending if host.user not in ("", "root")):
        # Its lease lies in that user's own folder, where no other user looks.
        yield f"{fold(one.hosts)}: as {one_line(one.text, 40)}, which holds off that user's runs alone"


def _changes(host: HostState) -> Iterator[ChangeShown]:
    for step in host.steps.values():
        yield from step.planned.changes if step.planned and step.planned.pending else ()


def _by_word(state: RunState, started: RunStarted, paint: Paint) -> Iterator[str]:
    """What rests on the author's word: nothing that fleetfix knows proves it."""
    known = {
        step.planned.step: step.planned
        for host in state.hosts.values()
        for step in host.steps.values()
        if step.planned is not None and (step.planned.own_check or step.planned.by_word)
    }
    order = [known[step] for step, _ in started.steps if step in known]
    if blind := [one.step for one in order if one.by_word]:
        yield paint("warn", f"by the author's word, verified by nothing: {', '.join(blind)}")
    if asked := [one.step for one in order if one.own_check]:
        yield f"asked by the author's own check, which ran on these hosts: {', '.join(asked)}"


def _risks(pending: list[HostState], started: RunStarted, paint: Paint) -> Iterator[str]:
    found: dict[str, int] = {}
    for host in pending:
        for step, state in host.steps.items():
            for change in state.planned.changes if state.planned and state.planned.pending else ():
                found[step] = max(found.get(step, 0), RISK_ORDER[change.risk])
    order = [step for step, _ in started.steps if step in found]
    compensable = [step for step in order if found[step] == RISK_ORDER["compensable"]]
    final = [step for step in order if found[step] == RISK_ORDER["irreversible"]]
    if compensable:
        yield f"undo brings back an equal state, not the same one: {', '.join(compensable)}"
    if final:
        yield paint("bad", f"point of no return: {final[0]}; nothing brings back: {', '.join(final)}")
    elif found:
        yield "point of no return: none; every change can be undone"


def summary_of_plan(state: RunState) -> str:
    """One line: how many hosts have something to do."""
    pending = sum(1 for host in state.hosts.values() if host.pending and not _refusal(host)[0])
    return f"{count(pending, 'host')} of {len(state.hosts)} to change"
