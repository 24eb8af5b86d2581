"""What a host tells as evidence: the facts that are asked for, within bounds, and no secret."""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.domain.evidence import FULL, LIGHT
from fleetfix.remote import evidence
from fleetfix.remote.api import Context, Ran, Refusal
from tests.unit.gpu_host import GpuHost

CANARY = "canary-0123456789"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuHost]:
    with GpuHost(tmp_path, monkeypatch) as host:
        yield host


def text_of(answer: dict[str, Any]) -> str:
    return zlib.decompress(base64.b64decode(answer["packed"])).decode()


def test_host_and_controller_know_the_same_items() -> None:
    assert set(evidence.ITEMS) == set(FULL)
    assert set(LIGHT) <= set(FULL)


def test_no_item_holds_a_secret_of_the_job(host: GpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    log = host.path("train.log")
    key = f"-----BEGIN\n{CANARY}x\n-----END"
    log.write_text(f"HF_TOKEN=abcdefgh\nlogged in as {CANARY}\nwith {key}\nstep: 5\n")
    with log.open("ab") as out:
        secrets = {"WANDB_API_KEY": CANARY, "DEPLOY_KEY": key}
        host.train(host.environment(), env=secrets, how={"stdout": out, "stderr": out})
    mounts = f"//server/share /mnt cifs rw,username=a,password={CANARY} 0 0\n"
    real = evidence._text
    monkeypatch.setattr(evidence, "_text", lambda path: mounts if path.endswith("mounts") else real(path))
    told = {item: evidence.take(host.context(), item) for item in FULL}
    texts = {item: text_of(answer) for item, answer in told.items() if answer["packed"]}
    assert "logged in as ***" in texts["job-log"]
    assert "HF_TOKEN=***" in texts["job-log"]
    assert "with ***\nstep: 5" in texts["job-log"]
    assert "password=***" in texts["mounts"]
    assert not [item for item, text in texts.items() if CANARY in text or "abcdefgh" in text]


def test_who_holds_a_gpu_and_what_is_installed_is_told(host: GpuHost) -> None:
    venv = host.environment()
    (venv / "lib/python3.11/site-packages/torch-2.9.1+cu128.dist-info").mkdir()
    pid = host.train(venv, gpu=1)
    (row,) = [
        line
        for line in text_of(evidence.take(host.context(), "processes")).splitlines()
        if line.split()[:1] == [str(pid)]
    ]
    assert " 1 " in row
    assert str(host.script) in row
    packages = text_of(evidence.take(host.context(), "packages"))
    assert packages == f"# {venv}\ntorch==2.9.1+cu128\n"


def test_without_a_job_there_is_no_package_list_and_no_log(host: GpuHost) -> None:
    for item in ("packages", "job-log"):
        answer = evidence.take(host.context(), item)
        assert (answer["packed"], bool(answer["lacks"])) == ("", True)


@pytest.mark.parametrize("end", ["head", "tail"])
def test_a_text_of_any_length_is_cut_at_the_right_end_and_fits(end: str) -> None:
    noise = random.Random(7)
    text = "".join(chr(noise.randrange(32, 0x3000)) for _ in range(400_000))
    packed, cut = evidence._packed(text, end)
    assert cut
    assert len(json.dumps(packed)) < 60 * 1024
    back = text_of({"packed": packed})
    assert text.startswith(back) if end == "head" else text.endswith(back)
    assert len(back) > 10_000


def answering(monkeypatch: pytest.MonkeyPatch, *answers: Ran) -> list[list[str]]:
    asked: list[list[str]] = []
    left = list(answers)

    def command(self: Context, argv: list[str], **how: Any) -> Ran:
        asked.append(argv)
        return left.pop(0)

    monkeypatch.setattr(Context, "command", command)
    return asked


def test_a_driver_that_says_no_is_evidence_and_one_that_hangs_is_a_failure(
    host: GpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = b"NVIDIA-SMI has failed\n"
    answering(monkeypatch, Ran(9, said, b"", False), Ran(None, b"", b"", False), Ran(127, b"", b"", False))
    assert text_of(evidence.take(host.context(), "nvidia-smi")) == "NVIDIA-SMI has failed\n\n[exit 9]\n"
    with pytest.raises(Refusal, match="nvidia-smi -q did not answer within") as no:
        evidence.take(host.context(), "nvidia-smi")
    assert no.value.kind == "timed_out"
    assert evidence.take(host.context(), "nvidia-smi")["lacks"] == "nvidia-smi is not on this host"


def test_where_dmesg_is_closed_the_journal_is_asked(host: GpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Ran(1, b"", b"dmesg: read kernel buffer failed: Operation not permitted\n", False)
    asked = answering(
        monkeypatch, closed, Ran(0, b"Xid 79\n", b"", False), closed, Ran(1, b"", b"no\n", False)
    )
    assert text_of(evidence.take(host.context(), "kernel")) == "Xid 79\n"
    assert asked[1][:4] == ["journalctl", "-k", "-b", "0"]
    assert "Operation not permitted" in evidence.take(host.context(), "kernel")["lacks"]
