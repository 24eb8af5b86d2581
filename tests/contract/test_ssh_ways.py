"""SSH as people have it, against a real OpenSSH server: jump hosts, agents, certificates, known hosts.

The server listens on several addresses of this machine, each of which stands for a machine of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from fleetfix.errors import Failure, HostError
from fleetfix.inventory import Host
from fleetfix.remote.api import descendants
from fleetfix.session import Purpose, Session, open_session
from fleetfix.transports import jump_hosts, ssh_agent
from fleetfix.transports.jump_hosts import chain_to, way_to
from fleetfix.transports.pace import pace_of
from fleetfix.transports.ssh_login import Connection, Login, log_in
from tests.contract import sshd

PURPOSE = Purpose(run="r1", playbook="p", dry=True, operator="o", controller="c")
ADDRESSES = "ListenAddress 127.0.0.2\nListenAddress 127.0.0.3\nLogLevel VERBOSE\n"
USER = getpass.getuser()


@pytest.fixture(scope="module")
def machines() -> Iterator[sshd.Server]:
    """One server at 127.0.0.1, .2 and .3; every machine has the same key, and it is known."""
    if reason := sshd.why_not():
        pytest.skip(reason)
    with sshd.folder_for_all() as folder, sshd.server(folder, more=ADDRESSES) as running:
        while not seen(running):  # it is written down that the port was tried
            time.sleep(0.01)
        yield running


@pytest.fixture
def known(machines: sshd.Server, tmp_path: Path) -> Path:
    """A known_hosts file with the key of all machines."""
    file = tmp_path / "known_hosts"
    kind, key = (machines.folder / "host_key.pub").read_text().split()[:2]
    file.write_text(f"[127.0.0.*]:{machines.port} {kind} {key}\n")
    return file


Configured = Callable[..., Path]


@pytest.fixture
def configured(machines: sshd.Server, known: Path, tmp_path: Path) -> Configured:
    """Write an ssh configuration: these blocks before what holds for all of them."""

    def write(*blocks: str, key: bool = True) -> Path:
        file = tmp_path / "ssh_config"
        lines = [
            *blocks,
            "Host b1\n HostName 127.0.0.2",
            "Host b2\n HostName 127.0.0.3",
            f"Host *\n HostName 127.0.0.1\n Port {machines.port}\n User {USER}",
            f" UserKnownHostsFile {known}\n GlobalKnownHostsFile none",
            f" IdentityFile {machines.folder / 'key' if key else 'none'}",
        ]
        file.write_text("\n".join(lines) + "\n")
        return file

    return write


def host(name: str, config: Path, via: str | None = None) -> Host:
    return Host(name=name, address=name, via=via, ssh_config=str(config))


@contextlib.asynccontextmanager
async def sessions(*hosts: Host) -> AsyncIterator[list[Session]]:
    """Sessions on all of these hosts at once, closed at the end."""
    opened = await asyncio.gather(*(open_session(one, PURPOSE) for one in hosts))
    try:
        yield opened
    finally:
        await asyncio.gather(*(one.close() for one in opened))


@contextlib.asynccontextmanager
async def logins(*hosts: Host, within: float = 20.0) -> AsyncIterator[list[Connection]]:
    """Connections that are logged in and run nothing, to all of these hosts at once."""
    made: list[tuple[Connection, jump_hosts.Chain]] = []

    async def one(host: Host) -> None:
        way = await way_to(host)
        login = Login(way.host, None, host.key_file, within)
        pace = pace_of(way.server)
        place = await pace.enter()
        try:
            chain = await chain_to(way, login)
            made.append((await log_in(login, chain.end, host.name, pace), chain))
        finally:
            place.leave()

    try:
        for error in await asyncio.gather(*map(one, hosts), return_exceptions=True):
            if isinstance(error, BaseException):
                raise error
        yield [connection for connection, _ in made]
    finally:
        await asyncio.gather(*(connection.hang_up() for connection, _ in made))
        for _, chain in made:
            await chain.let_go()


async def refused(host: Host, **more: object) -> Failure:
    with pytest.raises(HostError) as error:
        await open_session(host, PURPOSE, **more)  # type: ignore[arg-type]
    return error.value.failure


def seen(server: sshd.Server) -> list[str]:
    """The addresses at which the server was connected to, in order."""
    log = (server.folder / "sshd.log").read_text()
    return re.findall(r"Connection from \S+ port \d+ on (\S+) port", log)


@contextlib.contextmanager
def counted(server: sshd.Server) -> Iterator[dict[str, int]]:
    """How often each address was connected to in the block."""
    found: dict[str, int] = {}
    before = len(seen(server))
    yield found
    for address in seen(server)[before:]:
        found[address] = found.get(address, 0) + 1


# -- jump hosts ---------------------------------------------------------------------------------------


async def test_a_jump_host_has_one_connection_wherever_it_is_named(
    machines: sshd.Server, configured: Configured
) -> None:
    config = configured(
        "Host by-jump*\n ProxyJump b1",
        "Host by-command*\n ProxyCommand ssh -q -W [%h]:%p b1",
    )
    names = [f"by-{how}{number}" for how in ("jump", "command") for number in (1, 2)]
    behind = [host(name, config) for name in names] + [host(f"plain{n}", config, via="b1") for n in (1, 2)]
    with counted(machines) as connections:
        async with logins(*behind):
            pass
    assert connections == {"127.0.0.2": 1, "127.0.0.1": 6}


async def test_chains_of_jump_hosts_are_gone_through_in_order(
    machines: sshd.Server, configured: Configured
) -> None:
    config = configured(
        "Host by-list\n ProxyJump b1,b2", "Host nested\n ProxyJump b2", "Host b2\n ProxyJump b1"
    )
    behind = [host("by-list", config), host("nested", config), host("plain", config, via="b1,b2")]
    with counted(machines) as connections:
        async with logins(*behind):
            pass
    assert connections == {"127.0.0.2": 1, "127.0.0.3": 1, "127.0.0.1": 3}
    with counted(machines) as connections:
        async with sessions(host("direct", configured("Host direct\n ProxyJump b1"), via="none")):
            pass
    assert connections == {"127.0.0.1": 1}


async def test_hosts_behind_a_jump_host_that_was_cut_off_come_back_over_one_connection(
    machines: sshd.Server, configured: Configured
) -> None:
    config = configured("Host gpu*\n ProxyJump b1")
    async with sessions(*(host(f"gpu{number}", config) for number in range(3))) as opened:
        with counted(machines) as connections:
            for pid, _ in descendants(machines.process.pid):
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                        os.kill(pid, signal.SIGKILL)
            for session in opened:
                assert await session.recall("nothing") is None
        assert connections == {"127.0.0.2": 1, "127.0.0.1": 3}


async def test_the_other_wire_goes_the_same_way(machines: sshd.Server, configured: Configured) -> None:
    config = configured("Host gpu*\n ProxyCommand ssh -W %h:%p b2", "Host b2\n ProxyJump b1")
    hosts = [host(name, config).model_copy(update={"transport": "fabric"}) for name in ("gpu1", "gpu2")]
    with counted(machines) as connections:
        async with sessions(*hosts):
            pass
    assert connections == {"127.0.0.2": 1, "127.0.0.3": 1, "127.0.0.1": 2}


async def test_any_other_proxy_command_is_run_and_says_why_it_ends(configured: Configured) -> None:
    relay = (
        "import os,socket,sys,threading;s=socket.create_connection((sys.argv[1],int(sys.argv[2])));"
        "copy=lambda get,put:[put(d) for d in iter(get,bytes())];"
        "threading.Thread(target=copy,args=(lambda:os.read(0,65536),s.sendall),daemon=True).start();"
        "copy(lambda:s.recv(65536),lambda d:os.write(1,d))"
    )
    config = configured(
        f"Host good\n ProxyCommand sh -c 'echo mind the gap >&2; exec python3 -c \"{relay}\" %h %p'",
        "Host silent\n ProxyCommand sleep 60",
        "Host bad\n ProxyCommand sh -c 'echo no way through >&2; exit 3'",
    )
    async with logins(host("good", config)):
        pass
    silent = await refused(host("silent", config), connect_timeout=0.5)
    assert silent.message == "silent: its ProxyCommand does not connect within 0.5 s"
    failure = await refused(host("bad", config), connect_timeout=1.0)
    assert (failure.kind, failure.message) == ("unreachable", "bad: its ProxyCommand says: no way through")


async def test_a_wrong_key_of_the_jump_host_names_it_and_is_asked_once(
    machines: sshd.Server, configured: Configured, known: Path
) -> None:
    kind, key = (machines.folder / "key.pub").read_text().split()[:2]
    known.write_text(f"[127.0.0.2]:{machines.port} {kind} {key}\n")
    config = configured("Host gpu*\n ProxyJump b1")
    with counted(machines) as connections:
        failures = await asyncio.gather(*(refused(host(f"gpu{n}", config)) for n in range(6)))
    assert {failure.kind for failure in failures} == {"host_key"}
    assert all(
        failure.message.startswith("jump host b1: its key has changed to SHA256:") for failure in failures
    )
    assert connections == {"127.0.0.2": 1}


async def test_a_jump_host_that_does_not_answer_is_named_and_asked_once(configured: Configured) -> None:
    asked: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = configured(
            f"Host b1\n Port {silent.getsockname()[1]}\n HostName 127.0.0.1", "Host gpu*\n ProxyJump b1"
        )
        failures = await asyncio.gather(
            *(refused(host(f"gpu{n}", config), connect_timeout=0.6) for n in range(3))
        )
        # Those whose turn comes later, too, are told what is known by then.
        failures.append(await refused(host("gpu3", config), connect_timeout=0.6))
        silent.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                asked.append(silent.accept()[0])
    for one in asked:
        one.close()
    assert len(asked) == 1
    assert {failure.message for failure in failures} == {
        "jump host b1: it takes the connection and gives no SSH greeting within 0.6 s"
    }


async def test_what_a_jump_host_does_not_get_to_is_told_apart(configured: Configured) -> None:
    config = configured("Host closed\n Port 1", "Host unknown\n HostName no-such-host.invalid")
    closed = await refused(host("closed", config, via=f"{USER}@b1"))
    assert closed.message == "closed: its jump host does not get there: connection refused"
    unknown = await refused(host("unknown", config, via=f"{USER}@b1"))
    assert unknown.message.startswith("unknown: its jump host does not get there: ")
    assert {closed.kind, unknown.kind} == {"unreachable"}


async def test_a_jump_host_that_forwards_nothing_says_so(tmp_path: Path) -> None:
    with sshd.server(tmp_path, more="AllowTcpForwarding no") as closed:
        failure = await refused(closed.host(USER, via=f"{USER}@127.0.0.1:{closed.port}"))
    assert failure.kind == "unreachable"
    assert "AllowTcpForwarding" in failure.hint


# -- crowds -------------------------------------------------------------------------------------------


async def test_a_bastion_that_lets_few_in_serves_thirty_hosts(tmp_path: Path) -> None:
    narrow = "MaxStartups 3:50:5\nMaxSessions 1\nLogLevel VERBOSE\nListenAddress 127.0.0.2"
    with sshd.server(tmp_path, more=narrow) as bastion:
        (tmp_path / "known_hosts").write_text("")
        config = tmp_path / "ssh_config"
        config.write_text(
            f"StrictHostKeyChecking accept-new\nHost b1\n HostName 127.0.0.2\n{config.read_text()}"
        )
        behind = bastion.host(USER, via=f"{USER}@b1:{bastion.port}")
        hosts = [behind.model_copy(update={"name": f"gpu{number:02}"}) for number in range(30)]
        # All thirty are one server that drops whom it will, too.
        with counted(bastion) as connections:
            async with logins(*hosts) as made:
                assert len(made) == 30
        assert connections["127.0.0.2"] == 1


# -- keys ---------------------------------------------------------------------------------------------


@pytest.fixture
def agent(machines: sshd.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real ssh agent with the one key, that may have few files open."""
    path = tmp_path / "agent"
    running = subprocess.Popen(
        ["sh", "-c", 'ulimit -n 16; exec ssh-agent -D -a "$0"', str(path)], stdout=subprocess.DEVNULL
    )
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        subprocess.run(
            ["sh", "-c", f"until [ -S {path} ]; do sleep 0.01; done; ssh-add -q {machines.folder / 'key'}"],
            check=True,
            timeout=20,
        )
        yield path
    finally:
        running.kill()
        running.wait()


