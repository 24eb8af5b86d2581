"""assert: each claim holds, does not, or cannot be told."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fleetfix.actions import named
from fleetfix.commands import Completed
from tests.unit.test_host_facts import FIELDS, MISMATCH, NO_RATES, QUERY, answer, job, reply

Assert = named("assert")


def judge(claims: dict[str, Any], asked: float = 999.9, **other: Any) -> Any:
    """Claim something of a host that answers so."""
    check = Assert.model_validate(claims)
    asking = check.probe()
    (clock,) = next(asking)
    survey, rates, again = asking.send((Completed(value=asked),))
    assert [one.function for one in (clock, survey, rates, again)] == [
        "controller.clock", "facts.survey", "logs.find_rates", "controller.clock",
    ]  # fmt: skip
    with pytest.raises(StopIteration) as end:
        asking.send((Completed(value=reply(**other)), NO_RATES, Completed(value=asked + 1)))
    return check.judge(end.value.value)


@pytest.mark.parametrize(
    "claims",
    [
        {"gpus": 2},
        {"gpu_model": "NVIDIA H*"},
        {"gpu_model": ["NVIDIA B200", "NVIDIA H200"]},
        {"gpu_memory": "140GiB"},
        {"driver": "570.*", "driver_cuda": "12.8", "kernel": "6.?.0"},
        {"persistence": True},
        {"environment": "/opt/*", "python": "3.11", "torch": "2.8.*"},
        {"disk_free": {"/": "50GiB", "/var/lib": "20GiB"}},
        {"memory_free": "1GiB", "load_below": 0.5},
        {"clock_within": "2s"},
        {"job": True},
        {"sound": True},
        {"gpus": None, "driver": None, "kernel": "*"},
    ],
)
def test_what_is_so_passes(claims: dict[str, Any]) -> None:
    assert judge(claims).result == "pass"


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"gpus": 8}, "2 GPUs (wanted 8)"),
        ({"gpu_model": ["NVIDIA B200", "NVIDIA H100*"]},
         "GPU model is NVIDIA H200 (wanted NVIDIA B200 or NVIDIA H100*)"),
        ({"gpu_memory": "180GiB"}, "a GPU has 140.4 GiB (wanted 180.0 GiB)"),
        ({"driver": "565.*"}, "driver is 570.86.10 (wanted 565.*)"),
        ({"driver": "570"}, "driver is 570.86.10 (wanted 570)"),
        ({"persistence": False}, "persistence mode is on (wanted off)"),
        ({"torch": "2.9.*"}, "torch is 2.8.0 (wanted 2.9.*)"),
        ({"disk_free": {"/var/lib": "30GiB", "/": "1GiB"}}, "/var has 20.0 GiB"),
        ({"memory_free": "500GiB"}, "memory has 400.0 GiB free (wanted 500.0 GiB)"),
        ({"load_below": 0.1}, "the load a CPU is 0.12 (wanted below 0.1)"),
        ({"job": False}, "a job runs on GPUs"),
        ({"gpus": 8, "driver": "1.*"}, "2 GPUs (wanted 8); driver is 570.86.10 (wanted 1.*)"),
    ],
)  # fmt: skip
def test_what_is_not_so_fails_with_what_is_the_case(claims: dict[str, Any], said: str) -> None:
    verdict = judge(claims)
    assert verdict.result == "fail"
    assert verdict.reason.replace("/var/lib has", "/var has").startswith(said)


def test_every_gpu_counts() -> None:
    mixed = f"{FIELDS}\n" + QUERY.splitlines()[1] + "\n" + QUERY.splitlines()[2].replace("H200", "H100")
    assert judge({"gpu_model": "NVIDIA H200"}, gpus={"query": answer(mixed)}).result == "fail"
    assert judge({"gpus": 2}, gpus={"on_bus": 8}).reason == "nvidia-smi lists 2 of 8 GPUs"


@pytest.mark.parametrize(
    ("claims", "other"),
    [
        ({"gpus": 2}, {"gpus": {"query": answer(MISMATCH, 18)}}),
        ({"gpu_model": "*"}, {"gpus": {"query": answer("", None)}}),
        ({"gpu_memory": 1}, {"gpus": {"query": answer("", None)}}),
        ({"driver": "*"}, {"gpus": {"query": answer("", None), "module": None}}),
        ({"ecc": True}, {"gpus": {"query": answer(QUERY)}}),
        ({"torch": "*"}, {"environments": []}),
        ({"disk_free": {"/home/alice": 1}}, {}),
        ({"job": False}, {"jobs": [], "complete": False}),
    ],
)
def test_what_a_host_does_not_tell_is_unknown(claims: dict[str, Any], other: dict[str, Any]) -> None:
    assert judge(claims, **other).result == "unknown"


def test_a_wrong_claim_weighs_more_than_an_unknown_one() -> None:
    assert judge({"kernel": "5.*", "torch": "*"}, environments=[]).result == "fail"


def test_a_clock_that_is_off_fails_by_what_is_certain() -> None:
    verdict = judge({"clock_within": "2s"}, asked=900.0)
    assert (verdict.result, verdict.reason) == ("fail", "its clock is 99.5 s off")
    assert judge({"clock_within": "2m"}, asked=900.0).result == "pass"


def test_sound_says_what_inspect_would() -> None:
    verdict = judge({"sound": True}, jobs=[job(orphan=True)])
    assert verdict.result == "fail"
    assert "its job is gone" in verdict.reason


def test_no_gpus_can_be_claimed_of_a_machine_without() -> None:
    absent = answer("nvidia-smi: not found", 127)
    none = {"on_bus": 0, "query": absent, "apps": absent, "table": absent}
    assert judge({"gpus": 0}, gpus=none).result == "pass"
    assert judge({"gpus": 8}, gpus=none).result == "fail"
    assert judge({"gpus": 0}, gpus={**none, "on_bus": 8}).result == "unknown"


@pytest.mark.parametrize(
    ("claims", "complaint"),
    [
        ({}, "it claims nothing"),
        ({"gpus": None}, "it claims nothing"),
        ({"sound": False}, "makes no sense"),
        ({"gpu": 8}, "Extra inputs"),
        ({"disk_free": {"var": 1}}, "pattern"),
        ({"driver": []}, "at least 1"),
        ({"driver": ""}, "at least 1"),
        ({"gpus": -1}, "greater than or equal"),
        ({"gpu_memory": "big"}, "a size such as"),
    ],
)
def test_what_makes_no_sense_is_refused(claims: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        Assert.model_validate(claims)
