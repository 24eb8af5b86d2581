"""HostSet: what a pattern means, how a set is written, and where an error points."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.errors import PatternError
from fleetfix.hostset import HostSet, natural

FLEET = HostSet.parse("gpu[01-16],cpu1,2001:db8::7")
GROUPS = {
    "train": HostSet.parse("gpu[01-08]"),
    "rack1": HostSet.parse("gpu[01-02]"),
    "rack2": HostSet.parse("gpu03"),
}


def names(pattern: str) -> list[str]:
    return list(HostSet.parse(pattern))


def chosen(pattern: str) -> str:
    return str(HostSet.parse(pattern, known=FLEET, groups=GROUPS))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("gpu7", ["gpu7"]),
        ("gpu[19]", ["gpu19"]),
        ("gpu[01-03]", ["gpu01", "gpu02", "gpu03"]),
        ("gpu[01:03]", ["gpu01", "gpu02", "gpu03"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("gpu[0-30/10]", ["gpu0", "gpu10", "gpu20", "gpu30"]),
        ("gpu[0:30:10]", ["gpu0", "gpu10", "gpu20", "gpu30"]),
        ("gpu[1-3],gpu[2-4],gpu3", ["gpu1", "gpu2", "gpu3", "gpu4"]),
        ("gpu[1,3]-ib[0-1]", ["gpu1-ib0", "gpu1-ib1", "gpu3-ib0", "gpu3-ib1"]),
        ("a b , c", ["a", "b", "c"]),
        ("a,b!b", ["a"]),
        ("a,b&b,c", ["b", "c"]),
        ("a,b^b,c", ["a", "c"]),
        ("0123", ["0123"]),
        ("0123[0-2]L6", ["01230L6", "01231L6", "01232L6"]),
        ("10.0.0.[1-4]", ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]),
        ("fe80::1", ["fe80::1"]),
        ("[2001:db8::1]", ["2001:db8::1"]),
        ("2001:db8::[1-2]", ["2001:db8::1", "2001:db8::2"]),
        ("", []),
        ("  ", []),
    ],
)
def test_a_pattern_names_these_hosts(pattern: str, expected: list[str]) -> None:
    assert names(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", "2001:db8::7,cpu1,gpu[01-16]"),
        ("gpu*", "gpu[01-16]"),
        ("gpu0?", "gpu[01-09]"),
        ("gpu[0-1]*", "gpu[01-16]"),
        ("@train", "gpu[01-08]"),
        ("@rack[1-2]", "gpu[01-03]"),
        ("@train!gpu[02-07]", "gpu[01,08]"),
        ("@train & gpu[07-12]", "gpu[07-08]"),
        ("gpu*!@train", "gpu[09-16]"),
    ],
)
def test_known_hosts_and_groups_give_globs_and_names_their_meaning(pattern: str, expected: str) -> None:
    assert chosen(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "column", "message"),
    [
        ("gpu[01", 3, "this bracket is never closed"),
        ("gpu[1-2,", 3, "this bracket is never closed"),
        ("gpu]", 3, "this bracket was never opened"),
        ("gpu[[01]]", 4, "a bracket inside brackets"),
        ("gpu[]", 4, "a number is missing"),
        ("gpu[01,]", 7, "a number is missing"),
        ("gpu[45-33]", 4, "the range 45-33 runs backwards"),
        ("gpu[1-]", 4, "'1-' is not a range"),
        ("gpu[-3]", 4, "'-3' is not a range"),
        ("gpu[36-40-44]", 4, "'36-40-44' is not a range"),
        ("gpu[a-f]", 4, "'a-f' is not a range"),
        ("gpu[1-016]", 4, "the ends of 1-016 are padded differently"),
        ("gpu[001-16]", 4, "the ends of 001-16 are padded differently"),
        ("gpu[1-9/0]", 4, "a step of 0 leads nowhere"),
        ("gpu[1-99999999]", 4, "1-99999999 names more than 200000 hosts"),
        ("a[0-999]b[0-999]", 0, "more than 200000 names"),
        ("gpu01,", 5, "a name is missing after ','"),
        ("gpu01,,gpu02", 6, "a name is missing before ','"),
        ("!gpu01", 0, "a name is missing before '!'"),
        ("gpu01:!gpu02", 5, "':' does not join patterns"),
        ("-oProxyCommand=x", 0, "'-oProxyCommand=x' is not a host name"),
        ("gpu01;reboot", 0, "'gpu01;reboot' is not a host name"),
        ("gpu\u0661", 0, "'gpu\u0661' is not a host name"),
        ("[2001:db8::1]:2222", 0, "a port does not belong in a pattern"),
        ("nosuch*", 0, "no host matches nosuch*"),
        ("gpu01,gup02", 6, "unknown host gup02"),
        ("gpu01,gpu[15-18]", 6, "unknown hosts gpu[17-18]"),
        ("cpu1,@tain", 5, "unknown group @tain"),
        ("@", 0, "unknown group @"),
        ("all", 0, "unknown host all"),
    ],
)
def test_an_error_says_what_and_where(pattern: str, column: int, message: str) -> None:
    with pytest.raises(PatternError) as caught:
        chosen(pattern)
    assert (caught.value.message, caught.value.column) == (message, column)
    assert str(caught.value).splitlines()[-1].index("^") == column + 2


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("gup02", "did you mean gpu02?"),
        ("@trian", "did you mean @train?"),
        ("all", "* is every host"),
        ("gpu01:gpu02", "write a comma between names"),
        ("GPU01", "did you mean gpu01?"),
    ],
)
def test_an_unknown_name_comes_with_the_near_one(pattern: str, hint: str) -> None:
    with pytest.raises(PatternError) as caught:
        chosen(pattern)
    assert caught.value.hint == hint


def test_a_glob_or_group_without_an_inventory_is_an_error() -> None:
    for pattern in ("gpu*", "@train"):
        with pytest.raises(PatternError):
            HostSet.parse(pattern)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("gpu10,gpu9,gpu1", "gpu[1,9-10]"),
        ("gpu[001-003],gpu07,gpu1", "gpu[1,07,001-003]"),
        ("r[1-2]n[01-04]", "r[1-2]n[01-04]"),
        ("gpu2,cpu10,cpu9", "cpu[9-10],gpu2"),
        ("gpu01.a.example,gpu02.a.example", "gpu[01-02].a.example"),
    ],
)
def test_a_set_is_written_folded(pattern: str, expected: str) -> None:
    assert str(HostSet.parse(pattern)) == expected


def test_the_natural_order_counts() -> None:
    assert sorted(["gpu10", "gpu9", "gpu1", "cpu2"], key=natural) == ["cpu2", "gpu1", "gpu9", "gpu10"]


host_names = st.from_regex(
    r"[a-z]{0,2}[0-9]{1,3}([a-z-]{1,2}[0-9]{1,2})?", fullmatch=True
) | st.sampled_from(["fe80::1", "2001:db8::10", "10.0.0.7", "gpu", "0123", "x_y.z"])
host_sets = st.frozensets(host_names, max_size=30).map(HostSet)


@given(host_sets)
def test_what_is_written_reads_back_as_the_same_set(hosts: HostSet) -> None:
    assert HostSet.parse(str(hosts)) == hosts
    assert len(list(hosts)) == len(hosts)


@given(host_sets, host_sets)
def test_algebra_is_that_of_sets(one: HostSet, other: HostSet) -> None:
    assert (one | other).names == one.names | other.names
    assert (one & other).names == one.names & other.names
    assert (one - other).names == one.names - other.names
    assert (one ^ other).names == one.names ^ other.names
    if one and other:
        for sign, result in {
            ",": one | other,
            "&": one & other,
            "!": one - other,
            "^": one ^ other,
        }.items():
            groups = {"a": one, "b": other}
            assert HostSet.parse(f"@a{sign}@b", groups=groups) == result


@given(st.text(alphabet="gpu01[]-,:!&^@*? ./%x", max_size=16))
def test_any_text_is_a_set_or_a_pattern_error(text: str) -> None:
    try:
        hosts = HostSet.parse(text, known=FLEET, groups=GROUPS)
    except PatternError as error:
        place = error.column
        hosts = HostSet()
    else:
        place = 0
    assert hosts <= FLEET
    assert 0 <= place <= len(text)


def test_the_order_and_the_folding_of_a_large_fleet_are_quick() -> None:
    hosts = HostSet.parse("r[1-50]n[001-100]")
    assert len(list(hosts)) == 5000
    assert HostSet.parse(str(hosts)) == hosts


def test_clustershell_is_neither_loaded_early_nor_configured() -> None:
    code = (
        "import sys\n"
        "from fleetfix.hostset import HostSet\n"
        "hosts = HostSet.parse('gpu[01-03]')\n"
        "assert 'ClusterShell' not in sys.modules\n"
        "assert str(hosts) == 'gpu[01-03]'\n"
        "assert 'ClusterShell.Defaults' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
