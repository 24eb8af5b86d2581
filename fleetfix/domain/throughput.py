"""From points of a training log to a rate, its noise, and whether a job is back to speed.

Cold compile steps come first and are 360 times slower (karpathy/nanoGPT#392): they are dropped. What
is left is judged by its median, for a step that evaluates or saves is an outlier and no fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import Literal

from fleetfix.commands import Value
from fleetfix.domain.log_formats import Scope, number, whole

STEADY = 3
"""So many points in a row, all near their median, end the warm-up …"""
NEAR = 0.10
"""… near being within this share of it."""
RESTART = 5
"""A step counter that falls back by this many is a new start; ranks that print out of order are not."""
WINDOW = 200
"""Only the last so many points are judged."""

LEAST_TOLERANCE = 0.03
MOST_TOLERANCE = 0.05
MOST_NOISE = 0.10

Outcome = Literal["recovered", "improved", "not recovered", "inconclusive"]


class Point(Value):
    """One measurement of the log: tokens per second, at a step where the log says which."""

    step: int | None
    rate: float


class Rate(Value):
    """A steady rate: the median of `points` measurements, and their noise as a share of it."""

    rate: float
    noise: float
    points: int
    rising: bool
    """Whether its second half is clearly faster than its first."""


class Judgement(Value):
    """How a rate compares with what is wanted."""

    outcome: Outcome
    tolerance: float
    """The share below what is wanted that still counts as reached."""


def points_of(texts: Sequence[Sequence[str | None]]) -> tuple[Point, ...]:
    """The points of a job's last start, each step once, from (step, rate) as texts."""
    points: list[Point] = []
    for step_text, rate_text in texts:
        rate = number(rate_text or "")
        if rate is not None:
            points.append(Point(step=whole(step_text), rate=rate))
    return _each_step_once(_since_last_start(points))


def _since_last_start(points: Sequence[Point]) -> list[Point]:
    begin, highest = 0, None
    for place, point in enumerate(points):
        if point.step is None:
            continue
        if highest is not None and point.step <= highest - RESTART:
            begin, highest = place, point.step
        highest = point.step if highest is None else max(highest, point.step)
    return list(points[begin:])


def _each_step_once(points: Sequence[Point]) -> tuple[Point, ...]:
    """Eight ranks that print one step are one point, its median: not eight, and not their sum."""
    rates: dict[int, list[float]] = {}
    for point in points:
        if point.step is not None:
            rates.setdefault(point.step, []).append(point.rate)
    if not rates:
        return tuple(points)
    return tuple(Point(step=step, rate=median(found)) for step, found in rates.items())


def after_warm_up(points: Sequence[Point], least: int, *, from_start: bool = True) -> tuple[Point, ...]:
    """The points after the warm-up: `least` steps, and until three in a row are near their median.

    `least` counts in the job's own steps where the log says them. It does not apply where the points
    do not begin with the job (`from_start` false).
    """
    begin = _first_after(points, least) if from_start else 0
    for place in range(begin, len(points) - STEADY + 1):
        rates = [point.rate for point in points[place : place + STEADY]]
        middle = median(rates)
        if all(abs(rate - middle) <= NEAR * middle for rate in rates):
            return tuple(points[place:])
    return ()


def _first_after(points: Sequence[Point], least: int) -> int:
    first = points[0].step if points else None
    if first is None:
        return least
    late = (
        place for place, each in enumerate(points) if each.step is not None and each.step - first >= least
    )
    return next(late, len(points))


def steady_rate(points: Sequence[Point]) -> Rate | None:
    """The rate of the last points; None where there are none."""
    rates = [point.rate for point in points[-WINDOW:]]
    if not rates:
        return None
    middle = median(rates)
    spread = median(abs(rate - middle) for rate in rates)
    return Rate(rate=middle, noise=1.4826 * spread / middle, points=len(rates), rising=_rising(rates))


def _rising(rates: Sequence[float]) -> bool:
    half = len(rates) // 2
    return half >= STEADY and median(rates[half:]) > median(rates[:half]) * (1 + LEAST_TOLERANCE)


def tolerance(noise: float, points: int) -> float:
    """The share below a baseline that chance explains: three standard errors of a median, at least 3 %.

    The standard error of a median is 1.25 sigma / sqrt(n), hence 3.75.
    """
    return max(LEAST_TOLERANCE, 3.75 * noise / sqrt(points))


def compare(
    rate: Rate, *, at_least: float | None = None, baseline: float | None = None, before: float | None = None
) -> Judgement:
    """Judge a rate against a minimum taken at its word, else against a baseline less the tolerance.

    Noise above 10 %, or a tolerance that would be above 5 %, is inconclusive: more steps may help.
    """
    allowed = tolerance(rate.noise, rate.points)
    noisy = rate.noise > MOST_NOISE or allowed > MOST_TOLERANCE
    allowed = min(allowed, MOST_TOLERANCE)
    if noisy:
        return Judgement(outcome="inconclusive", tolerance=allowed)
    wanted = at_least if at_least is not None else (baseline or 0.0) * (1 - allowed)
    if rate.rate >= wanted:
        return Judgement(outcome="recovered", tolerance=0.0 if at_least is not None else allowed)
    better = before is not None and rate.rate > before * (1 + allowed)
    return Judgement(outcome="improved" if better else "not recovered", tolerance=allowed)


def from_zero(first: int | None, seen: int | None) -> bool:
    """Whether a job that logs `first` as its first step, after a start, has resumed nothing.

    `seen` is the last step before it was stopped. A checkpoint lies some way back; a tenth of the way,
    with 100 steps lost, is no checkpoint.
    """
    return first is not None and seen is not None and first * 10 <= seen and seen - first >= 100


def unit(scope: Scope) -> str:
    """What a rate of this scope counts."""
    return "tok/s per GPU" if scope == "per_gpu" else "tok/s"