async def test_one_agent_serves_a_fleet_that_has_no_other_key(agent: Path, configured: Configured) -> None:
    config = configured(key=False)
    async with logins(*(host(f"gpu{number:03}", config) for number in range(40))) as made:
        assert len(made) == 40


async def test_identities_only_offers_no_other_key_of_the_agent(
    agent: Path, machines: sshd.Server, configured: Configured, tmp_path: Path
) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True
    )
    (tmp_path / "named.pub").write_text((machines.folder / "key.pub").read_text())
    config = configured(
        f"Host by-public-half\n IdentityFile {tmp_path / 'named'}",
        f"Host other\n IdentityFile {tmp_path / 'other'}",
        "Host *\n IdentitiesOnly yes",
        key=False,
    )
    async with logins(host("by-public-half", config)):
        pass
    assert (await refused(host("other", config))).kind == "auth"


async def test_an_agent_with_more_keys_than_a_server_lets_one_try_is_told(
    agent: Path, tmp_path: Path
) -> None:
    for number in range(3):
        key = str(tmp_path / f"other{number}")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        subprocess.run(["ssh-add", "-q", key], check=True)
    with sshd.server(tmp_path, more="MaxAuthTries 2") as strict:
        config = tmp_path / "ssh_config"
        config.write_text(config.read_text().replace("IdentitiesOnly yes", ""))
        failure = await refused(strict.host(USER))
    assert (failure.kind, failure.message) == ("auth", "gpu01: too many authentication failures")
    assert "IdentitiesOnly" in failure.hint


