"""What ties hosts to one another, and the cohorts that come of it."""

from __future__ import annotations

from typing import Any

import pytest

from fleetfix.action import Plan, Span
from fleetfix.cohorts import Cohort, Ties, form, neighbours, shared_of, shared_paths, ties_of, undeclared
from fleetfix.commands import Change, Folder
from fleetfix.errors import InventoryError
from fleetfix.inventory import Host


def host(name: str, **variables: Any) -> Host:
    return Host(name=name, address=name, vars=variables)


def span(id: str = "llama", nodes: int = 2, at: str = "gpu01:29500") -> Ties:
    return Ties(spans=(Span(id=id, at=at, nodes=nodes),))


def change(path: str, filesystem: str = "ext4", source: str = "/dev/sda1", inside: str = "") -> Change:
    folder = Folder(path=path, filesystem=filesystem, source=source, inside=inside or path)
    return Change(key="c", summary="c", do=(), risk="reversible", folders=(folder,))


def formed(ties: dict[str, Ties], *others: Host) -> tuple[Cohort, ...]:
    return form(ties, others)


def touched(one: Host, *changes: Change) -> Ties:
    return ties_of(one, [(True, Plan(changes=changes))])


def test_hosts_of_one_job_are_a_cohort_and_others_are_none() -> None:
    (one,) = formed({"gpu01": span(), "gpu02": span(), "gpu03": Ties()})
    assert (one.name, one.hosts, one.absent) == ("job llama (gpu01:29500)", ("gpu01", "gpu02"), "")
    assert one.why == "job llama (gpu01:29500) spans gpu[01-02]"


def test_two_jobs_of_one_name_that_meet_at_different_places_are_two() -> None:
    ties = {"gpu01": span(), "gpu02": span(), "gpu03": span(at="gpu03:1"), "gpu04": span(at="gpu03:1")}
    assert [one.hosts for one in formed(ties)] == [("gpu01", "gpu02"), ("gpu03", "gpu04")]


def test_ties_of_any_kind_chain_hosts_together() -> None:
    shares = {name: host(name, shared_paths=["/venv"]) for name in ("gpu02", "gpu03")}
    ties = {
        "gpu01": span(),
        "gpu02": Ties(span().spans, touched=touched(shares["gpu02"], change("/venv")).touched),
        "gpu03": touched(shares["gpu03"], change("/venv")),
        "gpu04": Ties(declared="llama3"),
        "gpu05": Ties(declared="llama3"),
    }
    found = formed(ties)
    assert [one.hosts for one in found] == [("gpu01", "gpu02", "gpu03"), ("gpu04", "gpu05")]
    assert found[0].shared == ("/venv",)
    assert found[1].declared


@pytest.mark.parametrize(
    ("ties", "others", "says"),
    [
        ({"gpu02": span()}, (), "gpu02 alone could be looked at; it meets at gpu01"),
        ({"gpu01": span(nodes=3), "gpu02": span(nodes=3)}, (), "spans 3 hosts, and gpu[01-02]"),
        ({"gpu01": Ties(declared="a")}, (host("gpu09", cohort="a"),), "cohort a has gpu09 too"),
        ({"gpu01": Ties(declared="a")}, (host("gpu09", cohort="b"),), None),
    ],
)
def test_a_cohort_says_who_is_not_there(ties: dict[str, Ties], others: Any, says: str | None) -> None:
    found = formed(ties, *others)
    assert (says is None and found == ()) or (says is not None and says in found[0].absent)


def test_one_storage_that_is_mounted_in_two_places_is_one_and_what_is_said_wrongly_is_noticed() -> None:
    a, b = host("gpu01", shared_paths={"/opt/venv": "nas"}), host("gpu02", shared_paths={"/mnt": "nas"})
    ties = {
        "gpu01": touched(a, change("/opt/venv", "nfs4", "nas01:/x", "/v")),
        "gpu02": touched(b, change("/mnt", "nfs4", "nas01:/x", "/v")),
    }
    (one,) = formed(ties)
    assert one.absent == ""
    ties["gpu02"] = touched(b, change("/mnt", "nfs4", "nas02:/y", "/v"))
    (one,) = formed(ties)
    assert "is not shared as `shared_paths` says" in one.absent
    ties["gpu02"] = touched(b, change("/mnt"))
    (one,) = formed(ties)
    assert "gpu02 has its own disk there" in one.absent


@pytest.mark.parametrize(
    ("path", "is_shared"),
    [("/shared", True), ("/shared/venv", True), ("/shared2", False), ("/", False), ("/opt", False)],
)
def test_what_lies_in_a_shared_folder_is_shared(path: str, is_shared: bool) -> None:
    one = host("gpu01", shared_paths=["/shared/"])
    assert bool(shared_of(one, change(path))) is is_shared
    assert (undeclared(one, change(path, "nfs4")) is None) is is_shared
    assert undeclared(one, change(path, "xfs")) is None


@pytest.mark.parametrize(
    ("other", "shares"),
    [
        (["/opt"], True),
        (["/opt/train/venv"], True),
        (["/opt/train/venv/lib"], True),
        (["/opt/./train//venv/"], True),
        (["/opt/data", "/opt/train/venv2"], False),
        ({"/mnt": "/opt/train"}, True),
    ],
)
def test_who_shares_a_part_of_a_folder_or_what_it_lies_in_shares_it(other: Any, shares: bool) -> None:
    for mine in (["/opt/train"], ["/opt/train/venv"]):
        one = host("gpu01", shared_paths=mine)
        found = formed(
            {"gpu01": touched(one, change("/opt/train/venv"))}, host("gpu09", shared_paths=other)
        )
        assert bool(found) is shares
        assert not found or "is shared with gpu09" in found[0].absent


@pytest.mark.parametrize("source", ["nas01:/", "nas01:/x/"])
def test_what_is_mounted_may_be_said_with_a_slash_at_its_end(source: str) -> None:
    (known,) = shared_paths(host("gpu01", shared_paths={"/venv/": source})).values()
    assert known == source[:-1]


def test_only_what_is_pending_touches_anything() -> None:
    one = host("gpu01", shared_paths=["/venv"])
    assert ties_of(one, [(False, Plan(changes=(change("/venv"),)))]).touched == ()


@pytest.mark.parametrize("value", ["/venv", ["venv"], {"/venv": 3}, [3], 7, {"": "x"}, ["/opt/../venv"]])
def test_shared_paths_that_are_none_are_refused_with_an_example(value: Any) -> None:
    with pytest.raises(InventoryError) as error:
        neighbours([host("gpu01", shared_paths=value)], [])
    assert "gpu01: shared_paths" in error.value.message
    assert "[/opt/train/venv]" in error.value.hint


@pytest.mark.parametrize("value", [3, "", ["a"], True])
def test_a_cohort_without_a_name_is_refused(value: Any) -> None:
    with pytest.raises(InventoryError, match="gpu01: cohort is no name"):
        neighbours([host("gpu01", cohort=value)], [])


def test_neighbours_are_those_that_are_not_selected_and_may_be_tied() -> None:
    hosts = [host("a", cohort="x"), host("b", shared_paths=["/x"]), host("c"), host("d", cohort="x")]
    assert [one.name for one in neighbours(hosts, hosts[:1])] == ["b", "d"]
    assert shared_paths(host("e")) == {}
