"""What the ssh configuration says of one host: read once a file, resolved once a connection, as ssh does.

The grammar of single words is asyncssh's. Read here is what it leaves out or takes otherwise: `Match exec`,
`final` and `canonical`, `Include` in the order of names, tokens once everything is known, the system's own
file, and the words about known hosts. What would lead another way than ssh goes, and is not supported,
is an error that says so.
"""

from __future__ import annotations

import asyncio
import functools
import getpass
import os
import shlex
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from asyncssh.config import ConfigParseError, SSHClientConfig, SSHConfig
from asyncssh.pattern import WildcardPatternList

from fleetfix.folders import expanded
from fleetfix.inventory_sources.trust import distrust

SYSTEM = Path("/etc/ssh/ssh_config")
DEEPEST = 16
"""Levels of Include, as in ssh."""
EXEC_SECONDS = 10.0
"""How long a command of `Match exec` may take."""
EXEC_HOLDS = 30.0
"""For how many seconds its answer holds: it is asked for each host of a fleet."""

LookUp = Callable[[str], Awaitable[object]]
"""Resolves a name to addresses, awaitable; OSError where there are none."""


@dataclass(frozen=True)
class Settings:
    """One destination as the configuration has it, complete: nothing of it is looked up later."""

    name: str
    """As it was asked for: what `Host` lines match."""
    config: SSHConfig
    """For asyncssh, which takes algorithms and the like from it."""

    @property
    def host(self) -> str:
        """The name or address to connect to."""
        return str(self.config.get("Hostname", self.name))

    @property
    def port(self) -> int:
        port = self.config.get("Port", 22)
        return port if isinstance(port, int) else 22

    @property
    def user(self) -> str:
        return str(self.config.get("User") or getpass.getuser())

    @property
    def jumps(self) -> tuple[str, ...]:
        """The jump hosts of its ProxyJump, the nearest first, as they are written there."""
        said = self.text("ProxyJump")
        return tuple(word.strip().removeprefix("ssh://") for word in said.split(",")) if said else ()

    @property
    def proxy_command(self) -> str:
        """The command that connects to it. ProxyJump wins, where both are said before anything else."""
        return "" if self.jumps else self.text("ProxyCommand")

    def text(self, word: str) -> str:
        """The value of a word, empty where it is not said, or `none`."""
        said = self.config.get(word)
        return said if isinstance(said, str) else ""

    def texts(self, word: str, default: Sequence[str] = ()) -> list[str]:
        """The values of a word that takes several, each once."""
        said = self.config.get(word)
        return list(dict.fromkeys(map(str, said))) if isinstance(said, list) else list(default)

    def number(self, word: str) -> int | None:
        """The value of a word that is a number; None where it is not said."""
        said = self.config.get(word)
        return said if isinstance(said, int) and not isinstance(said, bool) else None

    def yes(self, word: str) -> bool:
        """Whether a word is said to be so."""
        return self.config.get(word) is True


async def resolve(
    name: str, port: int | None, user: str | None, own: str | None, look_up: LookUp | None = None
) -> Settings:
    """What the configuration says of a destination; `own` is a file that is read before the user's.

    Raises ConfigParseError. `look_up` is needed for CanonicalizeHostname alone.
    """
    files = _files(own)
    slow = any(_runs_commands(file) for file in files)

    async def read(*again: Any) -> _Config:
        if slow:
            return await asyncio.to_thread(_read, files, name, port, user, *again)
        return _read(files, name, port, user, *again)

    config = await read()
    canonical = await _canonical(config, name, look_up)
    if canonical is not None or config.has_match_final():
        config = await read(config, canonical)
    return _complete(config, name, canonical)


def resolve_now(name: str, port: int | None, user: str | None, own: str | None) -> Settings:
    """The same without a look at the network: names are not made canonical."""
    files = _files(own)
    config = _read(files, name, port, user)
    if config.has_match_final():
        config = _read(files, name, port, user, config)
    return _complete(config, name, None)


def mentions(own: str | None, words: frozenset[str]) -> bool:
    """Whether one of these words, in small letters, stands anywhere in the files read for a host."""
    return any(line.word in words for file in _files(own) for line in _all_lines(file))