async def test_an_agent_that_hangs_is_passed_over_and_named(
    machines: sshd.Server, configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "hangs")
    monkeypatch.setenv("SSH_AUTH_SOCK", path)
    monkeypatch.setattr(ssh_agent, "ANSWERS_WITHIN", 0.3)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        async with logins(*(host(f"gpu{number}", configured()) for number in range(4))) as made:
            assert len(made) == 4, "the key file still logs in"
        failure = await refused(host("gpu1", configured(key=False)))
    assert (failure.kind, failure.message) == ("auth", f"gpu1: permission denied for user {USER}")
    assert failure.hint == f"the ssh agent at {path} does not answer"


async def test_a_key_that_cannot_be_used_is_told_where_none_is_accepted(
    configured: Configured, tmp_path: Path
) -> None:
    locked, broken = tmp_path / "locked", tmp_path / "broken"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(locked)], check=True)
    broken.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nnonsense\n-----END OPENSSH PRIVATE KEY-----\n")
    files = f" IdentityFile {locked}\n IdentityFile {broken}\n IdentityFile /nowhere"
    failure = await refused(host("gpu1", configured(f"Host *\n{files}", key=False)))
    assert failure.kind == "auth"
    assert f"{locked} has a passphrase: ssh-add {locked}" in failure.hint
    assert f"{broken} is no private key" in failure.hint
    assert "/nowhere" not in failure.hint


