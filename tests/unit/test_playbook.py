"""Playbook: loaded means valid, and what is wrong is said with its line before any connection."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fleetfix import library
from fleetfix.actions.command import CheckFacts
from fleetfix.actions.shell import Shell
from fleetfix.actions.throughput import Throughput
from fleetfix.commands import Json
from fleetfix.documents import value_of
from fleetfix.errors import DocumentError, PlaybookError
from fleetfix.foreign import STEP_WORDS
from fleetfix.inventory import Host
from fleetfix.playbook import Step, lint, load, read

SHELL = "shell: {run: 'true', always: true}"


def host(name: str = "gpu01", **variables: Json) -> Host:
    return Host(name=name, address=f"{name}.example", user="ml", vars=variables)


def complaints(text: str) -> tuple[str, ...]:
    with pytest.raises(DocumentError) as caught:
        read(text, "p.yaml")
    return caught.value.complaints


def steps(body: str, head: str = "") -> str:
    return f"name: p\n{head}steps:\n{body}"


def bound(text: str, at: Host | None = None, **settings: Json) -> tuple[Step, ...]:
    return read(text, "p.yaml").bind(at or host(), settings)


def script_of(step: Step) -> str:
    assert isinstance(step.act, Shell)
    return step.act.run


# -- what is read ------------------------------------------------------------------------------------


def test_the_key_that_names_an_action_is_its_tag_and_the_rest_says_how_it_is_run() -> None:
    body = (
        f"  - {{id: a, {SHELL}}}\n"
        "  - id: b\n    name: wait for it\n    throughput: {of: job}\n    when_changed: a\n"
        "    within: 5m\n    every: 10\n    consecutive: 3\n    retries: 2\n    delay: 1s\n"
    )
    first, second = bound(steps(body))
    assert isinstance(first.act, Shell)
    assert isinstance(second.act, Throughput)
    assert (second.title, first.title) == ("wait for it", "a")
    assert (second.within, second.every, second.consecutive) == (300.0, 10.0, 3)
    assert (second.retries, second.delay, second.when_changed) == (2, 1.0, ("a",))


def test_a_failure_rolls_back_but_a_speed_that_is_not_back_stops() -> None:
    first, second, third = bound(
        steps(
            f"  - {{id: a, {SHELL}}}\n"
            "  - {id: b, throughput: {of: job}}\n"
            f"  - {{id: c, {SHELL}, on_failure: continue}}\n"
        )
    )
    assert [first.on_failure, second.on_failure, third.on_failure] == ["rollback", "stop", "continue"]


def test_the_policy_is_read_with_batch_as_one_or_many() -> None:
    policy = read(
        steps(f"  - {{id: a, {SHELL}}}", "policy: {canary: 2, batch: 10%, soak: 5m}\n"), "p"
    ).policy
    assert (policy.canary, [str(share) for share in policy.batch], policy.soak) == (2, ["10%"], 300.0)


def test_source_and_digest_say_which_text_it_was(write: Any) -> None:
    path = write("p.yaml", steps(f"  - {{id: a, {SHELL}}}"))
    one = load(str(path))
    path.write_text(path.read_text() + "# edited\n")
    assert one.source == str(path)
    assert one.digest != load(str(path)).digest
    assert len(one.digest) == 64


# -- substitution ------------------------------------------------------------------------------------


def test_stronger_values_win_defaults_then_host_then_set() -> None:
    text = steps(
        "  - {id: a, shell: {run: '${{ vars.x }} ${{ vars.y }} ${{ vars.z }}', always: true}}",
        "vars: {x: 1, y: 1, z: 1}\n",
    )
    step = bound(text, host(y=2, z=2, unasked=9), z=3)[0]
    assert script_of(step) == "1 2 3"


def test_a_whole_value_keeps_its_type_and_inside_text_it_is_as_written() -> None:
    text = """\
name: p
vars: {rate: null, only: true, version: 1.10}
steps:
  - id: a
    throughput: {of: job, at_least: "${{ vars.rate }}", record_only: "${{ vars.only }}"}
  - id: b
    shell: {run: "v=${{ vars.version }} ${{ vars.only }}", always: true, env: {V: "${{ vars.version }}"}}
