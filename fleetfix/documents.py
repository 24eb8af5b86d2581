"""YAML files as models: read strictly, and every complaint is `file:line: message`.

Read as YAML 1.2 reads: `true` and `false` are truth values; `yes`, `on`, `22:30` and `0644` are text;
numbers are numbers, and remember how they were written: a model that wants text gets `1.10`, not 1.1.
Duplicate keys, unknown keys, tabs, tags and merge keys are complaints; all of a file come at once.

    document = read(Path("playbook.yaml"))
    model = build(Playbook, document)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from fleetfix.complaints import Model, Place, check
from fleetfix.errors import DocumentError
from fleetfix.scalars import scalar

LARGEST = 16 * 1024 * 1024  # bytes of a file
DEEPEST = 60  # levels of nesting
MOST_REPEATED = 10_000  # values that aliases may add to a file


@dataclass(frozen=True)
class Document:
    """A YAML file that was read: its value, and the line of each place in it."""

    name: str
    text: str
    value: Any
    lines: Mapping[Place, int]
    problems: tuple[str, ...] = ()
    """Complaints about the YAML itself; whoever uses `value` raises them with its own."""

    def line(self, place: Place) -> int:
        """The line of a place, or of the nearest one around it."""
        for length in range(len(place), 0, -1):
            if place[:length] in self.lines:
                return self.lines[place[:length]]
        return self.lines.get((), 1)

    def complaint(self, place: Place, message: str) -> str:
        """`file:line: message`."""
        return f"{self.name}:{self.line(place)}: {message}"


# -- files ------------------------------------------------------------------------------------------


def read(path: Path, name: str | None = None) -> Document:
    """Read a file; DocumentError says in one line why it cannot be."""
    return parse(text_of(path, name), name or str(path))


def text_of(path: Path, name: str | None = None) -> str:
    """The text of a regular file in UTF-8, of bounded size."""
    shown = name or str(path)
    try:
        if path.is_dir():
            raise DocumentError((f"{shown}: is a folder, not a file",))
        if path.exists() and not path.is_file():
            raise DocumentError((f"{shown}: is not a regular file",))
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        raise DocumentError((f"{shown}: {_reason(error)}",)) from error
    if len(data) > LARGEST:
        raise DocumentError((f"{shown}: larger than {LARGEST // 1024**2} MiB",))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError((f"{shown}:{line}: not UTF-8 text",)) from error


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno).lower()
    return str(error)


def parse(text: str, name: str) -> Document:
    """Read one YAML document; DocumentError where there is nothing to go on with."""
    reader = _Reader(name)
    value = reader.read(text)
    if value is None and reader.complaints:
        raise DocumentError(tuple(reader.complaints))
    return Document(name, text, value, reader.lines, tuple(reader.complaints))


def value_of(text: str) -> Any:
    """The value of one word given on the command line: a scalar, or a flow list or mapping."""
    if text[:1] not in ("[", "{"):
        return scalar(text)
    document = parse(text, "value")
    refuse(document.problems)
    return document.value


def refuse(complaints: Iterable[str]) -> None:
    """Raise a DocumentError of these complaints, in the order of their lines, if there are any."""
    found = sorted(dict.fromkeys(complaints), key=_file_and_line)
    if found:
        raise DocumentError(tuple(found))


def _file_and_line(complaint: str) -> tuple[str, int]:
    match = re.match(r"(.*?):(\d+): ", complaint)
    return (match[1], int(match[2])) if match else (complaint, 0)


# -- YAML -------------------------------------------------------------------------------------------

_Loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


@dataclass
class _Reader:
    """Makes a value from YAML events: no recursion, no tags, no types but ours."""

    name: str
    complaints: list[str] = field(default_factory=list)
    lines: dict[Place, int] = field(default_factory=dict)
    anchors: dict[str, tuple[Any, int]] = field(default_factory=dict)
    repeated: int = 0

    def read(self, text: str) -> Any:
        try:
            events = list(yaml.parse(text, Loader=_Loader))
        except yaml.MarkedYAMLError as error:
            mark: Any = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            return self._complain(line, _yaml_problem(error, text.splitlines()[line - 1 : line]))
        except yaml.reader.ReaderError as error:
            return self._complain(_line_at(text, error.position), "a character that YAML does not allow")
        except (yaml.YAMLError, RecursionError, ValueError, UnicodeError) as error:
            return self._complain(1, f"not YAML: {str(error).splitlines()[0]}")
        return self._documents(iter(events))

    def _complain(self, line: int, message: str) -> None:
        self.complaints.append(f"{self.name}:{line}: {message}")

    def _documents(self, events: Iterator[Any]) -> Any:
        value, seen = None, 0
        for event in events:
            if not isinstance(event, yaml.DocumentStartEvent):
                continue
            seen += 1
            if seen == 2:
                mark: Any = event.start_mark
                self._complain(mark.line + 1, "a second document: one file holds one")
            if seen == 1:
                value = _Builder(self).build(events)
        if seen == 0:
            self._complain(1, "the file is empty")
        return value


@dataclass
class _Open:
    """A list or mapping that is being read."""

    value: list[Any] | dict[str, Any]
    place: Place
    line: int
    anchor: str | None
    size: int = 1
    key: str | None = None
    key_line: int = 0


class _Builder:
    """Builds the value of one document from its events."""

    def __init__(self, reader: _Reader) -> None:
        self.reader = reader
        self.stack: list[_Open] = []
        self.root: Any = None

    def build(self, events: Iterator[Any]) -> Any:
        for event in events:
            if isinstance(event, yaml.DocumentEndEvent):
                break
            self._event(event)
        return self.root

    def _event(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            self._close()
        elif isinstance(event, yaml.AliasEvent):
            self._alias(str(event.anchor), line)
        elif isinstance(event, yaml.ScalarEvent):
            self._refuse_tag(event, line)
            self._scalar(event, line)
        else:
            self._refuse_tag(event, line)
            self._open([] if isinstance(event, yaml.SequenceStartEvent) else {}, event.anchor, line)

    def _refuse_tag(self, event: Any, line: int) -> None:
        if event.tag not in (None, "!", "tag:yaml.org,2002:str"):
            self.reader._complain(line, f"the tag {event.tag} is not read here; write the plain value")

    def _scalar(self, event: Any, line: int) -> None:
        top = self.stack[-1] if self.stack else None
        if top is not None and isinstance(top.value, dict) and top.key is None:
            self._key(top, event.value, line)
            return
        plain = event.style in (None, "") and event.tag is None
        self._add(scalar(event.value) if plain else event.value, line, 1, event.anchor)

    def _key(self, top: _Open, key: str, line: int) -> None:
        assert isinstance(top.value, dict)
        if key == "<<":
            self.reader._complain(line, "merge keys are not read; write the keys out, or use group vars")
        elif key in top.value:
            before = self.reader.lines[(*top.place, key)]
            self.reader._complain(line, f"{key!r} is here twice (before in line {before})")
        top.key, top.key_line = key, line

    def _open(self, value: list[Any] | dict[str, Any], anchor: str | None, line: int) -> None:
        if len(self.stack) >= DEEPEST:
            raise DocumentError((f"{self.reader.name}:{line}: nested deeper than {DEEPEST} levels",))
        place, known_line = self._place(line)
        self.stack.append(_Open(value, place, known_line, anchor))

    def _close(self) -> None:
        done = self.stack.pop()
        self._add(done.value, done.line, done.size, done.anchor)

    def _place(self, line: int) -> tuple[Place, int]:
        """Where the next value stands, and its line: that of its key where it has one."""
        if not self.stack:
            return (), line
        top = self.stack[-1]
        if isinstance(top.value, list):
            return (*top.place, len(top.value)), line
        if top.key is None:
            self.reader._complain(line, "a key must be one word")
            top.key, top.key_line = "?", line
        return (*top.place, top.key), top.key_line

    def _add(self, value: Any, line: int, size: int, anchor: str | None) -> None:
        place, known_line = self._place(line)
        self.reader.lines[place] = known_line
        if anchor is not None:
            self.reader.anchors[anchor] = (value, size)
        if not self.stack:
            self.root = value
            return
        top = self.stack[-1]
        top.size += size
        if isinstance(top.value, list):
            top.value.append(value)
        else:
            top.value[cast(str, top.key)] = value
            top.key = None

    def _alias(self, anchor: str, line: int) -> None:
        if anchor not in self.reader.anchors:
            self.reader._complain(line, f"*{anchor} stands for nothing written before it")
            self._add(None, line, 1, None)
            return
        value, size = self.reader.anchors[anchor]
        self.reader.repeated += size
        if self.reader.repeated > MOST_REPEATED:
            raise DocumentError(
                (f"{self.reader.name}:{line}: aliases repeat more than {MOST_REPEATED} values",)
            )
        self._add(value, line, size, None)


def _yaml_problem(error: yaml.MarkedYAMLError, line: list[str]) -> str:
    problem = error.problem or "not YAML"
    if "tab character" in problem or ("cannot start any token" in problem and line and "\t" in line[0]):
        return "a tab where YAML wants spaces"
    context = f" {error.context}" if error.context else ""
    return f"{problem}{context}".replace("\n", " ")


def _line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


# -- models -----------------------------------------------------------------------------------------


def build(model: type[Model], document: Document, value: Any = None, at: Place = ()) -> Model:
    """Make a model of a document, or of a value that stands at a place in it; or DocumentError."""
    made, complaints = check(model, document.value if not at and value is None else value)
    refuse([*document.problems, *(document.complaint((*at, *place), text) for place, text in complaints)])
    assert made is not None
    return made
