"""Decide which GPU jobs of a host may be stopped for an environment, and say why another may not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from os.path import basename

from fleetfix.action import Span
from fleetfix.commands import Value
from fleetfix.domain.masking import masked

_ENDS = {"Slurm": "scancel {}", "PBS": "qdel {}", "LSF": "bkill {}"}
"""What ends a job, by the scheduler that has it."""

_ID = re.compile(r"[0-9][\w.-]{0,63}", re.ASCII)
"""A job's id that is fit for a command line: a process may claim any."""


def command_of(argv: Sequence[str]) -> str:
    """A command line as people name it, `python torchrun`, with nothing in it that looks secret."""
    words = [basename(argv[0])] if argv else ["?"]
    words += [basename(word) for word in argv[1:] if word and not word.startswith("-")][:1]
    return masked(" ".join(words))[:60]


class GpuJob(Value):
    """A job that holds GPUs: its top launcher, and what stands against stopping or restarting it."""

    pid: int
    start: int
    uid: int
    user: str
    argv: tuple[str, ...]
    environments: tuple[str, ...]
    gpus: tuple[int, ...]
    holders: int
    processes: int
    orphan: bool = False
    """Left behind by a job that is gone (GaTech-RL2/EgoVerse#682): ended, and not started again."""
    scheduler: str | None = None
    unit: str | None = None
    user_unit: str | None = None
    inside: str | None = None
    """What it runs inside of without being it: `unit code-server@alice.service`, `jupyter-lab`."""
    container: bool = False
    supervisor: str | None = None
    shell: int | None = None
    """The interactive shell it was started from, which a loop may be running in."""
    unreadable: bool = False
    cwd_gone: bool = False
    rank_of: int | None = None
    """World size, where this is a worker with no agent (torchrun) above it."""
    uv_run: str | None = None
    runner: bool = False
    span: Span | None = None
    """Where it runs on other hosts too."""

    @property
    def command(self) -> str:
        """What runs, in a few words: `python train.py`."""
        return command_of(self.argv)

    def __str__(self) -> str:
        return f"{self.user}'s job {self.pid} ({self.command})"


class Monitor(Value):
    """A process that has GPUs open only to read their counters (gpud, nvitop, an NVML agent)."""

    pid: int
    user: str
    argv: tuple[str, ...]


class Found(Value):
    """The GPU jobs of a host. Not `complete`: processes of other users could not be looked at."""

    complete: bool
    jobs: tuple[GpuJob, ...]
    left_out: int = 0
    schedulers: tuple[str, ...] = ()
    monitors: tuple[Monitor, ...] = ()


class Sorted(Value):
    """The jobs to stop, the first reason not to, and what is left alone."""

    targets: tuple[GpuJob, ...]
    blocked: str | None = None
    notes: tuple[str, ...] = ()


def sort_out(found: Found, environment: str, owner: int) -> Sorted:
    """Split jobs into those that use `environment` and those in the way.

    `owner` is the uid that the environment belongs to. Nothing blocks where nothing would be stopped.
    """
    targets = tuple(job for job in found.jobs if environment in job.environments)
    others = [job for job in found.jobs if job not in targets]
    if not targets:
        return Sorted(targets=(), notes=tuple(f"left alone: {job}" for job in others))
    reasons = [*_foreign(targets, others, owner), *_owned(found, targets), *_unrepeatable(targets)]
    return Sorted(
        targets=targets,
        blocked=reasons[0] if reasons else None,
        notes=tuple(_notes(found, targets, others)),
    )


def sort_out_all(found: Found, users: Sequence[str] | None) -> Sorted:
    """Every job is a target, of whatever environment; `users` are those whose jobs may be stopped.

    None is whoever alone has jobs here. One that may not be stopped blocks all: the GPUs would not be free.
    """
    reasons = [*_of_others(found.jobs, users), *_owned(found, found.jobs), *_unrepeatable(found.jobs)]
    if not found.jobs:
        return Sorted(targets=(), notes=tuple(_notes(found, (), ())))
    return Sorted(
        targets=found.jobs,
        blocked=reasons[0] if reasons else None,
        notes=tuple(_notes(found, found.jobs, ())),
    )


