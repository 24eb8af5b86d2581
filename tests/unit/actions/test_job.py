"""job: what was stopped runs again, once; no job is invented."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fleetfix.action import Plan
from fleetfix.actions.job import Job
from fleetfix.commands import Change, Completed

CAPTURED = {
    "argv": ["python", "train.py"],
    "user": "root",
    "alive": False,
    "unit": None,
    "steps_seen": 41200,
}
STARTED = {"pid": 5, "alive": True, "log": "/x", "first_step": None, "steps_seen": 41200}
ELSE = {"argv": ["/opt/venv/bin/torchrun", "train.py"], "cwd": "/opt/train"}


def state(**fields: Any) -> dict[str, Any]:
    return {"captured": [], "orphans": 0, "current": None, "started": [], "from_zero": None, **fields}


def plan(value: dict[str, Any], **parameters: Any) -> Plan:
    action = Job.model_validate({"from": "stop", **parameters})
    return action.plan(facts_of(action, value))


def facts_of(action: Job, value: dict[str, Any]) -> Any:
    asking = action.probe()
    (read,) = next(asking)
    assert (read.function, read.args) == ("jobs.state", {"step": "stop"})
    with pytest.raises(StopIteration) as end:
        asking.send((Completed(value=value),))
    return end.value.value


def stopping() -> Change:
    return Change(key="stop:python", summary="stop", do=(), risk="compensable", alters=("job",))


def test_a_stopped_job_is_started_by_one_change() -> None:
    (change,) = plan(state(captured=[CAPTURED])).changes
    assert (change.key, change.risk, change.alters) == ("start", "compensable", ("job",))
    assert [call.function for call in change.do] == ["relaunch.start", "relaunch.settle"]
    assert change.do[0].args == {"step": "stop", "described": None, "extra": [], "guard": True}
    assert change.do[1].args == {"seconds": 90.0, "guard": True}
    assert [call.function for call in change.undo] == ["relaunch.unstart"]
    assert {call.module for call in (*change.do, *change.undo)} <= set(Job.modules)


def test_a_job_that_runs_again_is_left_alone() -> None:
    planned = plan(state(captured=[{**CAPTURED, "alive": True}], current={"pid": 5, "argv": ["python"]}))
    assert planned.changes == ()


def test_one_of_two_that_does_not_run_is_started() -> None:
    assert len(plan(state(captured=[CAPTURED, {**CAPTURED, "alive": True}])).changes) == 1


def test_no_job_is_invented() -> None:
    planned = plan(state())
    assert planned.changes == ()
    assert planned.notes == ("no job ran here and none is described: none is started",)


def test_a_described_job_is_started_only_where_none_runs() -> None:
    (change,) = plan(state(), **{"else": ELSE}).changes
    assert change.do[0].args["described"]["argv"] == ["/opt/venv/bin/torchrun", "train.py"]
    assert plan(state(current={"pid": 5, "argv": ["python"]}), **{"else": ELSE}).changes == ()


def test_the_captured_job_goes_before_the_described_one() -> None:
    (change,) = plan(state(captured=[CAPTURED]), **{"else": ELSE}).changes
    assert "as it ran" in change.summary


def test_while_the_job_still_runs_its_start_is_announced_where_it_will_be_stopped() -> None:
    action = Job.model_validate({"from": "stop"})
    running = facts_of(action, state(current={"pid": 5, "argv": ["python"]}))
    assert action.foresee(running, {}).changes == ()
    assert action.foresee(running, {"stop": ()}).changes == ()
    (foreseen,) = action.foresee(running, {"stop": (stopping(),)}).changes
    (planned,) = plan(state(captured=[CAPTURED])).changes
    assert planned.announces() <= foreseen.announces()
    assert planned.risk == foreseen.risk


def test_a_job_that_was_stopped_for_beginning_from_zero_is_not_started_again() -> None:
    planned = plan(state(captured=[CAPTURED], from_zero={"first": 1, "seen": 41200}))
    assert planned.changes == ()
    assert planned.blocked == "restarted from zero: stopped at step 1 (it had reached 41200)"


def test_a_low_step_seen_later_is_noted() -> None:
    alive = state(captured=[{**CAPTURED, "alive": True}], started=[{**STARTED, "first_step": 2}])
    assert plan(alive).notes == ("job 5 began at step 2, after 41200",)
    assert plan(alive, resume="none").notes == ()


@pytest.mark.parametrize(
    ("resume", "args", "guard"),
    [("same", (), True), ("append", ("--resume", "latest"), True), ("none", (), False)],
)
def test_how_it_resumes_decides_command_and_guard(resume: str, args: tuple[str, ...], guard: bool) -> None:
    parameters = {"resume": resume, **({"resume_args": list(args)} if args else {})}
    (change,) = plan(state(captured=[CAPTURED]), **parameters).changes
    assert change.do[0].args["extra"] == list(args)
    assert [call.args["guard"] for call in change.do] == [guard, guard]


@pytest.mark.parametrize(
    "parameters",
    [
        {"resume": "append"},
        {"resume_args": ["--resume"]},
        {"else": {}},
        {"else": {"argv": [], "cwd": "/"}},
        {"else": {"argv": ["x"], "command": "y"}},
        {"resume": "maybe"},
    ],
)
def test_what_makes_no_sense_does_not_load(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Job.model_validate({"from": "stop", **parameters})


@pytest.mark.parametrize(
    ("given", "argv", "command"),
    [
        ("torchrun train.py", None, "torchrun train.py"),
        (["torchrun", "train.py"], ("torchrun", "train.py"), None),
        ({"command": "x", "cwd": "/opt"}, None, "x"),
    ],
)
def test_a_job_is_described_by_a_list_a_line_or_a_mapping(
    given: Any, argv: Any, command: str | None
) -> None:
    described = Job.model_validate({"from": "stop", "else": given}).described
    assert described is not None
    assert (described.argv, described.command) == (argv, command)


def test_null_describes_nothing() -> None:
    assert Job.model_validate({"from": "stop", "else": None}).described is None


# -- what another run left stopped ----------------------------------------------------------------

LEFT = {"run": "20260101-000000-stop-gpu-jobs-aaaa", "step": "stop"}


def plan_left(value: dict[str, Any], **parameters: Any) -> Plan:
    action = Job.model_validate({"of_run": "last", **parameters})
    asking = action.probe()
    (read,) = next(asking)
    assert read.args == {"step": "adopted", "run": parameters.get("of_run", "last")}
    with pytest.raises(StopIteration) as end:
        asking.send((Completed(value=value),))
    return action.plan(end.value.value)


def test_what_another_run_stopped_is_adopted_started_and_dropped_at_the_good_end() -> None:
    (change,) = plan_left(state(captured=[CAPTURED], left=LEFT)).changes
    assert [call.function for call in change.do] == ["relaunch.adopt", "relaunch.start", "relaunch.settle"]
    assert change.do[0].args == {**LEFT, "name": "adopted"}
    assert change.do[1].args["step"] == "adopted"
    assert [(call.function, call.args) for call in change.commit] == [
        ("relaunch.forget_adopted", {**LEFT, "name": "adopted"})
    ]
    assert f"run {LEFT['run']} stopped it" in change.summary


def test_nothing_is_started_beside_a_job_that_runs() -> None:
    planned = plan_left(state(captured=[CAPTURED], left=LEFT, current={"pid": 9, "argv": ["python"]}))
    assert planned.changes == ()
    assert planned.notes == (f"job 9 runs here: what run {LEFT['run']} stopped stays stopped",)


def test_a_host_without_any_job_is_blocked_where_one_must_run() -> None:
    assert "no run left one stopped" in plan_left(state(), must_run=True).blocked
    assert "run run-7 left none stopped here" in plan_left(state(), of_run="run-7", must_run=True).blocked
    assert plan_left(state(current={"pid": 9, "argv": ["python"]}), must_run=True) == Plan()
    assert plan_left(state(), must_run=True, **{"else": ELSE}).changes


@pytest.mark.parametrize("given", [{}, {"from": "stop", "of_run": "last"}])
def test_a_job_is_of_a_step_or_of_a_run(given: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="give `from`"):
        Job.model_validate(given)


def test_what_spans_hosts_is_started_with_the_others_also_where_it_runs_already() -> None:
    span = {"id": "llama3", "at": "gpu01:29500", "nodes": 2, "node": 1, "by": "torchrun"}
    for alive in (False, True):
        planned = plan_left(state(captured=[{**CAPTURED, "alive": alive, "span": span}], left=LEFT))
        assert [one.name for one in planned.spans] == ["llama3 (gpu01:29500)"]
        assert bool(planned.changes) is not alive
    own = plan(state(captured=[{**CAPTURED, "alive": True, "span": span}]))
    assert own.spans == (), "the step that stopped it has said so"
