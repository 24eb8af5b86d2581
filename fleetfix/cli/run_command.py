"""Conduct `exec` from its order to its exit code: what is run, on whom, and what is shown of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from fleetfix.cli import config, consent, secret_sources, streams
from fleetfix.cli.conduct import operator
from fleetfix.cli.descriptors import room_for
from fleetfix.cli.places import lasting_name, load_inventory
from fleetfix.cli.signals import heard
from fleetfix.cli.state_dir import state_dir
from fleetfix.commands import Execute, read_seconds
from fleetfix.domain.masking import masked
from fleetfix.engine.context import Interrupts
from fleetfix.engine.execute import PLAYBOOK, CommandRequest, run_command
from fleetfix.errors import UsageError
from fleetfix.events import HostFinished, Record
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.journal import Journal
from fleetfix.policy import Policy
from fleetfix.recorder import Recorder
from fleetfix.runs import new_run_id
from fleetfix.secret_values import BECOME, mask
from fleetfix.session import Feed, Stream
from fleetfix.state import RunState
from fleetfix.views.command import Gathered, Live, command_summary, waits_for
from fleetfix.views.fit import fit
from fleetfix.views.out import Out
from fleetfix.views.paint import Paint

LARGEST_SCRIPT = 4 << 20
PROGRESS_SECONDS = 10.0
QUIET = 30.0
"""Seconds without any output after which it is said who is waited for."""


@dataclass(frozen=True)
class Order:
    """A command as the command line asks for it."""

    words: tuple[str, ...]
    hosts: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    inventory: str | None = None
    gather: bool = False
    script: str | None = None
    stdin: str | None = None
    timeout: str | None = None
    secrets: tuple[str, ...] = ()
    forks: int | None = None
    become: bool | None = None
    yes_hosts: int | None = None
    reason: str = ""
    json: bool = False


def conduct(order: Order) -> int:
    """Do what an order says; returns the exit code."""
    given = secret_sources.parse(order.secrets)
    command = _command(order).model_copy(
        update={"secrets": tuple(name for name in given if name != BECOME)}
    )
    inventory = load_inventory(order.inventory)
    hosts = tuple(_as_asked(host, order.become) for host in inventory.select(order.hosts, order.exclude))
    secret_sources.hold_given(given)
    secret_sources.hold_become_password(hosts)
    _refuse_secrets_openly(command)
    above = config.load().confirm_above
    chosen = HostSet(host.name for host in hosts)
    if (order.yes_hosts is not None or len(hosts) > above) and consent.required(
        PLAYBOOK, chosen, yes=False, yes_hosts=order.yes_hosts, above=above
    ):
        question = consent.Question(f"run `{_said(order)}` on", chosen, above=above)
        if not consent.ask(question):
            raise UsageError("not confirmed; nothing was run")
    with _input(order.stdin) as feed, Journal.open(state_dir()) as journal:
        request = CommandRequest(
            run=new_run_id(PLAYBOOK, datetime.now(UTC)),
            command=command,
            said=_said(order),
            hosts=hosts,
            inventory=lasting_name(inventory),
            operator=operator(),
            controller=socket.gethostname(),
            forks=room_for(hosts, order.forks or Policy().forks, kept=False),
            reason=order.reason,
            feed=feed,
        )
        with journal.drive(request.run):
            show = Show(order, request)
            try:
                state = asyncio.run(_run(request, journal, show))
            finally:
                show.close()
    return show.end(state)


def _command(order: Order) -> Execute:
    fed = order.stdin is not None
    try:
        timeout = None if order.timeout is None else read_seconds(order.timeout)
    except ValueError:
        timeout = -1.0
    if timeout is not None and not 0 < timeout < 1e9:
        raise UsageError(f"--timeout {order.timeout!r} is no time", hint="for example 90s or 5m")
    if order.script is not None:
        return Execute(argv=order.words, script=_script(order.script), fed=fed, timeout=timeout)
    if not " ".join(order.words).strip():
        raise UsageError("no command is given", hint="fleetfix exec --hosts 'gpu[01-16]' -- uptime")
    return Execute(argv=("/bin/sh", "-c", " ".join(order.words)), fed=fed, timeout=timeout)


def _refuse_secrets_openly(command: Execute) -> None:
    """The hosts' lists of processes show a command to every user there."""
    openly = "\n".join((*command.argv, (command.script or b"").decode(errors="replace")))
    known = mask()
    if known is not None and known.finds(openly):
        raise UsageError(
            "the value of a secret stands openly in the command",
            hint='give it by --secret NAME=SOURCE; in single quotes, "$NAME" is left to the hosts to read',
        )


