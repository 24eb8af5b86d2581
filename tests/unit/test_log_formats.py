"""Each known format reads a line of its trainer; numbers are read as people and logs write them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.domain.log_formats import BY_NAME, FORMATS, number, whole
from fleetfix.remote.logs import cleaned

TITAN = (
    "[titan] 2026-03-02 08:14:55,120 - root - INFO - step: {step:>2}  loss:  5.40312  grad_norm:  1.2044  "
)
TITAN += "memory: 61.20GiB(44.02%)  tps: {tps}  tflops: 402.10  mfu: {mfu}"

COLOURED = "[rank3]:[titan] 2026-03-02 08:14:55,120 - root - INFO - \x1b[31mstep: 40  \x1b[32mloss:  5.1  "
COLOURED += "\x1b[36mmemory: 61.20GiB(44.02%)  \x1b[34mtps: 12,804  \x1b[36mmfu: 40%\x1b[39m"

LINES = [
    ("torchtitan", TITAN.format(step=12, tps="19,876", mfu="40.11%"), 12, 19876),
    ("torchtitan", TITAN.format(step=1500, tps="987", mfu="N/A"), 1500, 987),
    (
        "torchtitan",
        COLOURED,
        40,
        12804,
    ),
    ("jsonl", '{"step": 7, "loss": 2.5, "tokens_per_sec": 20150.5}', 7, 20150.5),
    ("jsonl", '{"tok_s":20150,"step":7}', 7, 20150),
    ("jsonl", '{"global_step": "1,200", "tokens_per_second": "7.802e+04"}', 1200, 78020),
    ("jsonl", '[rank0]: {"throughput/tokens_per_sec": 1.6e5, "iteration": 3}', 3, 160000),
    (
        "jsonl-per-gpu",
        '{"throughput/tokens_per_sec": 160000, "throughput/device/tokens_per_sec": 20000, "step": 3}',
        3,
        20000,
    ),
]


@pytest.mark.parametrize(("name", "line", "step", "rate"), LINES)
def test_a_line_of_each_trainer_yields_its_rate_and_step(
    name: str, line: str, step: int, rate: float
) -> None:
    row = BY_NAME[name]
    found = re.search(row.rate, cleaned(line))
    assert found
    assert number(found["rate"]) == pytest.approx(rate)
    assert row.step
    at = re.search(row.step, cleaned(line))
    assert at
    assert whole(at["step"]) == step


@pytest.mark.parametrize(
    "line",
    [
        TITAN.format(step=12, tps="nan", mfu="N/A"),
        TITAN.format(step=12, tps="N/A", mfu="N/A"),
        "[titan] INFO - Training starts at step 1, https: 20",
        '{"step": 3, "device/tokens_per_sec_limit": 5}',
        '{"note": "tokens_per_sec unknown"}',
        "throughput per GPU (TFLOP/s/GPU): 490.0",
        "",
    ],
)
def test_a_line_without_a_rate_yields_none(line: str) -> None:
    assert not any(re.search(row.rate, line) for row in FORMATS)


def test_a_key_that_ends_like_another_is_another() -> None:
    both = '{"throughput/device/tokens_per_sec": 20000, "throughput/tokens_per_sec": 160000}'
    found = {row.name: re.search(row.rate, both) for row in FORMATS}
    assert found["jsonl"]
    assert found["jsonl"]["rate"] == "160000"
    assert found["jsonl-per-gpu"]
    assert found["jsonl-per-gpu"]["rate"] == "20000"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10,050", 10050),
        ("1,234,567.5", 1234567.5),
        ("12.8K", 12800),
        ("20.1k", 20100),
        ("0.02M", 20000),
        ("1.090B", 1.09e9),
        ("1.28e4", 12800),
        ("7.802e+04", 78020),
        ("'7.802e+04'", 78020),
        ('"3049"', 3049),
        ("10005.5/9903.7", 10005.5),
        (" 20 K", 20000),
        ("100,", 100),
    ],
)
def test_numbers_are_read_as_logs_write_them(text: str, value: float) -> None:
    assert number(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "nan", "inf", "-5", "0", "0.0", "1,23", "fast", "1.2.3", "1e999", "²"]
)
def test_what_is_no_rate_is_none(text: str) -> None:
    assert number(text) is None


@given(st.integers(1, 10**9))
def test_grouping_digits_changes_no_number(value: int) -> None:
    assert number(f"{value:,}") == number(str(value)) == value


@given(st.text(max_size=30))
def test_no_text_breaks_the_readers(text: str) -> None:
    rate = number(text)
    assert rate is None or rate > 0
    step = whole(text)
    assert step is None or step >= 0


def test_patterns_stay_in_the_dialect_of_the_oldest_host() -> None:
    for row in FORMATS:
        # Possessive quantifiers and atomic groups came with Python 3.11.
        assert not re.search(r"[*+?}]\+|\(\?>", row.rate + (row.step or ""))
