"""Conduct a run from its order to its exit code: read, bind, ask, run, show."""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fleetfix.cli import config, consent, secret_sources
from fleetfix.cli.descriptors import room_for
from fleetfix.cli.driving import drive
from fleetfix.cli.places import jumps_of, lasting_name, load_inventory
from fleetfix.cli.show import Show
from fleetfix.cli.state_dir import state_dir
from fleetfix.cli.tripped import refuse_while_tripped
from fleetfix.cli.whole_file import require_place, write_whole
from fleetfix.cohorts import neighbours
from fleetfix.commands import Json, Seconds
from fleetfix.engine.fleetrun import Request
from fleetfix.errors import DocumentError, PlaybookError, UsageError
from fleetfix.events import one_machine
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host, Inventory
from fleetfix.journal import Journal
from fleetfix.playbook import Playbook, Step, load
from fleetfix.policy import Policy
from fleetfix.runs import new_run_id
from fleetfix.saved_plan import FORMAT, binding_of, save, written
from fleetfix.spelling import hint_for
from fleetfix.state import RunState
from fleetfix.views.amounts import when
from fleetfix.views.grouping import group


@dataclass(frozen=True)
class Order:
    """A run as the command line asks for it."""

    playbook: str
    hosts: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    inventory: str | None = None
    settings: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    """`NAME=SOURCE` of each."""
    policy: Mapping[str, object] = field(default_factory=dict)
    dry: bool = False
    reason: str = ""
    lock_wait: float = 0.0


@dataclass(frozen=True)
class Manner:
    """How a run is shown and agreed to."""

    diff: bool = False
    json: bool = False
    plain: bool = False
    """Progress as lines, at a terminal too."""
    yes: bool = False
    yes_hosts: int | None = None
    detailed_exit: bool = False
    detach: bool = False
    """The run goes on in a process of its own."""
    out: Path | None = None
    """Where the plan of a dry run is saved."""


def conduct(order: Order, manner: Manner) -> int:
    """Do what an order says; returns the exit code."""
    request = prepare(order)
    if manner.out is not None:
        require_place(manner.out, "plan of fleetfix", lambda head: FORMAT in head)
    return carry_out(request, manner)


def carry_out(request: Request, manner: Manner) -> int:
    """Ask, run and show what was prepared; returns the exit code."""
    request = with_room(request)
    above = config.load().confirm_above
    asked = request.may_change and consent.required(
        f"run {request.playbook.name}",
        HostSet(host.name for host in request.hosts),
        yes=manner.yes,
        yes_hosts=manner.yes_hosts,
        above=above,
        or_else="" if request.plan else "--dry-run to see the plan",
    )
    if manner.detach:
        from fleetfix.cli.detached import begin

        return begin(request, manner, ask_above=above if asked else None)
    with Journal.open(state_dir()) as journal, journal.drive(request.run):
        refuse_while_tripped(journal, request)
        show = Show(json=manner.json, diff=manner.diff, plain=manner.plain)
        try:
            state = asyncio.run(
                drive(
                    request,
                    journal,
                    show,
                    ask_above=above if asked else None,
                    detailed_exit=manner.detailed_exit,
                )
            )
        finally:
            show.close()
    return show.end(state, _save(request, state, manner.out))


def with_room(request: Request) -> Request:
    """The request with as many forks as this process may have files open for. Raises UsageError."""
    policy = request.policy
    forks = room_for(request.hosts, policy.forks, kept=not request.dry)
    return replace(request, policy=policy.model_copy(update={"forks": forks}))


def _save(request: Request, state: RunState, out: Path | None) -> str:
    """Save the plan of a dry run; returns the line that says so. One cut short is no plan."""
    if out is None or state.interrupted:
        return ""
    plan = save(state, binding_of(request.hosts, request.steps))
    write_whole(out, written(plan))
    return f"saved in {out}, good until {when(plan.expires)}: fleetfix apply {out}"


