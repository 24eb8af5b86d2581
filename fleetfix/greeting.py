"""Why no runner began on a host: from what the start command has said there, to a failure and what helps.

The start command says each Python before it tries it. So the login shell, sudo and Python, each of which
may refuse, break, ask something, or never say a word, are told apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fleetfix.errors import Failure
from fleetfix.protocol import NOISE, TOO_OLD, Start, readable

ALLOW = "allow it without (NOPASSWD), or give it: --secret become=prompt, or FLEETFIX_BECOME_PASSWORD"
_SHELL = "look at the user's login shell and its start files: they must neither ask nor wait"
_PYTHON = "mend it, or set the host's `python:` to the path of another one"


@dataclass(frozen=True)
class Said:
    """What a host has said up to now instead of a greeting: `out` and `errors` are tails."""

    start: Start
    out: bytes
    errors: bytes

    @property
    def _tried(self) -> str:
        """The Python that was tried last, or nothing."""
        found = self.start.tried.findall(self.out)
        return found[-1].decode() if found else ""

    @property
    def _words(self) -> str:
        """What was said beside the words of the start command itself, in one line; errors first."""
        out = self.start.failed.sub(b"", self.start.tried.sub(b"", self.out))
        out = out.replace(self.start.no_python, b"")
        errors = self.errors.replace(self.start.prompt.encode(), b"")
        return readable(errors) or readable(out)

    @property
    def _lines(self) -> list[str]:
        """The lines on stderr but for prompts and for what sudo says and goes on."""
        text = self.errors.replace(self.start.prompt.encode(), b"").decode("utf-8", "backslashreplace")
        lines = [line.strip() for line in text.splitlines()]
        return [line for line in lines if line and "unable to resolve host" not in line]

    @property
    def password_was_wrong(self) -> bool:
        """Whether sudo has said, at its end, that the password was wrong."""
        return any(_WRONG.search(line) for line in self._lines)

    def why_ended(self, how: str) -> Failure:
        """Why the start command ended before a runner began. `how` is its exit, in words."""
        words = self._words
        said = f": {words}" if words else ""
        if self.start.become and (failure := _of_sudo(self._lines)) is not None:
            return failure
        if python := self._tried:
            return Failure(
                kind="no_python", message=f"{python} ended before it began ({how}){said}", hint=_PYTHON
            )
        message = f"the login shell ended before it ran a command ({how}){said}"
        return Failure(kind="unreachable", message=message, hint=_SHELL)

    def why_late(self, seconds: float, *, answered: bool) -> Failure:
        """Why nothing has begun within so many seconds. `answered`: sudo has its password."""
        words, within = self._words, f"within {seconds:.0f} s"
        said = f"; it said: {words}" if words else ""
        python = self._tried
        if not python:
            message = f"the login shell has not run a command {within}{said}"
            return Failure(kind="unreachable", message=message, hint=_SHELL)
        if not self.start.become:
            return Failure(kind="no_python", message=f"{python} has not begun {within}{said}", hint=_PYTHON)
        if (failure := _refusal(self._lines)) is not None:
            return failure
        after = " after it got the password" if answered else ""
        message = f"sudo has not started {python} {within}{after}{said}"
        hint = "try `sudo -k; sudo -S true` there: it must ask for nothing but a password"
        return Failure(kind="sudo", message=message, hint=hint)

    def why_noisy(self) -> Failure:
        """Why more came than any login shell prints, and no runner."""
        if python := self._tried:
            message = f"{NOISE} bytes came from {python} and no runner"
            return Failure(kind="no_python", message=message, hint=_PYTHON)
        message = f"{NOISE} bytes came from the login shell and no runner"
        return Failure(kind="unreachable", message=message, hint=_SHELL)

    def why_none(self) -> Failure | None:
        """Why the start command has given up, where it says so."""
        if self.start.no_sudo in self.out:
            hint = "install it, or log in as root and leave `become` out"
            return Failure(kind="sudo", message="there is no sudo on this host", hint=hint)
        if self.start.no_python not in self.out:
            return None
        tried = [one.decode() for one in self.start.tried.findall(self.out)]
        ends = [int(one) for one in self.start.failed.findall(self.out)]
        found = ", ".join(f"{path} {_of_exit(end)}" for path, end in zip(tried, ends, strict=False))
        places = list(self.start.places)
        looked = places[0] if len(places) == 1 else "/usr/bin, /usr/local/bin and /opt"
        if not found:
            message = f"no Python 3.8 or newer: looked for {looked}"
        else:
            words = self._words
            message = f"no Python 3.8 or newer: {found}" + (f" ({words})" if words else "")
        hint = "install python3 there, or set the host's `python:` to the path of one"
        return Failure(kind="no_python", message=message, hint=hint)


def _of_exit(code: int) -> str:
    if code == TOO_OLD:
        return "is older"
    return "cannot be executed" if code == 126 else "cannot be started"


# -- what sudo says -----------------------------------------------------------------------------------

_OTHERS = "sudo allows this user other commands only"
_REFUSALS: tuple[tuple[str, str, str], ...] = (
    (
        r"not allowed to (execute|run sudo)",
        _OTHERS,
        "fleetfix works as root through Python, which can do anything: allow ALL, or leave `become` out",
    ),
    (
        r"not in the sudoers file|may not run sudo",
        "sudo does not know this user",
        "add the user to sudoers on that host, or leave `become` out",
    ),
    (
        r"must have a tty",
        "sudo wants a terminal (requiretty)",
        "put `Defaults:USER !requiretty` into sudoers",
    ),
    (
        r"(account|password).* expired|reset your password",
        "the password of this user has expired",
        "log in by hand and change it",
    ),
    (
        r"(account validation failure|is your account locked)",
        "the account of this user is locked",
        "unlock it on that host",
    ),
    (
        r"(setuid bit set|effective uid is not 0|no new privileges)",
        "sudo cannot become root there",
        "sudo has lost its setuid bit, or lies on a file system mounted nosuid, or runs in a container",
    ),
    (
        r"(syntax|parse) error|no valid sudoers|unable to (open|read|stat) /etc/sudo|is world writable",
        "the sudoers file of this host is broken",
        "mend it with visudo there",
    ),
    (r"(no password was provided|a password is required)", "sudo wants a password", ALLOW),
)
_WRONG = re.compile(r"incorrect (password|authentication)|authentication failure", re.IGNORECASE)


def _of_sudo(lines: list[str]) -> Failure | None:
    """What sudo has refused; None where it was not sudo that ended it."""
    said = readable(" ".join(lines).encode(), 4096)
    if re.search(r"sudo: (unable to execute|\S+: command not found)", said):
        return None  # sudo was willing; what it was to start is not there for root
    if (failure := _refusal(lines)) is not None:
        return failure
    if not any(line.startswith("sudo:") for line in lines):
        return None
    message = f"sudo refuses: {readable(said.encode())}"
    return Failure(kind="sudo", message=message, hint="try `sudo -l` there")


def _refusal(lines: list[str]) -> Failure | None:
    """A refusal that is known by its words."""
    said = " ".join(lines)
    for pattern, message, hint in _REFUSALS:
        if re.search(pattern, said, re.IGNORECASE):
            return Failure(kind="sudo", message=message, hint=hint)
    return None
