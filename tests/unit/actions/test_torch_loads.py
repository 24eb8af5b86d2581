"""torch_loads: the verdict over what torch really loads, and the files around it."""

import os
import subprocess
import sys

import pytest

from fleetfix.actions.torch_loads import LoadFacts, Said, TorchLoads
from fleetfix.commands import Completed
from fleetfix.domain.wheels import Audit, Dist, Place, Torch
from fleetfix.errors import Failure
from fleetfix.remote import environments, loads
from tests.wheelhouse import Host, shared_object

PLACE = Place(path="/v", python="/v/bin/python", site=("/s",), uid=0, kind="venv")
AUDIT = Audit(env=PLACE, torch=Torch(version="2.9.1", cuda="12.8"))
GOOD = Said(
    torch="2.9.1+cu128",
    cuda="12.8",
    cudnn=12090,
    nccl=("2.27.5", "12.9"),
    libraries=("/s/libcudart.so.12",),
)
STEP = TorchLoads(venv="/v", cuda="12")


def judge(audit=AUDIT, **said):
    return STEP.judge(LoadFacts(audit=audit, said=GOOD.model_copy(update=said)))


def test_all_of_one_cuda_passes():
    verdict = judge()
    assert (verdict.result, verdict.reason) == ("pass", "torch 2.9.1+cu128 loads, all of it for CUDA 12")


def test_minor_versions_need_not_match():
    assert judge(cudnn=12000, nccl=("2.27.5", "12.2")).result == "pass"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"error": "ImportError: libcudnn.so.9: cannot open shared object file"}, "libcudnn.so.9"),
        ({"cuda": "13.0"}, "built for CUDA 13.0"),
        ({"cuda": None}, "CUDA none"),
        ({"cudnn": 13010}, "cuDNN that torch loads is built for CUDA 13"),
        ({"nccl": ("2.28.9", "13.0")}, "NCCL that torch loads is 2.28.9, built for CUDA 13.0"),
        ({"libraries": ("/s/nvidia/cu13/lib/libcublasLt.so.13",)}, "torch maps libcublasLt.so.13"),
    ],
)
def test_anything_of_the_other_cuda_fails(said, reason):
    verdict = judge(**said)
    assert verdict.result == "fail"
    assert reason in verdict.reason


def test_an_environment_without_torch_is_skipped():
    error = "ModuleNotFoundError: No module named 'torch'"
    said = Said(error=error)
    verdict = STEP.judge(LoadFacts(audit=AUDIT.model_copy(update={"torch": None}), said=said))
    assert (verdict.result, verdict.reason) == ("skipped", "there is no torch in /v")
    assert STEP.judge(LoadFacts(audit=AUDIT, said=said)).result == "fail"  # here it was installed


def test_a_sound_import_over_damaged_files_fails():
    lost = Dist(info="i", name="nvidia-cudnn-cu12", version="9.10.2.21", missing=22, missing_libraries=18)
    verdict = judge(audit=AUDIT.model_copy(update={"dists": (lost,)}))
    assert verdict.result == "fail"
    assert "22 files are not as their packages say: nvidia-cudnn-cu12 9.10.2.21" in verdict.reason


def test_a_crash_is_named_by_its_signal():
    verdict = STEP.judge(LoadFacts(audit=AUDIT, exit=-11, errors="Fatal Python error: Segmentation fault"))
    assert verdict.result == "fail"
    assert "signal 11" in verdict.reason


@pytest.mark.parametrize(
    "facts",
    [
        LoadFacts(audit=AUDIT, late=True),
        LoadFacts(audit=AUDIT, none="nothing here says which environment"),
        LoadFacts(audit=AUDIT, said=GOOD, failure="no answer"),
    ],
)
def test_no_answer_is_unknown(facts):
    assert STEP.judge(facts).result == "unknown"


def test_a_read_past_its_deadline_is_unknown():
    probe = STEP.probe()
    next(probe)
    late = Completed(exit=None, failure=Failure(kind="timed_out", message="ended"))
    with pytest.raises(StopIteration) as end:
        probe.send((late, Completed(value=AUDIT.model_dump())))
    assert STEP.judge(end.value.value).result == "unknown"


# -- on a real environment --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    path = tmp_path_factory.mktemp("loads") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    torch = next(path.glob("lib/python3*/site-packages")) / "torch"
    torch.mkdir()
    return path, torch


def ask(venv, code, tmp_path, monkeypatch, seconds=30.0):
    path, torch = venv
    (torch / "__init__.py").write_text(code)
    monkeypatch.setattr(environments, "_in_use", lambda ctx: [])
    context = Host(tmp_path / "state").context(dry=True)
    import time

    context.deadline = time.monotonic() + seconds
    return loads.torch(context, str(path))


TORCH = "import types\n__version__ = '2.9.1+cu128'\nversion = types.SimpleNamespace(cuda='12.8')\n"


def test_the_real_interpreter_says_what_it_maps(venv, tmp_path, monkeypatch):
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(shared_object("libc.so.6") + b"NCCL version 2.28.9+cuda13.0")
    code = TORCH + f"import mmap\n_f = open({str(library)!r}, 'rb')\n"
    code += "_m = mmap.mmap(_f.fileno(), 0, prot=mmap.PROT_READ)\n"
    found = ask(venv, code, tmp_path, monkeypatch)
    assert found["said"]["nccl"] == ["2.28.9", "13.0"]
    assert found["said"]["libraries"] == [str(library)]


def test_libraries_of_the_caller_do_not_leak_in(venv, tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda-13/lib64")
    code = TORCH + "import os\n__version__ = os.environ.get('LD_LIBRARY_PATH', 'clean')\n"
    assert ask(venv, code, tmp_path, monkeypatch)["said"]["torch"] == "clean"


def test_a_failing_import_is_told_in_its_own_words(venv, tmp_path, monkeypatch):
    found = ask(
        venv, "raise ImportError('libcudnn.so.9: cannot open shared object file')", tmp_path, monkeypatch
    )
    assert found["said"]["error"] == "ImportError: libcudnn.so.9: cannot open shared object file"


def test_an_import_that_hangs_ends_in_time(venv, tmp_path, monkeypatch):
    found = ask(venv, "while True: pass", tmp_path, monkeypatch, seconds=2.0)
    assert found["late"]


def test_an_import_that_kills_the_interpreter_is_told(venv, tmp_path, monkeypatch):
    found = ask(venv, "import os\nos.abort()", tmp_path, monkeypatch)
    assert (found["said"], found["exit"]) == (None, -6)


def test_asking_writes_no_byte_code(venv, tmp_path, monkeypatch):
    ask(venv, TORCH, tmp_path, monkeypatch)
    assert not os.path.exists(venv[1] / "__pycache__")
