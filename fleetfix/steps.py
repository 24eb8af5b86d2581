"""One step of a playbook: as it is written, and as it is bound to one host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, SkipValidation

from fleetfix.action import Action, AnyAction, AnyCheck, Check
from fleetfix.actions import named
from fleetfix.commands import Json, Seconds, Value
from fleetfix.complaints import Place, check, keys_of, like
from fleetfix.scalars import written
from fleetfix.sealed import KEPT
from fleetfix.substitution import Lookup, Reference, references, substitute

OnFailure = Literal["rollback", "stop", "continue"]
Evidence = Literal["none", "light", "full", "best_effort"]
StepId = Annotated[str, *like(r"[a-z][a-z0-9_-]{0,39}", "an id of small letters, digits, - and _")]


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else value


StepIds = Annotated[tuple[str, ...], BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])]


Complaints = list[tuple[Place, str]]


class Controls(Value):
    """How a step is run; every key beside the one that names its action."""

    id: StepId
    name: str = ""
    """What it is for, shown to people."""
    hosts: Annotated[str, *like(r".*\S.*", "a host pattern")] | None = None
    """Counts only on these hosts of the run: a pattern, as for --hosts; null is all of them."""
    when_pending: StepIds = ()
    """Runs only where one of these later steps has something to do."""
    when_changed: StepIds = ()
    """Runs only where one of these earlier steps has changed something."""
    timeout: Annotated[Seconds, Field(gt=0)] | None = None
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    delay: Seconds = 1.0
    """Seconds between one try and the next."""
    within: Seconds | None = None
    """How long a check may take to come true."""
    every: Annotated[Seconds, Field(gt=0)] = 2.0
    """Seconds between two looks of a check."""
    consecutive: Annotated[int, Field(ge=1)] = 1
    """How many looks in a row must be good."""
    on_failure: OnFailure | None = None
    as_user: Annotated[str, *like(r"[^\s:/]+", "the name of a user")] | None = None
    """The user as whom a `shell` or `command` runs on the host; null is the one who logs in, or root."""
    evidence: Evidence | None = None
    """What is kept of the host, on the controller, before the first change: none, light or full. A step
    whose evidence cannot be had does not begin; best_effort is light, and goes on with what there is.
    null is light before a change that nothing brings back, and none before others."""
    barrier: bool = False
    """In a cohort (hosts that train one job): a step of all where it is one of any, begun when all have
    come to it and left when all are through."""


class Step(Controls):
    """One step, bound to one host."""

    act: SkipValidation[SerializeAsAny[AnyAction | AnyCheck]]
    on_failure: OnFailure = "rollback"
    elsewhere: bool = False
    """It counts on other hosts of the run, and not on this one (`hosts`)."""

    @property
    def title(self) -> str:
        """What people read: the name, or the id where there is none."""
        return self.name or self.id


class RawStep(Value):
    """One step as written: before its references are bound."""

    id: str
    kind: str
    controls: dict[str, Json]
    params: Json
    place: tuple[str | int, ...]


CONTROLS = tuple(keys_of(Controls))
"""The keys of a step beside the one that names its action."""


def references_of(step: RawStep) -> Iterator[tuple[Place, Reference]]:
    """Every reference in a step, with its place in the document."""
    yield from references(step.controls, step.place)
    yield from references(step.params, (*step.place, step.kind))


def ids_of(step: RawStep, key: str) -> tuple[str, ...]:
    """The ids in `when_changed` or `when_pending`, as written."""
    value = step.controls.get(key)
    many = value if isinstance(value, list) else [value]
    return tuple(text for item in many if (text := written(item)) is not None)


def in_circle(steps: tuple[RawStep, ...]) -> Iterator[RawStep]:
    """Steps whose own turn depends on their own turn."""
    needs = {step.id: {*ids_of(step, "when_changed"), *ids_of(step, "when_pending")} for step in steps}
    for step in steps:
        reached: set[str] = set()
        queue = list(needs[step.id])
        while queue:
            name = queue.pop()
            if name not in reached:
                reached.add(name)
                queue += needs.get(name, ())
        if step.id in reached:
            yield step


# -- as they are kept on a host ------------------------------------------------------------------------


def kept(steps: Iterable[Step]) -> list[Json]:
    """Bound steps as a host keeps them, for whoever goes on with the run there."""
    return [{"kind": step.act.kind, **step.model_dump(mode="json", by_alias=True)} for step in steps]


def recalled(data: Json) -> tuple[Step, ...]:
    """The steps that `kept` wrote. Raises ValueError (pydantic's included) where they are none."""
    steps = []
    for item in data:
        controls = {name: value for name, value in item.items() if name not in ("kind", "act")}
        steps.append(Step(**controls, act=named(item["kind"]).model_validate(item["act"], context=KEPT)))
    return tuple(steps)


# -- binding ----------------------------------------------------------------------------------------


def bound_step(step: RawStep, lookup: Lookup) -> Step | Complaints:
    """The step with its references replaced and its action made, or what is wrong and where."""
    complaints: Complaints = []
    act_place = (*step.place, step.kind)

    def complain(place: Place, message: str) -> None:
        complaints.append((place, message))

    controls = substitute(step.controls, lookup, complain, step.place)
    params = substitute(step.params, lookup, complain, act_place)
    if complaints:
        return complaints
    made, wrong = check(Controls, controls)
    kind = named(step.kind)
    act, wrong_params = check(kind, params)
    complaints += [((*step.place, *place), message) for place, message in wrong]
    complaints += [((*act_place, *place), f"{step.kind}: {message}") for place, message in wrong_params]
    if made is None or act is None:
        return complaints
    acting = act if made.as_user is None else _acting(act, made.as_user)
    if acting is None:
        message = f"as_user: {step.kind} acts as the owner of what it changes; it is for shell and command"
        return [((*step.place, "as_user"), message)]
    return _step_of(made, acting)


def _acting(act: AnyAction | AnyCheck, user: str) -> AnyAction | None:
    return act.acting_as(user) if isinstance(act, Action) else None


def _step_of(controls: Controls, act: AnyAction | AnyCheck) -> Step:
    # A throughput that is not back never rolls a sound repair back: its default is to stop there.
    default: OnFailure = "stop" if isinstance(act, Check) and act.unproven else "rollback"
    fields = {name: getattr(controls, name) for name in Controls.model_fields}
    return Step(**{**fields, "on_failure": controls.on_failure or default}, act=act)
