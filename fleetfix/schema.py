"""The JSON Schema of playbooks, for editors: made from the models, so that it says what loading does."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from fleetfix.actions import KINDS, named
from fleetfix.policy import Policy
from fleetfix.sealed import NAME
from fleetfix.steps import Controls

_BOUND = {"type": "string", "pattern": r"\$\{\{.*\}\}"}
"""A reference may stand wherever a value does."""


class _Generator(GenerateJsonSchema):
    # The default of `batch` is a tuple of shares; Policy itself says how it is written.
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - as its parent has it


def schema() -> dict[str, Any]:
    """The schema of a playbook file, every action and check included."""
    definitions: dict[str, Any] = {}
    properties = {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9-]{0,39}$"},
        "summary": {"type": "string"},
        "vars": {"type": "object"},
        "secrets": {"type": "array", "items": {"type": "string", "pattern": f"^{NAME}$"}},
        "policy": _taken(Policy.model_json_schema(schema_generator=_Generator), definitions),
        "steps": {"type": "array", "minItems": 1, "items": _step(definitions)},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fleetfix playbook",
        "type": "object",
        "properties": properties,
        "required": ["name", "steps"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _step(definitions: dict[str, Any]) -> dict[str, Any]:
    controls = _taken(Controls.model_json_schema(schema_generator=_Generator), definitions)
    kinds = {
        kind: _taken(named(kind).model_json_schema(schema_generator=_Generator), definitions)
        for kind in KINDS
    }
    return {
        "type": "object",
        "properties": {
            **_open(controls)["properties"],
            **{kind: _open(each) for kind, each in kinds.items()},
        },
        "required": ["id"],
        "oneOf": [{"required": [kind]} for kind in KINDS],
        "additionalProperties": False,
    }


def _taken(model: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A model's schema with its inner definitions moved to the one place where references look."""
    definitions |= model.pop("$defs", {})
    return model


def _open(model: dict[str, Any]) -> dict[str, Any]:
    """Let each parameter be a `${{ }}` as well."""
    opened = {key: {"anyOf": [value, _BOUND]} for key, value in model.get("properties", {}).items()}
    return {**model, "properties": opened}
