"""Cohorts on the way back, later: which hosts of a rollback belong together, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from fleetfix.commands import Json
from fleetfix.engine.context import Slots
from fleetfix.engine.member import not_without
from fleetfix.engine.rollback import InTurn, steps_of
from fleetfix.engine.unit import Unit
from fleetfix.errors import Failure
from fleetfix.hostset import HostSet
from fleetfix.state import RunState


@dataclass
class Company:
    """The cohorts among the hosts that a run is taken back on.

    The journal knows them; where it has not the run, each host has a note of its own.
    """

    journal: RunState
    """The run as the journal knows it."""
    state: Callable[[], RunState]
    """How it is now, on the hosts that go back."""
    hosts: frozenset[str]
    slots: Slots
    _units: dict[tuple[str, ...], Unit] = field(default_factory=dict)
    _steps: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    _over: dict[str, tuple[frozenset[str], frozenset[str]] | None] = field(default_factory=dict)
    """Who has ended, with the steps that stand there and those that stopped its job; None where nothing is
    known of it."""

    _cannot: dict[str, str] = field(default_factory=dict)
    """Why a host cannot go back, by its name; empty where it can."""
    _heard: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def known(self) -> bool:
        """Whether the journal has the run, so that no host need be asked."""
        return self.journal.started is not None

    def cohort_of(self, host: str, note: Json) -> tuple[str, ...]:
        """All hosts of the cohort that a host is in; empty where it is in none."""
        cohorts = self.journal.cohorts
        name = cohorts.get(host)
        if name is not None:
            return tuple(one for one, its in cohorts.items() if its == name)
        hosts = note.get("hosts") if isinstance(note, dict) else None
        return tuple(map(str, hosts)) if isinstance(hosts, list) else ()

    def absent(self, cohort: tuple[str, ...]) -> HostSet:
        """The members that are not among the hosts and have, or may have, something to undo."""
        known = self.journal.hosts
        return HostSet(
            name for name in cohort if name not in self.hosts and (name not in known or known[name].changes)
        )

    async def agreed(self, host: str, cohort: tuple[str, ...], cannot: str) -> str:
        """Wait, without a slot, until all members that are reached have said whether they can go back; why
        none does, where one cannot."""
        self._cannot[host] = cannot
        self._tell()
        async with self.slots.given_back():
            while any(one in self.hosts and one not in self._cannot | self._over for one in cohort):
                await self._heard.wait()
        if cannot:
            return cannot
        return next((f"{one} of its cohort {why}" for one in cohort if (why := self._cannot.get(one))), "")

    def _tell(self) -> None:
        self._heard.set()
        self._heard = asyncio.Event()

    def in_turn(
        self, host: str, cohort: tuple[str, ...], note: Json, say: Callable[[str, str], None]
    ) -> InTurn:
        """What a host of a cohort waits for before it undoes a step."""
        unit = self._unit(cohort, note)
        steps = self._steps[cohort]

        async def wait(step: str, captures: bool, stops: bool) -> Failure | None:
            place = steps.index(step) if step in steps else 0
            lost = await unit.until_back(
                host,
                step,
                place,
                lambda text: say(step, f"waits {text}"),
                captures=captures,
                stops=stops,
            )
            return not_without(HostSet(lost)) if lost else None

        return wait

    def over(self, host: str, *, reached: bool) -> None:
        """A host has ended; where it was not reached, what stands there is what the journal knows."""
        state = self.state()
        left = None
        if reached or self.known:
            left = steps_of(state.hosts[host].changes), state.hosts[host].stopping
        self._over[host] = left
        self._tell()
        for cohort, unit in self._units.items():
            if host in cohort:
                unit.over(host, *(left or (self._steps[cohort],) * 2))

    def _unit(self, cohort: tuple[str, ...], note: Json) -> Unit:
        if cohort not in self._units:
            members = tuple(name for name in cohort if name in self.hosts)
            started = self.journal.started
            known = [id for id, _ in started.steps] if started is not None else note.get("steps", ())
            self._steps[cohort] = tuple(map(str, known))
            unit = self._units[cohort] = Unit(members, self.slots)
            for name, left in self._over.items():
                if name in members:
                    unit.over(name, *(left or (self._steps[cohort],) * 2))
        return self._units[cohort]