async def test_certificates_of_users_and_hosts_hold_through_a_jump_host(tmp_path: Path) -> None:
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
    for name in ("ca", "mine", "host_key"):
        subprocess.run([*keygen, str(tmp_path / name)], check=True)
    sign = ["ssh-keygen", "-q", "-s", str(tmp_path / "ca")]
    subprocess.run(
        [*sign, "-I", "host", "-h", "-n", "127.0.0.1", str(tmp_path / "host_key.pub")], check=True
    )
    subprocess.run([*sign, "-I", "user", "-n", USER, str(tmp_path / "mine.pub")], check=True)
    more = f"TrustedUserCAKeys {tmp_path}/ca.pub\nHostCertificate {tmp_path}/host_key-cert.pub\n"
    with sshd.server(tmp_path, more=more) as server:
        (tmp_path / "authorized_keys").write_text("")
        authority = " ".join((tmp_path / "ca.pub").read_text().split()[:2])
        (tmp_path / "known_hosts").write_text(f"@cert-authority [127.0.0.1]:* {authority}\n")
        config = tmp_path / "ssh_config"
        config.write_text(config.read_text().replace(f"{tmp_path}/key", f"{tmp_path}/mine"))
        there = server.host(USER, via=f"{USER}@127.0.0.1:{server.port}")
        async with logins(there):
            pass
        # The key of the authority itself is revoked.
        (tmp_path / "known_hosts").write_text(
            f"@cert-authority [127.0.0.1]:* {authority}\n@revoked * {authority}\n"
        )
        failure = await refused(there)
        assert (failure.kind, failure.message.partition(": ")[2]) == ("host_key", "its key is revoked")


