"""The main job on sixteen hosts: who is touched, in which order, and what holds the rest.

The first night of ten is here too; the other nine are in `test_ten_nights`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fleet import independent
from tests.fleet.conftest import Make, Site

pytestmark = pytest.mark.fleet

HOSTS = tuple(f"gpu{n:02}" for n in range(1, 17))
CONTAMINATED = ("gpu03", "gpu07", "gpu12")
TYPED = ("run", "purge-cu13", "--hosts", "gpu[01-16]", "-i", "lab", "--yes")


@pytest.fixture(scope="module")
def fleet(shared_site: Make) -> Site:
    """Sixteen hosts, three of them contaminated; the lab is where `-i lab` looks for it."""
    return shared_site("gpu[01-16]", contaminated=list(CONTAMINATED))


def contaminate(fleet: Site, *hosts: str) -> None:
    """Leave CUDA 13 on hosts again, with training that runs beside it."""

    def leave(host: str) -> None:
        fleet.lab.break_host(host, "naive_purge")
        fleet.lab.heal(host)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, hosts))
    for host in hosts:
        fleet.wait_for_speed(host, 10_000, 17_000)


def foreign(fleet: Site, host: str) -> list[str]:
    """The wheels of CUDA 13 in a host's environment that nothing there requires."""
    found = independent.distributions(fleet.pid(host))
    return [name for name in found if name.endswith("cu13") and name != "nixl-cu13"]


def test_night_1_sixteen_single_jobs_three_of_them_contaminated(fleet: Site) -> None:
    healthy = [host for host in HOSTS if host not in CONTAMINATED]
    before = {host: (fleet.job(host), fleet.files(host)) for host in healthy}
    ran = fleet(*TYPED, "--json", "--batch", "100%")
    expected = {host: "changed" if host in CONTAMINATED else "ok" for host in HOSTS}
    assert (ran.exit, ran.outcomes) == (0, expected), ran.told
    assert {host: (fleet.job(host), fleet.files(host)) for host in healthy} == before
    assert {event["host"] for event in ran.of("change_started")} == set(CONTAMINATED)
    waves = [(event["name"], event["hosts"]) for event in ran.of("wave_started")]
    assert waves == [("canary", [CONTAMINATED[0]]), ("batch 1", list(CONTAMINATED[1:]))]
    for host in CONTAMINATED:
        assert (foreign(fleet, host), independent.damaged(fleet.pid(host))) == ([], [])
        assert independent.torch_imports(fleet.pid(host)) == "ok 12.8"


def test_the_third_host_that_fails_alike_trips_the_breaker_which_holds_all_others(fleet: Site) -> None:
    good, bad, held = HOSTS[0], HOSTS[1:4], CONTAMINATED[1:]
    contaminate(fleet, good, *bad, *held)
    for host in bad:
        fleet.lab.break_host(host, "load_fails")
    before = {host: (fleet.job(host), fleet.files(host)) for host in held}
    ran = fleet(*TYPED, "--json", "--batch", "3", "--max-failures", "100%")
    expected = {good: "changed", **dict.fromkeys(bad, "rolled_back"), **dict.fromkeys(held, "not_started")}
    assert (ran.exit, ran.outcomes) == (3, dict.fromkeys(HOSTS, "ok") | expected), ran.told
    (tripped,) = ran.of("breaker_tripped")
    assert tripped["reason"].startswith("3 hosts failed alike: gpu[02-04] at loads: ")
    assert {host: (fleet.job(host), fleet.files(host)) for host in held} == before
    for host in bad:
        assert fleet.job(host), "its training runs again"
        fleet.lab.heal(host)
    refused = fleet(*TYPED)
    assert (refused.exit, refused.out) == (3, "")
    assert ran.run_id in refused.err
    assert "3 hosts failed alike" in refused.err
    assert "fleetfix breaker reset" in refused.err
    assert fleet("plan", "purge-cu13", "--hosts", "gpu07", "-i", "lab").exit == 0
    assert "3 hosts failed alike" in fleet("breaker", "status").out
    assert fleet("breaker", "reset", "-i", "lab", "--yes", "--reason", "the loader is mended").exit == 0
    again = fleet(*TYPED[:3], "gpu16", *TYPED[4:], "--json")
    assert (again.exit, again.outcomes) == (0, {"gpu16": "ok"}), again.told
