"""Toy hosts with one job over all of them: it runs on all or on none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

from fleetfix.action import Action, Plan, Planned, Probe, Span
from fleetfix.commands import Call, Change, Json, Read
from fleetfix.errors import Failure, HostError
from fleetfix.transports.scripted import Fleet, ScriptedHost
from tests.engine.toys import Lit, Switch, step


class Stop(Action[Any]):
    """The job of the host is stopped, so that it can be started again."""

    kind: ClassVar[str] = "toy_stop"
    modules: ClassVar[tuple[str, ...]] = ()
    nodes: int = 2

    def probe(self) -> Probe[Any]:
        (reply,) = yield (Read(function="toy.get", args={"name": "job"}),)
        return reply.value

    def plan(self, facts: Any) -> Plan:
        spans = (Span(id="llama", at="gpu01:1", nodes=self.nodes),) if self.nodes > 1 else ()
        if facts != "running":
            return Plan(
                blocked="the job is odd" if facts == "odd" else None, spans=spans if facts == "odd" else ()
            )
        capture = Change(
            key="stop",
            summary="capture",
            do=(Call(function="job.capture"),),
            undo=(Call(function="job.restore"),),
            risk="reversible",
            job="captures",
        )
        change = Change(
            key="stop",
            summary="stop the job",
            do=(Call(function="job.stop"),),
            undo=(Call(function="job.end" if self.nodes > 1 else "job.restore"),),
            risk="compensable",
            job="stops",
            together=True,
            prepare=capture,
        )
        return Plan(changes=(change,), spans=spans)


class Train(Action[Any]):
    """What was stopped runs again."""

    kind: ClassVar[str] = "toy_train"
    modules: ClassVar[tuple[str, ...]] = ()

    def probe(self) -> Probe[Any]:
        (reply,) = yield (Read(function="toy.get", args={"name": "job"}),)
        return reply.value

    def plan(self, facts: Any) -> Plan:
        return Plan(changes=(self._start(),)) if facts == "stopped" else Plan()

    def foresee(self, facts: Any, planned: Planned) -> Plan:
        return Plan(changes=(self._start(),)) if planned.get("stop") else self.plan(facts)

    def _start(self) -> Change:
        return Change(
            key="start",
            summary="start the job",
            do=(Call(function="job.start"),),
            undo=(Call(function="job.unstart"),),
            risk="compensable",
            job="starts",
            together=True,
        )


STEPS = [
    step("stop", Stop(), when_pending=("mend",), barrier=True),
    step("mend", Switch(name="sound")),
    step("train", Train(), barrier=True),
    step("lamp", Lit(name="lamp"), when_changed=("mend",)),
]


class Cluster:
    """Hosts with one job over all of them: it runs on all or on none, and each start needs all others."""

    turns: int | None = None
    """Turns of the event loop after which a launcher has waited for all others in vain; None: 0.2 s."""

    def __init__(self, *names: str, broken: tuple[str, ...] = ("gpu01",)) -> None:
        self.told: list[tuple[str, str]] = []
        self.starting: set[str] = set()
        self.together = asyncio.Event()
        self.hosts = {
            name: ScriptedHost(
                {"job": "running", "captured": False, "sound": name not in broken, "lamp": True}
            )
            for name in names
        }
        for name, host in self.hosts.items():
            host.on("toy.get", lambda args, world: world.get(args["name"]))
            host.on("toy.set", self._set(name))
            host.on("toy.commit", None)
            for function in ("capture", "stop", "end", "restore", "start", "unstart"):
                host.on(f"job.{function}", getattr(self, f"_{function}")(name))

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.hosts)

    def jobs(self) -> dict[str, str]:
        return {name: host.world["job"] for name, host in self.hosts.items()}

    def did(self, what: str) -> list[str]:
        return [name for name, done in self.told if done == what]

    def first(self, what: str) -> int:
        return next(place for place, (_, done) in enumerate(self.told) if done == what)

    def last(self, what: str) -> int:
        return max(place for place, (_, done) in enumerate(self.told) if done == what)

    def _set(self, name: str) -> Callable[..., None]:
        def set_(args: dict[str, Json], world: dict[str, Any]) -> None:
            self.told.append((name, f"{args['name']} {args['to']}"))
            world[args["name"]] = args["to"]

        return set_

    def _capture(self, name: str) -> Callable[..., None]:
        def capture(args: dict[str, Json], world: dict[str, Any]) -> None:
            if world["job"] != "running":
                raise HostError(Failure(kind="stale_plan", message="the job ended by itself"))
            self.told.append((name, "capture"))
            world["captured"] = True

        return capture

    def _stop(self, name: str) -> Callable[..., None]:
        def stop(args: dict[str, Json], world: dict[str, Any]) -> None:
            assert world["captured"] or len(self.hosts) == 1
            self.told.append((name, "stop"))
            for host in self.hosts.values():
                host.world["job"] = "stopped"

        return stop

    def _end(self, name: str) -> Callable[..., None]:
        """A stop that was cut short is seen through."""

        def end(args: dict[str, Json], world: dict[str, Any]) -> None:
            self.told.append((name, "end"))
            for host in self.hosts.values():
                host.world["job"] = "stopped"

        return end

    def _start(self, name: str) -> Callable[..., Any]:
        return self._together(name, "start")

    def _restore(self, name: str) -> Callable[..., Any]:
        return self._together(name, "restore")

    def _together(self, name: str, what: str) -> Callable[..., Any]:
        """A launcher waits for all others; one that waits in vain gives up."""

        async def start(args: dict[str, Json], world: dict[str, Any]) -> Any:
            if world["job"] == "running":
                return None
            self.told.append((name, what))
            self.starting.add(name)
            if self.starting == set(self.hosts):
                for host in self.hosts.values():
                    host.world["job"] = "running"
                self.together.set()
            if not await self._all_came():
                self.starting.discard(name)
                return Failure(kind="command", message="the others did not come")
            self.starting.clear()
            self.together = asyncio.Event()
            return None

        return start

    async def _all_came(self) -> bool:
        together = self.together
        if self.turns is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(together.wait(), 0.2)
        for _ in range(self.turns or 0):
            if together.is_set():
                break
            await asyncio.sleep(0)
        return together.is_set()

    def _unstart(self, name: str) -> Callable[..., None]:
        def unstart(args: dict[str, Json], world: dict[str, Any]) -> None:
            self.told.append((name, "unstart"))
            for host in self.hosts.values():
                host.world["job"] = "stopped"

        return unstart
