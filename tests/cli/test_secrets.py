"""Secrets on the command line: where they come from, where they may stand, and that nothing shows them."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetfix import secret_values
from fleetfix.cli import secret_sources
from fleetfix.commands import Completed
from fleetfix.events import ChangeFinished, HostSaid, RunStarted, without_secrets
from fleetfix.policy import Policy
from fleetfix.redaction import Mask
from fleetfix.transports.scripted import Fleet
from tests.cli.conftest import Line

TOKEN = "zebra-0123456789"

PLAYBOOK = """\
name: signed-in
secrets: [token, db_pass]
policy: {canary: 1, max_failures: 0}
steps:
  - id: in
    command:
      argv: [light, left]
      check: [lit, left]
      undo: [darken, left]
      env: {TOKEN: "${{ secrets.token }}"}
      stdin: "pw=${{ secrets.db_pass }}"
"""


@pytest.fixture
def signed_in(place: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    (place / "signed-in.yaml").write_text(PLAYBOOK)
    (place / "pass").write_text("quagga 42\n")
    monkeypatch.setenv("TOK", TOKEN)
    return ("--secret", "token=env:TOK", "--secret", "db_pass=file:pass")


ON = ("--hosts", "gpu01", "-i", "hosts.yaml")
RUN = ("run", "./signed-in.yaml", *ON, "--yes")


def files_with(folder: Path, *words: str) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in files if any(word.encode() in path.read_bytes() for word in words)]


def test_a_host_is_sent_names_and_nothing_that_is_kept_or_shown_has_a_value(
    fleetfix: Line, fleet: Fleet, place: Path, signed_in: tuple[str, ...]
) -> None:
    said = Completed(exit=0, stdout=f"signed in with {TOKEN}\n", stderr="quagga 42")

    def light(args: dict[str, object], world: dict[str, object]) -> Completed:
        world["left"], world["args"] = True, args
        return said

    fleet["gpu01"].on("shell.run", light)
    with fleet:
        ran = fleetfix(*RUN, *signed_in, "--json")
        shown = [fleetfix("show", "last", *more) for more in ((), ("gpu01",), ("--json",))]
        fleetfix("report", "last", "-o", "report.html")
        planned = fleetfix("plan", "./signed-in.yaml", *ON, *signed_in, "--out", "plan")
        again = fleetfix("apply", "plan", *signed_in, "--yes")
        unsigned = fleetfix("apply", "plan", "--yes")
    assert (ran.code, planned.code, again.code) == (0, 0, 0)
    assert (unsigned.code, "not given: token, db_pass" in unsigned.err) == (1, True)
    args = fleet["gpu01"].world["args"]
    assert args["env"] == {"TOKEN": {"$secret": "token"}}
    assert args["stdin"] == {"$secret": ["pw=", "db_pass", ""]}
    assert "signed in with ***" in shown[1].out
    told = [text for one in (ran, *shown, planned, again, unsigned) for text in (one.out, one.err)]
    assert not [text for text in told if TOKEN in text or "quagga" in text]
    (place / "pass").unlink()
    assert files_with(place, TOKEN, "quagga") == []


def test_a_host_gets_the_secrets_of_its_own_steps_alone(
    fleetfix: Line, fleet: Fleet, place: Path, signed_in: tuple[str, ...]
) -> None:
    other = PLAYBOOK.replace("  - id: in\n", "  - id: in\n    hosts: gpu01\n")
    (place / "signed-in.yaml").write_text(
        other
        + "  - id: out\n    command: {argv: [light, right], check: [lit, right], undo: [darken, right],"
        ' env: {TOKEN: "${{ secrets.token }}"}}\n'
    )
    with fleet:
        ran = fleetfix("run", "./signed-in.yaml", "--hosts", "gpu[01-02]", *ON[2:], "--yes", *signed_in)
        given = {host: set(secret_values.held_for(host)) for host in ("gpu01", "gpu02")}
        secret_values.forget()
        back = fleetfix("rollback", ran.run, "--yes", *signed_in)
    assert (ran.code, back.code) == (0, 0), ran.err + back.err + back.out
    assert given == {"gpu01": {"token", "db_pass"}, "gpu02": {"token"}}
    assert {host: set(secret_values.held_for(host)) for host in given} == given


def test_a_way_back_takes_the_secrets_again_and_says_so_before_anything_is_undone(
    fleetfix: Line, fleet: Fleet, place: Path, signed_in: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet:
        run = fleetfix(*RUN, *signed_in).run
        secret_values.forget()
        refused = fleetfix("rollback", run, "--yes")
        monkeypatch.setenv("FLEETFIX_STATE_DIR", str(place / "another"))
        elsewhere = fleetfix("rollback", run, *ON, "--yes")
        assert fleet["gpu01"].runs("shell.undo") == []
        back = fleetfix("rollback", run, *ON, *signed_in[:2], "--yes")
    assert (refused.code, refused.err.splitlines()[-1]) == (1, "  hint: --secret token=SOURCE")
    assert (elsewhere.code, "takes secrets: token" in elsewhere.out) == (2, True)
    assert "rollback_pending" in elsewhere.out
    assert back.code == 0
    assert fleet["gpu01"].world["left"] is False


def test_a_run_that_is_taken_up_takes_the_secrets_again(
    fleetfix: Line, fleet: Fleet, signed_in: tuple[str, ...]
) -> None:
    world = fleet["gpu01"].world
    world["hook"] = lambda: (world.pop("hook"), os.kill(os.getpid(), signal.SIGINT))
    with fleet:
        ran = fleetfix("run", "./signed-in.yaml", "--hosts", "gpu[01-02]", *ON[2:], "--yes", *signed_in)
        run = ran.run
        secret_values.forget()
        with_none = fleetfix("resume", run, "--yes")
        assert fleet["gpu02"].runs("shell.run") == []
        with_all = fleetfix("resume", run, *signed_in, "--yes")
    assert f"fleetfix resume {run} --secret token=SOURCE --secret db_pass=SOURCE\n" in ran.out
    assert (with_none.code, "not given: token, db_pass" in with_none.err) == (1, True)
    assert (with_all.code, fleet["gpu02"].world["left"]) == (0, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((f"token={TOKEN}",), "--secret token=… names no source"),
        ((f"{TOKEN}",), "--secret wants NAME=SOURCE"),
        (("token=env:",), "--secret token=… names no source"),
        (("token=env:NOT_SET",), "the variable NOT_SET is not set"),
        (("token=file:/nope/none",), "/nope/none: no such file or directory"),
        (("token=file:binary",), "the secret token is not UTF-8 text"),
        (("token=file:empty",), "the secret token is empty"),
        (("token=file:large",), "the secret token is larger than 16 KiB"),
        (("token=cmd:echo no >&2; exit 3",), "its command ended with exit 3"),
        (("token=cmd:yes",), "the secret token is larger than 16 KiB"),
        (("token=cmd:echo abc; sleep 9",), "its command did not end within"),
        (("token=file:fifo",), "fifo gave nothing more within"),
        (("token=cmd:echo abc",), "the secret token is shorter than 6 characters"),
        (("token=cmd:printf 'ab\\0cdefgh'",), "the secret token holds a NUL"),
        (("token=keyring:fleetfix",), "a keyring's entry is SERVICE/USER"),
        (("token=keyring:fleetfix/me",), "the package keyring is not installed"),
        (("token=prompt",), "there is no terminal to ask at"),
        (("token=env:TOK", "token=env:TOK"), "--secret gives token twice"),
        (("token=env:TOK", "db_pass=file:pass", "tokn=env:TOK"), "signed-in has no secret 'tokn'"),
        (("token=env:TOK",), "signed-in uses secrets that are not given: db_pass"),
        (("token=env:OPEN", "db_pass=file:pass"), "the value of a secret stands openly in "),
    ],
)
def test_a_source_that_gives_nothing_is_one_line_and_never_the_value(
    fleetfix: Line,
    place: Path,
    signed_in: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)
    monkeypatch.setenv("OPEN", "signed-in")
    if "within" in message:
        monkeypatch.setattr(secret_sources, "PATIENCE", 0.1)
    os.mkfifo(place / "fifo")
    (place / "binary").write_bytes(b"\xff\xfe\xfd\xfc\xfb\xfa")
    (place / "empty").write_bytes(b"\n")
    (place / "large").write_bytes(b"x" * 17_000)
    given = [part for word in words for part in ("--secret", word)]
    if len(words) == 1 and "not given" not in message:
        given += ["--secret", "db_pass=file:pass"]
    result = fleetfix(*RUN, *given)
    assert result.code == 1
    assert message in result.err
    assert TOKEN not in result.err
    assert len(result.err.splitlines()) <= 2


def test_a_keyring_and_a_command_give_secrets(
    fleetfix: Line, fleet: Fleet, signed_in: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {("vault/fleet", "me"): TOKEN}
    keyring = SimpleNamespace(get_password=lambda service, user: entries.get((service, user)))
    monkeypatch.setitem(sys.modules, "keyring", keyring)
    with fleet:
        ran = fleetfix(
            *RUN,
            "--secret",
            "token=keyring:vault/fleet/me",
            "--secret",
            "db_pass=cmd:printf 'quag''ga 42\\r\\n'",
        )
        lacking = fleetfix(*RUN, *signed_in[2:], "--secret", "token=keyring:vault/me")
    assert (ran.code, secret_values.held()) == (0, {"token": TOKEN, "db_pass": "quagga 42"})
    assert "the keyring has no me of vault" in lacking.err


def test_a_playbook_declares_its_secrets_and_shows_none(fleetfix: Line, place: Path) -> None:
    (place / "bad.yaml").write_text(
        "name: bad\nsecrets: [token, token, become, 1a]\nsteps:\n"
        '  - id: a\n    name: "${{ secrets.token }}"\n    shell:\n      run: "x ${{ secrets.token }}"\n'
        '      check: x\n      env: {A: "${{ secrets.tokn }}", B: {"$secret": token}}\n'
        '  - id: b\n    hosts: "${{ secrets.token }}"\n    assert: {driver: "${{ secrets.token }}"}\n'
    )
    told = fleetfix("lint", "bad.yaml").out
    assert "bad.yaml:2: 'token' is declared twice" in told
    assert "bad.yaml:2: 'become' is the password for sudo" in told
    assert "wanted a name of letters, digits and _, not '1a'" in told
    for line in (5, 7, 11, 12):
        assert f"bad.yaml:{line}: a secret would be shown here" in told
    assert "bad.yaml:9: there is no secret 'tokn', did you mean token?" in told
    assert "bad.yaml:9: shell: env.B: wanted text, not a mapping" in told


def test_exec_gives_a_command_its_secrets_by_its_environment(
    fleetfix: Line, place: Path, signed_in: tuple[str, ...]
) -> None:
    (place / "here.yaml").write_text("hosts:\n  here: {transport: local}\n")
    words = ("--hosts", "here", "-i", "here.yaml", "--secret", "TOKEN=env:TOK", "--json")
    result = fleetfix("exec", *words, "--", 'echo "$TOKEN is ${#TOKEN} long"')
    assert json.loads(result.out)["stdout"] == f"*** is {len(TOKEN)} long\n"
    assert files_with(place / "state", TOKEN) == []


def test_a_command_in_which_a_value_stands_openly_runs_nowhere(
    fleetfix: Line, fleet: Fleet, place: Path, signed_in: tuple[str, ...]
) -> None:
    (place / "sign-in").write_text(f"#!/bin/sh\necho {TOKEN}\n")
    words = ("exec", *ON, *signed_in[:2])
    with fleet:
        refused = [fleetfix(*words, "--", f"echo {TOKEN}"), fleetfix(*words, "--script", "sign-in")]
    assert [(one.code, "stands openly in the command" in one.err) for one in refused] == [(1, True)] * 2
    assert not any(TOKEN in one.out + one.err for one in refused)
    assert fleet["gpu01"].opened == 0


def test_the_password_for_sudo_comes_from_the_same_sources(
    fleetfix: Line, fleet: Fleet, place: Path, signed_in: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "hosts.yaml").write_text("hosts:\n  gpu01: {transport: scripted, become: true}\n")
    config = place / "home/.config/fleetfix/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('become_password = "cmd:echo okapi"\n')
    with fleet:
        fleetfix("run", "./lamps.yaml", *ON, "--yes")
        assert secret_values.become_password() == "okapi"
        fleetfix(*RUN, *signed_in, "--secret", "become=env:TOK")
        assert secret_values.become_password() == TOKEN
        assert "become" not in secret_values.held()
    monkeypatch.setenv("FLEETFIX_BECOME_PASSWORD", "gnu-gnu")
    fleetfix("hosts", "-i", "hosts.yaml")
    assert secret_values.become_password() == "gnu-gnu"
    config.write_text('become_password = "gnu-gnu"\n')
    told = fleetfix("run", "./lamps.yaml", *ON, "--yes").err
    assert ("config.toml: become_password: " in told, "gnu-gnu" in told) == (True, False)


def test_events_are_masked_but_for_what_things_are_known_by() -> None:
    mask = Mask(["secret-1"])
    said = HostSaid(host="secret-1", step="secret-1", text="it is secret-1")
    assert without_secrets(said, mask) == HostSaid(host="secret-1", step="secret-1", text="it is ***")
    done = ChangeFinished(host="a", step="b", change="c", ok=True, stdout="secret-1", stderr="x secret-1")
    assert (without_secrets(done, mask).stdout, without_secrets(done, mask).stderr) == ("***", "x ***")  # type: ignore[union-attr]
    began = RunStarted(
        playbook="p",
        source="s",
        digest="d",
        inventory="i",
        hosts=("a",),
        steps=(),
        policy=Policy(),
        operator="op",
        controller="desk",
        version="1",
        text="secret-1",
        reason="secret-1",
    )
    masked = without_secrets(began, mask)
    assert (masked.text, masked.reason) == ("secret-1", "***")  # type: ignore[union-attr]
    other = HostSaid(host="a", step="b", text="no")
    assert without_secrets(other, mask) is other


def test_a_way_back_is_told_with_the_secrets_that_it_takes(
    fleetfix: Line, fleet: Fleet, place: Path, signed_in: tuple[str, ...]
) -> None:
    (place / "signed-in.yaml").write_text(PLAYBOOK + "    on_failure: stop\n")
    fleet["gpu01"].world["broken"] = "left"
    with fleet:
        ran = fleetfix(*RUN, *signed_in)
    assert f"fleetfix rollback {ran.run} --secret token=SOURCE\n" in ran.out


def test_a_traceback_that_is_kept_has_no_secret(place: Path) -> None:
    from fleetfix.cli.trouble import tell

    secret_values.hold({"token": TOKEN})
    assert tell(RuntimeError(f"broke on {TOKEN}")) == 70
    (kept,) = (place / "state/crashes").iterdir()
    assert "broke on ***" in kept.read_text()
