"""A job over several hosts shows what it is, however it was started; and folders where they lie."""

from __future__ import annotations

from typing import Any

import pytest

from fleetfix.remote import mounts, spans

RANK = {
    "TORCHELASTIC_RUN_ID": "llama3",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "4",
    "WORLD_SIZE": "32",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29500",
}


def span(nodes: int, node: int | None, id: str, at: str, by: str = "torchrun") -> dict[str, Any]:
    return {"nodes": nodes, "node": node, "id": id, "at": at, "by": by}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (RANK, span(4, 1, "llama3", "gpu01:29500")),
        ({k: v for k, v in RANK.items() if "GROUP" not in k}, span(4, None, "llama3", "gpu01:29500")),
        ({**RANK, "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, span(1, 0, "llama3", "gpu01:29500")),
        (
            {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_NAMESPACE": "7@1"},
            span(2, None, "7@1", "", "mpirun"),
        ),
        (
            {"SLURM_JOB_ID": "99", "SLURM_PROCID": "3", "SLURM_NNODES": "2", "SLURM_NODEID": "1"},
            span(2, 1, "99", "", "Slurm"),
        ),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, span(2, None, "", "", "hand")),
        ({"WORLD_SIZE": "16"}, None),
        ({"WORLD_SIZE": "many", "LOCAL_WORLD_SIZE": "0"}, None),
        ({"SLURM_JOB_ID": "99"}, None),
        ({}, None),
    ],
)
def test_the_variables_of_a_rank_tell_how_many_hosts_there_are(
    environ: dict[str, str], expected: dict[str, Any] | None
) -> None:
    assert spans.of_ranks(environ) == expected


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        (
            "torchrun --nnodes=2 --node_rank 1 --rdzv_id=j --rdzv-endpoint gpu01:29400 train.py --nnodes=9",
            {},
            span(2, 1, "j", "gpu01:29400"),
        ),
        ("torchrun --nnodes 1:4 --standalone train.py", {}, span(4, None, "", "")),
        (
            "accelerate launch --num_machines 3 --machine_rank=0 --main_process_ip gpu01 t.py",
            {},
            span(3, 0, "", "gpu01"),
        ),
        (
            "torchrun train.py",
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "gpu01:1"},
            span(2, 0, "", "gpu01:1"),
        ),
        ("torchrun --nnodes=$N train.py", {}, None),
        ("torchrun --nproc-per-node=8 train.py", {}, None),
        ("python train.py", {}, None),
        ("", {}, None),
    ],
)
def test_the_command_line_of_a_launcher_tells_it_too(
    words: str, environ: dict[str, str], expected: dict[str, Any] | None
) -> None:
    assert spans.of_launcher(words.split(), environ) == expected


def test_a_secret_in_the_name_of_a_job_is_masked() -> None:
    found = spans.of_ranks({**RANK, "TORCHELASTIC_RUN_ID": "api_key=hf_abcdefghijklmnopqrstuvwxyz012345"})
    assert found is not None
    assert "hf_abcdef" not in found["id"]


ROWS = [
    ("/", "ext4", "/dev/sda1", "/"),
    ("/mnt", "nfs4", "nas01:/export", "/"),
    ("/mnt/deep", "ext4", "/dev/sdb", "/x"),
    ("/opt/venv", "nfs4", "nas01:/export", "/venvs/a"),
]


@pytest.mark.parametrize(
    ("path", "filesystem", "source", "inside"),
    [
        ("/opt/venv", "nfs4", "nas01:/export", "/venvs/a"),
        ("/mnt/venvs/a", "nfs4", "nas01:/export", "/venvs/a"),
        ("/opt/venv/lib", "nfs4", "nas01:/export", "/venvs/a/lib"),
        ("/opt/venv2", "ext4", "/dev/sda1", "/opt/venv2"),
        ("/mnt/deep/er", "ext4", "/dev/sdb", "/x/er"),
        ("/", "ext4", "/dev/sda1", "/"),
    ],
)
def test_one_folder_is_the_same_however_it_is_mounted(
    path: str, filesystem: str, source: str, inside: str
) -> None:
    wanted = {"path": path, "filesystem": filesystem, "source": source, "inside": inside}
    assert mounts.folder_of(path, ROWS) == wanted


def test_what_is_mounted_below_a_folder_is_told_too() -> None:
    found = mounts.folders_of(["/mnt", "/mnt/venvs"], ROWS)
    assert [(one["path"], one["filesystem"]) for one in found] == [("/mnt", "nfs4"), ("/mnt/deep", "ext4")]


def test_the_mounts_of_this_machine_are_read() -> None:
    assert mounts.folder_of("/proc/self", mounts.rows())["filesystem"] == "proc"
