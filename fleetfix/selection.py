"""Choose hosts by patterns: among those that are known, in their groups, or as past runs ended.

gpu[01-16]   @train   gpu*!gpu07        @failed:last   hosts of the last run that did not end well
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from fleetfix.errors import InventoryError, PatternError
from fleetfix.hostset import HostSet
from fleetfix.spelling import hint_for

Patterns = str | Iterable[str]
"""One host pattern, or several whose hosts are taken together."""


class History(Protocol):
    """Past runs, as far as a pattern may name their hosts."""

    @property
    def words(self) -> frozenset[str]:
        """What may stand before the colon of `@failed:last`."""

    def hosts(self, word: str, run: str) -> HostSet:
        """The hosts of a run that ended so; an error of ours where there is no such run."""


@dataclass(frozen=True)
class Choice:
    """All that a pattern may name."""

    source: str
    """The inventory, as errors name it."""
    known: HostSet
    groups: Mapping[str, HostSet]
    history: History | None = None

    def chosen(self, pattern: Patterns, exclude: Patterns = ()) -> HostSet:
        """The hosts of one pattern or several, without those of others; never none.

        Raises InventoryError and PatternError.
        """
        wanted, unwanted = _many(pattern), _many(exclude)
        if not all(text.strip() for text in wanted):
            raise InventoryError(
                "no hosts are named", hint=f"--hosts 'PATTERN', or --hosts '*' for all {len(self.known)}"
            )
        if not all(text.strip() for text in unwanted):
            # An empty shell variable must not turn "all but these" into "all".
            raise InventoryError("--exclude names no hosts", hint="leave it out where none are meant")
        kept = self._named(wanted) - self._named(unwanted)
        if not kept:
            raise InventoryError(
                f"{', '.join(map(repr, wanted))} leaves no host",
                hint=f"{', '.join(unwanted)} is taken out" if unwanted else "",
            )
        return kept

    def _named(self, patterns: tuple[str, ...]) -> HostSet:
        """The union of several patterns, each read by itself."""
        groups = self.groups if self.history is None else _WithHistory(self, self.history)
        found = HostSet()
        for pattern in patterns:
            try:
                found |= HostSet.parse(pattern, known=self.known, groups=groups)
            except PatternError as error:
                raise self._placed(error) from None
        return found

    def _placed(self, error: PatternError) -> PatternError:
        """The error of a name that is not known, with the inventory that does not know it."""
        if not error.message.startswith(("unknown", "no host matches")):
            return error
        named = str(self.known)
        where = f"{self.source} has {named if len(named) <= 60 else f'{len(self.known)} other hosts'}"
        hint = error.hint
        if self.history is not None and error.message.startswith("unknown group"):
            word, colon, _ = error.message.removeprefix("unknown group @").partition(":")
            meant = hint_for(word, self.history.words).removesuffix("?")
            hint = (f"{meant}:RUN?" if meant else hint) if colon else hint
        return PatternError(
            error.message,
            pattern=error.pattern,
            column=error.column,
            hint=f"{hint.rstrip('.')}; {where}" if hint else where,
        )


@dataclass(frozen=True)
class _WithHistory(Mapping[str, HostSet]):
    """The groups of an inventory, and those that past runs make."""

    choice: Choice
    history: History

    def __contains__(self, name: object) -> bool:
        word, colon, run = str(name).partition(":")
        return name in self.choice.groups or (word in self.history.words and bool(colon and run))

    def __getitem__(self, name: str) -> HostSet:
        if name in self.choice.groups:
            return self.choice.groups[name]
        word, _, run = name.partition(":")
        hosts = self.history.hosts(word, run)
        if strange := hosts - self.choice.known:
            raise InventoryError(
                f"@{name} has {strange}, which {self.choice.source} does not know",
                hint="give -i the inventory of that run",
            )
        return hosts

    def __iter__(self) -> Iterator[str]:
        return iter(self.choice.groups)

    def __len__(self) -> int:
        return len(self.choice.groups)


def _many(pattern: Patterns) -> tuple[str, ...]:
    return (pattern,) if isinstance(pattern, str) else tuple(pattern)
