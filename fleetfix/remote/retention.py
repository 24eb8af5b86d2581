"""What may go of what fleetfix keeps on this host: holds whose time is over, and the records of old runs.

The newest runs stay, however old they are, and whatever the clock says. A run goes only where nothing
needs its records any more: it has ended here, has no claim, left nothing open, holds nothing for a way
back and keeps no job that it stopped. The ledger still tells of it.
"""

import os
import shutil
import time

from fleetfix.remote import holds
from fleetfix.remote.api import write
from fleetfix.remote.records import Records, held_by_anyone, load

NEWEST = 20  # runs that always stay
OLD = 30 * 86400.0  # seconds after which a settled run goes
MOST = 500  # settled runs that stay at most, however new
STAMP = "swept"  # the file whose time says when this was done last


@write
def sweep(ctx):
    """Let go of all that is due; says how many runs went."""
    holds.sweep(ctx)
    gone = 0
    for place, (at, run) in enumerate(_by_age(ctx.home)):
        old = abs(time.time() - at) > OLD or place >= MOST
        if place >= NEWEST and old and run != ctx.run_id and _is_settled(ctx, run):
            shutil.rmtree(os.path.join(ctx.home, "runs", run), ignore_errors=True)
            gone += 1
    with open(os.path.join(ctx.home, STAMP), "w"):
        pass
    return {"runs": gone}


def _by_age(home):
    """[(when something was written to it last, run)], the newest first."""
    runs = os.path.join(home, "runs")
    return sorted(((_at(os.path.join(runs, run)), run) for run in os.listdir(runs)), reverse=True)


def _at(folder):
    for path in (os.path.join(folder, "host.jsonl"), folder):
        try:
            return os.stat(path).st_mtime
        except OSError:
            continue
    return 0.0


def _is_settled(ctx, run):
    records = Records(ctx.home, run)
    claims = [os.path.join(home, "claims", run + ".json") for home in ctx.homes]
    if any(os.path.lexists(claim) for claim in claims) or held_by_anyone(records.alive):
        return False
    open_ = records.open_business()
    given_up = records.log.is_blank or records.log.ended == "released"
    return (given_up or not open_) and not _keeps_a_job(records.folder) and not _holds(ctx, run)


def _keeps_a_job(folder):
    """Whether what starts a stopped job again is kept in there."""
    job = os.path.join(folder, "job")
    names = os.listdir(job) if os.path.isdir(job) else ()
    return any(name.endswith(".json") and not name.startswith(("started", "from-zero")) for name in names)


def _holds(ctx, run):
    """Whether a hold of this run is kept for a while yet."""
    folder = os.path.join(ctx.home, "holds")
    names = os.listdir(folder) if os.path.isdir(folder) else ()
    return any((load(os.path.join(folder, name)) or {}).get("run") == run for name in names)
