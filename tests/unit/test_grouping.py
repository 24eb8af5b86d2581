"""Folding: a thousand hosts that say alike are one line, and nothing is folded that differs in sense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.hostset import HostSet
from fleetfix.views.grouping import counted, fold, group


def shown(*said: tuple[str, str]) -> list[tuple[str, str]]:
    return [(str(one.hosts), one.text) for one in group(said)]


def test_equal_texts_are_one_line() -> None:
    assert shown(("gpu02", "a"), ("gpu01", "a"), ("gpu03", "b")) == [("gpu[01-02]", "a"), ("gpu03", "b")]


def test_what_begins_with_the_name_of_its_host_says_it_once() -> None:
    assert shown(("gpu01", "gpu01: no route")) == [("gpu01", "no route")]
    assert shown(("a", "a: no route"), ("b", "b: no route")) == [("a,b", "no route")]


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("stop torchrun (pid 11)", "stop torchrun (pid 912)", "stop torchrun (pid 11…912)"),
        ("stop pids 11, 12", "stop pids 7, 9", "stop pids …"),
        ("no answer from 10.0.0.1:22", "no answer from 10.0.0.2:22", "no answer from …"),
        ("checkpoint 12 min ago", "checkpoint 3 min ago", "checkpoint 3 min to 12 min ago"),
        ("checkpoint 2 h ago", "checkpoint 30 min ago", "checkpoint 30 min to 2 h ago"),
        ("free 900.0 MiB", "free 3.1 GiB", "free 900.0 MiB to 3.1 GiB"),
        ("now 12.8K tok/s", "now 12.5K tok/s", "now 12.5K to 12.8K tok/s"),
        ("no route to gpu01", "no route to gpu02", "no route to this host"),
    ],
)
def test_what_differs_everywhere_is_a_range_or_left_open(first: str, second: str, together: str) -> None:
    assert shown(("gpu01", first), ("gpu02", second)) == [("gpu[01-02]", together)]
    assert shown(("gpu01", first)) == [("gpu01", first)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("repair 86 files", "repair 85 files"),
        ("alice's job", "bob's job"),
        ("GPU 0 is lost", "GPU 1 is lost"),
        ("torch 2.7.0", "torch 2.7.1"),
        ("exit 1", "exit 137"),
    ],
)
def test_what_differs_in_sense_stays_apart(first: str, second: str) -> None:
    assert len(shown(("gpu01", first), ("gpu02", second))) == 2


def test_where_there_are_too_many_texts_those_that_differ_in_counts_alone_are_one() -> None:
    said = [
        (f"gpu{n:02}", f"repair {n * 400:,} files of torch 2.{n % 2}, GPU {n % 2} is lost")
        for n in range(8)
    ]
    assert len(group(said)) == len(group(said, most=8)) == 8
    assert [(str(one.hosts), one.text) for one in group(said, most=7)] == [
        ("gpu[00,02,04,06]", "repair 0 to 2,400 files of torch 2.0, GPU 0 is lost"),
        ("gpu[01,03,05,07]", "repair 400 to 2,800 files of torch 2.1, GPU 1 is lost"),
    ]


def test_a_host_name_inside_another_word_is_not_this_host() -> None:
    assert shown(("gpu1", "gpu10 holds it"), ("gpu2", "gpu10 holds it")) == [("gpu[1-2]", "gpu10 holds it")]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.text(alphabet="ab 1.:gpu\x00[]", max_size=12)), max_size=40)
)
def test_every_host_is_told_of_exactly_once_for_each_thing_it_said(said: list[tuple[int, str]]) -> None:
    pairs = {(f"gpu{number}", text) for number, text in said}
    told = [host for one in group(pairs) for host in one.hosts]
    assert set(told) == {host for host, _ in pairs}
    assert len(told) <= len(pairs)


def test_a_long_set_is_cut_between_terms_and_counted() -> None:
    scattered = HostSet(f"gpu{n:04}" for n in range(0, 1000, 3))
    text = fold(scattered, 40)
    assert len(text) <= 40
    assert text.endswith(",… (334 hosts)")
    assert fold(["gpu01", "gpu02"]) == "gpu[01-02]"
    many = HostSet(["a1", "b2", "c3", "d4", "e5", "f6", "g7", "h8"])
    assert fold(many, 22) == "a1,b2,c3,… (8 hosts)"


def test_the_number_of_hosts_stands_beside_a_folded_set() -> None:
    assert counted(HostSet(["gpu01"])) == "gpu01"
    assert counted(HostSet(["gpu01", "gpu02"])) == "gpu[01-02] (2)"
