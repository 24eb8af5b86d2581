"""A fabfile that a playbook names: found, trusted, and looked through without being run."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fleetfix import playbook
from fleetfix.actions.fabric import Fabric
from fleetfix.errors import DocumentError
from fleetfix.inventory import Host

FABFILE = """
from fabric import task
from elsewhere import imported
assigned = task(lambda c: None)

def plain(c): ...
@task
def with_args(c, port, host="x", *, force=False): ...
def anything(c, **more): ...
def nothing(): ...
async def later(c): ...
raise RuntimeError("it is not run by being read")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fabfile.py").write_text(FABFILE)
    return tmp_path


def read(folder: Path, params: str) -> playbook.Playbook:
    text = f"name: p\nsteps:\n  - id: s\n    fabric: {params}\n"
    return playbook.read(text, str(folder / "p.yaml"))


def test_a_step_knows_the_whole_path_and_what_the_file_was(folder: Path) -> None:
    loaded = read(folder, "{file: fabfile.py, do: plain, always: true}")
    (step,) = loaded.bind(Host(name="gpu01", address="gpu01"), {})
    assert isinstance(step.act, Fabric)
    assert step.act.file == str(folder / "fabfile.py")
    assert step.act.sha256 == hashlib.sha256(FABFILE.encode()).hexdigest()
    (folder / "fabfile.py").write_text(FABFILE + "\n")
    assert read(folder, "{file: fabfile.py, do: plain, always: true}").digest != loaded.digest


@pytest.mark.parametrize(
    "params",
    [
        "{file: fabfile.py, do: with_args, check: anything, args: {port: 1}}",
        "{file: fabfile.py, do: with_args, always: true, args: {port: 1, host: y, force: true}}",
        "{file: fabfile.py, do: imported, check: assigned, args: {x: 1}}",
    ],
)
def test_functions_that_can_be_called_so_are_taken(folder: Path, params: str) -> None:
    read(folder, params)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            "{file: fabfil.py, do: plain, always: true}",
            "there is no {folder}/fabfil.py, did you mean fabfile.py?",
        ),
        (
            "{file: fabfile.py, do: plai, always: true}",
            "do: fabfile.py has no function 'plai', did you mean plain?",
        ),
        (
            "{file: fabfile.py, do: plain, always: true, args: {port: 1}}",
            "do: plain (line 6) takes no port, which",
        ),
        (
            "{file: fabfile.py, do: with_args, always: true}",
            "with_args (line 8) wants port, and `args` does not",
        ),
        ("{file: fabfile.py, do: nothing, always: true}", "nothing (line 10) takes no connection"),
        ("{file: fabfile.py, do: later, always: true}", "later (line 11) is async"),
        ("{file: fabfile.py, do: plain}", "give `check` (True: nothing to do), or say `always: true`"),
        ("{file: '${{ host.name }}.py', do: plain, always: true}", "file: it is the same for all hosts"),
        ("{file: p, do: plain, always: true}", "file: p:1 is not Python"),
        (
            f"{{file: fabfile.py, do: plain, always: true, sha256: {'0' * 64}}}",
            "fabfile.py is another one: it has",
        ),
        ("{file: ., do: plain, always: true}", "is a directory"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(folder: Path, params: str, said: str) -> None:
    (folder / "p").write_text("def (:")
    with pytest.raises(DocumentError) as wrong:
        read(folder, params)
    (line,) = wrong.value.complaints
    assert line.startswith(f"{folder}/p.yaml:4: ")
    assert said.format(folder=folder) in line


def test_a_file_that_others_may_write_to_is_not_taken(folder: Path) -> None:
    (folder / "fabfile.py").chmod(0o666)
    with pytest.raises(DocumentError, match="others may write to it"):
        read(folder, "{file: fabfile.py, do: plain, always: true}")
    (folder / "fabfile.py").chmod(0o644)
    folder.chmod(0o777)
    with pytest.raises(DocumentError, match="others may write to it"):
        read(folder, "{file: fabfile.py, do: plain, always: true}")
