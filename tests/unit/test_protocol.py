"""Frames, the start command and the sources that are sent."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import types
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix import protocol
from fleetfix.errors import Bug, HostError

REMOTE = Path(protocol.__file__).parent / "remote"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@given(st.lists(st.dictionaries(st.text(), json_values, max_size=3), max_size=5), st.integers(1, 7))
def test_frames_arrive_however_the_bytes_are_cut(frames: list[dict[str, object]], size: int) -> None:
    data = b"".join(protocol.encode(frame) for frame in frames)
    decoder = protocol.Decoder()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert [frame for piece in pieces for frame in decoder.feed(piece)] == frames


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", protocol.LARGEST_RECEIVED + 1),
        framed(b"not json"),
        framed(b"[1]"),
        framed(b'{"a":' + b"[" * 100 + b"]" * 100 + b"}"),
        framed(b"[" * 100_000),
        framed(b"\xff\xfe"),
    ],
    ids=["too long", "no JSON", "no object", "too deep", "bottomless", "no text"],
)
def test_what_no_runner_sends_is_refused(data: bytes) -> None:
    with pytest.raises(HostError) as refused:
        list(protocol.Decoder().feed(data))
    assert refused.value.failure.kind == "bug"


def test_a_frame_that_the_host_would_not_take_is_not_sent() -> None:
    with pytest.raises(Bug):
        protocol.encode({"a": "x" * protocol.LARGEST_SENT})


@pytest.mark.parametrize("become", [False, True])
def test_the_start_command_has_nothing_that_a_login_shell_would_touch(become: bool) -> None:
    command = protocol.Start("abcd", None, become).command()
    assert command.startswith("exec sh -c '")
    assert command.endswith("'")
    inside = command[len("exec sh -c '") : -1]
    assert not set("'!\\\n") & set(inside)


def test_the_echo_of_the_start_command_is_not_taken_for_the_marker() -> None:
    start = protocol.Start("abcd")
    assert start.marker.search(start.command().encode()) is None
    assert start.no_python + b"\n" not in start.command().encode()


@pytest.mark.parametrize("path", ["python3", "/usr/bin/python3; rm -rf /", "/a'b", "/a$b", "/a b"])
def test_a_python_that_is_no_plain_path_is_refused(path: str) -> None:
    with pytest.raises(HostError) as refused:
        protocol.Start("abcd", path).command()
    assert refused.value.failure.kind == "no_python"


def test_python_is_looked_for_only_where_root_alone_can_write() -> None:
    assert all(path.startswith(("/usr/bin/", "/usr/local/bin/", "/opt/")) for path in protocol.PYTHONS)


def test_the_core_is_small_and_names_every_module_it_imports() -> None:
    assert len(protocol.core()) < 36_000
    for name in protocol.CORE:
        source = protocol._pack(name, (REMOTE / f"{name}.py").read_text())
        assert set(source.imports) <= set(protocol.CORE)


def test_sources_are_sent_with_all_that_they_import() -> None:
    extra = {
        "one": "from fleetfix.remote import two\nfrom fleetfix.remote.api import read\n",
        "two": "def late():\n    from fleetfix.remote.three import x\n",
        "three": "from fleetfix.remote import one\n",
    }
    assert set(protocol.Sources(extra).needed(["one"])) == {"one", "two", "three"}


def test_a_module_that_does_not_exist_is_left_to_the_host_to_refuse() -> None:
    assert protocol.Sources().needed(["no_such_module"]) == {}


def test_an_actions_own_module_wins_over_none_of_the_core() -> None:
    assert protocol.Sources({"runner": "x = 1"}).needed(["runner"]) == {}


def test_a_source_that_does_not_parse_is_said() -> None:
    with pytest.raises(Bug):
        protocol.Sources({"broken": "def ("}).needed(["broken"])


def test_what_a_host_printed_is_shown_on_one_line_without_terminal_codes() -> None:
    text = protocol.readable(b"\x1b[2Jhello\r\n\x07wor\xffld" + b"." * 500)
    assert "\x1b" not in text
    assert "\n" not in text
    assert len(text) <= 302


# -- every Python that hosts have -----------------------------------------------------------------------


def pythons() -> list[str]:
    """Interpreters from 3.8 on this machine, the oldest and the newest among them."""
    found = (
        [str(path) for path in Path("/root/.pyenv/versions").glob("3.*/bin/python3")] if _may_look() else []
    )
    return sorted({*found, sys.executable, *(p for p in ("/usr/bin/python3",) if Path(p).exists())})


def _may_look() -> bool:
    try:
        return Path("/root/.pyenv/versions").is_dir()
    except PermissionError:
        return False


def version(python: str) -> tuple[int, int]:
    out = subprocess.run(
        [python, "-I", "-S", "-c", "import sys; print(*sys.version_info[:2])"],
        capture_output=True,
        check=True,
    )
    major, minor = out.stdout.split()
    return int(major), int(minor)


@pytest.mark.parametrize("python", pythons())
def test_every_host_module_compiles_and_the_core_loads(python: str) -> None:
    if version(python) < (3, 8):
        pytest.skip("older than any Python that is looked for")
    sources = {path.stem: path.read_text() for path in REMOTE.glob("*.py")}
    script = (
        "import json, sys\n"
        "sources = json.load(sys.stdin)\n"
        "for name, text in sources.items(): compile(text, name, 'exec')\n"
        "text = sources['boot'].replace('runner.main()', '')\n"
        "exec(text + '\\nbegin(sources)')\n"
        "import importlib\n"
        "for name in sources:\n"
        "    if name not in ('__init__', 'boot'): importlib.import_module('fleetfix.remote.' + name)\n"
        "print('loaded')\n"
    )
    done = subprocess.run(
        [python, "-I", "-S", "-B", "-c", script], input=json.dumps(sources), capture_output=True, text=True
    )
    assert done.stdout == "loaded\n", done.stderr


def test_the_bootstrap_refuses_an_old_python_and_leaves_its_input_alone() -> None:
    old = Path("/root/.pyenv/versions/3.7.16/bin/python3")
    if not _may_look() or not old.exists():
        pytest.skip("no Python older than 3.8 here")
    start = protocol.Start("abcd", str(old))
    done = subprocess.run(["sh", "-c", start.command()], input=b"", capture_output=True)
    assert done.returncode == protocol.NO_PYTHON
    assert start.no_python in done.stdout


def test_the_core_is_what_the_bootstrap_can_run() -> None:
    text = zlib.decompress(protocol.core()).decode()
    assert isinstance(compile(text, "core", "exec"), types.CodeType)
