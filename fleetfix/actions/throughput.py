"""throughput: the running job trains as fast as it should, by its own log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from fleetfix.action import Check, Measurement, Probe, Verdict
from fleetfix.commands import Read, Value
from fleetfix.domain import log_formats, throughput
from fleetfix.domain.log_formats import LogFormat, Scope
from fleetfix.domain.throughput import Judgement, Point, Rate
from fleetfix.spelling import hint_for

FEWEST_TO_RECORD = 5
"""A rate of fewer measurements is not worth keeping."""


class SpeedFacts(Value):
    """What the log of the job says, and what is known of its speed from before."""

    nothing: str | None = None
    """Why there is nothing to read."""
    job: str | None = None
    """The key of the running job's configuration; None where no job runs."""
    seconds: float | None = None
    """Since the job's start."""
    format: str | None = None
    """The format that the log is in; None where no known one matches."""
    scope: Scope = "global"
    """What that format's rate counts."""
    first_step: int | None = None
    """The first step that the job logged since this run started it; None where it has not."""
    steps_seen: int | None = None
    """The last step before this run stopped it, where it has to go on from there."""
    points: tuple[Point, ...] = ()
    whole: bool = True
    """Whether the points begin with the job's start."""
    baseline: Measurement | None = None
    before: Measurement | None = None


