"""A value as a model, or everything that is wrong with it: each complaint with its place."""

from __future__ import annotations

import re
from typing import Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ValidationError, WithJsonSchema

from fleetfix.scalars import written
from fleetfix.spelling import hint_for

Model = TypeVar("Model", bound=BaseModel)
Place = tuple[str | int, ...]
"""Where in a document: keys and indexes from the root."""


def like(pattern: str, wish: str) -> tuple[AfterValidator, WithJsonSchema]:
    """Have text match a pattern, and say in words what is wanted where it does not."""

    def matches(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(wish)
        return text

    return AfterValidator(matches), WithJsonSchema({"type": "string", "pattern": f"^{pattern}$"})


def check(model: type[Model], value: Any) -> tuple[Model | None, tuple[tuple[Place, str], ...]]:
    """Make a model of a value, or say what is wrong at which place of it.

    Where the model wants text and a number or truth value was written, it gets what was written.
    """
    made, error = _validate(model, value)
    if error is not None:
        texted = value
        for item in error.errors(include_url=False):
            if item["type"] in ("string_type", "literal_error"):
                texted = _with_text(texted, _place_in(texted, item["loc"]))
        if texted is not value:
            value = texted
            made, error = _validate(model, value)
    if error is None:
        error = _truth_for_numbers(model, value)
    return (made, ()) if error is None else (None, _complaints(model, value, error))


def _validate(model: type[Model], value: Any) -> tuple[Model | None, ValidationError | None]:
    try:
        return model.model_validate(value), None
    except ValidationError as error:
        return None, error


def _truth_for_numbers(model: type[BaseModel], value: Any) -> ValidationError | None:
    """`retries: true`: pydantic reads 1, nobody means it. Written as text it is no number."""
    texted = _truth_as_text(value)
    if texted is value:
        return None
    error = _validate(model, texted)[1]
    kinds = {item["type"] for item in error.errors(include_url=False)} if error else set()
    return error if kinds & {"int_parsing", "float_parsing"} else None


def _truth_as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return written(value)
    if isinstance(value, dict):
        copy: Any = {key: _truth_as_text(item) for key, item in value.items()}
        return copy if any(copy[key] is not value[key] for key in value) else value
    if isinstance(value, list | tuple):
        copy = [_truth_as_text(item) for item in value]
        return copy if any(new is not old for new, old in zip(copy, value, strict=True)) else value
    return value


def _place_in(value: Any, location: tuple[int | str, ...]) -> Place:
    """The part of a pydantic location that exists in the value: union tags and the like left out."""
    place: list[str | int] = []
    for part in location:
        if _holds(value, part):
            value = value[part]
            place.append(part)
    return tuple(place)


def _holds(value: Any, part: int | str) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)


def _with_text(value: Any, place: Place) -> Any:
    """A copy with the scalar at a place replaced by what was written there."""
    if not place:
        text = None if isinstance(value, str) else written(value)
        return value if text is None else text
    part = place[0]
    inner = _with_text(value[part], place[1:])
    if inner is value[part]:
        return value
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[part] = inner
    return copy


def _complaints(
    model: type[BaseModel], value: Any, error: ValidationError
) -> tuple[tuple[Place, str], ...]:
    found: dict[Place, list[str]] = {}
    for item in error.errors(include_url=False):
        place = _place_in(value, item["loc"])
        message = _message(model, dict(item), place)
        if message not in found.setdefault(place, []):
            found[place].append(message)
    return tuple((place, _joined(place, messages)) for place, messages in found.items())


def _joined(place: Place, messages: list[str]) -> str:
    label = ".".join(str(part) for part in place)
    # What is missing is missing at once; other messages are of the kinds that a value may have.
    together = all(message.endswith("is missing") for message in messages)
    text = (" and " if together else ", or ").join(messages)
    return f"{label}: {text}" if label and not text.startswith("unknown key") else text


def _message(model: type[BaseModel], item: dict[str, Any], place: Place) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        key = str(place[-1]) if place else "?"
        inner = _model_at(model, place[:-1])
        hint = hint_for(key, keys_of(inner) if inner else ())
        return f"unknown key {key!r}" + (f", {hint}" if hint else "")
    if kind == "missing":
        return f"{item['loc'][-1]!r} is missing"
    if kind == "value_error":
        return (
            f"wanted {context['error']}, not {_shown(item['input'])}"
            if _is_wish(context)
            else str(context["error"])
        )
    wish = _WISHES.get(kind)
    if wish is None:
        return str(item["msg"])
    return f"wanted {wish.format(**context)}, not {_shown(item['input'])}"


def _is_wish(context: dict[str, Any]) -> bool:
    return str(context["error"]).startswith(("a ", "an ", "one "))


def _model_at(model: type[BaseModel], place: Place) -> type[BaseModel] | None:
    """The model that reads the mapping at this place, where it is plain to see."""
    for part in place:
        field = next(
            (info for name, info in model.model_fields.items() if part in (name, info.alias)), None
        )
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return None
        model = inner[0]
    return model


def keys_of(model: type[BaseModel]) -> list[str]:
    """The keys a model reads, as they are written in YAML."""
    return [info.alias or name for name, info in model.model_fields.items()]


_WISHES = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "nothing",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_short": "a list of at least {min_length}",
    "string_too_short": "at least {min_length} letters",
    "string_pattern_mismatch": "text like {pattern}",
}


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    text = written(value)
    if text is not None:
        return repr(text if len(text) <= 60 else text[:57] + "...") if isinstance(value, str) else text
    return (
        ("a list" if value else "an empty list")
        if isinstance(value, list | tuple)
        else "a mapping"
        if isinstance(value, dict)
        else repr(value)
    )
