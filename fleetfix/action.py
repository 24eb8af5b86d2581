"""What an action and a check are: questions to a host, and pure decisions from the answers.

An action or check never speaks to a host. `probe` is a generator that yields tuples of `Read`s, is
sent a tuple of `Completed`s of the same length, and returns facts. Where the answers make facts
impossible it raises `HostError`: the plan is then blocked, the check unknown. `plan`, `foresee` and
`judge` are pure and total: equal facts give equal answers, and no facts make them raise.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

from fleetfix.commands import Change, Completed, Read, Value

Facts = TypeVar("Facts")

Reads = tuple[Read, ...]
Replies = tuple[Completed, ...]
Probe = Generator[Reads, Replies, Facts]


class Span(Value):
    """A job that runs on several hosts at once, as one of them shows it.

    `at` is where its launchers meet, `host:port`; equal on all of its hosts, as `id` is.
    """

    id: str
    at: str
    nodes: int
    node: int | None = None
    by: str = "torchrun"

    @property
    def name(self) -> str:
        """What people know it by."""
        named = self.id if self.id not in ("", "none") else ""
        return f"{named} ({self.at})" if named and self.at else named or self.at or "a job"


class Plan(Value):
    """What would be done to reach the goal: nothing when `changes` is empty.

    `blocked` says, in words an operator acts on, why nothing may be done on this host. `notes` are
    things found and left alone.
    """

    changes: tuple[Change, ...] = ()
    blocked: str | None = None
    notes: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    """The jobs this is about that run on other hosts too: what is done here, they suffer there."""


class Measurement(Value):
    """A rate that was measured, with all that a later comparison must match."""

    job: str
    """Identity of the job's configuration: a digest of what decides its speed."""
    rate: float
    """Tokens per second, median over `steps` steps after warm-up."""
    scope: Literal["per_gpu", "global"]
    noise: float
    """Relative: 1.4826 x MAD / median."""
    steps: int


class Exhibit(Value):
    """One thing that a host says of itself: its text, or why there is none.

    `lacks` says that this host has no such thing; `failed` that it should have, and gives no answer.
    """

    name: str
    text: str = ""
    cut: bool = False
    lacks: str = ""
    failed: str = ""


class Verdict(Value):
    """What a check found. `unknown` never counts as pass.

    `final` says that waiting cannot change it. `skipped` says there is nothing to judge here.
    `unsound` says that a failure is more than a lack of proof: the work of the host itself is wrong, so
    that it ends failed also where the check is one that leaves a sound repair `unproven`.
    """

    result: Literal["pass", "fail", "unknown", "skipped"]
    reason: str
    final: bool = False
    unsound: bool = False
    measured: Measurement | None = None
    exhibits: tuple[Exhibit, ...] = ()
    """What is to be kept of the host on the controller, for people to read later."""


Planned = Mapping[str, tuple[Change, ...]]
"""The changes planned so far on this host, by step id, in order."""


class Action(Value, Generic[Facts]):
    """A goal on a host that can be reached by changes. One YAML key names it: `kind`."""

    kind: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    """The host modules whose functions its reads and changes call."""
    confidential: ClassVar[frozenset[str]] = frozenset()
    """The parameters in which `${{ secrets.NAME }}` may stand: their type is `sealed.Confidential`, nothing
    shows them, and they reach the host in the arguments of calls, by `sealed.in_arguments`."""

    @property
    def converges(self) -> bool:
        """False where a change is by the author's word (a bare `shell`): never repeated unasked."""
        return True

    def acting_as(self, user: str) -> AnyAction | None:
        """The same, done as that user; None where whose rights are used is not for the author to say."""
        del user
        return None

    @property
    def own_check(self) -> bool:
        """Whether its probe runs a program of the author's own: nothing proves that it only looks."""
        return False

    def probe(self) -> Probe[Facts]:
        """Ask what `plan` needs to know."""
        raise NotImplementedError

    def plan(self, facts: Facts) -> Plan:
        """Decide the changes that reach the goal. After them, `plan(probe())` is empty."""
        raise NotImplementedError

    def runs_still(self) -> Probe[bool]:
        """Ask whether a job runs that this is to stop, and nothing else: the operator is leaving.

        The default plans anew.
        """
        facts = yield from self.probe()
        return any(change.job == "stops" for change in self.plan(facts).changes)

    def foresee(self, facts: Facts, planned: Planned) -> Plan:
        """Decide the plan as it will be once the earlier steps' changes are made.

        The default is for actions that no earlier step influences.
        """
        del planned
        return self.plan(facts)


class Check(Value, Generic[Facts]):
    """A claim about a host that is judged and never made true."""

    kind: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    confidential: ClassVar[frozenset[str]] = frozenset()
    """As for an action."""
    unproven: ClassVar[bool] = False
    """True where a sound repair stays although this check did not pass (throughput)."""
    surveyed: ClassVar[bool] = True
    """False where to look is the work itself: it is done at its turn, and not to plan."""

    @property
    def makes_baseline(self) -> bool:
        """Whether what it measures, once passed, is what the same job is compared with from then on."""
        return False

    def probe(self) -> Probe[Facts]:
        """Ask what `judge` needs to know."""
        raise NotImplementedError

    def judge(self, facts: Facts) -> Verdict:
        """Decide whether the claim holds."""
        raise NotImplementedError


AnyAction = Action[Any]
AnyCheck = Check[Any]
