"""The fault matrix: every fault at every moment of a host's turn, each on a machine of its own.

A playbook of three steps runs over real OpenSSH servers. Each of them waits, at the moment that is its
own, until its fault is made. Then all is healed, and what is left is resumed. What came of it is told by
the machines: each execution of a step has written a line there.

`python -m tests.fleet.reliability` runs it, as root, and writes the table of docs/reliability.md anew.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.fleet.machines import Machine, Network, network, until

PAGE = Path(__file__).parents[2] / "docs/reliability.md"
BEGIN, END = "<!-- the table: python -m tests.fleet.reliability -->\n", "<!-- the end of the table -->\n"
SECONDS = 240.0
"""How long any one command may take."""

MOMENTS = {
    "connect": "while connecting",
    "probe": "while it is asked",
    "before": "before a change",
    "during": "during a change",
    "after": "done, not answered",
    "verify": "while it is verified",
    "rollback": "while going back",
}

# What a step does on a machine: it writes down each execution, and waits once at the machine's moment.
STEP = r"""
gate() {
    [ ! -e /srv/passed ] && read -r moment < /srv/moment && [ "$1" = "$moment" ] || return 0
    : > /srv/passed
    : > /srv/at
    read -r line < /srv/gate
}
case $1 in
check)
    if [ "$2" = second ]; then
        if [ -e /srv/second ]; then gate verify
        elif [ -e /srv/first ]; then gate before
        else gate probe
        fi
    fi
    [ -e "/srv/$2" ] ;;
do)
    echo "do $2" >> /srv/log
    if [ "$2" = second ]; then gate during; gate after; fi
    if [ "$2" = third ] && [ -e /srv/fails ]; then cat /srv/fails >&2; exit 1; fi
    : > "/srv/$2" ;;
undo)
    echo "undo $2" >> /srv/log
    if [ "$2" = second ]; then gate rollback; fi
    rm -f "/srv/$2" ;;
python)
    shift
    gate connect
    exec /usr/bin/python3 "$@" ;;
esac
"""
PYTHON = '#!/bin/sh\nexec sh /srv/step python "$@"\n'

STEPS = ("first", "second", "third")
PLAYBOOK: dict[str, Any] = {
    "name": "matrix",
    "steps": [
        {
            "id": step,
            "shell": {verb: f"sh /srv/step {does} {step}" for verb, does in
                      (("run", "do"), ("check", "check"), ("undo", "undo"))},
        }
        for step in STEPS
    ],
}  # fmt: skip


# -- faults -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong: how it is made, and how and when it is over."""

    title: str
    make: Callable[[Machine], None]
    heal: Callable[[Machine], None] = lambda machine: None
    in_time: bool = False
    """Healed as soon as the controller has noticed it; else after the run."""
    small: bool = False


def kill_runner(machine: Machine) -> None:
    os.kill(machine.runner(), 9)


FAULTS = {
    "cut": Fault("the connection is cut", Machine.cut),
    "reset": Fault("the connection is reset", Machine.reset),
    "silence": Fault(
        "nothing gets through, for a while",
        Machine.silence,
        partial(Machine.silence, on=False),
        in_time=True,
    ),
    "stopped": Fault(
        "sshd is stopped, for a while", Machine.stop, partial(Machine.stop, on=False), in_time=True
    ),
    "slow": Fault("the line is slow", Machine.slow, partial(Machine.slow, on=False)),
    "runner": Fault("the runner is killed", kill_runner),
    "restart": Fault("the host is restarted", Machine.reboot),
    "full": Fault("its disk is full", Machine.fill, Machine.empty, small=True),
    "read_only": Fault("its disk is read-only", Machine.make_read_only, Machine.make_writable),
    # Last: two hosts that are lost end the run for those that have not begun.
    "gone": Fault(
        "nothing gets through any more", Machine.silence, partial(Machine.silence, on=False)
    ),
    "refused": Fault("sshd is gone: refused", Machine.refuse, Machine.listen),
}  # fmt: skip
LASTING = ("gone", "refused")
"""Those that keep a host away until the run has given it up."""
CONTROLLER = "controller"
SETTLED = ("changed", "rolled_back")
"""Outcomes after which nothing is left to resume."""
TITLES = {name: fault.title for name, fault in FAULTS.items()} | {CONTROLLER: "the controller is killed"}


