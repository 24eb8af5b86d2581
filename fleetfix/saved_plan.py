"""A plan that was saved: what was announced on each host, and what the plan is bound to.

It is data. Whoever applies it loads the playbook and the inventory again, surveys every host again and
acts only where the new plan equals the saved one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from fleetfix.commands import Json, Risk, Value
from fleetfix.errors import PlanError
from fleetfix.events import ChangeShown
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.playbook import Step
from fleetfix.policy import Policy
from fleetfix.state import HostState, RunState

FORMAT = "fleetfix-plan"
VERSION = 1

GOOD_FOR = 900.0
"""Seconds, from the beginning of the survey, after which a plan is too old to act on."""

AHEAD = 60.0
"""Seconds by which the clock of another machine may be ahead."""

Time = Annotated[float, Field(allow_inf_nan=False)]


class Announced(Value):
    """One change that the plan announced: its identity, its risk, and how it was shown."""

    step: str
    key: str
    parts: tuple[str, ...] = ()
    risk: Risk
    summary: str

    def items(self) -> frozenset[str]:
        return announced(self.step, (self,))


class Group(Value):
    """Hosts on which the same was announced: a folded set, and the changes in order."""

    hosts: str
    changes: tuple[Announced, ...]


class SavedPlan(Value):
    """What a plan file holds. `made` and `expires` are seconds since the epoch."""

    format: Literal["fleetfix-plan"] = "fleetfix-plan"
    v: Literal[1] = 1
    run: str
    """The dry run that it came from."""
    playbook: str
    source: str
    digest: str
    """Of the playbook's text."""
    inventory: str
    hosts: tuple[str, ...]
    settings: dict[str, Json]
    policy: Policy
    binding: str
    """Of how each host is reached, and of its steps with every variable in place."""
    operator: str
    controller: str
    made: Time
    expires: Time
    plans: tuple[Group, ...]
    boots: dict[str, str]
    """The boot id of each host that answered."""

    def expected(self) -> dict[str, frozenset[str]]:
        """What was announced, by host; nothing where the survey gave the host up, or found it well."""
        known: dict[str, frozenset[str]] = dict.fromkeys(self.hosts, frozenset())
        for group in self.plans:
            items = frozenset().union(*(change.items() for change in group.changes))
            known |= dict.fromkeys(HostSet.parse(group.hosts), items)
        return known

    def refuse_unless_fresh(self, name: str, now: float) -> None:
        """Raise PlanError for a plan that is too old to act on. `name` is the file's."""
        again = f"make a new one: fleetfix plan {self.playbook} … --out {name}"
        if self.made > now + AHEAD:
            raise PlanError(f"{name} was made in the future, by this machine's clock", hint=again)
        if now > min(self.expires, self.made + GOOD_FOR):
            age = round(max(now - self.made, 60) / 60)
            raise PlanError(f"{name} is {age} min old; a plan is good for 15 min", hint=again)


def announced(step: str, changes: Iterable[ChangeShown | Announced]) -> frozenset[str]:
    """Everything that these changes of a step announce, in words that can be compared."""
    return frozenset(
        item
        for change in changes
        for item in (
            f"{step}: {change.key}, {change.risk}",
            *(f"{step}: {change.key}: {part}" for part in change.parts),
        )
    )


def difference(expected: frozenset[str], now: Mapping[str, tuple[ChangeShown, ...]]) -> str | None:
    """What a new plan, by step, has that was not announced, or has not that was; None where equal."""
    found: frozenset[str] = frozenset()
    for step, changes in now.items():
        for change in changes:
            items = announced(step, (change,))
            if items - expected:
                return f"now it would also {change.summary}"
            found |= items
    less = dict.fromkeys(item.partition(":")[0] for item in sorted(expected - found))
    return f"now there is less to do in {', '.join(less)}" if less else None


def save(state: RunState, binding: str) -> SavedPlan:
    """Make the plan of a dry run that has ended."""
    started = state.started
    assert started is not None
    hosts = [host for host in state.hosts.values() if host.pending and host.outcome == "pending"]
    alike: dict[tuple[Announced, ...], list[str]] = {}
    for host in hosts:
        alike.setdefault(_changes(host), []).append(host.name)
    return SavedPlan(
        run=state.run,
        playbook=started.playbook,
        source=started.source,
        digest=started.digest,
        inventory=started.inventory,
        hosts=started.hosts,
        settings=started.settings,
        policy=started.policy,
        binding=binding,
        operator=started.operator,
        controller=started.controller,
        made=state.began_at,
        expires=state.began_at + GOOD_FOR,
        plans=tuple(Group(hosts=str(HostSet(names)), changes=changes) for changes, names in alike.items()),
        boots={host.name: host.boot_id for host in state.hosts.values() if host.boot_id},
    )


def _changes(host: HostState) -> tuple[Announced, ...]:
    return tuple(
        Announced(step=step, key=change.key, parts=change.parts, risk=change.risk, summary=change.summary)
        for step, state in host.steps.items()
        if state.planned is not None and state.planned.pending
        for change in state.planned.changes
    )


def binding_of(hosts: Iterable[Host], steps: Mapping[str, tuple[Step, ...]]) -> str:
    """Digest how hosts are reached and what their steps are, with every variable in place."""
    digest = hashlib.sha256()
    dumps: dict[int, str] = {}
    for host in hosts:
        own = steps[host.name]
        if id(own) not in dumps:
            dumps[id(own)] = _plain(
                [{"kind": step.act.kind, **step.model_dump(mode="json", by_alias=True)} for step in own]
            )
        reached = _plain(host.model_dump(mode="json", exclude={"vars", "connect_timeout"}))
        digest.update(f"{reached}\0{dumps[id(own)]}\0".encode())
    return digest.hexdigest()


# -- the text of a plan file ------------------------------------------------------------------------


def written(plan: SavedPlan) -> str:
    """The text of a plan file, with a seal over all of it."""
    value = plan.model_dump(mode="json")
    return json.dumps(value | {"seal": _seal(value)}, indent=1) + "\n"


def read(text: str, name: str) -> SavedPlan:
    """Read a plan file's text. PlanError says in one line why it cannot be used; `name` is the file's."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # a nest so deep that nobody wrote it
        value = None
    if not is_plan(value):
        raise PlanError(
            f"{name} is no plan of fleetfix", hint="fleetfix plan PLAYBOOK … --out FILE makes one"
        )
    if value.get("v") != VERSION:
        raise PlanError(
            f"{name} was written by another version of fleetfix (format {value.get('v')!r})",
            hint="apply it with that one, or make a new plan",
        )
    if value.pop("seal", None) != _seal(value):
        raise PlanError(f"{name} was changed after it was written", hint="make a new plan")
    try:
        return SavedPlan.model_validate(value)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise PlanError(f"{name} is damaged: {where}", hint="make a new plan") from None


def is_plan(value: object) -> bool:
    """Whether a JSON value says of itself that it is a plan file."""
    return isinstance(value, dict) and value.get("format") == FORMAT


def _seal(value: Json) -> str:
    return hashlib.sha256(_plain(value).encode()).hexdigest()


def _plain(value: Json) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
