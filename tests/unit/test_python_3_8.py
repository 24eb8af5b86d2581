"""Host modules do what they do under the oldest Python that a host may have."""

from __future__ import annotations

import ast
import glob
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.actions.compile_caches import CompileCaches
from fleetfix.actions.throughput import Throughput
from fleetfix.domain.checkpoints import SAVE_LINES
from fleetfix.domain.evidence import FULL
from fleetfix.remote import procs
from fleetfix.remote.api import stat_of
from tests.unit.gpu_host import GpuHost

ROOT = Path(__file__).parents[2]
HOST_MODULES = sorted((ROOT / "fleetfix/remote").glob("*.py"))
LATER = {"removeprefix", "removesuffix", "is_relative_to", "bit_count", "pairwise", "batched"}

CALL = """
import importlib, json, re, sys
sys.path.insert(0, sys.argv[1])
assert sys.version_info[:2] == (3, 8), sys.version
from fleetfix.remote import procs
from fleetfix.remote.api import Context, Refusal
procs.DEVICES, procs.CUDA_DRIVER = re.compile(sys.argv[3]), re.compile(sys.argv[4])
answers = {}
for name, args in json.load(sys.stdin):
    module, function = name.split(".")
    call = getattr(importlib.import_module("fleetfix.remote." + module), function)
    assert call.effect == "read"
    try:
        answer = call(Context("r1", "s", sys.argv[2], None, None, dry=True), **args)
        json.dumps(answer if not hasattr(answer, "exit") else answer.exit)
        answers[name] = "answered"
    except Refusal as no:
        answers[name] = "%s: %s" % (no.kind, no.message)
json.dump(answers, sys.stdout)
"""


def oldest() -> str | None:
    """A Python 3.8 that runs, or None."""
    for found in [*sorted(glob.glob("/root/.pyenv/versions/3.8*/bin/python")), shutil.which("python3.8")]:
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


@pytest.fixture(scope="module")
def python() -> str:
    found = oldest()
    if found is None:
        pytest.skip("no Python 3.8 here")
    return found


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuHost]:
    with GpuHost(tmp_path, monkeypatch) as host:
        yield host


@pytest.fixture
def venv(python: str, tmp_path: Path) -> Path:
    """An environment with packages that have something to mend."""
    path = tmp_path / "venv"
    subprocess.run([python, "-m", "venv", "--without-pip", str(path)], check=True)
    site = path / "lib/python3.8/site-packages"
    for name, version in (
        ("torch", "2.4.1"),
        ("nvidia_nccl_cu12", "2.20.5"),
        ("nvidia_nccl_cu13", "2.28.9"),
    ):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n\n")
        empty = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
        (info / "RECORD").write_text(f"nvidia/lib/{name}.so,sha256={empty},0\n{info.name}/RECORD,,\n")
    (site / "torch/lib").mkdir(parents=True)
    (site / "torch/lib/libtorch.so").write_bytes(b"\x7fELF" + bytes(8192))
    return path


def asked(venv: Path) -> list[tuple[str, dict[str, Any]]]:
    """Every read that a host answers, with arguments as the actions give them."""
    at = {"venv": str(venv)}
    site = "lib/python3.8/site-packages/"
    caches = next(CompileCaches(of="stop", venv=str(venv), cuda="12").probe())[0]
    rates = next(Throughput(of="job").probe())[0]
    return [
        ("wheels.audit", {**at, "purge": []}),
        (
            "parts.find",
            {
                **at,
                "repair": [site + "nvidia_nccl_cu12-2.20.5.dist-info"],
                "purge": [site + "nvidia_nccl_cu13-2.28.9.dist-info"],
            },
        ),
        ("audits.environment", at),
        ("facts.survey", {}),
        ("ledger_lines.last", {"count": 5}),
        ("undoable.lacking", {}),
        ("environments.find", at),
        ("environments.users", {"path": str(venv)}),
        ("environments.find", {"venv": "of-job"}),
        ("loads.torch", at),
        ("procs.holders", {}),
        ("gpus.survey", {}),
        ("gpus.start_possible", {}),
        (caches.function, caches.args),
        (rates.function, rates.args),
        ("jobs.found", {}),
        ("jobs.state", {"step": "stop"}),
        ("mapped.libraries", {}),
        ("shell.check", {"argv": ["true"]}),
        ("shell.account", {"user": "root"}),
        *(("evidence.take", {"item": item}) for item in FULL),
    ]


def test_every_read_answers_under_python_3_8(python: str, host: GpuHost, venv: Path) -> None:
    library = str(venv / "lib/python3.8/site-packages/torch/lib/libtorch.so")
    with open(host.path("train.log"), "wb") as log:
        pid = host.train(venv, step=1, maps=[library], how={"stdout": log, "cwd": host.root})
    host.path("checkpoints").mkdir()
    host.path("checkpoints/latest").write_text("1")
    known = stat_of(pid)
    assert known is not None
    job = {"pid": pid, "start": known[2], "lines": SAVE_LINES}
    reads = [*asked(venv), ("checkpoints.last", job)]
    assert {name for name, _ in reads} == marked_reads()
    done = subprocess.run(
        [python, "-B", "-c", CALL, str(ROOT), str(host.path("state")), *patterns()],
        input=json.dumps(reads),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert {name: answers[name] for name in answers if answers[name] != "answered"} == {}


def patterns() -> list[str]:
    """What stands for a GPU and its driver here."""
    return [procs.DEVICES.pattern, procs.CUDA_DRIVER.pattern]


def marked_reads() -> set[str]:
    """`module.function` of all that is marked @read."""
    found = set()
    for path in HOST_MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
                found |= {f"{path.stem}.{node.name}"} if "read" in marks else set()
    return found


@pytest.mark.parametrize("path", HOST_MODULES, ids=lambda path: path.stem)
def test_a_host_module_uses_nothing_that_came_later(path: Path) -> None:
    later = []
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 8))):
        sides = {type(node.left), type(node.right)} if isinstance(node, ast.BinOp) else set()
        if sides & {ast.Dict, ast.DictComp}:
            later.append(f"line {node.lineno}: dictionaries joined by an operator")
        if isinstance(node, ast.Attribute) and node.attr in LATER:
            later.append(f"line {node.lineno}: {node.attr}")
        if isinstance(node, ast.Call) and any(word.arg == "strict" for word in node.keywords):
            later.append(f"line {node.lineno}: zip(strict=)")
    assert later == []
