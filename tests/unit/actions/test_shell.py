"""A script of the author's own: when it runs, what verifies it, and that undo follows only a run."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fleetfix.action import Plan
from fleetfix.actions.command import CheckFacts, Command
from fleetfix.actions.shell import Shell
from fleetfix.commands import Call, Completed
from fleetfix.errors import Failure, HostError
from fleetfix.remote import shell
from fleetfix.remote.api import Context, Ran, Refusal


class Machine:
    """Runs the calls of a change on this machine as the runner would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def context(self) -> Context:
        memory = str(self.folder / "undo")
        return Context("RUN", "fix", str(self.folder), state=str(self.folder), memory=memory)

    def call(self, call: Call) -> Any:
        return getattr(shell, call.function.partition(".")[2])(self.context(), **call.args)

    def ask(self, action: Shell | Command) -> CheckFacts:
        probe = action.probe()
        try:
            (read,) = next(probe)
        except StopIteration as done:
            facts: CheckFacts = done.value
            return facts
        ran = self.call(read)
        reply = Completed(exit=ran.exit, stdout=ran.text, stderr=ran.errors, cut=ran.cut)
        with pytest.raises(StopIteration) as end:
            probe.send((reply,))
        answer: CheckFacts = end.value.value
        return answer

    def plan(self, action: Shell | Command) -> Plan:
        return action.plan(self.ask(action))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def touching(path: Path, **params: Any) -> Shell:
    script = {"check": f"test -e '{path}'", "run": f"touch '{path}'", "undo": f"rm -f '{path}'"}
    return Shell.model_validate({**script, **params})


def test_what_its_check_calls_done_is_not_run(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "flag").touch()
    assert machine.plan(touching(tmp_path / "flag")) == Plan()


def test_once_run_its_own_check_verifies_it(machine: Machine, tmp_path: Path) -> None:
    action = touching(tmp_path / "flag")
    (change,) = machine.plan(action).changes
    assert machine.call(change.do[0]).exit == 0
    assert machine.plan(action) == Plan()
    assert action.converges


def test_undo_runs_where_it_was_begun_and_nowhere_else(machine: Machine, tmp_path: Path) -> None:
    (change,) = machine.plan(touching(tmp_path / "flag")).changes
    (tmp_path / "flag").touch()
    assert machine.call(change.undo[0]) == {"undone": False}
    assert (tmp_path / "flag").exists()
    machine.call(change.do[0])
    assert machine.call(change.undo[0]).exit == 0
    assert not (tmp_path / "flag").exists()


def test_always_runs_each_time_by_the_authors_word() -> None:
    action = Shell(run="logger here", always=True)
    (change,) = action.plan(CheckFacts()).changes
    assert change.summary == "run, by the author's word, `logger here`"
    assert not action.converges
    with pytest.raises(StopIteration):
        next(action.probe())