# -- known hosts --------------------------------------------------------------------------------------


async def test_new_keys_are_hashed_where_the_configuration_says_so(
    machines: sshd.Server, configured: Configured, known: Path
) -> None:
    known.write_text("# no line end")
    config = configured("Host *\n HashKnownHosts yes\n StrictHostKeyChecking accept-new")
    async with sessions(host("gpu1", config)):
        pass
    comment, line = known.read_text().splitlines()
    assert comment == "# no line end"
    assert line.startswith("|1|")
    found = subprocess.run(
        ["ssh-keygen", "-F", f"[127.0.0.1]:{machines.port}", "-f", str(known)], capture_output=True
    )
    assert found.returncode == 0, "ssh finds it, too"
    async with sessions(host("gpu1", configured("Host *\n StrictHostKeyChecking yes"))):
        pass


async def test_a_key_that_cannot_be_written_down_is_believed_once_and_said(
    machines: sshd.Server, configured: Configured
) -> None:
    config = configured("Host *\n UserKnownHostsFile /dev/full\n StrictHostKeyChecking accept-new")
    told: list[str] = []
    for _ in range(2):
        session = await open_session(
            host("gpu1", config), PURPOSE, progress=lambda _, text: told.append(text)
        )
        await session.close()
    assert told == ["its new key is not written down: /dev/full: no space left on device"]


async def test_revoked_keys_and_keys_of_another_kind_are_refused(
    machines: sshd.Server, configured: Configured, known: Path, tmp_path: Path
) -> None:
    pattern = f"[127.0.0.1]:{machines.port}"
    key = " ".join((machines.folder / "host_key.pub").read_text().split()[:2])
    revoked = tmp_path / "revoked"
    revoked.write_text(f"# stolen\n{key}\n")
    by_file = await refused(host("gpu1", configured(f"Host *\n RevokedHostKeys {revoked}")))
    known.write_text(f"{pattern} {key}\n@revoked * {key}\n")
    by_line = await refused(host("gpu1", configured()), host_keys="accept_new")
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(tmp_path / "ecdsa")], check=True)
    known.write_text(f"{pattern} {(tmp_path / 'ecdsa.pub').read_text()}")
    of_another_kind = await refused(host("gpu1", configured()), host_keys="accept_new")
    kinds = {by_file.kind, by_line.kind, of_another_kind.kind}
    assert kinds == {"host_key"}
    assert by_file.message == by_line.message == "gpu1: its key is revoked"
    assert (
        "no longer shows the key that is known, ecdsa-sha2-nistp256, but ssh-ed" in of_another_kind.message
    )