# -- what is not supported ----------------------------------------------------------------------------

_UNSUPPORTED = {
    "BindInterface": "bind to an address by BindAddress",
    "ProxyUseFdpass": "let ProxyCommand pass the bytes on, or name a jump host by ProxyJump",
}


def _complete(config: _Config, name: str, canonical: str | None) -> Settings:
    for word, instead in _UNSUPPORTED.items():
        if str(config.get(word, "no")).lower() not in ("no", "false", "none"):
            raise ConfigParseError(f"{word} is not supported: {instead}")
    config.complete(name)
    return Settings(canonical or name, config)


# -- files --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A file to read. One that is found, not named, counts only where nobody else can have written it."""

    path: Path
    found: bool = False

    @property
    def folder(self) -> Path:
        """Where relative names in its Include lines lie."""
        return SYSTEM.parent if self.path.is_relative_to(SYSTEM.parent) else expanded("~/.ssh")


@dataclass(frozen=True)
class _Line:
    number: int
    word: str
    args: tuple[str, ...]


@dataclass(frozen=True)
class _Block:
    """A `Host` or `Match` line and what it holds for; the first block of a file has none."""

    head: _Line | None
    lines: tuple[_Line, ...]

    @functools.cached_property
    def patterns(self) -> WildcardPatternList:
        """What its `Host` line matches."""
        return WildcardPatternList(",".join(self.head.args if self.head is not None else ()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a `Host` line without any pattern."""
        if (
            self.head is None
            or self.head.word != "host"
            or any(set(arg) & set("*?!,") for arg in self.head.args)
        ):
            return ()
        return self.head.args


@dataclass(frozen=True)
class _Text:
    """One file taken apart. A fleet has thousands of blocks for one name each: those are found by it."""

    blocks: tuple[_Block, ...]
    by_name: dict[str, list[int]]
    others: tuple[int, ...]

    def worth_a_look(self, name: str) -> list[_Block]:
        """The blocks that may hold for a host of this name, in their order."""
        return [self.blocks[place] for place in sorted((*self.by_name.get(name, ()), *self.others))]


def _files(own: str | None) -> tuple[_File, ...]:
    """The files for a host, in the order in which the first value wins."""
    users = _File(expanded("~/.ssh/config"), found=True)
    # A file of its own stands for the system's, as with `ssh -F`; the user's holds in any case.
    first, second = (_File(Path(own)), users) if own else (users, _File(SYSTEM))
    return tuple(file for file in (first, second) if str(file.path) == own or file.path.is_file())


def _text(file: _File) -> _Text:
    """One file, taken apart; read again only when it has changed."""
    try:
        there = file.path.stat()
    except OSError as error:
        raise ConfigParseError(f"{file.path}: {(error.strerror or str(error)).lower()}") from None
    if file.found and (reason := distrust(file.path)):
        raise ConfigParseError(f"{file.path} is not used: {reason}")
    return _read_text(file.path, there.st_mtime_ns, there.st_size)


@functools.lru_cache(maxsize=256)
def _read_text(path: Path, changed: int, size: int) -> _Text:
    del changed, size
    try:
        text = path.read_text("utf-8", "replace")
    except OSError as error:
        raise ConfigParseError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    heads: list[_Line | None] = [None]
    lines: list[list[_Line]] = [[]]
    for number, line in _with_words(text):
        taken = _taken_apart(path, number, line)
        if taken.word in ("host", "match"):
            heads.append(taken)
            lines.append([])
        else:
            lines[-1].append(taken)
    blocks = tuple(_Block(head, tuple(inside)) for head, inside in zip(heads, lines, strict=True))
    by_name: dict[str, list[int]] = {}
    for place, block in enumerate(blocks):
        for name in dict.fromkeys(block.names):
            by_name.setdefault(name, []).append(place)
    others = tuple(place for place, block in enumerate(blocks) if not block.names)
    return _Text(blocks, by_name, others)


def _with_words(text: str) -> list[tuple[int, str]]:
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]


_WHOLE = frozenset({"proxycommand", "remotecommand", "knownhostscommand", "localcommand"})
"""Words whose value is the rest of the line, as it stands."""


def _taken_apart(path: Path, number: int, line: str) -> _Line:
    end = next((place for place, sign in enumerate(line) if sign in " \t="), len(line))
    word, rest = line[:end].strip('"').lower(), line[end:].strip()
    if rest.startswith("="):
        rest = rest[1:].strip()
    if word in _WHOLE:
        return _Line(number, word, (rest,) if rest else ())
    try:
        # A comment may stand behind a value; a sharp in the middle of a word is none.
        return _Line(number, word, tuple(_up_to_comment(shlex.split(rest))))
    except ValueError:
        raise ConfigParseError(f"{path} line {number}: the quotes do not match") from None


def _up_to_comment(args: list[str]) -> list[str]:
    return args[: next((place for place, arg in enumerate(args) if arg.startswith("#")), len(args))]


def _included(file: _File, line: _Line) -> list[_File]:
    """The files of an Include, in the order of their names; that none is there is no error."""
    found: list[Path] = []
    for pattern in line.args:
        whole = file.folder / expanded(os.path.expandvars(pattern))
        anchor = Path(whole.anchor)
        found += sorted(one for one in anchor.glob(str(whole.relative_to(anchor))) if one.is_file())
    return [_File(one, file.found) for one in found]


def _all_lines(file: _File, depth: int = 0) -> list[_Line]:
    found: list[_Line] = []
    for block in _text(file).blocks:
        found += [block.head, *block.lines] if block.head is not None else block.lines
        for line in block.lines:
            if line.word == "include" and depth < DEEPEST:
                found += [inner for one in _included(file, line) for inner in _all_lines(one, depth + 1)]
    return found


def _runs_commands(file: _File) -> bool:
    """Whether a file has `Match exec`, which takes its time."""
    return any(line.word == "match" and "exec" in map(str.lower, line.args) for line in _all_lines(file))


def _read(
    files: Sequence[_File],
    name: str,
    port: int | None,
    user: str | None,
    before: _Config | None = None,
    canonical: str | None = None,
) -> _Config:
    """Read all files for one destination; `before` is what a first reading has found, which stays."""
    given: list[Any] = [() if user is None else user, canonical or name, () if port is None else port]
    again: Any = before
    config = _Config(again, False, canonical is not None, again is not None, getpass.getuser(), *given)
    for file in files:
        config.take(file)
    return config


async def _canonical(config: SSHConfig, name: str, look_up: LookUp | None) -> str | None:
    """The full name of a host that is given a short one, where CanonicalizeHostname says so."""
    wanted, domains = config.get("CanonicalizeHostname"), config.get("CanonicalDomains")
    if wanted not in (True, "always") or not isinstance(domains, list) or look_up is None:
        return None
    if wanted is True and (config.get("ProxyJump") or config.get("ProxyCommand")):
        return None
    if config.get("CanonicalizePermittedCNAMEs"):
        raise ConfigParseError("CanonicalizePermittedCNAMEs is not supported: name hosts in full")
    dots = config.get("CanonicalizeMaxDots", 1)
    if ":" in name or name.count(".") > (dots if isinstance(dots, int) else 1) or name.endswith("."):
        return None
    for domain in domains:
        try:
            await look_up(f"{name}.{domain}")
        except OSError:
            continue
        return f"{name}.{domain}"
    if config.get("CanonicalizeFallbackLocal") is False:
        raise ConfigParseError(f"CanonicalizeHostname: {name} is in none of {' '.join(map(str, domains))}")
    return None


@functools.lru_cache(maxsize=4096)
def _answers(command: str, holds: int) -> bool:
    del holds
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=EXEC_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigParseError(f"Match exec: {command!r} did not end within {EXEC_SECONDS:.0f} s") from None
    return done.returncode == 0


# -- one reading --------------------------------------------------------------------------------------

_EXPANDED = (
    "CertificateFile",
    "IdentityAgent",
    "IdentityFile",
    "ProxyCommand",
    "ProxyJump",
    "RevokedHostKeys",
    "UserKnownHostsFile",
)
"""Words whose values may hold tokens: `%h`, `%p`, `%r`…"""


class _Config(SSHClientConfig):
    """One reading of the files for one destination."""

    _handlers = {  # noqa: RUF012 - as in the class above it
        **SSHClientConfig._handlers,
        "stricthostkeychecking": ("StrictHostKeyChecking", SSHConfig._set_string),
        "hashknownhosts": ("HashKnownHosts", SSHConfig._set_bool),
        "revokedhostkeys": ("RevokedHostKeys", SSHConfig._set_string_list),
        "knownhostscommand": ("KnownHostsCommand", SSHConfig._set_string),
        "bindinterface": ("BindInterface", SSHConfig._set_string),
        "proxyusefdpass": ("ProxyUseFdpass", SSHConfig._set_bool),
    }

    def take(self, file: _File) -> None:
        """Take in one file; blocks of `Host` and `Match` end with it."""
        self._tokens = {"%": "%"}
        self._take(file, 0)

    def _take(self, file: _File, depth: int) -> None:
        if depth > DEEPEST:
            raise ConfigParseError(f"{file.path}: Include goes deeper than {DEEPEST} levels")
        for block in _text(file).worth_a_look(self._orig_host):
            head = block.head
            if head is None:
                holds = True
            elif head.word == "host":
                holds = bool(block.patterns.matches(self._orig_host))
            else:
                self._path, self._line_no = file.path, head.number
                holds = self._all_hold(list(head.args))
            for line in block.lines if holds else ():
                self._path, self._line_no = file.path, line.number
                if line.word == "include":
                    for one in _included(file, line):
                        self._take(one, depth + 1)
                elif line.word in self._handlers:
                    self._say(line.word, list(line.args))

    def _say(self, word: str, args: list[str]) -> None:
        option, handler = self._handlers[word]
        if not args:
            self._error(f"{option} has no value")
        if option == "ProxyCommand" and self._options.get("ProxyJump") is not None:
            return  # whichever of the two is said first wins
        if option == "ProxyJump" and self._options.get("ProxyCommand") is not None:
            return
        handler(self, option, args)
        if args:
            self._error(f"{option}: {' '.join(args)!r} is too much")

    def _error(self, reason: str) -> NoReturn:
        raise ConfigParseError(f"{self._path} line {self._line_no}: {reason}")

    def _all_hold(self, args: list[str]) -> bool:
        """Whether every condition of a `Match` holds; what follows one that does not is not asked."""
        holds = True
        while args:
            asked, _, value = args.pop(0).partition("=")
            denied, what = asked.startswith("!"), asked.lstrip("!").lower()
            if what == "final":
                self._final = bool(self._final)
            if what in ("all", "canonical", "final"):
                answer = {"all": True, "canonical": self._canonical, "final": bool(self._final)}[what]
            else:
                if not value and not args:
                    self._error(f"Match {what} has no value")
                value = value or args.pop(0)
                answer = holds and self._holds(what, value)
            holds = holds and answer is not denied
        return holds

    def _holds(self, what: str, value: str) -> bool:
        if what == "exec":
            self._set_tokens()
            command = self._expand_val(value)
            return _answers(command, int(time.monotonic() / EXEC_HOLDS))
        match what:
            case "host":
                subject = self._options.get("Hostname", self._orig_host)
            case "originalhost":
                subject = self._orig_host
            case "user":
                subject = self._options.get("User", self._local_user)
            case "localuser":
                subject = self._local_user
            case "tagged":
                subject = self._options.get("Tag", "")
            case _:
                self._error(f"Match {what} is not supported")
        return WildcardPatternList(value).matches(str(subject))

    def complete(self, name: str) -> None:
        """Put the tokens in, now that host, port and user are known. `name` is what was asked for."""
        self._set_tokens()
        alias = str(self._options.get("HostKeyAlias") or name)
        self._tokens |= {"n": name, "k": alias, "j": str(self._options.get("ProxyJump") or "")}
        for option in _EXPANDED:
            said = self._options.get(option)
            if isinstance(said, list):
                self._options[option] = [self._expand_val(str(one)) for one in said]
            elif isinstance(said, str):
                self._options[option] = self._expand_val(said)
        self.loaded = True
