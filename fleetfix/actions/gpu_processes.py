"""gpu_processes: no process that uses this environment holds a GPU; what is stopped can run again."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import basename
from typing import Any, ClassVar

from pydantic import Field, model_validator

from fleetfix.action import Action, Plan, Probe
from fleetfix.commands import Call, Change, Completed, Read, Seconds, Value
from fleetfix.domain import checkpoints, nvidia_smi, processes
from fleetfix.domain.checkpoints import LastCheckpoint
from fleetfix.domain.processes import Found, GpuJob, Sorted

AFTER_GRACE = 60.0
"""Seconds past the grace that stopping may take: KILL, seeing it gone, seeing it stay away."""

LOOKING = 5.0
"""Seconds that looking for a job's checkpoints may take: they may lie on a file server that hangs. As many
may looking for the job itself take, where the operator waits for it to leave."""


class ProcessFacts(Value):
    """Who holds GPUs, which environment is meant, and whether something new could start here."""

    found: Found
    environment: str | None
    owner: int = 0
    none: str | None = None
    """Why no environment is meant."""
    nothing_starts: str | None = None
    """Why no new GPU job could start on this host."""
    unseen: tuple[str, ...] = ()
    """Processes of other users that only nvidia-smi lists."""
    checkpoints: dict[int, LastCheckpoint] = Field(default_factory=dict)
    """Of each job that would be stopped, by its pid."""


class GpuProcesses(Action[ProcessFacts]):
    """Stop the training that uses an environment, or every GPU job, so that it can run again as it was."""

    kind: ClassVar[str] = "gpu_processes"
    modules: ClassVar[tuple[str, ...]] = ("jobs", "environments", "gpus", "relaunch", "checkpoints")

    using: str = "of-job"
    """The environment: "of-job" for what the running job maps, its path, or "any" for every GPU job."""
    users: tuple[str, ...] | None = None
    """With "any": whose jobs may be stopped; null is one user's, and blocks where several have jobs."""
    grace: Seconds = 60.0
    """Between TERM and KILL: the time a trainer has to save a checkpoint."""

    @model_validator(mode="after")
    def _users_of_any(self) -> GpuProcesses:
        if self.users is not None and self.using != "any":
            raise ValueError(
                "`users` goes with `using: any`: else only the environment's own job is stopped"
            )
        return self

    def probe(self) -> Probe[ProcessFacts]:
        if self.using == "any":
            return (yield from self._probe_any())
        jobs, where, start = yield (
            Read(function="jobs.found"),
            _find(self.using),
            Read(function="gpus.start_possible", timeout=60.0),
        )
        found, environment = Found.model_validate(jobs.answer()), where.answer()
        facts = ProcessFacts(
            found=found,
            environment=environment.get("path"),
            owner=environment.get("uid", 0),
            none=environment.get("none"),
            nothing_starts=_nothing_starts(start),
        )
        return (yield from self._looked_at(facts))

    def runs_still(self) -> Probe[bool]:
        """Processes alone tell: what could start here is of no matter, and may take long to say."""
        everything = self.using == "any"
        replies = yield (
            Read(function="jobs.found", timeout=LOOKING),
            *(() if everything else (_find(self.using, timeout=LOOKING),)),
        )
        found = Found.model_validate(replies[0].answer())
        where = {"path": "any"} if everything else replies[1].answer()
        facts = ProcessFacts(found=found, environment=where.get("path"), owner=where.get("uid", 0))
        return any(not job.orphan for job in self._decided(facts).targets)

    def _probe_any(self) -> Probe[ProcessFacts]:
        jobs, start = yield (
            Read(function="jobs.found"),
            Read(function="gpus.start_possible", timeout=60.0),
        )
        found = Found.model_validate(jobs.answer())
        facts = ProcessFacts(found=found, environment="any", nothing_starts=_nothing_starts(start))
        return (yield from self._looked_at(facts))

    def _looked_at(self, facts: ProcessFacts) -> Probe[ProcessFacts]:
        """Ask what only matters where there are jobs: whose they are, and what stopping them costs."""
        found, decided = facts.found, self._decided(facts)
        hidden = not found.complete and bool(found.jobs)
        stopped = [job for job in decided.targets if not job.orphan] if not decided.blocked else []
        if not hidden and not stopped:
            return facts
        replies = yield (
            *(_last_checkpoint(job) for job in stopped),
            *((Read(function="gpus.survey", args={"gpus": "all"}, timeout=90.0),) if hidden else ()),
        )
        known = {job.pid: checkpoints.understood(one) for job, one in zip(stopped, replies, strict=False)}
        unseen = _unseen(found, replies[-1].answer()) if hidden else ()
        return facts.model_copy(update={"unseen": unseen, "checkpoints": known})

    def _decided(self, facts: ProcessFacts) -> Sorted:
        if facts.environment is None:
            return Sorted(targets=())
        if self.using == "any":
            return processes.sort_out_all(facts.found, self.users)
        return processes.sort_out(facts.found, facts.environment, facts.owner)

    def plan(self, facts: ProcessFacts) -> Plan:
        if facts.environment is None:
            # Without a job there is nothing to stop; that the environment is unknown is for the steps
            # that change it to say.
            several = any(job.environments for job in facts.found.jobs)
            return Plan(blocked=facts.none if several else None)
        decided = self._decided(facts)
        blocked = decided.blocked or self._in_the_way(facts) if decided.targets else None
        spans = tuple(job.span for job in decided.targets if job.span is not None)
        if blocked or not decided.targets:
            return Plan(blocked=blocked, notes=decided.notes, spans=spans)
        notes = (*decided.notes, *checkpoints.notes(decided.targets, facts.checkpoints))
        return Plan(changes=(self._stop(decided.targets, facts.checkpoints),), notes=notes, spans=spans)

    def _in_the_way(self, facts: ProcessFacts) -> str | None:
        if facts.nothing_starts:
            return f"stopping would be a one-way door, nothing new would start here: {facts.nothing_starts}"
        return f"{facts.unseen[0]} holds these GPUs" if facts.unseen else None

    def _stop(self, targets: tuple[GpuJob, ...], known: Mapping[int, LastCheckpoint]) -> Change:
        names = sorted({basename(job.argv[0]) if job.argv else "?" for job in targets})
        asked = [{"pid": job.pid, "start": job.start} for job in targets]
        gpus = len({gpu for job in targets for gpu in job.gpus})
        limit = (self.grace * 1.5 + AFTER_GRACE) * max(len(targets), 1)
        return Change(
            key=f"stop:{'+'.join(names)}",
            parts=_announced(targets),
            summary=f"stop {', '.join(str(job) for job in targets)}: {gpus} GPUs",
            before="running: " + ", ".join(f"{job.pid} ({job.processes} processes)" for job in targets),
            after="stopped; captured, so that it can be started exactly as it ran",
            do=(
                Call(function="relaunch.stop", args={"targets": asked, "grace": self.grace}, timeout=limit),
            ),
            undo=(Call(function="relaunch.restore", timeout=limit + 60.0),),
            commit=(Call(function="relaunch.forget"),),
            risk="compensable",
            alters=("job",),
            job="stops",
            checkpoint_ages=checkpoints.ages(targets, known),
            waits=True,
            together=True,
            prepare=_capture(names, asked),
        )


