"""What a run has in hand on one host: the session, what was foreseen there, and what was taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetfix.action import Action
from fleetfix.cohorts import Ties, shared_paths
from fleetfix.engine.context import RunContext
from fleetfix.engine.functions import keys_of, with_functions
from fleetfix.engine.line import Line
from fleetfix.engine.member import Member
from fleetfix.engine.network import Watched
from fleetfix.engine.pending import Foreseen
from fleetfix.engine.reconcile import FINISHED
from fleetfix.errors import HostError
from fleetfix.events import HostConnected, HostSaid
from fleetfix.inventory import Host
from fleetfix.playbook import Step
from fleetfix.session import Session
from fleetfix.state import HostState


@dataclass
class Visit:
    """One host while one run works on it. What the run did there stands in the folded state."""

    context: RunContext
    host: Host
    steps: tuple[Step, ...]
    foreseen: dict[str, Foreseen] = field(default_factory=dict)
    ties: Ties = field(default_factory=Ties)
    """What ties the host to others."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the survey found, by step id; kept where the host is tied, to plan it again with others."""
    formed: tuple[str, tuple[str, ...]] | None = None
    """Name and hosts of the cohort that it went in before this run was taken up."""
    wave: str = ""
    """The wave in which another machine called it, by the host's own note; empty where nothing tells."""
    disabled: str | None = None
    """The host's own kill switch, as the survey found it."""
    member: Member | None = None
    """Its part in a cohort, once it has one."""
    acquired: bool = False
    """Lease and claim were taken: from here on the run may have written to the host."""
    resumed: bool = False
    """The run is taken up again on this host."""
    behind: frozenset[str] = frozenset()
    """Steps that had had their turn, as the host's own log shows."""
    waits_until: float | None = None
    """Until when it is waited for another run that has the host, by the run's clock."""
    _line: Line | None = None
    _job_seen: bool = False
    """The job that a stop was to end was seen to run after all."""

    @property
    def may_be_asked(self) -> bool:
        """Whether what others plan may lead to another question to this host."""
        return bool(self.ties or shared_paths(self.host))

    @property
    def connected(self) -> bool:
        return self._line is not None

    @property
    def line(self) -> Line:
        assert self._line is not None
        return self._line

    async def connect(self) -> Session:
        """Open the session, unless it is open. Raises HostError."""
        if self._line is not None:
            return self._line.session
        session = await self._open()
        if keys := keys_of(self.steps):
            session = with_functions(session, self.host, keys)
        self._line = Line(session, self.context.memory)
        info = session.info
        self.disabled = info.disabled
        self.context.recorder.record(
            HostConnected(
                host=self.host.name,
                user=info.user,
                python=info.python,
                boot_id=info.boot_id,
                machine_id=info.machine_id,
                durable=info.durable,
            )
        )
        if not info.durable and not self.context.request.dry:
            self.say("", f"records go to {info.home}: a reboot would make what was done here unknown")
        return session

    async def _open(self) -> Session:
        """Open it, once more where it was the controller's network that stood in the way."""
        context, network, name = self.context, self.context.network, self.host.name
        watch = Watched(network, context.recorder, name, local=self.host.transport == "local")
        while True:
            try:
                session = await context.open_session(
                    self.host, context.request.purpose(), progress=self.say, watch=watch
                )
            except HostError as error:
                network.closed(name)
                if error.failure.kind != "unreachable" or not await context.network_is_back():
                    raise
            else:
                if not watch.local:
                    network.opened(name)
                return session

    async def close(self) -> None:
        """Close the session; what the host still holds of it ends with it."""
        if self._line is not None:
            line, self._line = self._line, None
            self.context.network.closed(self.host.name)
            await line.session.close()

    def say(self, step: str, text: str) -> None:
        """Record a line from the host, or about it."""
        self.context.recorder.record(HostSaid(host=self.host.name, step=step, text=text))

    @property
    def state(self) -> HostState:
        return self.context.recorder.state.hosts[self.host.name]

    @property
    def is_open(self) -> bool:
        """Whether the host has not had its final word yet."""
        return self.state.finished is None

    @property
    def pending(self) -> bool:
        """Whether anything is to be done here."""
        return any(one.pending and one.plan.changes for one in self.foreseen.values())

    def has_changed(self, steps: Iterable[str]) -> bool:
        """Whether one of these steps has changed something here, be it before the run was taken up."""
        return any(self.state.has_changed(id) for id in steps)

    @property
    def changed(self) -> frozenset[str]:
        """The steps that have changed something here."""
        return frozenset(step.id for step in self.steps if self.state.has_changed(step.id))

    def had_its_turn(self, step: Step) -> bool:
        """Whether a step ended well before the run was taken up, and nothing is to be done again.

        A check that passed counts while nothing before it changes anew.
        """
        if not self.resumed or self.foreseen[step.id].pending:
            return False
        ended = self.state.steps.get(step.id)
        return step.id in self.behind or (ended is not None and ended.result in FINISHED)

    @property
    def spent(self) -> frozenset[str]:
        """Steps that nothing verifies and that had their one time: they are not repeated unasked."""
        return frozenset(
            step.id
            for step in self.steps
            if isinstance(step.act, Action) and not step.act.converges and self.state.changes_of(step.id)
        )

    def anybody_has_changed(self, steps: Iterable[str]) -> bool:
        """Whether one of these steps has changed something here, or on another member of its cohort."""
        hosts = self.context.recorder.state.hosts
        names = self.member.unit.members if self.member is not None else (self.host.name,)
        ids = tuple(steps)
        return any(
            id in hosts[n].steps and hosts[n].steps[id].result == "changed" for n in names for id in ids
        )

    @property
    def job_stopped(self) -> bool:
        """Whether the run stopped the host's job and it does not run again."""
        return self.state.job_stopped and not self._job_seen

    async def see_whether_the_job_runs(self) -> None:
        """A stop that was cut short may have stopped nothing: the host tells, the log cannot."""
        if self._line is None or not self.state.job_stopped:
            return
        for step in self.steps:
            if isinstance(step.act, Action) and step.id in self._stops:
                try:
                    self._job_seen = await self._line.ask(step.id, step.act.runs_still())
                except HostError as error:
                    if error.failure.kind == "unreachable":
                        raise
                    # What cannot be seen stays as the log tells it.

    @property
    def _stops(self) -> set[str]:
        """The steps that were to stop a job."""
        changes = {id: one.plan.changes for id, one in self.foreseen.items()}
        return {id for id, plan in changes.items() if any(change.job == "stops" for change in plan)}
