"""Connections by Fabric, as ssh would make them: configuration, keys, agent, known hosts, jump hosts.

Everything here blocks, and is called in threads. One `Line` is one connection to one host, with what it
goes through; it may be given up from any thread while another one opens it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import fabric
import paramiko

from fleetfix.errors import HostError
from fleetfix.transports import proxy_command
from fleetfix.transports.fabric_failures import failure_of
from fleetfix.transports.fabric_keys import Asking, Identities, Keys, kinds_known
from fleetfix.transports.host_keys import HostKeys, Policy
from fleetfix.transports.jump_hosts import REFUSED_FOR
from fleetfix.transports.ssh_config import Settings
from fleetfix.transports.ssh_configuration import Place, hops_of, settings

if TYPE_CHECKING:
    from fleetfix.inventory import Host

ATTEMPTS = 5
"""How often a connection is tried that the server drops before or while it answers: MaxStartups and
MaxSessions do that to a crowd."""
KEEPALIVE = 15
DROPPED = ("banner", "closed", "dropped", "negotiation failed")
"""Words of paramiko's where a server hung up before it had said who it is."""
LOOKS_AGAIN = 0.2
PUNCTUAL = 0.1
"""Seconds before the end of a time in which it counts as over."""
GIVEN_UP = "it was given up"

for _name in ("paramiko", "fabric", "invoke"):
    # What goes wrong comes as an exception; nothing of theirs is written over a live view.
    logging.getLogger(_name).addHandler(logging.NullHandler())
    logging.getLogger(_name).propagate = False


class _Dropped(HostError):
    """A jump host dropped it, as it does in a crowd."""


# -- one connection ---------------------------------------------------------------------------------------


class Line:
    """A connection to a host, and the jump hosts it goes through."""

    def __init__(self, host: Host, policy: Policy | None, seconds: float) -> None:
        self._host = host
        self._policy: Policy | None = policy
        self._seconds = seconds
        self._over = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._channel: paramiko.Channel | None = None
        self._chain = _Chain(self._over)
        self._connection: fabric.Connection | None = None
        self._proxy: _Proxy | None = None

    def open(self, config: fabric.Config | None = None) -> fabric.Connection:
        """Connect. Raises HostError; a server that drops is asked again, at random moments."""
        return self._patiently(lambda: self._connect(config))

    def start(self, command: str) -> paramiko.Channel:
        """Connect, and run a command. Raises HostError."""
        return self._patiently(lambda: self._run(command))

    def close(self) -> None:
        """Hang up, also while another thread is connecting; again it is a no-op. It may take seconds."""
        self._over.set()
        self._drop()
        while not self._idle.wait(LOOKS_AGAIN):
            # Paramiko waits without end for the answer to a command that it sent as the connection closed.
            self._drop()
            if self._channel is not None:
                self._channel.event.set()

    def _patiently(self, work: Any) -> Any:
        self._idle.clear()
        try:
            return self._tried(work)
        finally:
            self._idle.set()

    def _tried(self, work: Any) -> Any:
        until = time.monotonic() + self._seconds
        for attempt in range(1, ATTEMPTS + 1):
            keys = HostKeys(self._policy)
            self._keys = keys
            try:
                made = work()
                if not self._over.is_set():
                    return made
                raise OSError(GIVEN_UP)
            except Exception as error:
                self._drop()
                pause = random.uniform(0.05, 0.3) * 2**attempt
                late = time.monotonic() + pause > until
                if attempt == ATTEMPTS or late or self._over.is_set() or not _worth_another(error):
                    raise self._said(error, keys) from error
            self._over.wait(pause)
        raise AssertionError("unreachable")

    def _said(self, error: Exception, keys: HostKeys) -> HostError:
        if isinstance(error, HostError):
            return error
        return HostError(failure_of(error, self._host.name, keys))

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            _hang_up(connection)
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            proxy.close()
        self._chain.let_go()

    def _connect(self, config: fabric.Config | None) -> fabric.Connection:
        host = self._host
        place = Place(host.address, host.port, host.user, host.key_file)
        said = settings(place, host.ssh_config)
        gateway: Any = None
        if hops := hops_of(host):
            gateway = self._chain.reach(hops, host.ssh_config, self._policy, self._seconds)
        elif said.proxy_command:
            self._proxy = _Proxy(said.proxy_command)
        self._connection = connection = _made(place, self._keys, said, self._seconds, gateway, config)
        if self._over.is_set():
            raise OSError(GIVEN_UP)
        _dial(connection, said, self._proxy)
        return connection

    def _run(self, command: str) -> paramiko.Channel:
        connection = self._connect(None)
        channel = self._channel = connection.transport.open_session(timeout=self._seconds)
        channel.exec_command(command)
        return channel