def _find(venv: str, timeout: float = 60.0) -> Read:
    return Read(function="environments.find", args={"venv": venv}, timeout=timeout)


def _last_checkpoint(job: GpuJob) -> Read:
    args = {"pid": job.pid, "start": job.start, "lines": checkpoints.SAVE_LINES}
    return Read(function="checkpoints.last", args=args, timeout=LOOKING)


def _capture(names: list[str], asked: list[dict[str, int]]) -> Change:
    """Of a job that spans hosts the first that is stopped takes the others with it: all are captured
    before that."""
    return Change(
        key=f"stop:{'+'.join(names)}",
        summary=f"capture how {', '.join(names)} runs",
        after="captured, so that it can be started exactly as it ran",
        do=(Call(function="relaunch.prepare", args={"targets": asked}, timeout=AFTER_GRACE),),
        undo=(Call(function="relaunch.unprepare", timeout=180.0),),
        commit=(Call(function="relaunch.forget"),),
        risk="reversible",
        job="captures",
    )


def _announced(targets: tuple[GpuJob, ...]) -> tuple[str, ...]:
    """Each job by what it is, so that another one that comes meanwhile is not stopped unannounced.

    Not by its pid: the same job, started anew before its turn, is the one that was announced.
    """
    names = sorted(f"{job.user}: {job.command}, {len(job.gpus)} GPUs" for job in targets)
    return tuple(f"{name}, #{names[:place].count(name) + 1}" for place, name in enumerate(names))


def _nothing_starts(reply: Completed) -> str | None:
    if not reply.ok:
        return reply.failure.message if reply.failure else "nothing answers whether a job could start"
    smi, cuda = reply.value["smi"], reply.value["cuda"]
    return nvidia_smi.why_nothing_can_start(smi["exit"], smi["text"], cuda["found"], cuda["code"])


def _unseen(found: Found, survey: dict[str, Any]) -> tuple[str, ...]:
    """Foreign processes that nvidia-smi lists where /proc is closed to an ordinary user.

    One that cannot be seen at all may be anybody's: /proc hides those of others (hidepid).
    """
    own = {job.uid for job in found.jobs}
    return tuple(
        f"{who['user']}'s process {pid} ({' '.join(map(basename, who['argv'][:2]))})"
        if who is not None
        else f"process {pid}, which this user cannot see (use become: true),"
        for pid, who in sorted(survey["listed"].items(), key=lambda one: (one[1] is None, int(one[0])))
        if who is None or (who["uid"] not in own and not who["allowed"])
    )
