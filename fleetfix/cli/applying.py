"""Apply a saved plan: bind it again, refuse it where anything has moved, and run it."""

from __future__ import annotations

import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from fleetfix.cli import conduct, secret_sources
from fleetfix.cli.places import jumps_of, load_inventory
from fleetfix.cli.whole_file import read_whole
from fleetfix.cohorts import neighbours
from fleetfix.engine.fleetrun import Request
from fleetfix.errors import PlanError
from fleetfix.events import RunStarted
from fleetfix.hostset import HostSet
from fleetfix.inventory import Host, Inventory
from fleetfix.inventory_sources.trust import distrust_of_place
from fleetfix.journal import Journal
from fleetfix.playbook import load
from fleetfix.runs import new_run_id
from fleetfix.saved_plan import SavedPlan, binding_of, read, save
from fleetfix.state import fold as folded
from fleetfix.views.grouping import fold


def apply(
    file: str,
    manner: conduct.Manner,
    reason: str,
    secrets: tuple[str, ...] = (),
    lock_wait: float = 0.0,
) -> int:
    """Do what a saved plan says where it still holds; returns the exit code."""
    plan = read(read_whole(Path(file)), file)
    if why := distrust_of_place(Path(file)):
        # It names a playbook and an inventory, which may be a program: others must not choose them.
        raise PlanError(f"{file} is not applied: {why}", hint="make a plan of your own")
    plan.refuse_unless_fresh(file, time.time())
    return conduct.carry_out(_request(plan, file, reason, secrets, lock_wait), manner)


def _request(
    plan: SavedPlan, file: str, reason: str, secrets: tuple[str, ...], lock_wait: float
) -> Request:
    playbook = load(plan.source)
    if playbook.digest != plan.digest:
        raise PlanError(f"{plan.source} was edited after {file} was made", hint="make a new plan")
    inventory = load_inventory(plan.inventory)
    hosts = _hosts(plan, inventory, file)
    steps = conduct.bind(playbook, hosts, plan.settings, inventory)
    if binding_of(hosts, steps) != plan.binding:
        raise PlanError(
            f"the inventory {plan.inventory} no longer says of these hosts what it said for {file}",
            hint="make a new plan",
        )
    secret_sources.hold(secrets, playbook)
    secret_sources.hold_become_password(hosts)
    request = Request(
        run=new_run_id(playbook.name, datetime.now(UTC)),
        playbook=playbook,
        hosts=hosts,
        steps=steps,
        policy=plan.policy,
        inventory=plan.inventory,
        settings=plan.settings,
        dry=False,
        operator=conduct.operator(),
        controller=socket.gethostname(),
        reason=reason,
        others=neighbours(inventory.hosts.values(), hosts),
        jumps=jumps_of(hosts),
        machine=conduct.machine(),
        driver=conduct.driver(),
        expected=plan.expected(),
        boots=plan.boots,
        plan=plan.run,
        lock_wait=lock_wait,
    )
    return secret_sources.sealed(request)


def still_expected(journal: Journal, started: RunStarted) -> dict[str, frozenset[str]] | None:
    """What the plan that a run applies announced, for its resume; None where it applies none.

    Where this journal does not have the dry run of that plan, nothing more is begun.
    """
    if not started.plan:
        return None
    if journal.run(started.plan) is None:
        return {}
    return save(folded(journal.records(started.plan)), binding="").expected()


def _hosts(plan: SavedPlan, inventory: Inventory, file: str) -> tuple[Host, ...]:
    gone = [name for name in plan.hosts if name not in inventory.hosts]
    if gone:
        raise PlanError(
            f"the inventory {plan.inventory} has no {fold(gone)} any more, which {file} is for",
            hint="make a new plan",
        )
    return tuple(inventory.hosts[name] for name in HostSet(plan.hosts))
