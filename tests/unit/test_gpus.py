"""What is asked of nvidia-smi and of the driver, with stand-ins that answer, fail and hang."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetfix.domain import nvidia_smi
from fleetfix.remote import api, ending, gpus, mapped, relaunch
from fleetfix.remote.api import stat_of
from tests.unit.gpu_host import GpuHost

GPU_ANSWER = """index, uuid, memory.used [MiB], memory.total [MiB], mig.mode.current
0, GPU-0, 0 MiB, 143771 MiB, Disabled"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuHost]:
    bin = tmp_path / "bin"
    bin.mkdir()
    monkeypatch.setattr(api, "PATH", f"{bin}:/usr/bin:/bin")
    monkeypatch.setenv("PATH", f"{bin}:/usr/bin:/bin")
    with GpuHost(tmp_path, monkeypatch) as host:
        yield host


def stand_in(host: GpuHost, script: str) -> None:
    path = host.path("bin/nvidia-smi")
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)


def test_a_good_answer_and_no_libcuda_mean_that_a_job_could_start(host: GpuHost) -> None:
    stand_in(host, f"cat <<'E'\n{GPU_ANSWER}\nE\n")
    answer = gpus.start_possible(host.context())
    assert answer["smi"]["exit"] == 0
    assert nvidia_smi.parse_gpus(answer["smi"]["text"]) is not None
    assert answer["cuda"] == {"found": False, "code": None}


def test_errors_are_taken_from_stdout_with_their_exit_code(host: GpuHost) -> None:
    stand_in(host, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    smi = gpus.start_possible(host.context())["smi"]
    found = nvidia_smi.trouble(smi["exit"], smi["text"])
    assert found is not None
    assert found.kind == "mismatch"


def test_no_nvidia_smi_is_exit_127(host: GpuHost) -> None:
    assert gpus.start_possible(host.context())["smi"]["exit"] == 127


def test_a_hanging_nvidia_smi_is_ended_and_asked_once(
    host: GpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "ANSWER", 0.5)
    stand_in(host, f"trap '' TERM; echo x >> {host.path('asked')}; sleep 60 & wait\nsleep 60\n")
    began = time.monotonic()
    answer = gpus.survey(host.context())
    assert time.monotonic() - began < 10
    assert [answer[name]["exit"] for name in ("gpus", "apps", "table")] == [None] * 3
    assert host.path("asked").read_text() == "x\n"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for a stand-in libcuda")
@pytest.mark.parametrize(
    ("body", "code"),
    [("return 0;", 0), ("return 803;", 803), ("for (;;) pause();", None), ("kill(getpid(), 9);", None)],
)
def test_cuda_is_initialised_in_a_child_that_may_fail_hang_or_crash(
    host: GpuHost, monkeypatch: pytest.MonkeyPatch, body: str, code: int | None
) -> None:
    source, library = host.path("cuda.c"), host.path("libcuda.so.1")
    head = "#include <signal.h>\n#include <unistd.h>\n"
    source.write_text(head + "int cuInit(unsigned flags) { " + body + " return 0; }\n")
    subprocess.run(["cc", "-w", "-O0", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr(gpus, "DRIVER", str(library))
    assert gpus._cuda_init(1.0) == {"found": True, "code": code}


def test_listed_pids_are_looked_up(host: GpuHost) -> None:
    pid = host.train(host.environment())
    rows = [f"GPU-0, {pid}, a, b, c, 5 MiB", "GPU-0, 999999999, x, 5 MiB"]
    host.path("apps").write_text("\n".join(["gpu_uuid, pid, process_name, used_gpu_memory [MiB]", *rows]))
    host.path("gpus").write_text(GPU_ANSWER)
    stand_in(host, f'case "$1" in *compute*) cat {host.path("apps")} ;; *) cat {host.path("gpus")} ;; esac')
    answer = gpus.survey(host.context())
    assert answer["listed"]["999999999"] is None
    assert answer["listed"][str(pid)]["uid"] == os.getuid()
    assert [job["pid"] for job in answer["jobs"]] == [pid]


def test_the_gpus_of_a_job_are_those_it_holds_and_after_the_stop_those_it_held(
    host: GpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "RESPAWN_WATCH", 0.0)
    stand_in(host, "exit 1\n")
    ctx = host.context()
    assert gpus.survey(ctx, "of-job")["selected"] is None
    pid = host.train(host.environment(), gpu=1, how={"cwd": "/"})
    assert gpus.survey(ctx, "of-job")["selected"] == [1]
    relaunch.stop(host.context("stop"), [{"pid": pid, "start": stat_of(pid)[2]}], 2.0)
    assert gpus.survey(ctx, "of-job")["selected"] == [1]
    assert gpus.survey(ctx, [3, 0])["selected"] == [0, 3]
    assert gpus.survey(ctx, "all")["selected"] is None


# -- what the job has mapped ----------------------------------------------------------------------


def nccl(host: GpuHost, text: bytes) -> str:
    folder = host.environment() / "lib" / "python3.11" / "site-packages" / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "libnccl.so.2"
    path.write_bytes(b"\0" * (9 << 20) + text + b"\0" * 4096)
    return str(path)


def test_the_cuda_libraries_of_the_job_and_its_workers_are_found(host: GpuHost) -> None:
    ready, venv = host.path("ready"), host.environment()
    library = nccl(host, b"NCCL version 2.28.9+cuda13.0\0")
    spawns = [host.options(venv, 0, maps=[library], dump=str(ready))]
    host.train(venv, gpu=1, spawns=spawns)
    host.wait(ready.exists)
    found = mapped.libraries(host.context())
    assert found["cuda"] == [{"path": library, "built": "13.0"}]
    assert (found["complete"], found["loaded"], found["deleted"], found["replaced"]) == (True, 2, [], [])


def test_a_replaced_library_is_seen_as_gone(host: GpuHost) -> None:
    library = nccl(host, b"NCCL version 2.27.5+cuda12.9\0")
    host.train(host.environment(), maps=[library, host.library(host.environment())])
    assert mapped.libraries(host.context())["deleted"] == []
    fresh = Path(library + ".new")
    fresh.write_bytes(b"new")
    fresh.rename(library)
    assert mapped.libraries(host.context())["deleted"] == [library + " (deleted)"]


def test_a_version_across_a_block_boundary_is_found(host: GpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    library = nccl(host, b"NCCL version 2.27.5+cuda12.9\0")
    monkeypatch.setattr(mapped, "CHUNK", (9 << 20) + 10)
    assert mapped.built(library) == "12.9"


def test_a_link_or_a_pipe_in_place_of_a_library_is_not_read(host: GpuHost) -> None:
    library = Path(nccl(host, b""))
    library.unlink()
    library.symlink_to("/etc/passwd")
    assert mapped.built(str(library)) is None
    library.unlink()
    os.mkfifo(library)
    assert mapped.built(str(library)) is None


def test_no_job_has_nothing_mapped(host: GpuHost) -> None:
    assert mapped.libraries(host.context()) == {"job": None}
