"""What the code as a whole promises: layers, homes of libraries, sizes, and that what is shipped works."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from fleetfix import actions, library
from fleetfix.action import Action, Check
from fleetfix.inventory import Host
from fleetfix.playbook import load

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fleetfix"
HOST_MODULES = sorted((PACKAGE / "remote").glob("*.py"))
NAMELESS = {"utils", "util", "helpers", "helper", "common", "base", "core", "manager", "misc", "tools"}


def imports_of(path: Path) -> set[str]:
    """The modules that a file names in its imports, wherever they stand."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def test_imports_run_one_way() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_module_is_named_for_nothing() -> None:
    names = {path.stem for path in PACKAGE.rglob("*.py")} | {
        path.name for path in PACKAGE.rglob("*") if path.is_dir()
    }
    assert not names & NAMELESS


@pytest.mark.parametrize("path", HOST_MODULES, ids=lambda path: path.stem)
def test_a_host_module_needs_nothing_but_python(path: Path) -> None:
    foreign = {
        name
        for name in imports_of(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("fleetfix.remote")
    }
    assert foreign == set()


@pytest.mark.parametrize("path", HOST_MODULES, ids=lambda path: path.stem)
def test_a_host_module_is_python_3_8(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 8))


@pytest.mark.parametrize("kind", sorted(actions.KINDS))
def test_a_kind_is_an_action_or_a_check_and_its_host_modules_exist(kind: str) -> None:
    found = actions.named(kind)
    assert issubclass(found, Action) or issubclass(found, Check)
    assert found.kind == kind
    assert (found.__doc__ or "").strip()
    assert {*found.modules} <= {path.stem for path in HOST_MODULES}


def test_every_action_file_stands_in_the_table() -> None:
    files = {path.stem.rstrip("_") for path in (PACKAGE / "actions").glob("[a-z]*.py")}
    assert files == set(actions.KINDS)


@pytest.mark.parametrize("name", sorted(library.available({"HOME": "/nonexistent"})))
def test_a_shipped_playbook_loads_and_binds(name: str) -> None:
    playbook = load(name, env={"HOME": "/nonexistent"})
    assert playbook.name == name
    assert playbook.summary
    assert playbook.bind(Host(name="gpu01", address="gpu01"), {})


def loaded_after(code: str) -> set[str]:
    """The modules that are loaded once this code has run in a fresh Python."""
    script = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stderr.split())


def test_help_loads_nothing_heavy() -> None:
    code = (
        "from fleetfix.cli.main import main\n"
        "sys.stdout = open('/dev/null', 'w')\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    )
    heavy = {
        "asyncssh",
        "yaml",
        "sqlite3",
        "ClusterShell",
        "cryptography",
        "fleetfix.playbook",
        "fleetfix.journal",
    }
    assert not loaded_after(code) & heavy


def test_reading_a_playbook_loads_no_wire_and_no_terminal() -> None:
    code = "from fleetfix.playbook import load\nload('purge-cu13')"
    assert not loaded_after(code) & {"asyncssh", "rich", "typer", "sqlite3", "ClusterShell"}


def test_the_lock_names_no_place_to_download_from() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert not any(word in lock for word in ("://", "--index", "--extra-index", "--find-links", "@ "))
    assert all("==" in line for line in lock.splitlines() if line and not line.startswith((" ", "#")))
