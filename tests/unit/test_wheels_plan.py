"""Which packages go, which stay, and whose files are put back: tables and laws."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetfix.domain.cure import cure, unsound
from fleetfix.domain.requirements import normal, requirement
from fleetfix.domain.wheels import Audit, Dist, Overwritten, Place, Torch, classify

PLACE = Place(path="/opt/train/venv", python="/opt/train/venv/bin/python", site=("/s",), uid=0, kind="venv")

_BESIDE = """
nvidia-cuda-nvrtc-cu12==12.8.93 nvidia-cuda-runtime==13.0.96 nvidia-cuda-runtime-cu12==12.8.90
nvidia-cudnn-cu12==9.10.2.21 nvidia-cudnn-cu13==9.19.0.56 nvidia-cudnn-frontend==1.18.0
nvidia-cufft==12.0.0.61 nvidia-cufft-cu12==11.3.3.83 nvidia-cufile==1.15.1.6 nvidia-curand==10.4.0.35
nvidia-cusolver==12.0.4.66 nvidia-cusparse==12.6.3.3 nvidia-cusparselt-cu12==0.7.1
nvidia-cusparselt-cu13==0.8.0 nvidia-cutlass-dsl==4.5.0 nvidia-cutlass-dsl-libs-base==4.5.0
nvidia-ml-py==13.590.48 nvidia-nccl-cu12==2.27.3 nvidia-nccl-cu13==2.28.9 nvidia-nvjitlink==13.0.88
nvidia-nvshmem-cu12==3.4.5 nvidia-nvshmem-cu13==3.4.5 nvidia-nvtx==13.0.85 nvidia-nvtx-cu12==12.8.90
torch==2.8.0+cu128 torchaudio==2.8.0+cu128 torchvision==0.23.0+cu128 triton==3.4.0
"""
CU13_BESIDE_CU128 = _BESIDE.split()
"""vllm-project/vllm#42801 in our own writing: twelve CUDA-13 packages beside a cu128 torch."""

_BACK = """
cuda-bindings==13.5.0 cuda-pathfinder==1.9.1 cuda-toolkit==13.0.2 numpy==2.4.6 nvidia-cublas==13.1.0.3
nvidia-cublas-cu12==12.8.4.1 nvidia-cuda-cupti==13.0.85 nvidia-cuda-nvrtc==13.0.88
nvidia-cuda-runtime==13.0.96
nvidia-cudnn-cu12==9.10.2.21 nvidia-cudnn-cu13==9.19.0.56 nvidia-cufft==12.0.0.61 nvidia-cufile==1.15.1.6
nvidia-curand==10.4.0.35 nvidia-cusolver==12.0.4.66 nvidia-cusparse==12.6.3.3 nvidia-cusparselt-cu12==0.7.1
nvidia-cusparselt-cu13==0.8.0 nvidia-nccl-cu12==2.27.5 nvidia-nccl-cu13==2.28.9 nvidia-nvjitlink==13.0.88
nvidia-nvshmem-cu12==3.3.20 nvidia-nvshmem-cu13==3.4.5 nvidia-nvtx==13.0.85 torch==2.9.1 triton==3.5.1
"""
WAY_BACK = _BACK.split()
"""torch cu128 -> cu130 -> cu128 by plain uv: seventeen stay behind, four have cu13 in the name."""


def dist(pin, **more):
    name, _, version = pin.partition("==")
    return Dist(info=f"{name}-{version}.dist-info", name=name, version=version, **more)


def audit(*dists, cuda="12.8", **more):
    return Audit(env=PLACE, torch=Torch(version="2.9.1", cuda=cuda), dists=dists, **more)


@pytest.mark.parametrize(("pins", "count"), [(CU13_BESIDE_CU128, 12), (WAY_BACK, 17)])
def test_a_list_of_names_alone_gives_every_package_of_the_other_cuda(pins, count):
    found = cure(audit(*map(dist, pins)), "12")
    assert found.blocked is None
    assert len(found.remove) == count
    gone = {one.name for one in found.remove}
    assert not gone & {
        "nvidia-ml-py",
        "nvidia-cudnn-frontend",
        "nvidia-cutlass-dsl",
        "cuda-pathfinder",
        "torch",
    }
    assert not any(name.endswith("cu12") for name in gone)


