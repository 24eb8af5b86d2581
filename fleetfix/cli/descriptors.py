"""Open files: the limit of this process is raised to what a fleet needs, or the fleet is called too large.

Counted before anything is begun, so that no run stands still half way for want of a descriptor.
"""

from __future__ import annotations

import heapq
import resource
import sys
from collections.abc import Sequence

from fleetfix.errors import UsageError
from fleetfix.inventory import Host
from fleetfix.views.amounts import count

RESERVED = 40
"""For the journal, the terminal, the agent, files that are read: whatever else is open at the same time."""

COST = {"asyncssh": 2, "fabric": 6, "local": 4}
"""At most so many a session: a socket and what finds its address; pipes of a local one."""


def room_for(hosts: Sequence[Host], forks: int, *, kept: bool) -> int:
    """How many hosts may be talked to at once: `forks`, or fewer where this machine gives no more.

    With `kept` the sessions of all hosts stay open together. Raises UsageError where that is too much.
    """
    costs = [COST.get(host.transport, 0) for host in hosts]
    wanted = RESERVED + (sum(costs) if kept else sum(heapq.nlargest(forks, costs)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _covers(soft, wanted):
        return forks
    if _covers(hard, wanted):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return forks
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    each = max(costs)
    few = (hard - RESERVED) // each
    raise_it = "raise it: ulimit -Hn, LimitNOFILE of a service, /etc/security/limits.conf"
    if few < 1:
        message = f"this process may open {hard} files, and a single host needs {RESERVED + each}"
        raise UsageError(message, hint=raise_it)
    if kept:
        many = count(len(hosts), "host")
        message = f"this process may open {hard} files, and a run over {many} needs {wanted}"
        raise UsageError(message, hint=f"{raise_it}; or name fewer hosts")
    print(
        f"fleetfix: {few} hosts at once, not {forks}: this process may open {hard} files", file=sys.stderr
    )
    return few


def _covers(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted
