"""How each trainer writes its rate of tokens into its log.

A format is data: add a row, and a line of that trainer's log to the tests. `rate` is a regex that
finds the rate in one line, as the group `rate`; `step` one that finds the step, as the group `step`.
Both run on the host, on lines without terminal colours, in Python 3.8's dialect.
"""

from __future__ import annotations

import re
from typing import Literal

from fleetfix.commands import Value

Scope = Literal["per_gpu", "global"]

NUMBER = r"[0-9]+(?:[,_][0-9]{3})*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?(?:\s?[kKMGBT]\b)?"
"""A number as logs write it: `10,050`, `12.8K`, `7.802e+04`; a digit first, so never `N/A` or `nan`."""


class LogFormat(Value):
    """Where a trainer's log says how fast it is, and of what that is the rate."""

    name: str
    rate: str
    step: str | None
    scope: Scope
    """per_gpu and global rates are never compared with one another."""
    note: str = ""


def _json_number(*keys: str) -> str:
    """A regex for one of these exact keys in a JSON object; a key that ends like another is another."""
    names = "|".join(re.escape(key) for key in keys)
    return rf"^\s*\{{.*\"(?:{names})\"\s*:\s*\"?(?P<rate>{NUMBER})"


_JSON_STEP = (
    r"\"(?:step|global_step|current_steps|iteration|iter)\"\s*:\s*\"?(?P<step>[0-9]+(?:[,_][0-9]{3})*)"
)

FORMATS: tuple[LogFormat, ...] = (
    LogFormat(
        # `step:  4  loss:  7.62585 … memory: 66.91GiB(37.51%)  tps: 10,050  tflops: …  mfu: N/A`
        name="torchtitan",
        rate=rf"\btps:\s*(?P<rate>{NUMBER})(?:\s|$)",
        step=r"\bstep:\s*(?P<step>[0-9]+(?:,[0-9]{3})*)",
        scope="per_gpu",
        note="tps is tokens per second of one device (metrics.py); each rank may print the step",
    ),
    LogFormat(
        name="jsonl-per-gpu",
        rate=_json_number(
            "throughput/device/tokens_per_sec",
            "device/tokens_per_sec",
            "tokens_per_sec_per_gpu",
            "tokens_per_second_per_gpu",
            "tokens_per_gpu_per_second",
            "tok_s_per_gpu",
            "throughput(tps)",
            "throughput/device/TPS",
        ),
        step=_JSON_STEP,
        scope="per_gpu",
    ),
    LogFormat(
        name="jsonl",
        rate=_json_number(
            "tokens_per_sec",
            "tokens_per_second",
            "throughput/tokens_per_sec",
            "tok_per_sec",
            "tok_per_s",
            "tok_s",
            "tok/s",
        ),
        step=_JSON_STEP,
        scope="global",
        note="windowed rates only: an average since the start must be differenced, and is not here",
    ),
)

BY_NAME = {row.name: row for row in FORMATS}

_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


def number(text: str) -> float | None:
    """Read a rate as logs and people write it; None where it is none, or not above zero and finite.

    `10,050`  `12.8K`  `7.802e+04`  `'7.8e4'`  `1.090B`  `10005.5/9903.7` (the first of a pair)
    """
    plain = text.strip(" \t'\",;").partition("/")[0].strip()
    match = re.fullmatch(
        r"([0-9]{1,3}(?:[,_][0-9]{3})+(?:\.[0-9]*)?|[0-9]+(?:\.[0-9]*)?)(?:[eE]([-+]?[0-9]{1,3}))?\s?([kKmMgGbBtT]?)",
        plain,
    )
    if match is None:
        return None
    digits = match[1].replace(",", "").replace("_", "")
    value = float(f"{digits}e{match[2] or 0}") * _FACTORS[match[3].lower()]
    return value if 0 < value < 1e15 else None


def whole(text: str | None) -> int | None:
    """Read a step number, `1,500` included; None where it is none."""
    digits = (text or "").replace(",", "").replace("_", "")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 16 else None
