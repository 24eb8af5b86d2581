"""A real OpenSSH server on this machine, with accounts of its own, for the contract suite."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fleetfix.inventory import Host
from fleetfix.remote.api import descendants

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"

_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
Banner {folder}/banner
PrintMotd yes
PermitUserEnvironment no
AcceptEnv *

{more}
MaxSessions 50
MaxStartups 100
"""

_CLIENT = """\
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile none
"""


@dataclass
class Server:
    """A running sshd and how to reach it."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    def host(self, user: str, *, name: str = "gpu01", via: str | None = None, become: bool = False) -> Host:
        """This server as a host of the inventory."""
        return Host(
            name=name,
            address="127.0.0.1",
            port=self.port,
            user=user,
            via=via,
            become=become,
            ssh_config=str(self.folder / "ssh_config"),
        )


def connections_of(server: Server) -> list[int]:
    """The processes that sshd has forked for its connections, what runs on them left out."""
    return [pid for pid, _ in descendants(server.process.pid) if _name_of(pid).startswith("sshd")]


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:  # it has just ended
        return ""


def why_not() -> str | None:
    """Why no server can be run here, or None."""
    if not Path(SSHD).exists():
        return "no sshd here: install openssh-server"
    if shutil.which("ssh-keygen") is None:
        return "no ssh-keygen here: install openssh-client"
    return None


@contextlib.contextmanager
def server(folder: Path, more: str = "") -> Iterator[Server]:
    """Run an sshd in the foreground below this folder until the end of the block."""
    for name in ("host_key", "key"):
        if not (folder / name).exists():
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
            )
    port = _free_port()
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    (folder / "banner").write_text("Authorised use only.\n" * 3)
    (folder / "sshd_config").write_text(_CONFIG.format(port=port, folder=folder, more=more))
    (folder / "ssh_config").write_text(_CLIENT.format(folder=folder))
    known(folder, port, folder / "host_key.pub")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    log = (folder / "sshd.log").open("ab")
    process = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    try:
        _wait_for(port, process)
        yield Server(folder, port, process)
    finally:
        process.terminate()
        process.wait(10)
        log.close()


def known(folder: Path, port: int, key: Path) -> None:
    """Write the known_hosts file so that it holds this key for the server."""
    kind, text = key.read_text().split()[:2]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {text}\n")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError("sshd did not start")


@contextlib.contextmanager
def account(name: str, shell: str, folder: Path, password: str | None = None) -> Iterator[Path]:
    """An account on this machine for the time of the block; gives its home. Needs root."""
    home = folder / f"home-{name}"
    subprocess.run(["useradd", "--no-create-home", "-d", str(home), "-s", shell, name], check=True)
    try:
        entry = pwd.getpwnam(name)
        home.mkdir(exist_ok=True)
        os.chown(home, entry.pw_uid, entry.pw_gid)
        # An account without a password is locked, and a locked one is refused without PAM.
        text = f"{name}:{password or os.urandom(12).hex()}"
        subprocess.run(["chpasswd"], input=text.encode(), check=True)
        yield home
    finally:
        subprocess.run(["userdel", "-f", name], check=False, capture_output=True)


@contextlib.contextmanager
def sudo_rule(name: str, rule: str, defaults: str = "!lecture") -> Iterator[None]:
    """A rule in /etc/sudoers.d for the time of the block. Needs root."""
    path = Path(f"/etc/sudoers.d/{name}")
    path.write_text(f"Defaults:{name} {defaults}\n{name} ALL=(ALL) {rule}\n")
    path.chmod(0o440)
    try:
        yield
    finally:
        path.unlink()


@contextlib.contextmanager
def folder_for_all(mode: int = 0o755) -> Iterator[Path]:
    """A folder that other accounts can reach: pytest closes its own to them, again at each start."""
    folder = Path(tempfile.mkdtemp(prefix="fleetfix-"))
    try:
        folder.chmod(mode)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
