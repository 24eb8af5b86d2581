"""The claims on this host: which runs have unfinished business here. They survive a reboot.

A claim whose records are torn or gone still refuses the writes of others: nobody can say any more that
nothing is open. It is told as what it is, and released by name.
"""

import contextlib
import json
import os
import time

from fleetfix.remote.api import Refusal, write_durably
from fleetfix.remote.records import NAME, Records, load


def stamp():
    """Now, as people read it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Claims:
    """The claims on this host, each with what its run has open."""

    def __init__(self, places):
        self.places = places

    def told_to(self, run):
        """The claims of others behind which something is open, and the run's own."""
        claims = [claim for home in self.places.homes for claim in self._of(home)]
        return [claim for claim in claims if claim["open"] or claim["run"] == run]

    def _of(self, home):
        try:
            names = sorted(os.listdir(os.path.join(home, "claims")))
        except OSError:
            return
        for name in names:
            run = name[: -len(".json")]
            if name.endswith(".json") and NAME.match(run):
                yield _claim(home, run, os.path.join(home, "claims", name))

    def refuse_others(self, run):
        """Raise where another run has unfinished business here."""
        for claim in self.told_to(run):
            if claim["run"] != run:
                raise unfinished(claim)

    def take(self, home, purpose):
        """Write the claim of a run, once; one that is torn is written anew."""
        path = os.path.join(home, "claims", purpose["run"] + ".json")
        if load(path) is None:
            record = {"v": 1, "since": stamp()}
            record.update(
                {key: purpose[key] for key in ("run", "playbook", "operator", "controller", "reason")}
            )
            write_durably(path, json.dumps(record).encode())

    def drop(self, home, run):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(home, "claims", run + ".json"))


def _claim(home, run, path):
    """A claim as it is told. The file's name says whose it is, whatever stands in it."""
    record = load(path) or {}
    claim = {key: str(record.get(key, "")) for key in ("operator", "controller", "since")}
    claim["run"] = run
    claim["open"] = Records(home, run).open_business()
    if not record:
        claim.update(operator="somebody", controller="a controller", since="a time")
        claim["open"].insert(0, "its claim cannot be read: who made it, and when, is not known any more")
    return claim


def unfinished(claim):
    run = claim["run"]
    message = "run %s of %s on %s left work open here since %s: %s"
    filled = message % (
        run,
        claim["operator"],
        claim["controller"],
        claim["since"],
        "; ".join(claim["open"][:5]),
    )
    return Refusal(
        "unfinished",
        filled,
        "fleetfix resume, rollback or release %s" % run,
    )