# -- cells ------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """One fault at one moment, on one machine, and what came of it."""

    fault: str
    moment: str
    machine: Machine
    made: bool = False
    healed: bool = False
    first: str = ""
    """The outcome of the run that suffered it; empty where its controller did not live to tell."""
    resumed: str = ""
    """What resume made of it; empty where nothing was left to resume."""
    last: str = ""
    """The outcome of the next run of the same playbook."""
    told: list[str] = field(default_factory=list)
    restarted: bool = False
    """The operator was told that the host was restarted."""
    executed: list[str] = field(default_factory=list)
    """What was executed here, in order: `do first`, `undo first` …"""
    begun: list[str] = field(default_factory=list)
    """The changes that the machine's own records say were begun, by id."""
    lost: list[str] = field(default_factory=list)
    """What is not as it has to be in the end: nothing."""
    _gate: int = -1

    @property
    def name(self) -> str:
        return self.machine.name

    def prepare(self) -> None:
        """Put the playbook's half onto the machine, and open the gate's other end."""
        srv = self.machine.srv
        (srv / "step").write_text(STEP)
        (srv / "python").write_text(PYTHON)
        (srv / "python").chmod(0o755)
        (srv / "moment").write_text(f"{self.moment}\n")
        if self.moment == "rollback":
            # Each fails in its own words: three that failed alike would end the run for those to come.
            (srv / "fails").write_text(f"{self.fault.replace('_', ' ')}\n")
        os.mkfifo(srv / "gate")
        self._gate = os.open(srv / "gate", os.O_RDWR | os.O_NONBLOCK)

    @property
    def waits(self) -> bool:
        return not self.made and (self.machine.srv / "at").exists()

    def pass_gate(self) -> None:
        os.write(self._gate, b"go\n")

    def close(self) -> None:
        os.close(self._gate)

    def strike(self, make: Callable[[Machine], None]) -> None:
        """Make the fault at this moment, and let the machine go on."""
        self.made = True
        if self.moment != "after":
            make(self.machine)
            self.pass_gate()
            return
        # Done and recorded, and the runner has not said so yet.
        runner = self.machine.runner()
        os.kill(runner, 19)
        self.pass_gate()
        until(lambda: self._recorded("done").count("second") == 1, f"{self.name} to be done")
        make(self.machine)
        if Path(f"/proc/{runner}").exists():
            os.kill(runner, 18)

    def _recorded(self, kind: str) -> list[str]:
        """The steps of this machine's own records of a kind."""
        return [id.split("/")[1] for id in self._ids(kind)]

    def _ids(self, kind: str) -> list[str]:
        found = []
        for log in sorted(self.machine.lib.glob("fleetfix/runs/*/host.jsonl")):
            records = [json.loads(line) for line in log.read_text().splitlines()]
            found += [str(record["id"]) for record in records if record["kind"] == kind]
        return found

    def note(self, left: list[str]) -> None:
        """Write down what the machine bears witness of, before it is gone."""
        log = self.machine.srv / "log"
        self.executed = log.read_text().splitlines() if log.exists() else []
        self.begun = self._ids("begun")
        missing = [step for step in STEPS if not (self.machine.srv / step).exists()]
        self.lost = [f"{step} is missing" for step in missing] + [f"left running: {one}" for one in left]

    @property
    def shown(self) -> str:
        """What stands in the table: how the run ended here, and what resume made of it."""
        first = self.first or "cut short"
        return f"{first}, resumed: {self.resumed}" if self.resumed else first


