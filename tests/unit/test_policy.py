"""Policy and Share: percentages round toward caution, and nonsense is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fleetfix.commands import Bytes, Seconds
from fleetfix.policy import Policy, Share


@pytest.mark.parametrize(
    ("written", "total", "least", "hosts"),
    [
        (3, 10, 0, 3),
        ("3", 10, 0, 3),
        ("10%", 16, 0, 1),
        ("10%", 9, 0, 0),
        ("10%", 9, 1, 1),
        ("25%", 15, 1, 3),
        ("100%", 7, 1, 7),
        ("0%", 7, 0, 0),
        ("33.3%", 10, 0, 3),
    ],
)
def test_a_share_rounds_down(written: object, total: int, least: int, hosts: int) -> None:
    assert Share.parse(written).of(total, least=least) == hosts


@pytest.mark.parametrize("written", ["", "ten", "-1", "101%", "10 %%", 1.5, True, None, [1]])
def test_what_is_no_share_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="a number of hosts"):
        Share.parse(written)


@given(st.integers(0, 10_000), st.integers(0, 100))
def test_a_share_never_exceeds_its_percentage(total: int, percent: int) -> None:
    assert Share.parse(f"{percent}%").of(total) * 100 <= total * percent


def test_batch_is_one_or_a_list() -> None:
    assert Policy.model_validate({"batch": 4}).batch == (Share.parse(4),)
    assert Policy.model_validate({"batch": ["10%", 4]}).batch == (Share.parse("10%"), Share.parse(4))
    with pytest.raises(ValidationError):
        Policy.model_validate({"batch": []})


def test_a_policy_survives_json() -> None:
    policy = Policy.model_validate({"canary": 2, "batch": ["10%", 5], "soak": "5m", "max_failures": "5%"})
    assert Policy.model_validate_json(policy.model_dump_json()) == policy


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (90, 90.0),
        ("90", 90.0),
        ("60s", 60.0),
        ("5m", 300.0),
        ("1h", 3600.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        (0.5, 0.5),
    ],
)
def test_times_are_read_as_people_write_them(written: object, seconds: float) -> None:
    assert TypeAdapter(Seconds).validate_python(written) == seconds


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (64, 64),
        ("64MiB", 64 * 1024**2),
        ("2GB", 2 * 1000**3),
        ("1.5K", 1536),
        ("7B", 7),
        ("10 TiB", 10 * 1024**4),
    ],
)
def test_sizes_are_read_as_people_write_them(written: object, size: int) -> None:
    assert TypeAdapter(Bytes).validate_python(written) == size


@pytest.mark.parametrize("written", ["soon", "5 parsecs", "", -1, True, None, "1h 30", "nan", float("nan")])
def test_what_is_no_time_or_size_is_refused(written: object) -> None:
    for kind in (Seconds, Bytes):
        with pytest.raises(ValidationError):
            TypeAdapter(kind).validate_python(written)
