"""What the hosts of a fleet have in common, which of them differ, and which stand out.

A fact that is a word has a mode, the value of most hosts: who has another has drifted. A fact that is a
number has a median: who is far from it, by the spread of the others, is an outlier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

FEWEST = 3
"""Hosts below which nobody stands out."""

FAR = 3.5
"""Robust standard deviations (1.4826 x MAD) from the median, beyond which a number is far from it."""

LEAST = 0.05
"""A number within this share of the median is near it, however little the others differ."""


@dataclass(frozen=True)
class Mode:
    """A fact of a fleet: the value of most hosts, and each other value with its hosts, most first."""

    value: str
    hosts: tuple[str, ...]
    others: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Spread:
    """A number of a fleet: its median, its ends, and the hosts that are far from the median."""

    median: float
    least: float
    most: float
    hosts: int
    outliers: tuple[tuple[str, float], ...]


def mode_of(values: Mapping[str, str]) -> Mode | None:
    """The mode of a fact by host; of values that are equally frequent the first in order."""
    if not values:
        return None
    counts = Counter(values.values())
    ranked = sorted(counts, key=lambda value: (-counts[value], value))
    hosts = {value: tuple(host for host, one in values.items() if one == value) for value in ranked}
    return Mode(ranked[0], hosts[ranked[0]], tuple((value, hosts[value]) for value in ranked[1:]))


def spread_of(values: Mapping[str, float]) -> Spread | None:
    """The spread of a number by host, and who stands out; the worst first."""
    if not values:
        return None
    middle = median(values.values())
    deviation = 1.4826 * median(abs(value - middle) for value in values.values())
    far = [
        (host, value)
        for host, value in values.items()
        if len(values) >= FEWEST and abs(value - middle) > max(FAR * deviation, LEAST * abs(middle))
    ]
    far.sort(key=lambda one: -abs(one[1] - middle))
    return Spread(middle, min(values.values()), max(values.values()), len(values), tuple(far))
