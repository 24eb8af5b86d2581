"""HostSet: a set of host names, read from a pattern and written as one.

    gpu[01-16]        a range; padding is kept; `gpu[01:16]` and steps `gpu[0-30/2]` are read too
    @train            a group            gpu*    a glob over the known hosts
    a,b  a!b  a&b  a^b  union, difference, intersection, exclusive or; from left to right

`HostSet.parse(str(s)) == s` for every set. Only this module knows ClusterShell, and of it only the
folding of numbers: NodeSet itself reads /etc/clustershell when it is imported, and what stands there
must not change what a pattern means here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NoReturn

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from fleetfix.errors import PatternError
from fleetfix.spelling import hint_for

MOST_HOSTS = 200_000
"""A pattern that names more is a slip of the hand, not a fleet."""

_OPERATORS: dict[str, Callable[[frozenset[str], frozenset[str]], frozenset[str]]] = {
    ",": frozenset.union,
    " ": frozenset.union,
    "!": frozenset.difference,
    "&": frozenset.intersection,
    "^": frozenset.symmetric_difference,
}
_OPERATOR = re.compile(r"\s*([,!&^])\s*|\s+")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%~-]*")
_RANGE = re.compile(r"([0-9]+)(?:[-:]([0-9]+)(?:[/:]([0-9]+))?)?")
_DIGITS = re.compile(r"([0-9]+)")


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that counts: gpu2 before gpu10; of equal numbers the shorter first."""
    return tuple(
        (0, int(part), f"{len(part):04d}") if part[0] in "0123456789" else (1, 0, part)
        for part in _DIGITS.split(name)
        if part
    )


def is_name(text: str) -> bool:
    """Whether a pattern can say this name, of a host or of a group."""
    return bool(_NAME.fullmatch(text)) and (not text.endswith(":") or text.endswith("::"))


class HostSet:
    """An immutable set of host names. `|`, `&`, `-` and `^` are those of sets."""

    __slots__ = ("_ordered", "names")

    names: frozenset[str]

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = frozenset(names)
        self._ordered: tuple[str, ...] | None = None

    @classmethod
    def parse(
        cls,
        pattern: str,
        *,
        known: HostSet | None = None,
        groups: Mapping[str, HostSet] | None = None,
    ) -> HostSet:
        """Read a pattern; PatternError says what is wrong and where.

        With `known`, every name must be one of these and globs choose among them. `groups` gives
        `@name` its meaning. The empty pattern is the empty set.
        """
        return cls(_Reader(pattern, known, groups).read())

    def __iter__(self) -> Iterator[str]:
        """The names in natural order."""
        if self._ordered is None:
            self._ordered = tuple(sorted(self.names, key=natural))
        return iter(self._ordered)

    def __str__(self) -> str:
        return _fold(self.names)

    def __repr__(self) -> str:
        return f"HostSet({str(self)!r})"

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostSet) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)

    def __or__(self, other: HostSet) -> HostSet:
        return HostSet(self.names | other.names)

    def __and__(self, other: HostSet) -> HostSet:
        return HostSet(self.names & other.names)

    def __sub__(self, other: HostSet) -> HostSet:
        return HostSet(self.names - other.names)

    def __xor__(self, other: HostSet) -> HostSet:
        return HostSet(self.names ^ other.names)

    def __le__(self, other: HostSet) -> bool:
        return self.names <= other.names

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _validated, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string"}


def _validated(value: object) -> HostSet:
    if isinstance(value, HostSet):
        return value
    if not isinstance(value, str):
        raise ValueError("a host pattern such as gpu[01-16]")
    try:
        return HostSet.parse(value)
    except PatternError as error:
        raise ValueError(error.message) from error


# -- reading --------------------------------------------------------------------------------------


