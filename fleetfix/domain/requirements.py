"""Read what a package requires (PEP 508), as far as a purge must know: whom, with which extras, when."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fleetfix.commands import Value

_TOKEN = re.compile(r"\s*(\(|\)|and\b|or\b|not\s+in\b|in\b|[<>=!~]=?=?|'[^']*'|\"[^\"]*\"|[A-Za-z_.]+)")


class Requirement(Value):
    """A requirement: the normalised name, the extras asked for, and the marker as text."""

    name: str
    extras: frozenset[str] = frozenset()
    marker: str = ""

    def holds(self, facts: Mapping[str, str], extras: frozenset[str]) -> bool:
        """Whether it counts on a machine with these marker values, for these extras of its owner.

        A marker that cannot be understood counts: sparing too much harms nothing.
        """
        if not self.marker:
            return True
        try:
            return any(_Marker(self.marker, {**facts, "extra": one}).value() for one in extras or {""})
        except (ValueError, IndexError):
            return True


def normal(name: str) -> str:
    """Write a package name as PEP 503 does.

    >>> normal("NVIDIA_nccl.cu12")
    'nvidia-nccl-cu12'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement(text: str) -> Requirement | None:
    """Parse `cuda-toolkit[cublas]==13.0.2; platform_system == "Linux"`; None for what is none."""
    head, _, marker = text.partition(";")
    match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?", head)
    if match is None:
        return None
    extras = frozenset(normal(one.strip()) for one in (match[2] or "").split(",") if one.strip())
    return Requirement(name=normal(match[1]), extras=extras, marker=marker.strip())


class _Marker:
    """A recursive descent over the marker grammar; raises ValueError where it is left."""

    def __init__(self, text: str, facts: Mapping[str, str]) -> None:
        self.tokens = _tokens(text)
        self.facts = facts

    def value(self) -> bool:
        found = self._either()
        if self.tokens:
            raise ValueError(self.tokens[0])
        return found

    def _either(self) -> bool:
        found = self._both()
        while self.tokens[:1] == ["or"]:
            self.tokens.pop(0)
            found = self._both() or found
        return found

    def _both(self) -> bool:
        found = self._one()
        while self.tokens[:1] == ["and"]:
            self.tokens.pop(0)
            found = self._one() and found
        return found

    def _one(self) -> bool:
        if self.tokens[:1] == ["("]:
            self.tokens.pop(0)
            found = self._either()
            if self.tokens.pop(0) != ")":
                raise ValueError("a parenthesis is open")
            return found
        left, operator, right = self.tokens.pop(0), self.tokens.pop(0), self.tokens.pop(0)
        first, second = self._known(left), self._known(right)
        if first is None or second is None:
            return True
        if "extra" in (left, right):
            first, second = normal(first), normal(second)
        return _compare(first, operator, second)

    def _known(self, token: str) -> str | None:
        return token[1:-1] if token[0] in "'\"" else self.facts.get(token)


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(text[at:])
        found.append(re.sub(r"\s+", " ", match[1]))
        at = match.end()
    return found


def _compare(left: str, operator: str, right: str) -> bool:
    if operator in ("in", "not in"):
        return (left in right) == (operator == "in")
    one, other = _version(left), _version(right)
    if one is None or other is None:
        if operator in ("==", "==="):
            return left == right
        if operator == "!=":
            return left != right
        return True
    width = max(len(one), len(other))
    one, other = one + (0,) * (width - len(one)), other + (0,) * (width - len(other))
    table = {
        "==": one == other,
        "===": one == other,
        "!=": one != other,
        "<": one < other,
        "<=": one <= other,
        ">": one > other,
        ">=": one >= other,
    }
    return table.get(operator, True)


def _version(text: str) -> tuple[int, ...] | None:
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d+(\.\d+)*", text) else None
