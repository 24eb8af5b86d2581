"""Drive a run, or one that is taken up again, and ask its operator on the way."""

from __future__ import annotations

import time

from fleetfix.cli import config, consent
from fleetfix.cli.show import Show
from fleetfix.cli.signals import heard
from fleetfix.engine.context import Choice
from fleetfix.engine.fleetrun import Consent, Interrupts, Request, resume_fleet, run_fleet
from fleetfix.hostset import HostSet
from fleetfix.journal import Journal
from fleetfix.recorder import Recorder
from fleetfix.state import RunState
from fleetfix.views.grouping import counted

CHOICES: tuple[Choice, ...] = ("finish", "rollback", "leave")


async def drive(
    request: Request,
    journal: Journal,
    show: Show,
    *,
    ask_above: int | None = None,
    consented: Consent | None = None,
    detailed_exit: bool = False,
    known: RunState | None = None,
) -> RunState:
    """Run it; with `known` take it up again from there.

    With `ask_above` the operator is asked at this terminal once the plan is known; `consented` asks in
    another way.
    """
    interrupts = Interrupts()
    days = config.load().evidence_days
    if days and request.may_change:
        journal.sweep_evidence(time.time() - days * 86400.0)
    seq = journal.last_seq(request.run)
    recorder = Recorder(request.run, journal, show.views(), state=known, seq=seq)

    async def ask(state: RunState) -> bool:
        question = consent.Question("go on with", with_work(state), above=ask_above or 0)
        consent.forget_typed()
        show.question(state, question.text)
        agreed = await consent.answered(question, interrupts.more_than(0))
        show.answered(agreed)
        return agreed

    async def choose(state: RunState) -> Choice:
        if interrupts.signal != "SIGINT" or not consent.at_terminal():
            return "leave"
        hosts = HostSet(host.name for host in state.hosts.values() if host.is_open and host.changes)
        consent.forget_typed()
        show.ask(_choice(hosts))
        said = await consent.chosen(CHOICES, interrupts.more_than(interrupts.times))
        show.answered(said is not None)
        return said or "leave"

    if ask_above is not None:
        consented = ask
    with heard(interrupts.interrupt):
        async with show.kept_fresh():
            if known is not None:
                return await resume_fleet(
                    request,
                    recorder,
                    journal,
                    interrupts=interrupts,
                    consent=consented,
                    choose=choose,
                )
            return await run_fleet(
                request,
                recorder,
                journal,
                interrupts=interrupts,
                detailed_exit=detailed_exit,
                consent=consented,
                choose=choose,
            )


def with_work(state: RunState) -> HostSet:
    """The hosts on which something is to be done, or was begun and is to be brought to its end."""
    open_ = (host for host in state.hosts.values() if host.is_open)
    return HostSet(host.name for host in open_ if host.pending or host.started)


def _choice(hosts: HostSet) -> str:
    return f"at a safe point: {counted(hosts)}. finish, rollback, or leave for later? [f/r/L] "
