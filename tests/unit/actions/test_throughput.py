"""The throughput check: what it asks, and every verdict it can give."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fleetfix.action import Measurement, Verdict
from fleetfix.actions.throughput import SpeedFacts, Throughput
from fleetfix.commands import Completed, Read
from fleetfix.domain.throughput import Point
from fleetfix.errors import Failure, HostError


def steady(rate: float, steps: int = 40, first: int = 1) -> tuple[Point, ...]:
    return tuple(Point(step=first + n, rate=rate + (n % 3 - 1) * rate / 200) for n in range(steps))


def facts(points: tuple[Point, ...] = (), **fields: Any) -> SpeedFacts:
    known: dict[str, Any] = {"job": "key", "format": "torchtitan" if points else None, "points": points}
    known["scope"] = "per_gpu"
    return SpeedFacts.model_validate({**known, **fields})


def measured(rate: float, **fields: Any) -> Measurement:
    known: dict[str, Any] = {"job": "key", "rate": rate, "scope": "per_gpu", "noise": 0.01, "steps": 40}
    return Measurement.model_validate({**known, **fields})


def judge(given_facts: SpeedFacts, **params: Any) -> Verdict:
    return Throughput.model_validate(params).judge(given_facts)


def test_back_to_speed_is_proven_with_numbers_that_people_read() -> None:
    verdict = judge(facts(steady(20050, 50)), at_least=19000)
    assert (verdict.result, verdict.final) == ("pass", True)
    assert verdict.reason == (
        "20,050 tok/s per GPU (median of 40 steps, ±0.7%), at least 19,000 wanted: recovered"
    )
    assert verdict.measured == Measurement(
        job="key", rate=20050, scope="per_gpu", noise=verdict.measured.noise, steps=40
    )


@pytest.mark.parametrize(
    ("given_facts", "params", "result", "says"),
    [
        (facts(steady(12800, 60)), {"at_least": 19000}, "fail", "not recovered"),
        (
            facts(steady(16000, 60), before=measured(12800)),
            {"at_least": 19000},
            "fail",
            "improved from 12,800, not recovered",
        ),
        (
            facts(steady(19600, 60), baseline=measured(20000)),
            {},
            "pass",
            "baseline 20,000 less 3.0% wanted",
        ),
        (facts(steady(19000, 60), baseline=measured(20000)), {}, "fail", "not recovered"),
        (facts(steady(20000, 60)), {}, "unknown", "no baseline for this job, give min_tok_s"),
        (facts(steady(20000, 60), baseline=measured(20000, job="other")), {}, "unknown", "no baseline"),
        (facts(steady(20000, 60), baseline=measured(20000, scope="global")), {}, "unknown", "no baseline"),
        (facts(steady(20000, 60)), {"at_least": 1, "scope": "global"}, "unknown", "per GPU, and tok/s is"),
        (facts(steady(20000, 25)), {"at_least": 19000}, "unknown", "15 of 20 steady steps so far"),
        (
            facts(steady(20000, 6)),
            {"at_least": 19000},
            "unknown",
            "0 of 20 steady steps so far, still",
        ),
        (facts(), {"at_least": 19000}, "unknown", "no rate of tokens"),
        (facts(nothing="the log /x cannot be read"), {"at_least": 1}, "unknown", "cannot be read"),
        (SpeedFacts(nothing="no job runs here"), {"at_least": 19000}, "skipped", "no job runs here"),
    ],
)
def test_verdicts(given_facts: SpeedFacts, params: dict[str, Any], result: str, says: str) -> None:
    verdict = judge(given_facts, **params)
    assert verdict.result == result
    assert says in verdict.reason


def test_noise_is_inconclusive_and_may_still_settle() -> None:
    noisy = tuple(Point(step=n, rate=20000 + (n * 7919 % 13 - 6) * 1000 * (n > 20)) for n in range(60))
    verdict = judge(facts(noisy), at_least=19000)
    assert (verdict.result, verdict.final) == ("unknown", False)
    assert "too noisy to tell" in verdict.reason


def test_waiting_helps_while_there_are_too_few_steps() -> None:
    assert not judge(facts(steady(12800, 20)), at_least=19000).final
    assert not judge(facts(), at_least=19000).final


def test_slow_after_enough_steps_is_final_unless_it_still_rises() -> None:
    assert judge(facts(steady(12800, 60)), at_least=19000).final
    rising = steady(12800, 60) + steady(14000, 60, first=61)
    verdict = judge(facts(rising), at_least=19000)
    assert (verdict.result, verdict.final) == ("fail", False)


def test_only_recording_never_fails() -> None:
    recorded = judge(facts(steady(12800, 60)), record_only=True)
    assert recorded.result == "pass"
    assert recorded.measured
    assert recorded.measured.rate == 12800
    for nothing in (facts(), facts(steady(1, 4)), SpeedFacts(nothing="no job runs here")):
        verdict = judge(nothing, record_only=True)
        assert (verdict.result, verdict.final) == ("skipped", True)


def test_what_is_only_recorded_is_no_baseline() -> None:
    assert Throughput(at_least=1).makes_baseline
    assert not Throughput(record_only=True).makes_baseline


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 99)), st.floats(1e-3, 1e9)), max_size=80),
    st.booleans(),
    st.one_of(st.none(), st.floats(1, 1e6)),
)
def test_judging_is_total(
    points: list[tuple[int | None, float]], whole: bool, at_least: float | None
) -> None:
    each = tuple(Point(step=step, rate=rate) for step, rate in points)
    verdict = judge(facts(each, whole=whole), at_least=at_least)
    assert verdict.reason
    assert verdict.result != "pass" or verdict.measured


# -- parameters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_rate", "rate"), [(19000, 19000), ("19000", 19000), ("20K", 20000), (None, None)]
)
def test_a_minimum_is_read_as_people_write_it(given_rate: object, rate: float | None) -> None:
    assert Throughput.model_validate({"at_least": given_rate}).at_least == rate


@pytest.mark.parametrize(
    "params",
    [
        {"at_least": "fast"},
        {"at_least": 0},
        {"at_least": True},
        {"format": "torchtitam"},
        {"pattern": "tok/s"},
        {"pattern": "(?P<rate>"},
        {"pattern": "(?P<rate>x)", "format": "jsonl"},
        {"log": "train.log"},
        {"min_steps": 1},
        {"of": "stop"},
    ],
)
def test_parameters_that_make_no_sense_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Throughput.model_validate(params)


def test_a_misspelt_format_is_answered_with_the_near_one() -> None:
    with pytest.raises(ValidationError, match="did you mean torchtitan"):
        Throughput(format="torchtitam")


# -- the probe ------------------------------------------------------------------------------------------


def answer(**fields: Any) -> Completed:
    points = {"torchtitan": [], "jsonl": [], "jsonl-per-gpu": []}
    job = {"pid": 7, "key": "key", "seconds": 60.0}
    value = {"job": job, "points": points, "whole": dict.fromkeys(points, True), "log": "/x", **fields}
    return Completed(value=value)


def ask(check: Throughput, *replies: tuple[Completed, ...]) -> tuple[SpeedFacts, list[Read]]:
    probe, asked = check.probe(), []
    reads = next(probe)
    for reply in replies:
        asked += reads
        try:
            reads = probe.send(reply)
        except StopIteration as done:
            assert reply is replies[-1]
            return done.value, asked
    raise AssertionError("it asks for more")


def test_the_format_with_most_points_is_the_logs() -> None:
    points = {"torchtitan": [["1", "20,000"]], "jsonl": [["1", "5"], ["2", "5"]], "jsonl-per-gpu": []}
    found, asked = ask(
        Throughput(at_least=1),
        (answer(points=points),),
        (Completed(value=measured(20000).model_dump()), Completed(value=None)),
    )
    assert (found.format, len(found.points)) == ("jsonl", 2)
    assert found.baseline == measured(20000)
    assert [read.function for read in asked] == ["logs.find_rates", "journal.baseline", "journal.before"]
    assert asked[1].args == {"job": "key"}


def test_of_two_rates_the_one_of_the_wanted_scope_is_taken() -> None:
    points = {"torchtitan": [], "jsonl": [["1", "160000"]] * 3, "jsonl-per-gpu": [["1", "20000"]]}
    nothing = (Completed(), Completed())
    found, _ = ask(Throughput(scope="per_gpu"), (answer(points=points),), nothing)
    assert (found.format, found.scope) == ("jsonl-per-gpu", "per_gpu")


def test_a_rate_of_another_scope_is_never_compared() -> None:
    points = {"torchtitan": [[str(n), "20,000"] for n in range(60)], "jsonl": [], "jsonl-per-gpu": []}
    check = Throughput(scope="global", at_least=100)
    found, _ = ask(check, (answer(points=points),), (Completed(), Completed()))
    assert check.judge(found).result == "unknown"


def test_a_pattern_is_asked_alone_and_counts_globally_unless_said() -> None:
    check = Throughput(pattern=r"(?P<rate>\S+) tok/s", at_least=1)
    found, asked = ask(
        check,
        (
            Completed(
                value={
                    "job": {"key": "key"},
                    "points": {"pattern": [["3", "20K"]] * 9},
                    "whole": {"pattern": True},
                }
            ),
        ),
        (Completed(), Completed()),
    )
    assert len(asked[0].args["formats"]) == 1
    assert found.points == (Point(step=3, rate=20000),)
    assert found.scope == "global"


def test_recording_asks_the_journal_nothing() -> None:
    _, asked = ask(Throughput(record_only=True), (answer(),))
    assert [read.function for read in asked] == ["logs.find_rates"]


def test_no_job_ends_the_questions() -> None:
    found, _ = ask(Throughput(at_least=1), (Completed(value={"none": "no job runs here", "job": None}),))
    assert found == SpeedFacts(nothing="no job runs here")


def test_a_refusal_of_the_host_is_the_hosts_error() -> None:
    refused = Completed(exit=None, failure=Failure(kind="blocked", message="this needs alice"))
    with pytest.raises(HostError, match="needs alice"):
        ask(Throughput(at_least=1), (refused,))


@pytest.mark.parametrize("points", [(), steady(20000, 60)])
def test_a_job_that_began_from_zero_fails_at_any_speed(points: tuple[Point, ...]) -> None:
    verdict = judge(facts(points, first_step=1, steps_seen=41200), at_least=100)
    assert (verdict.result, verdict.final, verdict.unsound) == ("fail", True, True)
    assert verdict.reason.startswith("restarted from zero: began at step 1 (it had reached 41200)")
    measuring = judge(facts(points, first_step=1, steps_seen=41200), record_only=True)
    assert measuring.result != "fail"


@pytest.mark.parametrize(("first", "seen"), [(41180, 41200), (None, 41200), (1, None), (1, 60)])
def test_a_job_that_resumed_is_judged_by_its_speed(first: int | None, seen: int | None) -> None:
    verdict = judge(facts(steady(20000, 60), first_step=first, steps_seen=seen), at_least=100)
    assert (verdict.result, verdict.unsound) == ("pass", False)


def test_where_the_job_began_comes_from_the_host() -> None:
    action = Throughput(at_least=100)
    job = {"pid": 5, "key": "key", "seconds": 9.0, "first_step": 1, "steps_seen": 41200}
    asking = action.probe()
    next(asking)
    asking.send((Completed(value={"none": "the log cannot be read", "job": job}),))
    with pytest.raises(StopIteration) as end:
        asking.send((Completed(value=None), Completed(value=None)))
    assert (end.value.value.first_step, end.value.value.steps_seen) == (1, 41200)
