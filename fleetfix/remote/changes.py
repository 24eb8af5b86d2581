"""Everything that a session writes: lease and claim, changes at most once, undo, the end of a run.

Each operation takes the runner and the frame. What happens on the host is recorded before it begins,
and recorded again by the child that did it, so that neither a killed runner nor a lost controller
leaves it unknown.
"""

import contextlib
import json
import os
import time

from fleetfix.remote import calls
from fleetfix.remote.api import Refusal, alive, write_durably
from fleetfix.remote.ledger import Ledger
from fleetfix.remote.loop import ENDED_WITHIN, GRACE, SOON
from fleetfix.remote.records import (
    Records,
    checked_name,
    file_of,
    fresh_lock,
    holders,
    is_ok,
    shortened,
    sign_lock,
)

PATIENCE = 60.0  # seconds that a change of a lost session may take past its own deadlines
COMMITTED = "committed"  # the note that says that there is no way back
KEPT = ("key", "summary", "before", "after", "risk", "job", "do", "undo", "commit")


# -- the right to write -----------------------------------------------------------------------------


def acquire(runner, frame):
    """Take lease and claim, and say anew what this host is. What is due to go goes by the way."""
    _wet(runner)
    refuse_where_disabled(runner)
    _own(runner)
    if frame.get("sweep"):
        # What cannot be removed now is tried again by the next session.
        yield runner.fork("change", "", _on_holds(runner, "retention.sweep"))
    return runner.info()


def _wet(runner):
    if runner.dry:
        raise Refusal("blocked", "this session is a dry run: the host changes nothing")


def refuse_where_disabled(runner):
    """Refuse where the host's own kill switch is set."""
    text = runner.places.disabled()
    if text is not None:
        hint = "remove %s on that host" % runner.places.switch
        raise Refusal("disabled", "fleetfix is switched off on this host: %s" % text, hint)


def _own(runner, beside_claims=False):
    """Hold lease and claim, and be sure that no newer session does."""
    if runner.lease.epoch is not None:
        _survive_removal(runner)
        runner.lease.check()
        return
    _refuse_where_forgotten(runner)
    runner.lease.refuse_others()
    if not beside_claims:
        runner.claims.refuse_others(runner.run)
    _settle_in(runner)


def _settle_in(runner):
    """Prepare the records of this run; take lease and claim."""
    runner.home = runner.places.prepare(runner.run)
    runner.records = Records(runner.home, runner.run)
    runner.records.prepare()
    if not runner.records.is_full():
        runner.records.keep_ballast()
    runner.lease.take(runner.home)
    runner.ledger = Ledger(runner.home, runner.purpose)
    runner.ledger.keep_short()
    log = runner.records.log
    log.refresh()
    if log.is_blank:
        names = ("playbook", "operator", "controller", "reason")
        log.append("opened", run=runner.run, **{name: runner.purpose[name] for name in names})
    runner.claims.take(runner.home, runner.purpose)


def _survive_removal(runner):
    """Begin anew where somebody has removed the records of this host from under this session.

    What the run had done by then is not known there any more: that is written down and told.
    """
    log = runner.records.log
    log.refresh()
    lost = log.lost
    if runner.lease.is_gone() or not os.path.isdir(runner.records.folder) or log.is_blank:
        runner.lease.refuse_others()
        _settle_in(runner)
        if lost:
            runner.records.log.append("lost", summaries=lost[:100])
            runner.records.log.refresh()


def _refuse_where_lost(runner):
    """Raise where changes of this run were made here of which the records are gone."""
    lost = runner.records.log.lost
    if lost:
        text = "the records of run %s were removed here while it was at work: nothing undoes any more: %s"
        raise Refusal(
            "in_doubt",
            text % (runner.run, "; ".join(lost[:5])),
            "look at the host; then fleetfix release %s" % runner.run,
        )


def _refuse_where_forgotten(runner):
    """Refuse where this very session has written, and its records are gone: nothing would tell what of it
    was done, and what is asked again would be done twice."""
    if runner.again and not os.path.isdir(runner.records.folder):
        text = "this host has no record of run %s any more (restarted, or swept)" % runner.run
        raise Refusal("in_doubt", text, "look at the host by hand")


# -- a change ---------------------------------------------------------------------------------------


