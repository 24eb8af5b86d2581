"""No secret leaves a host: not in a command line, a reply, a failure or a start record."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.domain import masking as pure
from fleetfix.remote import ending, gpus, jobs, launch, mapped, masking, procs, relaunch
from fleetfix.remote.api import Refusal, stat_of
from tests.unit.gpu_host import GpuHost

CANARY = "canary-0123456789"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuHost]:
    monkeypatch.setattr(ending, "RESPAWN_WATCH", 0.1)
    monkeypatch.setattr(launch, "SETTLE", 0.3)
    with GpuHost(tmp_path, monkeypatch) as host:
        yield host


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("bash -c 'WANDB_API_KEY=abc torchrun x'", "bash -c 'WANDB_API_KEY=*** torchrun x'"),
        ('HF_TOKEN="a b" DB_PASS=x python', "HF_TOKEN=*** DB_PASS=*** python"),
        ("train --api-key=abc --token def --lr 1", "train --api-key=*** --token *** --lr 1"),
        ("https://alice:pw@host/x", "https://alice:***@host/x"),
        ("Authorization: Bearer abcdef", "Authorization: Bearer ***"),
        ("{'api_key': 'abc'}", "{'api_key': ***}"),
        ("token hf_abcdefghijklmnopqrst", "token ***"),
        ("--max-tokens 5 --tokenizer llama --tokens=3", "--max-tokens 5 --tokenizer llama --tokens=3"),
        ("step: 5 tps: 9 COMPASS=north PWD=/x", "step: 5 tps: 9 COMPASS=north PWD=/x"),
        ("CUDA error: out of memory", "CUDA error: out of memory"),
    ],
)
def test_what_looks_like_a_secret_is_masked_alike_on_host_and_controller(text: str, shown: str) -> None:
    assert masking.masked(text) == shown
    assert pure.masked(text) == shown


def test_a_word_after_a_secret_option_is_masked() -> None:
    argv = ["train", "--token", "abc", "--tokenizer", "llama", "--password", "-v"]
    assert masking.masked_argv(argv) == [
        "train",
        "--token",
        "***",
        "--tokenizer",
        "llama",
        "--password",
        "-v",
    ]


def test_the_values_of_secret_variables_are_masked_wherever_they_stand() -> None:
    values = masking.values_of({"MY_SECRET": "hunter22", "PIN_TOKEN": "1234", "PATH": "/usr/bin"})
    assert values == ["hunter22"]
    assert masking.masked("login with hunter22 at /usr/bin", values) == "login with *** at /usr/bin"


def run_job(host: GpuHost, log: Path) -> int:
    """A job below `bash -c` that names a secret, with another in its arguments and environment."""
    ready = host.path("ready")
    argv = host.argv(host.environment(), host.options(host.environment(), 0, dump=str(ready)))
    words = " ".join(f"'{word}'" for word in [*argv, CANARY])
    with log.open("ab") as out:
        launcher = host.start(
            ["bash", "-c", f"WANDB_API_KEY={CANARY} {words}; true"],
            {"HF_TOKEN": CANARY},
            stdout=out,
            stderr=out,
        )
    host.wait(ready.exists)
    ready.unlink()
    return launcher.pid


def test_no_reply_refusal_or_record_holds_a_secret_of_the_job(
    host: GpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = host.path("train.log")
    pid = run_job(host, log)
    said: list[Any] = []
    ctx = host.context
    ctx_stop = ctx("stop")
    told: list[str] = []
    ctx_stop._say = told.append
    said += [procs.holders(ctx()), jobs.found(ctx()), jobs.state(ctx(), "stop"), mapped.libraries(ctx())]
    members = [one["pid"] for one in said[0]["processes"]]
    said += [gpus.who_is(one) for one in [pid, *members]] + [ending.said(one) for one in [pid, *members]]
    said.append(relaunch.stop(ctx_stop, [{"pid": pid, "start": stat_of(pid)[2]}], 2.0))
    said.append(relaunch.start(ctx("train"), "stop"))
    said.append(jobs.state(ctx("train"), "stop"))
    (record,) = jobs.records(ctx("train"))
    said.append(record)
    # It dies while it is watched, and its last words hold the secret.
    with log.open("a") as out:
        out.write(f"login failed for {CANARY}\n")
    for one in host.marked():
        os.kill(one, signal.SIGKILL)
    with pytest.raises(Refusal, match="login failed for") as no:
        relaunch.settle(ctx("train"), 5.0)
    said.append([no.value.message, no.value.hint])
    host.script.write_text(
        f"import os, sys; print('bad ' + os.environ['HF_TOKEN'], {CANARY!r}); sys.exit(1)"
    )
    with pytest.raises(Refusal, match="ended at once: bad") as no:
        relaunch.restore(ctx("stop"))
    said.append([no.value.message, no.value.hint])
    assert CANARY in json.dumps(jobs.captured(ctx(), "stop"))
    assert CANARY not in json.dumps([said, told])


def test_a_capture_is_dropped_once_its_jobs_run_again(host: GpuHost) -> None:
    pid = run_job(host, host.path("train.log"))
    relaunch.stop(host.context("stop"), [{"pid": pid, "start": stat_of(pid)[2]}], 2.0)
    (back,) = relaunch.restore(host.context("stop"))["started"]
    assert not host.gone(back)
    assert jobs.captured(host.context(), "stop") is None
    assert relaunch.restore(host.context("stop")) == {"started": []}
