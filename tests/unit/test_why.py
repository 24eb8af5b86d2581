"""Why a command did not go well: its class from what it said, and what helps."""

from __future__ import annotations

import pytest

from fleetfix.commands import HOST_PATH, Completed
from fleetfix.remote import api


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        ("sh: 1: cannot create /x/y: No space left on device\n", "no_space"),
        ("pip: [Errno 28] No space left on device\nhint: see above\n", "no_space"),
        ("cp: error writing 'x': Disk quota exceeded\n", "no_space"),
        ("cp: cannot create 'x': Permission denied\n", "command"),
        ("test 'No space left on device is told' failed\n", "command"),
        ("", "command"),
    ],
)
def test_a_full_disk_is_told_as_one_whoever_met_it(stderr: str, kind: str) -> None:
    assert Completed(exit=1, stderr=stderr).why("it").kind == kind


def test_a_program_that_is_not_found_says_where_it_was_looked_for() -> None:
    failure = Completed(exit=127, stderr="sh: 1: nvcc: not found\n").why("compile")
    assert failure.message == "compile: exit 127: sh: 1: nvcc: not found"
    assert HOST_PATH in failure.hint
    assert HOST_PATH == api.PATH


def test_a_program_that_is_not_executed_says_what_may_forbid_it() -> None:
    assert "noexec" in Completed(exit=126).why("it").hint
