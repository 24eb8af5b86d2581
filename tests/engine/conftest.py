"""Toy kinds are read back from a host's note as real ones are."""

from __future__ import annotations

from typing import Any

import pytest

from fleetfix import steps
from fleetfix.actions import named
from tests.engine.clusters import Stop, Train
from tests.engine.toys import Fast, Lit, Once, Switch

TOYS: dict[str, Any] = {kind.kind: kind for kind in (Switch, Lit, Fast, Once, Stop, Train)}


@pytest.fixture(autouse=True)
def toy_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "named", lambda kind: TOYS.get(kind) or named(kind))
