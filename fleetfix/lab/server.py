"""The process behind a lab: starts its hosts, answers SSH for all of them, changes their weather.

Run as `python -m fleetfix.lab.server FOLDER`. Reads one line (a LabPlan) when the hosts' disks are
laid out, answers one line when all are up, and stays until it is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import asyncssh

from fleetfix.errors import LabError
from fleetfix.lab import layout, namespaces, papers, record
from fleetfix.lab.network import Wire
from fleetfix.lab.record import HostPlan, HostRecord, LabPlan, LabRecord, Paths, ProcessRecord
from fleetfix.lab.sessions import Process, Session, account

PORT_TRIES = 20
FOLDER_CHECK = 5.0  # seconds


class _Host:
    """One host: its first process, its wire, its SSH options."""

    def __init__(self, paths: Paths, plan: HostPlan, python: str) -> None:
        self.paths = paths
        self.plan = plan
        self.python = python
        self.outside: subprocess.Popen[bytes] | None = None
        self.init = ProcessRecord(pid=0, start=0)
        self.wire: Wire
        self.key: asyncssh.SSHKey
        self.options: asyncssh.SSHServerConnectionOptions

    def spawn(self) -> None:
        """Start its namespaces and first process; `started` takes the report."""
        init = [self.python, "-ISB", str(self.paths.init), str(self.paths.spec(self.plan.name))]
        self.outside = subprocess.Popen(
            namespaces.unshare(init),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=namespaces.PRIVATE,
            cwd="/",
            start_new_session=True,
        )

    def started(self) -> None:
        """Read the report of its first process; a LabError where it could not lay itself out."""
        assert self.outside is not None
        assert self.outside.stdout is not None
        line = self.outside.stdout.readline()
        self.outside.stdout.close()
        report: dict[str, Any] = json.loads(line) if line.strip() else {"error": "no word from its init"}
        if "error" in report:
            raise LabError(f"{self.plan.name} did not start: {report['error']}", hint=namespaces.remedy())
        there = namespaces.started(report["pid"])
        self.init = ProcessRecord(pid=there.pid, start=there.start)

    def end(self) -> None:
        """End every process of the host, by ending its first one."""
        if self.init.pid:
            self.init.process.kill()
        elif self.outside is not None:
            self.outside.kill()

    async def serve(self, end: socket.socket) -> None:
        """Answer one SSH connection."""
        try:
            connection = await asyncssh.run_server(end, options=self.options)
        except (OSError, asyncssh.Error, TimeoutError):
            return
        await connection.wait_closed()

    async def session(self, channel: Process) -> None:
        """Answer one channel of it."""
        name = channel.get_extra_info("username")
        who = account(self.paths.disk(self.plan.name) / "etc/passwd", name)
        if who is None:
            channel.stderr.write(f"no user {name} on this host\n".encode())
            channel.exit(255)
            return
        await Session(channel, self.init.pid, who, self.python).run()

    def record(self) -> HostRecord:
        return HostRecord(**self.plan.model_dump(), init=self.init)


class _Access(asyncssh.SSHServer):
    """Keys only; connections onward only to hosts of labs (for ProxyJump)."""

    def begin_auth(self, username: str) -> bool:
        return True

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        return dest_host.startswith("127.77.")


class Server:
    """All of it."""

    def __init__(self, paths: Paths, plan: LabPlan) -> None:
        self.paths = paths
        self.plan = plan
        self.hosts = {one.name: _Host(paths, one, plan.python) for one in plan.hosts}
        self.port = plan.port
        self.client = ""

    async def start(self) -> None:
        """Start every host and listen for each."""
        for host in self.hosts.values():
            host.spawn()
        self._open_wires()
        self._make_keys()
        for host in self.hosts.values():
            await asyncio.to_thread(host.started)
            host.wire.start()
        await self._listen_for_control()
        self.save()

    def save(self) -> None:
        """Write the record that `down` and `status` go by."""
        me = namespaces.started(os.getpid())
        record.save(
            self.paths,
            LabRecord(
                boot_id=record.boot_id(),
                port=self.port,
                python=self.plan.python,
                installer=self.plan.installer,
                server=ProcessRecord(pid=me.pid, start=me.start),
                hosts=tuple(host.record() for host in self.hosts.values()),
                span=self.plan.span,
                shared=self.plan.shared,
            ),
        )

    def end(self) -> None:
        """End every host."""
        for host in self.hosts.values():
            host.end()

    def _open_wires(self) -> None:
        """Find one port that is free at every address."""
        for attempt in range(PORT_TRIES):
            try:
                self._open_at(self.plan.port)
            except OSError as error:
                if self.plan.port or attempt == PORT_TRIES - 1:
                    raise LabError(f"no port for the lab: {error}", hint="give another --port") from None
            else:
                return

    def _open_at(self, port: int) -> None:
        opened: list[Wire] = []
        try:
            for host in self.hosts.values():
                host.wire = Wire(host.plan.address, port, host.serve)
                host.wire.open()
                opened.append(host.wire)
                port = host.wire.port
        except OSError:
            for wire in opened:
                wire.close()
            raise
        self.port = port

    def _make_keys(self) -> None:
        self.client = papers.write_client_key(self.paths)
        for host in self.hosts.values():
            host.key = asyncssh.generate_private_key("ssh-ed25519")
            papers.write_host_key(self.paths, host.plan.name, host.key)
            self._show(host, host.key)
        papers.write_all(self.paths, self.plan, self.port)

    def _show(self, host: _Host, key: asyncssh.SSHKey) -> None:
        """Have a host show this key to its clients from now on."""
        host.options = asyncssh.SSHServerConnectionOptions(
            server_factory=_Access,
            server_host_keys=[key],
            authorized_client_keys=asyncssh.import_authorized_keys(self.client),
            process_factory=host.session,
            encoding=None,
            line_editor=False,
            allow_scp=False,
            compression_algs=None,
            agent_forwarding=False,
        )

    # -- control ------------------------------------------------------------------------------------

    async def _listen_for_control(self) -> None:
        """Listen in the lab's folder; through its descriptor, as a path may be too long for a socket."""
        folder = os.open(self.paths.root, os.O_PATH | os.O_DIRECTORY)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.paths.control)
        await asyncio.start_unix_server(self._control, f"/proc/self/fd/{folder}/{self.paths.control.name}")
        os.chmod(self.paths.control, 0o600)

    async def _control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        try:
            answer: dict[str, Any] = {"ok": True, **(await self._obey(json.loads(line)))}
        except (LabError, OSError, KeyError, ValueError) as error:
            answer = {"error": str(error)}
        with contextlib.suppress(ConnectionError):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _obey(self, order: dict[str, Any]) -> dict[str, Any]:
        host = self.hosts[order["host"]]
        match order["do"]:
            case "weather":
                host.wire.change(order["weather"], float(order.get("delay", 0.0)))
            case "drop":
                host.wire.drop()
            case "new_key":
                self._show(host, asyncssh.generate_private_key("ssh-ed25519"))
            case "old_key":
                self._show(host, host.key)
            case "reboot":
                await self._reboot(host)
            case _:
                raise LabError(f"the lab's server does not know {order['do']}")
        return {"weather": host.wire.weather}

    async def _reboot(self, host: _Host) -> None:
        host.wire.drop()
        disk = self.paths.disk(host.plan.name)
        await asyncio.to_thread(layout.keep_state, disk, host.init.pid)
        host.end()
        assert host.outside is not None
        await asyncio.to_thread(host.outside.wait)
        layout.give_state(disk)
        layout.new_boot(disk)
        host.spawn()
        await asyncio.to_thread(host.started)
        self.save()


async def _main(folder: str) -> int:
    paths = Paths(Path(folder))
    line = await asyncio.to_thread(sys.stdin.readline)
    if not line.strip():
        return 1
    server = Server(paths, LabPlan.model_validate_json(line))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await server.start()
        _answer(sys.stdout, {"ok": True})
        await _until(stop, paths)
    except LabError as error:
        _answer(sys.stdout, {"error": error.message, "hint": error.hint})
    finally:
        server.end()
    return 0


async def _until(stop: asyncio.Event, paths: Paths) -> None:
    """Wait to be ended, or until the lab's folder is gone: nobody could find this lab any more."""
    while not stop.is_set() and paths.root.exists():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), FOLDER_CHECK)


def _answer(file: IO[str], value: dict[str, Any]) -> None:
    """Say how it went and let go of what started us: from now on, output goes to the log."""
    with contextlib.suppress(BrokenPipeError):
        file.write(json.dumps(value) + "\n")
        file.flush()
    os.dup2(2, 1)


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(asyncio.run(_main(sys.argv[1])))