class _Proxy:
    """A command that connects to a host, as ssh's ProxyCommand: by a shell, and apart from the terminal.

    Fabric's own leaves a process behind, and a ^C at the terminal ends it.
    """

    def __init__(self, command: str) -> None:
        self.socket, self._process = proxy_command.begun(command, subprocess.DEVNULL)

    def close(self) -> None:
        """End it."""
        self.socket.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(proxy_command.ENDS_WITHIN)
                return


def _dial(connection: fabric.Connection, said: Settings, proxy: _Proxy | None) -> None:
    source, family = said.text("BindAddress"), said.number("AddressFamily")
    if proxy is not None:
        connection.connect_kwargs["sock"] = proxy.socket
    elif (source or family) and not connection.gateway:
        connection.connect_kwargs["sock"] = _dialled(said, source, family or 0, connection.connect_timeout)
    begun = time.monotonic()
    try:
        connection.open()
    except (paramiko.AuthenticationException, paramiko.BadHostKeyException):
        raise
    except paramiko.SSHException as error:
        if time.monotonic() - begun < connection.connect_timeout - PUNCTUAL:
            raise
        # Paramiko's own words are of what it could not do after that.
        transport = connection.client.get_transport()
        heard = transport is not None and transport.remote_version
        silent = "it takes the connection and says nothing"
        raise TimeoutError("the key exchange has no end" if heard else silent) from error
    connection.transport.set_keepalive(KEEPALIVE)


def _dialled(said: Settings, source: str, family: int, seconds: float) -> socket.socket:
    """Connect as the configuration wants it, which Fabric cannot. Raises OSError."""
    failure: OSError = OSError("the name has no address")
    for kind, *_, address in socket.getaddrinfo(said.host, said.port, family, socket.SOCK_STREAM):
        made = socket.socket(kind, socket.SOCK_STREAM)
        try:
            made.settimeout(seconds)
            if source:
                made.bind((source, 0))
            made.connect(address)
        except OSError as error:
            made.close()
            failure = error
        else:
            return made
    raise failure


def _hang_up(connection: fabric.Connection) -> None:
    # Whatever state it is in: it may be connecting, and then only its client knows of a transport.
    with contextlib.suppress(Exception):
        connection.client.close()
    with contextlib.suppress(Exception):
        connection.close()


def _worth_another(error: Exception) -> bool:
    """Whether the server, or a jump host, dropped it as it does in a crowd."""
    if isinstance(error, _Dropped):
        return True
    if isinstance(error, HostError | paramiko.AuthenticationException | paramiko.BadHostKeyException):
        return False
    if isinstance(error, paramiko.IncompatiblePeer | TimeoutError):
        return False
    dropped = EOFError | ConnectionResetError | BrokenPipeError | paramiko.ChannelException
    return isinstance(error, dropped) or any(word in str(error).lower() for word in DROPPED)


def _made(
    place: Place,
    keys: HostKeys,
    said: Settings,
    seconds: float,
    gateway: Any,
    config: fabric.Config | None = None,
) -> fabric.Connection:
    """A connection that is not open yet. All that the configuration says is in it already."""
    address, port, user = said.host, said.port, said.user
    keys.learn(said)
    name = said.text("HostKeyAlias") or address
    known = kinds_known(keys, name, port)
    # What ssh's configuration says is settled here: Fabric is to read none by itself.
    settled = config or fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True)
    settled.authentication = {"strategy_class": partial(Keys, identities=Identities.of(place, said))}
    connection = fabric.Connection(
        address,
        user=user,
        port=port,
        config=settled,
        gateway=gateway if gateway is not None else False,
        forward_agent=False,
        connect_timeout=seconds,
        connect_kwargs={
            "banner_timeout": seconds,
            "auth_timeout": seconds,
            "channel_timeout": seconds,
            "compress": said.yes("Compression"),
            "transport_factory": partial(_transport, known=known),
        },
    )
    connection.client.set_missing_host_key_policy(Asking(keys, name, port))
    return connection