class Controller:
    """One controller with a journal of its own, over some of the machines."""

    def __init__(self, folder: Path, net: Network, cells: list[Cell]) -> None:
        self.cells = cells
        self.events: list[dict[str, Any]] = []
        self.dropped: set[str] = set()
        self.run_id = ""
        self.patience = "brief" if all(cell.fault in LASTING for cell in cells) else "patient"
        self._net = net
        self._home = folder
        self._errors = folder / "errors"
        (folder / ".ssh").mkdir(parents=True, mode=0o700)
        shutil.copy(net.folder / "ssh_config", folder / ".ssh/config")
        (folder / "matrix.yaml").write_text(json.dumps(PLAYBOOK))
        (folder / "inventory.yaml").write_text(yaml.safe_dump({"hosts": {c.name: _host(c) for c in cells}}))
        (folder / "inventory.yaml").chmod(0o600)

    @property
    def _env(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        return {**kept, "HOME": str(self._home), "FLEETFIX_STATE_DIR": str(self._home / "state")}

    def _argv(self, *args: str) -> list[str]:
        script = str(Path(__file__).parent / "quick.py")
        return self._net.inside([sys.executable, script, self.patience, *args])

    def start(self, *args: str) -> None:
        """Begin a command with --json."""
        self.events, self.dropped = [], set()
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                self._argv(*args),
                env=self._env,
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            record = json.loads(line)
            self.run_id = record["run"]
            event = record["event"]
            self.events.append(event)
            if event["kind"] == "connection_dropped":
                self.dropped.add(event["host"])

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        """Wait for the command to end; its exit code."""
        try:
            code = self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            left = {cell.name: cell for cell in self.cells if cell.name not in self.outcomes}
            last = {event["host"]: event for event in self.events if event.get("host") in left}
            told = [
                (
                    left[name].fault,
                    left[name].moment,
                    left[name].told,
                    left[name].machine.processes(),
                    event,
                )
                for name, event in last.items()
            ]
            raise AssertionError(f"not ended: {told} {self.errors[-3000:]}") from None
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    @property
    def restarted(self) -> set[str]:
        return {e["host"] for e in self.events if e["kind"] == "connection_returned" and e["restarted"]}

    @property
    def outcomes(self) -> dict[str, str]:
        return {e["host"]: e["outcome"] for e in self.events if e["kind"] == "host_finished"}

    def begin(self) -> None:
        """Run the playbook over all machines, in one wave."""
        all_at_once = ("--canary", "0", "--batch", "100%", "--forks", "20")
        limits = ("--max-failures", "100%", "--max-unreachable", "100%")
        names = ",".join(cell.name for cell in self.cells)
        where = ("--hosts", names, "-i", "inventory.yaml")
        self.start(
            "run",
            "./matrix.yaml",
            *where,
            "--yes-hosts",
            str(len(self.cells)),
            "--json",
            *all_at_once,
            *limits,
        )

    @property
    def to_come(self) -> list[str]:
        """The machines whose moment has not come yet."""
        return [cell.name for cell in self.cells if not cell.made]

    def go_on(self, names: list[str]) -> None:
        """Resume the run on some of the machines."""
        self.reset_breaker()
        where = ("--hosts", ",".join(names), "-i", "inventory.yaml")
        self.start("resume", self.run_id, *where, "--yes-hosts", str(len(names)), "--json")

    def take(self, into: str) -> None:
        """Note what became of each machine that has had its moment, the first word on it."""
        for cell in self.cells:
            if cell.name in self.outcomes and cell.made and not getattr(cell, into):
                setattr(cell, into, self.outcomes[cell.name])
                end = next(
                    e for e in self.events if e["kind"] == "host_finished" and e["host"] == cell.name
                )
                cell.restarted = cell.restarted or cell.name in self.restarted
                cell.told.append(f"{into}: {end['outcome']}: {end['reason']}")

    def reset_breaker(self) -> None:
        """Say that somebody has looked, where the run has tripped the breaker."""
        if any(event["kind"] == "breaker_tripped" for event in self.events):
            words = ("breaker", "reset", "-i", "inventory.yaml", "--reason", "looked at", "--yes")
            done = subprocess.run(
                self._argv(*words),
                env=self._env,
                cwd=self._home,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
            assert done.returncode == 0, done.stdout + done.stderr


def _host(cell: Cell) -> dict[str, Any]:
    more = {"python": "/srv/python"} if cell.moment == "connect" else {}
    return {"address": cell.machine.address, **more}


# -- the matrix -----------------------------------------------------------------------------------------


def suffer(controllers: list[Controller]) -> None:
    """Let every machine suffer its fault at its moment, while the controllers are at work."""
    end = time.monotonic() + SECONDS
    while not all(one.ended for one in controllers):
        assert time.monotonic() < end, _late(controllers)
        for controller in controllers:
            if controller.cells[0].fault != CONTROLLER:
                for cell in controller.cells:
                    _see_to(cell, controller)
            elif all(cell.waits for cell in controller.cells):
                _kill(controller)
        time.sleep(0.02)


def _see_to(cell: Cell, controller: Controller) -> None:
    fault = FAULTS[cell.fault]
    if cell.waits:
        cell.strike(fault.make)
        if fault.in_time and cell.moment == "connect":
            # There is no session yet that could miss it.
            fault.heal(cell.machine)
            cell.healed = True
    elif cell.made and fault.in_time and not cell.healed and cell.name in controller.dropped:
        fault.heal(cell.machine)
        cell.healed = True


def _kill(controller: Controller) -> None:
    """Kill a controller, now that every machine of it is at its moment."""
    for cell in sorted(controller.cells, key=lambda cell: cell.moment != "after"):
        cell.strike(lambda machine: controller.kill())


def _late(controllers: list[Controller]) -> str:
    ended = {name for one in controllers for name in one.outcomes}
    cells = [cell for one in controllers for cell in one.cells if cell.name not in ended]
    told = [(cell.fault, cell.moment, cell.made, cell.healed) for cell in cells]
    return f"not ended: {told}: {[one.errors[-500:] for one in controllers]}"


def heal(cells: list[Cell]) -> None:
    for cell in cells:
        if cell.fault != CONTROLLER and cell.made and not cell.healed:
            FAULTS[cell.fault].heal(cell.machine)
            cell.healed = True


def run_matrix(folder: Path, faults: tuple[str, ...] = (*FAULTS, CONTROLLER)) -> list[Cell]:
    """Run it all; every cell with what came of it."""
    with network(folder) as net, _cells(net, faults) as cells:
        killed = [c for c in cells if c.fault == CONTROLLER]
        planning = [c for c in killed if c.moment in ("connect", "probe")]
        lasting = [c for c in cells if c.fault in LASTING]
        groups = [
            planning,
            [c for c in killed if c not in planning],
            lasting,
            [c for c in cells if c not in killed and c not in lasting],
        ]
        controllers = [
            Controller(folder / f"controller{number}", net, group)
            for number, group in enumerate(groups)
            if group
        ]
        doomed = [one for one in controllers if one.cells[0].fault == CONTROLLER]
        for some in (doomed, [one for one in controllers if one not in doomed]):
            endure(some)
        heal(cells)
        settle(controllers)
        # One that ended well by itself has just been asked, step by step, whether anything is left.
        again = [c for c in cells if c.resumed or c.first != "changed" or c.moment == "verify"]
        run_once_more(Controller(folder / "last", net, again))
        left = quiet(net)
        for cell in cells:
            cell.note(left.get(cell.name, []))
        return cells


def endure(controllers: list[Controller]) -> None:
    """Run the playbook until every machine has suffered its fault.

    What goes wrong on some machines may end the run for others before their moment has come: it goes on
    with them, then.
    """
    for one in controllers:
        one.begin()
    while controllers:
        suffer(controllers)
        for one in controllers:
            one.wait()
            one.take("first")
        controllers = [one for one in controllers if one.to_come]
        for one in controllers:
            one.go_on(one.to_come)


def settle(controllers: list[Controller]) -> None:
    """Resume what is left."""
    left = {one: [cell.name for cell in one.cells if cell.first not in SETTLED] for one in controllers}
    for one, names in left.items():
        one.patience = "patient"
        if names:
            one.go_on(names)
    for one, names in left.items():
        if names:
            one.wait()
            one.take("resumed")


def run_once_more(last: Controller) -> None:
    """Run the playbook once more, from another machine: what is done is left alone, the rest is done."""
    for cell in last.cells:
        (cell.machine.srv / "fails").unlink(missing_ok=True)
    last.begin()
    last.wait()
    last.take("last")


def quiet(net: Network) -> dict[str, list[str]]:
    """Wait until nothing of fleetfix runs on any machine any more; what does all the same, by machine."""
    end = time.monotonic() + 20
    while True:
        left = {one.name: found for one in net.machines if (found := one.left_behind())}
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.2)


@contextmanager
def _cells(net: Network, faults: tuple[str, ...]) -> Iterator[list[Cell]]:
    places = [(fault, moment) for fault in faults for moment in MOMENTS]
    names = {place: f"gpu{number:03}" for number, place in enumerate(places)}
    small = [
        names[fault, moment] for fault, moment in places if fault != CONTROLLER and FAULTS[fault].small
    ]
    net.add([*names.values()], small=small)
    machines = {machine.name: machine for machine in net.machines}
    cells = [Cell(fault, moment, machines[names[fault, moment]]) for fault, moment in places]
    for cell in cells:
        cell.prepare()
    try:
        yield cells
    finally:
        for cell in cells:
            cell.close()


# -- the table ------------------------------------------------------------------------------------------


def table(cells: list[Cell]) -> str:
    """The table of the page."""
    found = {(cell.fault, cell.moment): cell for cell in cells}
    lines = [f"| | {' | '.join(MOMENTS.values())} |", "|---" * (len(MOMENTS) + 1) + "|"]
    for fault, title in TITLES.items():
        shown = [found[fault, moment].shown for moment in MOMENTS]
        lines.append(f"| **{title}** | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def shown_table() -> str:
    """The table as the page has it."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip() + "\n"


def main() -> None:
    """Run it, and write the table into the page. With names of faults: those alone, and only told."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cells = run_matrix(Path(folder), tuple(sys.argv[1:]) or (*FAULTS, CONTROLLER))
    for cell in cells:
        print(
            f"{cell.fault}/{cell.moment}: {'; '.join(cell.told)}: {', '.join(cell.executed)}; {cell.lost}"
        )
    print(f"{time.monotonic() - began:.0f} s")
    if not sys.argv[1:]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(cells)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
