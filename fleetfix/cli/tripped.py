"""What a tripped breaker holds back, and how somebody who has looked lets it go."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from fleetfix.cli import consent
from fleetfix.cli.places import lasting
from fleetfix.cli.state_dir import state_dir
from fleetfix.engine.fleetrun import Request
from fleetfix.errors import BreakerError, UsageError
from fleetfix.journal import Journal
from fleetfix.runs import BreakerRow
from fleetfix.views.breaker import breakers_text


def refuse_while_tripped(journal: Journal, request: Request) -> None:
    """Raise where an earlier run on the same inventory tripped the breaker, and nobody has reset it. What
    can change nothing goes on."""
    row = journal.tripped(request.inventory) if request.may_change else None
    if row is not None:
        raise BreakerError(
            f"the breaker of {row.inventory} is tripped by run {row.run}: {row.reason}",
            hint=f"look there; then: fleetfix breaker reset -i '{row.inventory}' --reason TEXT",
        )


def show_breakers(*, as_json: bool) -> None:
    """Print every trip, those that hold runs back first."""
    with Journal.open(state_dir()) as journal:
        rows = journal.breakers()
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
    else:
        print(breakers_text(rows))


def reset(inventory: str | None, reason: str, *, by: str, yes: bool) -> None:
    """Let runs go on again, on the word of whoever asks; kept with name, time and reason."""
    if not reason.strip():
        raise UsageError("a breaker is reset with a reason", hint="--reason 'what was found, and done'")
    with Journal.open(state_dir()) as journal:
        row = _meant(journal, inventory)
        if not yes:
            _ask(row)
        journal.reset_breaker(row.inventory, at=time.time(), by=by, reason=reason)
    print(f"the breaker of {row.inventory} is reset: runs may change its hosts again")


def _meant(journal: Journal, inventory: str | None) -> BreakerRow:
    names = {row.inventory for row in journal.breakers() if row.reset is None}
    if inventory is not None:
        meant = {inventory, lasting(inventory)}
        if not names & meant:
            raise UsageError(f"the breaker of {inventory} is not tripped", hint=_hint(names))
        names &= meant
    if not names:
        raise UsageError("no breaker is tripped", hint="fleetfix breaker status")
    if len(names) > 1:
        raise UsageError("more than one breaker is tripped", hint=_hint(names))
    found = journal.tripped(names.pop())
    assert found is not None
    return found


def _hint(names: set[str]) -> str:
    tripped = ", ".join(f"-i {name}" for name in sorted(names))
    return f"tripped: {tripped}" if tripped else "no breaker is"


def _ask(row: BreakerRow) -> None:
    if not consent.at_terminal():
        raise UsageError(
            "a reset needs a yes, and nobody is at a terminal to say it", hint="--yes, when you have looked"
        )
    print(breakers_text((row,)), file=sys.stderr)
    if not consent.confirmed(f"let runs change hosts of {row.inventory} again?"):
        raise UsageError("not confirmed; nothing was done")
