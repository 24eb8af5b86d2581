"""What engine tests stand on: toy kinds, and time that is the same at every telling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is kept at once, so that a story that went wrong can be told again."""

    async def at_once(function: Callable[..., Any], *words: Any) -> Any:
        await asyncio.sleep(0)
        return function(*words)

    monkeypatch.setattr("fleetfix.recorder.asyncio.to_thread", at_once)
