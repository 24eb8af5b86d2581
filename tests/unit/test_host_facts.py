"""Facts of a host, what is wrong by them, and what many hosts have in common."""

from __future__ import annotations

from typing import Any

import pytest

from fleetfix.commands import Completed
from fleetfix.domain.conditions import Condition, conditions
from fleetfix.domain.drift import mode_of, spread_of
from fleetfix.domain.host_facts import HostFacts, facts_of, look

FIELDS = (
    "index, uuid, name, driver_version, memory.used [MiB], memory.total [MiB], mig.mode.current, "
    "persistence_mode, "
    "ecc.mode.current, ecc.errors.uncorrected.volatile.total, remapped_rows.pending, "
    "clocks_throttle_reasons.hw_thermal_slowdown, temperature.gpu, power.draw [W]"
)
H200 = "NVIDIA H200, 570.86.10"
QUERY = f"""\
{FIELDS}
0, GPU-a, {H200}, 68518 MiB, 143771 MiB, Disabled, Enabled, Enabled, 0, No, Not Active, 52, 628.41 W
1, GPU-b, {H200}, 0 MiB, 143771 MiB, [N/A], Enabled, [N/A], [N/A], Yes, Active, [N/A], [N/A]
"""
WELL = QUERY.replace("Yes, Active", "No, Not Active")
APPS = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-a, 4211, python, 68518 MiB\n"
TABLE = "| NVIDIA-SMI 570.86.10   Driver Version: 570.86.10   CUDA Version: 12.8   |\n"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
GIB = 1 << 30


def answer(text: str, exit: int | None = 0) -> dict[str, Any]:
    return {"exit": exit, "text": text, "cut": False}


def reply(**other: Any) -> dict[str, Any]:
    """What `facts.survey` answers on a host that is well."""
    gpus = {"module": "570.86.10", "on_bus": 2, "of_driver": 2, "minors": {}}
    told = {"query": answer(WELL), "apps": answer(APPS), "table": answer(TABLE)}
    known = {
        "kernel": "6.8.0",
        "uptime": 86400.0,
        "load": 8.0,
        "cpus": 64,
        "memory": [512 * GIB, 400 * GIB],
        "disks": {
            "asked": [["/", 100 * GIB, 50 * GIB, 1000, 500], ["/var", 50 * GIB, 20 * GIB, 0, 0]],
            "others": ["/home"],
        },
        "gpus": {**gpus, **told},
        "xids": {},
        "complete": True,
        "schedulers": [],
        "jobs": [job()],
        "environments": [{"path": "/opt/v", "python": "3.11", "torch": "2.8.0", "cuda": "12.8"}],
        "clock": [1000.0, 1000.5],
    }
    known["gpus"].update(other.pop("gpus", {}))
    return {**known, **other}


def job(**other: Any) -> dict[str, Any]:
    known = {"pid": 4211, "user": "alice", "argv": ["/opt/v/bin/python", "train.py"], "gpus": [0]}
    more = {
        "environments": ["/opt/v"],
        "orphan": False,
        "scheduler": None,
        "unit": None,
        "container": False,
    }
    return {**known, **more, "seconds": 60.0, **other}


NO_RATES = Completed(value={"none": "no job runs here", "job": None})


def facts(
    rates: Completed = NO_RATES, asked: tuple[float, float] = (999.9, 1000.6), **other: Any
) -> HostFacts:
    return facts_of(reply(**other), rates, asked)


def texts(found: HostFacts) -> list[str]:
    return [one.text for one in conditions(found)]


def test_what_nvidia_smi_tells_is_read_and_what_it_does_not_tell_is_unknown() -> None:
    found = facts(gpus={"query": answer(QUERY)})
    assert found.gpus is not None
    first, second = found.gpus
    assert (found.driver, found.cuda, found.model) == ("570.86.10", "12.8", "NVIDIA H200")
    assert (first.ecc, first.uncorrected, first.temperature, first.power) == (True, 0, 52.0, 628.41)
    assert (second.ecc, second.uncorrected, second.temperature, second.power) == (None, None, None, None)
    assert (first.slowed, second.slowed) == ((), ("heat",))
    assert (first.busy, second.busy) == (True, False)
    assert second.remap_pending


def test_the_rate_of_a_job_is_by_its_newest_measurements() -> None:
    probe = look()
    next(probe)
    _, rates, _ = probe.send((Completed(value=999.9),))
    points = [[str(step), "9000" if step < 60 else "20000"] for step in range(80)]
    answered = {rates.args["formats"][0]["name"]: points, "of no known format": points[:1]}
    told = Completed(value={"points": answered, "whole": {}, "log": "/l", "job": {}})
    with pytest.raises(StopIteration) as done:
        probe.send((Completed(value=reply()), told, Completed(value=1000.6)))
    assert done.value.value.tokens.rate == 20000.0