"""
    first, second = bound(text)
    assert isinstance(first.act, Throughput)
    assert isinstance(second.act, Shell)
    assert (first.act.at_least, first.act.record_only) == (None, True)
    assert (second.act.run, second.act.env) == ("v=1.10 true", {"V": "1.10"})


def test_a_value_of_the_command_line_is_text_where_text_is_wanted() -> None:
    text = steps("  - {id: a, shell: {run: x, always: true, env: {V: '${{ vars.v }}'}}}", "vars: {v: a}\n")
    step = bound(text, v=value_of("0.10"))[0]
    assert isinstance(step.act, Shell)
    assert step.act.env == {"V": "0.10"}


def test_host_reads_anything_of_the_host() -> None:
    script = "${{ host.name }} ${{ host.address }} ${{ host.user }} ${{ host.rack }}"
    text = steps(f"  - {{id: a, shell: {{run: '{script}', always: true}}}}")
    assert script_of(bound(text, host(rack=7))[0]) == "gpu01 gpu01.example ml 7"


@pytest.mark.parametrize(
    "literal", ["{{.Names}}", "$VAR ${VAR} $(id)", "%s %%", "{{ vars.x }}", "#{x}", "$ {{ x }}"]
)
def test_everything_else_is_literal(literal: str) -> None:
    text = steps(f"  - {{id: a, shell: {{run: '{literal}', always: true}}}}", "vars: {x: 1}\n")
    assert script_of(bound(text)[0]) == literal


def test_a_value_is_never_substituted_again() -> None:
    text = steps("  - {id: a, shell: {run: '${{ vars.x }}', always: true}}", "vars: {x: 1, y: secret}\n")
    assert script_of(bound(text, x="${{ vars.y }}")[0]) == "${{ vars.y }}"


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("${{ vars.venvv }}", "p.yaml:4: there is no variable 'venvv', did you mean venv?"),
        ("${{ vars.other }}", "p.yaml:4: there is no variable 'other', declare it under vars"),
        (
            "${{ env.HOME }}",
            "p.yaml:4: ${{ env.HOME }} is not read: only vars.NAME, host.NAME and secrets.NAME are",
        ),
        ("${{ vars.venv | upper }}", "p.yaml:4: ${{ vars.venv | upper }} is not read"),
        ("${{ vars.venv", "p.yaml:4: a ${{ is never closed by }}"),
    ],
)
def test_a_wrong_reference_does_not_load(reference: str, complaint: str) -> None:
    text = steps(f"  - {{id: a, shell: {{run: '{reference}', always: true}}}}", "vars: {venv: x}\n")
    assert complaints(text)[0].startswith(complaint)


@pytest.mark.parametrize(
    ("script", "variables", "complaint"),
    [
        ("${{ host.venvv }}", {"venv": 1}, "p.yaml:4: gpu01 has no 'venvv', did you mean venv?"),
        (
            "a ${{ vars.x }}",
            {},
            (
                "p.yaml:4: only a single value fits inside text, and vars.x is nothing"
                " (vars.x is null on gpu01)"
            ),
        ),
        (
            "a ${{ vars.x }}",
            {"x": [1]},
            "p.yaml:4: only a single value fits inside text, and vars.x is a list (vars.x is [1] on gpu01)",
        ),
        (
            "${{ vars.x }}",
            {"x": [1]},
            "p.yaml:4: shell: run: wanted text, not a list (vars.x is [1] on gpu01)",
        ),
    ],
)
def test_what_a_host_brings_is_checked_before_any_connection(
    script: str, variables: dict[str, Json], complaint: str
) -> None:
    playbook = read(
        steps(f"  - {{id: a, shell: {{run: '{script}', always: true}}}}", "vars: {x: null}\n"), "p.yaml"
    )
    with pytest.raises(DocumentError) as caught:
        playbook.bind(host(**variables), {})
    assert caught.value.complaints == (complaint,)


def test_an_unknown_setting_is_an_error_with_the_near_name() -> None:
    playbook = read(steps(f"  - {{id: a, {SHELL}}}", "vars: {cuda: '12'}\n"), "p.yaml")
    with pytest.raises(PlaybookError) as caught:
        playbook.bind(host(), {"cdua": "13"})
    assert (caught.value.message, caught.value.hint) == ("p has no variable 'cdua'", "did you mean cuda?")


def test_hosts_with_equal_values_share_their_steps_and_others_do_not() -> None:
    playbook = read(
        steps(
            "  - {id: a, shell: {run: x, always: true, env: {V: '${{ vars.v }}'}}}",
            "vars: {v: x, w: x}\n",
        ),
        "p.yaml",
    )
    plain = playbook.bind(host("gpu01"), {})
    assert playbook.bind(host("gpu02", w="unused"), {}) is plain
    one, other = (playbook.bind(host(v=value_of(text)), {})[0].act for text in ("1.1", "1.10"))
    assert one != other


def test_a_thousand_hosts_are_bound_at_once() -> None:
    playbook = load("purge-cu13")
    playbook.bind(host(), {})
    start = time.process_time()
    for number in range(1000):
        playbook.bind(host(f"gpu{number}", venv=f"/opt/venv{number % 4}"), {})
    assert time.process_time() - start < 1.0


# -- what does not load ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (f"  - {{{SHELL}}}", "p.yaml:3: 'id' is missing"),
        (f"  - {{id: A b, {SHELL}}}", "p.yaml:3: id: wanted an id of small letters"),
        ("  - {id: a}", "p.yaml:3: no action: one of the keys must be one of gpu_processes"),
        ("  - {id: a, shel: {}}", "p.yaml:3: unknown key 'shel', did you mean shell?"),
        (
            f"  - {{id: a, {SHELL}, gpu_idle: {{}}}}",
            "p.yaml:3: one step, one action: here are shell and gpu_idle",
        ),
        ("  - just text", "p.yaml:3: a step is a mapping"),
        (f"  - {{id: a, {SHELL}}}\n  - {{id: a, {SHELL}}}", "p.yaml:4: there is a step 'a' already"),
        (f"  - {{id: a, {SHELL}, retreis: 3}}", "p.yaml:3: unknown key 'retreis', did you mean retries?"),
        (f"  - {{id: a, {SHELL}, retries: true}}", "p.yaml:3: retries: wanted a whole number, not 'true'"),
        (f"  - {{id: a, {SHELL}, within: soon}}", "p.yaml:3: within: wanted a time such as 60s"),
        (
            f"  - {{id: a, {SHELL}, on_failure: retry}}",
            "p.yaml:3: on_failure: wanted 'rollback', 'stop' or 'continue'",
        ),
        (
            "  - id: a\n    gpu_idle:\n      memory_bellow: 1",
            "p.yaml:5: gpu_idle: unknown key 'memory_bellow', did you mean",
        ),
        (
            "  - id: a\n    gpu_idle: {memory_below: lots}",
            "p.yaml:4: gpu_idle: memory_below: wanted a size such as 64MiB",
        ),
        ("  - {id: a, shell: {run: x}}", "p.yaml:3: shell: nothing says when this is needed"),
        (
            f"  - {{id: a, {SHELL}, when_pending: b}}\n  - {{id: c, {SHELL}}}",
            "p.yaml:3: when_pending: there is no step 'b'",
        ),
        (
            f"  - {{id: a, {SHELL}}}\n  - {{id: b, {SHELL}, when_pending: a}}",
            "p.yaml:4: when_pending: 'a' is not a later step",
        ),
        (
            f"  - {{id: a, {SHELL}, when_changed: b}}\n  - {{id: b, {SHELL}}}",
            "p.yaml:3: when_changed: 'b' is not an earlier",
        ),
        (
            f"  - {{id: a, {SHELL}, when_pending: b}}\n  - {{id: b, {SHELL}, when_changed: a}}",
            "p.yaml:3: the steps a, b wait for one another",
        ),
    ],
)
def test_a_wrong_step_does_not_load(body: str, complaint: str) -> None:
    assert complaints(steps(body))[0].startswith(complaint)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name: p\n", "p.yaml:1: 'steps' is missing"),
        ("name: p\nsteps: []\n", "p.yaml:2: steps: wanted a list of at least 1, not an empty list"),
        (f"steps:\n  - {{id: a, {SHELL}}}", "p.yaml:1: 'name' is missing"),
        (
            f"name: My Book\nsteps:\n  - {{id: a, {SHELL}}}",
            "p.yaml:1: name: wanted a name of small letters",
        ),
        (
            f"name: p\nvars: {{a b: 1}}\nsteps:\n  - {{id: a, {SHELL}}}",
            "p.yaml:2: 'a b' cannot name a variable",
        ),
        (
            f"name: p\nvars: {{a: 1, b: '${{{{ vars.a }}}}'}}\nsteps:\n  - {{id: a, {SHELL}}}",
            "p.yaml:2: a default cannot",
        ),
        ("- hosts: all\n  tasks: []\n", "p.yaml:1: this is a list, as Ansible has it"),
        ("name: p\nsteps:\n\t- x", "p.yaml:3: a tab where YAML wants spaces"),
        ("", "p.yaml:1: the file is empty"),
    ],
)
def test_a_wrong_file_does_not_load(text: str, complaint: str) -> None:
    assert complaints(text)[0].startswith(complaint)


@pytest.mark.parametrize("word", sorted(STEP_WORDS))
def test_a_word_of_another_tool_is_answered_with_ours(word: str) -> None:
    text = steps(f"  - {{id: a, {SHELL}, {word}: x}}")
    assert complaints(text) == (f"p.yaml:3: {word!r} is not a word of this language: {STEP_WORDS[word]}",)


def test_serial_is_answered_at_the_top_and_in_the_policy_too() -> None:
    found = complaints(steps(f"  - {{id: a, {SHELL}}}", "serial: 3\npolicy: {serial: 3}\n"))
    assert ["policy: {canary: 1, batch: [10%, 25%]}" in line for line in found] == [True, True]


def test_all_complaints_come_at_once_in_order() -> None:
    body = (
        "  - {id: a, when: x, gpu_idle: {memory_below: x}}\n  - {id: b, shel: {}}\n  - {id: c, "
        + SHELL
        + ", within: x}\n"
    )
    found = complaints(steps(body, "summry: x\npolicy: {canary: x}\n"))
    assert [line.split(": ")[0] for line in found] == [f"p.yaml:{line}" for line in (2, 3, 5, 5, 6, 7)]


# -- where playbooks are found ------------------------------------------------------------------------


def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def test_a_bare_name_is_a_shipped_or_a_configured_playbook(write: Any, tmp_path: Path) -> None:
    write(".config/fleetfix/playbooks/mine.yaml", steps(f"  - {{id: a, {SHELL}}}"))
    assert load("purge-cu13", env=home(tmp_path)).name == "purge-cu13"
    assert load("mine", env=home(tmp_path)).source == str(tmp_path / ".config/fleetfix/playbooks/mine.yaml")
    assert {"mine", "purge-cu13"} <= set(library.available(home(tmp_path)))


def test_a_name_that_exists_twice_is_an_error(write: Any, tmp_path: Path) -> None:
    write(".config/fleetfix/playbooks/purge-cu13.yaml", "name: evil")
    with pytest.raises(PlaybookError, match="two playbooks are named purge-cu13"):
        load("purge-cu13", env=home(tmp_path))


def test_a_file_in_the_current_folder_never_takes_the_place_of_a_name(write: Any, tmp_path: Path) -> None:
    write("purge-cu13.yaml", steps(f"  - {{id: a, {SHELL}}}"))
    assert load("purge-cu13", env=home(tmp_path), cwd=tmp_path).source != str(tmp_path / "purge-cu13.yaml")
    assert load("purge-cu13.yaml", env=home(tmp_path), cwd=tmp_path).name == "p"


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("purge-cu12", "there is no playbook 'purge-cu12'", "did you mean purge-cu13?"),
        ("./nothing.yaml", "there is no file ./nothing.yaml", "looked for in {place}"),
    ],
)
def test_a_playbook_that_is_not_there_is_one_line(
    tmp_path: Path, name: str, message: str, hint: str
) -> None:
    with pytest.raises(PlaybookError) as caught:
        load(name, env=home(tmp_path), cwd=tmp_path)
    assert (caught.value.message, caught.value.hint) == (message, hint.format(place=tmp_path))


def test_lint_returns_what_loading_raises(write: Any, tmp_path: Path) -> None:
    path = write("p.yaml", "name: p\n")
    assert lint(path) == (f"{path}:1: 'steps' is missing",)
    said = "there is no file nothing.yaml (did you mean nothing.yml?)"
    (tmp_path / "nothing.yml").touch()
    assert lint("nothing.yaml", cwd=tmp_path) == (said,)
    assert lint("purge-cu13", env=home(tmp_path)) == ()


# -- where a step counts, and as whom -----------------------------------------------------------------


def test_a_step_counts_only_on_its_hosts() -> None:
    text = steps(f"  - {{id: a, {SHELL}}}\n  - {{id: b, {SHELL}, hosts: 'gpu[01-02]'}}\n")
    where = {name: [step.elsewhere for step in bound(text, host(name))] for name in ("gpu02", "gpu03")}
    assert where == {"gpu02": [False, False], "gpu03": [False, True]}


def test_the_hosts_of_a_step_may_be_a_variable_and_a_group_of_the_inventory() -> None:
    text = steps(f"  - {{id: a, {SHELL}, hosts: '${{{{ vars.first }}}}'}}\n", "vars: {first: '@leaders'}\n")
    asked: list[str] = []

    def named(pattern: str) -> frozenset[str]:
        asked.append(pattern)
        return frozenset({"gpu01"})

    playbook = read(text, "p.yaml")
    assert [playbook.bind(host(name), {}, named)[0].elsewhere for name in ("gpu01", "gpu02")] == [
        False,
        True,
    ]
    assert set(asked) == {"@leaders"}


def test_hosts_that_nobody_knows_are_said_with_their_line() -> None:
    text = steps(f"  - id: a\n    {SHELL}\n    hosts: '@leaders'\n")
    with pytest.raises(DocumentError) as caught:
        bound(text)
    assert caught.value.complaints[0].startswith("p.yaml:5: hosts: ")
    assert "leaders" in caught.value.complaints[0]


def test_a_step_may_run_as_a_user_where_that_is_for_its_author_to_say() -> None:
    (step,) = bound(steps(f"  - {{id: a, {SHELL}, as_user: alice}}\n"))
    assert isinstance(step.act, Shell)
    (change,) = step.act.plan(CheckFacts()).changes
    assert change.do[0].args["user"] == "alice"
    said = complaints(steps("  - {id: a, job: {from: s}, as_user: alice}\n"))
    assert said == (
        "p.yaml:3: as_user: job acts as the owner of what it changes; it is for shell and command",
    )
