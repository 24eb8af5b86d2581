"""The fault matrix on real OpenSSH servers: what each fault costs at each moment is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet import machines, reliability
from tests.fleet.reliability import CONTROLLER, FAULTS, MOMENTS, SETTLED, Cell

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]

Cells = dict[tuple[str, str], Cell]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    reason = machines.why_not()
    if reason is not None:
        pytest.skip(reason)
    found = reliability.run_matrix(Path(tmp_path_factory.mktemp("matrix")))
    return {(cell.fault, cell.moment): cell for cell in found}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", [*FAULTS, CONTROLLER])
def test_nothing_is_lost_and_nothing_done_twice(cells: Cells, fault: str, moment: str) -> None:
    cell = cells[fault, moment]
    told = "\n".join([*cell.told, *cell.executed])
    assert (cell.resumed or cell.first) in SETTLED, told
    assert cell.lost == [], told
    # What was done is left alone by the next run; what was taken back is done by it.
    if cell.last or cell.resumed:
        assert cell.last == ("ok" if (cell.resumed or cell.first) == "changed" else "changed"), told
    assert once(cell.executed), told
    assert len(cell.begun) == len(set(cell.begun)), "an id is begun once"
    assert len([one for one in cell.executed if one.startswith("do ")]) <= len(cell.begun) or not cell.begun
    if fault == "restart" and moment != "connect":
        assert cell.restarted, told


def once(executed: list[str]) -> bool:
    """Whether nothing was done again that had been done and not taken back."""
    standing: set[str] = set()
    for one in executed:
        verb, step = one.split()
        if verb == "do" and step in standing:
            return False
        (standing.add if verb == "do" else standing.discard)(step)
    return True


def test_the_page_shows_what_was_seen(cells: Cells) -> None:
    again = "run `python -m tests.fleet.reliability` as root and look at what has changed"
    assert reliability.shown_table() == reliability.table(list(cells.values())), again
