"""job: the training that was stopped runs again, exactly as it ran, started once."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from fleetfix.action import Action, Plan, Planned, Probe, Span
from fleetfix.commands import Call, Change, Read, Seconds, Value
from fleetfix.domain.masking import masked
from fleetfix.domain.processes import command_of
from fleetfix.domain.throughput import from_zero

ADOPTED = "adopted"
"""The name, on the host, of a capture that was taken over from another run."""


class JobDescription(Value):
    """How to start training where none is running: `argv` or a shell `command`, and where."""

    argv: tuple[str, ...] | None = None
    command: str | None = None
    cwd: str = "/"
    env: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    """null: the owner of `cwd`."""
    log: str | None = None
    """null: `fleetfix-job.log` in `cwd`."""

    @model_validator(mode="after")
    def _one_of_two(self) -> JobDescription:
        if (self.argv is None) == (self.command is None) or self.argv == ():
            raise ValueError("give `argv` (a list) or `command` (a line for the shell)")
        return self


def _short_form(value: object) -> object:
    """`[torchrun, train.py]` and `"torchrun train.py"` say what runs and nothing else."""
    if isinstance(value, str):
        return {"command": value}
    return {"argv": value} if isinstance(value, list | tuple) else value


class CapturedJob(Value):
    """A job that an earlier step of this run stopped."""

    argv: tuple[str, ...]
    user: str
    alive: bool
    unit: str | None
    steps_seen: int | None
    span: Span | None = None
    """Where it ran on other hosts too: it starts on all of them or on none."""


class LiveJob(Value):
    """The job that runs now."""

    pid: int
    argv: tuple[str, ...]


class Started(Value):
    """A job that this run has started; `first_step` is None until its log shows steps."""

    pid: int
    alive: bool
    log: str | None
    first_step: int | None
    steps_seen: int | None


class StoppedFromZero(Value):
    """A job that was stopped because it began from step 0: at step `first`, after `seen`."""

    first: int
    seen: int


class LeftStopped(Value):
    """Where another run keeps what it captured and did not start again."""

    run: str
    step: str


class JobFacts(Value):
    """What became of the jobs that were stopped, and of what was started."""

    captured: tuple[CapturedJob, ...] = ()
    left: LeftStopped | None = None
    """Set where `captured` are jobs that another run left stopped."""
    orphans: int = 0
    current: LiveJob | None = None
    started: tuple[Started, ...] = ()
    from_zero: StoppedFromZero | None = None


class Job(Action[JobFacts]):
    """Start what an earlier step or run stopped, or the job that is described where none is running."""

    kind: ClassVar[str] = "job"
    modules: ClassVar[tuple[str, ...]] = ("jobs", "relaunch")

    step: str | None = Field(default=None, alias="from")
    """The step of this playbook that stopped it."""
    of_run: str | None = None
    """Instead of `from`: the run that stopped it and left it stopped; "last" is the newest that did."""
    described: Annotated[JobDescription | None, BeforeValidator(_short_form)] = Field(
        default=None, alias="else"
    )
    """How to start training where none is running; null invents no job."""
    must_run: bool = False
    """Whether a host is blocked where no job runs, and nothing says which one should."""
    resume: Literal["same", "append", "none"] = "same"
    """same: the command as it was resumes by itself. append: with `resume_args` after it. none: it may
    begin from step 0; otherwise a job that does is stopped at once."""
    resume_args: tuple[str, ...] = ()
    settle: Seconds = 90.0
    """How long to wait, at most, until the job holds its GPUs and logs a step."""

    @model_validator(mode="after")
    def _one_source(self) -> Job:
        if (self.step is None) == (self.of_run is None):
            raise ValueError("give `from` (the step that stops it) or `of_run` (a run id, or last)")
        return self

    @property
    def _name(self) -> str:
        """Under which name this run keeps the capture on the host."""
        return self.step or ADOPTED

    @model_validator(mode="after")
    def _append_says_what(self) -> Job:
        if (self.resume == "append") != bool(self.resume_args):
            raise ValueError("`resume: append` goes with `resume_args`, a list")
        return self

    def probe(self) -> Probe[JobFacts]:
        args = {"step": self._name, **({"run": self.of_run} if self.of_run else {})}
        (reply,) = yield (Read(function="jobs.state", args=args),)
        return JobFacts.model_validate(reply.answer())

    def plan(self, facts: JobFacts) -> Plan:
        if facts.from_zero is not None:
            return Plan(blocked=_began_from_zero(facts.from_zero))
        dead = [job for job in facts.captured if not job.alive]
        if dead and facts.left is not None and facts.current is not None:
            beside = f"job {facts.current.pid} runs here: what run {facts.left.run} stopped stays stopped"
            return Plan(notes=(beside,))
        if dead:
            what = ", ".join(f"{job.user}'s {command_of(job.argv)}" for job in dead)
            by = f" (run {facts.left.run} stopped it)" if facts.left else ""
            start = self._start(f"start {what} again, as it ran{by}", facts.left)
            return Plan(changes=(start,), spans=_spans(facts))
        if facts.captured or facts.current is not None:
            return Plan(notes=tuple(self._notes(facts)), spans=_spans(facts))
        if self.described is None and self.must_run:
            named = self.of_run is not None and self.of_run != "last"
            whose = f"run {self.of_run} left none stopped here" if named else "no run left one stopped"
            return Plan(blocked=f"no job runs here, {whose}, and none is described")
        if self.described is None:
            return Plan(notes=("no job ran here and none is described: none is started",))
        return Plan(changes=(self._start(f"start {_title(self.described)}: no job is running"),))

    def foresee(self, facts: JobFacts, planned: Planned) -> Plan:
        if self.step is not None and planned.get(self.step):
            return Plan(changes=(self._start("start what was stopped again, as it ran"),))
        return self.plan(facts)

    def _notes(self, facts: JobFacts) -> list[str]:
        lost = [
            job
            for job in facts.started
            if job.alive and from_zero(job.first_step, job.steps_seen) and self.resume != "none"
        ]
        return [f"job {job.pid} began at step {job.first_step}, after {job.steps_seen}" for job in lost]

    def _start(self, summary: str, left: LeftStopped | None = None) -> Change:
        described = self.described.model_dump(mode="json") if self.described else None
        guard = self.resume != "none"
        args = {
            "step": self._name,
            "described": described,
            "extra": list(self.resume_args),
            "guard": guard,
        }
        taken = {} if left is None else {"run": left.run, "step": left.step, "name": self._name}
        adopt = (Call(function="relaunch.adopt", args=taken),) if taken else ()
        disown = (Call(function="relaunch.disown", args=taken),) if taken else ()
        forget = (Call(function="relaunch.forget_adopted", args=taken),) if taken else ()
        return Change(
            key="start",
            summary=summary,
            before="no job",
            after="running, in a session of its own",
            do=(
                *adopt,
                Call(function="relaunch.start", args=args, timeout=180.0),
                Call(
                    function="relaunch.settle",
                    args={"seconds": self.settle, "guard": guard},
                    timeout=self.settle + 30.0,
                ),
            ),
            undo=(Call(function="relaunch.unstart", args={"step": self._name}, timeout=120.0), *disown),
            commit=forget,
            risk="compensable",
            alters=("job",),
            job="starts",
            together=True,
        )


def _spans(facts: JobFacts) -> tuple[Span, ...]:
    """The jobs over several hosts that are to run again; what another run left stopped is tied to the
    others also where it runs already."""
    return tuple(
        job.span for job in facts.captured if job.span is not None and (facts.left or not job.alive)
    )


def _title(described: JobDescription) -> str:
    return masked(described.command or " ".join(described.argv or ()))[:80]


def _began_from_zero(stopped: StoppedFromZero) -> str:
    return f"restarted from zero: stopped at step {stopped.first} (it had reached {stopped.seen})"
