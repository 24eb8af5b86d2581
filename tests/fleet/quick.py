"""fleetfix with the patience of a test: seconds where it has minutes for a fleet. The same program else.

Run as `python quick.py PATIENCE ARGUMENTS`: `patient`, or `brief` where hosts do not come back anyway.
"""

from __future__ import annotations

import sys

from fleetfix import session
from fleetfix.cli.main import run
from fleetfix.engine import network

CONNECT = {"patient": 60.0, "brief": 15.0}
RECONNECT = {"patient": 90.0, "brief": 10.0}

if __name__ == "__main__":
    patience = sys.argv.pop(1)
    timers = session.Timers(ping=1.0, silence=4.0, orphaned=6.0, reconnect_within=RECONNECT[patience])
    session.Timers = lambda: timers  # type: ignore[assignment,misc]
    assert session.open_session.__kwdefaults__ is not None
    session.open_session.__kwdefaults__["connect_timeout"] = CONNECT[patience]
    # So many hosts fail at once here that it would have to be the controller's own network.
    network.AT_LEAST = 1_000_000
    run()
