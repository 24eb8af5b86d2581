"""Conduct `runs --verify`: whether the journal is as it was written."""

from __future__ import annotations

import json
from dataclasses import asdict

from fleetfix.chain import Misfit, Verified
from fleetfix.cli.state_dir import state_dir
from fleetfix.journal import Journal
from fleetfix.views.history import misfit_text, verified_text


def verify(text: str | None, *, as_json: bool) -> int:
    """Go over the records of one run, or of all; returns the exit code."""
    with Journal.open(state_dir()) as journal:
        runs = (journal.find(text),) if text else journal.every_run()
        found = [journal.verify(run) for run in runs]
        gone = journal.verify_links()
    misfits = [one.misfit for one in found if one.misfit is not None]
    if gone is not None:
        misfits.append(gone)
    if as_json:
        _as_json(found, gone)
    else:
        for misfit in misfits:
            print(misfit_text(misfit))
        print(verified_text(found, misfits))
    return 2 if misfits else 0


def _as_json(found: list[Verified], gone: Misfit | None) -> None:
    for one in found:
        print(json.dumps(asdict(one)))
    if gone is not None:
        print(json.dumps({"run": gone.run, "misfit": asdict(gone)}))
