"""What an audit says of an environment, and which command helps."""

from __future__ import annotations

from typing import Any

from fleetfix.domain.audit_findings import audit_findings, kept_cuda, why_not_audited
from fleetfix.domain.wheels import Audit, Dist, Overwritten, Place, Torch

PLACE = Place(path="/v", python="/v/bin/python", site=("/v/lib",), uid=0, kind="venv")


def dist(name: str, version: str, **more: Any) -> Dist:
    return Dist(info=f"{name}-{version}.dist-info", name=name, version=version, **more)


BY_NAME = "somebody asked for it by name; list it in `purge` to remove it"
TORCH = dist("torch", "2.8.0")
NCCL_12 = dist("nvidia-nccl-cu12", "2.27", shares={"nvidia-nccl-cu13-2.28.dist-info": 1})
NCCL_13 = dist("nvidia-nccl-cu13", "2.28", shares={"nvidia-nccl-cu12-2.27.dist-info": 1})


def audit(*dists: Dist, cuda: str | None = "12.8", **more: Any) -> Audit:
    torch = Torch(version="2.8.0", cuda=cuda, said=cuda is not None)
    return Audit(env=PLACE, torch=torch, dists=(TORCH, *dists), **more)


def texts(found: Audit, asked: str = "of-job") -> list[str]:
    return [one.text for one in audit_findings(found, asked)]


def test_a_sound_environment_has_no_findings() -> None:
    needed = dist("nixl", "0.9", requires=("nixl-cu13",))
    assert texts(audit(NCCL_12.model_copy(update={"shares": {}}))) == []
    # What a staying package requires is as it should be, whatever CUDA it is for.
    assert texts(audit(needed, dist("nixl-cu13", "0.9"))) == []


def test_mixed_packages_and_damaged_files_are_one_finding_with_the_command_that_helps() -> None:
    lost = Overwritten(by=(NCCL_13.info,), files=3)
    damaged = NCCL_12.model_copy(update={"overwritten": (lost,)})
    (found,) = audit_findings(audit(damaged, NCCL_13))
    assert found.text == (
        "/v: 1 package of another CUDA beside CUDA 12, 3 files of 1 package are not as the RECORD says"
    )
    assert (found.playbook, found.settings) == ("purge-cu13", ())
    (found,) = audit_findings(audit(damaged, NCCL_13), "/v")
    assert found.settings == ("venv=/v",)


def test_no_command_is_advised_that_would_be_refused_for_a_job_of_another_environment() -> None:
    place = PLACE.model_copy(update={"beside": "job 7 of ann uses /w"})
    for mixed in (audit(NCCL_12, NCCL_13), audit(NCCL_12, NCCL_13, cuda=None)):
        (found,) = audit_findings(mixed.model_copy(update={"env": place}), "/v")
        assert (found.playbook, found.settings) == ("", ())
        assert found.help == (
            "the job here uses another environment: purge-cu13 mends this one when no job runs"
        )


def test_the_cuda_that_stays_is_the_one_of_torch() -> None:
    (found,) = audit_findings(audit(NCCL_12, NCCL_13, cuda="13.0"))
    assert found.text.startswith("/v: 1 package of another CUDA beside CUDA 13")
    assert found.settings == ("cuda=13",)
    assert kept_cuda(audit(NCCL_13, cuda=None)) == "13"
    assert texts(audit(NCCL_12, NCCL_13, cuda=None)) == [
        "/v: packages of CUDA 12 and of CUDA 13, and no torch says which of them stays"
    ]


def test_what_is_left_alone_by_a_repair_is_found_all_the_same() -> None:
    changed = dist("numpy", "2.1", altered=2, samples=("numpy/a.py",))
    lacking = dist("scipy", "1.1", missing=1)
    asked_for = dist("sglang-kernel", "0.4", needs=("13",), requested=True)
    assert texts(audit(changed, lacking, asked_for, leftovers=("lib/~orch",))) == [
        f"/v: sglang-kernel 0.4: built for CUDA 13, but {BY_NAME}",
        "/v: numpy 2.1: 2 files locally modified, such as numpy/a.py; left as they are",
        "/v: scipy 1.1: 1 files missing; left as it is",
        "/v: lib/~orch is left over from an interrupted removal",
    ]


def test_an_interrupted_removal_is_said() -> None:
    half = NCCL_13.model_copy(update={"borrowed": True, "shares": {}})
    (found,) = audit_findings(audit(half))
    assert found.text == "/v: 1 package of another CUDA beside CUDA 12, a removal was interrupted"


def test_what_stands_in_the_way_of_a_repair_is_said_instead_of_a_command() -> None:
    (found,) = audit_findings(audit(NCCL_13.model_copy(update={"installer": "conda", "shares": {}})))
    assert found.text == "/v: 1 package of another CUDA beside CUDA 12"
    assert "was installed by conda" in found.help
    assert not found.playbook
    # Another user's environment may be looked at all the same.
    assert audit_findings(audit(NCCL_13, rights=False))[0].playbook == "purge-cu13"


def test_what_cannot_be_audited_says_why_and_is_no_finding() -> None:
    none = Audit(none="no job is running", hint="give a path")
    conda = audit(NCCL_13).model_copy(update={"env": PLACE.model_copy(update={"kind": "conda"})})
    assert why_not_audited(none) == "no job is running (give a path)"
    assert "conda manages it" in (why_not_audited(conda) or "")
    assert texts(none) == texts(conda) == []
    assert why_not_audited(audit()) is None
