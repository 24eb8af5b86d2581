"""Toy actions and checks over scripted hosts: a host is a world of switches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from fleetfix.action import Action, Check, Measurement, Plan, Planned, Probe, Verdict
from fleetfix.commands import Altered, Call, Change, Json, Read, Risk
from fleetfix.engine.context import Request
from fleetfix.engine.fleet import Choose
from fleetfix.engine.fleetrun import Consent, Interrupts, resume_fleet, run_fleet
from fleetfix.events import Event, Record
from fleetfix.inventory import Host
from fleetfix.playbook import Playbook, Step
from fleetfix.policy import Policy, Share
from fleetfix.recorder import Recorder
from fleetfix.runs import BreakerRow
from fleetfix.state import RunState, fold, to_take_up
from fleetfix.transports.scripted import Fleet, ScriptedHost, World


class Switch(Action[Any]):
    """A switch of the world stands where it should."""

    kind: ClassVar[str] = "switch"
    modules: ClassVar[tuple[str, ...]] = ()
    name: str
    on: bool = True
    risk: Risk = "reversible"
    alters: tuple[Altered, ...] = ()
    key: str = ""
    job: Literal["", "stops", "starts"] = ""
    waits: bool = False
    follows: str = ""
    """The step whose plan brings this switch out of place."""

    def probe(self) -> Probe[Any]:
        (reply,) = yield (Read(function="toy.get", args={"name": self.name}),)
        return reply.answer()

    def plan(self, facts: Any) -> Plan:
        if facts == "no":
            return Plan(blocked=f"{self.name} says no")
        return Plan() if facts == self.on else self._move(facts)

    def foresee(self, facts: Any, planned: Planned) -> Plan:
        if self.follows and planned.get(self.follows):
            return self._move(not self.on)
        return self.plan(facts)

    def _move(self, was: Any) -> Plan:
        change = Change(
            key=self.key or self.name,
            summary=f"turn {self.name} {'on' if self.on else 'off'}",
            do=(Call(function="toy.set", args={"name": self.name, "to": self.on}),),
            undo=(Call(function="toy.set", args={"name": self.name, "to": was}),),
            commit=(Call(function="toy.commit", args={"name": self.name}),),
            risk=self.risk,
            alters=self.alters,
            job=self.job,
            waits=self.waits,
        )
        return Plan(changes=(change,))


class Once(Action[Any]):
    """A bell that is rung by its author's word: nothing tells whether it rang."""

    kind: ClassVar[str] = "once"
    modules: ClassVar[tuple[str, ...]] = ()
    name: str

    @property
    def converges(self) -> bool:
        return False

    def probe(self) -> Probe[Any]:
        return None
        yield

    def plan(self, facts: Any) -> Plan:
        ring = (Call(function="toy.ring", args={"name": self.name}),)
        change = Change(key=self.name, summary=f"ring {self.name}", do=ring, risk="irreversible")
        return Plan(changes=(change,))


class Lit(Check[Any]):
    """A lamp of the world is lit. None is unknown, a float is a rate."""

    kind: ClassVar[str] = "lit"
    modules: ClassVar[tuple[str, ...]] = ()
    name: str

    def probe(self) -> Probe[Any]:
        (reply,) = yield (Read(function="toy.get", args={"name": self.name}),)
        return reply.value

    def judge(self, facts: Any) -> Verdict:
        if facts is None:
            return Verdict(result="unknown", reason=f"{self.name} cannot be seen")
        return Verdict(result="pass" if facts else "fail", reason=f"{self.name} is {facts}")


class Fast(Lit):
    """A speed: at least 10."""

    kind: ClassVar[str] = "fast"
    unproven: ClassVar[bool] = True

    @property
    def makes_baseline(self) -> bool:
        return True

    def judge(self, facts: Any) -> Verdict:
        if facts == "from zero":
            return Verdict(result="fail", reason="from zero", unsound=True)
        rate = Measurement(job="toy", rate=float(facts), scope="global", noise=0.0, steps=20)
        result = "pass" if facts >= 10 else "fail"
        return Verdict(result=result, reason=f"{facts}", measured=rate)


TOY = Playbook(
    name="toy", summary="toys", source="toy.yaml", digest="0", text="", vars={}, policy=Policy(), steps=()
)


def step(id: str, act: Switch | Lit | Once, **controls: Any) -> Step:
    return Step(id=id, name=id, act=act, **{"on_failure": "rollback", **controls})


