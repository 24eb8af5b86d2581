"""Why no runner began: what a start command says there, told as the cause that it has."""

from __future__ import annotations

import pytest

from fleetfix.greeting import Said
from fleetfix.protocol import Start

PLAIN, SUDO = Start("ab"), Start("ab", become=True)
TRIED = b"Welcome!\nfleetfix-try-ab:/usr/bin/python3\n"
NONE = b"fleetfix-none-ab:\n"


@pytest.mark.parametrize(
    ("out", "errors", "kind", "words"),
    [
        (b"", b"", "unreachable", "the login shell ended before it ran a command (exit 1)"),
        (b"This account is closed.\n", b"", "unreachable", "This account is closed."),
        (TRIED, b"Fatal Python error: no codec\n", "no_python", "/usr/bin/python3 ended before it began"),
        (TRIED, b"Fatal Python error: no codec\n", "no_python", "Fatal Python error: no codec"),
    ],
)
def test_a_shell_and_a_python_that_end_are_told_apart(
    out: bytes, errors: bytes, kind: str, words: str
) -> None:
    failure = Said(PLAIN, out, errors).why_ended("exit 1")
    assert failure.kind == kind
    assert words in failure.message
    assert failure.hint


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ("ada is not in the sudoers file.  This incident will be reported.", "does not know this user"),
        ("Sorry, user ada is not allowed to execute '/usr/bin/python3 -c …' as root on gpu01.", "other"),
        ("Sorry, user ada may not run sudo on gpu01.", "does not know this user"),
        ("sudo: sorry, you must have a tty to run sudo", "terminal"),
        ("sudo: Account or password is expired, reset your password and try again", "expired"),
        ("sudo: /usr/bin/sudo must be owned by uid 0 and have the setuid bit set", "cannot become root"),
        ("/etc/sudoers:28:9: syntax error\nsudo: no valid sudoers sources found, quitting", "sudoers file"),
        ("sudo: PERM_SUDOERS: setresuid(-1, 1, -1): Operation not permitted", "PERM_SUDOERS"),
    ],
)
def test_what_sudo_refuses_is_told_for_what_it_is(errors: str, words: str) -> None:
    warned = b"fleetfix-sudo-ab:\nsudo: unable to resolve host gpu01: Name or service not known\n"
    failure = Said(SUDO, TRIED, warned + errors.encode()).why_ended("exit 1")
    assert failure.kind == "sudo"
    assert words in failure.message
    assert failure.hint


@pytest.mark.parametrize(
    "errors",
    [
        b"sudo: unable to execute /usr/bin/python3: Exec format error\n",
        b"sudo: unable to resolve host gpu01: Name or service not known\nsegmentation fault\n",
        b"python3: error while loading shared libraries: libz.so.1\n",
    ],
)
def test_a_python_that_breaks_below_sudo_is_not_held_against_sudo(errors: bytes) -> None:
    assert Said(SUDO, TRIED, errors).why_ended("exit 1").kind == "no_python"


@pytest.mark.parametrize(
    ("start", "out", "errors", "kind", "words"),
    [
        (PLAIN, b"Which tenant? ", b"", "unreachable", "it said: Which tenant?"),
        (PLAIN, TRIED, b"", "no_python", "/usr/bin/python3 has not begun within 4 s"),
        (SUDO, TRIED, b"Verification code: ", "sudo", "it said: Verification code:"),
        (SUDO, TRIED, b"sudo: Account or password is expired, reset it", "sudo", "expired"),
        (SUDO, b"", b"", "unreachable", "login shell"),
    ],
)
def test_whoever_never_says_a_word_is_named(
    start: Start, out: bytes, errors: bytes, kind: str, words: str
) -> None:
    failure = Said(start, out, errors).why_late(4.0, answered=False)
    assert failure.kind == kind
    assert words in failure.message


def test_the_pythons_that_were_found_and_would_not_do_are_named() -> None:
    out = (
        b"fleetfix-try-ab:/usr/bin/python3\nfleetfix-not-ab:97\n"
        b"fleetfix-try-ab:/opt/bin/python3\nfleetfix-not-ab:126\n" + NONE
    )
    failure = Said(PLAIN, out, b"sh: 1: /opt/bin/python3: Permission denied\n").why_none()
    assert failure is not None
    assert failure.kind == "no_python"
    assert "/usr/bin/python3 is older, /opt/bin/python3 cannot be executed" in failure.message
    assert "Permission denied" in failure.message


def test_where_none_was_found_the_places_are_named() -> None:
    failure = Said(PLAIN, NONE, b"").why_none()
    assert failure is not None
    assert "/usr/bin" in failure.message
    own = Said(Start("ab", python="/opt/py/bin/python3"), NONE, b"").why_none()
    assert own is not None
    assert "/opt/py/bin/python3" in own.message


def test_a_host_without_sudo_is_no_host_without_python() -> None:
    failure = Said(SUDO, b"fleetfix-no-sudo-ab:\n", b"").why_none()
    assert failure is not None
    assert failure.kind == "sudo"


def test_a_shell_that_echoes_its_commands_says_nothing_of_what_they_print() -> None:
    for start in (PLAIN, SUDO):
        said = Said(start, start.command().encode() + b"\n", b"")
        assert said.why_none() is None
        assert said.why_ended("exit 1").kind == "unreachable"
