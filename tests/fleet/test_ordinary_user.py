"""The lab and the main job without root: as an ordinary user in an unprivileged user namespace."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

import fleetfix
from tests.fleet.conftest import Ran

pytestmark = pytest.mark.fleet

Fleetfix = Callable[..., Ran]
SYSTEM_PYTHON = "/usr/bin/python3"


def _why_not() -> str | None:
    """Why root cannot play an ordinary user here, or None."""
    if os.geteuid() != 0:
        return "this is an ordinary user already: every other test of the lab shows it"
    if not Path(SYSTEM_PYTHON).exists():
        return f"no {SYSTEM_PYTHON} that an ordinary user may run"
    version = subprocess.run(
        [SYSTEM_PYTHON, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True
    )
    if version.stdout.strip() != str(sys.version_info[:2]):
        return f"{SYSTEM_PYTHON} is another version than the one under test"
    return None


@pytest.fixture
def as_nobody() -> Iterator[Fleetfix]:
    """The command line as the user nobody, with a home of its own."""
    why = _why_not()
    if why:
        pytest.skip(why)
    nobody = pwd.getpwnam("nobody")
    home = Path(mkdtemp(prefix="fleetfix-nobody."))
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    paths = [str(Path(fleetfix.__file__).parents[1]), *(one for one in sys.path if "site-packages" in one)]
    environ = {
        "HOME": str(home),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NO_COLOR": "1",
    }

    def run(*args: str) -> Ran:
        done = subprocess.run(
            [SYSTEM_PYTHON, "-m", "fleetfix", *args],
            env=environ,
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            user=nobody.pw_uid,
            group=nobody.pw_gid,
            extra_groups=[],
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    yield run
    run("lab", "down")
    subprocess.run(["rm", "-rf", str(home)], check=True)


def test_an_ordinary_user_makes_a_lab_and_mends_it(as_nobody: Fleetfix) -> None:
    up = as_nobody("lab", "up", "--hosts", "gpu[01-05]")
    if "namespaces" in up.err:
        pytest.skip(f"no user namespaces here: {up.err.strip()}")
    assert up.exit == 0, up.err
    asked = ("--hosts", "gpu[01-02]", "-i", "lab", "--yes", "--json", "--canary", "0", "--batch", "100%")
    ran = as_nobody("run", "purge-cu13", *asked)
    assert ran.outcomes == {"gpu01": "changed", "gpu02": "changed"}, ran.told
    speeds = [e["measured"]["rate"] for e in ran.of("step_finished") if e["step"] == "speed"]
    assert all(19_000 < rate < 21_000 for rate in speeds)
    again = as_nobody("run", "purge-cu13", *asked)
    assert (again.exit, set(again.outcomes.values())) == (0, {"ok"}), again.told
    assert json.loads(again.out.splitlines()[-1])["event"] == {"kind": "run_finished", "exit": 0}
    faults = {"gpu03": "slurm_node", "gpu04": "container_job", "gpu05": "unfinished_run"}
    for host, fault in faults.items():
        assert as_nobody("lab", "break", host, "--fault", fault).exit == 0
    sick = as_nobody("run", "purge-cu13", "--hosts", "gpu[03-05]", "-i", "lab", "--dry-run", "--json")
    assert sick.outcomes == {"gpu03": "blocked", "gpu04": "blocked", "gpu05": "unfinished"}, sick.told
    healed = as_nobody("lab", "heal")
    assert healed.exit == 0, healed.err
    assert [f"{host}: healed of {fault}" in healed.out for host, fault in faults.items()] == [True] * 3