def toy_host(**world: Any) -> ScriptedHost:
    host = ScriptedHost(dict(world))
    host.on("toy.get", lambda args, world: world.get(args["name"]))
    host.on("toy.set", _set)
    host.on("toy.commit", None)
    host.on("evidence.take", {"packed": "", "cut": False, "lacks": "a toy has none"})
    host.on("toy.ring", _ring)
    return host


def _ring(args: dict[str, Json], world: World) -> None:
    world[args["name"]] = world.get(args["name"], 0) + 1


def _set(args: dict[str, Json], world: World) -> None:
    world[args["name"]] = args["to"]


class HandClock:
    """Time that passes only when somebody sleeps, and then at once."""

    def __init__(self) -> None:
        self.time = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
        await asyncio.sleep(0)


class Shelf:
    """A journal that is a list."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.fails_at: int | None = None
        self.trips: dict[str, BreakerRow] = {}
        self.kept: dict[tuple[str, str, str], bytes] = {}
        """Evidence, by host, step and name."""

    def append(self, records: Sequence[Record]) -> None:
        self.records += records

    def head(self, run: str) -> str:
        return f"{len(self.records)}:{run}"

    def baseline(self, job: str) -> Measurement | None:
        del job
        return None

    def keep_evidence(self, run: str, host: str, step: str, files: Mapping[str, bytes]) -> str:
        self.kept.update({(host, step, name): content for name, content in files.items()})
        return f"/kept/{run}/{host}/{step}"

    def tripped(self, inventory: str) -> BreakerRow | None:
        return self.trips.get(inventory)

    @property
    def events(self) -> list[Event]:
        return [record.event for record in self.records]

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.kind == kind]


def request(
    hosts: Sequence[str],
    steps: Sequence[Step],
    *,
    run: str = "20260101-000000-toy-aaaa",
    policy: Policy | None = None,
    dry: bool = False,
    steps_of: Mapping[str, Sequence[Step]] | None = None,
    machine: str = "",
    expected: Mapping[str, frozenset[str]] | None = None,
    variables: Mapping[str, dict[str, Json]] | None = None,
    lock_wait: float = 0.0,
) -> Request:
    policy = policy or Policy(canary=1, batch=(Share.parse("100%"),), max_unreachable=Share.parse("100%"))
    return Request(
        run=run,
        playbook=TOY,
        hosts=tuple(
            Host(name=name, address=name, transport="scripted", vars=(variables or {}).get(name, {}))
            for name in hosts
        ),
        steps={name: tuple((steps_of or {}).get(name, steps)) for name in hosts},
        policy=policy,
        inventory="inline",
        settings={},
        dry=dry,
        operator="ann",
        controller="here",
        machine=machine,
        expected=expected,
        lock_wait=lock_wait,
    )


async def play(
    fleet: Fleet,
    steps: Sequence[Step],
    *,
    shelf: Shelf | None = None,
    clock: HandClock | None = None,
    interrupts: Interrupts | None = None,
    consent: Consent | None = None,
    choose: Choose | None = None,
    **asked: Any,
) -> tuple[RunState, Shelf]:
    """Run toy steps over a scripted fleet, to the end."""
    shelf = shelf or Shelf()
    asked_for = request(tuple(fleet), steps, **asked)
    recorder = Recorder(asked_for.run, shelf, clock=lambda: 0.0)
    with fleet:
        state = await run_fleet(
            asked_for,
            recorder,
            shelf,
            interrupts=interrupts or Interrupts(),
            clock=clock or HandClock(),
            consent=consent,
            choose=choose,
        )
    return state, shelf


async def resume(
    fleet: Fleet,
    steps: Sequence[Step],
    shelf: Shelf,
    *,
    hosts: Sequence[str] | None = None,
    elsewhere: bool = False,
    clock: HandClock | None = None,
    interrupts: Interrupts | None = None,
    consent: Consent | None = None,
    **asked: Any,
) -> RunState:
    """Take a run up again from its journal; `elsewhere` from none, by what the hosts say."""
    shelf = Shelf() if elsewhere else shelf
    state = fold(shelf.records)
    names = hosts if hosts is not None else tuple(fleet) if elsewhere else to_take_up(state)
    asked_for = request(names, steps, **asked)
    recorder = Recorder(asked_for.run, shelf, state=state, seq=len(shelf.records), clock=lambda: 0.0)
    with fleet:
        return await resume_fleet(
            asked_for,
            recorder,
            shelf,
            interrupts=interrupts or Interrupts(),
            clock=clock or HandClock(),
            consent=consent,
        )
