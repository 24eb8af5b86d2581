"""What a command of `exec` prints, and how it ended: live or gathered, one result a host, none lost.

Nothing that a host prints reaches a terminal as it is: escapes are shown, bytes that are not UTF-8 too.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fleetfix.commands import hint_of_exit, said_of_exit
from fleetfix.hostset import HostSet, natural
from fleetfix.session import Stream
from fleetfix.state import HostState, RunState
from fleetfix.views.amounts import count, duration
from fleetfix.views.grouping import counted, group
from fleetfix.views.neutral import neutral_text, one_line
from fleetfix.views.out import Out
from fleetfix.views.paint import PLAIN, Paint, Tone
from fleetfix.views.reach import own_network
from fleetfix.views.summary import MEANINGS

LONGEST_LINE = 64 * 1024
"""Bytes of a line without end after which it is shown in pieces."""

KEPT_OF_ONE = 1 << 20
KEPT_OF_ALL = 256 << 20
LEAST_KEPT = 16 << 10
"""Bytes of a host's stream that are gathered: up to the first number, less where there are many hosts."""

NAMED = 2000
"""Characters of folded hosts that are shown: who did not end well is looked for by name."""

RULE = "-" * 15
_TONES: dict[Stream, Tone] = {"out": "strong", "err": "bad"}


