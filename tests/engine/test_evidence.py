"""Evidence before what nothing brings back: kept first, or the step does not begin."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fleetfix import evidence_folder
from fleetfix.actions.collect import Collect
from fleetfix.domain.evidence import LIGHT, MOST
from fleetfix.errors import Failure, HostError, JournalError
from fleetfix.events import EvidenceKept
from fleetfix.transports.scripted import Fleet, ScriptedHost
from tests.engine.test_run import outcomes
from tests.engine.toys import Lit, Shelf, Switch, play, step, toy_host

FINAL = Switch(name="a", risk="irreversible")


def packed(text: str) -> dict[str, Any]:
    return {
        "packed": base64.b64encode(zlib.compress(text.encode())).decode(),
        "cut": False,
        "lacks": None,
    }


def host_with(answer: Any, **world: Any) -> ScriptedHost:
    host = toy_host(**world)
    host.on("evidence.take", answer)
    return host


def hangs(args: dict[str, Any], world: dict[str, Any]) -> Any:
    if args["item"] == "nvidia-smi":
        raise HostError(Failure(kind="timed_out", message="nvidia-smi -q did not answer within 30 s"))
    return packed(f"{args['item']} of a host\n")


async def test_evidence_is_kept_before_a_change_that_nothing_brings_back() -> None:
    shelf, kept_before = Shelf(), []
    host = host_with(lambda args, world: packed(f"{args['item']}\n"), a=False)

    def look_and_set(args: dict[str, Any], world: dict[str, Any]) -> None:
        kept_before.append(sorted(shelf.kept))
        world["a"] = True

    host.on("toy.set", look_and_set)
    state, _ = await play(Fleet({"gpu01": host}), [step("a", FINAL)], shelf=shelf)
    assert outcomes(state) == {"gpu01": "changed"}
    assert kept_before == [[("gpu01", "a", f"{item}.txt") for item in sorted(LIGHT)]]
    (event,) = shelf.of("evidence_kept")
    assert shelf.events.index(event) < shelf.events.index(shelf.of("change_started")[0])
    assert {(file.name, file.bytes) for file in event.files} == {
        (f"{item}.txt", len(item) + 1) for item in LIGHT
    }


@pytest.mark.parametrize(
    ("risk", "controls", "items"),
    [
        ("reversible", {}, 0),
        ("compensable", {}, 0),
        ("irreversible", {"evidence": "none"}, 0),
        ("reversible", {"evidence": "light"}, len(LIGHT)),
        ("reversible", {"evidence": "full"}, 14),
    ],
)
async def test_how_much_is_asked_for(risk: Any, controls: dict[str, Any], items: int) -> None:
    host = host_with(packed("x\n"), a=False)
    state, shelf = await play(Fleet({"gpu01": host}), [step("a", Switch(name="a", risk=risk), **controls)])
    assert outcomes(state) == {"gpu01": "changed"}
    assert host.runs("read").count("evidence.take") == items
    assert len(shelf.kept) == items


async def test_without_evidence_an_irreversible_step_does_not_begin() -> None:
    host = host_with(hangs, a=False)
    state, shelf = await play(Fleet({"gpu01": host}), [step("a", FINAL)])
    assert outcomes(state) == {"gpu01": "blocked"}
    finished = shelf.of("host_finished")[0]
    assert "nvidia-smi -q did not answer" in finished.reason
    assert finished.failure.hint == "evidence: best_effort goes on without"
    assert host.runs("do") == []


async def test_best_effort_keeps_what_there_is_and_goes_on() -> None:
    host = host_with(hangs, a=False)
    state, shelf = await play(Fleet({"gpu01": host}), [step("a", FINAL, evidence="best_effort")])
    assert outcomes(state) == {"gpu01": "changed"}
    (event,) = shelf.of("evidence_kept")
    assert event.missing == ("nvidia-smi: nvidia-smi -q did not answer within 30 s",)
    assert len(event.files) == len(LIGHT) - 1


async def test_what_a_host_does_not_have_is_no_failure() -> None:
    host = host_with({"packed": "", "cut": False, "lacks": "dmesg is not on this host"}, a=False)
    state, shelf = await play(Fleet({"gpu01": host}), [step("a", FINAL)])
    assert outcomes(state) == {"gpu01": "changed"}
    assert shelf.of("evidence_kept")[0].lacking[0] == "system: dmesg is not on this host"


async def test_evidence_that_cannot_be_kept_blocks_too() -> None:
    class Full(Shelf):
        def keep_evidence(self, run: str, host: str, step: str, files: Mapping[str, bytes]) -> str:
            raise JournalError("evidence cannot be kept in /x: no space left on device")

    host = host_with(packed("x\n"), a=False)
    state, _ = await play(Fleet({"gpu01": host}), [step("a", FINAL)], shelf=Full())
    assert outcomes(state) == {"gpu01": "blocked"}
    assert host.runs("do") == []


async def test_a_second_try_of_a_step_keeps_the_evidence_of_before_the_first() -> None:
    host = host_with(packed("x\n"), a=False)
    host.on("toy.set", None)
    _, shelf = await play(Fleet({"gpu01": host}), [step("a", FINAL, retries=2)])
    assert len(shelf.of("change_started")) == 3
    assert len(shelf.of("evidence_kept")) == 1


@pytest.mark.parametrize(
    "garbage",
    [7, None, {"packed": "not base64!"}, {"packed": base64.b64encode(b"x").decode()}, {"packed": 3}],
)
async def test_an_answer_that_makes_no_sense_is_missing_evidence(garbage: Any) -> None:
    host = host_with(garbage, a=False)
    state, _ = await play(Fleet({"gpu01": host}), [step("a", FINAL)])
    assert outcomes(state) == {"gpu01": "blocked"}


async def test_a_bomb_is_kept_cut() -> None:
    host = host_with(packed("x" * 40 * MOST), a=False)
    _, shelf = await play(Fleet({"gpu01": host}), [step("a", FINAL)])
    assert {file.bytes for file in shelf.of("evidence_kept")[0].files} == {4 * MOST}


async def test_collect_keeps_what_a_well_host_says_and_asks_it_once() -> None:
    host = host_with(packed("x\n"), lamp=True)
    steps = [step("lamp", Lit(name="lamp")), step("look", Collect())]  # type: ignore[arg-type]
    state, shelf = await play(Fleet({"gpu01": host}), steps)
    assert outcomes(state) == {"gpu01": "ok"}
    assert host.runs("read").count("evidence.take") == 14
    assert host.runs("do") == []
    assert {name for _, _, name in shelf.kept} >= {"nvidia-smi.txt", "kernel.txt"}


async def test_a_dry_run_collects_nothing() -> None:
    host = host_with(packed("x\n"))
    steps = [step("look", Collect())]  # type: ignore[arg-type]
    _, shelf = await play(Fleet({"gpu01": host}), steps, dry=True)
    assert host.runs("read") == []
    assert shelf.kept == {}


async def test_collect_passes_with_what_answers_and_fails_where_nothing_does() -> None:
    fleet = Fleet({"gpu01": host_with(hangs), "gpu02": host_with(7)})
    steps = [step("look", Collect(what="light"))]  # type: ignore[arg-type]
    state, shelf = await play(fleet, steps)
    assert outcomes(state) == {"gpu01": "ok", "gpu02": "failed"}
    kept = [event for event in shelf.events if isinstance(event, EvidenceKept)]
    assert [event.host for event in kept] == ["gpu01"]
    assert "not answered: nvidia-smi" in state.hosts["gpu01"].steps["look"].reason


def test_files_are_private_and_never_written_over(tmp_path: Path) -> None:
    first = evidence_folder.keep(tmp_path, "run", "gpu01", "stop", {"kernel.txt": b"one"})
    second = evidence_folder.keep(tmp_path, "run", "gpu01", "stop", {"kernel.txt": b"two"})
    assert first == tmp_path / "evidence/run/gpu01/stop"
    assert (first / "kernel.txt").read_bytes() == b"one"
    assert (second / "kernel.txt").read_bytes() == b"two"
    assert oct((first / "kernel.txt").stat().st_mode & 0o777) == "0o600"
    assert oct(first.stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize("host", ["..", "../../etc", "a/b", "2001:db8::7", ".", ""])
def test_a_hosts_name_is_one_folder_below_the_run(tmp_path: Path, host: str) -> None:
    place = evidence_folder.keep(tmp_path, "run", host, "s", {"x": b""})
    assert place.parent.parent == tmp_path / "evidence" / "run"
    assert place.resolve() == place
