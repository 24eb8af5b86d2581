"""A program of the author's own: its arguments reach it as they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fleetfix.actions.command import CheckFacts, Command
from fleetfix.commands import Completed
from fleetfix.remote import shell
from fleetfix.remote.api import Context

TO_DO = CheckFacts(check=Completed(exit=1))


def test_arguments_reach_the_program_as_they_are(tmp_path: Path) -> None:
    argv = ["printf", "%s|", "a b", "$HOME", "*", "'", ";"]
    (change,) = Command.model_validate({"argv": argv, "always": True}).plan(CheckFacts()).changes
    ctx = Context("RUN", "fix", str(tmp_path), state=str(tmp_path), memory=str(tmp_path / "undo"))
    assert shell.run(ctx, **change.do[0].args).text == "a b|$HOME|*|'|;|"


def test_check_and_undo_are_argument_lists_too() -> None:
    action = Command.model_validate({"argv": ["on"], "check": ["is", "on"], "undo": ["off"]})
    (read,) = next(action.probe())
    assert read.args["argv"] == ["is", "on"]
    (change,) = action.plan(TO_DO).changes
    assert change.undo[0].args["argv"] == ["off"]
    assert change.risk == "compensable"
    assert action.plan(CheckFacts(check=Completed(exit=0))).changes == ()


def test_a_missing_program_is_an_exit_and_not_an_exception(tmp_path: Path) -> None:
    ctx = Context("RUN", "fix", str(tmp_path), dry=True)
    assert shell.check(ctx, ["no-such-program"]).exit == 127


@pytest.mark.parametrize(
    "params", [{"argv": []}, {"argv": "ls -l"}, {"argv": ["ls"]}, {"argv": ["a"], "check": []}]
)
def test_what_is_no_argument_list_or_verified_by_nothing_does_not_load(params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Command.model_validate(params)


def test_it_is_shown_as_it_would_be_typed() -> None:
    assert Command.model_validate({"argv": ["ls", "a b"], "always": True}).in_words() == "ls 'a b'"
