"""Speaks to a lab's server through the socket in its folder."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from fleetfix.errors import LabError
from fleetfix.lab.record import Paths

TIMEOUT = 10.0


def ask(paths: Paths, order: dict[str, Any]) -> dict[str, Any]:
    """Give the server one order and return its answer; a LabError where it says no."""
    try:
        answer = _converse(paths, json.dumps(order).encode() + b"\n")
    except OSError as error:
        raise LabError(f"the lab's server does not answer: {error}", hint="fleetfix lab down") from None
    if not answer.get("ok"):
        raise LabError(str(answer.get("error", "the lab's server broke off")))
    return answer


def _converse(paths: Paths, line: bytes) -> dict[str, Any]:
    # Through the folder's descriptor: the path itself may be too long for a socket (107 bytes).
    folder = os.open(paths.root, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as wire:
            wire.settimeout(TIMEOUT)
            wire.connect(f"/proc/self/fd/{folder}/{paths.control.name}")
            wire.sendall(line)
            with wire.makefile("rb") as reply:
                answer: dict[str, Any] = json.loads(reply.readline() or b"{}")
                return answer
    finally:
        os.close(folder)