def test_the_direction_is_symmetric():
    found = cure(audit(*map(dist, WAY_BACK), cuda="13.0"), "13")
    assert {one.name for one in found.remove} == {
        pin.partition("==")[0] for pin in WAY_BACK if "cu12" in pin
    }


@pytest.mark.parametrize(
    ("made", "cuda", "proof"),
    [
        (dist("anything==1", paths=("13",)), "13", "paths"),
        (dist("nvidia_nccl.cu13==2.28.9"), "13", "name"),
        (dist("cupy-cuda12x==14.2.0"), "12", "name"),
        (dist("nvidia-dali-cuda130==1.5"), "13", "name"),
        (dist("jax-cuda12-plugin==0.8"), "12", "name"),
        (dist("mooncake-transfer-engine-cuda13==0.3"), "13", "name"),
        (dist("torchvision==0.23.0+cu128"), "12", "version"),
        (dist("flash-attn==2.8.3+cu13torch2.9"), "13", "version"),
        (dist("x==1.0+12.8"), "12", "version"),
        (dist("nvidia-cufft==12.0.0.61"), "13", "unsuffixed name"),
        (dist("cuda-toolkit==12.9.1"), "12", "unsuffixed name"),
        (dist("cuda-bindings==13.5.0"), "13", "unsuffixed name"),
        (dist("torch==2.9.1", requires=("nvidia-nccl-cu12",)), "12", "requirements"),
        (dist("sglang-kernel==0.4.10", needs=("13",)), "13", "libraries"),
    ],
)
def test_evidence_decides_in_order(made, cuda, proof):
    found = classify(made)
    assert found is not None
    assert (found.cuda, found.proof) == (cuda, proof)


@pytest.mark.parametrize(
    "made",
    [
        dist("nvidia-ml-py==13.590.48"),
        dist("nvidia-cudnn-frontend==1.18.0"),
        dist("cuda-pathfinder==1.9.1"),
        dist("nixl==0.9", requires=("nixl-cu12", "nixl-cu13")),
        dist("flashinfer-python==0.5"),
        dist("bitsandbytes==0.49", needs=("12", "13")),
        dist("nvidia-cutlass-dsl-libs-cu13==4.8.1"),
        dist("numpy==2.13.0"),
        dist("pkg==1.0+g12ab34"),
        dist("both==1", needs=("12", "13")),
    ],
)
def test_a_thirteen_in_sight_is_no_evidence(made):
    assert classify(made) is None


def test_cutlass_libraries_of_the_old_layout_share_paths_and_count():
    assert classify(dist("nvidia-cutlass-dsl-libs-cu13==4.4.2", shares={"base": 93})) is not None


def test_what_staying_packages_require_is_spared_through_extras_and_others():
    found = cure(
        audit(
            dist("sglang==0.5", requires=("cuda-toolkit[nvcc]",)),
            dist(
                "cuda-toolkit==13.0.2",
                requires=('nvidia-cuda-nvcc; extra == "nvcc"', 'nvidia-cublas; extra == "cublas"'),
            ),
            dist("nvidia-cuda-nvcc==13.0.88"),
            dist("nvidia-cublas==13.1.0.3"),
        ),
        "12",
    )
    assert [one.name for one in found.remove] == ["nvidia-cublas"]
    assert "cuda-toolkit 13.0.2 stays: sglang 0.5 requires it" in found.notes


def test_a_requirement_for_another_machine_spares_nothing():
    found = cure(
        audit(
            dist("x==1", requires=('nvidia-cublas; sys_platform == "win32"',)),
            dist("nvidia-cublas==13.1.0.3"),
        ),
        "12",
    )
    assert len(found.remove) == 1


def test_nixl_requires_both_and_both_stay():
    found = cure(
        audit(
            dist("nixl==0.9", requires=("nixl-cu12", "nixl-cu13")),
            dist("nixl-cu12==0.9"),
            dist("nixl-cu13==0.9"),
        ),
        "12",
    )
    assert found.empty


