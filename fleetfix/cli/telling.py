"""Tell a run from the journal."""

from __future__ import annotations

import os
import sys

from fleetfix.cli.state_dir import state_dir
from fleetfix.errors import UsageError
from fleetfix.journal import Journal
from fleetfix.spelling import hint_for
from fleetfix.state import RunState, fold
from fleetfix.views.command import command_summary
from fleetfix.views.fit import fit
from fleetfix.views.history import host_text, run_head
from fleetfix.views.json_lines import json_line
from fleetfix.views.paint import Paint
from fleetfix.views.plan import plan_text
from fleetfix.views.summary import summary_text, unfinished_text

PLAN_LINES = 24
"""A longer plan of a run that did more than plan is shown where it is asked for; a screen has as many."""


def tell_run(text: str, host: str | None, *, diff: bool, json: bool) -> None:
    """Print what the journal has of a run, or of one host of it."""
    with Journal.open(state_dir()) as journal:
        run = journal.find(text)
        driven = journal.driven(run)
        records = list(journal.records(run, host=host))
    state = fold(records)
    if host is not None and host not in state.hosts:
        raise UsageError(f"run {run} has no host {host}", hint=hint_for(host, state.hosts))
    paint = Paint.for_stream(sys.stdout, os.environ)
    if json:
        for record in records:
            print(json_line(record))
    elif host is not None:
        parts = [run_head(state), paint("strong", host), host_text(records, host, paint)]
        print(fit("\n\n".join(parts), sys.stdout))
    else:
        print(fit("\n\n".join([run_head(state), _whole(state, driven, diff, paint)]), sys.stdout))


def _whole(state: RunState, driven: bool, diff: bool, paint: Paint) -> str:
    if state.started is not None and state.started.command:
        return "it is running now" if driven else command_summary(state, state.exit, paint)
    plan = plan_text(state, diff=diff, paint=paint)
    lines = plan.count("\n") + 1
    if lines > PLAN_LINES and not diff and (state.started is None or not state.started.dry):
        plan = f"its plan has {lines} lines: fleetfix show {state.run} --diff"
    if driven:
        return f"{plan}\n\nit is running now"
    ended = state.ended_with
    if ended is None:
        return f"{plan}\n\n{unfinished_text(state, paint=paint)}"
    if state.started is not None and state.started.dry:
        return plan
    return f"{plan}\n\n{summary_text(state, ended, paint=paint)}"
