"""The ledger of a host: durable, bounded, readable whatever a crash has left of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetfix.commands import Completed
from fleetfix.domain.ledger import Ledger, understood
from fleetfix.errors import Failure, HostError
from fleetfix.remote import ledger as ledgers
from fleetfix.remote import ledger_lines
from fleetfix.remote.api import Context
from fleetfix.views.ledger import ledger_text

WHO = {"run": "r1", "playbook": "p", "operator": "grace", "controller": "bastion", "reason": "fire"}


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    return ledgers.Ledger(str(tmp_path), {**WHO, "driver": "not told"})


def entries(tmp_path: Path, last: int = 50) -> dict[str, Any]:
    found: dict[str, Any] = ledger_lines.last(Context("r1", "", str(tmp_path)), last)
    return found


def change(ledger: Any, number: int, *kinds: str) -> None:
    for kind in kinds:
        ledger.enter(kind, change=f"r1/s/1/{number}", step="s", summary=f"stop job {number}")


def text(tmp_path: Path) -> str:
    return ledger_text("gpu01", understood(Completed(value=entries(tmp_path))))


def test_each_change_is_told_with_how_it_stands_and_who_made_it(ledger: Any, tmp_path: Path) -> None:
    change(ledger, 0, "begun", "done", "undone")
    change(ledger, 1, "begun")
    ledger.enter("ended", outcome="rolled_back", anchor="abc")
    shown = text(tmp_path)
    assert "r1 by grace on bastion: fire" in shown
    assert "s: stop job 0: undone" in shown
    assert "s: stop job 1: begun, and nothing tells how it ended" in shown
    assert "the run ended here: rolled_back" in shown
    assert entries(tmp_path)["lines"][-1]["anchor"] == "abc"
    assert "driver" not in entries(tmp_path)["lines"][0]


def test_a_torn_line_is_counted_and_hides_no_other(ledger: Any, tmp_path: Path) -> None:
    change(ledger, 0, "begun")
    with open(ledger.path, "a") as file:
        file.write('{"v":1,"t":NaN}\n{"v":1,"t":1796')
    change(ledger, 0, "done")
    assert [line["kind"] for line in entries(tmp_path)["lines"]] == ["begun", "done"]
    assert "2 lines could not be read" in text(tmp_path)


def test_it_does_not_grow_for_ever_and_says_what_was_dropped(
    ledger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "LARGEST", 4000)
    for number in range(100):
        ledger.keep_short()
        change(ledger, number, "begun")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3 * 4000
    lines = entries(tmp_path)["lines"]
    assert lines[-1]["summary"] == "stop job 99"
    assert any(line["kind"] == "dropped" and int(line["lines"]) > 10 for line in lines)
    assert "older lines were dropped" in text(tmp_path)


def test_an_answer_has_the_last_lines_and_fits_a_frame(ledger: Any, tmp_path: Path) -> None:
    for number in range(300):
        ledger.enter("begun", change=f"r1/s/1/{number}", step="s", summary="x" * 2000)
    found = entries(tmp_path, 1000)
    assert found["more"]
    assert len(json.dumps(found)) < 64 * 1024
    assert found["lines"][-1]["change"] == "r1/s/1/299"
    assert len(entries(tmp_path, 3)["lines"]) == 3


def test_a_full_disk_keeps_nobody_from_working(tmp_path: Path) -> None:
    ledger = ledgers.Ledger(str(tmp_path / "gone"), WHO)
    ledger.enter("begun", change="r1/s/1/0", step="s", summary="x")
    ledger.keep_short()


@pytest.mark.parametrize(
    "value", [None, [], {"lines": 7}, {"lines": [{"t": "soon"}]}, {"lines": [{"t": 1e300}]}, {"torn": -1}]
)
def test_what_is_no_ledger_is_no_answer(value: Any) -> None:
    with pytest.raises(HostError):
        understood(Completed(value=value))


def test_what_a_hostile_host_tells_moves_no_cursor() -> None:
    line = {
        "t": 1.0,
        "kind": "\x1b[2J",
        "run": "\x1b[31m",
        "summary": ["x"],
        "change": "c\x07",
        "step": "a\nb",
    }
    shown = ledger_text("gpu01", understood(Completed(value={"lines": [line]})))
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "cannot be reached" in ledger_text(
        "gpu02", Failure(kind="unreachable", message="cannot be reached")
    )
    assert "nothing was changed here" in ledger_text("gpu03", Ledger())