@pytest.mark.parametrize(
    ("asked", "skew"),
    [
        ((999.0, 1001.0), 0.0),  # the clocks may be equal
        ((900.0, 1010.0), 0.0),  # a slow answer proves nothing
        ((990.0, 990.5), 10.0),
        ((1010.0, 1011.0), -10.0),
    ],
)
def test_a_clock_is_off_only_by_what_the_way_there_and_back_cannot_explain(
    asked: tuple[float, float], skew: float
) -> None:
    assert facts(asked=asked).skew == pytest.approx(skew)


def test_a_host_that_is_well_has_no_condition() -> None:
    assert conditions(facts()) == ()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"gpus": {"on_bus": 3}}, "nvidia-smi lists 2 of 3 GPUs"),
        ({"gpus": {"query": answer("", None)}}, "nvidia-smi does not answer"),
        ({"gpus": {"query": answer(MISMATCH, 18)}},
         f"driver and libraries are of different versions: {MISMATCH}"),
        ({"gpus": {"query": answer("index, uuid\n0")}}, "nvidia-smi's answer could not be read"),
        ({"gpus": {"query": answer(WELL.replace("Enabled, 0, No", "Enabled, 3, No"))}},
         "GPU 0: 3 uncorrected ECC errors"),
        ({"jobs": [], "gpus": {"apps": answer(APPS.splitlines()[0])}},
         "GPU 0 holds 68518 MiB that no process owns"),
        ({"gpus": {"query": answer(WELL.replace("No, Not", "Yes, Not", 1))}, "xids": {}},
         "GPU 0: a row waits to be remapped"),
        ({"xids": {"79": 2, "31": 5}}, "Xid 79 since the boot, 2 times: a GPU fell off the bus"),
        ({"jobs": [job(orphan=True)]},
         "alice's process 4211 (python train.py) holds GPUs and its job is gone"),
        ({"disks": {"asked": [["/var", 50 * GIB, GIB, 0, 0]], "others": []}},
         "/var is full: 1024 MiB of 50.0 GiB free"),
        ({"disks": {"asked": [["/data", 5000 * GIB, 40 * GIB, 0, 0]], "others": []}},
         "/data is full: 40960 MiB of 5000.0 GiB free"),
        ({"disks": {"asked": [["/", 50 * GIB, 20 * GIB, 1000, 1]], "others": []}}, "/ has no inodes left"),
        ({"clock": [1100.0, 1100.5]}, "its clock is 100 s ahead of this machine's"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(other: dict[str, Any], said: str) -> None:
    assert texts(facts(**other)) == [said]


def test_xids_of_programs_and_memory_in_use_by_others_are_no_condition() -> None:
    assert texts(facts(xids={"31": 5, "43": 1})) == []
    assert texts(facts(xids=None)) == []
    assert texts(facts(gpus={"apps": answer(APPS.splitlines()[0])}, jobs=[], complete=False)) == []


def test_a_machine_without_gpus_is_not_ill() -> None:
    absent = answer("nvidia-smi: not found", 127)
    none = {"module": None, "on_bus": 0, "of_driver": 0, "query": absent, "apps": absent, "table": absent}
    assert texts(facts(gpus=none, jobs=[])) == []
    assert texts(facts(gpus={**none, "on_bus": 8}, jobs=[])) == [
        "nvidia-smi is not there: nvidia-smi: not found"
    ]


def test_what_helps_is_said_with_what_is_wrong() -> None:
    (found,) = conditions(facts(gpus={"query": answer("", None)}))
    assert found == Condition(
        text="nvidia-smi does not answer",
        help="drain the host and reboot it; jobs that wait for a GPU cannot be ended",
    )


def test_a_path_lies_on_the_nearest_file_system_that_was_asked() -> None:
    found = facts()
    asked = ("/", "/var/log", "/vary", "/home/alice")
    assert [disk and disk.path for disk in map(found.disk_of, asked)] == ["/", "/var", "/", None]


# -- many hosts -------------------------------------------------------------------------------------


def test_the_mode_is_what_most_hosts_have_and_others_have_drifted() -> None:
    mode = mode_of({"a": "1", "b": "2", "c": "2", "d": "3"})
    assert mode is not None
    assert (mode.value, mode.hosts) == ("2", ("b", "c"))
    assert mode.others == (("1", ("a",)), ("3", ("d",)))
    assert mode_of({}) is None
    tied = mode_of({"a": "y", "b": "x"})
    assert tied is not None
    assert tied.value == "x"


def test_who_is_far_from_the_median_stands_out_and_noise_does_not() -> None:
    rates = {f"h{n}": 20000.0 + n for n in range(10)}
    assert spread_of(rates | {"slow": 12800.0}).outliers == (("slow", 12800.0),)  # type: ignore[union-attr]
    near = spread_of(rates | {"near": 19500.0})
    assert near is not None
    assert near.outliers == ()  # within 5 %, however little the others differ
    noisy = {f"h{n}": float(n) for n in range(100)}
    assert spread_of(noisy).outliers == ()  # type: ignore[union-attr]
    assert spread_of({"a": 1.0, "b": 9.0}).outliers == ()  # type: ignore[union-attr]
    assert spread_of({}) is None
