"""Write the report of a run into a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from fleetfix.cli.state_dir import state_dir
from fleetfix.cli.whole_file import require_place, write_whole
from fleetfix.errors import UsageError
from fleetfix.journal import Journal
from fleetfix.views.report import html, is_report, markdown, report_of

FORMS = {".html": html, ".htm": html, ".md": markdown}


def report(text: str, out: Path) -> None:
    """Report on a run, by its id or a beginning of it, in the form that the file's name says."""
    form = FORMS.get(out.suffix.lower())
    if form is None:
        raise UsageError(
            f"{out}: a report is a page or Markdown", hint="end the file's name in .html or .md"
        )
    require_place(out, "report of fleetfix", is_report)
    with Journal.open(state_dir()) as journal:
        run = journal.find(text)
        driven = journal.driven(run)
        records = list(journal.records(run))
    write_whole(out, form(report_of(records, time.time(), driven=driven)))
    print(f"report of run {run}: {out}", file=sys.stderr)
