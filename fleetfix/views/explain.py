"""The words of the playbook language, explained from the models themselves."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

from fleetfix.action import Action, Check

Kind = type[Action[Any]] | type[Check[Any]]


def actions_text(kinds: Sequence[Kind]) -> str:
    """Every action and check with the first sentence on it."""
    lines = []
    for title, base in (("actions", Action), ("checks", Check)):
        lines.append(f"{title}:")
        lines += [f"  {kind.kind:<16} {_said(kind)[0]}" for kind in kinds if issubclass(kind, base)]
    return "\n".join(lines)


def action_text(kind: Kind) -> str:
    """What it is for and each of its parameters."""
    sort = "action" if issubclass(kind, Action) else "check"
    lines = [f"{kind.kind} ({sort})", "", *_said(kind), "", "parameters:"]
    return "\n".join([*lines, *(_parameters(kind) or ["  none"])])


def _said(kind: Kind) -> list[str]:
    return inspect.getdoc(kind).splitlines() if kind.__doc__ else [""]  # type: ignore[union-attr]


def _parameters(kind: Kind) -> list[str]:
    schema = kind.model_json_schema(by_alias=True)
    required = set(schema.get("required", ()))
    return [
        f"  {name:<16} {', '.join(_facts(field, schema.get('$defs', {}), name in required))}"
        for name, field in schema.get("properties", {}).items()
    ]


def _facts(field: dict[str, Any], definitions: dict[str, Any], required: bool) -> Iterator[str]:
    yield _type(field, definitions)
    if required:
        yield "required"
    elif "default" in field:
        yield f"default {json.dumps(field['default'])}"
    if described := field.get("description"):
        yield str(described)


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "$ref" in field:
        return _type(definitions.get(str(field["$ref"]).rpartition("/")[2], {}), definitions)
    if "const" in field:
        return json.dumps(field["const"])
    if "enum" in field:
        return " | ".join(json.dumps(one) for one in field["enum"])
    for key in ("anyOf", "oneOf"):
        if key in field:
            return " | ".join(dict.fromkeys(_type(one, definitions) for one in field[key]))
    if field.get("type") == "array":
        return (
            f"list of {_type(field['items'], definitions)}"
            if isinstance(field.get("items"), dict)
            else "list"
        )
    return str(field.get("type", "any"))
