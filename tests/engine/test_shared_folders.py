"""What several hosts have mounted is changed once, when all have stopped what uses it, and seen by all."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from fleetfix.action import Action, Plan, Probe
from fleetfix.commands import Call, Change, Folder, Json, Read
from fleetfix.engine.context import Interrupts
from fleetfix.engine.fleetrun import run_fleet
from fleetfix.errors import Failure, HostError
from fleetfix.inventory import Host
from fleetfix.policy import Policy, Share
from fleetfix.recorder import Recorder
from fleetfix.state import RunState
from fleetfix.transports.scripted import Fleet, ScriptedHost
from tests.engine.toys import HandClock, Lit, Shelf, Switch, request, step, toy_host

POLICY = Policy(canary=0, batch=(Share.parse("100%"),), max_unreachable=Share.parse("100%"), forks=1)
SHARED = {"shared_paths": ["/venv"]}


class Mend(Action[Any]):
    """A folder is sound."""

    kind: ClassVar[str] = "toy_mend"
    modules: ClassVar[tuple[str, ...]] = ()
    path: str = "/venv"
    filesystem: str = "ext4"
    source: str = "/dev/sda1"

    def probe(self) -> Probe[Any]:
        (reply,) = yield (Read(function="disk.sound", args={"path": self.path}),)
        return reply.value

    def plan(self, facts: Any) -> Plan:
        if facts is not False:
            return Plan()
        folder = Folder(path=self.path, filesystem=self.filesystem, source=self.source, inside=self.path)
        change = Change(
            key=f"mend:{self.path}",
            summary=f"mend {self.path}",
            do=(Call(function="disk.mend", args={"path": self.path}),),
            undo=(Call(function="disk.spoil", args={"path": self.path}),),
            risk="reversible",
            folders=(folder,),
        )
        return Plan(changes=(change,))


def steps(**mend: Any) -> list[Any]:
    return [
        step(
            "stop",
            Switch(name="job", on=False, key="stop", job="stops"),
            when_pending=("mend",),
            barrier=True,
        ),
        step("mend", Mend(**mend)),
        step("loads", Lit(name="loads"), when_changed=("mend",)),
        step("train", Switch(name="job", key="start", job="starts", follows="stop"), barrier=True),
    ]


class Site:
    """Hosts that have one disk."""

    def __init__(self, *names: str) -> None:
        self.disk: dict[str, bool] = {"/venv": False}
        self.told: list[tuple[str, str]] = []
        self.hosts = {name: self._host(name) for name in names}

    def _host(self, name: str) -> ScriptedHost:
        host = toy_host(job=True, loads=True)

        def turn(to: bool, what: str) -> Any:
            def do(args: dict[str, Json], world: dict[str, Any]) -> None:
                self.told.append((name, what))
                self.disk[str(args["path"])] = to

            return do

        def switch(args: dict[str, Json], world: dict[str, Any]) -> None:
            self.told.append((name, f"{args['name']} {args['to']}"))
            world[str(args["name"])] = args["to"]

        host.on("disk.sound", lambda args, world: self.disk.get(args["path"]))
        host.on("disk.mend", turn(True, "mend"))
        host.on("disk.spoil", turn(False, "spoil"))
        host.on("toy.set", switch)
        host.on("environments.users", [])
        return host

    async def play(
        self,
        plan: list[Any],
        *,
        selected: tuple[str, ...] = (),
        variables: dict[str, Any] | None = None,
        dry: bool = False,
        **own: dict[str, Any],
    ) -> tuple[RunState, Shelf]:
        """Run over the selected hosts; the others are in the inventory too."""
        everywhere = {
            name: Host(
                name=name,
                address=name,
                transport="scripted",
                vars=own.get(name, SHARED if variables is None else variables),
            )
            for name in self.hosts
        }
        names = selected or tuple(self.hosts)
        asked = request(names, plan, policy=POLICY, dry=dry)
        asked = type(asked)(
            **{
                **vars(asked),
                "hosts": tuple(everywhere[name] for name in names),
                "others": tuple(one for name, one in everywhere.items() if name not in names),
            }
        )
        shelf = Shelf()
        recorder = Recorder(asked.run, shelf, clock=lambda: 0.0)
        with Fleet(self.hosts):
            state = await run_fleet(asked, recorder, shelf, interrupts=Interrupts(), clock=HandClock())
        return state, shelf


def outcomes(state: RunState) -> dict[str, str | None]:
    return {name: host.outcome for name, host in state.hosts.items()}


def reason(state: RunState, host: str) -> str:
    finished = state.hosts[host].finished
    return finished.reason if finished else ""


async def test_it_is_changed_once_when_all_have_stopped_and_checked_by_all() -> None:
    site = Site("gpu01", "gpu02", "gpu03")
    state, shelf = await site.play(steps())
    assert set(outcomes(state).values()) == {"changed"}
    did = [what for _, what in site.told]
    assert did == ["job False"] * 3 + ["mend"] + ["job True"] * 3
    (formed,) = shelf.of("cohort_formed")
    assert (formed.name, formed.hosts) == ("/venv", ("gpu01", "gpu02", "gpu03"))
    mended = {e.host: (e.result, e.reason) for e in shelf.of("step_finished") if e.step == "mend"}
    assert mended["gpu02"] == mended["gpu03"] == ("changed", "made once for all, by gpu01")
    assert {e.host for e in shelf.of("step_finished") if e.step == "loads"} == set(site.hosts)


async def test_where_it_does_not_load_on_one_host_all_go_back_and_it_is_spoilt_once() -> None:
    site = Site("gpu01", "gpu02")
    site.hosts["gpu02"].world["loads"] = False
    state, _ = await site.play(steps())
    assert set(outcomes(state).values()) == {"rolled_back"}
    did = [what for _, what in site.told]
    assert did == ["job False"] * 2 + ["mend", "spoil"] + ["job True"] * 2
    assert site.disk == {"/venv": False}


async def test_a_host_that_shares_it_and_is_not_selected_blocks_the_others() -> None:
    site = Site("gpu01", "gpu02", "gpu03")
    state, _ = await site.play(steps(), selected=("gpu01", "gpu02"))
    assert set(outcomes(state).values()) == {"blocked"}
    assert reason(state, "gpu01") == "/venv is shared with gpu03: select all that share it (--hosts)"
    assert site.told == []


async def test_hosts_that_do_not_say_so_share_nothing() -> None:
    site = Site("gpu01", "gpu02")
    state, shelf = await site.play(steps(), variables={})
    assert set(outcomes(state).values()) == {"changed"}
    assert shelf.of("cohort_formed") == []


@pytest.mark.parametrize("dry", [False, True])
async def test_a_host_that_shares_it_and_works_with_something_else_must_not_use_it(dry: bool) -> None:
    site = Site("gpu01", "gpu02")
    site.hosts["gpu02"].on("disk.sound", None)
    state, _ = await site.play(steps(), dry=dry)
    assert outcomes(state) == {"gpu01": "pending" if dry else "changed", "gpu02": "ok"}
    site = Site("gpu01", "gpu02")
    site.hosts["gpu02"].on("disk.sound", None).on("environments.users", ["alice's python (pid 12)"])
    state, _ = await site.play(steps(), dry=dry)
    assert outcomes(state) == {"gpu01": "blocked", "gpu02": "ok"}
    assert "gpu02 shares /venv" in reason(state, "gpu01")
    assert "alice's python (pid 12) uses it there" in reason(state, "gpu01")
    assert site.told == []


@pytest.mark.parametrize("other", ["/", "/venv/lib"])
async def test_also_a_host_that_shares_a_part_of_it_or_what_it_lies_in_must_not_use_it(other: str) -> None:
    site = Site("gpu01", "gpu02")
    site.hosts["gpu02"].on("disk.sound", None).on("environments.users", ["alice's python (pid 12)"])
    state, _ = await site.play(steps(), gpu02={"shared_paths": [other]})
    assert outcomes(state) == {"gpu01": "blocked", "gpu02": "ok"}
    assert site.told == []


async def test_a_host_that_shares_it_and_cannot_be_reached_blocks_the_others() -> None:
    site = Site("gpu01", "gpu02")
    site.hosts["gpu02"].refuse()
    state, _ = await site.play(steps())
    assert outcomes(state) == {"gpu01": "blocked", "gpu02": "unreachable"}
    assert site.told == []


async def test_what_is_on_the_network_and_not_declared_is_not_changed() -> None:
    site = Site("gpu01")
    state, _ = await site.play(steps(filesystem="nfs4", source="nas01:/export"), variables={})
    assert outcomes(state) == {"gpu01": "blocked"}
    assert "/venv is on nfs4 (nas01:/export)" in reason(state, "gpu01")
    assert "`shared_paths: [/venv]`" in reason(state, "gpu01")
    assert site.told == []


async def test_two_storages_under_one_path_are_two() -> None:
    site = Site("gpu01", "gpu02")
    one, other = {"shared_paths": {"/venv": "nas01"}}, {"shared_paths": {"/venv": "nas02"}}
    state, shelf = await site.play(steps(), gpu01=one, gpu02=other)
    assert shelf.of("cohort_formed") == []
    assert set(outcomes(state).values()) == {"changed"}


async def test_a_host_that_fails_to_mend_it_leaves_all_as_they_were() -> None:
    site = Site("gpu01", "gpu02")

    def full(args: dict[str, Json], world: dict[str, Any]) -> None:
        raise HostError(Failure(kind="no_space", message="no space left"))

    site.hosts["gpu01"].on("disk.mend", full)
    state, _ = await site.play(steps())
    assert set(outcomes(state).values()) == {"rolled_back"}
    assert {host.world["job"] for host in site.hosts.values()} == {True}
    assert "mend" not in [what for _, what in site.told]
