"""The members of one cohort on their way through the steps: where each is, and who waits for whom.

Every member says how far it is, and that only grows. To wait is to wait until others are as far; a step
that a member skips is behind it. So nobody waits for one that has moved on, and whoever ends without
having gone all the way breaks the barrier: then all who wait learn it, and go back together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fleetfix.engine.context import Interrupts, Slots
from fleetfix.hostset import HostSet

ARRIVED, READY, PASSED = 0, 1, 2
"""How far a member is in a step: come to it; ready for what all do at one moment; through it."""

Say = Callable[[str], None]


class BarrierBroken(Exception):
    """A member of the cohort cannot go on, so no other goes on either. `back`: what was done is undone."""

    def __init__(self, host: str, why: str, *, back: bool) -> None:
        super().__init__(f"{host} of its cohort did not go on: {why}")
        self.host = host
        self.back = back


@dataclass
class Unit:
    """The members of one cohort in one run."""

    members: tuple[str, ...]
    slots: Slots
    interrupts: Interrupts = field(default_factory=Interrupts)
    begun: bool = False
    """A member was begun: now all are, or none would get through the first barrier."""
    broken: BarrierBroken | None = None
    _at: dict[str, tuple[int, int]] = field(default_factory=dict)
    _back: dict[str, int] = field(default_factory=dict)
    """How far back each is that goes back: it has nothing left of the steps after this one."""
    _over: dict[str, frozenset[str]] = field(default_factory=dict)
    """Who has ended, and the steps that stand there and were to be undone."""
    _stopped: set[str] = field(default_factory=set)
    """The steps that may have stopped the job on a member, and so on all."""
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    # -- forward ------------------------------------------------------------------------------

    def reach(self, host: str, step: int, phase: int) -> None:
        """Say how far a member is."""
        self._at[host] = max(self._at.get(host, (-1, PASSED)), (step, phase))
        self._tell()

    async def until(self, hosts: Iterable[str], step: int, phase: int, say: Say) -> None:
        """Wait, without a slot, until these members are as far. Raises BarrierBroken."""
        wanted = tuple(hosts)

        def behind() -> list[str]:
            return [name for name in wanted if self._at.get(name, (-1, PASSED)) < (step, phase)]

        self.check()
        if late := behind():
            say(f"for {HostSet(late)} to come as far")
            async with self.slots.given_back():
                with self.interrupts.parking():
                    while behind():
                        self.check()
                        await self._move()
        self.check()

    def check(self) -> None:
        """Raise BarrierBroken where a member has broken it."""
        if self.broken is not None:
            raise self.broken

    def break_(self, host: str, why: str, *, back: bool) -> bool:
        """A member cannot go on. The first reason stays; says whether all go back."""
        self.broken = self.broken or BarrierBroken(host, why, back=back)
        self._tell()
        return self.broken.back

    def over(self, host: str, open_steps: Iterable[str] = (), stopped: Iterable[str] = ()) -> None:
        """A member has ended; of these steps it has changes that stand and were to be undone, and those
        may have `stopped` its job."""
        self._over[host] = frozenset(open_steps)
        self._stopped |= set(stopped)
        self._tell()

    # -- back ---------------------------------------------------------------------------------

    async def until_back(
        self, host: str, step: str, at: int, say: Say, *, captures: bool, stops: bool
    ) -> tuple[str, ...]:
        """Wait until no other has anything left of later steps. Whoever goes back holds no slot.

        The captures of a step come last: to undo one starts what has ended, and where it was stopped on
        one member it is to have ended on all. `stops`: the step may have stopped the job on this one.
        Returns the members that have ended and have not undone this step, where the job is not started
        without them.
        """
        if stops:
            self._stopped.add(step)
        place = 2 * at if captures else 2 * at + 1
        self._back[host] = min(self._back.get(host, place), place)
        self._tell()

        def ahead() -> list[str]:
            return [
                name
                for name in self.members
                if name != host and name not in self._over and self._back.get(name, place + 1) > place
            ]

        if late := ahead():
            say(f"for {HostSet(late)} to go back as far")
            with self.interrupts.parking():
                while ahead():
                    await self._move()
        if step not in self._stopped or not (captures or stops):
            return ()
        return tuple(name for name, left in self._over.items() if step in left and name != host)

    async def _move(self) -> None:
        moved = self._moved
        await moved.wait()

    def _tell(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
