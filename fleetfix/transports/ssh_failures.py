"""Each exception of asyncssh, and of the system below it, as a failure class with one line."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence

import asyncssh

from fleetfix.errors import Failure, FailureKind
from fleetfix.transports.host_keys import HostKeys

NO_SERVER = "look at its address and port: what answers there may be no SSH server"
_KINDS: tuple[tuple[type[BaseException], FailureKind, str], ...] = (
    (asyncssh.HostKeyNotVerifiable, "host_key", "compare its key with what you know of it"),
    (asyncssh.PermissionDenied, "auth", "see which keys `ssh -v` offers there"),
    (asyncssh.IllegalUserName, "auth", "set `user:` in the inventory"),
    (asyncssh.PasswordChangeRequired, "auth", "change the password there by hand"),
    (asyncssh.KeyImportError, "auth", "look at the key files that your ssh configuration names"),
    (asyncssh.KeyEncryptionError, "auth", "add the key to your ssh agent"),
    (asyncssh.ProtocolError, "unreachable", NO_SERVER),
    (asyncssh.ProtocolNotSupported, "unreachable", NO_SERVER),
    (asyncssh.ConfigParseError, "unreachable", "mend your ssh configuration"),
)
_TOO_MANY = "too many authentication failures"


def failure_of(
    error: BaseException, host: str, keys: HostKeys | None = None, troubles: Sequence[str] = ()
) -> Failure:
    """The failure class of what asyncssh, or the system below it, raised.

    `troubles` are reasons why keys of the operator could not be used.
    """
    before = f"{host}: " if host else ""
    if keys is not None and isinstance(error, asyncssh.HostKeyNotVerifiable):
        keys.refused(error)
        if keys.complaint:
            return Failure(kind="host_key", message=before + keys.complaint, hint=keys.hint)
    if isinstance(error, asyncssh.DisconnectError) and _TOO_MANY in str(error).lower():
        hint = "more keys are offered than it lets one try: name one by IdentityFile, with IdentitiesOnly"
        return Failure(kind="auth", message=before + _TOO_MANY, hint=hint)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "this machine has too many files open: ulimit -n"
        return Failure(kind="unreachable", message=before + words_of(error), hint=hint)
    for kind_of_error, kind, hint in _KINDS:
        if isinstance(error, kind_of_error):
            hint = "; ".join(dict.fromkeys(troubles)) if kind == "auth" and troubles else hint
            return Failure(kind=kind, message=before + words_of(error), hint=hint)
    return Failure(kind="unreachable", message=before + words_of(error))


_NUMBER = re.compile(r"\[Errno (\d+)\] Connect call failed")


def words_of(error: BaseException) -> str:
    """What an exception says, the same for every host that it means the same for."""
    # asyncio names the address instead of the reason, which would make equal reasons differ.
    numbers = dict.fromkeys(_NUMBER.findall(str(error)))
    if numbers:
        return ", ".join(os.strerror(int(number)).lower() for number in numbers)
    if isinstance(error, OSError) and error.errno is not None and "Connect call failed" in str(error):
        return os.strerror(error.errno).lower()
    if isinstance(error, asyncssh.PermissionDenied):
        return str(error).partition(" on host ")[0].lower()
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = getattr(error, "reason", "") or str(error) or type(error).__name__
    return " ".join(str(text).split())