def _of_others(jobs: Sequence[GpuJob], users: Sequence[str] | None) -> Iterator[str]:
    theirs = {job.user: job for job in reversed(jobs)}
    if users is not None:
        for job in jobs:
            if job.user not in users:
                yield f"{job} may not be stopped: users names {', '.join(users) or 'nobody'}"
    elif len(theirs) > 1:
        whose = " and ".join(str(theirs[user]) for user in sorted(theirs))
        yield f"{whose} are of {len(theirs)} users: users: [{', '.join(sorted(theirs))}] stops them all"


def _foreign(targets: Sequence[GpuJob], others: Sequence[GpuJob], owner: int) -> Iterator[str]:
    users = {job.uid for job in targets}
    # An environment of root's may serve one user's job; one of a user's serves no other user.
    allowed = owner if owner in users or owner != 0 or len(users) > 1 else next(iter(users))
    for job in targets:
        if job.uid != allowed:
            yield f"{job} uses this environment; it is another user's"
    held = {gpu for job in targets for gpu in job.gpus}
    for job in others:
        if held & set(job.gpus):
            yield f"{job} holds these GPUs"


def _owned(found: Found, targets: Sequence[GpuJob]) -> Iterator[str]:
    for job in targets:
        if job.scheduler:
            yield f"{job} is {job.scheduler}: {_end_of(job.scheduler)}"
        if job.container:
            yield f"{job} runs in a container: its image is to be mended, not this host"
        if job.user_unit:
            yield f"{job} is run by the user unit {job.user_unit}: systemctl --user stop {job.user_unit}"
        if job.inside and not job.orphan:
            yield f"{job} runs inside {job.inside}: end it there, or start it apart from that"
        if job.supervisor:
            yield f"{job} is kept alive by {job.supervisor}: stop it there"
        if job.runner:
            yield f"{job} holds this session itself"
    if found.schedulers:
        yield f"this is a node of {' and '.join(found.schedulers)}: drain it first"


def _end_of(scheduled: str) -> str:
    """What ends a job of a scheduler, as a command where its id is known; or what makes its node free."""
    scheduler, _, id = scheduled.partition(" job ")
    command = _ENDS.get(scheduler)
    if command is None or not _ID.fullmatch(id):
        return "end it there, or drain the node"
    return f"{command.format(id)} ends it, or drain the node"


def _unrepeatable(targets: Sequence[GpuJob]) -> Iterator[str]:
    for job in targets:
        if job.orphan:
            continue
        if job.unreadable:
            yield f"{job} could not be started again: its command or environment cannot be read"
        if job.cwd_gone:
            yield f"{job} could not be started again: its working directory is gone"
        if job.rank_of is not None and job.rank_of > 1:
            size = job.rank_of
            yield f"{job} could not be started again: no agent is above it, and {size} workers need one"
        if job.span is not None and job.span.by != "torchrun":
            yield f"{job} runs on {job.span.nodes} hosts by {job.span.by}: end it where it was started"
        if job.uv_run:
            yield f"{job} runs by `{job.uv_run}`, which installs its lock file again: add --no-sync to it"


def _notes(found: Found, targets: Sequence[GpuJob], others: Sequence[GpuJob]) -> Iterator[str]:
    for job in targets:
        if job.orphan:
            yield f"{job} was left behind by a job that is gone: ended, not started again"
        if job.shell is not None:
            yield f"{job} was started from shell {job.shell}: it is started again without that terminal"
        if job.rank_of == 1:
            yield f"{job} has lost its agent: it is started again without the agent's variables"
    for other in others:
        yield f"left alone: {other}"
    for one in found.monitors:
        name = basename(one.argv[0]) if one.argv else "?"
        yield f"left alone: {one.user}'s process {one.pid} ({name}) watches the GPUs and computes nothing"
    if not found.complete:
        yield (
            "processes of other users could not be looked at; nvidia-smi's list stands in, "
            "and what it does not list is not known"
        )
