"""Warm-up, noise and the verdict on a rate, as tables and laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.domain.throughput import (
    MOST_TOLERANCE,
    Point,
    Rate,
    after_warm_up,
    compare,
    points_of,
    steady_rate,
    tolerance,
)


def points(*rates: float, first: int = 1, every: int = 1) -> tuple[Point, ...]:
    return tuple(Point(step=first + n * every, rate=rate) for n, rate in enumerate(rates))


def rate(value: float, *, noise: float = 0.01, steps: int = 40, rising: bool = False) -> Rate:
    return Rate(rate=value, noise=noise, points=steps, rising=rising)


def test_eight_ranks_of_one_step_are_one_point() -> None:
    texts = [("4", "10,050"), ("4", "10,049"), ("4", "10,050"), ("5", "10,010"), ("4", "10,050")]
    assert [(point.step, point.rate) for point in points_of(texts)] == [(4, 10050), (5, 10010)]


def test_only_the_last_start_of_a_log_that_is_appended_to_counts() -> None:
    old = [(str(step), "12,800") for step in range(900, 951)]
    new = [(str(step), "20,000") for step in range(926, 960)]
    found = points_of(old + new)
    assert {point.rate for point in found} == {20000}
    assert found[0].step == 926


def test_ranks_that_print_out_of_order_are_no_restart() -> None:
    texts = [("10", "9"), ("11", "9"), ("10", "9"), ("12", "9"), ("11", "9")]
    assert [point.step for point in points_of(texts)] == [10, 11, 12]


def test_points_without_steps_all_count() -> None:
    assert len(points_of([(None, "5"), (None, "5"), (None, "nan")])) == 2


def test_the_first_steps_and_what_compiles_are_dropped() -> None:
    slow = points(10, 200, 4000, 4000, 4000, *[20000] * 30)
    steady = after_warm_up(slow, 10)
    assert steady[0].step == 11
    assert {point.rate for point in steady} == {20000}


def test_warm_up_counts_the_jobs_steps_and_not_its_lines() -> None:
    # A line every tenth step: ten steps are over with the second line.
    assert after_warm_up(points(*[20000] * 6, every=10), 10)[0].step == 11


def test_a_job_that_began_before_the_points_is_warm() -> None:
    assert len(after_warm_up(points(*[20000] * 6, first=5000), 10, from_start=False)) == 6


def test_no_steadiness_is_no_rate() -> None:
    jumps = points(*[100, 200, 400, 800] * 10)
    assert after_warm_up(jumps, 0) == ()
    assert steady_rate(()) is None


def test_an_evaluation_step_moves_no_median() -> None:
    found = steady_rate(points(*[20000] * 20, 300, *[20000] * 20))
    assert found
    assert found.rate == 20000
    assert found.noise == 0


@pytest.mark.parametrize(
    ("measured", "wanted", "outcome"),
    [
        (rate(20050), {"at_least": 19000}, "recovered"),
        (rate(18999), {"at_least": 19000}, "not recovered"),
        (rate(18999), {"at_least": 19000, "before": 12800}, "improved"),
        (rate(12900), {"at_least": 19000, "before": 12800}, "not recovered"),
        (rate(19450), {"baseline": 20000}, "recovered"),
        (rate(19350), {"baseline": 20000}, "not recovered"),
        (rate(16000), {"baseline": 20000, "before": 12800}, "improved"),
        (rate(20000, noise=0.11, steps=400), {"baseline": 20000}, "inconclusive"),
        (rate(20000, noise=0.07, steps=20), {"baseline": 20000}, "inconclusive"),
        (rate(19200, noise=0.07, steps=40), {"baseline": 20000}, "recovered"),
    ],
)
def test_verdicts(measured: Rate, wanted: dict[str, float], outcome: str) -> None:
    assert compare(measured, **wanted).outcome == outcome


@given(st.floats(0, 0.5), st.integers(1, 400))
def test_tolerance_is_never_less_than_three_percent_nor_judged_above_five(noise: float, steps: int) -> None:
    assert tolerance(noise, steps) >= 0.03
    assert compare(rate(1, noise=noise, steps=steps), baseline=1).tolerance <= MOST_TOLERANCE


@given(st.lists(st.floats(100, 1e6), min_size=1, max_size=300), st.floats(1, 1e6))
def test_a_faster_job_is_never_judged_worse(rates: list[float], baseline: float) -> None:
    order = {"inconclusive": 0, "not recovered": 0, "improved": 1, "recovered": 2}
    slow = steady_rate(points(*rates))
    fast = steady_rate(points(*[2 * each for each in rates]))
    assert slow
    assert fast
    assert slow.noise == pytest.approx(fast.noise)
    verdicts = [compare(each, baseline=baseline, before=baseline / 2).outcome for each in (slow, fast)]
    assert order[verdicts[0]] <= order[verdicts[1]]


@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.text(max_size=6)), st.one_of(st.none(), st.text(max_size=8)))
    )
)
def test_no_log_breaks_the_reader(texts: list[tuple[str | None, str | None]]) -> None:
    found = points_of(texts)
    steps = [point.step for point in found if point.step is not None]
    assert len(steps) == len(set(steps))
    after_warm_up(found, 10)
    steady_rate(found)
