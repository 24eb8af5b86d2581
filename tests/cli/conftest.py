"""No test of the command line sees the home, the configuration or the journal of whoever runs it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.cli.main import main
from fleetfix.commands import Completed, Json
from fleetfix.errors import Failure
from fleetfix.transports.scripted import Fleet, ScriptedHost, World

PLAYBOOK = """\
name: lamps
summary: Both lamps are lit.
vars: {second: right}
policy: {canary: 1, batch: ["100%"], max_failures: 0, max_unreachable: "50%"}
steps:
  - id: left
    name: light the left lamp
    command: {argv: [light, left], check: [lit, left], undo: [darken, left]}
  - id: right
    command:
      argv: [light, "${{ vars.second }}"]
      check: [lit, "${{ vars.second }}"]
      undo: [darken, right]
"""

INVENTORY = """\
hosts:
  gpu[01-04]: {transport: scripted}
groups:
  front: {hosts: "gpu[01-02]"}
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for each test: home, working folder, inventory and playbook in it."""
    for name in ("FLEETFIX_INVENTORY", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "SUDO_USER", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FLEETFIX_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lamps.yaml").write_text(PLAYBOOK)
    (tmp_path / "hosts.yaml").write_text(INVENTORY)
    return tmp_path


class Result:
    """What a command line led to."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def run(self) -> str:
        """The id in the last line."""
        return self.out.splitlines()[-1].split()[1].rstrip(":")


Line = Callable[..., Result]


@pytest.fixture
def fleetfix(capsys: pytest.CaptureFixture[str]) -> Line:
    """Run a command line in this process."""

    def line(*words: str) -> Result:
        capsys.readouterr()
        code = main(words)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return line


def lamp_host(**world: Any) -> ScriptedHost:
    """A host with two lamps; `broken` names one that does not light, `stuck` one that stays lit."""
    host = ScriptedHost(dict(world))
    host.on("shell.check", lambda args, world: Completed(exit=0 if world.get(args["argv"][1]) else 1))
    host.on("shell.run", _light)
    host.on("shell.undo", _darken)
    return host


def _light(args: dict[str, Json], world: World) -> object:
    lamp = args["argv"][1]
    if world.get("hook"):
        world["hook"]()
    if world.get("broken") == lamp:
        return Failure(
            kind="command", message=f"the {lamp} lamp is \x1b[31mbroken\x1b[0m", hint="a new bulb"
        )
    world[lamp] = True
    return Completed(exit=0, stdout=f"{lamp} lit\n")


def _darken(args: dict[str, Json], world: World) -> object:
    lamp = args["argv"][1]
    if world.get("stuck") == lamp:
        return Failure(kind="command", message=f"the {lamp} lamp stays lit")
    world[lamp] = False
    return Completed(exit=0)


@pytest.fixture
def fleet() -> Fleet:
    """Four hosts that are dark."""
    return Fleet({f"gpu0{n}": lamp_host() for n in (1, 2, 3, 4)})


@pytest.fixture(autouse=True)
def _alone_on_this_machine() -> Iterator[None]:
    """Runs over `local` write to this machine, which lets one at a time: other workers wait."""
    path = Path(tempfile.gettempdir()) / f"fleetfix-tests-of-the-command-line.{os.geteuid()}"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