def prepare(order: Order) -> Request:
    """Read and bind everything that an order names; whatever is wrong with it is said here."""
    playbook = load(order.playbook)
    settings = read_settings(order.settings)
    inventory = load_inventory(order.inventory)
    hosts = inventory.select(order.hosts, order.exclude)
    secret_sources.hold(order.secrets, playbook)
    secret_sources.hold_become_password(hosts)
    policy = merged(playbook.policy, order.policy)
    _require_strata(policy, hosts)
    request = Request(
        run=new_run_id(playbook.name, datetime.now(UTC)),
        playbook=playbook,
        hosts=hosts,
        steps=bind(playbook, hosts, settings, inventory),
        policy=policy,
        inventory=lasting_name(inventory),
        settings=settings,
        dry=order.dry,
        operator=operator(),
        controller=socket.gethostname(),
        reason=order.reason,
        others=neighbours(inventory.hosts.values(), hosts),
        jumps=jumps_of(hosts),
        machine=machine(),
        driver=driver(),
        lock_wait=order.lock_wait,
    )
    return secret_sources.sealed(request)


def _require_strata(policy: Policy, hosts: Iterable[Host]) -> None:
    """A variable that no host has divides nothing, and would leave strata without a canary unseen."""
    known = {name for host in hosts for name in host.vars}
    for name in policy.strata:
        if name not in known:
            raise PlaybookError(
                f"policy.strata names {name}, and no host of the run has a variable of that name",
                hint=hint_for(name, known) or f"give hosts or groups of the inventory vars: {{{name}: …}}",
            )


def bind(
    playbook: Playbook, hosts: Iterable[Host], settings: Mapping[str, Json], inventory: Inventory
) -> dict[str, tuple[Step, ...]]:
    """Bind the playbook to every host; all hosts' complaints at once, equal ones folded."""
    playbook.check_settings(settings)

    @cache
    def named(pattern: str) -> frozenset[str]:
        return frozenset(host.name for host in inventory.select(pattern))

    steps: dict[str, tuple[Step, ...]] = {}
    complaints: list[tuple[str, str]] = []
    for host in hosts:
        try:
            steps[host.name] = playbook.bind(host, settings, named)
        except (DocumentError, PlaybookError) as error:
            complaints.append((host.name, error.message))
    if complaints:
        lines = (line for one in group(complaints) for line in one.text.split("\n"))
        raise DocumentError(tuple(dict.fromkeys(lines)))
    return steps


def read_settings(words: Iterable[str]) -> dict[str, Json]:
    """Read `key=value` words; values are read as YAML reads them."""
    from fleetfix.documents import value_of

    settings: dict[str, Json] = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or not key.strip():
            raise UsageError(
                f"--set {word!r} is not KEY=VALUE", hint="for example --set venv=/opt/train/venv"
            )
        if key.strip() in settings:
            raise UsageError(f"--set gives {key.strip()} twice")
        try:
            settings[key.strip()] = value_of(value)
        except DocumentError as error:
            raise UsageError(f"--set {word!r}: {error.complaints[0].partition(': ')[2]}") from None
    return settings


def merged(policy: Policy, given: Mapping[str, object]) -> Policy:
    """The playbook's policy with what the command line says instead."""
    values = {name: getattr(policy, name) for name in Policy.model_fields}
    try:
        return Policy.model_validate(values | dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-")
        why = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"--{name} {first['input']!r}: {why}") from None


def seconds_of(option: str, text: str | None) -> float:
    """The seconds that an option of a time means: `90`, `90s`, `10m`; 0 where it is not given."""
    if text is None:
        return 0.0
    try:
        found = TypeAdapter(Seconds).validate_python(text)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(f"{option} {text!r}: {why}") from None
    return float(found)


def machine() -> str:
    """The machine that this runs on, as events name one; empty where it has no such name."""
    return one_machine(_line("/etc/machine-id"), _line("/proc/sys/kernel/random/boot_id"))


def driver() -> str:
    """Name the journal of this machine that a run is driven from, which one process at a time can do."""
    place = "\0".join((socket.gethostname(), _line("/etc/machine-id"), str(state_dir().resolve())))
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def _line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def operator() -> str:
    """Who asks: the user, also behind sudo."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    behind = os.environ.get("SUDO_USER")
    return f"{behind} as {user}" if behind and behind != user else user
