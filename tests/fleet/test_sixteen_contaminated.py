"""The main job on sixteen hosts that all need it, as it is typed: the longest run of all."""

from __future__ import annotations

import pytest

from tests.fleet import independent
from tests.fleet.conftest import Make

pytestmark = pytest.mark.fleet

HOSTS = tuple(f"gpu{n:02}" for n in range(1, 17))


def test_sixteen_contaminated_hosts_are_all_mended_and_the_exit_code_is_0(site: Make) -> None:
    fleet = site("gpu[01-16]")
    old = {host: fleet.job(host) for host in HOSTS}
    ran = fleet("run", "purge-cu13", "--hosts", "gpu[01-16]", "-i", "lab", "--yes")
    assert ran.exit == 0, ran.out + ran.err
    assert "changed          gpu[01-16] (16)" in ran.out
    assert ": 16 changed" in ran.out.splitlines()[-1]
    for host in HOSTS:
        pid = fleet.pid(host)
        assert [name for name in independent.distributions(pid) if name.endswith("cu13")] == ["nixl-cu13"]
        assert independent.damaged(pid) == []
        assert independent.torch_imports(pid) == "ok 12.8"
        new = fleet.job(host)
        assert new.pid != old[host].pid
        assert (new.argv, new.environ, new.cwd) == (old[host].argv, old[host].environ, old[host].cwd)
        assert fleet.wait_for_speed(host, 19_000, 21_000)
