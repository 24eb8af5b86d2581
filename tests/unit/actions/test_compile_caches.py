"""compile_caches: what is cleared, what is foreseen, what is refused; and on a real folder, end to end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fleetfix.action import Plan
from fleetfix.actions.compile_caches import CacheFacts, CompileCaches
from fleetfix.commands import Call, Change, Completed
from fleetfix.domain.caches import Found, Toolchain, User, Whose
from fleetfix.errors import Failure, HostError
from fleetfix.remote import aside, caches
from fleetfix.remote.api import Context

STALE, FRESH = 100.0, 300.0
CHANGED = 200.0


def found(real: str = "/tmp/torchinductor_alice", name: str = "inductor", **fields: Any) -> Found:
    measured = {"owner": 1000, "owner_name": "alice", "files": 3, "bytes": 1288490189, "newest": STALE}
    return Found.model_validate(
        {"name": name, "path": real, "real": real, "by": "default", **measured, **fields}
    )


def facts(*each: Found, **fields: Any) -> CacheFacts:
    known: dict[str, Any] = {
        "whose": Whose(uid=1000, name="alice", home="/home/alice", environment="/opt/train/venv"),
        "by": "the job's environment",
        "changed": CHANGED,
        "toolchain": Toolchain(compiler="/usr/bin/g++", setuptools=True),
        "found": each,
    }
    return CacheFacts.model_validate({**known, **fields})


def change(*alters: str) -> Change:
    call = Call(function="wheels.repair")
    return Change.model_validate(
        {"key": "x", "summary": "x", "do": (call,), "risk": "reversible", "alters": alters}
    )


REPAIR = {"stop": (change("job"),), "wheels": (change("environment"),)}


def keys(plan: Plan) -> list[str]:
    assert plan.blocked is None
    return [each.key for each in plan.changes]


def test_a_stale_cache_is_cleared_so_that_undo_brings_it_back() -> None:
    (cleared,) = CompileCaches().plan(facts(found())).changes
    assert cleared.key == "cache:/tmp/torchinductor_alice"
    assert cleared.risk == "reversible"
    assert cleared.alters == ("caches",)
    assert cleared.summary == (
        "clear the inductor cache /tmp/torchinductor_alice "
        "(3 files, 1.2 GiB; older than the environment's last change)"
    )
    calls = [cleared.do[0].function, cleared.undo[0].function, cleared.commit[0].function]
    assert calls == ["aside.move", "aside.put_back", "aside.drop"]
    args = {"path": "/tmp/torchinductor_alice", "uid": 1000}
    assert {str(call.args) for call in (*cleared.do, *cleared.undo, *cleared.commit)} == {str(args)}


def test_a_fresh_cache_is_left_alone_and_guards_say_nothing_of_it() -> None:
    odd = found(newest=FRESH, kind="link", owner=0, users=(User(pid=1, name="x", user="y"),))
    assert CompileCaches().plan(facts(odd)) == Plan()


def test_all_clears_fresh_ones_too_but_no_empty_ones() -> None:
    fresh, empty = found(newest=FRESH), found("/home/alice/.triton/cache", "triton", files=0, newest=None)
    assert keys(CompileCaches(which="all").plan(facts(fresh, empty))) == ["cache:/tmp/torchinductor_alice"]


def test_a_repair_that_is_planned_makes_every_cache_stale() -> None:
    action, fresh = CompileCaches(), found(newest=FRESH)
    assert keys(action.foresee(facts(fresh), REPAIR)) == ["cache:/tmp/torchinductor_alice"]
    assert keys(action.foresee(facts(fresh), {"stop": (change("job"),)})) == []
    assert keys(action.foresee(facts(fresh), {"wheels": ()})) == []


def test_the_job_that_this_run_stops_may_use_the_cache() -> None:
    busy = found(newest=FRESH, users=(User(pid=7, name="python", user="alice", of_job=True),))
    assert keys(CompileCaches().foresee(facts(busy, job=7), REPAIR))
    blocked = CompileCaches(which="all").plan(facts(busy, job=7)).blocked
    assert blocked
    assert "in use by the job's python (pid 7)" in blocked


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (found(users=(User(pid=9, name="python", user="bob"),)), "in use by bob's python (pid 9)"),
        (found(kind="link"), "symbolic link"),
        (found("/home/alice", "also"), "home folder"),
        (found(owner=0, owner_name="root"), "belongs to root"),
    ],
)
def test_what_must_not_be_moved_blocks_and_nothing_else_is_changed(cache: Found, says: str) -> None:
    other = found("/home/alice/.triton/cache", "triton")
    for plan in (
        CompileCaches().plan(facts(other, cache)),
        CompileCaches().foresee(facts(other, cache), REPAIR),
    ):
        assert plan.changes == ()
        assert says in (plan.blocked or "")


def test_a_cache_that_could_not_be_filled_again_blocks_unless_told_to_ignore() -> None:
    bare = facts(found(objects=1), toolchain=Toolchain(compiler=None, setuptools=True))
    blocked = CompileCaches().plan(bare).blocked
    assert blocked
    assert "toolchain: ignore" in blocked
    assert keys(CompileCaches(toolchain="ignore").plan(bare))


def test_a_cache_in_another_is_moved_with_it() -> None:
    inner = found("/tmp/torchinductor_alice/triton", "triton")
    assert keys(CompileCaches().plan(facts(inner, found()))) == ["cache:/tmp/torchinductor_alice"]


def test_a_stale_cache_in_a_fresh_one_is_moved_alone() -> None:
    inner = found("/tmp/torchinductor_alice/triton", "triton")
    plan = CompileCaches().plan(facts(inner, found(newest=FRESH)))
    assert keys(plan) == ["cache:/tmp/torchinductor_alice/triton"]


def test_artefacts_of_the_other_cuda_are_stale_at_any_age() -> None:
    mixed = facts(found(newest=FRESH, cuda={"13": 1, "12": 4}))
    assert keys(CompileCaches(cuda="12").plan(mixed))
    assert keys(CompileCaches.model_validate({"cuda": 12.8}).plan(mixed))
    assert not keys(CompileCaches().plan(mixed))


def test_an_unknown_environment_judges_no_age_and_says_so() -> None:
    plan = CompileCaches().plan(facts(found(), changed=None, no_environment="nothing here says which"))
    assert plan.changes == ()
    assert plan.notes == ("the age of caches is not judged: nothing here says which",)


def test_what_may_be_stale_alone_at_its_turn_is_announced_by_itself() -> None:
    inner = found("/tmp/torchinductor_alice/triton", "triton")
    outer = found(newest=FRESH)
    now = facts(inner, outer, locked())
    announced = keys(CompileCaches().foresee(now, REPAIR))
    turn = keys(CompileCaches().plan(now))
    assert set(turn) < set(announced)
    assert turn == ["cache:/tmp/torchinductor_alice/triton", f"lock:{LOCK}"]


# -- dead locks -----------------------------------------------------------------------------------------

EXTENSIONS = "/home/alice/.cache/torch_extensions"
LOCK = EXTENSIONS + "/adam/lock"


def locked(**fields: Any) -> Found:
    return found(
        "/home/alice/.cache/torch_extensions",
        "torch_extensions",
        locks=(LOCK,),
        **{"newest": FRESH, **fields},
    )


def test_a_dead_lock_is_removed_where_no_job_runs() -> None:
    assert keys(CompileCaches().plan(facts(locked()))) == [f"lock:{LOCK}"]


def test_a_dead_lock_is_no_reason_to_stop_a_job_that_runs() -> None:
    for plan in (
        CompileCaches().plan(facts(locked(), job=7)),
        CompileCaches().foresee(facts(locked(), job=7), {"stop": (change("job"),)}),
    ):
        assert plan.changes == ()
        assert LOCK in plan.notes[0]


def test_a_dead_lock_goes_with_its_cache() -> None:
    assert keys(CompileCaches().plan(facts(locked(newest=STALE)))) == [
        "cache:/home/alice/.cache/torch_extensions"
    ]


# -- laws -----------------------------------------------------------------------------------------------

CACHES = st.builds(
    found,
    real=st.sampled_from(
        ["/tmp/torchinductor_alice", "/tmp/torchinductor_alice/triton", "/scratch/triton", LOCK]
    ),
    name=st.sampled_from(["inductor", "triton", "torch_extensions", "cupy", "also"]),
    newest=st.sampled_from([STALE, FRESH, None]),
    files=st.integers(0, 3),
    kind=st.sampled_from(["folder", "link", "other"]),
    cuda=st.sampled_from([{}, {"13": 1}]),
    locks=st.sampled_from([(), (LOCK,)]),
    users=st.sampled_from([(), (User(pid=7, name="python", user="alice", of_job=True),)]),
)
ACTIONS = st.builds(
    CompileCaches, which=st.sampled_from(["stale", "all"]), cuda=st.sampled_from([None, "12", "13"])
)


@given(ACTIONS, st.lists(CACHES, max_size=5), st.sampled_from([None, 7]))
def test_what_is_planned_was_foreseen(action: CompileCaches, each: list[Found], job: int | None) -> None:
    now = facts(*each, job=job)
    plan = action.plan(now)
    for planned in ({}, REPAIR, {"stop": (change("job"),)}):
        foreseen = action.foresee(now, planned)
        if foreseen.blocked is None and plan.blocked is None:
            announced = {one.key for one in foreseen.changes}
            assert {one.key for one in plan.changes} <= announced


@given(ACTIONS, st.lists(CACHES, max_size=5))
def test_a_blocked_plan_changes_nothing(action: CompileCaches, each: list[Found]) -> None:
    plan = action.plan(facts(*each))
    assert plan.blocked is None or plan.changes == ()


# -- parameters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{"names": ["inducto"]}, {"also": ["relative"]}, {"also": ["/tmp/x/"]}, {"which": "old"}]
)
def test_parameters_that_make_no_sense_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CompileCaches.model_validate(params)


def test_a_misspelt_cache_is_answered_with_the_near_one() -> None:
    with pytest.raises(ValidationError, match="did you mean inductor"):
        CompileCaches.model_validate({"names": ["inducto"]})


# -- on this machine ------------------------------------------------------------------------------------


class Machine:
    """A user's home and /tmp in a folder; runs the action's calls as the runner would."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.cache = folder / "tmp" / "torchinductor_alice"
        self.site = folder / "venv" / "site-packages"
        self.site.mkdir(parents=True)
        (folder / "home").mkdir()
        (folder / "tmp").mkdir()
        environ = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "USER": "alice"}
        environment = {"path": str(folder / "venv"), "site": [str(self.site)], "uid": os.geteuid()}
        monkeypatch.setattr(caches.jobs, "current", lambda ctx: None)
        monkeypatch.setattr(caches.jobs, "job_environ", lambda ctx, step: (os.geteuid(), environ))
        monkeypatch.setattr(caches.environments, "resolve", lambda ctx, venv: environment)

    def compile(self, when: float) -> None:
        (self.cache / "ab").mkdir(parents=True)
        (self.cache / "ab" / "kernel.py").write_text("code")
        os.utime(self.cache / "ab" / "kernel.py", (when, when))

    def ask(self, action: CompileCaches) -> CacheFacts:
        probe = action.probe()
        (read,) = next(probe)
        ctx = Context("RUN", "caches", str(self.folder), dry=True)
        with pytest.raises(StopIteration) as done:
            probe.send((Completed(value=caches.find(ctx, **read.args)),))
        answer: CacheFacts = done.value.value
        return answer

    def run(self, calls: tuple[Call, ...]) -> None:
        for call in calls:
            memory = str(self.folder / "state" / "undo")
            ctx = Context("RUN", "caches", str(self.folder), state=str(self.folder), memory=memory)
            getattr(aside, call.function.partition(".")[2])(ctx, **call.args)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_after_the_changes_nothing_is_left_to_do(machine: Machine) -> None:
    machine.compile(STALE)
    action = CompileCaches(of="stop")
    plan = action.plan(machine.ask(action))
    assert len(plan.changes) == 1
    machine.run(plan.changes[0].do)
    assert action.plan(machine.ask(action)) == Plan()
    machine.run(plan.changes[0].commit)
    assert list((machine.folder / "tmp").iterdir()) == []


def test_undone_it_plans_what_it_planned_before(machine: Machine) -> None:
    machine.compile(STALE)
    action = CompileCaches(of="stop")
    plan = action.plan(machine.ask(action))
    machine.run(plan.changes[0].do)
    machine.run(plan.changes[0].undo)
    assert action.plan(machine.ask(action)) == plan


def test_a_cache_that_the_job_filled_again_is_left_alone(machine: Machine) -> None:
    action = CompileCaches(of="stop")
    machine.compile(machine.site.stat().st_mtime + 5)
    assert action.plan(machine.ask(action)) == Plan()


def test_a_refusal_of_the_host_is_the_hosts_error() -> None:
    probe = CompileCaches().probe()
    next(probe)
    refused = Completed(exit=None, failure=Failure(kind="blocked", message="this needs alice"))
    with pytest.raises(HostError, match="needs alice"):
        probe.send((refused,))