def kept_of_each(hosts: int) -> int:
    """How much of each stream is gathered where there are so many hosts."""
    return max(min(KEPT_OF_ONE, KEPT_OF_ALL // max(hosts, 1)), LEAST_KEPT)


def shown(data: bytes) -> str:
    """Whole lines as text that does nothing to a terminal; tabs stay, and line ends are those of here."""
    plain = data.replace(b"\r\n", b"\n").removesuffix(b"\r")
    return neutral_text(plain.decode("utf-8", "backslashreplace"))


# -- live -------------------------------------------------------------------------------------------


class Lines:
    """Cuts one stream of one host where lines end, in memory that does not grow.

    Lines stay together as they came: much output is of short ones, and each would cost as much as all.
    """

    def __init__(self) -> None:
        self._rest = bytearray()

    def add(self, data: bytes) -> bytes:
        """The lines that are whole with this, each with its end; one that is too long, in pieces."""
        self._rest += data
        if b"\n" not in data and len(self._rest) <= LONGEST_LINE:
            return b""
        at = self._rest.rfind(b"\n") + 1
        block = bytes(self._rest[:at])
        *pieces, self._rest = _pieces(self._rest[at:])
        if len(block) > LONGEST_LINE and _TOO_LONG.search(block):
            lines = block.removesuffix(b"\n").split(b"\n")
            block = b"\n".join(piece for line in lines for piece in _pieces(bytearray(line))) + b"\n"
        return block + b"".join(piece + b"\n" for piece in pieces)

    def end(self) -> bytes:
        """What is left of a last line that never ended, with an end."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest + b"\n" if rest else b""


_TOO_LONG = re.compile(rb"(?m)^[^\n]{%d}" % (LONGEST_LINE + 1))


def _pieces(line: bytearray) -> list[bytearray]:
    """A line, or as many as it takes; none ends in the middle of a character."""
    found = []
    while len(line) > LONGEST_LINE:
        at = LONGEST_LINE
        while at > LONGEST_LINE - 4 and line[at] & 0xC0 == 0x80:
            at -= 1
        found.append(line[:at])
        line = line[at:]
    return [*found, line]


class Live:
    """Writes each line as it comes, after the name of its host; what is slow to read slows the hosts."""

    def __init__(
        self,
        hosts: Iterable[str],
        outs: Mapping[Stream, Out],
        paints: Mapping[Stream, Paint],
        *,
        aligned: Mapping[Stream, bool],
    ) -> None:
        self._outs = outs
        width = max(map(len, hosts), default=0)
        self._widths: dict[Stream, int] = {one: width if aligned[one] else 0 for one in outs}
        self._paints = paints
        self._lines: dict[tuple[str, Stream], Lines] = {}

    async def take(self, host: str, stream: Stream, data: bytes) -> None:
        """Write what is whole of it, and wait until it is written."""
        lines = self._lines.setdefault((host, stream), Lines()).add(data)
        if lines:
            self._write(host, stream, lines)
            await self._outs[stream].drained()

    def end(self, host: str) -> None:
        """Write what is left of a host that has ended."""
        for stream in self._outs:
            known = self._lines.pop((host, stream), None)
            if known is not None and (rest := known.end()):
                self._write(host, stream, rest)

    def _write(self, host: str, stream: Stream, lines: bytes) -> None:
        named = self._paints[stream](_TONES[stream], f"{host}:")
        before = named + " " * (self._widths[stream] - len(host) + 1 if self._widths[stream] else 1)
        text = shown(lines.removesuffix(b"\n")).replace("\n", "\n" + before)
        self._outs[stream].words(f"{before}{text}\n")


# -- gathered ---------------------------------------------------------------------------------------


class Kept:
    """The head and the tail of a stream, in memory that does not grow."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.dropped = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        over = len(self._tail) - self._half
        if over > 0:
            self.dropped += over
            del self._tail[:over]

    @property
    def data(self) -> bytes:
        """What is kept; where something was dropped, a line between says how much."""
        if not self.dropped:
            return bytes(self._head + self._tail)
        note = f"\n[... {self.dropped} bytes cut ...]\n"
        return bytes(self._head) + note.encode() + bytes(self._tail)


class Gathered:
    """Keeps what hosts print until it is asked for."""

    def __init__(self, hosts: int) -> None:
        self._limit = kept_of_each(hosts)
        self._kept: dict[tuple[str, Stream], Kept] = {}

    async def take(self, host: str, stream: Stream, data: bytes) -> None:
        self._kept.setdefault((host, stream), Kept(self._limit)).add(data)

    def blocks(self, stream: Stream) -> Iterator[str]:
        """Each text once, under the hosts that printed it; the one of most hosts first."""
        alike: dict[bytes, list[str]] = {}
        for (host, one), kept in self._kept.items():
            if one == stream:
                alike.setdefault(kept.data, []).append(host)
        folded = sorted(alike.items(), key=lambda item: (-len(item[1]), natural(min(item[1], key=natural))))
        for data, hosts in folded:
            named = counted(HostSet(hosts), NAMED) + (", stderr" if stream == "err" else "")
            yield "\n".join([RULE, named, RULE, shown(data.removesuffix(b"\n"))])

    def json_line(self, host: HostState) -> str:
        """One host as an object on a line, and let go of what it printed."""
        ended, done = host.command, host.finished
        out = self._kept.pop((host.name, "out"), Kept(0))
        err = self._kept.pop((host.name, "err"), Kept(0))
        exit = ended.exit if ended else None
        fields: dict[str, Any] = {
            "host": host.name,
            "result": _class_of(host),
            "exit": exit if exit is not None and exit >= 0 else None,
            "signal": -exit if exit is not None and exit < 0 else None,
            "seconds": ended.seconds if ended else 0.0,
            "failure": done.failure.model_dump() if done and done.failure and exit is None else None,
            **_json_text("stdout", out),
            **_json_text("stderr", err),
        }
        return json.dumps(fields, separators=(",", ":"))


def _json_text(name: str, kept: Kept) -> dict[str, object]:
    """The text of a stream, or its bytes in base 64 where it is no text; how much of it was cut."""
    try:
        told: dict[str, object] = {name: kept.data.decode()}
    except UnicodeDecodeError:
        told = {f"{name}_base64": base64.b64encode(kept.data).decode()}
    return {**told, **({f"{name}_cut": kept.dropped} if kept.dropped else {})}


# -- results ----------------------------------------------------------------------------------------

_WORST_FIRST = ("exit", "signal", "hung", "timed_out", "in_doubt", "not_known")
_LAST = ("cancelled", "not_begun", "ok")


def _class_of(host: HostState) -> str:
    """The class of a host's one result: ok, exit, signal, or the class of what kept it from ending."""
    done = host.finished
    if done is None:
        return "not_known" if host.started else "not_begun"
    if done.outcome in ("ok", "in_doubt", "cancelled"):
        return done.outcome
    if host.command is not None and host.command.exit is not None:
        return "exit" if host.command.exit >= 0 else "signal"
    return done.failure.kind if done.failure else done.outcome


def _said(host: HostState) -> str:
    """A host's result in a word or two: `ok`, `exit 3`, `timed out`."""
    kind = _class_of(host)
    if kind in ("exit", "signal") and host.command is not None and host.command.exit is not None:
        return said_of_exit(host.command.exit)
    return kind.replace("_", " ")


def command_summary(
    state: RunState, code: int | None, paint: Paint = PLAIN, *, unwritten: bool = False
) -> str:
    """Every host in one of the results, what went wrong first; the numbers add up to the selection.

    Without an exit code the controller ended before the command did: of some hosts no result is known.
    `unwritten` says that not all that was printed could be passed on.
    """
    results: dict[str, list[HostState]] = {}
    for host in sorted(state.hosts.values(), key=_rank):
        results.setdefault(_said(host), []).append(host)
    lines = []
    for said, hosts in results.items():
        if said != "ok":
            lines += [f"{paint(_tone(said), f'{said:<12}')} {line}" for line in _folded(said, hosts)]
    failures = [host.finished.failure for host in state.hosts.values() if host.finished is not None]
    away = sum(failure is not None and failure.kind == "unreachable" for failure in failures)
    if doubt := own_network(away, len(state.hosts)):
        lines.append(doubt)
    counts = ", ".join(paint(_tone(said), _counted(len(hosts), said)) for said, hosts in results.items())
    took = f" · {duration(state.ended_at - state.began_at)}" if state.ended_at else ""
    told = f"{count(len(state.hosts), 'host')}: {counts}{took}"
    return "\n".join([*lines, f"{told} · {_ended(code, paint, unwritten)}"])


def _ended(code: int | None, paint: Paint, unwritten: bool) -> str:
    if code is None:
        return paint("bad", "it did not finish: its controller ended")
    known = "output was lost" if unwritten else MEANINGS.get(code)
    meaning = f" ({known})" if known else ""
    return paint("good" if code == 0 else "bad", f"exit {code}") + meaning


def _counted(number: int, said: str) -> str:
    return f"{number} with {said}" if said.startswith("exit ") else f"{number} {said}"


def waits_for(state: RunState) -> str:
    """How far it is: who has not ended yet."""
    left = HostSet(host.name for host in state.hosts.values() if host.finished is None)
    ended = len(state.hosts) - len(left)
    return f"{ended} of {count(len(state.hosts), 'host')} ended; not yet: {counted(left)}"


def _rank(host: HostState) -> tuple[int, int, object]:
    kind = _class_of(host)
    if kind in _WORST_FIRST:
        place = _WORST_FIRST.index(kind)
    else:
        place = len(_WORST_FIRST) + (_LAST.index(kind) + 1 if kind in _LAST else 0)
    exit = host.command.exit if host.command else None
    return place, exit or 0, natural(host.name)


def _folded(said: str, hosts: list[HostState]) -> Iterator[str]:
    if said.startswith(("exit ", "killed ")):
        code = hosts[0].command.exit if hosts[0].command else None
        hint = hint_of_exit(code or 0)
        yield counted(HostSet(host.name for host in hosts), NAMED) + (f": {hint}" if hint else "")
        return
    failures = ((host.name, host.finished.failure if host.finished else None) for host in hosts)
    for one in group((name, one_line(str(failure)) if failure else "") for name, failure in failures):
        yield counted(one.hosts, NAMED) + (f": {one.text}" if one.text else "")


def _tone(said: str) -> Tone:
    return "good" if said == "ok" else "warn" if said == "cancelled" else "bad"
