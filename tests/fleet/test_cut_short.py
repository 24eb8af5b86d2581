"""A controller that is killed, a way on from another machine, and a run that needs no terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import independent
from tests.fleet.conftest import Ran, Site, step_began, until

pytestmark = pytest.mark.fleet

Make = Callable[..., Site]


def begun(lab: Site, host: str, run: str) -> Counter[str]:
    """What the host's own log says was begun in a run, and how often."""
    log = independent.root(lab.pid(host)) / f"var/lib/fleetfix/runs/{run}/host.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return Counter(record["change"]["key"] for record in records if record["kind"] == "begun")


def held(lab: Site) -> list[str]:
    """The folders in which the old bytes of a repair are kept."""
    top = independent.root(lab.pid("gpu01"))
    places = [top / "var/lib/fleetfix", top / "opt"]
    return [str(path) for place in places for path in place.rglob(".fleetfix-*")]


def killed_at(lab: Site, step: str) -> str:
    """A run whose controller is killed as a step begins; its id."""
    process = lab.start("run", "purge-cu13", "--hosts", "gpu01", "-i", lab.inventory, "--yes", "--json")
    run = step_began(process, step)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    return run


def mended_once(lab: Site, ran: Ran, run: str, before: independent.Job) -> None:
    assert ran.exit == 0, ran.told
    assert ran.outcomes == {"gpu01": "changed"}, ran.told
    assert ran.run_id == run
    assert set(begun(lab, "gpu01", run).values()) == {1}
    assert independent.damaged(lab.pid("gpu01")) == []
    new = lab.job("gpu01")
    assert (new.argv, new.cwd, new.environ) == (before.argv, before.cwd, before.environ)
    assert new.pid != before.pid


def test_a_run_whose_controller_was_killed_goes_on_where_it_was(site: Make) -> None:
    lab = site("gpu01")
    before = lab.job("gpu01")
    run = killed_at(lab, "loads")
    refused = lab.run("gpu01", "--dry-run")
    assert refused.outcomes == {"gpu01": "unfinished"}
    assert f"resume, rollback or release {run}" in refused.finished("gpu01")["failure"]["hint"]
    mended_once(lab, lab("resume", run, "--yes", "--json"), run, before)
    again = lab("resume", run, "--yes")
    assert (again.exit, "nothing to resume" in again.out) == (0, True)

    assert held(lab), "what the repair replaced is kept for a while"
    new = lab.job("gpu01")
    committed = lab("commit", run)
    assert committed.exit == 0, committed.err
    assert held(lab) == []
    for elsewhere in ((), ("--hosts", "gpu01", "-i", lab.inventory)):
        for file in (lab.home / "state").glob("journal.db*") if elsewhere else ():
            file.unlink()
        back = lab("rollback", run, *elsewhere)
        assert back.exit in (1, 2)
        assert "was committed" in back.err
    assert lab.job("gpu01") == new, "nothing of it was undone"


def test_another_machine_goes_on_with_it_by_what_the_host_keeps(
    site: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = site("gpu01")
    before = lab.job("gpu01")
    run = killed_at(lab, "wheels")
    there = {**lab.environ(), "FLEETFIX_STATE_DIR": str(lab.home / "another-machine")}
    monkeypatch.setattr(Site, "environ", lambda self: there)
    ran = lab("resume", run, "--hosts", "gpu01", "-i", lab.inventory, "--yes", "--json")
    mended_once(lab, ran, run, before)


SLOW = """
name: slow
steps:
  - id: first
    command: {argv: [touch, /opt/first], check: [test, -e, /opt/first], undo: [rm, -f, /opt/first]}
  - id: wait
    command: {argv: [sh, -c, "until test -e /opt/go; do sleep 0.1; done"], check: [test, -e, /opt/go],
              undo: ["true"]}
  - id: last
    command: {argv: [touch, /opt/last], check: [test, -e, /opt/last], undo: [rm, -f, /opt/last]}
"""


def on_host(lab: Site, path: str) -> Path:
    return independent.root(lab.pid("gpu01")) / path


def begin_detached(lab: Site) -> dict[str, Any]:
    began = lab("run", "slow.yaml", "--hosts", "gpu01", "-i", lab.inventory, "--yes", "--detach", "--json")
    assert began.exit == 0, began.err
    return json.loads(began.out)


def answered(lab: Site, answer: str, *args: str) -> tuple[int, str]:
    """Run a command at a terminal and answer its question; exit code and stdout."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        lab.argv(*args), env=lab.environ(), cwd=lab.home, stdin=its, stderr=its, stdout=subprocess.PIPE
    )
    os.close(its)
    asked = b""
    while b"[y/N]" not in asked:
        asked += os.read(ours, 4096)
    os.write(ours, answer.encode() + b"\n")
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    return process.returncode, out.decode()


def test_a_detached_run_asks_at_the_terminal_that_it_leaves(site: Make) -> None:
    lab = site("gpu01", contaminated=[])
    (lab.home / "slow.yaml").write_text(SLOW)
    on_host(lab, "opt/go").touch()
    line = ("run", "slow.yaml", "--hosts", "gpu01", "-i", lab.inventory, "--detach")
    code, out = answered(lab, "n", *line)
    assert (code, "halted: not confirmed" in out) == (3, True)
    assert not on_host(lab, "opt/first").exists()
    assert lab("plan", "slow.yaml", "--hosts", "gpu01", "-i", lab.inventory, "-o", "slow.plan").exit == 0
    code, out = answered(lab, "y", "apply", "slow.plan", "--detach")
    assert (code, "goes on by itself" in out) == (0, True)
    assert lab("watch", "last").exit == 0
    assert on_host(lab, "opt/last").exists()


def test_a_detached_run_is_watched_stopped_and_resumed(site: Make) -> None:
    lab = site("gpu01", contaminated=[])
    (lab.home / "slow.yaml").write_text(SLOW)
    told = begin_detached(lab)
    run = told["run"]
    until(lambda: on_host(lab, "opt/first").exists(), "the first change")
    assert f"{run}" in lab("runs").out
    assert "running" in lab("runs").out
    refused = lab("resume", run, "--yes")
    assert (refused.exit, "is being driven" in refused.err) == (1, True)

    watcher = lab.start("watch", run)
    assert watcher.stderr is not None
    assert run in watcher.stderr.readline(), "it tells the run from its beginning"
    watcher.send_signal(signal.SIGINT)
    assert watcher.wait(20) == 130
    assert "the run goes on" in watcher.stderr.read()
    os.kill(told["process"], 0)

    assert lab("stop", run).exit == 0
    on_host(lab, "opt/go").touch()
    watched = lab("watch", run)
    assert watched.exit == 130, watched.err
    assert "cancelled        gpu01" in watched.out
    assert not on_host(lab, "opt/last").exists()
    assert Path(told["log"]).read_text().count("cancelled") >= 1
    gone = lab("stop", run)
    assert (gone.exit, "no process of this machine drives" in gone.err) == (1, True)

    code, out = answered(lab, "n", "resume", run, "--detach")
    assert (code, "halted: not confirmed" in out) == (3, True)
    assert not on_host(lab, "opt/last").exists()
    on = lab("resume", run, "--yes", "--detach", "--json")
    assert on.exit == 0, on.err + on.out
    goes_on = json.loads(on.out)
    assert (goes_on["run"], goes_on["log"]) == (run, told["log"])
    assert goes_on["exit"] == 0 if goes_on["process"] is None else goes_on["process"] != told["process"]
    assert lab("watch", run).exit == 0
    assert on_host(lab, "opt/last").exists()
    assert set(begun(lab, "gpu01", run).values()) == {1}
