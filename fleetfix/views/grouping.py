"""Fold what many hosts say alike: one line for `gpu[001-997]` instead of 997.

Texts are alike when they are equal but for what differs on every host anyway: process and job
numbers, addresses, ages, sizes, rates, the host's own name. Where these differ within a group the
line shows their range. Where there are too many texts all the same, counts within them (`7 of 20
packages`) are taken for alike too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fleetfix.hostset import HostSet, natural

_WHOLE = r"\d{1,3}(?:,\d{3})+|\d+"
_NUMBER = r"\d+(?:[.,]\d+)?"
_VOLATILE = re.compile(
    r"(?<![\w.])(?:"
    r"(?P<id>(?<=pid )\d+|(?<=job )\d+|(?<=process )\d+|(?<=pids )\d+(?:, \d+)*)"
    r"|(?P<address>\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?|port \d+)"
    rf"|(?P<size>{_NUMBER} ?(?:[KMGTP]i?B|bytes|B))"
    rf"|(?P<rate>{_NUMBER} ?[KM]?(?= tok/s))"
    rf"|(?P<time>{_NUMBER} ?(?:ms|s|min|h|d|seconds?|minutes?|hours?|days?)(?: \d+ ?(?:s|min|h))?)"
    r")(?![\w.])"
)
_COUNT = re.compile(
    rf"{_VOLATILE.pattern}|(?<![\w.,:/=+-])(?<!GPU )(?<!CUDA )(?<!exit )(?P<count>{_WHOLE})(?= [a-z])"
)
_SELF = "\0"
_SCALE = {
    "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15,
    "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Hosts that say alike, and what they say."""

    hosts: HostSet
    text: str


def group(said: Iterable[tuple[str, str]], *, most: int | None = None) -> list[Group]:
    """Fold (host, text) pairs; the largest group first, equal sizes by host.

    Where there would be more than `most` groups, texts that differ in counts alone are folded too.
    """
    pairs = list(said)
    groups = _fold_by(_VOLATILE, pairs)
    return groups if most is None or len(groups) <= most else _fold_by(_COUNT, pairs)


def _fold_by(volatile: re.Pattern[str], said: Iterable[tuple[str, str]]) -> list[Group]:
    alike: dict[tuple[str, ...], list[tuple[str, list[str]]]] = {}
    for host, text in said:
        literal, values = _cut(volatile, host, text)
        alike.setdefault(literal, []).append((host, values))
    groups = [_join(literal, members) for literal, members in alike.items()]
    return sorted(groups, key=lambda one: (-len(one.hosts), natural(next(iter(one.hosts)))))


def fold(hosts: Iterable[str], longest: int = 60) -> str:
    """Write hosts as a pattern; one that is too long is cut, and their number always said then."""
    names = hosts if isinstance(hosts, HostSet) else HostSet(hosts)
    text = str(names)
    if len(text) <= longest:
        return text
    cut = text.rfind(",", 0, longest - 12)
    # A cut inside brackets would name hosts that are not meant.
    while cut > 0 and text.count("[", 0, cut) != text.count("]", 0, cut):
        cut = text.rfind(",", 0, cut)
    first = text[:cut] if cut > 0 else str(next(iter(names)))
    return f"{first},… ({len(names)} hosts)"


def counted(hosts: HostSet, longest: int = 60) -> str:
    """A folded set, with the number of hosts where it is not plain to see."""
    text = fold(hosts, longest)
    return text if len(hosts) == 1 or text.endswith(" hosts)") else f"{text} ({len(hosts)})"


def _cut(volatile: re.Pattern[str], host: str, text: str) -> tuple[tuple[str, ...], list[str]]:
    # The line begins with its hosts: what begins with the host's name says it twice.
    own = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", _SELF, text.removeprefix(f"{host}: "))
    literal: list[str] = []
    values: list[str] = []
    end = 0
    for match in volatile.finditer(own):
        literal += [own[end : match.start()], str(match.lastgroup)]
        values.append(match[0])
        end = match.end()
    return (*literal, own[end:]), values


def _join(literal: tuple[str, ...], members: list[tuple[str, list[str]]]) -> Group:
    hosts = HostSet(host for host, _ in members)
    slots = [_merge(kind, [values[n] for _, values in members]) for n, kind in enumerate(literal[1::2])]
    text = literal[0] + "".join(slot + part for slot, part in zip(slots, literal[2::2], strict=True))
    return Group(hosts, text.replace(_SELF, members[0][0] if len(members) == 1 else "this host"))


def _merge(kind: str, values: list[str]) -> str:
    distinct = sorted(set(values), key=_whole if kind == "count" else _amount)
    if len(distinct) == 1:
        return distinct[0]
    several = kind == "id" and any("," in one for one in distinct)
    if several or kind == "address":
        return "…"
    return f"{distinct[0]}{'…' if kind == 'id' else ' to '}{distinct[-1]}"


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def _amount(text: str) -> tuple[float, str]:
    total = 0.0
    for number, word in re.findall(rf"({_NUMBER}) ?([A-Za-z]*)", text):
        scale = _SCALE.get(word) or _SCALE.get(word[:1].lower() if word != "min" else word) or 1.0
        total += float(number.replace(",", ".")) * scale
    return total, text