class _Reader:
    """Reads one pattern from left to right."""

    def __init__(self, pattern: str, known: HostSet | None, groups: Mapping[str, HostSet] | None) -> None:
        self.pattern = pattern
        self.known = known
        self.groups = groups
        self.unknown: dict[str, int] = {}

    def read(self) -> frozenset[str]:
        names: frozenset[str] = frozenset()
        operator, place = ",", len(self.pattern) - len(self.pattern.lstrip())
        end = len(self.pattern.rstrip())
        while place < end:
            stop = self._end_of_term(place, end)
            names = _OPERATORS[operator](names, self._term(place, stop))
            found = _OPERATOR.match(self.pattern, stop, end)
            if found is None:
                break
            operator, place = found[1] or " ", found.end()
            if place >= end:
                self._fail(f"a name is missing after {operator!r}", found.start(1))
        self._refuse_unknown()
        return names

    def _fail(self, message: str, column: int, hint: str = "") -> NoReturn:
        raise PatternError(message, pattern=self.pattern, column=column, hint=hint)

    def _end_of_term(self, start: int, end: int) -> int:
        opened: int | None = None
        for place in range(start, end):
            character = self.pattern[place]
            if character == "[":
                if opened is not None:
                    self._fail("a bracket inside brackets", place)
                opened = place
            elif character == "]":
                if opened is None:
                    self._fail("this bracket was never opened", place)
                opened = None
            elif opened is None and (character in ",!&^" or character.isspace()):
                return self._not_empty(start, place)
        if opened is not None:
            self._fail("this bracket is never closed", opened, "as in gpu[01-16]")
        return end

    def _not_empty(self, start: int, stop: int) -> int:
        if start == stop:
            self._fail(f"a name is missing before {self.pattern[stop]!r}", stop)
        return stop

    def _term(self, start: int, stop: int) -> frozenset[str]:
        text = self.pattern[start:stop]
        if literal := _address_in_brackets(text):
            if text[-1] != "]":
                self._fail(
                    "a port does not belong in a pattern", start, "give the host a port: in the inventory"
                )
            return self._checked((literal,), start)
        if text[0] == "@":
            return self._group(start + 1, stop)
        names = self._expand(start, stop)
        if "*" in text or "?" in text:
            return self._glob(text, names, start)
        return self._checked(names, start)

    def _group(self, start: int, stop: int) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for name in self._expand(start, stop) if start < stop else ("",):
            if self.groups is None or name not in self.groups:
                known = [f"@{group}" for group in self.groups or ()]
                there = f"groups: {', '.join(known)}" if known else "there are no groups"
                self._fail(f"unknown group @{name}", start - 1, hint_for(f"@{name}", known) or there)
            found |= self.groups[name].names
        return found

    def _glob(self, text: str, globs: Iterable[str], column: int) -> frozenset[str]:
        if self.known is None:
            self._fail("a glob needs known hosts to choose from", column)
        matchers = [re.compile(_glob_expression(glob)) for glob in globs]
        found = frozenset(name for name in self.known.names if any(m.fullmatch(name) for m in matchers))
        if not found:
            self._fail(f"no host matches {text}", column)
        return found

    def _checked(self, names: Iterable[str], column: int) -> frozenset[str]:
        found = frozenset(names)
        if self.known is not None:
            for name in found - self.known.names:
                self.unknown[name] = column
        return found

    def _refuse_unknown(self) -> None:
        if not self.unknown:
            return
        assert self.known is not None
        missing = HostSet(self.unknown)
        first = min(self.unknown, key=lambda name: (self.unknown[name], natural(name)))
        hint = "* is every host" if first == "all" else _meant(first, self.known.names)
        if any(part in self.known for part in first.split(":")):
            hint = "write a comma between names"
        words = "unknown host" if len(missing) == 1 else "unknown hosts"
        self._fail(f"{words} {missing}", self.unknown[first], hint)

    # -- names and ranges ---------------------------------------------------------------------

    def _expand(self, start: int, stop: int) -> tuple[str, ...]:
        """Every name that a term stands for."""
        pieces: list[tuple[str, ...]] = []
        place = start
        while place < stop:
            opening = self.pattern.find("[", place, stop)
            opening = stop if opening < 0 else opening
            pieces.append((self.pattern[place:opening],))
            place = opening
            if opening < stop:
                closing = self.pattern.index("]", opening)
                pieces.append(self._numbers(opening + 1, closing))
                place = closing + 1
        if prod(len(piece) for piece in pieces) > MOST_HOSTS:
            self._fail(f"more than {MOST_HOSTS} names", start)
        self._check_letters(start, stop, "".join(piece[0] for piece in pieces))
        return tuple("".join(parts) for parts in product(*pieces))

    def _check_letters(self, start: int, stop: int, sample: str) -> None:
        plain = sample.replace("*", "x").replace("?", "x")
        if plain.endswith(":") and not plain.endswith("::"):
            self._fail(
                "':' does not join patterns", stop - 1, "write a comma; !x takes x away, &x keeps only x"
            )
        if not _NAME.fullmatch(plain):
            self._fail(f"{self.pattern[start:stop]!r} is not a host name", start)

    def _numbers(self, start: int, stop: int) -> tuple[str, ...]:
        """The numbers of one bracket, as written: `01-03,7`."""
        found: list[str] = []
        place = start
        for part in self.pattern[start:stop].split(","):
            found += self._range(part, place)
            place += len(part) + 1
        return tuple(dict.fromkeys(found))

    def _range(self, text: str, column: int) -> list[str]:
        if not text:
            self._fail("a number is missing", column)
        match = _RANGE.fullmatch(text)
        if match is None:
            self._fail(f"{text!r} is not a range", column, "ranges count digits, such as 01-16 or 0-30/2")
        low, high, step = match[1], match[2] or match[1], int(match[3] or 1)
        if int(high) < int(low):
            self._fail(f"the range {text} runs backwards", column)
        if len(high) < len(low) or (high[0] == "0" and len(high) > len(low)):
            self._fail(f"the ends of {text} are padded differently", column)
        if step < 1:
            self._fail(f"a step of {step} leads nowhere", column, "0-30/2 takes every second")
        if (int(high) - int(low)) // step >= MOST_HOSTS:
            self._fail(f"{text} names more than {MOST_HOSTS} hosts", column)
        return [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1, step)]


