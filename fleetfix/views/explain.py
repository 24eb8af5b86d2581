"""The words of the playbook language, explained from the models themselves."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from fleetfix.action import Action, Check
from fleetfix.steps import CONTROLS, Controls

Kind = type[Action[Any]] | type[Check[Any]]

SAID = 19
"""The column at which what a parameter means begins."""
WIDTH = 100


def actions_text(kinds: Sequence[Kind]) -> str:
    """Every action and check with the first sentence on it, and the controls of a step."""
    lines = []
    for title, base in (("actions", Action), ("checks", Check)):
        lines.append(f"{title}:")
        lines += [f"  {kind.kind:<16} {_said(kind)[0]}" for kind in kinds if issubclass(kind, base)]
    lines.append("how a step is run:")
    lines += textwrap.wrap(", ".join(CONTROLS), WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def control_text(name: str) -> str:
    """What one control of a step means."""
    schema = Controls.model_json_schema(by_alias=True)
    facts = _facts(schema["properties"][name], schema.get("$defs", {}), name in schema["required"])
    said = _meanings(Controls).get(name, "")
    lines = [f"{name} (how a step is run)", "", *textwrap.wrap(said, WIDTH), *([""] if said else [])]
    return "\n".join([*lines, f"value: {', '.join(facts)}"])


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
    meanings = _meanings(kind)
    lines = []
    for name, field in schema.get("properties", {}).items():
        facts = ", ".join(_facts(field, schema.get("$defs", {}), name in required))
        lines.append(f"  {name:<{SAID - 3}} {facts}")
        lines += textwrap.wrap(
            meanings.get(name, ""), WIDTH, initial_indent=" " * SAID, subsequent_indent=" " * SAID
        )
    return lines


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """What the code says below each field of a model, by the name that it has in YAML."""
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        # A class such as Action[JobFacts] has no source of its own.
        written = issubclass(one, BaseModel) and "[" not in one.__name__
        if written and one.__module__.startswith("fleetfix."):
            body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
            assert isinstance(body, ast.ClassDef)
            found |= dict(_documented(body))
    fields = model.model_fields
    return {fields[name].alias or name: said for name, said in found.items() if name in fields}


def _documented(body: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, said in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match said:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield field.target.id, " ".join(text.split())


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