def _transport(sock: Any, disabled_algorithms: Any = None, *, known: frozenset[str]) -> paramiko.Transport:
    """A transport that asks for a key of a kind that is known of the host, as ssh does."""
    transport = paramiko.Transport(sock, disabled_algorithms=disabled_algorithms)
    transport.daemon = True
    options = transport.get_security_options()
    liked = [kind for kind in options.key_types if _key_name(kind) in known]
    options.key_types = [*liked, *(kind for kind in options.key_types if kind not in liked)]
    return transport


def _key_name(kind: str) -> str:
    return "ssh-rsa" if kind.startswith("rsa-sha2-") else kind


# -- jump hosts -------------------------------------------------------------------------------------------


@dataclass
class _Jump:
    """A connection to a jump host, which serves every host behind it while there is one."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    connection: fabric.Connection | None = None
    proxy: _Proxy | None = None
    users: int = 0
    refused: tuple[HostError, float] | None = None

    def hang_up(self) -> None:
        """End what it has; whoever comes next connects anew."""
        connection, self.connection = self.connection, None
        proxy, self.proxy = self.proxy, None
        if connection is not None:
            _hang_up(connection)
        if proxy is not None:
            proxy.close()


_jumps: dict[tuple[str, str | None], _Jump] = {}
_jumps_lock = threading.Lock()


class _Chain:
    """The jump hosts on the way to one host, the nearest first; held until `let_go`."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over
        self._held: list[_Jump] = []

    def reach(
        self, hops: list[str], ssh_config: str | None, policy: Policy | None, seconds: float
    ) -> fabric.Connection:
        """Connect to the jump hosts, each of them once for all hosts behind it. Raises HostError."""
        last: fabric.Connection | None = None
        until = time.monotonic() + seconds
        for number, hop in enumerate(hops, start=1):
            with _jumps_lock:
                jump = _jumps.setdefault((",".join(hops[:number]), ssh_config), _Jump())
            # Whoever asks it now has its answer by then, for all.
            if not jump.lock.acquire(timeout=max(until + PUNCTUAL - time.monotonic(), 0)):
                raise TimeoutError(f"jump host {hop}: no answer within {seconds:.0f} s")
            try:
                if self._over.is_set():
                    raise OSError(GIVEN_UP)
                if jump.connection is None or not jump.connection.is_connected:
                    jump.hang_up()
                    _connect(jump, hop, ssh_config, policy, until - time.monotonic(), last)
                    assert jump.connection is not None
                jump.users += 1
                self._held.append(jump)
                last = jump.connection
            finally:
                jump.lock.release()
        assert last is not None
        return last

    def let_go(self) -> None:
        """Hang up the connections that nobody needs any more, the farthest first."""
        while True:
            try:
                jump = self._held.pop()
            except IndexError:
                return
            with jump.lock:
                jump.users -= 1
                if jump.users == 0:
                    jump.hang_up()


def _connect(
    jump: _Jump,
    hop: str,
    ssh_config: str | None,
    policy: Policy | None,
    seconds: float,
    last: fabric.Connection | None,
) -> None:
    if jump.refused is not None and time.monotonic() - jump.refused[1] < REFUSED_FOR:
        raise jump.refused[0]
    keys = HostKeys(policy)
    begun = time.monotonic()
    try:
        place = Place.parse(hop)
        said = settings(place, ssh_config)
        if last is None and said.proxy_command:
            jump.proxy = _Proxy(said.proxy_command)
        jump.connection = _made(place, keys, said, max(seconds, PUNCTUAL), last)
        _dial(jump.connection, said, jump.proxy)
    except Exception as error:
        jump.hang_up()
        failure = failure_of(error, f"jump host {hop}", keys)
        if _worth_another(error):
            raise _Dropped(failure) from error
        told = HostError(failure)
        silent = time.monotonic() - begun >= seconds - PUNCTUAL
        if silent or failure.kind in ("auth", "host_key"):
            jump.refused = (told, time.monotonic())
        raise told from error
    jump.refused = None
