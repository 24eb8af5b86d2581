"""How a run goes through its hosts: canary, batches, budgets."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import core_schema

from fleetfix.commands import Seconds, Value


class Share:
    """A number of hosts: `3`, or `"10%"` of those counted. Percentages round toward caution.

    Caution is down for what may be done at once (a batch: at least 1) and for what may be lost
    (a budget: may be 0).
    """

    __slots__ = ("count", "percent")

    def __init__(self, count: int | None, percent: float | None) -> None:
        self.count = count
        self.percent = percent

    @classmethod
    def parse(cls, value: object) -> Share:
        """Read `3`, `"3"` or `"10%"`; anything else is a ValueError."""
        if isinstance(value, Share):
            return value
        text = str(value).strip()
        if not isinstance(value, bool) and re.fullmatch(r"\d+", text):
            return cls(int(text), None)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
        if match and 0 <= float(match[1]) <= 100:
            return cls(None, float(match[1]))
        raise ValueError('a number of hosts such as 3, or a share such as "10%"')

    def of(self, total: int, *, least: int = 0) -> int:
        """Say it in hosts, out of `total`, never under `least`."""
        if self.count is not None:
            return max(self.count, least)
        assert self.percent is not None
        return max(int(total * self.percent / 100), least)

    def __str__(self) -> str:
        return str(self.count) if self.count is not None else f"{self.percent:g}%"

    def __repr__(self) -> str:
        return f"Share({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Share) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\d+(\.\d+)?%?$"},
            ]
        }


def _some(share: Share) -> Share:
    if not (share.count or share.percent):
        raise ValueError("a batch of at least 1 host, or of a share above 0%")
    return share


Size = Annotated[Share, AfterValidator(_some)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _one_or_many(value: object) -> object:
    return value if isinstance(value, list | tuple) else (value,)


class Policy(Value):
    """How far a run goes, and when it stops by itself."""

    canary: int = Field(default=1, ge=0)
    """The first hosts with something to do; alone, and before all others."""
    strata: tuple[VariableName, ...] = ()
    """Host variables, such as `sku`; the canary takes its number of hosts for each of their values."""
    batch: Annotated[tuple[Size, ...], BeforeValidator(_one_or_many), Field(min_length=1)] = Field(
        default=(Share(None, 25.0),), json_schema_extra={"default": ["25%"]}
    )
    """Sizes of the batches after the canary, one or a list; the last one repeats."""
    forks: int = Field(default=64, ge=1)
    """Hosts talked to at the same time."""
    max_failures: Share = Share(0, None)
    """Touched hosts that may end badly before no further host is started."""
    max_unreachable: Share = Share(None, 10.0)
    """Hosts that may be unreachable or blocked before anything was changed."""
    max_unavailable: Share | None = None
    """Hosts that may be out of service at the same time, of all hosts of the run; none: no limit. Those
    count that cannot be reached, are blocked, have their job stopped or were not brought back, and those
    at work until they end."""
    soak: Seconds = 0.0
    """Seconds between one batch and the next."""
    cohort: Literal["job", "none"] = "job"
    """Hosts that train one job, or share what is changed, go as one; with `none` they are blocked."""
    on_unproven: Literal["halt", "count"] = "halt"
    """A host that is mended and sound, but not proven fast, halts the run or counts as a failure."""
