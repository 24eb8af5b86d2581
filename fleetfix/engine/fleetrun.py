"""A run over a fleet, from its first event to its last; and a run that is taken up again."""

from __future__ import annotations

from collections.abc import Sequence

from fleetfix import __version__
from fleetfix.engine.context import Clock, Interrupts, OpenSession, RealClock, Request, RunContext, Slots
from fleetfix.engine.fleet import Choose, Consent, Fleet, left_as
from fleetfix.engine.hostrun import HostRun
from fleetfix.engine.line import Memory
from fleetfix.engine.network import Network
from fleetfix.events import HostFinished, RunFinished, RunResumed, RunStarted
from fleetfix.hostset import HostSet
from fleetfix.order import known_to_go_last, strata_of
from fleetfix.recorder import Recorder
from fleetfix.session import open_session
from fleetfix.state import RunState, exit_code

__all__ = ["Consent", "Interrupts", "Memory", "Request", "resume_fleet", "run_fleet"]


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
    choose: Choose | None = None,
) -> RunState:
    """Run a playbook over its hosts; every host ends with one outcome. Raises JournalError.

    `consent` is asked once, when every host is planned and before the first is changed; where it says
    no the run is halted and nothing was changed. `choose` is asked once the first interrupt has brought
    every host to its safe point; without it they are left there.
    """
    context = _context(request, recorder, memory, interrupts, opener, clock)
    recorder.record(_run_started(request))
    await recorder.durable()
    runs = {host.name: HostRun(context, host, request.steps[host.name]) for host in request.hosts}
    await Fleet(context, runs, consent=consent, choose=choose).run()
    return await _ended(recorder, detailed=detailed_exit)


async def resume_fleet(
    request: Request,
    recorder: Recorder,
    memory: Memory,
    *,
    interrupts: Interrupts,
    opener: OpenSession = open_session,
    clock: Clock | None = None,
    consent: Consent | None = None,
    choose: Choose | None = None,
) -> RunState:
    """Take a run up again on the hosts of the request, from the state that the recorder has.

    No step that has ended well runs again, waves and budgets go on as if never interrupted. Where the
    recorder has nothing, another machine began the run: its hosts tell how far they are.
    """
    context = _context(request, recorder, memory, interrupts, opener, clock)
    if recorder.state.started is None:
        recorder.record(_run_started(request))
    names = tuple(host.name for host in request.hosts)
    _leave_the_others(recorder, names)
    recorder.record(
        RunResumed(
            operator=request.operator, controller=request.controller, hosts=names, reason=request.reason
        )
    )
    await recorder.durable()
    runs = {
        host.name: HostRun(context, host, request.steps[host.name], resumed=True) for host in request.hosts
    }
    await Fleet(context, runs, consent=consent, choose=choose).run()
    return await _ended(recorder)


def _leave_the_others(recorder: Recorder, taken_up: Sequence[str]) -> None:
    """Hosts without an end that are not taken up now get one: whoever decides waits for none of them."""
    for name, host in recorder.state.hosts.items():
        if host.is_open and name not in taken_up:
            recorder.record(
                HostFinished(
                    host=name,
                    outcome=left_as(host),
                    reason="not taken up again",
                    job_stopped=host.job_stopped,
                    open=tuple(shown.summary for shown in host.changes.values()),
                )
            )


async def _ended(recorder: Recorder, *, detailed: bool = False) -> RunState:
    recorder.record(RunFinished(exit=exit_code(recorder.state, detailed=detailed)))
    await recorder.durable()
    return recorder.state


def _context(
    request: Request,
    recorder: Recorder,
    memory: Memory,
    interrupts: Interrupts,
    opener: OpenSession,
    clock: Clock | None,
) -> RunContext:
    clock = clock or RealClock()
    return RunContext(
        request=request,
        recorder=recorder,
        memory=memory,
        interrupts=interrupts,
        open_session=opener,
        slots=Slots(request.policy.forks),
        clock=clock,
        network=Network(clock),
    )


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
        last=known_to_go_last(request.hosts, request.jumps),
        controller_machine=request.machine,
        text=request.playbook.text,
        secrets=request.playbook.secrets,
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