class Throughput(Check[SpeedFacts]):
    """Judge the rate of tokens of the running job, from the offset in its log where it began.

    It never rolls a sound repair back: a host whose speed is not proven is `unproven`. A job that began
    from zero, seen only after its start was over, is no sound repair at any speed.
    """

    kind: ClassVar[str] = "throughput"
    modules: ClassVar[tuple[str, ...]] = ("logs",)
    unproven: ClassVar[bool] = True

    of: Literal["job"] = "job"
    record_only: bool = False
    """Measure for a later comparison, and judge nothing."""
    at_least: float | None = None
    """Tokens per second, in the scope of the log, taken at its word; null: by the job's baseline."""
    format: str = "auto"
    pattern: str | None = None
    """A regex with a group `rate`, and `step` if it can; instead of a known format."""
    log: Annotated[str, StringConstraints(pattern=r"^/")] | None = None
    """The log, where it is not the job's own output."""
    scope: Scope | None = None
    """What the rate counts; for a pattern null is global."""
    min_steps: Annotated[int, Field(ge=3, le=throughput.WINDOW)] = 20
    warm_up: Annotated[int, Field(ge=0)] = 10

    @property
    def makes_baseline(self) -> bool:
        """Whether a rate that passed is what later runs compare with."""
        return not self.record_only

    @field_validator("at_least", mode="before")
    @classmethod
    def _as_people_write_it(cls, value: object) -> object:
        if value is None or value == "" or value == "null":
            return None
        rate = None if isinstance(value, bool) else log_formats.number(str(value))
        if rate is None:
            raise ValueError("a rate above zero, such as 19000 or 20K")
        return rate

    @field_validator("format")
    @classmethod
    def _known(cls, value: str) -> str:
        names = ["auto", *log_formats.BY_NAME]
        if value not in names:
            raise ValueError(f"no such log format: {value}; {hint_for(value, names) or ', '.join(names)}")
        return value

    @field_validator("pattern")
    @classmethod
    def _with_a_rate(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            groups = re.compile(value).groupindex
        except re.error as error:
            raise ValueError(f"not a regex: {error}") from error
        if "rate" not in groups:
            raise ValueError("it has no group `rate`, such as (?P<rate>[0-9.,]+)")
        return value

    @model_validator(mode="after")
    def _one_way_to_read(self) -> Throughput:
        if self.pattern is not None and self.format != "auto":
            raise ValueError("give `pattern` or `format`, not both")
        return self

    def probe(self) -> Probe[SpeedFacts]:
        args = {
            "formats": [{"name": row.name, "rate": row.rate, "step": row.step} for row in self._formats()],
            "log": self.log,
        }
        (reply,) = yield (Read(function="logs.find_rates", args=args, timeout=60.0),)
        facts = self._facts(reply.answer())
        if facts.job is None or self.record_only:
            return facts
        known, earlier = yield (
            Read(function="journal.baseline", args={"job": facts.job}),
            Read(function="journal.before"),
        )
        return facts.model_copy(
            update={"baseline": _measurement(known.answer()), "before": _measurement(earlier.answer())}
        )

    def _formats(self) -> tuple[LogFormat, ...]:
        if self.pattern is not None:
            return (LogFormat(name="pattern", rate=self.pattern, step=None, scope=self.scope or "global"),)
        return log_formats.FORMATS if self.format == "auto" else (log_formats.BY_NAME[self.format],)

    def _facts(self, value: Mapping[str, Any]) -> SpeedFacts:
        job = value["job"] or {}
        known = {name: job.get(name) for name in ("seconds", "first_step", "steps_seen")}
        known["job"] = job.get("key")
        if value.get("none"):
            return SpeedFacts(**known, nothing=value["none"])
        rows = self._formats()
        read = {row.name: throughput.points_of(value["points"][row.name]) for row in rows}
        best = max(
            rows, key=lambda row: (bool(read[row.name]) and row.scope == self.scope, len(read[row.name]))
        )
        if not read[best.name]:
            return SpeedFacts(**known)
        found = {"format": best.name, "scope": best.scope, "whole": value["whole"][best.name]}
        return SpeedFacts(**known, **found, points=read[best.name])

    def judge(self, facts: SpeedFacts) -> Verdict:
        if facts.job is None:
            return Verdict(result="skipped", reason=facts.nothing or "no job runs here", final=True)
        if not self.record_only and throughput.from_zero(facts.first_step, facts.steps_seen):
            began = f"began at step {facts.first_step} (it had reached {facts.steps_seen})"
            reason = f"restarted from zero: {began}; stop it, or give job: what makes it resume"
            return Verdict(result="fail", reason=reason, final=True, unsound=True)
        if facts.nothing is not None:
            return self._nothing(facts.nothing, final=True)
        if facts.format is None:
            return self._nothing("its log says no rate of tokens that a known format finds", final=False)
        if self.scope is not None and self.scope != facts.scope:
            wanted, said = throughput.unit(self.scope), throughput.unit(facts.scope)
            return self._nothing(f"its log says {said}, and {wanted} is wanted", final=True)
        steady = throughput.after_warm_up(facts.points, self.warm_up, from_start=facts.whole)
        rate = throughput.steady_rate(steady)
        enough = FEWEST_TO_RECORD if self.record_only else self.min_steps
        if rate is None or rate.points < enough:
            return self._too_few(facts, rate, enough)
        measured = Measurement(
            job=facts.job, rate=rate.rate, scope=facts.scope, noise=rate.noise, steps=rate.points
        )
        if self.record_only:
            return Verdict(result="pass", reason=_said(rate, facts.scope), final=True, measured=measured)
        return self._compared(facts, rate, measured)

    def _nothing(self, reason: str, *, final: bool) -> Verdict:
        if self.record_only:
            return Verdict(result="skipped", reason=reason, final=True)
        return Verdict(result="unknown", reason=reason, final=final)

    def _too_few(self, facts: SpeedFacts, rate: Rate | None, enough: int) -> Verdict:
        have = rate.points if rate is not None else 0
        warm = "" if rate is not None else f", still warming up after {len(facts.points)}"
        return self._nothing(f"{have} of {enough} steady steps so far{warm}", final=False)

    def _compared(self, facts: SpeedFacts, rate: Rate, measured: Measurement) -> Verdict:
        baseline = _comparable(facts.baseline, measured)
        before = _comparable(facts.before, measured)
        said = _said(rate, measured.scope)
        if self.at_least is None and baseline is None:
            was = f", {before:,.0f} before" if before is not None else ""
            reason = f"{said}{was}: no baseline for this job, give min_tok_s"
            return Verdict(result="unknown", reason=reason, final=True, measured=measured)
        found = throughput.compare(rate, at_least=self.at_least, baseline=baseline, before=before)
        reason = f"{said}, {self._wanted(baseline, found)}: {_outcome(found, before)}"
        match found.outcome:
            case "recovered":
                return Verdict(result="pass", reason=reason, final=True, measured=measured)
            case "inconclusive":
                return Verdict(result="unknown", reason=reason, measured=measured)
            case _:
                # Compiling goes on at new shapes: a rate that still rises has not said its last word.
                return Verdict(result="fail", reason=reason, final=not rate.rising, measured=measured)

    def _wanted(self, baseline: float | None, found: Judgement) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least:,.0f} wanted"
        return f"baseline {baseline or 0:,.0f} less {found.tolerance:.1%} wanted"


def _measurement(value: Any) -> Measurement | None:
    return None if value is None else Measurement.model_validate(value)


def _comparable(other: Measurement | None, measured: Measurement) -> float | None:
    """The other's rate, where it is of the same job and counts the same."""
    same = other is not None and (other.job, other.scope) == (measured.job, measured.scope)
    return other.rate if other is not None and same else None


def _said(rate: Rate, scope: Scope) -> str:
    return f"{rate.rate:,.0f} {throughput.unit(scope)} (median of {rate.points} steps, ±{rate.noise:.1%})"


def _outcome(found: Judgement, before: float | None) -> str:
    match found.outcome:
        case "improved":
            return f"improved from {before or 0:,.0f}, not recovered"
        case "inconclusive":
            return "too noisy to tell"
        case other:
            return other