def _script(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST_SCRIPT + 1)
    except OSError as error:
        raise UsageError(f"--script {path}: {(error.strerror or str(error)).lower()}") from error
    if len(data) > LARGEST_SCRIPT:
        raise UsageError(
            f"--script {path} is larger than {LARGEST_SCRIPT >> 20} MiB", hint="give data by --stdin"
        )
    return data


def _said(order: Order) -> str:
    script = () if order.script is None else (order.script,)
    return masked(" ".join((*script, *order.words)))


def _as_asked(host: Host, become: bool | None) -> Host:
    return host if become is None else host.model_copy(update={"become": become})


@contextmanager
def _input(path: str | None) -> Iterator[Feed | None]:
    """The input of every host, read by each at its own pace; what can be read only once is kept first."""
    if path is None:
        yield None
        return
    with _opened(path) as source, tempfile.TemporaryFile() as kept:
        number = source.fileno()
        if path == "-" or not os.path.isfile(path):
            shutil.copyfileobj(source, kept)
            kept.flush()
            number = kept.fileno()
        yield lambda offset, most: os.pread(number, most, offset)


def _opened(path: str) -> BinaryIO:
    if path == "-":
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise UsageError(f"--stdin {path}: {(error.strerror or str(error)).lower()}") from error


async def _run(request: CommandRequest, journal: Journal, show: Show) -> RunState:
    interrupts = Interrupts()
    recorder = Recorder(request.run, journal, (show,))

    async def take(host: str, stream: Stream, data: bytes) -> None:
        if interrupts.times and streams.left():
            return  # nobody reads: what is on its way goes nowhere
        await show.take(host, stream, data)
        if streams.left() and not interrupts.times:
            interrupts.interrupt("SIGPIPE")

    progress = asyncio.ensure_future(show.progress(recorder))
    try:
        with heard(interrupts.interrupt):
            return await run_command(request, recorder, take, interrupts=interrupts)
    finally:
        progress.cancel()


class Show:
    """What `exec` shows: output on the streams it came on, results on stderr; or JSON alone."""

    def __init__(self, order: Order, request: CommandRequest) -> None:
        self._json = order.json
        self._said_at = time.monotonic()
        names = [host.name for host in request.hosts]
        self._outs: dict[Stream, Out] = {"out": Out(sys.stdout), "err": Out(sys.stderr)}
        ends: dict[Stream, bool] = {"out": sys.stdout.isatty(), "err": sys.stderr.isatty()}
        self._gathered = Gathered(len(names)) if order.gather or order.json else None
        self._live = Live(
            names,
            self._outs,
            {
                "out": Paint.for_stream(sys.stdout, os.environ),
                "err": Paint.for_stream(sys.stderr, os.environ),
            },
            aligned=ends,
        )

    async def take(self, host: str, stream: Stream, data: bytes) -> None:
        """Take a piece of a host's output, as fast as it can be shown."""
        self._said_at = time.monotonic()
        await (self._gathered or self._live).take(host, stream, data)

    def see(self, record: Record, state: RunState) -> None:
        """Show what is due once a host has ended."""
        if not isinstance(record.event, HostFinished):
            return
        if self._json and self._gathered is not None:
            self._outs["out"].whole(self._gathered.json_line(state.hosts[record.event.host]))
        else:
            self._live.end(record.event.host)

    async def progress(self, recorder: Recorder) -> None:
        """Say from time to time who has not ended, where the output does not tell."""
        while not self._json:
            await asyncio.sleep(PROGRESS_SECONDS)
            if self._gathered is not None or time.monotonic() - self._said_at >= QUIET:
                self._said_at = time.monotonic()
                self._outs["err"].line(waits_for(recorder.state))

    def close(self) -> None:
        for out in self._outs.values():
            out.close()

    def end(self, state: RunState) -> int:
        """Show what was gathered, and every host's result; returns the exit code."""
        code = 70 if state.exit is None else state.exit
        if self._gathered is not None and not self._json:
            for stream, file in (("out", sys.stdout), ("err", sys.stderr)):
                for block in self._gathered.blocks("out" if stream == "out" else "err"):
                    print(block, file=file)
            sys.stdout.flush()
        # Nothing else has what hosts have printed: where it is lost, not all is well.
        unwritten = code == 0 and bool(streams.lost())
        if not self._json or code or unwritten:
            paint = Paint.for_stream(sys.stderr, os.environ)
            told = command_summary(state, 1 if unwritten else code, paint, unwritten=unwritten)
            print(fit(told, sys.stderr), file=sys.stderr)
        return 1 if unwritten else code
