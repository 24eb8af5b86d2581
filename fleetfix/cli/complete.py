"""What the shell offers at TAB; nothing is connected to, and nothing that fails is said."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pathlib import Path

Offers = Callable[[str], list[str]]


def _offers(source: Callable[[str], Iterable[str]]) -> Offers:
    """Offer what begins with what is typed; a broken file offers nothing, and says nothing either."""

    @functools.wraps(source)
    def offer(incomplete: str) -> list[str]:
        try:
            return [one for one in source(incomplete) if one.startswith(incomplete)]
        except Exception:  # noqa: BLE001 - a message would land in the middle of the line being typed
            return []

    return offer


@_offers
def playbooks(incomplete: str) -> Iterable[str]:
    """Playbooks that have a name, and YAML files where a path is begun."""
    from pathlib import Path

    from fleetfix.folders import expanded
    from fleetfix.library import available

    head, slash, _ = incomplete.rpartition("/")
    if not slash:
        return [*available(), *(f"{path}/" for path in Path().iterdir() if path.is_dir())]
    folder = expanded(head or "/")
    found = [path for path in sorted(folder.iterdir()) if path.is_dir() or path.suffix in (".yaml", ".yml")]
    return [f"{head}/{path.name}{'/' if path.is_dir() else ''}" for path in found]


@_offers
def saved_plans(incomplete: str) -> Iterable[str]:
    """Files that are saved plans, and folders to look for them in."""
    return _paths(incomplete, _is_plan)


def _paths(incomplete: str, wanted: Callable[[Path], bool]) -> Iterator[str]:
    """Folders, and the files in the folder that is typed which are wanted."""
    from fleetfix.folders import expanded

    head, slash, _ = incomplete.rpartition("/")
    folder = expanded(head or ("/" if slash else "."))
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield f"{head}{slash}{path.name}/"
        elif wanted(path):
            yield f"{head}{slash}{path.name}"


def _is_plan(path: Path) -> bool:
    """Whether a file begins as a saved plan does."""
    from fleetfix.saved_plan import FORMAT

    try:
        with path.open("rb") as file:
            return path.is_file() and FORMAT.encode() in file.read(100)
    except OSError:
        return False


PATIENCE = 2.0
"""Seconds that an inventory may take while a line is being typed."""


def hosts(context: typer.Context, incomplete: str) -> list[str]:
    """Hosts and groups of the inventory that is named, after what stands before the last operator."""
    inventory = context.params.get("inventory")
    return _hosts(inventory if isinstance(inventory, str) else None, incomplete)


def _hosts(spec: str | None, incomplete: str) -> list[str]:
    import re

    from fleetfix.cli.places import load_inventory

    match = re.match(r".*[,!&^]", incomplete)
    before = match[0] if match else ""

    def known(_: str) -> Iterable[str]:
        inventory = load_inventory(spec, deadline=PATIENCE)
        names = (*inventory.hosts, *(f"@{group}" for group in inventory.groups))
        return [before + one for one in names]

    def ended(_: str) -> Iterable[str]:
        word, colon, _ = incomplete[len(before) :].partition(":")
        from fleetfix.cli.places import Journalled

        if not colon or word.removeprefix("@") not in Journalled().words:
            return []
        return [f"{before}{word}:{run}" for run in _newest_runs()]

    return [*_offers(known)(incomplete), *_offers(ended)(incomplete)]


@_offers
def runs(incomplete: str) -> Iterable[str]:
    """The newest runs of this machine's journal."""
    return _newest_runs()


def _newest_runs() -> list[str]:
    from fleetfix.cli.state_dir import state_dir
    from fleetfix.journal import Journal

    folder = state_dir()
    if not (folder / "journal.db").exists():
        return []
    with Journal.open(folder) as journal:
        return ["last", *(row.run for row in journal.runs(50))]


def hosts_of_run(context: typer.Context, incomplete: str) -> list[str]:
    """The hosts of the run that the line names."""
    from fleetfix.cli.state_dir import state_dir
    from fleetfix.journal import Journal

    @_offers
    def known(_: str) -> Iterable[str]:
        folder = state_dir()
        if not (folder / "journal.db").exists():
            return []
        with Journal.open(folder) as journal:
            row = journal.run(journal.find(str(context.params["run"])))
        return row.hosts if row is not None else []

    before, comma, word = incomplete.rpartition(",")
    return [f"{before}{comma}{one}" for one in known(word)]


@_offers
def inventories(incomplete: str) -> Iterable[str]:
    """What `-i` takes that is no file, and the files."""
    yield from ("lab", "slurm:", "clustershell:", "ssh-config:", "ansible:")
    yield from _paths(incomplete, lambda path: True)


def settings(context: typer.Context, incomplete: str) -> list[str]:
    """The variables of the playbook that the line names."""
    from fleetfix.playbook import load

    @_offers
    def known(_: str) -> Iterable[str]:
        return [f"{name}=" for name in load(str(context.params["playbook"])).vars]

    return known(incomplete)


def secrets(context: typer.Context, incomplete: str) -> list[str]:
    """The secrets of the playbook that the line names, and the password for sudo."""
    from fleetfix.playbook import load

    @_offers
    def known(_: str) -> Iterable[str]:
        named = context.params.get("playbook")
        return [f"{name}=" for name in (*(load(str(named)).secrets if named else ()), "become")]

    return known(incomplete)


@_offers
def faults(incomplete: str) -> Iterable[str]:
    """The faults that the lab can make."""
    from fleetfix.lab import FAULTS

    return FAULTS


@_offers
def lab_hosts(incomplete: str) -> Iterable[str]:
    """The hosts of the lab that is up."""
    from fleetfix.cli.places import load_inventory

    return load_inventory("lab").hosts


@_offers
def actions(incomplete: str) -> Iterable[str]:
    """The words of the playbook language."""
    from fleetfix.actions import KINDS
    from fleetfix.steps import CONTROLS

    return [*KINDS, *CONTROLS]
