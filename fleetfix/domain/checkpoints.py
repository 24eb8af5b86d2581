"""What stopping a job costs: how long ago it saved its last checkpoint, or why nobody knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import Field, ValidationError

from fleetfix.commands import Completed, Value
from fleetfix.domain.processes import GpuJob

SAVE_LINES: tuple[str, ...] = (
    # Hugging Face Trainer: `Saving model checkpoint to out/checkpoint-500`
    r"\bSaving model checkpoint to (?P<path>\S.*?)\s*$",
    # accelerate: `Saving current state to out/checkpoint_3`
    r"\bSaving current state to (?P<path>\S.*?)\s*$",
    # Lightning: `Epoch 3, global step 400: 'loss' reached … saving model to 'logs/epoch=3.ckpt' as top 1`
    r"\bsaving model to [\"'](?P<path>[^\"']+)[\"'] as top\b",
    # Megatron-LM: `  successfully saved checkpoint from iteration    1000 to /ckpt/gpt [ t 1/2, p 1/1 ]`
    r"\bsuccessfully saved checkpoint from iteration\s+[0-9]+ to (?P<path>\S+)",
    # torchtune: `Model checkpoint of size 2.30 GiB saved to out/epoch_0/model-00001-of-00001.safetensors`
    r"\bcheckpoint of size \S+ GiB saved to (?P<path>\S.*?)\s*$",
    # DeepSpeed: `[Torch] Saved out/global_step500/mp_rank_00_model_states.pt.`
    r"\[Torch\] Saved (?P<path>\S+?)\.?\s*$",
)
"""What trainers log when they have saved, with where. Their times are the files' own; torchtitan names no
path: its options do. Run on the host, on lines without terminal colours, in Python 3.8's dialect."""


SOON = 60.0
"""Seconds after its start in which a job has nothing to lose: it need not have saved yet."""


Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class LastCheckpoint(Value):
    """What a host says of a running job; times in seconds, by the host's clock."""

    age: Time | None = None
    """Since it saved; None where no checkpoint was found."""
    running: Time | None = None
    """Since it was started."""
    unsure: str | None = None
    """Why there may be a checkpoint although none was found."""


def understood(reply: Completed) -> LastCheckpoint:
    """Read a host's answer. None that comes is an error: a plan does not wait for this."""
    failure = reply.failure
    if failure is not None and failure.kind in ("timed_out", "hung"):
        return LastCheckpoint(unsure="where it saves does not answer")
    if not reply.ok:
        return LastCheckpoint(unsure=failure.message if failure else "the host does not say")
    try:
        return LastCheckpoint.model_validate(reply.value)
    except ValidationError:
        return LastCheckpoint(unsure="the host does not say")


def ages(jobs: Sequence[GpuJob], known: Mapping[int, LastCheckpoint]) -> tuple[float, ...]:
    """How long ago these jobs saved, the newest first; nothing of those of which it is not known."""
    found = (known[job.pid].age for job in jobs if job.pid in known)
    return tuple(sorted(age for age in found if age is not None))


def notes(jobs: Sequence[GpuJob], known: Mapping[int, LastCheckpoint]) -> Iterator[str]:
    """What is to be said of jobs that lose more than what they did since they saved."""
    for job in jobs:
        last = known.get(job.pid)
        if last is None:
            continue
        if last.age is None and last.unsure:
            yield f"when {job} saved its last checkpoint is unknown: {last.unsure}"
        elif last.age is None:
            yield f"no checkpoint of {job} was found"
        elif last.running is not None and last.age > last.running > SOON:
            yield f"{job} has saved no checkpoint since it was started"
