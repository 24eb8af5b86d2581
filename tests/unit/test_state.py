"""The folded state: equal histories, equal states; every kind of event survives JSON."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.errors import Failure
from fleetfix.events import (
    BreakerTripped,
    ChangeFinished,
    ChangeFound,
    ChangeShown,
    ChangeStarted,
    ChangeUndone,
    CohortFormed,
    CommandEnded,
    ConnectionDropped,
    ConnectionReturned,
    Event,
    EvidenceKept,
    HostCommitted,
    HostConnected,
    HostFinished,
    HostLost,
    HostNotUndone,
    HostPlanned,
    HostReleased,
    HostSaid,
    HostStarted,
    LeaseAwaited,
    NetworkLost,
    NetworkReturned,
    Outcome,
    Record,
    RollbackFinished,
    RollbackStarted,
    RunFinished,
    RunHalted,
    RunInterrupted,
    RunResumed,
    RunRolledBack,
    SoakStarted,
    StepFinished,
    StepPlanned,
    StepStarted,
    StepWaited,
    WaveStarted,
)
from fleetfix.policy import Policy
from fleetfix.state import exit_code, fold, to_take_up
from tests.unit.test_rollout import started as run_started
from tests.unit.test_rollout import state_of

SHOWN = ChangeShown(key="wheels:/opt/venv", summary="repair 2 files", risk="reversible")
LOST = Failure(kind="unreachable", message="no route to host")
NO = Failure(kind="verify_failed", message="still wrong")

EVENTS: tuple[Event, ...] = (
    run_started(("gpu01", "gpu02"), Policy()),
    HostConnected(host="gpu01", user="root", python="3.11"),
    StepPlanned(host="gpu01", step="wheels", pending=True, changes=(SHOWN,)),
    HostPlanned(host="gpu01", pending=True),
    LeaseAwaited(host="gpu01", run="r0", operator="bob", controller="b2", since="2026-12-01", seconds=60.0),
    CohortFormed(name="job 7", hosts=("gpu01",), why="one job"),
    WaveStarted(name="canary", hosts=("gpu01",)),
    HostStarted(host="gpu01"),
    StepStarted(host="gpu01", step="wheels"),
    HostSaid(host="gpu01", step="wheels", text="2 of 4"),
    CommandEnded(host="gpu01", exit=-9, stdout_bytes=12, seconds=0.5),
    ChangeStarted(host="gpu01", step="wheels", change="r/wheels/1/0", shown=SHOWN),
    ChangeFinished(host="gpu01", step="wheels", change="r/wheels/1/0", ok=True),
    EvidenceKept(host="gpu01", step="wheels", folder="/e/r/gpu01/wheels"),
    StepWaited(host="gpu01", step="wheels", reason="not yet"),
    StepFinished(host="gpu01", step="wheels", result="failed", failure=NO),
    ConnectionDropped(host="gpu01", reason="nothing was heard for 45 s"),
    ConnectionReturned(host="gpu01", seconds=20.0, boot_id="b2", machine_id="m1", restarted=True),
    HostLost(host="gpu01", failure=LOST),
    RollbackStarted(host="gpu01", reason="still wrong"),
    ChangeUndone(host="gpu01", step="wheels", change="r/wheels/1/0", summary="repair", ok=True),
    RollbackFinished(host="gpu01", result="rolled_back"),
    HostFinished(host="gpu01", outcome="rolled_back", failure=NO, touched=True),
    SoakStarted(wave="canary", seconds=60.0),
    NetworkLost(dropped=3, open=4),
    NetworkReturned(seconds=2.0),
    RunHalted(reason="the canary gpu01 is rolled_back"),
    BreakerTripped(reason="going back failed on gpu02"),
    RunInterrupted(signal="SIGINT", times=1),
    RunFinished(exit=130),
    RunResumed(operator="ann", controller="here", hosts=("gpu02",)),
    ChangeFound(host="gpu02", step="wheels", change="r/wheels/1/0", state="done", shown=SHOWN),
    RunRolledBack(exit=0),
    HostCommitted(host="gpu01", operator="ann", controller="here"),
    HostReleased(host="gpu02", operator="ann", controller="here", left=("repair 2 files",)),
    HostNotUndone(host="gpu02", failure=NO),
)


def records(events: tuple[Event, ...] = EVENTS) -> list[Record]:
    return [Record(run="r", seq=n, at=float(n), event=event) for n, event in enumerate(events)]


def test_the_list_here_has_every_kind() -> None:
    union = get_args(get_args(Event)[0])
    assert {type(event) for event in EVENTS} == set(union)


@pytest.mark.parametrize("record", records(), ids=lambda record: record.event.kind)
def test_every_kind_survives_json(record: Record) -> None:
    assert Record.model_validate_json(record.model_dump_json()) == record


@given(st.integers(0, len(EVENTS)))
def test_folding_a_prefix_and_then_the_rest_is_folding_the_whole(cut: int) -> None:
    assert fold(records()[cut:], fold(records()[:cut])) == fold(records())


def test_the_first_error_is_kept_through_loss_and_rollback() -> None:
    assert fold(records()).hosts["gpu01"].first_failure == NO


def test_an_undone_change_is_no_longer_open_and_one_that_could_not_be_undone_is() -> None:
    begun = ChangeStarted(host="gpu01", step="wheels", change="r/wheels/1/0", shown=SHOWN)
    undone = ChangeUndone(host="gpu01", step="wheels", change="r/wheels/1/0", summary="x", ok=True)
    head = run_started(("gpu01",), Policy())
    assert state_of(head, begun, undone).hosts["gpu01"].changes == {}
    failed = undone.model_copy(update={"ok": False})
    assert state_of(head, begun, failed).hosts["gpu01"].changes == {"r/wheels/1/0": SHOWN}


def test_a_way_back_that_has_begun_is_open_until_it_has_its_end() -> None:
    head = run_started(("gpu01", "gpu02"), Policy())
    ends = [HostFinished(host=host, outcome="changed", touched=True) for host in ("gpu01", "gpu02")]
    ended = (head, *ends, RunFinished(exit=0))
    begun = state_of(*ended, RollbackStarted(host="gpu01", reason="asked for"))
    assert [host.outcome for host in begun.hosts.values()] == ["rollback_pending", "changed"]
    assert (begun.ended_with, to_take_up(begun)) == (None, ("gpu01",))
    back = HostFinished(host="gpu01", outcome="rolled_back", touched=True)
    over = fold(records((back, RunRolledBack(exit=0))), begun)
    assert (over.hosts["gpu01"].outcome, over.ended_with) == ("rolled_back", 0)


@pytest.mark.parametrize(
    ("outcomes", "halted", "interrupted", "code"),
    [
        (("ok", "changed", "skipped"), False, False, 0),
        (("changed", "failed"), False, False, 2),
        (("changed", "unproven"), False, False, 2),
        (("changed", "rolled_back"), False, False, 2),
        (("changed", "unreachable"), False, False, 4),
        (("failed", "unreachable"), False, False, 2),
        (("failed", "not_started"), True, False, 3),
        (("failed", "not_started"), True, True, 130),
    ],
)
def test_the_exit_code_of_a_run(
    outcomes: tuple[Outcome, ...], halted: bool, interrupted: bool, code: int
) -> None:
    hosts = tuple(f"gpu{n}" for n in range(len(outcomes)))
    events: list[Event] = [run_started(hosts, Policy())]
    events += [HostFinished(host=h, outcome=o) for h, o in zip(hosts, outcomes, strict=True)]
    events += [RunHalted(reason="x")] if halted else []
    events += [RunInterrupted(signal="SIGINT", times=1)] if interrupted else []
    assert exit_code(state_of(*events)) == code


def test_a_plan_with_changes_is_6_only_where_it_was_asked_for() -> None:
    state = state_of(run_started(("gpu01",), Policy()), HostFinished(host="gpu01", outcome="pending"))
    assert exit_code(state) == 0
    assert exit_code(state, detailed=True) == 6


def test_a_start_that_was_cut_short_and_is_found_done_has_started_the_job() -> None:
    stop, start = "r/stop/1/0", "r/train/1/0"
    stopping = SHOWN.model_copy(update={"job": "stops"})
    starting = SHOWN.model_copy(update={"job": "starts"})
    cut = (
        run_started(("gpu01",), Policy()),
        HostStarted(host="gpu01"),
        ChangeStarted(host="gpu01", step="stop", change=stop, shown=stopping),
        ChangeFinished(host="gpu01", step="stop", change=stop, ok=True),
        ChangeFound(host="gpu01", step="train", change=start, state="failed", shown=starting),
    )
    assert fold(records(cut)).hosts["gpu01"].job_stopped
    found = StepFinished(host="gpu01", step="train", result="changed")
    host = fold(records((*cut, found))).hosts["gpu01"]
    assert not host.job_stopped
    assert (host.done, host.failed) == ({stop, start}, frozenset())
    failed = StepFinished(host="gpu01", step="train", result="failed")
    assert fold(records((*cut, failed))).hosts["gpu01"].job_stopped
