"""The main job on sixteen hosts, as it is typed: who is touched, in which order, and what holds the rest.

The first night of ten is here too; the other nine are in `test_ten_nights`.
"""

from __future__ import annotations

import pytest

from tests.fleet import independent
from tests.fleet.conftest import Make, Ran, Site

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
    for host in hosts:
        fleet.lab.break_host(host, "naive_purge")
        fleet.lab.heal(host)
    for host in hosts:
        fleet.wait_for_speed(host, 10_000, 17_000)


def foreign(fleet: Site, host: str) -> list[str]:
    """The wheels of CUDA 13 in a host's environment that nothing there requires."""
    found = independent.distributions(fleet.pid(host))
    return [name for name in found if name.endswith("cu13") and name != "nixl-cu13"]


def waves(ran: Ran) -> list[tuple[str, list[str]]]:
    return [(event["name"], event["hosts"]) for event in ran.of("wave_started")]


def test_night_1_sixteen_single_jobs_three_of_them_contaminated(fleet: Site) -> None:
    healthy = [host for host in HOSTS if host not in CONTAMINATED]
    before = {host: (fleet.job(host), fleet.files(host)) for host in healthy}
    ran = fleet(*TYPED, "--json")
    expected = {host: "changed" if host in CONTAMINATED else "ok" for host in HOSTS}
    assert (ran.exit, ran.outcomes) == (0, expected), ran.told
    assert {host: (fleet.job(host), fleet.files(host)) for host in healthy} == before
    assert {event["host"] for event in ran.of("change_started")} == set(CONTAMINATED)
    (canary, *batches) = waves(ran)
    assert canary == ("canary", [CONTAMINATED[0]])
    assert [host for _, hosts in batches for host in hosts] == list(CONTAMINATED[1:])
    for host in CONTAMINATED:
        assert (foreign(fleet, host), independent.damaged(fleet.pid(host))) == ([], [])
        assert independent.torch_imports(fleet.pid(host)) == "ok 12.8"


def test_sixteen_contaminated_hosts_are_all_mended_and_the_exit_code_is_0(fleet: Site) -> None:
    contaminate(fleet, *HOSTS)
    old = {host: fleet.job(host) for host in HOSTS}
    ran = fleet(*TYPED)
    assert ran.exit == 0, ran.out + ran.err
    assert "changed          gpu[01-16] (16)" in ran.out
    assert ": 16 changed" in ran.out.splitlines()[-1]
    for host in HOSTS:
        assert (foreign(fleet, host), independent.damaged(fleet.pid(host))) == ([], [])
        new = fleet.job(host)
        assert new.pid != old[host].pid
        assert (new.argv, new.environ, new.cwd) == (old[host].argv, old[host].environ, old[host].cwd)
        assert fleet.wait_for_speed(host, 19_000, 21_000)