def twins(**more):
    old = dist("nvidia-nvshmem-cu12==3.4.5", shares={"nvidia-nvshmem-cu13-3.4.5.dist-info": 15})
    new = dist("nvidia-nvshmem-cu13==3.4.5", shares={old.info: 15}, **more)
    lost = old.model_copy(update={"overwritten": (Overwritten(by=(new.info,), files=15),)})
    return lost, new


def test_twins_are_removed_and_repaired():
    lost, new = twins()
    found = cure(audit(lost, new), "12")
    assert (found.remove, found.repair, found.files) == ((new,), (lost,), 15)


def test_a_required_twin_is_never_spared_silently():
    lost, new = twins()
    found = cure(audit(lost, new, dist("nvshmem-user==1", requires=("nvidia-nvshmem-cu13",))), "12")
    assert found.blocked is not None
    assert "nvidia-nvshmem-cu13 3.4.5 and nvidia-nvshmem-cu12 3.4.5 claim 15 files" in found.blocked
    assert "nvshmem-user 1 requires it" in found.blocked


def test_a_twin_somebody_asked_for_goes_only_if_listed():
    lost, new = twins(requested=True)
    assert "choose" in (cure(audit(lost, new), "12").blocked or "")
    assert cure(audit(lost, new), "12", ["NVIDIA_nvshmem_cu13"]).remove == (new,)


def test_a_requested_package_without_a_twin_stays_with_a_note():
    found = cure(audit(dist("cupy-cuda13x==14", requested=True)), "12")
    assert found.empty
    assert "list it in `purge`" in found.notes[0]


def test_what_only_its_libraries_show_goes_only_if_listed():
    kernel = dist("sglang-kernel==0.4.10", needs=("13",))
    assert cure(audit(kernel), "12").empty
    assert cure(audit(kernel), "12", ["sglang-kernel"]).remove == (kernel,)


def test_a_listed_package_of_the_staying_cuda_stays():
    found = cure(audit(dist("sglang-kernel==0.4.0", needs=("12",))), "12", ["sglang-kernel"])
    assert found.empty
    assert "built for CUDA 12" in found.notes[0]


@pytest.mark.parametrize("cuda", ["13.0", "13.2"])
def test_torch_of_the_cuda_to_go_is_refused(cuda):
    found = cure(audit(*map(dist, WAY_BACK), cuda=cuda), "12")
    assert "built for CUDA " + cuda in (found.blocked or "")


def test_torch_whose_version_file_is_lost_is_judged_by_its_requirements():
    torch = dist("torch==2.11.0", requires=("nvidia-nccl-cu13",))
    facts = Audit(env=PLACE, torch=Torch(version="2.11.0", said=False), dists=(torch,))
    assert "itself built for CUDA 13" in (cure(facts, "12").blocked or "")


@pytest.mark.parametrize(
    ("kind", "word"), [("conda", "conda"), ("system", "package manager"), ("container", "container")]
)
def test_other_kinds_of_environment_are_blocked_with_what_to_do(kind, word):
    facts = Audit(env=PLACE.model_copy(update={"kind": kind}))
    assert word in (cure(facts, "12").blocked or "")


def test_no_environment_is_blocked():
    facts = Audit(none="there is no environment at /x", hint="give its path")
    assert cure(facts, "12").blocked == "there is no environment at /x (give its path)"


def test_a_removal_that_was_interrupted_without_record_is_blocked():
    assert "no RECORD" in (cure(audit(dist("nvidia-cublas==13.1.0.3", record=None)), "12").blocked or "")


def test_local_changes_are_told_and_left():
    lib = dist("nvidia-nccl-cu12==2.27.5", altered=1, samples=("nvidia/nccl/x.h",))
    found = cure(audit(lib), "12")
    assert found.empty
    assert found.notes == (
        "nvidia-nccl-cu12 2.27.5: 1 files locally modified, such as nvidia/nccl/x.h; left as they are",
    )


def test_missing_files_of_an_unrelated_package_are_told_and_left():
    found = cure(audit(dist("numpy==2.4.6", missing=300)), "12")
    assert found.empty
    assert "300 files missing" in found.notes[0]


