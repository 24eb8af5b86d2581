"""A job over two nodes on the lab: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fleetfix.lab.template import FIRST_STEP
from tests.fleet import independent
from tests.fleet.conftest import Site

pytestmark = pytest.mark.fleet

Make = Callable[..., Site]
BOTH = "gpu[01-02]"
HOSTS = ("gpu01", "gpu02")


def test_a_job_over_two_nodes_is_mended_as_one_or_left_as_it_was(site: Make) -> None:
    lab = site(BOTH, spanning=HOSTS)
    for host in HOSTS:
        lab.wait_for_speed(host, 12_000, 14_000)
    before = {host: lab.job(host) for host in HOSTS}

    # One of the two alone: the other is asked for, and nothing is touched.
    ran = lab.run("gpu01")
    assert ran.outcomes == {"gpu01": "blocked"}, ran.told
    assert "spans 2 hosts" in ran.finished("gpu01")["reason"]
    assert {host: lab.job(host) for host in HOSTS} == before

    # One of the two cannot be mended: both go back, and train together again.
    files = {host: lab.files(host) for host in HOSTS}
    lab.lab.break_host("gpu02", "load_fails")
    ran = lab.run(BOTH)
    assert ran.outcomes == dict.fromkeys(HOSTS, "rolled_back"), ran.told
    assert ran.exit == 3
    assert ran.finished("gpu02")["failure"]["kind"] == "verify_failed"
    assert "gpu02" in ran.finished("gpu01")["reason"]
    lab.lab.heal("gpu02")
    for host in HOSTS:
        lab.wait_for_speed(host, 12_000, 14_000)
        assert lab.job(host).argv == before[host].argv
        assert min(independent.first_steps(lab.pid(host))) >= FIRST_STEP
    assert {host: lab.files(host) for host in HOSTS} == files

    # And both are mended, by one slot: captured before any is stopped, one first, started at one moment.
    ran = lab.run(BOTH, "--forks", "1")
    assert (ran.exit, ran.outcomes) == (0, dict.fromkeys(HOSTS, "changed")), ran.told
    made = [(e["host"], e["shown"]["summary"].split()[0]) for e in ran.of("change_started")]
    captured = [made.index((host, "capture")) for host in HOSTS]
    stopped = [made.index((host, "stop")) for host in HOSTS]
    repaired = [made.index((host, "repair")) for host in HOSTS]
    assert max(captured) < min(stopped)
    assert max(stopped) < repaired[0] < repaired[1]
    for host in HOSTS:
        assert independent.damaged(lab.pid(host)) == []
        assert lab.job(host).argv == before[host].argv
        assert lab.wait_for_speed(host, 19_000, 21_000) > 19_000
