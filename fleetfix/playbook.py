"""Playbook and Step: what a run does, read from YAML and bound to each host before any connection.

Loaded means valid: every key is known, every reference names something, and `bind` gives a host its
steps with every variable in place, or says everything that is wrong as `file:line: message`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, PrivateAttr

from fleetfix import fabfiles, library
from fleetfix.actions import KINDS, named
from fleetfix.commands import Json, Value
from fleetfix.complaints import Place, check, like
from fleetfix.documents import Document, parse, refuse, text_of
from fleetfix.errors import DocumentError, FleetfixError, PlaybookError
from fleetfix.foreign import ANSIBLE_FILE, answer
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.inventory_sources.trust import distrust_of_place, who_called_sudo
from fleetfix.policy import Policy
from fleetfix.scalars import written
from fleetfix.sealed import NAME
from fleetfix.secret_values import BECOME
from fleetfix.spelling import hint_for
from fleetfix.steps import (
    CONTROLS,
    Complaints,
    RawStep,
    Step,
    bound_step,
    ids_of,
    in_circle,
    references_of,
)
from fleetfix.substitution import SECRETS, Reference, Unbound, malformed, references

__all__ = ["Playbook", "Step", "lint", "load", "read"]

PlaybookName = Annotated[str, *like(r"[a-z0-9][a-z0-9-]{0,39}", "a name of small letters, digits and -")]


SecretName = Annotated[str, *like(NAME, "a name of letters, digits and _")]

Named = Callable[[str], Container[str]]
"""The names of the hosts that a pattern means; raises FleetfixError where it means none."""


class _File(Value):
    name: PlaybookName
    summary: str = ""
    vars: dict[str, Json] = Field(default_factory=dict)
    secrets: tuple[SecretName, ...] = ()
    policy: Policy = Policy()
    steps: Annotated[tuple[Json, ...], Field(min_length=1)]


class Playbook(Value):
    """A playbook that was read: valid but for the values that hosts bring."""

    name: str
    summary: str
    source: str
    """The file it was read from."""
    digest: str
    """sha256 of its text, and of the fabfiles that it names, where it names any."""
    text: str
    vars: dict[str, Json]
    """The variables it declares, with their defaults."""
    secrets: tuple[str, ...] = ()
    """The secrets that it uses, by name; a run is given their values."""
    policy: Policy
    steps: tuple[RawStep, ...]

    _document: Document = PrivateAttr()
    _bound: dict[str, tuple[Step, ...]] = PrivateAttr(default_factory=dict)
    _used: tuple[Reference, ...] = PrivateAttr(default=())

    def bind(
        self, host: Host, settings: Mapping[str, Json], named: Named = HostSet.parse
    ) -> tuple[Step, ...]:
        """The steps for one host: defaults, then what the host has, then `settings` (`--set`).

        `named` tells the hosts of a step's `hosts`; without an inventory it knows names and no groups.
        DocumentError says everything that does not fit, PlaybookError names an unknown setting.
        """
        self.check_settings(settings)
        values = _Values(self, host, settings)
        key = values.key(self._used)
        if key not in self._bound:
            self._bound[key] = _Binder(self._document, self.steps, values).bind()
        return self._placed(self._bound[key], host, named)

    def _placed(self, steps: tuple[Step, ...], host: Host, named: Named) -> tuple[Step, ...]:
        """The steps of a host, those that count only on others marked so."""
        if not any(step.hosts for step in steps):
            return steps
        complaints: list[str] = []
        placed: list[Step] = []
        for step, raw in zip(steps, self.steps, strict=True):
            try:
                here = step.hosts is None or host.name in named(step.hosts)
            except FleetfixError as error:
                hint = f" ({error.hint})" if error.hint else ""
                place = (*raw.place, "hosts")
                complaints.append(self._document.complaint(place, f"hosts: {error.message}{hint}"))
            else:
                placed.append(step if here else step.model_copy(update={"elsewhere": True}))
        refuse(complaints)
        return tuple(placed)

    def check_settings(self, settings: Mapping[str, Json]) -> None:
        """Refuse a setting that the playbook does not declare."""
        for name in settings:
            if name not in self.vars:
                known = ", ".join(self.vars) or "none"
                hint = hint_for(name, self.vars) or f"it has: {known}"
                raise PlaybookError(f"{self.name} has no variable {name!r}", hint=hint)


# -- reading ----------------------------------------------------------------------------------------


def load(name_or_path: str, *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Playbook:
    """Load a shipped or configured playbook by its name, or a file by its path."""
    path = library.find(name_or_path, env=env, cwd=cwd)
    text = text_of(path)
    # What others may have written is not what the operator means to run, as whom they run it.
    if library.shipped() not in path.parents and (why := distrust_of_place(path, who_called_sudo())):
        hint = "make it and its folder yours alone, or copy it to a folder that is"
        raise PlaybookError(f"{path} is not run: {why}", hint=hint)
    return read(text, str(path))


def lint(
    name_or_path: Path | str, *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> tuple[str, ...]:
    """Everything that is wrong with a playbook; nothing when it loads."""
    try:
        load(str(name_or_path), env=env, cwd=cwd)
    except DocumentError as error:
        return error.complaints
    except PlaybookError as error:
        return (f"{error.message} ({error.hint})" if error.hint else error.message,)
    return ()


def read(text: str, source: str) -> Playbook:
    """Read a playbook's text; DocumentError carries every complaint."""
    document = parse(text, source)
    reader = _Reader(document)
    playbook = reader.read()
    refuse([*document.problems, *reader.complaints])
    assert playbook is not None
    return playbook


