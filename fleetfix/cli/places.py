"""Inventories that have a name of their own."""

from __future__ import annotations

import os
from pathlib import Path

from fleetfix.inventory import VARIABLE, Inventory

LAB = "lab"


def load_inventory(spec: str | None) -> Inventory:
    """Load what `-i` says; the lab is asked for its place only where it is meant."""
    return Inventory.load(spec, named=_lab() if LAB in (spec, os.environ.get(VARIABLE)) else None)


def _lab() -> dict[str, Path]:
    from fleetfix.lab import inventory_path

    return {LAB: inventory_path()}


def lasting_name(inventory: Inventory) -> str:
    """Name an inventory so that it is found again from another folder."""
    named = "," in inventory.source or inventory.source == LAB
    return inventory.source if named else str(Path(inventory.source).expanduser().absolute())
