"""Documents: strict YAML, typed as meant, and every complaint with its line."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field

from fleetfix.commands import Json, Seconds, Value
from fleetfix.documents import build, parse, read, value_of
from fleetfix.errors import DocumentError
from fleetfix.policy import Policy


class Sample(Value):
    name: str = "x"
    port: int | None = None
    cuda: Literal["12", "13"] = "12"
    ratio: float = 1.0
    env: dict[str, str] = Field(default_factory=dict)
    tags: tuple[str, ...] = ()
    grace: Seconds = 0.0
    flag: bool = False
    policy: Policy = Policy()
    any: Json = None


def made(text: str) -> Sample:
    return build(Sample, parse(text, "f.yaml"))


def complaints(text: str) -> tuple[str, ...]:
    with pytest.raises(DocumentError) as caught:
        made(text)
    return caught.value.complaints


@pytest.mark.parametrize(
    "written",
    [
        "yes",
        "no",
        "on",
        "off",
        "NO",
        "y",
        "1.10",
        "0644",
        "22:30",
        "1e3",
        "12",
        "true",
        "0x1F",
        "1_000",
        "2026-03-01",
        ".5",
        "=",
    ],
)
def test_text_is_what_was_written_where_text_is_wanted(written: str) -> None:
    sample = made(f"name: {written}\nenv: {{FLAG: {written}}}\ntags: [{written}, b]")
    assert (sample.name, sample.env, sample.tags) == (written, {"FLAG": written}, (written, "b"))


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("12", 12),
        ("-7", -7),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("yes", "yes"),
        ("on", "on"),
        ("0644", "0644"),
        ("22:30", "22:30"),
        ("True", "True"),
        ("0o17", "0o17"),
        ("'12'", "12"),
        ('"true"', "true"),
        ("!!str 12", "12"),
        ("2026-03-01", "2026-03-01"),
        ("[1, yes, null]", [1, "yes", None]),
        ("{on: 1}", {"on": 1}),
    ],
)
def test_a_value_of_no_wanted_type_is_read_as_yaml_1_2(written: str, value: Any) -> None:
    found = made(f"any: {written}").any
    assert (found, isinstance(found, bool)) == (value, isinstance(value, bool))


def test_numbers_and_truth_values_are_typed() -> None:
    sample = made("port: 22\nratio: 1.10\nflag: true\ngrace: 5m\ncuda: 13")
    assert sample == Sample(port=22, ratio=1.1, flag=True, grace=300.0, cuda="13")


def test_all_complaints_of_a_file_come_at_once_in_order_of_lines() -> None:
    text = (
        "name: x\n"
        "prot: 22\n"
        "port: abc\n"
        "name: y\n"
        "cuda: 14\n"
        "policy: {cannary: 1, batch: [10%, ten]}\n"
        "flag: 7\n"
        "tags: one\n"
        "retries: *nothing\n"
    )
    assert complaints(text) == (
        "f.yaml:2: unknown key 'prot', did you mean port?",
        "f.yaml:3: port: wanted a whole number, not 'abc'",
        "f.yaml:4: 'name' is here twice (before in line 1)",
        "f.yaml:5: cuda: wanted '12' or '13', not '14'",
        (
            "f.yaml:6: policy.batch.1: wanted a number of hosts such as 3, or a share such as "
            "\"10%\", not 'ten'"
        ),
        "f.yaml:6: unknown key 'cannary', did you mean canary?",
        "f.yaml:7: flag: wanted true or false, not 7",
        "f.yaml:8: tags: wanted a list, not 'one'",
        "f.yaml:9: *nothing stands for nothing written before it",
        "f.yaml:9: unknown key 'retries'",
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "f.yaml:1: the file is empty"),
        ("# nothing\n", "f.yaml:1: the file is empty"),
        ("name:\n\tx: 1", "f.yaml:2: a tab where YAML wants spaces"),
        ("policy:\n  canary: 1\n\tbatch: 2", "f.yaml:3: a tab where YAML wants spaces"),
        ("name: a\n---\nname: b\n", "f.yaml:2: a second document: one file holds one"),
        (
            "any: !!python/object/apply:os.system [ls]",
            "f.yaml:1: the tag tag:yaml.org,2002:python/object/apply:os.system",
        ),
        ("any:\n  <<: {a: 1}", "f.yaml:2: merge keys are not read"),
        ("any:\n  ? [a]\n  : b", "f.yaml:2: a key must be one word"),
        ("- a\n- b", "f.yaml:1: wanted a mapping, not a list"),
        ("just text", "f.yaml:1: wanted a mapping, not 'just text'"),
        ("env: {A: null}", "f.yaml:1: env.A: wanted text, not nothing"),
        ("port: true", "f.yaml:1: port: wanted a whole number, not 'true'"),
        ("name: [a]", "f.yaml:1: name: wanted text, not a list"),
        ("any: &a [*a]", "f.yaml:1: *a stands for nothing written before it"),
        ('name: "open', "f.yaml:1: found unexpected end of stream"),
        ("a\x00b: 1", "f.yaml:1: a character that YAML does not allow"),
    ],
)
def test_a_broken_file_is_one_line_with_its_place(text: str, complaint: str) -> None:
    assert complaints(text)[0].startswith(complaint)


def test_an_alias_stands_for_its_value_but_cannot_blow_up() -> None:
    assert made("any: {a: &x [1, 2], b: *x}").any == {"a": [1, 2], "b": [1, 2]}
    bomb = "any:\n  a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"  a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
    )
    assert complaints(bomb) == ("f.yaml:6: aliases repeat more than 10000 values",)


@pytest.mark.parametrize(
    "text",
    ["[" * 50, "[" * 20_000, "{a: " * 500 + "}" * 500, "- " * 5000 + "x", "any: " + "[" * 80 + "]" * 80],
)
def test_deep_nesting_is_a_complaint(text: str) -> None:
    assert complaints(text)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"name: \xff\xfe", "f.yaml:1: not UTF-8 text"),
        (b"name: a\nany: \xe9t\xe9", "f.yaml:2: not UTF-8 text"),
        (b"#" * (17 * 1024 * 1024), "f.yaml: larger than 16 MiB"),
    ],
)
def test_bytes_that_are_no_document(write: Any, content: bytes, complaint: str) -> None:
    with pytest.raises(DocumentError) as caught:
        read(write("f.yaml", content), "f.yaml")
    assert caught.value.complaints == (complaint,)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    expected = {
        tmp_path / "nothing": "no such file or directory",
        tmp_path: "is a folder, not a file",
        pipe: "is not a regular file",
    }
    for path, reason in expected.items():
        with pytest.raises(DocumentError) as caught:
            read(path, "f.yaml")
        assert caught.value.complaints == (f"f.yaml: {reason}",)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_of_another_is_one_line(write: Any) -> None:
    path = write("f.yaml", "name: x")
    path.chmod(0)
    with pytest.raises(DocumentError, match="permission denied"):
        read(path)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("12", 12),
        ("true", True),
        ("/opt/venv", "/opt/venv"),
        ("a: b", "a: b"),
        ("[a, 1.10]", ["a", 1.1]),
        ("", None),
        ("null", None),
    ],
)
def test_a_word_of_the_command_line_is_read_like_a_scalar(word: str, value: Any) -> None:
    assert value_of(word) == value


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1, max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(plain_values)
def test_json_reads_back_equal(value: Any) -> None:
    text = json.dumps({"any": value}, ensure_ascii=False)
    with contextlib.suppress(DocumentError):  # control characters, which YAML does not allow
        found = parse(text, "f.yaml")
        assert found.problems or found.value["any"] == value


@given(st.text(max_size=60) | st.text(alphabet=" \t\n:-[]{}&*!|>'\"#%@`ab1,?", max_size=60))
@example("&a *a")
@example("? ")
@example("*a : b")
@example("%YAML 1.2\n---\na: b")
@example("--- |\n text")
def test_any_text_is_a_model_or_complaints(text: str) -> None:
    try:
        made(text)
    except DocumentError as error:
        found = error.complaints
    else:
        found = ("f.yaml:1: fine",)
    assert found
    assert all(line.startswith("f.yaml:") and "\n" not in line for line in found)
