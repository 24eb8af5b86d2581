"""job_libs: one CUDA in the running job, and every file still there."""

from __future__ import annotations

from typing import Any

import pytest

from fleetfix.actions.job_libs import JobLibs
from fleetfix.commands import Completed
from fleetfix.domain.cuda_libraries import cuda_major

SITE = "/opt/train/venv/lib/python3.11/site-packages"


def judge(value: dict[str, Any], cuda: Any = "12") -> Any:
    check = JobLibs.model_validate({"of": "job", "cuda": cuda})
    asking = check.probe()
    (read,) = next(asking)
    assert read.function == "mapped.libraries"
    with pytest.raises(StopIteration) as end:
        asking.send((Completed(value=value),))
    return check.judge(end.value.value)


def mapped(*paths: str, built: str | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "job": {"pid": 4211, "argv": ["python"]},
        "complete": True,
        "loaded": 40,
        "deleted": [],
        "replaced": [],
        "cuda": [{"path": path, "built": built} for path in paths],
        **fields,
    }


def test_no_job_is_skipped() -> None:
    assert judge({"job": None}).result == "skipped"


def test_libraries_of_one_cuda_pass() -> None:
    verdict = judge(
        mapped(SITE + "/nvidia/cublas/lib/libcublas.so.12", SITE + "/nvidia/cudnn/lib/libcudnn.so.9")
    )
    assert (verdict.result, verdict.reason) == (
        "pass",
        "job 4211 maps 2 CUDA libraries, none of another CUDA",
    )


def test_a_library_of_another_cuda_fails_and_is_named() -> None:
    verdict = judge(mapped("/usr/local/cuda-13.0/lib64/libcudart.so.13"))
    assert verdict.result == "fail"
    assert "libcudart.so.13" in verdict.reason
    assert judge(mapped("/usr/local/cuda-13.0/lib64/libcudart.so.13"), cuda="13.0").result == "pass"


def test_nccl_is_told_by_what_it_says_itself() -> None:
    nccl = SITE + "/nvidia/nccl/lib/libnccl.so.2"
    assert judge(mapped(nccl, built="13.0")).result == "fail"
    assert judge(mapped(nccl, built="12.9")).result == "pass"


@pytest.mark.parametrize("field", ["deleted", "replaced"])
def test_a_file_that_is_gone_fails_for_good(field: str) -> None:
    verdict = judge(mapped(**{field: [SITE + "/nvidia/nccl/lib/libnccl.so.2 (deleted)"]}))
    assert (verdict.result, verdict.final) == ("fail", True)
    assert "not on disk any more: libnccl.so.2" in verdict.reason


def test_a_job_that_has_loaded_nothing_yet_is_unknown() -> None:
    verdict = judge(mapped(loaded=0))
    assert (verdict.result, verdict.final) == ("unknown", False)


def test_maps_that_cannot_be_read_are_unknown() -> None:
    assert judge(mapped(complete=False)).result == "unknown"


@pytest.mark.parametrize(
    ("path", "major"),
    [
        (SITE + "/nvidia/cu13/lib/libcusparse.so.12", 13),
        (SITE + "/nvidia/cusparse/lib/libcusparse.so.12", None),
        (SITE + "/nvidia/cuda_runtime/lib/libcudart.so.12", 12),
        (SITE + "/nvidia/cuda_runtime/lib/libcudart.so.12 (deleted)", 12),
        ("/x/libcudart-4d2a1b0c.so.12.8.90", None),
        ("/x/libnvrtc-builtins.so.13.0", 13),
        ("/x/libnvJitLink.so.12", 12),
        ("/x/libcufft.so.11", 12),
        ("/x/libcufft.so.12", 13),
        ("/x/libcusolver.so.12", 13),
        ("/x/libcurand.so.10", None),
        ("/x/libcudnn.so.9", None),
        ("/x/libcublasLt.so.13", 13),
    ],
)
def test_the_cuda_of_a_library_is_told_by_path_and_soname(path: str, major: int | None) -> None:
    assert cuda_major(path) == major


@pytest.mark.parametrize("cuda", ["12", "12.8", 12])
def test_only_the_major_counts(cuda: Any) -> None:
    assert JobLibs.model_validate({"cuda": cuda}).cuda == "12"