@pytest.mark.parametrize(
    ("params", "risk"),
    [({"check": "false", "undo": "true"}, "compensable"), ({"check": "false"}, "irreversible")],
)
def test_what_cannot_be_undone_is_irreversible(params: dict[str, str], risk: str) -> None:
    action = Shell.model_validate({"run": "true", **params})
    (change,) = action.plan(CheckFacts(check=Completed(exit=1))).changes
    assert change.risk == risk


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"run": "touch x"}, "say `always: true`"),
        ({"run": "touch x", "check": "true", "always": True}, "contradict each other"),
        ({"run": " ", "always": True}, "run"),
        ({"check": "true"}, "run"),
        ({"run": "x", "always": True, "env": {"A B": "c"}}, "env"),
        ({"run": "x", "always": True, "cwd": "relative"}, "cwd"),
    ],
)
def test_what_nothing_would_verify_does_not_load(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Shell.model_validate(params)


def test_a_script_needs_no_bash_and_sees_only_what_it_is_given(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPERATOR_SECRET", "x")
    action = Shell(
        run='echo "$A-${OPERATOR_SECRET-none}-$LC_ALL"; cat', always=True, env={"A": "b"}, stdin="in"
    )
    (change,) = action.plan(CheckFacts()).changes
    ran = machine.call(change.do[0])
    assert isinstance(ran, Ran)
    assert ran.text == "b-none-C\nin"


def test_a_failing_script_answers_with_its_exit_and_output(machine: Machine) -> None:
    (change,) = Shell(run="echo no >&2; exit 3", always=True).plan(CheckFacts()).changes
    ran = machine.call(change.do[0])
    assert (ran.exit, ran.errors) == (3, "no\n")


def test_output_of_any_length_is_kept_at_head_and_tail(machine: Machine) -> None:
    script = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done"
    (change,) = Shell(run=script, always=True).plan(CheckFacts()).changes
    ran = machine.call(change.do[0])
    assert ran.cut
    assert len(ran.stdout) < 32000
    assert ran.text.startswith("line 0\n")
    assert ran.text.endswith("line 19999\n")


def test_a_check_that_does_not_end_blocks() -> None:
    plan = Shell(run="true", check="sleep 100").plan(CheckFacts(check=Completed(exit=None)))
    assert plan.changes == ()
    assert "did not end" in (plan.blocked or "")


def test_a_check_that_the_host_could_not_run_is_the_hosts_error() -> None:
    probe = Shell(run="true", check="true").probe()
    next(probe)
    late = Completed(exit=None, failure=Failure(kind="timed_out", message="shell.check ran past 300 s"))
    with pytest.raises(HostError, match="ran past"):
        probe.send((late,))


def test_a_missing_folder_is_said(machine: Machine, tmp_path: Path) -> None:
    (change,) = Shell(run="true", always=True, cwd=str(tmp_path / "no")).plan(CheckFacts()).changes
    with pytest.raises(Refusal, match="no such folder"):
        machine.call(change.do[0])


def test_the_same_script_has_the_same_key_whatever_its_check() -> None:
    keys = {
        Shell(run="true", check="false").plan(CheckFacts(check=Completed(exit=1))).changes[0].key,
        Shell(run="true", always=True).plan(CheckFacts()).changes[0].key,
    }
    assert len(keys) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")
def test_a_script_runs_as_the_user_of_its_step_with_that_users_home(machine: Machine) -> None:
    nobody = pwd.getpwnam("nobody")
    action = Shell(run='id -u; echo "$HOME $USER"', always=True).acting_as("nobody")
    (change,) = action.plan(CheckFacts()).changes
    assert machine.call(change.do[0]).text == f"{nobody.pw_uid}\n{nobody.pw_dir} nobody\n"
    assert change.summary.endswith(" as nobody")


def test_the_same_script_as_another_user_is_another_change() -> None:
    action = Shell(run="true", always=True)
    keys = {one.plan(CheckFacts()).changes[0].key for one in (action, action.acting_as("nobody"))}
    assert len(keys) == 2


@pytest.mark.parametrize("always", [True, False])
def test_a_user_that_the_host_does_not_know_is_found_before_anything_runs(
    machine: Machine, always: bool
) -> None:
    checked = {"always": True} if always else {"check": "false"}
    action = Shell.model_validate({"run": "true", **checked}).acting_as("no-such-user")
    (read,) = next(action.probe())
    with pytest.raises(Refusal, match="there is no user no-such-user on this host") as refused:
        machine.call(read)
    assert refused.value.kind == "blocked"


def test_only_root_runs_something_as_another_user(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: pwd.getpwnam("nobody").pw_uid)
    (read,) = next(Shell(run="true", always=True).acting_as("root").probe())
    with pytest.raises(Refusal, match="nobody may run nothing as root here"):
        machine.call(read)


def test_a_long_script_is_shown_by_its_first_line() -> None:
    action = Shell(run="# why\nset -e\ntouch x\n", always=True)
    assert action.in_words() == "set -e …"
