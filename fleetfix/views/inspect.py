"""A look at a fleet on one screen: what its hosts have in common, who differs, and what is wrong.

A fact is told once with the value of most hosts; those with another value follow under drift, numbers
that stand out under outliers, and what is wrong last but for hosts that could not be looked at.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetfix.domain.audit_findings import audit_findings, why_not_audited
from fleetfix.domain.conditions import Condition, conditions
from fleetfix.domain.drift import Spread, mode_of, spread_of
from fleetfix.domain.host_facts import HostFacts
from fleetfix.domain.wheels import Audit
from fleetfix.errors import Failure
from fleetfix.hostset import HostSet
from fleetfix.views.amounts import count, duration, rate, size
from fleetfix.views.grouping import counted, group
from fleetfix.views.neutral import one_line
from fleetfix.views.paint import PLAIN, Paint
from fleetfix.views.reach import own_network

MOST = 6
"""Lines of drift, of outliers and of conditions that are shown each; the JSON has all."""

NAMED = 300
"""Characters of folded hosts that were not reached or not seen: who is missing is looked for by name."""

OTHERS = 3
"""Values of one drifting fact that are shown."""

GIB = 1 << 30


@dataclass(frozen=True)
class Seen:
    """One host as it is shown: its facts or why there are none, what is wrong, what was audited."""

    host: str
    facts: HostFacts | None = None
    failure: Failure | None = None
    conditions: tuple[Condition, ...] = ()
    audits: Mapping[str, Audit | Failure] = field(default_factory=dict)

    @property
    def wrong(self) -> tuple[Condition, ...]:
        """All that is wrong with it: by its facts, by what runs left there, in its environments."""
        found = conditions(self.facts) if self.facts else ()
        audited = (
            one
            for asked, audit in self.audits.items()
            for one in (audit_findings(audit, asked) if isinstance(audit, Audit) else ())
        )
        return (*found, *self.conditions, *audited)

    @property
    def unseen(self) -> Iterator[str]:
        """What was not looked at, and why: processes, environments that were asked for."""
        if self.facts is not None and not self.facts.complete:
            yield "processes of other users cannot be looked at (become: true)"
        for asked, audit in self.audits.items():
            why = why_not_audited(audit) if isinstance(audit, Audit) else str(audit)
            if why:
                yield f"{asked}: {why}"

    @property
    def unaudited(self) -> bool:
        """Whether an environment that was asked for could not be audited; a host without a job has none of
        a job, which is no fault."""
        idle = self.facts is not None and self.facts.complete and not self.facts.jobs
        return any(
            not (idle and asked == "of-job")
            if isinstance(audit, Audit) and audit.env is None
            else not isinstance(audit, Audit) or why_not_audited(audit) is not None
            for asked, audit in self.audits.items()
        )


# -- facts ------------------------------------------------------------------------------------------


def _gpus(facts: HostFacts) -> str | None:
    if not facts.gpus:
        return "none" if facts.trouble and facts.trouble.kind == "absent" else None
    sizes = {gpu.total for gpu in facts.gpus}
    each = f", {size(max(s or 0 for s in sizes))} each" if None not in sizes else ""
    return f"{len(facts.gpus)} {facts.model or 'an unknown model'}{each}"


def _driver(facts: HostFacts) -> str | None:
    return f"{facts.driver}, serves CUDA {facts.cuda}" if facts.driver and facts.cuda else facts.driver


def _modes(facts: HostFacts) -> str | None:
    told = [f"{label} {state}" for name, label in _MODES if (state := _switch(facts, name))]
    return ", ".join(told) or None


_MODES = (("persistence", "persistence"), ("ecc", "ECC"), ("mig", "MIG"))


def _switch(facts: HostFacts, name: str) -> str | None:
    """A switch of all GPUs of a host; where they differ, that is its value."""
    found = {getattr(gpu, name) for gpu in facts.gpus or ()} - {None}
    return None if not found else "mixed" if len(found) == 2 else "on" if found == {True} else "off"


def _environments(facts: HostFacts) -> str | None:
    told = []
    for one in facts.environments:
        torch = f", torch {one.torch}" if one.torch else ""
        torch += f" (CUDA {one.cuda})" if one.torch and one.cuda else ""
        told.append(f"{one.path}: Python {one.python or '?'}{torch}")
    return "; ".join(told) or None


NONE = "none"
"""A word for what a host has not; where no host has it, nothing is said of it."""

WORDS: dict[str, Callable[[HostFacts], str | None]] = {
    "gpus": _gpus,
    "driver": _driver,
    "modes": _modes,
    "kernel": lambda facts: facts.kernel,
    "machine": lambda facts: f"{facts.cpus} CPUs, {round(facts.memory / GIB)} GiB",
    "environment": _environments,
    "scheduler": lambda facts: ", ".join(facts.schedulers) or NONE,
}
"""Facts that are words, in the order in which they are shown."""


def _share(value: float) -> str:
    return f"{value:.0%}"


@dataclass(frozen=True)
class Number:
    """A fact that is a number: how it is read, and how it is written."""

    value: Callable[[HostFacts], float | None]
    said: Callable[[float], str]
    judged: bool = True
    """Whether a host may stand out by it; an uptime tells nothing."""


def _tokens(scope: str) -> Callable[[HostFacts], float | None]:
    return lambda facts: facts.tokens.rate if facts.tokens and facts.tokens.scope == scope else None


def _most(name: str) -> Callable[[HostFacts], float | None]:
    """The highest of the GPUs that work: how an idle one fares says nothing."""

    def value(facts: HostFacts) -> float | None:
        found = [getattr(gpu, name) for gpu in facts.gpus or () if gpu.busy]
        return max((float(one) for one in found if one is not None), default=None)

    return value


NUMBERS: dict[str, Number] = {
    "tok/s": Number(_tokens("global"), rate),
    "tok/s/GPU": Number(_tokens("per_gpu"), rate),
    "hottest GPU": Number(_most("temperature"), lambda value: f"{value:.0f} °C"),
    "most power": Number(_most("power"), lambda value: f"{value:.0f} W"),
    "load a CPU": Number(
        lambda facts: facts.load / max(facts.cpus, 1), lambda value: f"{value:.2f}", judged=False
    ),
    "memory free": Number(lambda facts: facts.memory_free / max(facts.memory, 1), _share, judged=False),
    "uptime": Number(lambda facts: facts.uptime, duration, judged=False),
}


def inspect_text(
    seen: Sequence[Seen],
    *,
    inventory: str = "",
    playbooks: Collection[str] = (),
    paint: Paint = PLAIN,
) -> str:
    """Write what was seen of a fleet. `inventory` and `playbooks` make the commands that help."""
    facts = {one.host: one.facts for one in seen if one.facts is not None}
    drift: list[str] = []
    outliers: list[str] = []
    lines = [
        f"{count(len(seen), 'host')}, {len(facts)} answered"
        if len(facts) < len(seen)
        else count(len(seen), "host")
    ]
    lines += _words(facts, drift)
    lines += _jobs(facts)
    lines += _numbers(facts, outliers)
    lines += _disks(facts)
    lines += _section("drift", drift, paint)
    lines += _section("outliers", outliers, paint)
    lines += _conditions(seen, inventory, playbooks, paint)
    lines += _unseen(seen, paint)
    lines += _unreachable(seen, paint)
    return "\n".join(lines)


def _row(name: str, text: str) -> str:
    return f"{name:<12} {text}"


def _words(facts: Mapping[str, HostFacts], drift: list[str]) -> Iterator[str]:
    for name, read in WORDS.items():
        mode = mode_of({host: value for host, one in facts.items() if (value := read(one)) is not None})
        if mode is None or (mode.value == NONE and not mode.others):
            continue
        told = sum(len(hosts) for _, hosts in mode.others) + len(mode.hosts)
        share = f" ({len(mode.hosts)} of {told})" if mode.others else ""
        yield _row(name, f"{one_line(mode.value, 80)}{share}")
        drift += [
            f"{name:<12} {one_line(value, 60)}: {counted(HostSet(hosts))}"
            for value, hosts in mode.others[:OTHERS]
        ]
        if rest := mode.others[OTHERS:]:
            left = HostSet(host for _, hosts in rest for host in hosts)
            drift.append(f"{name:<12} {count(len(rest), 'other value')}: {counted(left)}")


def _jobs(facts: Mapping[str, HostFacts]) -> Iterator[str]:
    told: dict[str, dict[str, float | None]] = {}
    idle = [host for host, one in facts.items() if not one.jobs]
    for host, one in facts.items():
        for job in one.jobs:
            what = f"{job.user}'s {job.command} on {count(len(job.gpus), 'GPU')}"
            what += (
                f", of {job.scheduler}" if job.scheduler else ", in a container" if job.container else ""
            )
            told.setdefault(what, {})[host] = job.seconds
    ranked = sorted(told.items(), key=lambda item: -len(item[1]))
    for what, hosts in ranked[:OTHERS]:
        ages = [age for age in hosts.values() if age is not None]
        since = f", for {_range(min(ages), max(ages), duration)}" if ages else ""
        yield _row("job", f"{one_line(what)}{since}: {counted(HostSet(hosts))}")
    if rest := ranked[OTHERS:]:
        left = HostSet(host for _, hosts in rest for host in hosts)
        yield _row("job", f"{count(len(rest), 'other job')}: {counted(left)}")
    if idle:
        yield _row("no job", counted(HostSet(idle)))


def _numbers(facts: Mapping[str, HostFacts], outliers: list[str]) -> Iterator[str]:
    for name, number in NUMBERS.items():
        values = {host: value for host, one in facts.items() if (value := number.value(one)) is not None}
        spread = spread_of(values)
        if spread is None:
            continue
        yield _row(name, _spread(spread, number.said))
        if number.judged and spread.outliers:
            far = [f"{host} {number.said(value)}" for host, value in spread.outliers[:OTHERS]]
            more = len(spread.outliers) - len(far)
            end = f" and {more} more" if more > 0 else ""
            outliers.append(f"{name:<12} {', '.join(far)}{end} (median {number.said(spread.median)})")


def _spread(spread: Spread, said: Callable[[float], str]) -> str:
    middle, ends = said(spread.median), _range(spread.least, spread.most, said)
    return middle if ends == middle else f"{middle} ({ends})"


def _range(least: float, most: float, said: Callable[[float], str]) -> str:
    ends = (said(least), said(most))
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _disks(facts: Mapping[str, HostFacts]) -> Iterator[str]:
    free: dict[str, list[float]] = {}
    for one in facts.values():
        for disk in one.disks:
            free.setdefault(disk.path, []).append(disk.free)
    often = sorted(free, key=lambda path: (-len(free[path]), path.count("/"), path))[:4]
    told = [
        f"{path} {_range(min(free[path]), max(free[path]), lambda value: size(int(value)))}"
        for path in often
    ]
    if told:
        yield _row("disk free", one_line("; ".join(told)))


def _section(title: str, lines: Sequence[str], paint: Paint, most: int = MOST) -> Iterator[str]:
    if lines:
        yield paint("warn", title)
        yield from (f"  {line}" for line in lines[:most])
        if len(lines) > most:
            yield f"  … and {count(len(lines) - most, 'other')}"


# -- what is wrong ----------------------------------------------------------------------------------


def _conditions(
    seen: Sequence[Seen], inventory: str, playbooks: Collection[str], paint: Paint
) -> Iterator[str]:
    alike: dict[Condition, list[tuple[str, str]]] = {}
    for one in seen:
        for wrong in one.wrong:
            # What helps is the same; the texts are folded after.
            alike.setdefault(wrong.model_copy(update={"text": ""}), []).append(
                (one.host, one_line(wrong.text))
            )
    found = [(folded, way) for way, said in alike.items() for folded in group(said)]
    found.sort(key=lambda one: -len(one[0].hosts))
    if found:
        yield paint("bad", "conditions")
    for folded, way in found[:MOST]:
        yield f"  {counted(folded.hosts)}: {folded.text}"
        if told := _way(folded.hosts, way, inventory, playbooks):
            yield paint("faint", f"    {told}")
    if left := found[MOST:]:
        hosts = HostSet(host for one, _ in left for host in one.hosts)
        yield f"  … and {count(len(left), 'other')} on {counted(hosts)}"


def _way(hosts: HostSet, way: Condition, inventory: str, playbooks: Collection[str]) -> str:
    """What helps: a sentence, or a command to copy."""
    told = [one_line(way.help)] if way.help else []
    if way.playbook in playbooks:
        words = ["fleetfix", "run", way.playbook, "--hosts", str(hosts)]
        words += ["-i", inventory] if inventory else []
        words += [word for setting in way.settings for word in ("--set", setting)]
        told.append(shlex.join(words))
    return "; ".join(told)


def _unseen(seen: Sequence[Seen], paint: Paint) -> Iterator[str]:
    yield from _not_one_lost("not seen", ((one.host, why) for one in seen for why in one.unseen), paint)


def _unreachable(seen: Sequence[Seen], paint: Paint) -> Iterator[str]:
    failed = ((one.host, str(one.failure)) for one in seen if one.failure is not None)
    yield from _not_one_lost("not reached", failed, paint)
    away = sum(one.failure is not None and one.failure.kind == "unreachable" for one in seen)
    if told := own_network(away, len(seen)):
        yield f"  {told}"


def _not_one_lost(title: str, said: Iterable[tuple[str, str]], paint: Paint) -> Iterator[str]:
    """Reasons with their hosts, most hosts first; those that are too many for a screen keep their hosts."""
    groups = group((host, one_line(why)) for host, why in said)
    lines = [f"{counted(one.hosts, NAMED)}: {one.text}" for one in groups[:MOST]]
    if rest := groups[MOST:]:
        left = HostSet(host for one in rest for host in one.hosts)
        lines.append(f"{counted(left, NAMED)}: {count(len(rest), 'other reason')}")
    yield from _section(title, lines, paint, most=len(lines))


# -- JSON -------------------------------------------------------------------------------------------


def inspect_json(one: Seen) -> str:
    """One host as an object on a line."""
    return json.dumps(
        {
            "host": one.host,
            "facts": one.facts.model_dump(mode="json") if one.facts else None,
            "conditions": [wrong.model_dump() for wrong in one.wrong],
            "environments": list(_audits(one)),
            "failure": one.failure.model_dump() if one.failure else None,
        },
        separators=(",", ":"),
    )


def _audits(one: Seen) -> Iterable[dict[str, Any]]:
    for asked, audit in one.audits.items():
        told: dict[str, Any] = {"asked": asked, "path": None, "findings": [], "not_audited": None}
        if isinstance(audit, Audit):
            told["path"] = audit.env.path if audit.env else None
            told["findings"] = [wrong.text for wrong in audit_findings(audit, asked)]
            told["not_audited"] = why_not_audited(audit)
        else:
            told["not_audited"] = str(audit)
        yield told