def _meant(name: str, known: Iterable[str]) -> str:
    """A hint where a known name is near: another number is another host, not a slip of the hand."""
    digits = [int(number) for number in _DIGITS.findall(name)]
    alike = [one for one in known if [int(number) for number in _DIGITS.findall(one)] == digits]
    return hint_for(name, alike)


def _address_in_brackets(text: str) -> str | None:
    """The IPv6 address in `[2001:db8::1]` or `[2001:db8::1]:22`."""
    match = re.fullmatch(r"\[([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\](:[0-9]+)?", text)
    if match is None or ("::" not in match[1] and match[1].count(":") != 7):
        return None
    return match[1]


def _glob_expression(glob: str) -> str:
    return re.escape(glob).replace(r"\*", ".*").replace(r"\?", ".")


# -- writing --------------------------------------------------------------------------------------

_FOLD_ALL_AXES = 1000  # names; folding over several numbers at once costs the square of them


@lru_cache(maxsize=256)
def _fold(names: frozenset[str]) -> str:
    """A short pattern of these names, its terms in natural order."""
    shapes: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name in names:
        parts = _DIGITS.split(name)
        shapes.setdefault(tuple(parts[::2]), []).append(tuple(parts[1::2]))
    terms = [term for shape, numbers in shapes.items() for term in _fold_shape(shape, numbers)]
    return ",".join(sorted(terms, key=lambda term: natural(term.replace("[", ""))))


def _fold_shape(shape: tuple[str, ...], numbers: list[tuple[str, ...]]) -> Iterator[str]:
    """The terms of names that differ only in their numbers; `shape` holds the text around these."""
    varying = [axis for axis in range(len(shape) - 1) if len({row[axis] for row in numbers}) > 1]
    if len(numbers) == 1:
        yield _join(shape, numbers[0])
    elif len(varying) > 1 and len(numbers) <= _FOLD_ALL_AXES:
        yield from _fold_axes(shape, numbers)
    else:
        yield from _fold_axis(shape, numbers, varying[-1])


def _fold_axis(shape: tuple[str, ...], numbers: list[tuple[str, ...]], axis: int) -> Iterator[str]:
    from ClusterShell.RangeSet import RangeSet

    rows: dict[tuple[str, ...], list[str]] = {}
    for row in numbers:
        rows.setdefault((*row[:axis], *row[axis + 1 :]), []).append(row[axis])
    for rest, values in rows.items():
        folded = RangeSet()
        folded.update(values)
        yield _join(shape, (*rest[:axis], _bracket(folded), *rest[axis:]))


def _fold_axes(shape: tuple[str, ...], numbers: list[tuple[str, ...]]) -> Iterator[str]:
    from ClusterShell.RangeSet import RangeSetND

    for vector in RangeSetND(numbers).vectors():
        yield _join(shape, tuple(_bracket(folded) for folded in vector))


def _bracket(numbers: Any) -> str:
    return f"[{numbers}]" if len(numbers) > 1 else str(numbers)


def _join(shape: tuple[str, ...], numbers: tuple[str, ...]) -> str:
    return "".join(text + number for text, number in zip(shape, (*numbers, ""), strict=True))
