"""Fabfiles that a playbook names: read and looked through when it is read, and never run by that."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetfix.commands import Json
from fleetfix.complaints import Place
from fleetfix.errors import InventoryError
from fleetfix.folders import expanded
from fleetfix.inventory_sources.trust import require_trust_to_run
from fleetfix.spelling import hint_for, hint_for_file
from fleetfix.substitution import references

FUNCTIONS = ("do", "check", "undo")
LARGEST = 4 * 1024 * 1024

Complaints = list[tuple[Place, str]]


def settled(params: Json, source: str) -> tuple[Json, Complaints]:
    """The parameters of a `fabric` step with the file's path and sha256 made whole, and what is wrong."""
    if not isinstance(params, dict) or not isinstance(params.get("file"), str) or not params["file"]:
        return params, []  # the model says what is missing
    if any(references(params["file"])):
        return params, [(("file",), "file: it is the same for all hosts: ${{ }} is not read here")]
    path = (Path(source).parent.absolute() / expanded(params["file"])).resolve()
    text, wrong = _read(path, params["file"])
    if text is None:
        return params, [(("file",), f"file: {wrong}")]
    digest = hashlib.sha256(text).hexdigest()
    made = {**params, "file": str(path), "sha256": params.get("sha256") or digest}
    if made["sha256"] != digest:
        return made, [(("sha256",), f"sha256: {params['file']} is another one: it has {digest}")]
    try:
        tree = ast.parse(text, filename=path.name)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        return made, [(("file",), f"file: {params['file']}{line} is not Python: {said}")]
    return made, list(_of_functions(tree, made, params["file"]))


def _read(path: Path, shown: str) -> tuple[bytes | None, str]:
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except FileNotFoundError:
        hint = hint_for_file(path.name, _beside(path))
        return None, f"there is no {path}" + (f", {hint}" if hint else "")
    except OSError as error:
        return None, f"{path}: {os.strerror(error.errno or 0).lower()}"
    if len(text) > LARGEST:
        return None, f"{shown} is larger than {LARGEST} bytes"
    try:
        require_trust_to_run(path, shown)
    except InventoryError as error:
        return None, error.message
    return text, ""


def _beside(path: Path) -> list[str]:
    try:
        return [one.name for one in path.parent.iterdir()]
    except OSError:
        return []


def _of_functions(tree: ast.Module, params: dict[str, Any], shown: str) -> Iterator[tuple[Place, str]]:
    known = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    others = set(_bound_otherwise(tree))
    args = params.get("args") if isinstance(params.get("args"), dict) else {}
    for key in FUNCTIONS:
        name = params.get(key)
        if not isinstance(name, str) or any(references(name)):
            continue
        if name in known:
            yield from (((key,), f"{key}: {wrong}") for wrong in _wrong_with(known[name], set(args or ())))
        elif name not in others and "*" not in others:
            hint = hint_for(name, [*known, *others])
            yield (key,), f"{key}: {shown} has no function {name!r}" + (f", {hint}" if hint else "")


def _bound_otherwise(tree: ast.Module) -> Iterator[str]:
    """Names that a file gets by import or assignment; whatever they are is seen when they are called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _wrong_with(function: ast.FunctionDef | ast.AsyncFunctionDef, given: set[str]) -> Iterator[str]:
    what = f"{function.name} (line {function.lineno})"
    if isinstance(function, ast.AsyncFunctionDef):
        yield f"{what} is async: Fabric's connections are not"
    takes = function.args
    positional = [one.arg for one in (*takes.posonlyargs, *takes.args)]
    if not positional and takes.vararg is None:
        yield f"{what} takes no connection: its first parameter is `c`"
        return
    named = [one.arg for one in takes.args if one.arg in positional[1:]]
    every = {*named, *(one.arg for one in takes.kwonlyargs)}
    optional = set(positional[len(positional) - len(takes.defaults) :] if takes.defaults else ())
    optional |= {
        one.arg
        for one, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True)
        if default is not None
    }
    if missing := sorted(every - optional - given):
        yield f"{what} wants {', '.join(missing)}, and `args` does not give it"
    if takes.kwarg is None and (strange := sorted(given - every)):
        yield f"{what} takes no {', '.join(strange)}, which `args` gives"
