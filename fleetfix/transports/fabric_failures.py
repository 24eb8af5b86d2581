"""What paramiko, Fabric, or the system below them raised: the failure class it is, and its words."""

from __future__ import annotations

import asyncssh
import paramiko
from paramiko.auth_strategy import AuthFailure
from paramiko.hostkeys import InvalidHostKey
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import NoValidConnectionsError

from fleetfix.errors import Failure, FailureKind
from fleetfix.transports.fabric_keys import Refused
from fleetfix.transports.host_keys import HostKeys

_KINDS: tuple[tuple[type[BaseException], FailureKind, str], ...] = (
    (Refused, "host_key", "compare its key with what you know of it"),
    (paramiko.BadHostKeyException, "host_key", "compare its key with what you know of it"),
    (InvalidHostKey, "host_key", "mend your known_hosts file"),
    (paramiko.PasswordRequiredException, "auth", "add the key to your ssh agent"),
    (AuthFailure, "auth", "see which keys `ssh -v` offers there"),
    (paramiko.AuthenticationException, "auth", "see which keys `ssh -v` offers there"),
    (UnknownKeyType, "auth", "look at the key files that your ssh configuration names"),
    (paramiko.ConfigParseError, "unreachable", "mend your ssh configuration"),
    (asyncssh.ConfigParseError, "unreachable", "mend your ssh configuration"),
)


def failure_of(error: BaseException, host: str, keys: HostKeys | None = None) -> Failure:
    """The failure class of what paramiko, Fabric, or the system below them, raised."""
    before = f"{host}: " if host else ""
    if keys is not None and keys.complaint:
        return Failure(kind="host_key", message=before + keys.complaint, hint=keys.hint)
    for kind_of_error, kind, hint in _KINDS:
        if isinstance(error, kind_of_error):
            troubles = getattr(error, "troubles", None)
            hint = "; ".join(dict.fromkeys(troubles)) if troubles else hint
            return Failure(kind=kind, message=before + _words(error), hint=hint)
    return Failure(kind="unreachable", message=before + _words(error))


def _words(error: BaseException) -> str:
    if isinstance(error, AuthFailure):
        return _of_keys(error)
    if isinstance(error, NoValidConnectionsError):
        return ", ".join(dict.fromkeys(_words(one) for one in error.errors.values()))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = " ".join(str(error).split())
    return text or _SAID.get(type(error), type(error).__name__)


_SAID: dict[type[BaseException], str] = {
    EOFError: "the connection was closed",
    TimeoutError: "timed out",
    Refused: "its key was refused",
}


def _of_keys(error: AuthFailure) -> str:
    tried = list(error.result)
    if not tried:
        return "there is no key to log in with"
    last = tried[-1].result
    if not isinstance(last, paramiko.AuthenticationException):
        return f"it did not say whether it takes the key: {_words(last)}"
    return f"it refused the {'one key' if len(tried) == 1 else f'{len(tried)} keys'} that it was offered"
