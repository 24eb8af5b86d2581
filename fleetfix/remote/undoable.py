"""Whether a run can be taken back here, asked before anything is undone: no way back ends half way.

An undo says what it would need and is not there any more by its attribute `lacks`, a function of
(ctx, committed) that gives one line, or None.
"""

import copy
import importlib
import os

from fleetfix.remote.api import read
from fleetfix.remote.records import Records


@read
def lacking(ctx):
    """One line for each change of this run that cannot be undone any more: what it was, and why not."""
    records = Records(ctx.home, ctx.run_id)
    if not os.path.isdir(records.folder):
        return []
    records.log.refresh()
    left = [entry for entry in records.log.entries.values() if entry.undone is None]
    reasons = ((entry, _again(records, entry) or _gone(ctx, records, entry)) for entry in left)
    return ["%s: %s" % (entry.change["summary"], why) for entry, why in reasons if why]


def _again(records, entry):
    run, summary = records.done_again(entry)
    if run is None:
        return None
    return "run %s did this here again, later (%s): fleetfix rollback %s comes first" % (run, summary, run)


def _gone(ctx, records, entry):
    inside = copy.copy(ctx)
    inside.memory, inside.step = records.memory(entry.id), entry.step
    for call in entry.change["undo"]:
        module, _, function = call["function"].partition(".")
        found = getattr(importlib.import_module("fleetfix.remote." + module), function, None)
        lacks = getattr(found, "lacks", None)
        why = lacks(inside, entry.committed) if lacks is not None else None
        if why:
            return why
    return None
