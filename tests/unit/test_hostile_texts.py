"""Texts that people and hosts may give us: each is understood, or refused in a line, and soon."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fleetfix import documents, playbook, saved_plan
from fleetfix.domain import log_formats, nvidia_smi, requirements, throughput
from fleetfix.errors import DocumentError, InventoryError, PatternError, PlanError, PlaybookError
from fleetfix.hostset import MOST_HOSTS, HostSet
from fleetfix.inventory import Inventory
from fleetfix.remote import dists, elf, logs

WORDS = """
name steps id vars policy canary batch forks max_failures shell run check undo always command argv gpu_idle
gpu_processes cuda_wheels wheel_parts torch_loads compile_caches job job_libs throughput assert within every
consecutive timeout retries when_changed when_pending on_failure hosts groups users via port transport 10%
-1 0 1e400 1.10 yes true null ~ 60s 99999999999999999999d gpu[01-16] @all * ${{ ${{vars.x}} ${{host.x}}
"""
words = st.sampled_from(WORDS.split())
signs = st.sampled_from(
    [*"[]{}:,'\"#&*!|>%@`\t\0\x85\u2028\ud800é", "\n", "\n  ", "\n- ", ": ", "<<: ", "&a ", "*a "]
)
scribbled = st.lists(words | signs | st.text(max_size=3), max_size=30).map("".join)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=6)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=12,
)


def written(value: Any) -> str:
    """A value as YAML, or as JSON where YAML has no word for it."""
    try:
        return str(yaml.safe_dump(value, allow_unicode=True))
    except (yaml.YAMLError, UnicodeError):
        return json.dumps(value)


playbooks = st.fixed_dictionaries(
    {"name": st.just("p"), "steps": st.lists(st.dictionaries(words, values, max_size=4), max_size=3)},
    optional={"vars": values, "policy": st.dictionaries(words, values, max_size=3)},
).map(written)
inventories = st.fixed_dictionaries(
    {"hosts": values | st.dictionaries(words, values, max_size=3)},
    optional={"groups": values, "vars": values},
).map(written)


def understood(read: Callable[[], object], *refusals: type[Exception]) -> None:
    """Whatever is read, it is what it is, or one of these refusals, which has words that can be written."""
    try:
        read()
    except refusals as refusal:
        str(refusal).encode("utf-8", "backslashreplace")


@given(scribbled | values.map(written) | playbooks)
def test_any_text_is_a_document_or_refused(text: str) -> None:
    understood(lambda: documents.parse(text, "f"), DocumentError)
    understood(lambda: documents.value_of(text), DocumentError)
    understood(lambda: playbook.read(text, "f"), DocumentError, PlaybookError)
    understood(lambda: saved_plan.read(text, "f"), PlanError)


@given(inventories | scribbled | values.map(json.dumps) | st.binary(max_size=40), st.booleans())
def test_any_file_is_an_inventory_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str | bytes, plain: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / ("inventory" if plain else "inventory.yaml")
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    read = lambda: Inventory.load(str(path)).select("*")  # noqa: E731
    understood(read, DocumentError, InventoryError, PatternError)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\n"
        + "".join(f"b{n}: &b{n} [*{'a' if n == 0 else f'b{n - 1}'}{', *a' * 9}]\n" for n in range(9))
        + "".join(f"c{n}: [*b8, *b8, *b8, *b8, *b8, *b8, *b8, *b8, *b8]\n" for n in range(200)),
        "[" * 5000,
        "{a: " * 5000,
        "- " * 5000,
        "a: " + "9" * 100_000,
        "? " * 5000,
        "&a [*a]",
        "!" * 5000,
    ],
    ids=["laughs", "lists", "mappings", "items", "digits", "keys", "itself", "tags"],
)
def test_a_document_that_would_never_end_ends(text: str) -> None:
    understood(lambda: playbook.read(text, "f"), DocumentError, PlaybookError)
    understood(lambda: saved_plan.read(text, "f"), PlanError)


patterns = st.lists(
    st.sampled_from(
        [*"[],!&^@*?-:/% \n²\u0661é", "gpu", "01", "16", "[1-3]", "[01-16/2]", "..", "999999999"]
    )
    | st.text(max_size=2),
    max_size=10,
).map("".join)


@given(patterns)
def test_any_pattern_is_a_set_of_hosts_or_refused(text: str) -> None:
    fleet = HostSet.parse("gpu[01-16]")
    understood(lambda: str(HostSet.parse(text, known=fleet, groups={"gpu": fleet})), PatternError)
    with contextlib.suppress(PatternError):
        found = HostSet.parse(text)
        assert HostSet.parse(str(found)) == found


@pytest.mark.parametrize(
    "text", ["a[1-999999999]", "a[1-9999]b[1-9999]", "a[0-1]" * 40, f"a[1-{MOST_HOSTS + 1}]"]
)
def test_a_pattern_for_more_hosts_than_there_are_is_a_slip(text: str) -> None:
    with pytest.raises(PatternError):
        HostSet.parse(text)


CELLS = "index uuid name GPU-1 [N/A] MiB % | +--+ 80 nan inf 1e999 \xb2 ERR! tps: step: loss"
printed = st.lists(
    st.sampled_from([*CELLS.split(), "\n", "\r\n", ", ", "CUDA Version: 12.8", "9" * 5000, "\x1b[0m"])
    | st.text(max_size=3),
    max_size=25,
).map("".join)


@given(printed, st.integers() | st.none())
def test_whatever_a_tool_prints_is_understood_or_nothing(text: str, code: int | None) -> None:
    for parse in (nvidia_smi.parse_gpus, nvidia_smi.parse_apps, nvidia_smi.parse_panel, nvidia_smi.cuda_of):
        parse(text)
    for cell in text.split(", "):
        for number in (nvidia_smi.number_of, nvidia_smi.memory_of, nvidia_smi.measure_of):
            json.dumps(number(cell), allow_nan=False)
        log_formats.whole(cell)
        requirements.requirement(cell)
    nvidia_smi.trouble(code, text)
    logs.cleaned(text)


@given(st.lists(st.tuples(printed | st.none(), printed), max_size=12))
def test_whatever_a_log_holds_makes_a_rate_or_none(points: list[Any]) -> None:
    rate = throughput.steady_rate(throughput.after_warm_up(throughput.points_of(points), 3))
    if rate is not None:
        json.dumps(rate.model_dump(), allow_nan=False)


pieces = st.sampled_from(
    [b"\x7fELF\x02\x01\x01", b"\x7fELF\x01\x02", bytes(8), b"\xff" * 8, struct.pack("<I", 2)]
)
binaries = st.lists(pieces | st.binary(max_size=8), max_size=40).map(b"".join)


@given(binaries | printed.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_whatever_lies_in_an_environment_is_read_as_data(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    site: Path = tmp_path_factory.getbasetemp() / "site"
    info = site / "x-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    for name in ("METADATA", "RECORD", "INSTALLER", "x.so"):
        (info / name).write_bytes(data)
    assert elf.needed(str(info / "x.so")) is not None
    found = dists.read_dist(str(site), "", info.name)
    assert all(not path.startswith(("/", "../")) for path, _, _ in found.rows or ())