# -- limits -------------------------------------------------------------------------------------------


async def test_a_session_costs_one_descriptor_and_none_behind_a_jump_host(
    agent: Path, configured: Configured
) -> None:
    config = configured("Host behind*\n ProxyJump b1", key=False)
    async with logins(host("first", config)):
        before = _open_files()
        async with logins(*(host(f"direct{number}", config) for number in range(5))):
            assert _open_files() - before == 5
        async with logins(*(host(f"behind{number}", config) for number in range(5))):
            assert _open_files() - before == 1


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_how_long_a_host_may_take_is_said_by_inventory_or_configuration(
    configured: Configured,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        config = configured(f"Host *\n Port {port}\n ConnectTimeout 1")
        by_config = host("gpu1", config)
        by_inventory = by_config.model_copy(update={"connect_timeout": 0.5})
        messages = [
            failure.message for failure in await asyncio.gather(*map(refused, (by_config, by_inventory)))
        ]
        asked = await refused(by_inventory, connect_timeout=0.3)
    assert messages[0] == "gpu1: it takes the connection and gives no SSH greeting within 1 s"
    assert messages[1] == "gpu1: it takes the connection and gives no SSH greeting within 0.5 s"
    assert asked.message.endswith("within 0.3 s")


async def test_an_address_of_ipv6_is_reached_by_name_in_brackets_and_through_a_jump_host(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6))
        except OSError:
            pytest.skip("no IPv6 on this machine's loopback")
        server = stack.enter_context(sshd.server(tmp_path, more="ListenAddress ::1"))
        config = tmp_path / "ssh_config"
        config.write_text(f"StrictHostKeyChecking accept-new\n{config.read_text()}")
        there = server.host(USER)
        async with logins(
            there.model_copy(update={"address": "::1"}),
            there.model_copy(update={"address": "[::1]"}),
            there.model_copy(update={"via": f"{USER}@[::1]:{server.port}"}),
        ) as made:
            assert len(made) == 3
        assert f"[::1]:{server.port} ssh-ed25519" in (tmp_path / "known_hosts").read_text()


async def test_what_stands_in_the_way_of_a_connection_is_told_apart(configured: Configured) -> None:
    config = configured(
        "Host refused\n Port 1", "Host unknown\n HostName no-such-host.invalid", "Host bad\n Port x"
    )
    assert (await refused(host("refused", config))).message == "refused: connection refused"
    assert "not known" in (await refused(host("unknown", config))).message
    assert "Invalid Port integer value: x" in (await refused(host("bad", config))).message


def test_a_machine_without_a_way_says_so(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    names = "10.9.8.7,10.9.8.8,10.9.8.9,"
    done = subprocess.run(
        [
            "unshare",
            "-rn",
            sys.executable,
            "-m",
            "fleetfix",
            "exec",
            "-i",
            names,
            "--hosts",
            "*",
            "--",
            "true",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "FLEETFIX_STATE_DIR": str(tmp_path / "state")},
    )
    assert done.returncode == 4
    assert "network is unreachable" in done.stderr
    assert "3 of 3 hosts out of reach: look at this machine's own network first" in done.stderr


async def test_a_server_that_lets_nobody_run_a_command_says_so(tmp_path: Path) -> None:
    with sshd.server(tmp_path, more="MaxSessions 0") as closed:
        failure = await refused(closed.host(USER))
    assert failure.kind == "unreachable"
    assert "opens no session" in failure.message
    assert "MaxSessions" in failure.hint
