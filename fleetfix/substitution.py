"""`${{ vars.x }}`, `${{ host.x }}`, `${{ secrets.x }}`: the only substitution, strict and done at load.

A reference that is a whole value keeps the type of what it names; inside text it becomes text. All
else is literal: `{{.Names}}`, `$HOME`, `%s`. A secret stays sealed: its value is never in here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fleetfix.complaints import Place
from fleetfix.scalars import written
from fleetfix.sealed import Sealed

SECRETS = "secrets"
_OPEN = "${{"
_REFERENCE = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
_NAME = re.compile(r"\s*(vars|host|secrets)\.([A-Za-z_][A-Za-z0-9_-]*)\s*")


class Reference(NamedTuple):
    """What a `${{ }}` names."""

    scope: str
    """`vars`, `host` or `secrets`."""
    name: str

    def __str__(self) -> str:
        return f"{self.scope}.{self.name}"


class Unbound(ValueError):
    """A reference has no value that fits where it stands; the message says why."""


Lookup = Callable[[Reference], Any]
"""Gives the value of a reference, or raises Unbound. It is not asked for secrets."""


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
                yield where, f"{found[0]} is not read: only vars.NAME, host.NAME and secrets.NAME are"
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
            reference = Reference(name[1], name[2])
            return (
                Sealed(parts=("", reference.name, "")) if reference.scope == SECRETS else lookup(reference)
            )
        return _in_text(text, lookup)
    except Unbound as error:
        complain(place, str(error))
        return None


def _in_text(text: str, lookup: Lookup) -> str | Sealed:
    """The text with its references replaced; sealed where one of them is a secret."""
    parts, at = [""], 0
    for found in _REFERENCE.finditer(text):
        parts[-1] += text[at : found.start()]
        name = _NAME.fullmatch(found[1])
        if name is not None and name[1] == SECRETS:
            parts += [name[2], ""]
        else:
            parts[-1] += _as_text(found, lookup)
        at = found.end()
    parts[-1] += text[at:]
    return parts[0] if len(parts) == 1 else Sealed(parts=tuple(parts))


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
