"""A soak: many hosts of a lab, faults at random moments, taken up again until every host has its end.

    python -m benchmarks.soak --hosts 60 --minutes 25 --seed 1

Rounds until the time is over. In each a run changes every host in three steps that the host itself
counts, and rings a bell that nothing verifies, while hosts vanish, freeze, refuse, restart, run out of
disk and lose their runner, and while the controller is killed, interrupted and stopped. It is resumed,
here or from a machine with an empty journal, or rolled back; at last everything is healed, and taken up
until nothing is open. Then the hosts are looked at from outside, past all of fleetfix's code:

- no change ran twice, and no bell rang twice;
- each host is as its outcome says: mended in all three steps, or as before, or never begun;
- nothing that fleetfix started lives on, and no host is left with unfinished business;
- the next plan is empty for every mended host.

Exit 1 where any of this does not hold; the seed, which repeats the choices of a soak but not their
timing, is printed.
It works on this machine alone, below a folder of its own, and ends what it started.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.soak.rounds import Soak
from fleetfix.errors import LabError
from fleetfix.hostset import HostSet


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=60, help="how many hosts (60)")
    parser.add_argument("--minutes", type=float, default=25.0, help="no round begins after so long (25)")
    parser.add_argument("--rounds", type=int, default=1000, help="rounds at most")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--keep", action="store_true", help="keep logs and journal for a look")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fleetfix-soak-"))
    print(f"seed {args.seed}, {args.hosts} hosts, below {folder}", flush=True)
    soak = Soak(folder, HostSet.parse(f"gpu[{1:0{len(str(args.hosts))}d}-{args.hosts}]"), args.seed)
    until = time.monotonic() + args.minutes * 60
    wrong, troubles, outcomes, number = 0, Counter[str](), Counter[str](), 0
    try:
        soak.lab.up(soak.hosts, contaminated=[])
        while number < args.rounds and time.monotonic() < until:
            number += 1
            began = time.monotonic()
            one = soak.round(number, until)
            troubles += one.troubles
            outcomes += one.outcomes
            wrong += len(one.wrong)
            took = time.monotonic() - began
            print(
                f"round {number}: {one.run}: {sum(one.troubles.values())} faults, "
                f"{one.driven} controllers, {took:.0f} s, {dict(one.outcomes)}, {len(one.wrong)} wrong",
                flush=True,
            )
            for text in one.wrong:
                print("  WRONG", text, flush=True)
    except LabError as error:
        print(f"the lab: {error}", file=sys.stderr)
        return 1
    finally:
        with contextlib.suppress(OSError):
            shutil.copy(soak.lab.paths.log, folder / "server.log")
        with contextlib.suppress(LabError):
            soak.lab.down()
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{number} rounds, {sum(troubles.values())} faults {dict(troubles)}")
    print(f"outcomes {dict(outcomes)}; {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
