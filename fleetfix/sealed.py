"""Text with secrets in it, by their names: what stands for their values wherever those may not be.

The values never come here. A `Sealed` is made where a playbook's `${{ secrets.NAME }}` is bound, goes to
the host as `{"$secret": …}` in the arguments of a call, and is made whole there when the call is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_serializer,
)
from pydantic_core import PydanticKnownError

KEY = "$secret"
NAME = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
KEPT = {"kept": True}
"""The context in which what was written for a host, or for later, is read as a model again."""


class Sealed(BaseModel):
    """Text and names of secrets in turn; text comes first and last, and may be empty."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parts: Annotated[tuple[str, ...], Field(min_length=3)]

    @property
    def names(self) -> tuple[str, ...]:
        """The secrets in it."""
        return self.parts[1::2]

    @model_serializer
    def placeholder(self) -> dict[str, Any]:
        """What stands for it in the arguments of a call: one name, or text and names in turn."""
        whole = len(self.parts) == 3 and not self.parts[0] and not self.parts[2]
        return {KEY: self.parts[1] if whole else list(self.parts)}


def _read(value: Any, info: ValidationInfo) -> str | Sealed:
    if isinstance(value, str | Sealed):
        return value
    if isinstance(value, dict) and set(value) == {KEY} and (info.context or {}).get("kept"):
        inside = value[KEY]
        parts = ("", inside, "") if isinstance(inside, str) else tuple(map(str, inside))
        return Sealed(parts=parts)
    raise PydanticKnownError("string_type")


def in_arguments(value: str | Sealed) -> str | dict[str, Any]:
    """Confidential text as it stands in the arguments of a call."""
    return value if isinstance(value, str) else value.placeholder()


Confidential = Annotated[
    str | Sealed,
    PlainValidator(_read),
    PlainSerializer(in_arguments, return_type=Any),
    WithJsonSchema({"type": "string"}),
]
"""Text that may hold secrets. A mapping in a playbook or inventory is never taken for one."""


def names_in(value: Any) -> Iterator[str]:
    """The names of the secrets that arguments have placeholders of, each as often as it stands there."""
    if isinstance(value, dict):
        inside = value.get(KEY)
        if len(value) == 1 and inside is not None:
            yield from (inside,) if isinstance(inside, str) else inside[1::2]
            return
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for item in value:
        yield from names_in(item)
