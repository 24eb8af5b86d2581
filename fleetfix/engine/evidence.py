"""Evidence of a host: asked for before a change that nothing brings back, and kept on the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha256

from fleetfix.action import Exhibit, Plan
from fleetfix.domain.evidence import lacking, missing, probe
from fleetfix.engine.context import RunContext
from fleetfix.engine.line import Line
from fleetfix.errors import Failure, JournalError
from fleetfix.events import EvidenceFile, EvidenceKept, HostSaid
from fleetfix.playbook import Step
from fleetfix.secret_values import masked
from fleetfix.steps import Evidence

GO_ON = "evidence: best_effort goes on without"


async def keep_before(context: RunContext, line: Line, host: str, step: Step, plan: Plan) -> Failure | None:
    """Keep evidence before the first change of a step; a Failure is why the step may not begin.

    What was kept before an earlier try of the step is the evidence: by now the step has begun.
    """
    wanted = _wanted(step, plan)
    if wanted == "none" or any(one.step == step.id for one in context.recorder.state.hosts[host].evidence):
        return None
    exhibits = await line.ask(step.id, probe("full" if wanted == "full" else "light"))
    gone = missing(exhibits)
    if gone and wanted != "best_effort":
        message = f"evidence before this cannot be had: {gone[0]}"
        return Failure(kind="blocked", message=message, hint=GO_ON)
    failure = await keep(context, host, step.id, exhibits)
    if failure is None or wanted != "best_effort":
        return failure
    context.recorder.record(HostSaid(host=host, step=step.id, text=failure.message))
    return None


def _wanted(step: Step, plan: Plan) -> Evidence:
    if step.evidence is not None:
        return step.evidence
    return "light" if any(change.risk == "irreversible" for change in plan.changes) else "none"


async def keep(context: RunContext, host: str, step: str, exhibits: Sequence[Exhibit]) -> Failure | None:
    """Keep what a host has said of itself, durably, and record it; a Failure is why it cannot be kept."""
    run = context.request.run
    files = {f"{one.name}.txt": masked(one.text).encode("utf-8", "replace") for one in exhibits if one.text}
    try:
        folder = await asyncio.to_thread(context.memory.keep_evidence, run, host, step, files)
    except JournalError as error:
        return Failure(kind="blocked", message=error.message, hint=error.hint)
    context.recorder.record(
        EvidenceKept(
            host=host,
            step=step,
            folder=folder,
            files=tuple(
                EvidenceFile(name=name, bytes=len(content), sha256=sha256(content).hexdigest())
                for name, content in files.items()
            ),
            cut=tuple(one.name for one in exhibits if one.cut),
            missing=missing(exhibits),
            lacking=lacking(exhibits),
        )
    )
    return None