def change(runner, frame):
    """Make a change, unless its id was used before: then say what became of it."""
    _wet(runner)
    id, wanted = frame["id"], frame["change"]
    file_of(id, runner.run)
    while True:
        runner.records.log.refresh()
        if id in runner.records.log.entries:
            return (yield from _again(runner, runner.records.log.entries[id], digest_of(wanted)))
        refuse_where_disabled(runner)
        _own(runner)
        _refuse_where_lost(runner)
        # While this waited, a newer session may have taken over and made the very change.
        if not (yield from _quiet(runner, None)):
            break
    functions = _functions(runner, wanted["do"] + wanted["undo"])
    log = runner.records.log
    lock = fresh_lock(runner.records.lock(id, "do"))
    try:
        log.reserve()
        kept = {name: wanted[name] for name in KEPT}
        with runner.lease.fenced():
            log.append(
                "begun",
                id=id,
                step=frame["step"],
                digest=digest_of(wanted),
                epoch=runner.lease.epoch,
                change=kept,
            )
        log.refresh()  # known from here on, whatever becomes of the file
        runner.ledger.enter(
            "begun", change=id, step=frame["step"], summary=kept["summary"], risk=kept["risk"]
        )
        work = _doing(runner, id, frame["step"], wanted["do"], functions, "done", lock)
        answer = yield runner.fork("change", frame["step"], work)
        return _done(runner, id, answer)
    finally:
        os.close(lock)


