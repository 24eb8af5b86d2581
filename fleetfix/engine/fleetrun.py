"""A run over a fleet: survey all hosts, then start those that the rollout says, until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from fleetfix import __version__
from fleetfix.engine.context import Clock, Interrupts, OpenSession, RealClock, Request, RunContext, Slots
from fleetfix.engine.hostrun import HostRun
from fleetfix.engine.line import Memory
from fleetfix.engine.rollout import Finish, Halt, Start, Trip, Wait, decide, surveying, to_begin
from fleetfix.errors import Failure, JournalError
from fleetfix.events import (
    BreakerTripped,
    HostFinished,
    Outcome,
    RunFinished,
    RunHalted,
    RunInterrupted,
    RunStarted,
    SoakStarted,
    WaveStarted,
)
from fleetfix.hostset import HostSet
from fleetfix.order import known_to_go_last, same_machine, strata_of, with_a_turn
from fleetfix.recorder import Recorder
from fleetfix.session import open_session
from fleetfix.state import RunState, exit_code

__all__ = ["Interrupts", "Memory", "Request", "run_fleet"]


Consent = Callable[[RunState], Awaitable[bool]]
"""Asks whoever is responsible whether what is planned shall be done."""


async def run_fleet(
    request: Request,
    recorder: Recorder,
    memory: Memory,
    *,
    interrupts: Interrupts,
    opener: OpenSession = open_session,
    clock: Clock | None = None,
    detailed_exit: bool = False,
    consent: Consent | None = None,
) -> RunState:
    """Run a playbook over its hosts; every host ends with one outcome. Raises JournalError.

    `consent` is asked once, when every host is planned and before the first is changed; where it says
    no the run is halted and nothing was changed.
    """
    context = RunContext(
        request=request,
        recorder=recorder,
        memory=memory,
        interrupts=interrupts,
        open_session=opener,
        slots=Slots(request.policy.forks),
        clock=clock or RealClock(),
    )
    recorder.record(_run_started(request))
    await recorder.durable()
    runs = {host.name: HostRun(context, host, request.steps[host.name]) for host in request.hosts}
    await _Fleet(context, runs, consent).run()
    recorder.record(RunFinished(exit=exit_code(recorder.state, detailed=detailed_exit)))
    await recorder.durable()
    return recorder.state


def _run_started(request: Request) -> RunStarted:
    steps = next(iter(request.steps.values()))
    return RunStarted(
        playbook=request.playbook.name,
        source=request.playbook.source,
        digest=request.playbook.digest,
        inventory=request.inventory,
        hosts=tuple(host.name for host in request.hosts),
        steps=tuple((step.id, step.title) for step in steps),
        settings=dict(request.settings),
        policy=request.policy,
        operator=request.operator,
        controller=request.controller,
        version=__version__,
        dry=request.dry,
        reason=request.reason,
        only=_only(request),
        plan=request.plan,
        strata=strata_of(request.policy, request.hosts),
        last=known_to_go_last(request.hosts),
        controller_machine=request.machine,
    )


def _only(request: Request) -> dict[str, str]:
    """Where a step counts, of the steps that do not count everywhere."""
    elsewhere = {step.id for steps in request.steps.values() for step in steps if step.elsewhere}
    counts: dict[str, list[str]] = {id: [] for id in sorted(elsewhere)}
    for host, steps in request.steps.items():
        for step in steps:
            if step.id in counts and not step.elsewhere:
                counts[step.id].append(host)
    return {id: str(HostSet(hosts)) for id, hosts in counts.items()}


class _Fleet:
    """The tasks of one run: one a host at a time, each owned until it has ended."""

    def __init__(self, context: RunContext, runs: Mapping[str, HostRun], consent: Consent | None) -> None:
        self._context = context
        self._consent = consent
        self._runs = runs
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._seen_interrupts = 0
        self._surveyed = False
        self._begun: set[str] = set()
        """The hosts whose turn has come, also those that still wait for a slot."""
        self._soaked = 0
        """After how many waves it was waited last."""

    async def run(self) -> None:
        try:
            for name, run in self._runs.items():
                self._begin(name, run.survey())
            await self._decide_until_done()
        finally:
            await self._end_all()
            self._finish_the_rest()

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = name
        task.add_done_callback(self._ended.put_nowait)

    async def _decide_until_done(self) -> None:
        recorder, policy = self._context.recorder, self._context.request.policy
        while True:
            if not self._surveyed and not surveying(recorder.state):
                self._surveyed = True
                self._settle_survey()
            decision = decide(recorder.state, policy)
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
                    self._begin_called()
                    if not await self._step():
                        return

    def _settle_survey(self) -> None:
        """Every host is planned: refuse what must not be done, and end or judge what needs nothing."""
        state = self._context.recorder.state
        for name, names in same_machine(state).items():
            if state.hosts[name].finished is None:
                self._runs[name].refuse(*_one_machine(names))
        turns = with_a_turn(state)
        for name, host in state.hosts.items():
            if host.finished is not None:
                continue
            if self._context.request.dry:
                self._runs[name].end_plan()
            elif name not in turns and not state.interrupted:
                self._begin(name, self._runs[name].check())

    def _begin_called(self) -> None:
        state, policy = self._context.recorder.state, self._context.request.policy
        for name in to_begin(state, policy, self._begun):
            self._begun.add(name)
            self._begin(name, self._runs[name].mend())

    async def _start(self, wave: Start) -> None:
        recorder, policy = self._context.recorder, self._context.request.policy
        waves = recorder.state.waves
        if waves and policy.soak and self._soaked < len(waves):
            self._soaked = len(waves)
            recorder.record(SoakStarted(wave=waves[-1].name, seconds=policy.soak))
            await self._soak(policy.soak)
            return  # what happened meanwhile may have changed what comes next
        if not waves and not await self._consented():
            recorder.record(RunHalted(reason="not confirmed"))
            return
        held = self._context.memory.tripped(self._context.request.inventory)
        if held is not None:
            recorder.record(RunHalted(reason=f"run {held.run} has tripped the breaker: {held.reason}"))
            return
        recorder.record(WaveStarted(name=wave.name, hosts=wave.hosts))
        await recorder.durable()

    async def _consented(self) -> bool:
        """Ask, with the plan on the table, unless it was said beforehand."""
        return self._consent is None or await self._consent(self._context.recorder.state)

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
        if not self._tasks and also is None:
            return False
        stop = asyncio.ensure_future(self._context.interrupts.more_than(self._seen_interrupts))
        ended = asyncio.ensure_future(self._ended.get())
        waited: set[asyncio.Future[Any]] = {stop, ended} | ({also} if also is not None else set())
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        self._note_interrupts()
        if ended.done():
            self._collect(ended.result())
        else:
            ended.cancel()
        # What has ended meanwhile is taken in too: one decision serves for all of it.
        while not self._ended.empty():
            self._collect(self._ended.get_nowait())
        return True

    def _note_interrupts(self) -> None:
        interrupts = self._context.interrupts
        if interrupts.times == self._seen_interrupts:
            return
        self._seen_interrupts = interrupts.times
        self._context.recorder.record(RunInterrupted(signal=interrupts.signal, times=interrupts.times))
        if interrupts.times > 1:
            for task in self._tasks:
                task.cancel()

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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(run.close() for run in self._runs.values()), return_exceptions=True)

    def _finish_the_rest(self) -> None:
        """Accounting is total: whoever had no turn is said to have had none."""
        state = self._context.recorder.state
        why = state.halted or ("interrupted" if state.interrupted else "")
        for name, host in state.hosts.items():
            if host.finished is None:
                self._finish(name, "not_started", why)

    def _finish(self, name: str, outcome: Outcome, reason: str, failure: Failure | None = None) -> None:
        if self._context.recorder.state.hosts[name].finished is None:
            self._context.recorder.record(
                HostFinished(host=name, outcome=outcome, reason=reason, failure=failure)
            )


def _one_machine(names: HostSet) -> tuple[str, str]:
    """Why a machine that has more than one name in this run is not worked on, and what to do."""
    return (
        f"{names} are one machine, by machine id and boot: it would be changed more than once at a time",
        "name it once; where they are containers of one image, give each an /etc/machine-id of its own",
    )
