"""End a job with all its processes, see them gone, and see whether something starts it again."""

import os
import signal
import time

from fleetfix.remote import procs
from fleetfix.remote.api import Refusal, alive, all_processes, descendants, send

KILL_WAIT = 10.0  # seconds after KILL until a process counts as one that cannot be ended
RESPAWN_WATCH = 3.0  # seconds; supervisors restart after 0.1 to 1 s


def tree_of(job):
    """[[pid, start]] of a job: its launcher, all below it, its holders, and groups that it leads."""
    table = all_processes()
    found = {job["pid"]: job["start"]}
    found.update(dict(job["holders"]))
    for pid in list(found):
        found.update(dict(descendants(pid, table)))
    # A double-forked child has init as parent, but mostly stays in the group of the one that left it.
    for pid in table:
        if pid not in found and procs.group_of(pid) in found:
            found[pid] = table[pid][2]
            found.update(dict(descendants(pid, table)))
    return [[pid, start] for pid, start in sorted(found.items()) if alive(pid, start)]


def end(launcher, members, grace, say=None):
    """TERM, wait up to `grace` seconds, KILL, and see every process gone. Says how many were killed.

    TERM goes to the launcher, and past every process that does not handle TERM to those below it: one
    that handles it (an agent, a trainer that saves a checkpoint) tells its own children. What it has
    told nothing by half the grace, or when the launcher is gone, gets TERM too.
    """
    known = dict(members)
    known.setdefault(launcher[0], launcher[1])
    told = set()
    _tell(launcher[0], known, told)
    began = time.monotonic()
    while time.monotonic() < began + grace and _living(known):
        if time.monotonic() > began + grace / 2 or not alive(*launcher):
            for pid in known:
                _term(pid, known, told)
        time.sleep(0.05)
    left = _living(known)
    if left and say:
        say("%d processes did not end within %g s: killing them" % (len(left), grace))
    _kill(known)
    return len(left)


def kill(launcher, members):
    """KILL at once, with no chance to save anything, and see every process gone."""
    known = dict(members)
    known.setdefault(launcher[0], launcher[1])
    _kill(known)


def _tell(pid, known, told):
    _term(pid, known, told)
    if not _handles_term(pid):
        for child, (_, ppid, _) in all_processes().items():
            if ppid == pid and child in known:
                _tell(child, known, told)


def _handles_term(pid):
    caught = procs.status_of(pid).get("SigCgt", "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def _term(pid, known, told):
    if pid not in told:
        told.add(pid)
        send(pid, known[pid], signal.SIGTERM)


def _living(known):
    """The known processes that live, having learnt of the children they have meanwhile."""
    table = all_processes()
    for pid in [one for one, start in known.items() if alive(one, start)]:
        known.update({child: start for child, start in descendants(pid, table) if child not in known})
    return [pid for pid, start in known.items() if alive(pid, start)]


def _kill(known):
    until = time.monotonic() + KILL_WAIT
    while True:
        left = _living(known)
        if not left:
            return
        if time.monotonic() > until:
            break
        for pid in _stopped(left, known):
            send(pid, known[pid], signal.SIGKILL)
        time.sleep(0.02)
    named = ", ".join("%d (%s)" % (pid, procs.comm_of(pid)) for pid in left[:5])
    raise Refusal(
        "hung",
        "%d processes cannot be ended: %s" % (len(left), named),
        "they wait in the kernel: look at dmesg for Xid; a reboot ends them",
    )


def _stopped(left, known):
    """Stop them first, with what they have started meanwhile: what a loop starts while it is being ended
    would be nobody's child."""
    stopped = set()
    while not stopped.issuperset(left):
        for pid in left:
            stopped.add(pid)
            send(pid, known[pid], signal.SIGSTOP)
        left = _living(known)
    return left


def watch_for_return(faces, since, seconds=RESPAWN_WATCH):
    """Refuse when a process with one of these faces (uid, argv) is started again within `seconds`.

    `since` is the table of all processes before the job was ended. What starts it again is named, and
    not fought.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for pid, (state, _, start) in all_processes().items():
            new = state not in "ZX" and (pid not in since or since[pid][2] != start)
            if new and [procs.uid_of(pid), procs.argv_of(pid)] in faces:
                raise _started_again(pid)
        time.sleep(0.1)


def _started_again(pid):
    table = all_processes()
    top, above = procs.launcher_of(pid, table, procs.ancestors())
    unit, user_unit, _ = procs.placed(top, table, procs.cgroup_of(top), procs.cgroup_of(os.getpid()))
    by = above if top == pid else top
    what = "unit " + (unit or user_unit) if unit or user_unit else "pid %d (%s)" % (by, said(by))
    return Refusal(
        "command",
        "the job was stopped and came back as %d: started again by %s" % (pid, what),
        "stop that first: it would start the job in a half-mended environment",
    )


def said(pid):
    """What a process is, in a few words."""
    return " ".join(procs.shown_of(pid))[:80] or procs.comm_of(pid) or "gone"


def pids():
    """Every pid there is now."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}
