"""The process in which one function of a fabfile is called: told on stdin, and answers on a descriptor.

`python -m fleetfix.transports.fabfile_call FD`. It ends with the controller, whatever ends that.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import inspect
import json
import os
import signal
import sys
import threading
import traceback
import types
from typing import IO, Any

import fabric
import paramiko
from invoke.exceptions import CommandTimedOut, UnexpectedExit
from invoke.runners import Result

from fleetfix.errors import Failure, HostError
from fleetfix.inventory import Host
from fleetfix.session import CONNECT_TIMEOUT
from fleetfix.transports.fabric_connection import Line
from fleetfix.transports.ssh_configuration import said_to_take


def main() -> None:
    """Read what is asked, call it, and tell how it ended."""
    report = int(sys.argv[1])
    os.set_inheritable(report, False)
    controller = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    asked = json.loads(controller.readline())
    threading.Thread(target=_end_with, args=(controller,), daemon=True).start()
    os.write(report, json.dumps(_answer(asked)).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that the function has left do not keep it


def _end_with(controller: IO[bytes]) -> None:
    """End this process and all that it has started, once the controller is gone, whatever ended that."""
    controller.read()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    line = None
    try:
        function = _function(asked)
        host = Host.model_validate(asked["host"])
        line = Line(host, None, host.connect_timeout or said_to_take(host) or CONNECT_TIMEOUT)
        connection = line.open(_config(asked))
        value = function(connection, **asked["args"])
        return {"value": _plain(value)}
    except HostError as error:
        failure = error.failure
        return {
            "failure": Failure(
                kind="command",
                message=f"no connection for the function: {failure.message}",
                hint=failure.hint,
            ).model_dump()
        }
    except SystemExit as end:
        return {"value": None} if not end.code else {"error": f"{_place(end, asked)}exit {end.code}"}
    except BaseException as error:  # noqa: BLE001 - it is the author's, whatever it is
        return {"error": _place(error, asked) + _words(error)}
    finally:
        if line is not None:
            line.close()


def _function(asked: dict[str, Any]) -> Any:
    """The function, of a file that is what it was when the playbook was read."""
    path = asked["file"]
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise HostError(_gone(f"{path}: {(error.strerror or '').lower()}")) from None
    if hashlib.sha256(text).hexdigest() != asked["sha256"]:
        raise HostError(_gone(f"{path} is another one than when the run began"))
    folder, name = os.path.split(path)
    sys.path.insert(0, folder)
    module = types.ModuleType("fabfile")
    module.__file__ = path
    module.__spec__ = importlib.machinery.ModuleSpec("fabfile", None, origin=path)
    sys.modules["fabfile"] = module
    exec(compile(text, path, "exec"), module.__dict__)
    found = getattr(module, asked["function"], None)
    # A task of Fabric's or Invoke's keeps the function that it decorates.
    found = getattr(found, "body", found)
    if not inspect.isroutine(found):
        raise HostError(_gone(f"{name} has no function {asked['function']}"))
    return found


def _gone(message: str) -> Failure:
    return Failure(kind="blocked", message=message, hint="put the file back as it was, or begin a new run")


def _config(asked: dict[str, Any]) -> fabric.Config:
    """The author's own configuration of Fabric; what ssh's says is settled by the connection."""
    return fabric.Config(
        overrides={
            "run": {"in_stream": False},
            **({"sudo": {"password": asked["password"]}} if asked["password"] else {}),
        },
        ssh_config=paramiko.SSHConfig(),
        project_location=os.path.dirname(asked["file"]),
    )


def _plain(value: Any) -> Any:
    """What a function returned, as JSON has it; a result of `c.run` is whether it went well."""
    if isinstance(value, Result):
        return bool(value.ok)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return f"an object of {type(value).__name__}"  # its repr would differ from host to host
    return value


def _place(error: BaseException, asked: dict[str, Any]) -> str:
    """The last line of the fabfile on the way to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == asked["file"]]
    name = os.path.basename(asked["file"])
    if isinstance(error, SyntaxError):
        return f"{name}:{error.lineno}: "
    return f"{name}:{own[-1].lineno}: " if own else f"{name}: "


def _words(error: BaseException) -> str:
    if isinstance(error, UnexpectedExit | CommandTimedOut):
        result = error.result
        said = (result.stderr.strip() or result.stdout.strip()).splitlines()
        how = (
            f"exit {result.exited}" if isinstance(error, UnexpectedExit) else f"no end in {error.timeout} s"
        )
        return f"`{' '.join(result.command.split())[:200]}`: {how}" + (
            f": {said[-1][:300]}" if said else ""
        )
    text = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
