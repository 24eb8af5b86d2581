"""In what order the hosts of a run go: units, strata, canary, batches, and who goes last.

Pure, and read from the folded state alone. A *unit* is what is never split: a cohort, or a host by
itself. The last go alone and after all others: the hosts through which others are reached, and the
controller itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fleetfix.events import Outcome, WaveStarted
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host
from fleetfix.policy import Policy, Share
from fleetfix.state import HostState, RunState

Unit = tuple[str, ...]

CANARY = "canary"
_BATCH = "batch "
_LAST = "last "

ITSELF = "the controller itself"

_TURNLESS: frozenset[Outcome] = frozenset({"pending", "ok", "skipped", "cancelled", "not_started"})


@dataclass(frozen=True)
class Wave:
    """Hosts that are called together, under this name: `canary`, `batch 1`, `last 1`."""

    name: str
    hosts: tuple[str, ...]


def units(state: RunState) -> tuple[Unit, ...]:
    """Every host of the run in its unit; units in the order of their first hosts."""
    members: dict[str, list[str]] = {}
    for name in state.hosts:
        members.setdefault(state.cohorts.get(name, "\0" + name), []).append(name)
    return tuple(tuple(names) for names in members.values())


def with_a_turn(state: RunState) -> frozenset[str]:
    """The hosts that have, or had, something to do in this run: a whole unit where one of it has.

    A host that was given up before its turn has none.
    """
    return frozenset(name for unit in _with_a_turn(state) for name in unit)


def ready(state: RunState) -> tuple[Unit, ...]:
    """The units that were not called yet, without those of their hosts that have ended."""
    called = {name for wave in state.waves for name in wave.hosts}
    left = (
        tuple(name for name in unit if name not in called and state.hosts[name].finished is None)
        for unit in _with_a_turn(state)
    )
    return tuple(unit for unit in left if unit)


def next_wave(state: RunState, policy: Policy) -> Wave | None:
    """Who is called next; None when everybody was."""
    usual, late = _sorted_out(state, ready(state))
    if not usual and not late:
        return None
    if not state.waves and policy.canary:
        return Wave(CANARY, _canary(state, policy, usual or late[:1]))
    if usual:
        number = batches_called(state.waves)
        size = batch(policy, number).of(len(with_a_turn(state)), least=1)
        return Wave(f"{_BATCH}{number + 1}", _whole_units(usual, size))
    lasts = sum(wave.name.startswith(_LAST) for wave in state.waves)
    return Wave(f"{_LAST}{lasts + 1}", late[0])


def canary(state: RunState, policy: Policy) -> tuple[str, ...]:
    """The hosts that go first, of all that have something to do, however far the run is now."""
    usual, late = _sorted_out(state, _with_a_turn(state))
    return _canary(state, policy, usual or late[:1]) if policy.canary else ()


def batch(policy: Policy, number: int) -> Share:
    """The size of a batch, counted from 0; the last one of the list repeats."""
    return policy.batch[min(number, len(policy.batch) - 1)]


def goes_last(state: RunState) -> dict[str, str]:
    """The hosts that go after all others, with the reason. A run over one host has no others."""
    started = state.started
    if started is None or len(state.hosts) < 2:
        return {}
    found = dict(started.last)
    if started.controller_machine:
        here = (name for name, host in state.hosts.items() if host.machine == started.controller_machine)
        found |= dict.fromkeys(here, ITSELF)
    return found


def same_machine(state: RunState) -> dict[str, HostSet]:
    """The hosts that share a machine with others of the run, each with all names of that machine."""
    names: dict[str, list[str]] = {}
    for name, host in state.hosts.items():
        if host.machine:
            names.setdefault(host.machine, []).append(name)
    return {name: HostSet(alike) for alike in names.values() if len(alike) > 1 for name in alike}


def wave_of(state: RunState, host: str) -> str:
    """The name of the wave in which a host was called; empty where it was not."""
    return next((wave.name for wave in reversed(state.waves) if host in wave.hosts), "")


def place_of_wave(name: str) -> tuple[int, int]:
    """Where a wave of this name comes in a run: the canary, the batches, the last."""
    if name == CANARY:
        return 0, 0
    number = name.rpartition(" ")[2]
    return (2 if name.startswith(_LAST) else 1), int(number) if number.isdigit() else 0


def batches_called(waves: Iterable[WaveStarted]) -> int:
    """How many of these waves were batches: the next one has the size that comes after theirs."""
    return sum(wave.name.startswith(_BATCH) for wave in waves)


# -- what is known before any connection ----------------------------------------------------------


def strata_of(policy: Policy, hosts: Iterable[Host]) -> dict[str, str]:
    """The stratum of each host, `sku=h100, driver=550`; a variable that a host lacks is said as `?`."""
    if not policy.strata:
        return {}
    return {
        host.name: ", ".join(f"{name}={host.vars.get(name, '?')}" for name in policy.strata)
        for host in hosts
    }


def known_to_go_last(
    hosts: Sequence[Host], jumps: Mapping[str, Sequence[str]] | None = None
) -> dict[str, str]:
    """The hosts that are this machine, or through which others of the run are reached.

    `jumps` are the jump hosts on the way to each host that something else than the inventory names.
    """
    through: dict[str, list[str]] = {}
    for host in hosts:
        for hop in (host.via or "").split(","):
            name = hop.strip().rpartition("@")[2]
            through.setdefault(name, []).append(host.name)
            through.setdefault(name.rpartition(":")[0], []).append(host.name)
        for name in (jumps or {}).get(host.name, ()):
            through.setdefault(name, []).append(host.name)
    found = {}
    for host in hosts:
        others = [*through.get(host.name, ()), *through.get(host.address, ())]
        behind = HostSet(name for name in others if name != host.name)
        if host.transport == "local":
            found[host.name] = ITSELF
        elif behind:
            found[host.name] = f"the way to {behind}"
    return found


# -- a wave ---------------------------------------------------------------------------------------


def _with_a_turn(state: RunState) -> tuple[Unit, ...]:
    if not state.cohorts:
        return tuple((name,) for name, host in state.hosts.items() if _has_work(host))
    found = (
        tuple(name for name in unit if not _given_up(state.hosts[name]))
        for unit in units(state)
        if any(_has_work(state.hosts[name]) for name in unit)
    )
    return tuple(unit for unit in found if unit)


def _sorted_out(state: RunState, waiting: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
    """Those that go in batches, and those that go after them, the controller behind the jump hosts."""
    last = goes_last(state)
    late = [unit for unit in waiting if any(name in last for name in unit)]
    usual = [unit for unit in waiting if unit not in late] if late else list(waiting)
    return usual, sorted(late, key=lambda unit: any(last.get(name) == ITSELF for name in unit))


def _canary(state: RunState, policy: Policy, waiting: Sequence[Unit]) -> tuple[str, ...]:
    """The first of each stratum, in whole units."""
    strata = state.started.strata if state.started else {}
    taken: dict[str, int] = {}
    picked: list[str] = []
    for unit in waiting:
        of = [strata.get(name, "") for name in unit if _has_work(state.hosts[name])]
        if any(taken.get(stratum, 0) < policy.canary for stratum in of):
            picked += unit
            for stratum in of:
                taken[stratum] = taken.get(stratum, 0) + 1
    return tuple(picked)


def _whole_units(waiting: Sequence[Unit], size: int) -> tuple[str, ...]:
    """As many units as fit into so many hosts, in their order; one in any case."""
    picked = list(waiting[0])
    for unit in waiting[1:]:
        if len(picked) + len(unit) > size:
            break
        picked += unit
    return tuple(picked)


def _has_work(host: HostState) -> bool:
    """Whether it has something to do, or had when it was begun, be it by another machine."""
    return (host.pending is True or host.started) and not _given_up(host)


def _given_up(host: HostState) -> bool:
    """Whether it ended before its turn because of what it is, and not for want of a turn."""
    return host.finished is not None and not host.started and host.outcome not in _TURNLESS
