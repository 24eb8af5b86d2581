"""One round of a soak: a run, what is done to it and its hosts, and what is there at its end."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.playbook import PLACE, STEPS, playbook
from benchmarks.soak.troubles import TROUBLES, Trouble
from benchmarks.soak.verdict import judge
from fleetfix.errors import LabError
from fleetfix.hostset import HostSet
from fleetfix.lab import Lab

QUIET = 75.0
"""Seconds after which nothing of an abandoned session may live on a host: it bears silence for 60."""

TRIPPED = " is tripped by run "
HALTED = "would halt at once"

NOTHING = ("nothing to", "keeps anything of run", "did not touch", "is not tripped", HALTED)
"""What is rightly refused: a run that ended well, that no host knows, or whose canary did not pass."""

LIMIT = 420.0
"""Seconds that one command of fleetfix may take before the soak calls it hung."""


@dataclass
class Lasting:
    """A fault that is to be taken back at a time."""

    host: str
    name: str
    until: float


@dataclass
class Round:
    """One run, all that was done to it, and what came of it."""

    number: int
    run: str = ""
    troubles: Counter[str] = field(default_factory=Counter)
    suffered: dict[str, set[str]] = field(default_factory=dict)
    """Host -> the faults it had."""
    driven: int = 0
    """How often a controller was started."""
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Soak:
    """The lab, the operator's two machines, and the choices of one seed."""

    def __init__(self, folder: Path, hosts: HostSet, seed: int) -> None:
        self.folder = folder
        self.hosts = tuple(hosts)
        self.pattern = str(hosts)
        self.random = random.Random(seed)
        self.lab = Lab(folder / "here" / "lab")
        self.playbook = folder / "soak.yaml"
        self.playbook.write_text(playbook())
        self.lasting: list[Lasting] = []
        for machine in ("here", "elsewhere"):
            config = folder / machine / ".config/fleetfix/config.toml"
            config.parent.mkdir(parents=True)
            config.write_text(f"confirm_above = {len(self.hosts)}\n")

    # -- one round --------------------------------------------------------------------------------------

    def round(self, number: int, until: float) -> Round:
        """Drive one run through trouble to its end, and look at what is there then."""
        one = Round(number)
        self._reset()
        where = "here"
        process = self._start(
            one, where, "run", str(self.playbook), "--hosts", self.pattern, *self._common()
        )
        # Of four rounds one goes back from wherever it is.
        back_after = self.random.randint(1, 6) if self.random.random() < 0.25 else 1000
        trouble_until = min(until, time.monotonic() + 150)
        while True:
            self._trouble(one, process, trouble_until)
            self._wait(one, process)
            over = process.returncode == 0 or HALTED in self._said(process)
            if not one.run or over or time.monotonic() > trouble_until:
                break
            if TRIPPED in self._said(process):
                self._reset_breaker(one, where)
            where = self.random.choice(["here", "here", "elsewhere"])
            verb = "rollback" if one.driven > back_after else "resume"
            process = self._start(one, where, *self._take_up(one.run, verb, where))
        self._heal_all()
        if one.run:  # else it was ended before it had begun
            self._to_the_end(one)
            self._look(one)
        return one

    def _to_the_end(self, one: Round) -> None:
        """Take the run up until nothing is open: go on, go back if due, give up what is in doubt."""
        for _ in range(2):
            self._reset_breaker(one, "here")
            self._wait(one, self._start(one, "here", *self._take_up(one.run, "resume", "here")))
        for verb in ("rollback", "rollback", "release"):
            open_ = [host for host, end in self._ends(one.run).items() if end["open"] or is_due(end)]
            if open_:
                args = [verb, one.run, "--hosts", ",".join(open_), "--yes", "--json"]
                self._wait(one, self._start(one, "here", *args))

    def _reset_breaker(self, one: Round, where: str) -> None:
        """Somebody has looked: the faults are ours, and go by themselves."""
        inventory = str(self.lab.inventory_path)
        self._wait(
            one, self._start(one, where, "breaker", "reset", "-i", inventory, "--reason", "a soak", "--yes")
        )

    def _take_up(self, run: str, verb: str, where: str) -> list[str]:
        more = ["--hosts", self.pattern, "-i", str(self.lab.inventory_path), "--take-over"]
        return [verb, run, *(more if where == "elsewhere" else []), "--yes", "--json"]

    def _common(self) -> list[str]:
        return ["-i", str(self.lab.inventory_path), "--yes", "--json", "--forks", "30"]

    def _reset(self) -> None:
        spoiled = self.random.sample(
            self.hosts[1:], 2
        )  # the canary is to pass; three alike trip the breaker
        for host in self.hosts:
            place = self.lab.tree(host, PLACE)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            if host in spoiled:
                (place / "spoiled").touch()

    # -- the controller -----------------------------------------------------------------------------------

    def _start(self, one: Round, where: str, *args: str) -> subprocess.Popen[bytes]:
        one.driven += 1
        home = self.folder / where
        env = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH") if name in os.environ}
        env |= {"HOME": str(home), "FLEETFIX_STATE_DIR": str(home), "NO_COLOR": "1"}
        log = f"{self.folder}/round{one.number}.{one.driven}"
        with open(f"{log}.out", "wb") as out, open(f"{log}.err", "wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "fleetfix", *args],
                env=env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        process.args = [log, *args]
        if not one.run:
            one.run = _patiently(lambda: _run_of(Path(f"{log}.out")), process)
        return process

    def _wait(self, one: Round, process: subprocess.Popen[bytes]) -> None:
        """Wait for a controller, healing meanwhile what is due; one that never ends is wrong."""
        until = time.monotonic() + LIMIT
        while process.poll() is None:
            self._heal_due()
            if time.monotonic() > until:
                one.wrong.append(f"{process.args}: hung for {LIMIT:g} s")
                process.kill()
            time.sleep(0.1)
        said = self._said(process)
        refused = process.returncode == 1 and not any(text in said for text in NOTHING)
        if process.returncode == 70 or refused:
            one.wrong.append(f"{process.args}: exit {process.returncode}: {said[-300:]}")

    def _said(self, process: subprocess.Popen[bytes]) -> str:
        assert isinstance(process.args, list)
        log = process.args[0]
        return Path(f"{log}.out").read_text() + Path(f"{log}.err").read_text()

    # -- trouble ------------------------------------------------------------------------------------------

    def _trouble(self, one: Round, process: subprocess.Popen[bytes], until: float) -> None:
        """Make faults until the controller has ended or the time for them is over."""
        while process.poll() is None and time.monotonic() < until:
            time.sleep(self.random.uniform(0.1, 1.2))
            self._heal_due()
            (trouble,) = self.random.choices(TROUBLES, [each.weight for each in TROUBLES])
            if trouble.name.startswith("controller_"):
                one.troubles[trouble.name] += 1
                self._at_controller(process, trouble)
            else:
                self._at_host(one, trouble)

    def _at_controller(self, process: subprocess.Popen[bytes], trouble: Trouble) -> None:
        if process.poll() is not None:
            return
        if trouble.name == "controller_killed":
            process.kill()
            process.wait()
        elif trouble.name == "controller_stopped":
            process.send_signal(signal.SIGSTOP)
            time.sleep(self.random.uniform(*trouble.lasts))
            process.send_signal(signal.SIGCONT)
        elif trouble.name == "controller_terminated":
            process.terminate()
        else:
            process.send_signal(signal.SIGINT)
            if trouble.name == "controller_interrupted_twice":
                time.sleep(self.random.uniform(0, 2))
                process.send_signal(signal.SIGINT)

    def _at_host(self, one: Round, trouble: Trouble) -> None:
        host = self.random.choice(self.hosts)
        if any(lasting.host == host for lasting in self.lasting):
            return
        one.troubles[trouble.name] += 1
        one.suffered.setdefault(host, set()).add(trouble.name)
        try:
            self._inflict(host, trouble)
        except LabError as error:
            print(f"  {host}: {trouble.name}: {error}", flush=True)

    def _inflict(self, host: str, trouble: Trouble) -> None:
        if trouble.name == "kill_runner":
            runners = self._started_by_fleetfix(host)
            if runners:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.random.choice(runners), signal.SIGKILL)
        elif trouble.name == "reboot":
            self.lab.reboot(host)
        else:
            self.lab.break_host(host, trouble.name)
            if trouble.lasts[1]:
                until = time.monotonic() + self.random.uniform(*trouble.lasts)
                self.lasting.append(Lasting(host, trouble.name, until))

    def _heal_due(self) -> None:
        for lasting in [each for each in self.lasting if each.until < time.monotonic()]:
            self._heal(lasting.host)
            self.lasting.remove(lasting)

    def _heal_all(self) -> None:
        self.lasting.clear()
        for host in self.hosts:
            self._heal(host)

    def _heal(self, host: str) -> None:
        """Take back what a host suffers, once it is up."""
        until = time.monotonic() + 30
        while True:
            try:
                self.lab.heal(host)
                self.lab.init(host)
            except LabError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
            else:
                return

    # -- what is there ------------------------------------------------------------------------------------

    def _started_by_fleetfix(self, host: str) -> list[int]:
        """Pids, on this machine, of runners on a host and of what runs below them."""
        return [
            process.pid
            for process in self.lab.processes(host)
            if PLACE in " ".join(process.argv) or "fleetfix" in " ".join(process.argv[:6])
        ]

    def _ends(self, run: str) -> dict[str, dict[str, Any]]:
        """The last word on each host, as the journal here has it."""
        env = {**os.environ, "FLEETFIX_STATE_DIR": str(self.folder / "here")}
        argv = [sys.executable, "-m", "fleetfix", "show", run, "--json"]
        shown = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=LIMIT)
        events = [json.loads(line)["event"] for line in shown.stdout.splitlines()]
        return {event["host"]: event for event in events if event["kind"] == "host_finished"}

    def _look(self, one: Round) -> None:
        ends = self._ends(one.run)
        one.outcomes = Counter(end["outcome"] for end in ends.values())
        for host in self.hosts:
            told = ends.get(host)
            if told is None:
                one.wrong.append(f"{host}: no word on it in the journal")
                continue
            wrong = judge(told, self._log(host), self._marks(host), one.suffered.get(host, set()))
            one.wrong += [f"{host}: {told['outcome']}: {text}" for text in wrong]
        self._no_orphans(one)
        self._plan_is_empty(one, [host for host, end in ends.items() if end["outcome"] == "changed"])

    def _log(self, host: str) -> list[str]:
        file = self.lab.tree(host, PLACE) / "log"
        return file.read_text().splitlines() if file.exists() else []

    def _marks(self, host: str) -> set[str]:
        return {id for id in STEPS if (self.lab.tree(host, PLACE) / id).exists()}

    def _no_orphans(self, one: Round) -> None:
        until = time.monotonic() + QUIET
        left = list(self.hosts)
        while left and time.monotonic() < until:
            left = [host for host in left if self._started_by_fleetfix(host)]
            time.sleep(0.5 if left else 0)
        for host in left:
            argvs = [" ".join(process.argv)[:120] for process in self.lab.processes(host)]
            one.wrong.append(f"{host}: lives on: {argvs}")

    def _plan_is_empty(self, one: Round, mended: list[str]) -> None:
        args = [
            "plan",
            str(self.playbook),
            "--hosts",
            self.pattern,
            "-i",
            str(self.lab.inventory_path),
            "--json",
        ]
        process = self._start(one, "elsewhere", *args)
        self._wait(one, process)
        events = [json.loads(line)["event"] for line in self._said(process).splitlines() if line[:1] == "{"]
        found = {event["host"]: event["outcome"] for event in events if event["kind"] == "host_finished"}
        for host in self.hosts:
            want = "ok" if host in mended else "pending"
            if found.get(host) != want:
                one.wrong.append(f"{host}: the next plan says {found.get(host)}, not {want}")


def is_due(end: dict[str, Any]) -> bool:
    """Whether something is still to be done about a host."""
    return end["outcome"] in ("rollback_pending", "rollback_failed", "in_doubt")


def _run_of(out: Path) -> str:
    text = out.read_text()
    return str(json.loads(text.splitlines()[0])["run"]) if "\n" in text else ""


def _patiently(look: Callable[[], str], process: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        over = process.poll() is not None
        found = look()
        if found or over:
            return found
        time.sleep(0.02)
    return ""