def digest_of(wanted):
    """The identity of what a change does, whatever its words."""
    import hashlib  # brings OpenSSL in, which a session that only reads need not wait for

    text = json.dumps([wanted[name] for name in ("key", "do", "undo", "commit")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _functions(runner, todo):
    """Every function of these calls, found before anything begins, as the secrets are that they need."""
    runner.require_secrets(todo)
    return {call["function"]: runner.function(call["function"]) for call in todo}


def _again(runner, entry, digest):
    if entry.digest != digest:
        raise Refusal("bug", "the id %s was used for another change: nothing was done" % entry.id)
    yield from _settled(runner, entry)
    yield from _end_overdue(runner, entry)
    return {"exit": None, "in_doubt": True} if entry.done is None else entry.done


def _settled(runner, entry):
    """Wait until a change of an earlier session has ended, or has had its time; says whether it waited."""
    waited = False
    until = time.monotonic() + PATIENCE + sum(call["timeout"] for call in entry.change["do"])
    while runner.records.running(entry) is not None and time.monotonic() < until:
        waited = True
        yield SOON
        runner.records.log.refresh()
    # It recorded before it let go of its lock.
    runner.records.log.refresh()
    return waited


def _quiet(runner, but):
    """Wait until nothing of an earlier session of this run is in flight; says whether it waited."""
    waited = False
    runner.records.log.refresh()
    for entry in list(runner.records.log.entries.values()):
        if entry.id != but:
            waited = (yield from _settled(runner, entry)) or waited
            yield from _end_overdue(runner, entry)
    return waited


def _end_overdue(runner, entry):
    """End what an earlier session began and what had more than its time, such as one that was stopped."""
    if runner.records.running(entry) is None:
        return
    named = yield from _end_running(runner, entry)
    runner.records.log.refresh()
    if runner.records.running(entry) is not None:
        text = "this still runs here and cannot be ended: %s (%s)"
        summary = entry.change["summary"]
        raise Refusal("hung", text % (summary, ", ".join(named) or "by a process that cannot be seen"))


def _doing(runner, id, step, todo, functions, way, lock):
    """The work of a change's child: each call in turn up to the first that fails, then the record."""
    memory = runner.records.memory(id)

    def work(tell):
        sign_lock(lock)
        answer = {"exit": 0, "value": None}
        for call in todo:
            tell({"call": call["function"], "timeout": call["timeout"]})
            context = runner.context(step, call["timeout"], tell.say, memory, lock)
            calls.keep_deadline_alone(call["timeout"])
            answer = calls.perform(context, functions[call["function"]], call["function"], call["args"])
            calls.keep_deadline_alone(None)
            if not is_ok(answer):
                break
        answer = shortened(answer)
        _conclude(runner, id, way, answer)
        tell({"done": answer})

    return work


def _conclude(runner, id, way, answer):
    """Record how a change, or its undo, has ended: in the run's own log, and in the ledger."""
    kind = "undo_failed" if way == "undone" and not is_ok(answer) else way
    runner.records.log.append(kind, id=id, completed=answer)
    entry = runner.records.log.entries.get(id)
    summary = entry.change["summary"] if entry is not None else ""
    said = "failed" if kind == "done" and not is_ok(answer) else kind
    runner.ledger.enter(said, change=id, step=id.split("/")[1], summary=summary)


def _done(runner, id, answer):
    """The answer of a change's child; what the child could not record is recorded here."""
    log = runner.records.log
    log.refresh()
    entry = log.entries.get(id)
    if entry is None:
        return {"exit": None, "in_doubt": True, "stderr": "the records of fleetfix here were removed\n"}
    if entry.done is not None:
        return entry.done
    if "died" in answer:
        return {"exit": None, "in_doubt": True, "stderr": "the change %s\n" % answer["died"]}
    _conclude(runner, id, "done", answer)
    log.refresh()
    return answer


# -- undo -------------------------------------------------------------------------------------------


def undo(runner, frame):
    """Replay the undo of a change from the log, once; what still runs of the change ends first."""
    _wet(runner)
    id = frame["id"]
    file_of(id, runner.run)
    _refuse_where_forgotten(runner)
    runner.records.log.refresh()
    entry = runner.records.log.entries.get(id)
    if entry is None:
        _refuse_where_lost(runner)
        raise Refusal("bug", "nothing is recorded on this host under %s" % id)
    if entry.undone is None and os.path.exists(runner.records.note(COMMITTED)):
        text = "run %s was committed here: nothing is kept to undo it with" % runner.run
        raise Refusal("blocked", text)
    if entry.undone is None:
        _own(runner)
        entry = runner.records.entry(id)
        yield from _settled(runner, entry)
        yield from _end_overdue(runner, entry)
        yield from _quiet(runner, id)
        _own(runner)
        entry = runner.records.entry(id)
    if entry.undone is not None:
        return entry.undone
    _refuse_under_newer(runner, entry)
    todo = entry.change["undo"]
    functions = _functions(runner, todo)
    if runner.records.is_full() or _wants_room(entry):
        runner.records.drop_ballast()
    lock = fresh_lock(runner.records.lock(id, "undo"))
    try:
        runner.records.log.reserve()
        with runner.lease.fenced():
            runner.records.log.append("undoing", id=id)
        work = _doing(runner, id, entry.step, todo, functions, "undone", lock)
        answer = yield runner.fork("change", entry.step, work)
        return _undone(runner, id, answer)
    finally:
        os.close(lock)


def _wants_room(entry):
    """Whether what was done ended for want of room: a quota that is used up is seen nowhere else."""
    return ((entry.done or {}).get("failure") or {}).get("kind") == "no_space"


def _refuse_under_newer(runner, entry):
    """Refuse to undo what another run has changed again since: its own undo would bring back too much."""
    run, summary = runner.records.done_again(entry)
    if run is not None:
        raise Refusal(
            "blocked",
            "run %s did this here again, later: %s" % (run, summary),
            "fleetfix rollback %s comes first" % run,
        )


def _undone(runner, id, answer):
    log = runner.records.log
    if "died" in answer:
        answer = calls.failed("command", "the undo %s" % answer["died"])
    log.refresh()
    if id in log.entries and log.entries[id].undoing:
        _conclude(runner, id, "undone", answer)
        log.refresh()
    return answer


def _end_running(runner, entry):
    """End what still runs of a change of a lost session; answer with what cannot be ended."""
    lock = runner.records.running(entry)
    found = [] if lock is None else holders(lock)
    if not found:
        return []

    def kill(tell):
        tell({"call": "kill", "timeout": ENDED_WITHIN})
        living = [pid for pid, start in found if alive(pid, start)]
        tell({"done": {"value": [left for pid in living for left in calls.end_all_of(pid, GRACE)]}})

    answer = yield runner.fork("kill", entry.step, kill)
    return answer.get("value") or []


def end_strays(runner):
    """End the changes that a lost session of this run has left running; record them as cancelled."""
    named = []
    runner.records.log.refresh()
    for entry in list(runner.records.log.entries.values()):
        if runner.records.running(entry) is not None:
            left = yield from _end_running(runner, entry)
            named += left
            runner.records.log.refresh()
            ended = calls.ended_as_asked(left)
            if entry.done is None:
                _conclude(runner, entry.id, "done", ended)
            elif entry.undoing:
                _conclude(runner, entry.id, "undone", ended)
    return named


# -- notes, and the end -------------------------------------------------------------------------------


def note(runner, frame):
    """Keep a value beside this run's records."""
    _wet(runner)
    checked_name(frame["name"], "note")
    _own(runner)
    write_durably(runner.records.note(frame["name"]), json.dumps(frame["value"]).encode())


def end(runner, frame):
    """Commit where asked, record how the run ended here, and let go of the lease and of the claim."""
    _wet(runner)
    runner.records.log.refresh()
    if not os.path.isdir(runner.records.folder) and not runner.records.log.lost:
        return  # this run has written nothing here
    _own(runner)
    yield from _quiet(runner, None)
    log = runner.records.log
    if log.lost:
        text = "the records of this run were removed here: nothing undoes any more: %s"
        runner.tell({"say": (text % "; ".join(log.lost))[:500], "step": ""})
    for entry in list(log.entries.values()):
        if frame["commit"] and not entry.committed and runner.records.state(entry) == "done":
            yield from _commit(runner, entry)
    if not frame["keep_claim"]:
        runner.records.drop_ballast()  # nothing is left that it was kept for
    log.append("ended", outcome=frame["outcome"], commit=bool(frame["commit"]))
    runner.ledger.enter("ended", outcome=frame["outcome"], anchor=str(frame.get("anchor", "")))
    if not frame["keep_claim"]:
        runner.claims.drop(runner.home, runner.run)
    runner.lease.release()


def commit(runner, frame):
    """Make lasting what this run did here: drop all that undo would need, and end the claim."""
    _wet(runner)
    if not os.path.isdir(runner.records.folder):
        return  # this run has written nothing here
    _own(runner)
    yield from _quiet(runner, None)
    _refuse_unsettled(runner)
    # Noted before the first thing is dropped: from here on there is no way back.
    write_durably(runner.records.note(COMMITTED), json.dumps(dict(runner.purpose, at=time.time())).encode())
    for entry in list(runner.records.log.entries.values()):
        if not entry.committed and runner.records.state(entry) == "done":
            yield from _commit(runner, entry)
    answer = yield runner.fork("change", "", _on_holds(runner, "holds.drop_of_run"))
    if not is_ok(answer):
        raise Refusal("command", "not all was dropped: %s" % _why(answer), "commit it again")
    runner.records.drop_ballast()
    runner.records.log.append("ended", outcome="committed", commit=True)
    runner.ledger.enter("ended", outcome="committed", anchor="")
    runner.claims.drop(runner.home, runner.run)
    runner.lease.release()


def _refuse_unsettled(runner):
    """Raise where something is open that only going on, or going back, can settle."""
    entries = runner.records.log.entries.values()
    states = [(runner.records.state(entry), entry.change) for entry in entries]
    open_ = ["in_doubt: %s" % summary for summary in runner.records.log.lost] + [
        "%s: %s" % (state, change["summary"])
        for state, change in states
        if state in ("begun", "in_doubt", "undo_failed")
    ]
    jobs = [
        change.get("job")
        for state, change in states
        if change.get("job") and state != "undone" and (change["job"] == "stops" or state == "done")
    ]
    # A stop that is undone is not over before the capture is: by that the job is started again.
    ended = any(change.get("job") == "stops" and state == "undone" for state, change in states)
    if jobs and (jobs[-1] == "stops" or (jobs[-1] == "captures" and ended)):
        open_.insert(0, "the job that it stopped does not run again, and would be forgotten")
    if open_:
        hint = "fleetfix resume, rollback or release %s" % runner.run
        raise Refusal(
            "unfinished", "run %s is not done here: %s" % (runner.run, "; ".join(open_[:5])), hint
        )


def _on_holds(runner, name):
    """The work of a child that lets go of what was held for a while."""
    function = runner.function(name)

    def work(tell):
        tell({"call": name, "timeout": 300.0})
        tell({"done": calls.perform(runner.context("", 300.0, tell.say), function, name, {})})

    return work


def release(runner, frame):
    """Give up what this run holds here, lease and claim, and change nothing else."""
    _wet(runner)
    claimed = any(claim["run"] == runner.run for claim in runner.claims.told_to(runner.run))
    if not claimed and not os.path.isdir(runner.records.folder):
        return  # this run holds nothing here
    # Two runs may have a claim here, in different places: neither may stand in the way of the other.
    _own(runner, beside_claims=True)
    yield from _quiet(runner, None)
    runner.records.drop_ballast()
    with contextlib.suppress(OSError):  # a full disk does not keep a claim alive
        runner.records.log.append("ended", outcome="released", commit=False)
        runner.ledger.enter("ended", outcome="released", anchor="")
    for home in runner.places.homes:
        runner.claims.drop(home, runner.run)
    runner.lease.release()


def _why(answer):
    return answer.get("died") or (answer.get("failure") or {}).get("message") or "it said nothing"


def _commit(runner, entry):
    """Drop what only undo needed. What cannot be dropped is told, and fails nothing."""
    todo = entry.change["commit"]
    functions = _functions(runner, todo)
    lock = fresh_lock(runner.records.lock(entry.id, "commit"))
    try:
        work = _doing(runner, entry.id, entry.step, todo, functions, "committed", lock)
        answer = yield runner.fork("change", entry.step, work)
    finally:
        os.close(lock)
    if not is_ok(answer):
        text = "what the undo of %r needed was not all dropped: %s" % (
            entry.change["summary"],
            _why(answer),
        )
        runner.tell({"say": text[:500], "step": entry.step})


WRITES = {
    "acquire": acquire,
    "change": change,
    "undo": undo,
    "note": note,
    "end": end,
    "commit": commit,
    "release": release,
}
