"""The operator's ssh agent, for the wire by paramiko: one connection for all threads, one request at once.

Paramiko's own asks it anew for each host, and waits for ever where it does not answer.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

from paramiko import SSHException
from paramiko.agent import AgentKey, AgentSSH

from fleetfix.transports.ssh_agent import ANSWERS_WITHIN, NOT_ASKED_FOR

_REQUEST_IDENTITIES = bytes([11])
_IDENTITIES = 12


class Agent(AgentSSH):  # type: ignore[misc]
    """An agent at one path; keys of it sign by it, in whatever thread."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._conn: socket.socket | None = None
        self.trouble = ""
        """Why it is of no use now."""
        self._path = path
        self._turn = threading.Lock()
        self._hung_at: float | None = None

    def keys(self) -> list[AgentKey]:
        """The keys that it has now. Raises SSHException."""
        kind, answer = self._send_message(_REQUEST_IDENTITIES)
        if kind != _IDENTITIES:
            raise SSHException(f"the ssh agent at {self._path} gives no keys")
        return [AgentKey(self, answer.get_binary(), answer.get_text()) for _ in range(answer.get_int())]

    def _send_message(self, msg: Any) -> Any:
        with self._turn:
            if self._hung_at is not None and time.monotonic() - self._hung_at < NOT_ASKED_FOR:
                raise SSHException(self.trouble)
            again = self._conn is not None
            try:
                try:
                    answer = self._asked(msg)
                except (OSError, SSHException) as error:
                    # One that was started anew meanwhile has hung up.
                    if not again or isinstance(error, TimeoutError):
                        raise
                    answer = self._asked(msg)
            except TimeoutError:
                self._hung_at = time.monotonic()
                self.trouble = f"the ssh agent at {self._path} does not answer"
                raise SSHException(self.trouble) from None
            except (OSError, SSHException) as error:
                why = getattr(error, "strerror", None) or str(error) or "no answer"
                self.trouble = f"the ssh agent at {self._path}: {why.lower()}"
                raise SSHException(self.trouble) from None
            self._hung_at, self.trouble = None, ""
            return answer

    def _asked(self, msg: Any) -> Any:
        try:
            if self._conn is None:
                self._conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._conn.settimeout(ANSWERS_WITHIN)
                self._conn.connect(self._path)
            return super()._send_message(msg)
        except BaseException:
            connection, self._conn = self._conn, None
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.close()
            raise


_agents: dict[str, Agent] = {}
_agents_lock = threading.Lock()


def agent_at(path: str) -> Agent:
    """The one client of this process for an agent."""
    with _agents_lock:
        return _agents.setdefault(path, Agent(path))
