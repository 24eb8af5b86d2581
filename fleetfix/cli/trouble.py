"""What went wrong, in one line with a hint, and the exit code it leads to; never a traceback."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path

import typer

from fleetfix.errors import Bug, DocumentError, FleetfixError
from fleetfix.folders import make_private
from fleetfix.secret_values import masked

# Typer carries its own Click in some versions and uses the installed one in others.
_CLICK = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")


def tell(error: BaseException) -> int:
    """Write the error to stderr; say the exit code."""
    error = _inner(error)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        _write("interrupted")
        return 130
    if isinstance(error, _CLICK):
        return _usage(error)
    if isinstance(error, DocumentError):
        # Each complaint begins with its file and line, where editors look for them.
        _lines([*error.complaints, *_hint(error.hint)])
        return error.exit_code
    if isinstance(error, FleetfixError) and not isinstance(error, Bug):
        _write(str(error), error.hint)
        return error.exit_code
    return _unexpected(error)


def _inner(error: BaseException) -> BaseException:
    """The one error inside a group of tasks that matters: ours before anybody else's."""
    while isinstance(error, BaseExceptionGroup):
        inside: list[BaseException] = list(error.exceptions)
        error = next((one for one in inside if isinstance(one, FleetfixError)), inside[0])
    return error


def _usage(error: BaseException) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "fleetfix"
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error, file=sys.stderr)
        return 1
    message = str(getattr(error, "format_message", lambda: str(error))()).strip().rstrip(".")
    _write(_lowered(_in_our_words(message)), f"{path} --help")
    return 1


_OUR_WORDS = (
    (r"Input should be a valid integer.*", "wanted a whole number"),
    (r"'(.*)' is not a valid integer", r"wanted a whole number, not '\1'"),
    (r"Input should be greater than or equal to (\S+)", r"wanted at least \1"),
    (r"Input should be less than or equal to (\S+)", r"wanted at most \1"),
)


def _in_our_words(message: str) -> str:
    for theirs, ours in _OUR_WORDS:
        message = re.sub(theirs, ours, message, flags=re.DOTALL)
    return message


def _lowered(message: str) -> str:
    """Click begins with a capital; our lines do not."""
    text = " ".join(message.split())
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _unexpected(error: BaseException) -> int:
    where = _keep_traceback(error)
    kept = f"the traceback is in {where}" if where else "its traceback could not be written anywhere"
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    _write(f"a bug in fleetfix: {said}", f"{kept}; please report it")
    return 70


def _keep_traceback(error: BaseException) -> Path | None:
    text = masked("".join(traceback.format_exception(error)))
    for folder in _folders():
        with contextlib.suppress(OSError, FleetfixError):
            make_private(folder)
            path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", errors="backslashreplace") as file:
                file.write(text)
            return path
    return None


def _folders() -> list[Path]:
    folders = []
    with contextlib.suppress(Exception):
        from fleetfix.cli.state_dir import state_dir

        folders.append(state_dir() / "crashes")
    with contextlib.suppress(OSError):
        folders.append(Path(tempfile.mkdtemp(prefix="fleetfix-crash-")))
    return folders


def _write(message: str, hint: str = "") -> None:
    from fleetfix.views.fit import fit

    # Before anything is cut: of half a secret nothing would tell that it is one.
    first, *more = masked(message).split("\n")
    _lines([fit(f"fleetfix: {first}", sys.stderr), *more, *_hint(hint)])


def _hint(hint: str) -> list[str]:
    return [f"  hint: {hint}"] if hint else []


def _lines(lines: list[str]) -> None:
    from fleetfix.views.neutral import neutral

    with contextlib.suppress(OSError, ValueError):
        print(
            "\n".join(neutral(part) for line in lines for part in line.split("\n")),
            file=sys.stderr,
            flush=True,
        )
