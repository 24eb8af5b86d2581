"""Where a host stands in a run that is taken up again: its own log decides, the journal is corrected.

Pure: what comes out are events. Folded, they make the state say what the host says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fleetfix.errors import Failure
from fleetfix.events import ChangeFound, ChangeShown, FoundState
from fleetfix.playbook import Step
from fleetfix.session import Past, Session
from fleetfix.state import HostState, step_of

FINISHED = ("ok", "changed", "skipped")
"""Results of a step that need no second look while nothing before it changes anew."""


def corrections(host: HostState, past: Iterable[Past]) -> tuple[ChangeFound, ...]:
    """What the host's log says of this run's changes, where the folded state says otherwise."""
    logged = {one.id: one for one in past}
    found = list(never_begun(host, logged))
    for one in logged.values():
        if one.state != _told(host, one.id):
            found.append(
                ChangeFound(
                    host=host.name,
                    step=one.step,
                    change=one.id,
                    state=one.state,
                    shown=host.changes.get(one.id) or _shown(one),
                )
            )
    return tuple(found)


def never_begun(host: HostState, logged: Collection[str]) -> tuple[ChangeFound, ...]:
    """What the journal holds to be begun, and the host's log, which has these ids, does not know: the
    controller ended between its own word and the host's."""
    return tuple(
        ChangeFound(host=host.name, step=step_of(id), change=id, state="absent", shown=shown)
        for id, shown in host.changes.items()
        if id not in logged
    )


def forgotten(
    host: HostState, past: Collection[Past], claimed: Sequence[str], *, kept: bool
) -> Failure | None:
    """What was begun on a host that its own log does not hold any more: nobody knows what became of it.

    `claimed` is what the host's claim says to be open, `kept` whether its note of the run's steps is there.
    """
    logged, summaries = {one.id for one in past}, {one.summary for one in past}
    if not past and not kept:
        gone = [shown.summary for shown in host.changes.values()]
    else:
        # What did not end well may have been refused, and never have begun: a full disk takes no record.
        open_ = host.changes.items()
        gone = [shown.summary for id, shown in open_ if id in host.done and id not in logged]
    known = bool(gone)
    if not known:  # to this journal; the host may tell
        apart = [item.partition(": ") for item in claimed]
        gone = [
            "".join(item)
            for item in apart
            if not past or (item[0] == "in_doubt" and item[2] not in summaries)
        ]
    if not gone:
        return None
    why, what = "the host has no record of this run any more (rebooted, swept or torn)", "; ".join(gone)
    message = f"{why}, which began: {what}" if known else f"{why}: {what}"
    return Failure(kind="in_doubt", message=message)


def open_by_claim(session: Session, run: str) -> tuple[str, ...]:
    """What the host's claim of a run says to be open, as the session was told when it opened."""
    return tuple(item for claim in session.info.claims if claim.run == run for item in claim.open)


def _told(host: HostState, change: str) -> FoundState | None:
    """What the state says of a change; None where it does not know, or not for sure."""
    if change in host.undone:
        return "undone"
    if change in host.changes:
        return "done" if change in host.done else "failed" if change in host.failed else None
    return None


def _shown(past: Past) -> ChangeShown:
    return ChangeShown(key=past.key or past.id, summary=past.summary, risk=past.risk, job=past.job)


def behind(steps: Sequence[Step], past: Iterable[Past]) -> frozenset[str]:
    """The steps that the host is past: a later one was begun, so these had had their turn."""
    begun = {one.step for one in past if one.state != "undone"}
    furthest = max((place for place, step in enumerate(steps) if step.id in begun), default=0)
    return frozenset(step.id for step in steps[:furthest])