def test_missing_files_of_a_cuda_package_are_repaired():
    lib = dist("nvidia-nccl-cu12==2.27.5", missing=2, missing_libraries=1)
    assert cure(audit(lib), "12").repair == (lib,)
    assert unsound(audit(lib), "12") == "2 files are not as their packages say: nvidia-nccl-cu12 2.27.5"


# -- laws -------------------------------------------------------------------------------------------

NAMES = [
    "a",
    "b",
    "torchvision",
    "nvidia-cublas",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "cuda-toolkit",
    "k",
]


@st.composite
def audits(draw):
    made = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1)):
        others = [one for one in NAMES if one != name]
        made.append(
            dist(
                f"{name}==13.0",
                requires=tuple(draw(st.lists(st.sampled_from(others), max_size=2))),
                requested=draw(st.booleans()),
                direct=draw(st.booleans()),
                needs=draw(st.sampled_from([(), ("12",), ("13",)])),
                missing=draw(st.integers(0, 2)),
                altered=draw(st.integers(0, 2)),
            )
        )
    by_name = {one.name: one for one in made}
    if {"nvidia-nccl-cu12", "nvidia-nccl-cu13"} <= set(by_name):
        one, two = by_name["nvidia-nccl-cu12"], by_name["nvidia-nccl-cu13"]
        made = [
            each.model_copy(update={"shares": {two.info if each is one else one.info: 2}})
            if each in (one, two)
            else each
            for each in made
        ]
    return audit(*made)


LISTS = st.lists(st.sampled_from(NAMES), max_size=3)


@settings(max_examples=300)
@given(audits(), st.sampled_from(["12", "13"]), LISTS)
def test_nothing_that_a_staying_package_requires_goes(facts, keep, purge):
    facts = facts.model_copy(update={"torch": None})
    found = cure(facts, keep, purge)
    gone = {normal(one.name) for one in found.remove}
    staying = [one for one in facts.dists if one not in found.remove]
    assert not {requirement(text).name for one in staying for text in one.requires} & gone


@settings(max_examples=300)
@given(audits(), st.sampled_from(["12", "13"]), LISTS)
def test_nothing_of_the_staying_cuda_goes_and_nothing_asked_for_goes_unlisted(facts, keep, purge):
    facts = facts.model_copy(update={"torch": None})
    for one in cure(facts, keep, purge).remove:
        evidence = classify(one)
        assert evidence is None or evidence.cuda != keep
        assert normal(one.name) in purge or not (one.requested or one.direct)


@settings(max_examples=300)
@given(audits(), st.sampled_from(["12", "13"]), LISTS)
def test_after_the_cure_nothing_is_left_to_do(facts, keep, purge):
    facts = facts.model_copy(update={"torch": None})
    found = cure(facts, keep, purge)
    if found.blocked:
        return
    left = {one.info for one in facts.dists} - {one.info for one in found.remove}
    after = facts.model_copy(
        update={
            "dists": tuple(
                one.model_copy(
                    update={
                        "missing": 0 if one in found.repair else one.missing,
                        "missing_libraries": 0,
                        "overwritten": (),
                        "shares": {info: count for info, count in one.shares.items() if info in left},
                    }
                )
                for one in facts.dists
                if one.info in left
            )
        }
    )
    assert cure(after, keep, purge).empty


@pytest.mark.parametrize(
    ("text", "extras", "holds"),
    [
        ("a", (), True),
        ('a; extra == "x"', (), False),
        ('a; extra == "X_y"', ("x-y",), True),
        ('a; python_version >= "3.9" and platform_system == "Linux"', (), True),
        ('a; python_version < "3.9"', (), False),
        ('a; (os_name == "nt" or python_version not in "3.8, 3.9") and extra == "b"', ("b",), True),
        ('a; something_new == "1"', (), True),
        ("a; (broken", (), True),
        ('a; platform_machine != "x86_64"', (), False),
    ],
)
def test_markers_hold_as_pep_508_says(text, extras, holds):
    facts = {
        "python_version": "3.11",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": "x86_64",
    }
    assert requirement(text).holds(facts, frozenset(extras)) is holds


@given(st.text(max_size=40))
def test_no_requirement_text_makes_it_raise(text):
    found = requirement(text)
    if found is not None:
        found.holds({"python_version": "3.11"}, frozenset())
