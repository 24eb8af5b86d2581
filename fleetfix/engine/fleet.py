"""The tasks of a run over a fleet: survey all hosts, then start those that the rollout says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

from fleetfix.cohorts import declared_cohort
from fleetfix.engine.assembly import assemble
from fleetfix.engine.context import Choice, RunContext
from fleetfix.engine.hostrun import HostRun
from fleetfix.engine.joint import Joint
from fleetfix.engine.network import GIVEN_UP_AFTER, Loss
from fleetfix.engine.rollout import (
    Finish,
    Halt,
    Start,
    Trip,
    Wait,
    awaiting,
    decide,
    surveying,
    to_begin,
)
from fleetfix.engine.unit import Unit
from fleetfix.errors import Failure, JournalError
from fleetfix.events import (
    BreakerTripped,
    HostFinished,
    NetworkLost,
    NetworkReturned,
    Outcome,
    RunHalted,
    RunInterrupted,
    SoakStarted,
    WaveStarted,
)
from fleetfix.hostset import HostSet
from fleetfix.order import CANARY, place_of_wave, same_machine, units, with_a_turn
from fleetfix.state import HostState, RunState

Consent = Callable[[RunState], Awaitable[bool]]
"""Asks whoever is responsible whether what is planned shall be done."""

Choose = Callable[[RunState], Awaitable[Choice]]
"""Asks what is to become of the hosts that an interrupt has brought to their safe points."""


class Fleet:
    """The tasks of one run: one a host at a time, each owned until it has ended."""

    def __init__(
        self,
        context: RunContext,
        runs: Mapping[str, HostRun],
        *,
        consent: Consent | None = None,
        choose: Choose | None = None,
    ) -> None:
        self._context = context
        self._consent = consent
        self._agreed: bool | None = None if consent else True
        self._choose = choose
        self._runs = runs
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._seen_interrupts = 0
        self._surveyed = False
        self._settled: set[str] = set()
        """The hosts of which it is decided whether they have a turn."""
        self._joints: dict[str, Joint] = {}
        """The joint plan of each host that is in a cohort."""
        self._begun: set[str] = set()
        """The hosts whose turn has come, also those that still wait for a slot."""
        self._seen_network = 0
        self._soaked = 0
        """After how many waves it was waited last."""

    async def run(self) -> None:
        try:
            for name, run in self._runs.items():
                self._begin(name, run.survey())
            await self._decide_until_done()
            self._wait_no_longer()
        finally:
            await self._end_all()
            self._finish_the_rest()

    def _wait_no_longer(self) -> None:
        """Where the run halts, nothing is begun any more on a host that another run has."""
        state = self._context.recorder.state
        for name in awaiting(state):
            self._finish(name, "not_started", state.halted or "interrupted")

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = name
        task.add_done_callback(self._ended.put_nowait)

    async def _decide_until_done(self) -> None:
        recorder, policy = self._context.recorder, self._context.request.policy
        while True:
            fresh = self._planned_since()
            if fresh:
                self._surveyed = True
                self._settled |= fresh
                # One that others went before, and that belongs to them, finds them absent.
                runs = {name: run for name, run in self._runs.items() if name in fresh}
                self._joints |= await assemble(self._context, runs)
                self._settle_survey(fresh)
            decision = decide(recorder.state, policy) if self._surveyed else Wait()
            match decision:
                case Start():
                    await self._start(decision)
                case Halt():
                    recorder.record(RunHalted(reason=decision.reason))
                case Trip():
                    recorder.record(BreakerTripped(reason=decision.reason))
                case Finish():
                    return
                case Wait():
                    await self._begin_called()
                    if not await self._step():
                        return

    def _planned_since(self) -> frozenset[str]:
        """The hosts that were planned since the last time, once all are that can be planned now.

        Where another run has a host it is waited for that one, and the others go on; but not where some
        of them may belong together: what does is planned as one.
        """
        state = self._context.recorder.state
        if surveying(state) or (awaiting(state) and not state.interrupted and self._may_be_tied()):
            return frozenset()
        return frozenset(name for name, host in state.hosts.items() if not host.awaits) - self._settled

    def _may_be_tied(self) -> bool:
        visits = (run.visit for run in self._runs.values())
        return any(visit.may_be_asked or visit.formed or declared_cohort(visit.host) for visit in visits)

    def _settle_survey(self, fresh: frozenset[str]) -> None:
        """These hosts are planned: refuse what must not be done, and end or judge what needs nothing."""
        state = self._context.recorder.state
        for name, names in same_machine(state).items():
            if state.hosts[name].finished is None and not state.hosts[name].started:
                self._runs[name].refuse(*_one_machine(names))
        turns = with_a_turn(state)
        for name, host in state.hosts.items():
            if name not in fresh or not host.is_open or host.started:
                continue  # a host that was begun before the run was taken up goes on to its end
            if self._context.request.dry:
                self._runs[name].end_plan()
            elif name not in turns and not state.interrupted:
                self._begun.add(name)
                self._begin(name, self._runs[name].check())
        self._call_those_begun_elsewhere()

    def _call_those_begun_elsewhere(self) -> None:
        """Hosts that another machine began, and those that belong to them: their notes tell in which waves.
        They are in flight together, as they were; canary, batches and budgets go on from there."""
        state = self._context.recorder.state
        called = {name for wave in state.waves for name in wave.hosts}
        hosts = state.hosts
        begun = [u for u in units(state) if any(hosts[name].is_open and hosts[name].started for name in u)]
        first = CANARY if self._context.request.policy.canary and not state.waves else "taken up"
        waves: dict[str, list[str]] = {}
        for unit in begun:
            notes = (self._runs[name].visit.wave for name in unit if name in self._runs)
            noted = next(filter(None, notes), first)
            uncalled = [name for name in unit if hosts[name].is_open and name not in called]
            waves.setdefault(noted, []).extend(uncalled)
        for wave in sorted(filter(waves.get, waves), key=place_of_wave):
            self._context.recorder.record(WaveStarted(name=wave, hosts=tuple(waves[wave])))

    async def _begin_called(self) -> None:
        state, policy = self._context.recorder.state, self._context.request.policy
        if not self._surveyed:
            return
        names = to_begin(state, policy, self._begun)
        if state.interrupted and not self._agreed:
            # Nobody has said yes: what was begun before the run was taken up stays as it is.
            names = tuple(name for name in names if not state.hosts[name].started)
        elif names and not await self._consented():
            return
        self._join(names)
        for name in names:
            self._begun.add(name)
            self._begin(name, self._runs[name].mend())

    def _join(self, names: Iterable[str]) -> None:
        """Let the members of a cohort that are begun now know of one another."""
        cohorts: dict[str, list[str]] = {}
        for name in names:
            if name in self._joints:
                cohorts.setdefault(self._joints[name].cohort.name, []).append(name)
        for members in cohorts.values():
            unit = Unit(tuple(members), self._context.slots, self._context.interrupts)
            for name in members if len(members) > 1 else ():
                self._runs[name].join(unit, self._joints[name])

    async def _start(self, wave: Start) -> None:
        recorder, policy = self._context.recorder, self._context.request.policy
        waves = recorder.state.waves
        if waves and policy.soak and self._soaked < len(waves):
            self._soaked = len(waves)
            recorder.record(SoakStarted(wave=waves[-1].name, seconds=policy.soak))
            await self._soak(policy.soak)
            return  # what happened meanwhile may have changed what comes next
        if not await self._consented():
            return
        held = self._context.memory.tripped(self._context.request.inventory)
        if held is not None:
            recorder.record(RunHalted(reason=f"run {held.run} has tripped the breaker: {held.reason}"))
            return
        recorder.record(WaveStarted(name=wave.name, hosts=wave.hosts))
        await recorder.durable()

    async def _consented(self) -> bool:
        """Ask once, with the plan on the table, unless it was said beforehand."""
        if self._agreed is None:
            assert self._consent is not None
            # What was said up to now is shown before the question, not behind it.
            await self._context.recorder.durable()
            self._agreed = await self._consent(self._context.recorder.state)
            if not self._agreed:
                self._context.recorder.record(RunHalted(reason="not confirmed"))
        return self._agreed

    async def _soak(self, seconds: float) -> None:
        """Leave the fleet alone for so long; only the operator cuts it short."""
        asleep = asyncio.ensure_future(self._context.clock.sleep(seconds))
        try:
            while not asleep.done() and not self._context.interrupts.times:
                await self._step(asleep)
        finally:
            asleep.cancel()

    async def _step(self, also: asyncio.Future[None] | None = None) -> bool:
        """Wait until a task ends, the operator interrupts, or `also` is done. False when nothing is left
        to wait for."""
        if not self._tasks and also is None and not self._context.recorder.state.paused:
            return False
        interrupts = self._context.interrupts
        stop = asyncio.ensure_future(interrupts.more_than(self._seen_interrupts))
        parked = asyncio.ensure_future(interrupts.all_parked(max(len(self._tasks), 1)))
        ended = asyncio.ensure_future(self._ended.get())
        network = asyncio.ensure_future(self._context.network.changed_after(self._seen_network))
        waited: set[asyncio.Future[Any]] = {stop, parked, ended, network}
        if also is not None:
            waited.add(also)
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (stop, parked, ended, network):
                one.cancel()
        self._note_network()
        self._note_interrupts()
        if ended.done():
            self._collect(ended.result())
        elif parked.done() and interrupts.choice is None:
            interrupts.choose(await self._chosen())
            self._note_interrupts()
        # What has ended meanwhile is taken in too: one decision serves for all of it.
        while not self._ended.empty():
            self._collect(self._ended.get_nowait())
        return True

    async def _chosen(self) -> Choice:
        """What is to become of the hosts that are at their safe points now."""
        state = self._context.recorder.state
        if self._choose is None or not any(host.is_open and host.changes for host in state.hosts.values()):
            return "leave"
        await self._context.recorder.durable()
        return await self._choose(state)

    def _note_interrupts(self) -> None:
        interrupts = self._context.interrupts
        if interrupts.times == self._seen_interrupts:
            return
        self._seen_interrupts = interrupts.times
        self._context.recorder.record(RunInterrupted(signal=interrupts.signal, times=interrupts.times))
        if interrupts.times > 1:
            for task in self._tasks:
                task.cancel()

    def _note_network(self) -> None:
        """Record what became of the controller's network since it was looked at last."""
        recorder, network = self._context.recorder, self._context.network
        self._seen_network = network.changes
        paused, loss = recorder.state.paused, network.loss
        if loss is None and paused:
            recorder.record(NetworkReturned(seconds=network.away))
        elif loss is not None and network.given_up and paused:
            recorder.record(RunHalted(reason=_given_up(loss)))
        elif loss is not None and not network.given_up and not paused:
            recorder.record(NetworkLost(dropped=loss.dropped, open=loss.open))

    def _collect(self, task: asyncio.Task[None]) -> None:
        name = self._tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, Exception) or isinstance(error, JournalError):
            raise error
        message = f"{type(error).__name__}: {error}"
        self._finish(name, "failed", message, Failure(kind="bug", message=message))

    async def _end_all(self) -> None:
        self._context.network.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(run.close() for run in self._runs.values()), return_exceptions=True)

    def _finish_the_rest(self) -> None:
        """Accounting is total: whoever had no turn is said to have had none."""
        state = self._context.recorder.state
        why = state.halted or ("interrupted" if state.interrupted else "")
        for name, host in state.hosts.items():
            if host.is_open:
                self._finish(name, left_as(host), why)

    def _finish(self, name: str, outcome: Outcome, reason: str, failure: Failure | None = None) -> None:
        host = self._context.recorder.state.hosts[name]
        if host.is_open:
            self._context.recorder.record(
                HostFinished(
                    host=name,
                    outcome=outcome,
                    reason=reason,
                    failure=failure,
                    job_stopped=host.job_stopped,
                    open=tuple(shown.summary for shown in host.changes.values()),
                )
            )


def left_as(host: HostState) -> Outcome:
    """The outcome of a host that nobody goes on with now."""
    if host.going_back:
        return "rollback_pending"
    return "cancelled" if host.started else "not_started"


def _given_up(loss: Loss) -> str:
    dropped = f"{loss.dropped} of {loss.open} sessions dropped at once"
    return f"the controller's network: {dropped}, and were not back within {GIVEN_UP_AFTER / 60:.0f} min"


def _one_machine(names: HostSet) -> tuple[str, str]:
    """Why a machine that has more than one name in this run is not worked on, and what to do."""
    return (
        f"{names} are one machine, by machine id and boot: it would be changed more than once at a time",
        "name it once; where they are containers of one image, give each an /etc/machine-id of its own",
    )