class _Reader:
    """Reads the playbook of one document, gathering complaints."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.complaints: list[str] = []

    def complain(self, place: Place, message: str) -> None:
        self.complaints.append(self.document.complaint(place, message))

    def read(self) -> Playbook | None:
        value = self.document.value
        if isinstance(value, list):
            self.complain((), ANSIBLE_FILE)
            return None
        if isinstance(value, dict) and "steps" not in value and {"hosts", "groups"} & set(value):
            self.complain((), f"this looks like an inventory: fleetfix hosts -i {self.document.name}")
            return None
        made, complaints = check(_File, value)
        for place, message in complaints:
            said = answer(str(place[-1])) if place and message.startswith("unknown key") else None
            self.complain(place, said or message)
        raw = value if isinstance(value, dict) else {}
        names: Any = raw.get("vars") if isinstance(raw.get("vars"), dict) else {}
        self._vars(names)
        written_steps: Any = raw.get("steps") if isinstance(raw.get("steps"), list) else []
        secrets: Any = raw.get("secrets") if isinstance(raw.get("secrets"), list) else []
        self._secrets(secrets)
        steps = tuple(
            filter(None, (self._step(item, ("steps", n)) for n, item in enumerate(written_steps)))
        )
        self._check_order(steps)
        self._check_steps(steps, names, [text for one in secrets if (text := written(one))])
        return None if made is None else self._playbook(made, steps)

    def _playbook(self, made: _File, steps: tuple[RawStep, ...]) -> Playbook:
        text = self.document.text
        playbook = Playbook(
            name=made.name,
            summary=made.summary,
            source=self.document.name,
            digest=_digest_of(text, steps),
            text=text,
            vars=made.vars,
            secrets=made.secrets,
            policy=made.policy,
            steps=steps,
        )
        playbook._document = self.document
        used = {found for step in steps for _, found in references_of(step) if found.scope != SECRETS}
        playbook._used = tuple(sorted(used))
        return playbook

    def _vars(self, names: dict[str, Json]) -> None:
        for name, default in names.items():
            if not name.replace("-", "_").isidentifier():
                self.complain(("vars", name), f"{name!r} cannot name a variable: letters, digits, _ and -")
            for _ in malformed(default):
                self.complain(("vars", name), "a default refers to nothing: ${{ }} is read in steps only")
            for _, reference in references(default):
                self.complain(
                    ("vars", name),
                    f"a default cannot refer to {reference}: ${{{{ }}}} is read in steps only",
                )

    def _secrets(self, names: list[Any]) -> None:
        for number, name in enumerate(names):
            if name == BECOME:
                self.complain(
                    ("secrets", number), "'become' is the password for sudo: no playbook may use it"
                )
            if name in names[:number]:
                self.complain(("secrets", number), f"{name!r} is declared twice")

    # -- one step -----------------------------------------------------------------------------

    def _step(self, value: Any, place: Place) -> RawStep | None:
        if not isinstance(value, dict):
            self.complain(place, "a step is a mapping: an id, and one key that names its action")
            return None
        kinds = [key for key in value if key in KINDS]
        strange = [key for key in value if key not in KINDS and key not in CONTROLS]
        for key in strange:
            self.complain((*place, key), _unknown(key, action=not kinds))
        if len(kinds) != 1:
            self._complain_of_kinds(kinds, strange, place)
        controls = {key: value[key] for key in value if key in CONTROLS}
        if "id" not in value:
            self.complain(
                place, "'id' is missing: a short name by which other steps and the journal know this one"
            )
        for where, problem in malformed(value, place):
            self.complain(where, problem)
        if len(kinds) != 1 or not isinstance(written(value.get("id")), str):
            return None
        params = {} if value[kinds[0]] is None else value[kinds[0]]
        if kinds[0] == "fabric":
            params, wrong = fabfiles.settled(params, self.document.name)
            for where, problem in wrong:
                self.complain((*place, "fabric", *where), f"fabric: {problem}")
        identity = cast(str, written(value["id"]))
        return RawStep(id=identity, kind=kinds[0], controls=controls, params=params, place=place)

    def _complain_of_kinds(self, kinds: list[str], strange: list[str], place: Place) -> None:
        if kinds:
            self.complain((*place, kinds[1]), f"one step, one action: here are {' and '.join(kinds)}")
        elif not strange:
            self.complain(place, f"no action: one of the keys must be one of {', '.join(KINDS)}")

    # -- steps together -----------------------------------------------------------------------

    def _check_order(self, steps: tuple[RawStep, ...]) -> None:
        ids = [step.id for step in steps]
        for number, step in enumerate(steps):
            if step.id in ids[:number]:
                self.complain((*step.place, "id"), f"there is a step {step.id!r} already")
            self._check_ids(step, "when_changed", ids[:number], ids)
            self._check_ids(step, "when_pending", ids[number + 1 :], ids)
        if not self.complaints:
            self._check_circles(steps)

    def _check_circles(self, steps: tuple[RawStep, ...]) -> None:
        circle = [step.id for step in in_circle(steps)]
        if circle:
            message = f"the steps {', '.join(circle)} wait for one another by when_pending and when_changed"
            self.complain(steps[[step.id for step in steps].index(circle[0])].place, message)

    def _check_ids(self, step: RawStep, key: str, allowed: list[str], ids: list[str]) -> None:
        for name in ids_of(step, key):
            if name in allowed:
                continue
            place = (*step.place, key)
            if name in ids:
                side = "an earlier" if key == "when_changed" else "a later"
                self.complain(place, f"{key}: {name!r} is not {side} step")
            else:
                hint = hint_for(name, ids)
                self.complain(place, f"{key}: there is no step {name!r}" + (f", {hint}" if hint else ""))

    def _check_steps(self, steps: tuple[RawStep, ...], names: dict[str, Json], secrets: list[str]) -> None:
        for step in steps:
            self._check_secrets(step, secrets)
            for place, reference in references_of(step):
                if reference.scope == "vars" and reference.name not in names:
                    hint = hint_for(reference.name, names) or "declare it under vars"
                    self.complain(place, f"there is no variable {reference.name!r}, {hint}")
            self._try_step(step, names)

    def _check_secrets(self, step: RawStep, secrets: list[str]) -> None:
        """A secret is declared, and stands only where nothing shows it."""
        confidential = named(step.kind).confidential
        within = len(step.place) + 1
        for place, reference in references_of(step):
            if reference.scope != SECRETS:
                continue
            if reference.name not in secrets:
                hint = hint_for(reference.name, secrets) or "declare it under secrets"
                self.complain(place, f"there is no secret {reference.name!r}, {hint}")
            inside = place[within - 1] == step.kind and len(place) > within
            if not inside or place[within] not in confidential:
                where = " and ".join(sorted(confidential))
                takes = f"takes secrets in {where}" if where else "takes none"
                said = f"a secret would be shown here; {step.kind} {takes}"
                self.complain(place, said)

    def _try_step(self, step: RawStep, names: dict[str, Json]) -> None:
        """Check all of a step that does not depend on a variable."""
        if any(malformed(step.controls)) or any(malformed(step.params)):
            return
        open_places = {place for place, _ in references_of(step)}
        made = bound_step(step, lambda reference: names.get(reference.name))
        for place, message in () if isinstance(made, Step) else made:
            touched = any(
                place[: len(other)] == other or other[: len(place)] == place for other in open_places
            )
            if not touched or message.endswith("is missing"):
                self.complain(place, message)


def _digest_of(text: str, steps: tuple[RawStep, ...]) -> str:
    named = [str(step.params.get("sha256")) for step in steps if step.kind == "fabric"]
    return hashlib.sha256("\0".join([text, *named]).encode()).hexdigest()


def _unknown(key: str, *, action: bool) -> str:
    """What is wrong with a key; with `action`, the step has none that names its action."""
    hint = hint_for(key, [*KINDS, *CONTROLS])
    if action and not hint:
        hint = f"and the step has no action: one of {', '.join(KINDS)}"
    return answer(key) or f"unknown key {key!r}" + (f", {hint}" if hint else "")


# -- binding ----------------------------------------------------------------------------------------


class _Values:
    """What references name on one host."""

    def __init__(self, playbook: Playbook, host: Host, settings: Mapping[str, Json]) -> None:
        own = {name: value for name, value in host.vars.items() if name in playbook.vars}
        self.host = host
        self.vars = {**playbook.vars, **own, **settings}

    def __call__(self, reference: Reference) -> Json:
        known = self.vars if reference.scope == "vars" else self._of_host()
        if reference.name in known:
            return known[reference.name]
        hint = hint_for(reference.name, known)
        raise Unbound(f"{self.host.name} has no {reference.name!r}" + (f", {hint}" if hint else ""))

    def _of_host(self) -> dict[str, Json]:
        fields = {name: getattr(self.host, name) for name in Host.model_fields if name != "vars"}
        return {**self.host.vars, **fields}

    def key(self, used: tuple[Reference, ...]) -> str:
        """Equal for hosts that are bound to equal steps."""
        return json.dumps([self._fingerprint(reference) for reference in used])

    def _fingerprint(self, reference: Reference) -> Json:
        try:
            return _exact(self(reference))
        except Unbound:
            return ["unbound", self.host.name]

    def said(self, reference: Reference) -> str:
        """`vars.cuda is 14`."""
        try:
            value = self(reference)
        except Unbound:
            return ""
        return f"{reference} is {json.dumps(_plain(value))}"


def _exact(value: Json) -> Json:
    """A value with its types and its spelling, as JSON: 1.10 is not 1.1 here."""
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    return [type(value).__name__, written(value)]


def _plain(value: Json) -> Json:
    return list(value) if isinstance(value, tuple) else value


class _Binder:
    """Binds the steps of a playbook to one host."""

    def __init__(self, document: Document, steps: tuple[RawStep, ...], values: _Values) -> None:
        self.document = document
        self.steps = steps
        self.values = values

    def bind(self) -> tuple[Step, ...]:
        complaints: list[str] = []
        bound: list[Step] = []
        for step in self.steps:
            made: Step | Complaints = bound_step(step, self.values)
            if isinstance(made, Step):
                bound.append(made)
            else:
                complaints += [self._complaint(step, place, message) for place, message in made]
        refuse(complaints)
        return tuple(bound)

    def _complaint(self, step: RawStep, place: Place, message: str) -> str:
        named_here = [
            said
            for where, reference in references_of(step)
            if (where[: len(place)] == place or place[: len(where)] == where)
            and reference.scope != SECRETS
            and (said := self.values.said(reference))
        ]
        origin = (
            f" ({', '.join(dict.fromkeys(named_here))} on {self.values.host.name})" if named_here else ""
        )
        return self.document.complaint(place, message + origin)
