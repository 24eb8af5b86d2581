"""gpu_idle: idle only where every witness says so; odd is unknown."""

from __future__ import annotations

from typing import Any

import pytest

from fleetfix.actions.gpu_idle import GpuIdle
from fleetfix.commands import Completed

HEADER = "index, uuid, memory.used [MiB], memory.total [MiB], mig.mode.current\n"
APPS = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n"
TABLE = "| Processes:   |\n|  No running processes found   |\n"
EMPTY = "| Processes:   |\n+---+\n"


def gpus(*used: str) -> str:
    return HEADER + "".join(f"{n}, GPU-{n}, {one}, 143771 MiB, Disabled\n" for n, one in enumerate(used))


def survey(used: tuple[str, ...] = ("0 MiB", "0 MiB"), apps: str = "", **more: Any) -> dict[str, Any]:
    def said(text: str) -> dict[str, Any]:
        return {"exit": 0, "text": text, "cut": False}

    return {
        "gpus": said(gpus(*used)),
        "apps": said(APPS + apps),
        "table": said(TABLE),
        "complete": True,
        "selected": None,
        "minors": {},
        "jobs": [],
        "listed": {},
        **more,
    }


def judge(value: dict[str, Any], **parameters: Any) -> Any:
    check = GpuIdle.model_validate(parameters)
    asking = check.probe()
    (read,) = next(asking)
    assert (read.function, read.args) == ("gpus.survey", {"gpus": parameters.get("gpus", "of-job")})
    with pytest.raises(StopIteration) as end:
        asking.send((Completed(value=value),))
    return check.judge(end.value.value)


def who(user: str = "alice", allowed: bool = False) -> dict[str, Any]:
    return {"uid": 1001, "user": user, "argv": ["/usr/bin/python", "/x/train.py"], "allowed": allowed}


def test_no_process_and_no_memory_is_idle() -> None:
    verdict = judge(survey())
    assert (verdict.result, verdict.reason) == ("pass", "2 GPUs idle, at most 0 MiB in use")


@pytest.mark.parametrize(("used", "result"), [("63 MiB", "pass"), ("64 MiB", "fail"), ("55 MiB", "pass")])
def test_memory_decides_at_the_limit(used: str, result: str) -> None:
    assert judge(survey(("0 MiB", used))).result == result
    assert judge(survey(("0 MiB", used)), memory_below="1GiB").result == "pass"


def test_a_compute_process_is_named() -> None:
    verdict = judge(survey(apps="GPU-1, 321, python, 9 MiB\n", listed={"321": who()}))
    assert (verdict.result, verdict.reason) == (
        "fail",
        "alice's process 321 (python train.py) computes on a GPU",
    )


def test_a_service_that_may_hold_a_gpu_is_no_load() -> None:
    apps = "GPU-1, 321, nvidia-cuda-mps-server, 9 MiB\n"
    assert judge(survey(apps=apps, listed={"321": who(allowed=True)})).result == "pass"


def test_a_holder_that_nvidia_smi_hides_is_found() -> None:
    holder = {"pid": 77, "user": "root", "argv": ["python", "leak.py"], "gpus": [0]}
    verdict = judge(survey(jobs=[holder]))
    assert (verdict.result, verdict.reason) == ("fail", "root's process 77 (python leak.py) holds a GPU")


def test_other_gpus_do_not_count() -> None:
    holder = {"pid": 77, "user": "root", "argv": ["python"], "gpus": [1]}
    busy = survey(
        ("0 MiB", "900 MiB"),
        apps="GPU-1, 5, python, 9 MiB\n",
        listed={"5": who()},
        jobs=[holder],
        selected=[0],
    )
    assert judge(busy, gpus=[0]).result == "pass"
    assert judge({**busy, "selected": [1]}, gpus=[1]).result == "fail"


def test_device_numbers_are_not_nvidia_smis_indexes() -> None:
    value = survey(("900 MiB", "0 MiB"), selected=[1], minors={"GPU-0": 1, "GPU-1": 0})
    assert judge(value).result == "fail"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"apps": {"exit": 0, "text": "", "cut": False}}, "could not be read"),
        ({"apps": {"exit": 0, "text": APPS, "cut": True}}, "could not be read"),
        ({"gpus": {"exit": 0, "text": "", "cut": False}}, "could not be read"),
        ({"gpus": {"exit": None, "text": "", "cut": False}}, "does not answer"),
        ({"apps": {"exit": 15, "text": "", "cut": False}}, "a GPU is lost"),
        ({"gpus": {"exit": 0, "text": gpus("[N/A]"), "cut": False}}, "does not say how much memory"),
        ({"table": {"exit": 0, "text": EMPTY, "cut": False}}, "another PID namespace"),
        (
            {
                "apps": {"exit": 0, "text": APPS + "GPU-0, 9, x, 1 MiB\n", "cut": False},
                "listed": {"9": None},
            },
            "lists pid 9, which is not here",
        ),
        (
            {
                "apps": {
                    "exit": 0,
                    "text": APPS + "GPU-0" + ", [Insufficient Permissions]" * 3 + "\n",
                    "cut": False,
                }
            },
            "may not name",
        ),
        ({"selected": [5]}, "lists none of these GPUs"),
        ({"selected": [1, 5]}, "does not list GPU 5"),
    ],
)
def test_what_is_odd_is_unknown_with_its_reason(change: dict[str, Any], words: str) -> None:
    verdict = judge({**survey(), **change})
    assert verdict.result == "unknown"
    assert words in verdict.reason


def test_an_ordinary_users_pass_says_what_was_not_seen() -> None:
    verdict = judge(survey(complete=False))
    assert verdict.result == "pass"
    assert "other users could not be looked at" in verdict.reason


def test_sizes_and_lists_are_read_as_people_write_them() -> None:
    check = GpuIdle.model_validate({"gpus": [0, 3], "memory_below": "512MiB"})
    assert (check.gpus, check.memory_below) == ((0, 3), 512 << 20)
