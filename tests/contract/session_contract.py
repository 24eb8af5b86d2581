"""What every session promises, whatever wire it runs over: one suite, imported for each.

`SessionPromises` holds for scripted hosts too; `HostContract` needs a host with processes and files.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from fleetfix.commands import Completed, Read
from fleetfix.errors import Failure, HostError
from fleetfix.session import HostInfo, Patience, Session, Timers
from tests.contract.place import (
    Place,
    call,
    change,
    eventually,
    kill,
    processes_with,
    read,
    token,
)

ONE = "r1/s/1/0"
TWO = "r1/s/1/1"
NO_RETURN = Timers(reconnect_within=0.0)


class Heard:
    """Watches a line with this patience, and keeps what it hears."""

    def __init__(self, patience: Patience) -> None:
        self.said: list[str] = []
        self._patience: Patience = patience

    def dropped(self, failure: Failure) -> None:
        assert failure.kind == "unreachable"
        self.said.append("dropped")

    def returned(self, info: HostInfo, seconds: float, *, restarted: bool) -> None:
        assert info.hostname
        assert seconds > 0
        assert not restarted
        self.said.append("returned")

    def patience(self) -> Patience:
        return self._patience


async def runner_of(session: Session) -> int:
    """The pid of the runner behind a session."""
    (answer,) = await session.read("", [read("who")])
    return int(answer.value["runner"])


class SessionPromises:
    """Promises about ids, undo, lease, claim and dry runs."""

    async def test_replies_come_in_the_order_of_reads_and_equal_reads_are_asked_once(
        self, place: Place
    ) -> None:
        session = await place.open()
        asked = [read("echo", value=one) for one in (1, 2, 1, [3], None)]
        assert [one.value for one in await session.read("s", asked)] == [1, 2, 1, [3], None]

    async def test_a_change_is_made_once_and_its_answer_is_recorded(self, place: Place) -> None:
        session = await place.open()
        one = change(call("append", path=place.path("f"), text="a"))
        first = await session.change(ONE, "s", one)
        again = await session.change(ONE, "s", one)
        assert first.ok
        assert first.value == again.value == "a"
        assert place.lines("f") == ["a"]

    async def test_a_recorded_answer_outlasts_the_session(self, place: Place) -> None:
        one = change(call("append", path=place.path("f"), text="a"))
        first = await place.open()
        await first.change(ONE, "s", one)
        await first.close()
        second = await place.open()
        assert (await second.change(ONE, "s", one)).value == "a"
        assert place.lines("f") == ["a"]

    async def test_an_id_used_for_another_change_does_nothing(self, place: Place) -> None:
        session = await place.open()
        await session.change(ONE, "s", change(call("append", path=place.path("f"))))
        with pytest.raises(HostError) as refused:
            await session.change(ONE, "s", change(call("append", path=place.path("g"))))
        assert refused.value.failure.kind == "bug"
        assert place.lines("g") == []

    async def test_a_change_stops_at_the_first_call_that_fails(self, place: Place) -> None:
        session = await place.open()
        calls = (
            call("append", path=place.path("f")),
            call("failing"),
            call("append", path=place.path("f")),
        )
        answer = await session.change(ONE, "s", change(*calls))
        assert answer.failure is not None
        assert answer.failure.kind == "command"
        assert place.lines("f") == ["x"]
        (past,) = await session.past()
        assert past.state == "failed"

    async def test_undo_comes_from_the_hosts_log_and_runs_once(self, place: Place) -> None:
        first = await place.open()
        undo = (call("append", path=place.path("f"), text="undone"),)
        await first.change(ONE, "s", change(call("append", path=place.path("f"), text="done"), undo=undo))
        await first.close()
        second = await place.open()
        assert (await second.undo(ONE)).ok
        assert (await second.undo(ONE)).value == "undone"
        assert place.lines("f") == ["done", "undone"]
        assert [one.state for one in await second.past()] == ["undone"]

    async def test_an_undo_that_failed_is_told_and_may_be_tried_again(self, place: Place) -> None:
        session = await place.open()
        await session.change(
            ONE, "s", change(call("append", path=place.path("f")), undo=(call("failing"),))
        )
        assert not (await session.undo(ONE)).ok
        assert [one.state for one in await session.past()] == ["undo_failed"]
        assert not (await session.undo(ONE)).ok

    async def test_undo_of_what_was_never_begun_here_is_refused(self, place: Place) -> None:
        session = await place.open()
        with pytest.raises(HostError) as refused:
            await session.undo(ONE)
        assert refused.value.failure.kind == "bug"

    async def test_the_past_tells_changes_oldest_first_with_their_answers(self, place: Place) -> None:
        session = await place.open()
        await session.change(ONE, "s", change(call("append", path=place.path("f"), text="a")))
        await session.change(TWO, "t", change(call("append", path=place.path("f"), text="b"), key="l"))
        past = await session.past()
        assert [(one.id, one.step, one.state) for one in past] == [(ONE, "s", "done"), (TWO, "t", "done")]
        assert [one.completed.value for one in past if one.completed] == ["a", "b"]

    async def test_a_dry_session_refuses_all_that_writes(self, place: Place) -> None:
        session = await place.open(dry=True)
        writes = [
            session.acquire(),
            session.change(ONE, "s", change(call("append", path=place.path("f")))),
            session.undo(ONE),
            session.note("plan", 1),
            session.end("ok", keep_claim=False, commit=True),
            session.commit(),
            session.release(),
        ]
        for one in writes:
            with pytest.raises(HostError) as refused:
                await one
            assert refused.value.failure.kind == "blocked"
        assert place.lines("f") == []

    async def test_another_run_is_refused_while_one_writes_and_told_who(self, place: Place) -> None:
        first, second = await place.open("r1"), await place.open("r2")
        await first.acquire()
        with pytest.raises(HostError) as refused:
            await second.acquire()
        failure = refused.value.failure
        assert failure.kind == "lease_held"
        assert all(word in failure.message for word in ("r1", "grace", "bastion", "two o'clock"))
        with pytest.raises(HostError):
            await second.change("r2/s/1/0", "s", change(call("append", path=place.path("f"))))
        assert place.lines("f") == []

    async def test_who_waits_for_a_lease_is_told_when_it_is_free_and_has_taken_nothing(
        self, place: Place
    ) -> None:
        first, second = await place.open("r1"), await place.open("r2")
        await first.acquire()
        await second.await_lease(0.0)
        assert second.info.lease is not None
        assert second.info.lease.run == "r1"
        waiting = asyncio.ensure_future(second.await_lease(60.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await first.end("ok", keep_claim=False, commit=False)
        await asyncio.wait_for(waiting, 20)
        assert second.info.lease is None
        await second.acquire()

    async def test_unfinished_business_refuses_others_and_names_the_commands(self, place: Place) -> None:
        first = await place.open("r1")
        await first.change(ONE, "s", change(call("append", path=place.path("f"))))
        await first.close()
        second = await place.open("r2")
        await eventually_released(place, second)
        with pytest.raises(HostError) as refused:
            await second.acquire()
        failure = refused.value.failure
        assert failure.kind == "unfinished"
        assert "r1" in failure.message
        assert "change a file" in failure.message
        assert failure.hint == "fleetfix resume, rollback or release r1"

    async def test_a_run_that_ended_well_leaves_the_host_to_others(self, place: Place) -> None:
        first = await place.open("r1")
        await first.change(ONE, "s", change(call("append", path=place.path("f"))))
        await first.end("changed", keep_claim=False, commit=True)
        second = await place.open("r2")
        await second.acquire()
        assert second.info.lease is not None
        assert second.info.lease.run == "r2"
        assert [one.run for one in second.info.claims] == ["r2"]

    async def test_a_claim_that_is_kept_is_told_to_the_next_session(self, place: Place) -> None:
        first = await place.open("r1")
        await first.change(ONE, "s", change(call("append", path=place.path("f"))))
        await first.end("rollback_pending", keep_claim=True, commit=False)
        second = await place.open("r2")
        assert [one.run for one in second.info.claims] == ["r1"]
        with pytest.raises(HostError) as refused:
            await second.acquire()
        assert refused.value.failure.kind == "unfinished"

    async def test_half_of_a_way_back_is_unfinished_business_also_where_all_was_committed(
        self, place: Place
    ) -> None:
        first = await place.open("r1")
        for id, key in ((ONE, "a"), (TWO, "b")):
            await first.change(id, "s", change(call("append", path=place.path("f")), key=key))
        await first.end("changed", keep_claim=False, commit=True)
        back = await place.open("r1")
        await back.undo(TWO)
        await back.close()
        second = await place.open("r2")
        await eventually_released(place, second)
        with pytest.raises(HostError) as refused:
            await second.acquire()
        assert refused.value.failure.kind == "unfinished"

    async def test_a_run_that_began_nothing_leaves_no_claim(self, place: Place) -> None:
        first = await place.open("r1")
        await first.acquire()
        await first.close()
        second = await place.open("r2")
        await eventually_released(place, second)
        await second.acquire()

    async def test_undone_work_is_no_unfinished_business(self, place: Place) -> None:
        first = await place.open("r1")
        undo = (call("remove", path=place.path("f")),)
        await first.change(ONE, "s", change(call("append", path=place.path("f")), undo=undo))
        await first.undo(ONE)
        await first.close()
        second = await place.open("r2")
        await eventually_released(place, second)
        await second.acquire()

    async def test_a_newer_session_of_the_same_run_takes_over(self, place: Place) -> None:
        old, new = await place.open("r1"), await place.open("r1")
        await old.acquire()
        await new.acquire()
        with pytest.raises(HostError) as refused:
            await old.change(ONE, "s", change(call("append", path=place.path("f"), text="old")))
        assert refused.value.failure.kind == "lease_held"
        await new.change(TWO, "s", change(call("append", path=place.path("f"), text="new")))
        assert place.lines("f") == ["new"]

    @pytest.mark.parametrize(
        "other", [{"controller": "bastion2"}, {"driver": "another"}], ids=["host", "place"]
    )
    async def test_another_controller_is_refused_while_one_is_at_work_on_the_run(
        self, place: Place, other: dict[str, str]
    ) -> None:
        first, second = (
            await place.open("r1", driver="one"),
            await place.open("r1", **{"driver": "one", **other}),
        )
        made = change(call("append", path=place.path("f")), undo=(call("remove", path=place.path("f")),))
        await first.change(ONE, "s", made)
        for write in (
            second.acquire(),
            second.undo(ONE),
            second.commit(),
            second.release(),
            second.end("ok", keep_claim=False, commit=False),
        ):
            with pytest.raises(HostError) as refused:
                await write
            failure = refused.value.failure
            assert failure.kind == "lease_held"
            assert all(
                word in failure.message for word in ("r1", "grace", "on bastion writes", "two o'clock")
            )
            assert "--take-over" in failure.hint
        assert len(place.lines("f")) == 1
        await first.change(TWO, "s", made)  # nothing was taken away from it

    async def test_another_controller_takes_over_when_it_says_so_and_when_the_first_is_gone(
        self, place: Place
    ) -> None:
        first = await place.open("r1", controller="bastion1")
        await first.acquire()
        second = await place.open("r1", controller="bastion2", take_over=True)
        await second.acquire()
        with pytest.raises(HostError) as refused:
            await first.note("plan", {})
        assert refused.value.failure.kind == "lease_held"
        # The first does not get it back unasked, not even on a new line.
        with pytest.raises(HostError, match="bastion2"):
            await (await place.open("r1", controller="bastion1")).acquire()
        await second.close()
        third = await place.open("r1", controller="bastion3")
        await eventually_released(place, third)
        await third.acquire()

    async def test_the_epoch_counts_up_at_each_acquisition(self, place: Place) -> None:
        epochs = []
        for _ in range(3):
            session = await place.open("r1")
            await session.acquire()
            assert session.info.lease is not None
            epochs.append(session.info.lease.epoch)
            await session.end("ok", keep_claim=False, commit=False)
        assert epochs == sorted(set(epochs))

    async def test_commit_runs_for_what_was_done_and_not_for_what_was_undone(self, place: Place) -> None:
        session = await place.open()
        for id, name in ((ONE, "a"), (TWO, "b")):
            commit = (call("append", path=place.path("committed"), text=name),)
            one = change(call("append", path=place.path("f")), commit=commit, key=name)
            await session.change(id, "s", one)
        await session.undo(TWO)
        await session.end("changed", keep_claim=False, commit=True)
        assert place.lines("committed") == ["a"]

    async def test_what_is_committed_later_is_there_for_good(self, place: Place) -> None:
        first = await place.open("r1")
        commit = (call("append", path=place.path("committed"), text="a"),)
        undo = (call("remove", path=place.path("f")),)
        await first.change(ONE, "s", change(call("append", path=place.path("f")), undo=undo, commit=commit))
        await first.end("unproven", keep_claim=True, commit=False)
        second = await place.open("r1")
        await second.commit()
        assert place.lines("committed") == ["a"]
        assert await second.recall("committed") is not None
        with pytest.raises(HostError) as refused:
            await second.undo(ONE)
        assert "committed" in refused.value.failure.message
        assert place.lines("f") == ["x"]
        other = await place.open("r2")
        await eventually_released(place, other)
        assert other.info.claims == ()
        await second.commit()  # again it is a no-op

    async def test_a_host_whose_job_a_run_stopped_is_not_committed(self, place: Place) -> None:
        session = await place.open("r1")
        commit = (call("append", path=place.path("committed")),)
        stop = change(call("append", path=place.path("f")), commit=commit, job="stops")
        await session.change(ONE, "s", stop)
        with pytest.raises(HostError) as refused:
            await session.commit()
        assert refused.value.failure.kind == "unfinished"
        assert "does not run again" in refused.value.failure.message
        start = change(call("append", path=place.path("f")), key="start", job="starts")
        await session.change(TWO, "t", start)
        await session.commit()
        assert place.lines("committed") == ["x"]

    async def test_a_release_gives_up_lease_and_claim_and_undoes_nothing(self, place: Place) -> None:
        first = await place.open("r1")
        undo = (call("remove", path=place.path("f")),)
        await first.change(ONE, "s", change(call("append", path=place.path("f")), undo=undo))
        await first.close()
        second = await place.open("r1")
        await eventually_released(place, second)
        await second.release()
        assert place.lines("f") == ["x"]
        assert not list(place.root.rglob("ballast")), "room is kept for who goes back only"
        other = await place.open("r2")
        assert other.info.claims == ()
        await other.acquire()
        with pytest.raises(HostError) as refused:
            await second.release()
        assert refused.value.failure.kind == "lease_held"

    async def test_a_run_that_holds_nothing_here_releases_nothing(self, place: Place) -> None:
        other = await place.open("r2")
        await other.acquire()
        await (await place.open("r1")).release()
        await other.change("r2/s/1/0", "s", change(call("append", path=place.path("f"))))

    async def test_a_note_is_there_for_the_next_session_of_the_run(self, place: Place) -> None:
        first = await place.open()
        await first.note("plan", {"digest": "abc"})
        await first.close()
        second = await place.open()
        assert await second.recall("plan") == {"digest": "abc"}
        assert await second.recall("other") is None

    async def test_a_host_that_is_switched_off_takes_no_change_but_lets_undo_through(
        self, place: Place
    ) -> None:
        assert place.disable is not None
        session = await place.open()
        undo = (call("remove", path=place.path("f")),)
        await session.change(ONE, "s", change(call("append", path=place.path("f")), undo=undo))
        place.disable("maintenance by ada")
        with pytest.raises(HostError) as refused:
            await session.change(TWO, "s", change(call("append", path=place.path("f"))))
        assert refused.value.failure.kind == "disabled"
        assert "maintenance by ada" in refused.value.failure.message
        assert (await session.undo(ONE)).ok
        assert place.lines("f") == []
        assert (await place.open()).info.disabled == "maintenance by ada"


async def eventually_left(place: Place) -> Session:
    """A session of another controller, once nobody is at work on the run any more."""
    for _ in range(200):
        session = await place.open("r1", controller="bastion2")
        if session.info.lease is None or not session.info.lease.at_work:
            return session
        await session.close()
        await asyncio.sleep(0.05)
    raise AssertionError("the controller is gone and still counts as at work")


async def eventually_released(place: Place, session: Session) -> None:
    """Wait until the runner of a closed session has let go of the lease."""
    for _ in range(500):
        probe = await place.open("r9", dry=True)
        lease = probe.info.lease
        await probe.close()
        if lease is None:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the lease was not released")


class HostContract(SessionPromises):
    """Promises about commands, processes, files and lines that break."""

    # -- answers ----------------------------------------------------------------------------------

    async def test_what_cannot_be_undone_any_more_is_told_before_anything_is(self, place: Place) -> None:
        session = await place.open()
        kept = (call("remembering", path=place.path("f")), call("append", path=place.path("f")))
        await session.change(ONE, "mend", change(*kept, undo=(call("forgetting"),)))
        await session.change(TWO, "s", change(call("append", path=place.path("g")), key="other"))
        await session.close()
        second = await place.open()
        assert await second.lacking() == ()
        (place.folder / "f").unlink()
        assert await second.lacking() == ("change a file: f of step mend is gone",)
        assert [one.state for one in await second.past()] == ["done", "done"]
        await second.undo(ONE)
        assert await second.lacking() == ()

    async def test_what_another_run_did_again_is_lacking(self, place: Place) -> None:
        for run in ("r1", "r2"):
            session = await place.open(run)
            await session.change(f"{run}/s/1/0", "s", change(call("append", path=place.path("f"))))
            await session.end("changed", keep_claim=False, commit=True)
            await session.close()
        first = await place.open("r1")
        (said,) = await first.lacking()
        assert "fleetfix rollback r2 comes first" in said

    async def test_what_is_held_for_a_while_goes_when_its_time_is_over(self, place: Place) -> None:
        first = await place.open("r1")
        await first.acquire()
        home = Path(first.info.home)
        (home / "holds").mkdir()
        for name, until in (("over", 1.0), ("kept", 9e9)):
            (home / name).mkdir()
            note = {"outer": str(home / name), "until": until, "run": "r0"}
            (home / "holds" / f"{name}.json").write_text(json.dumps(note))
        owner = home.stat()
        for made in (home / "holds", *(home / "holds").iterdir(), home / "over", home / "kept"):
            os.chown(made, owner.st_uid, owner.st_gid)
        await first.end("ok", keep_claim=False, commit=False)
        second = await place.open("r2")
        assert second.info.sweep_due
        assert (home / "over").exists(), "a session that only looks changes nothing"
        await second.acquire()
        assert not second.info.sweep_due
        assert [name for name in ("over", "kept") if (home / name).exists()] == ["kept"]

    async def test_what_a_newer_run_changed_again_is_not_undone_under_it(self, place: Place) -> None:
        for run in ("r1", "r2"):
            session = await place.open(run)
            await eventually_released(place, session)
            undo = (call("append", path=place.path("undone"), text=run),)
            await session.change(
                f"{run}/s/1/0", "s", change(call("append", path=place.path("f")), undo=undo)
            )
            await session.end("changed", keep_claim=False, commit=True)
            await session.close()
        log = place.home / "runs/r2/host.jsonl"
        # The host's clock was set back between the two.
        log.write_text(re.sub(r'"t":[0-9.]+', '"t":1.0', log.read_text()))
        old, new = await place.open("r1"), await place.open("r2")
        await eventually_released(place, old)
        with pytest.raises(HostError) as refused:
            await old.undo("r1/s/1/0")
        assert refused.value.failure.kind == "blocked"
        assert "r2" in refused.value.failure.message
        assert place.lines("undone") == []
        await old.close()
        await eventually_released(place, new)
        assert (await new.undo("r2/s/1/0")).ok
        await new.end("rolled_back", keep_claim=False, commit=False)
        await new.close()
        again = await place.open("r1")
        await eventually_released(place, again)
        assert (await again.undo("r1/s/1/0")).ok
        assert place.lines("undone") == ["r2", "r1"]

    async def test_who_was_stopped_and_wakes_up_after_another_took_over_changes_nothing(
        self, place: Place
    ) -> None:
        first = await place.open(timers=NO_RETURN)
        await first.acquire()
        runner = await runner_of(first)
        os.kill(runner, signal.SIGSTOP)
        late = asyncio.ensure_future(
            first.change(ONE, "s", change(call("append", path=place.path("f"), text="late")))
        )
        second = await place.open()
        await second.change(TWO, "s", change(call("append", path=place.path("f"), text="new")))
        os.kill(runner, signal.SIGCONT)
        with pytest.raises(HostError) as refused:
            await late
        assert refused.value.failure.kind == "lease_held"
        assert place.lines("f") == ["new"]

    async def test_the_refused_one_leaves_no_trace_on_the_host(self, place: Place) -> None:
        first = await place.open("r1")
        undo = (call("remove", path=place.path("f")),)
        await first.change(ONE, "s", change(call("append", path=place.path("f")), undo=undo))
        before = _files_below(place.root)
        second = await place.open("r2")
        for write in (
            second.acquire(),
            second.note("bound", {}),
            second.change("r2/s/1/0", "s", change(call("append", path=place.path("f")))),
        ):
            with pytest.raises(HostError):
                await write
        for nothing in (
            second.end("busy", keep_claim=True, commit=True),
            second.release(),
            second.commit(),
        ):
            await nothing
        await second.close()
        third = await place.open("r3")
        await third.close()
        assert _files_below(place.root) == before
        await first.undo(ONE)  # and the winner has lost nothing

    async def test_records_that_are_removed_between_steps_are_made_anew_and_their_loss_is_told(
        self, place: Place
    ) -> None:
        session = await place.open()
        await session.acquire()
        shutil.rmtree(place.home)
        await session.change(ONE, "s", change(call("append", path=place.path("f"))))
        shutil.rmtree(place.home)
        with pytest.raises(HostError) as told:
            await session.change(TWO, "s", change(call("append", path=place.path("f"))))
        assert told.value.failure.kind == "in_doubt"
        assert "change a file" in told.value.failure.message
        with pytest.raises(HostError) as told:
            await session.undo(ONE)
        assert told.value.failure.kind == "in_doubt"
        assert await session.past() == ()
        await session.end("in_doubt", keep_claim=True, commit=False)
        assert place.lines("f") == ["x"]
        other = await place.open("r2")
        with pytest.raises(HostError, match="change a file") as refused:
            await other.acquire()
        assert refused.value.failure.kind == "unfinished"
        await session.release()
        await other.acquire()

    async def test_a_run_that_ends_well_says_that_its_records_were_removed(self, place: Place) -> None:
        said: list[str] = []
        session = await place.open(progress=lambda step, text: said.append(text))
        await session.change(ONE, "s", change(call("append", path=place.path("f"))))
        shutil.rmtree(place.home)
        await session.end("changed", keep_claim=False, commit=True)
        assert any("were removed here" in line and "change a file" in line for line in said)
        other = await place.open("r2")
        await other.acquire()

    async def test_a_removal_while_a_change_runs_is_survived(self, place: Place) -> None:
        session = await place.open()
        async with place.slow_change(session) as slow:
            shutil.rmtree(place.home)
            slow.let_go()
            assert slow.task is not None
            assert (await slow.task).in_doubt
        with pytest.raises(HostError) as told:
            await session.undo(ONE)
        assert told.value.failure.kind == "in_doubt", told.value.failure

    async def test_the_hosts_ledger_tells_who_did_what_when_and_why(self, place: Place) -> None:
        session = await place.open("r1")
        undo = (call("remove", path=place.path("f")),)
        await session.change(ONE, "s", change(call("append", path=place.path("f")), undo=undo))
        await session.change(TWO, "s", change(call("failing"), key="l"))
        await session.undo(ONE)
        await session.end("rolled_back", keep_claim=False, commit=False, anchor="7:abc")
        look = await place.open("look", dry=True)
        (answer,) = await look.read(
            "", [Read(function="ledger_lines.last", args={"count": 9}, timeout=20.0)]
        )
        lines = answer.value["lines"]
        assert [(one["kind"], one.get("change")) for one in lines] == [
            ("begun", ONE),
            ("done", ONE),
            ("begun", TWO),
            ("failed", TWO),
            ("undone", ONE),
            ("ended", None),
        ]
        for one in lines:
            assert (one["run"], one["operator"], one["controller"]) == ("r1", "grace", "bastion")
            assert one["reason"] == "two o'clock in the morning"
        assert lines[0]["summary"] == "change a file"
        assert (lines[-1]["outcome"], lines[-1]["anchor"]) == ("rolled_back", "7:abc")

    async def test_two_sessions_that_wait_to_make_the_same_change_make_it_once(self, place: Place) -> None:
        first = await place.open()
        slow = change(
            call("append_slowly", path=place.path("f"), until=place.path("go"), pid_file=place.path("pid"))
        )
        begun = asyncio.ensure_future(first.change(ONE, "s", slow))
        await eventually(lambda: place.lines("pid") != [])
        await first.close()
        await asyncio.gather(begun, return_exceptions=True)
        same = change(call("append", path=place.path("once")), key="same")
        tasks = []
        for _ in range(2):
            session = await place.open()
            await session.acquire()
            tasks.append(asyncio.ensure_future(session.change(TWO, "s", same)))
            await session.recall("nothing")  # answered after the change before it was looked at
        Path(place.path("go")).touch()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert place.lines("once") == ["x"]
        assert any(isinstance(answer, Completed) and answer.ok for answer in answers)

    async def test_a_cancel_ends_a_change_that_only_waits(self, place: Place) -> None:
        first = await place.open()
        slow = change(
            call("append_slowly", path=place.path("f"), until=place.path("go"), pid_file=place.path("pid"))
        )
        begun = asyncio.ensure_future(first.change(ONE, "s", slow))
        await eventually(lambda: place.lines("pid") != [])
        await first.close()
        await asyncio.gather(begun, return_exceptions=True)
        second = await place.open()
        await second.acquire()
        waiting = asyncio.ensure_future(
            second.change(TWO, "s", change(call("append", path=place.path("g"))))
        )
        await second.recall("nothing")
        await second.cancel()
        with pytest.raises(HostError) as refused:
            await waiting
        assert refused.value.failure.kind == "cancelled"
        Path(place.path("go")).touch()
        assert place.lines("g") == []

    async def test_every_exit_status_is_an_answer(self, place: Place) -> None:
        session = await place.open()
        scripts = ["exit 0", "exit 7", "exit 255", "kill -TERM $$", "/no/such/program"]
        answers = await session.read("s", [read("shell", script=one) for one in scripts])
        assert [one.exit for one in answers] == [0, 7, 255, -15, 127]
        assert all(one.failure is None for one in answers)

    async def test_long_output_of_both_streams_is_cut_in_the_middle_and_said_to_be(
        self, place: Place
    ) -> None:
        session = await place.open()
        script = "for n in $(seq 50000); do echo out$n; echo err$n >&2; done"
        (answer,) = await session.read("s", [read("shell", script=script)])
        assert answer.cut
        for text, word in ((answer.stdout, "out"), (answer.stderr, "err")):
            assert text.startswith(f"{word}1\n")
            assert text.endswith(f"{word}50000\n")
            assert "bytes cut" in text
            assert len(text) < 40_000

    async def test_bytes_that_are_not_text_arrive_escaped(self, place: Place) -> None:
        session = await place.open()
        script = r"printf 'a\000b\377c\303\251'"
        (answer,) = await session.read("s", [read("shell", script=script)])
        assert answer.stdout == "a\0b\\xffcé"

    async def test_input_is_closed_unless_it_is_given(self, place: Place) -> None:
        session = await place.open()
        empty, fed = await session.read(
            "s", [read("shell", script="cat; echo end"), read("shell", script="cat", stdin="in")]
        )
        assert (empty.stdout, fed.stdout) == ("end\n", "in")

    async def test_commands_see_nothing_of_the_operators_environment(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPERATOR_SECRET", "x")
        session = await place.open()
        (answer,) = await session.read("s", [read("shell", script="env")])
        names = {line.partition("=")[0] for line in answer.stdout.splitlines()}
        assert names <= {"PATH", "LC_ALL", "HOME", "PWD", "OLDPWD", "SHLVL", "_"}
        assert "LC_ALL=C\n" in answer.stdout

    async def test_what_a_function_prints_does_not_reach_the_line(self, place: Place) -> None:
        session = await place.open()
        answers = await session.read("s", [read("noisy"), read("echo", value=1)])
        assert [one.value for one in answers] == ["quiet", 1]

    async def test_refusals_errors_and_deaths_are_told_apart(self, place: Place) -> None:
        session = await place.open()
        reads = [
            read("refusing"),
            read("broken"),
            read("dying"),
            read("no_such"),
            read("append", path=place.path("f")),
        ]
        answers = await session.read("s", reads)
        kinds = [one.failure.kind for one in answers if one.failure]
        assert kinds == ["blocked", "bug", "command", "bug", "blocked"]
        assert answers[0].failure is not None
        assert answers[0].failure.hint == "ask alice"
        assert place.lines("f") == []

    async def test_an_answer_that_is_too_long_is_refused_and_the_line_goes_on(self, place: Place) -> None:
        session = await place.open()
        fits, too_long = await session.read("s", [read("large", size=60_000), read("large", size=70_000)])
        assert len(fits.value) == 60_000
        assert too_long.failure is not None
        assert too_long.failure.kind == "bug"

    async def test_a_call_tells_what_it_does_while_it_runs(self, place: Place) -> None:
        said: list[tuple[str, str]] = []
        session = await place.open(progress=lambda step, text: said.append((step, text)))
        await session.read("s", [read("talk", lines=3)])
        assert said == [("s", "line 0"), ("s", "line 1"), ("s", "line 2")]

    async def test_many_reads_run_side_by_side(self, place: Place) -> None:
        session = await place.open()
        begun = time.monotonic()
        answers = await session.read("s", [read("nap", seconds=0.2 + n / 1e6) for n in range(24)])
        assert len(answers) == 24
        assert all(one.ok for one in answers)
        assert time.monotonic() - begun < 24 * 0.2 / 2

    # -- trees ------------------------------------------------------------------------------------

    async def test_a_read_past_its_deadline_leaves_no_process(self, place: Place) -> None:
        session, word = await place.open(), token()
        (answer,) = await session.read("s", [read("scatter", timeout=1.0, token=word)])
        assert answer.failure is not None
        assert answer.failure.kind == "timed_out"
        assert processes_with(word) == []

    async def test_a_command_past_its_deadline_may_first_put_things_right(self, place: Place) -> None:
        session = await place.open()
        script = f"trap 'echo tidy >{place.path('f')}; exit' TERM; while :; do sleep 0.1; done"
        await session.read("s", [read("unhurried", timeout=0.5, script=script)])
        assert place.lines("f") == ["tidy"]

    async def test_a_function_past_its_deadline_is_ended(self, place: Place) -> None:
        session = await place.open()
        (answer,) = await session.read("s", [read("nap", timeout=0.2, seconds=100)])
        assert answer.failure is not None
        assert answer.failure.kind == "timed_out"

    async def test_cancel_ends_reads_and_changes_with_all_they_started(self, place: Place) -> None:
        session, word = await place.open(), token()
        reading = asyncio.create_task(session.read("s", [read("scatter", token=word)]))
        writing = asyncio.create_task(session.change(ONE, "s", change(call("scatter_writing", token=word))))
        await eventually(lambda: len(processes_with(word)) >= 10)
        assert await session.cancel() == ()
        assert processes_with(word) == []
        (answer,), changed = await reading, await writing
        assert answer.failure is not None
        assert changed.failure is not None
        assert (answer.failure.kind, changed.failure.kind) == ("cancelled", "cancelled")
        assert [one.state for one in await session.past()] == ["failed"]

    async def test_a_change_past_its_deadline_leaves_no_process(self, place: Place) -> None:
        session, word = await place.open(), token()
        answer = await session.change(ONE, "s", change(call("scatter_writing", timeout=1.0, token=word)))
        assert answer.failure is not None
        assert answer.failure.kind == "timed_out"
        assert processes_with(word) == []

    async def test_a_read_leaves_nothing_behind_when_it_returns(self, place: Place) -> None:
        session, word = await place.open(), token()
        (answer,) = await session.read("s", [read("scatter_and_return", token=word)])
        assert answer.value == "left"
        assert processes_with(word) == []

    async def test_what_a_change_starts_to_stay_stays(self, place: Place) -> None:
        session, word = await place.open(), token()
        await session.change(ONE, "s", change(call("leave", token=word)))
        await session.cancel()
        await session.close()
        (left,) = processes_with(word)
        kill(left)

    # -- what is kept on the host -------------------------------------------------------------------

    async def test_a_dry_session_leaves_no_file(self, place: Place) -> None:
        session = await place.open(dry=True)
        await session.read("s", [read("echo"), read("who")])
        with pytest.raises(HostError):
            await session.change(ONE, "s", change(call("append", path=place.path("f"))))
        await session.past()
        await session.close()
        assert not place.root.exists()

    async def test_a_session_that_only_reads_leaves_no_file(self, place: Place) -> None:
        session = await place.open()
        await session.read("s", [read("who")])
        await session.end("ok", keep_claim=False, commit=True)
        await session.close()
        assert not place.root.exists()

    async def test_records_are_readable_by_their_owner_alone(self, place: Place) -> None:
        session = await place.open()
        await session.change(ONE, "s", change(call("remember", key="k", value=1)))
        for path in [place.home, *place.home.rglob("*")]:
            assert path.stat().st_mode & 0o077 == 0 or path.is_relative_to(place.root / "run"), path

    async def test_what_do_remembers_is_there_for_undo(self, place: Place) -> None:
        session = await place.open()
        undo = (call("recalled", key="was", path=place.path("f")),)
        await session.change(ONE, "s", change(call("remember", key="was", value=[1, "two"]), undo=undo))
        assert (await session.undo(ONE)).value == [1, "two"]

    # -- lines that break ---------------------------------------------------------------------------

    async def test_a_killed_runner_loses_no_change_and_makes_none_twice(self, place: Place) -> None:
        session = await place.open()
        async with place.slow_change(session) as slow:
            kill(await runner_of(session))
            await asyncio.sleep(0.3)
            slow.let_go()
            assert slow.task is not None
            answer = await slow.task
        assert (answer.ok, answer.value) == (True, "slowly")
        assert place.lines("slow") == ["x"]

    @pytest.mark.parametrize("patience", ["usual", "more"])
    async def test_whoever_watches_hears_when_the_line_breaks_and_when_it_is_whole_again(
        self, place: Place, patience: Patience
    ) -> None:
        heard = Heard(patience)
        # One whose own time is over comes back all the same, while whoever watches has the patience.
        timers = Timers(reconnect_within=20.0) if patience == "usual" else NO_RETURN
        session = await place.open(timers=timers, watch=heard)
        kill(await runner_of(session))
        assert (await session.read("s", [read("echo", value=1)]))[0].value == 1
        assert heard.said == ["dropped", "returned"]

    async def test_a_session_is_given_up_at_once_when_whoever_watches_says_so(self, place: Place) -> None:
        heard = Heard("none")
        session = await place.open(watch=heard)
        kill(await runner_of(session))
        with pytest.raises(HostError) as lost:
            await session.read("s", [read("echo", value=1)])
        assert lost.value.failure.kind == "unreachable"
        assert heard.said == ["dropped"]

    async def test_a_change_whose_process_was_killed_is_in_doubt_and_not_repeated(
        self, place: Place
    ) -> None:
        session = await place.open()
        async with place.slow_change(session) as slow:
            runner = await runner_of(session)
            kill(runner)
            kill(slow.pid)
            assert slow.task is not None
            answer = await slow.task
        assert answer.in_doubt
        assert [one.state for one in await session.past()] == ["in_doubt"]
        assert (await session.change(ONE, "s", slow.change)).in_doubt
        assert place.lines("slow") == ["x"]
        assert (await session.undo(ONE)).ok
        assert place.lines("slow") == []

    async def test_a_killed_change_is_in_doubt_while_the_runner_lives(self, place: Place) -> None:
        session = await place.open()
        async with place.slow_change(session) as slow:
            kill(slow.pid)
            assert slow.task is not None
            assert (await slow.task).in_doubt
        assert [one.state for one in await session.past()] == ["in_doubt"]

    async def test_who_ends_what_it_has_in_hand_without_a_controller_is_not_at_work(
        self, place: Place
    ) -> None:
        first = await place.open("r1", controller="bastion1")
        async with place.slow_change(first) as slow:
            await first.close()
            second = await eventually_left(place)
            await second.acquire()
            slow.let_go()
            await second.change(TWO, "s", change(call("append", path=place.path("f"), text="after")))
        assert place.lines("f") == ["after"]
        assert len(place.lines("slow")) == 1

    async def test_a_lost_session_says_unreachable_and_the_next_one_waits_for_its_change(
        self, place: Place
    ) -> None:
        first = await place.open(timers=NO_RETURN)
        async with place.slow_change(first) as slow:
            kill(await runner_of(first))
            assert slow.task is not None
            with pytest.raises(HostError) as lost:
                await slow.task
            assert lost.value.failure.kind == "unreachable"
            second = await place.open()
            assert [one.state for one in await second.past()] == ["begun"]
            again = asyncio.create_task(second.change(ONE, "s", slow.change))
            await asyncio.sleep(0.2)
            assert not again.done()
            slow.let_go()
            assert (await again).value == "slowly"
        assert place.lines("slow") == ["x"]

    async def test_hanging_up_lets_the_change_in_flight_finish_and_the_runner_end(
        self, place: Place
    ) -> None:
        first = await place.open()
        async with place.slow_change(first) as slow:
            runner = await runner_of(first)
            await first.close()
            assert Path(f"/proc/{runner}").exists()
            slow.let_go()
            await eventually(lambda: not Path(f"/proc/{runner}").exists() or _is_zombie(runner))
        second = await place.open()
        assert [one.state for one in await second.past()] == ["done"]

    async def test_undo_of_a_change_that_runs_waits_for_it(self, place: Place) -> None:
        first = await place.open(timers=NO_RETURN)
        async with place.slow_change(first) as slow:
            kill(await runner_of(first))
            second = await place.open()
            undoing = asyncio.create_task(second.undo(ONE))
            await asyncio.sleep(0.2)
            assert not undoing.done()
            assert place.lines("slow") == ["x"]
            slow.let_go()
            assert (await undoing).value == "removed"
        assert place.lines("slow") == []

    async def test_cancel_ends_the_change_that_a_lost_session_left(self, place: Place) -> None:
        first = await place.open(timers=NO_RETURN)
        async with place.slow_change(first) as slow:
            kill(await runner_of(first))
            second = await place.open()
            assert await second.cancel() == ()
            assert not Path(f"/proc/{slow.pid}").exists() or _is_zombie(slow.pid)
            assert [one.state for one in await second.past()] == ["failed"]

    async def test_reads_end_with_a_killed_runner(self, place: Place) -> None:
        session, word = await place.open(timers=NO_RETURN), token()
        reading = asyncio.create_task(session.read("s", [read("scatter", token=word)]))
        await eventually(lambda: len(processes_with(word)) >= 5)
        kill(await runner_of(session))
        with pytest.raises(HostError):
            await reading
        await eventually(lambda: processes_with(word) == [])

    async def test_a_read_is_asked_again_on_a_new_line(self, place: Place) -> None:
        session = await place.open()
        reading = asyncio.create_task(session.read("s", [read("nap", seconds=0.5), read("echo", value=1)]))
        await asyncio.sleep(0.1)
        kill(await runner_of(session))
        assert [one.ok for one in await reading] == [True, True]

    async def test_a_frozen_peer_is_noticed(self, place: Place) -> None:
        timers = Timers(ping=0.1, silence=0.6, orphaned=60.0, reconnect_within=0.0)
        session = await place.open(timers=timers)
        runner = await runner_of(session)
        os.kill(runner, signal.SIGSTOP)
        try:
            with pytest.raises(HostError) as lost:
                await session.read("s", [read("echo")])
            assert lost.value.failure.kind == "unreachable"
        finally:
            os.kill(runner, signal.SIGCONT)

    async def test_a_runner_that_hears_nothing_ends_itself(self, place: Place) -> None:
        timers = Timers(ping=60.0, silence=60.0, orphaned=0.5, reconnect_within=0.0)
        session = await place.open(timers=timers)
        runner = await runner_of(session)
        await eventually(lambda: not Path(f"/proc/{runner}").exists() or _is_zombie(runner))

    async def test_a_closed_session_answers_unreachable(self, place: Place) -> None:
        session = await place.open()
        await session.close()
        with pytest.raises(HostError) as closed:
            await session.read("s", [read("echo")])
        assert closed.value.failure.kind == "unreachable"


def _files_below(root: Path) -> dict[str, bytes]:
    """Every file, but the lease's own, which its owner renews."""
    return {
        str(path): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith(("lease.", "fleetfix.lease"))
    }


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
