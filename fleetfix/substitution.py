"""`${{ vars.x }}` and `${{ host.x }}`: the only substitution in a playbook, strict and done at load.

A reference that is a whole value keeps the type of what it names; inside text it becomes text. All
else is literal: `{{.Names}}`, `$HOME`, `%s`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fleetfix.complaints import Place
from fleetfix.scalars import written

_OPEN = "${{"
_REFERENCE = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
_NAME = re.compile(r"\s*(vars|host)\.([A-Za-z_][A-Za-z0-9_-]*)\s*")


class Reference(NamedTuple):
    """What a `${{ }}` names."""

    scope: str
    """`vars` or `host`."""
    name: str

    def __str__(self) -> str:
        return f"{self.scope}.{self.name}"


class Unbound(ValueError):
    """A reference has no value that fits where it stands; the message says why."""


Lookup = Callable[[Reference], Any]
"""Gives the value of a reference, or raises Unbound."""


def references(value: Any, place: Place = ()) -> Iterator[tuple[Place, Reference]]:
    """Every well-formed reference in a value, with its place."""
    for where, text in _texts(value, place):
        for found in _REFERENCE.finditer(text):
            if name := _NAME.fullmatch(found[1]):
                yield where, Reference(name[1], name[2])


def malformed(value: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Every `${{` that is not a reference, with its place and what is wrong."""
    for where, text in _texts(value, place, keys=True):
        for found in _REFERENCE.finditer(text):
            if not _NAME.fullmatch(found[1]):
                yield where, f"{found[0]} is not read: only vars.NAME and host.NAME are"
        if _OPEN in _REFERENCE.sub("", text):
            yield where, "a ${{ is never closed by }}"


def _texts(value: Any, place: Place, *, keys: bool = False) -> Iterator[tuple[Place, str]]:
    if isinstance(value, str):
        if _OPEN in value:
            yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            if keys and _OPEN in key:
                yield (*place, key), "${{ in a key"
            yield from _texts(item, (*place, key), keys=keys)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, (*place, index), keys=keys)


def substitute(
    value: Any, lookup: Lookup, complain: Callable[[Place, str], None], place: Place = ()
) -> Any:
    """The value with every reference replaced; what cannot be is complained of, and None."""
    if isinstance(value, str):
        return _substituted(value, lookup, complain, place) if _OPEN in value else value
    if isinstance(value, dict):
        return {key: substitute(item, lookup, complain, (*place, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [substitute(item, lookup, complain, (*place, index)) for index, item in enumerate(value)]
    return value


def _substituted(text: str, lookup: Lookup, complain: Callable[[Place, str], None], place: Place) -> Any:
    try:
        whole = _REFERENCE.fullmatch(text)
        if whole is not None and (name := _NAME.fullmatch(whole[1])):
            return lookup(Reference(name[1], name[2]))
        return _REFERENCE.sub(lambda found: _as_text(found, lookup), text)
    except Unbound as error:
        complain(place, str(error))
        return None


def _as_text(found: re.Match[str], lookup: Lookup) -> str:
    name = _NAME.fullmatch(found[1])
    if name is None:
        raise Unbound(f"{found[0]} is not read")
    reference = Reference(name[1], name[2])
    value = lookup(reference)
    text = written(value)
    if text is None:
        raise Unbound(f"only a single value fits inside text, and {reference} is {_kind(value)}")
    return text


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list | tuple) else "a mapping" if value is not None else "nothing"
