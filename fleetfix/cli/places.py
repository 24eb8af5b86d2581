"""Inventories that have a name of their own."""

from __future__ import annotations

from pathlib import Path


def named_inventories() -> dict[str, Path]:
    """Each name that `-i` knows, with its file, whether it exists now or not."""
    try:
        from fleetfix.lab import inventory_path  # type: ignore[attr-defined]
    except ImportError:
        return {}
    return {"lab": inventory_path()}
