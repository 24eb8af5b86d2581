"""One member of a cohort on its way: where it waits for the others, and what it leaves to one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from fleetfix.action import Plan
from fleetfix.commands import Change, Json
from fleetfix.engine.joint import Joint, serves_one
from fleetfix.engine.unit import ARRIVED, PASSED, READY, Unit
from fleetfix.errors import Failure
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.playbook import Step


def not_without(lost: HostSet) -> Failure:
    """Why a stopped job of several hosts is not started again on those that could."""
    return Failure(
        kind="cohort",
        message=f"the job is not started again without {lost}: it runs on all of its hosts or on none",
        hint="fleetfix rollback, when all can be reached",
    )


SETTLE = 60.0
"""Seconds that a host may take to see what another has changed in a folder that they share: clients of a
network file system keep what they have read for a while."""


@dataclass
class Member:
    """A host as a member of its cohort."""

    unit: Unit
    joint: Joint
    host: Host
    say: Callable[[str, str], None]
    """(step, text): what it waits for."""

    async def enter(self, step: Step) -> None:
        """Come to a step, and wait where it is not this host's turn. Raises BarrierBroken."""
        name, at = self.host.name, self._at(step)
        self.unit.reach(name, at, ARRIVED)
        self.unit.check()
        if self._stops(step):
            await self._until(self.unit.members, step, ARRIVED)
        elif name != self.joint.lead and self.joint.mended_first(step.id):
            await self._lead_past(step)
        # Who changes what is shared goes first; where several do, each its own, at the same time.
        makers = set(self.joint.makers.values())
        if step.id in self.joint.meetings and name not in makers:
            await self._until(makers, step, PASSED)

    async def ready(self, step: Step) -> None:
        """Wait until all are ready for what is done at one moment. Raises BarrierBroken."""
        self.unit.reach(self.host.name, self._at(step), READY)
        await self._until(self.unit.members, step, READY)

    async def leave(self, step: Step) -> None:
        """Be through a step; from a barrier none goes on before all are. Raises BarrierBroken."""
        self.unit.reach(self.host.name, self._at(step), PASSED)
        if self._stops(step):
            await self._until(self.unit.members, step, PASSED)

    async def arrive(self) -> None:
        """Be through all steps, and wait until all are: none ends well before. Raises BarrierBroken."""
        at = len(self.joint.steps)
        self.unit.reach(self.host.name, at, ARRIVED)
        await self.unit.until(self.unit.members, at, ARRIVED, lambda text: self.say("", text))

    def own(self, plan: Plan) -> tuple[Change, ...]:
        """The changes of a plan that this host makes itself."""
        return tuple(change for change in plan.changes if not self.joint.maker(self.host, change))

    def makers(self, plan: Plan) -> str:
        """Which other members make changes of a plan for this one; empty where none does."""
        return str(HostSet({self.joint.maker(self.host, change) for change in plan.changes} - {""}))

    def skips(self, step: Step) -> bool:
        """Whether nothing of a step is this host's: another fetches the parts that it mends with."""
        changes = self.joint.foreseen[self.host.name][step.id].plan.changes
        return bool(changes) and all(
            serves_one(change) and self.joint.maker(self.host, change) for change in changes
        )

    def together(self, step: Step, change: Change) -> bool:
        """Whether all make this change at one moment."""
        return change.together and step.id in self.joint.barriers

    def without_slot(self) -> AbstractAsyncContextManager[None]:
        """What all do at one moment needs no slot: one would wait for another's, which waits for it."""
        return self.unit.slots.given_back()

    def note(self) -> Json:
        """What another machine needs to go back with all members at once."""
        return {
            "v": 1,
            "name": self.joint.cohort.name,
            "hosts": list(self.joint.cohort.hosts),
            "steps": list(self.joint.steps),
        }

    def fails(self, why: str, *, back: bool) -> bool:
        """The host cannot go on; `back`: it undoes what it did. Says whether all go back."""
        return self.unit.break_(self.host.name, why, back=back)

    def over(self, why: str, open_steps: Iterable[str], stopped: Iterable[str], *, well: bool) -> None:
        """The host has ended; what was not well ends the way of all others too."""
        self.unit.over(self.host.name, *(() if well else (open_steps, stopped)))
        if not well:
            self.unit.break_(self.host.name, why, back=True)

    async def _lead_past(self, step: Step) -> None:
        stop = self.joint.next_stop(step.id)
        at = len(self.joint.steps) if stop is None else self.joint.steps.index(stop)
        await self.unit.until([self.joint.lead], at, ARRIVED, lambda text: self.say(step.id, text))

    async def _until(self, hosts: Iterable[str], step: Step, phase: int) -> None:
        await self.unit.until(hosts, self._at(step), phase, lambda text: self.say(step.id, text))

    async def back(self, step: str, captures: bool, stops: bool) -> Failure | None:
        """Wait, on the way back, until no other has anything left of later steps.

        Says why the step is not to be undone now: a job that spans hosts is started on all or on none.
        """
        place = self.joint.steps.index(step) if step in self.joint.steps else 0
        lost = await self.unit.until_back(
            self.host.name,
            step,
            place,
            lambda text: self.say(step, text),
            captures=captures,
            stops=stops,
        )
        return not_without(HostSet(lost)) if lost else None

    def _stops(self, step: Step) -> bool:
        """Whether members wait for one another at a step."""
        return step.id in self.joint.barriers or step.id in self.joint.meetings

    def _at(self, step: Step) -> int:
        return self.joint.steps.index(step.id)
