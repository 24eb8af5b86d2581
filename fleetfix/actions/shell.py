"""shell: a script of the author's own, run by the host's /bin/sh."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import StringConstraints

from fleetfix.actions.command import ByWord, shortened

Script = Annotated[str, StringConstraints(min_length=1, strip_whitespace=False, pattern=r"\S")]


class Shell(ByWord):
    """Run a script with `sh -c`: POSIX shell, for bash is not on every host.

    The script is an argument that `ps` shows: what is secret goes into `env` or `stdin`.
    """

    kind: ClassVar[str] = "shell"

    run: Script
    check: Script | None = None
    undo: Script | None = None

    def to_run(self) -> tuple[str, ...]:
        return _sh(self.run)

    def to_check(self) -> tuple[str, ...] | None:
        return None if self.check is None else _sh(self.check)

    def to_undo(self) -> tuple[str, ...] | None:
        return None if self.undo is None else _sh(self.undo)

    def in_words(self) -> str:
        return shortened(self.run)


def _sh(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)
