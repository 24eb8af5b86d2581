"""The contract over SSH by Fabric and paramiko, against the same OpenSSH server as the other wire.

Where accounts can be made it is kept as a user without rights; the other wire is used as root there.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import re
import shutil
import socket
import subprocess
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fleetfix.errors import HostError
from fleetfix.inventory import Host
from fleetfix.session import Purpose, Session, open_session
from fleetfix.transports import fabric_agent
from tests.contract import sshd
from tests.contract.command_contract import CommandContract
from tests.contract.place import Place, eventually, kill, read
from tests.contract.secret_contract import SecretPromises
from tests.contract.session_contract import HostContract
from tests.contract.test_local import disable

PURPOSE = Purpose(run="r1", playbook="p", dry=True, operator="o", controller="c")


def by_fabric(host: Host, **more: object) -> Host:
    return host.model_copy(update={"transport": "fabric", **more})


@pytest.fixture
def user(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("ordinary")) if os.geteuid() == 0 else getpass.getuser()


@pytest.fixture
async def place(server: sshd.Server, shared: Path, user: str) -> AsyncIterator[Place]:
    here = Place(by_fabric(server.host(user)), shared)
    here.disable = lambda text: disable(here.root, text)
    yield here
    await here.close()


class TestFabric(HostContract):
    """Every promise, by Fabric."""


class TestFabricSecrets(SecretPromises):
    """What is promised of secrets, by Fabric."""


class TestFabricCommands(CommandContract):
    """What a command of the operator's is promised, by Fabric."""


# -- the way to a host ------------------------------------------------------------------------------------


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[sshd.Server]:
    reason = sshd.why_not()
    if reason is not None:
        pytest.skip(reason)
    with sshd.server(tmp_path) as running:
        yield running


@pytest.fixture
def host(own_server: sshd.Server) -> Host:
    return by_fabric(own_server.host(getpass.getuser()))


@pytest.fixture(autouse=True)
async def no_thread_is_left() -> AsyncIterator[None]:
    before = set(threading.enumerate())
    yield

    def left() -> list[threading.Thread]:
        # The event loop's own look names up and write the journal; they are its to end.
        mine = [one for one in threading.enumerate() if one not in before]
        return [one for one in mine if "fleetfix-lookup" not in one.name and "asyncio" not in one.name]

    await eventually(lambda: left() == [])


async def refused(host: Host, timeout: float | None = 10.0, **more: object) -> HostError:
    with pytest.raises(HostError) as error:
        await open_session(host, PURPOSE, connect_timeout=timeout, **more)  # type: ignore[arg-type]
    return error.value


async def reached(host: Host, **more: object) -> None:
    session = await open_session(host, PURPOSE, **more)  # type: ignore[arg-type]
    await session.close()


def configured(server: sshd.Server, *lines: str, without: str = "") -> None:
    """Add lines to the client's configuration, without those that hold a word."""
    path = server.folder / "ssh_config"
    kept = [line for line in path.read_text().splitlines() if not without or without not in line]
    path.write_text("\n".join([*kept, *(f"    {line}" for line in lines)]) + "\n")


async def test_keys_of_hosts_are_looked_at_as_ssh_does(own_server: sshd.Server, host: Host) -> None:
    known = own_server.folder / "known_hosts"
    plain = known.read_text()
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, capture_output=True)
    assert "|1|" in known.read_text()
    await reached(host, host_keys="strict")

    known.write_text("@revoked " + plain)
    error = await refused(host, host_keys="accept_new")
    assert (error.failure.kind, "revoked" in error.failure.message) == ("host_key", True)

    known.write_text(f"@cert-authority {plain}")
    assert "transport: asyncssh" in (await refused(host, host_keys="accept_new")).failure.hint

    sshd.known(own_server.folder, own_server.port, own_server.folder / "key.pub")
    error = await refused(host, host_keys="accept_new")
    assert error.failure.kind == "host_key"
    assert re.search(r"has changed to SHA256:\S+", error.failure.message)
    assert f"ssh-keygen -R '[127.0.0.1]:{own_server.port}'" in error.failure.hint

    known.unlink()
    assert (await refused(host, host_keys="strict")).failure.kind == "host_key"
    configured(own_server, "StrictHostKeyChecking accept-new")
    await reached(host)
    assert known.read_text().split()[:3] == plain.split()[:3]
    await reached(host, host_keys="strict")


async def test_a_host_is_asked_for_the_kind_of_key_that_is_known(tmp_path: Path) -> None:
    if (reason := sshd.why_not()) is not None:
        pytest.skip(reason)
    rsa = tmp_path / "rsa_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", str(rsa)], check=True)
    with sshd.server(tmp_path, more=f"HostKey {rsa}") as server:
        sshd.known(tmp_path, server.port, Path(f"{rsa}.pub"))
        await reached(by_fabric(server.host(getpass.getuser())), host_keys="strict")


async def test_keys_of_ours_are_those_that_ssh_would_offer(own_server: sshd.Server, host: Host) -> None:
    key = own_server.folder / "key"
    configured(
        own_server, f"IdentityFile {own_server.folder}/none", f"IdentityFile {key}", without="Identity"
    )
    await reached(host)
    configured(own_server, "IdentityFile none", without="IdentityFile")
    error = await refused(host)
    assert (error.failure.kind, "no key" in error.failure.message) == ("auth", True)
    await reached(by_fabric(host, key_file=str(key)))
    (own_server.folder / "authorized_keys").write_text("")
    error = await refused(by_fabric(host, key_file=str(key)))
    assert (error.failure.kind, "ssh -v" in error.failure.hint) == ("auth", True)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-P", "", "-f", str(key)], check=True)
    error = await refused(by_fabric(host, key_file=str(key)))
    assert (error.failure.kind, error.failure.hint) == ("auth", f"{key} has a passphrase: ssh-add {key}")


async def test_an_agent_that_hangs_is_passed_over_and_named(
    own_server: sshd.Server, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fabric_agent, "ANSWERS_WITHIN", 0.2)
    path = own_server.folder / "hangs"
    configured(own_server, f"IdentityAgent {path}", "IdentityFile none", without="Identity")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        error = await refused(host)
        await reached(by_fabric(host, key_file=str(own_server.folder / "key")))
    assert (error.failure.kind, error.failure.hint) == ("auth", f"the ssh agent at {path} does not answer")


async def test_a_key_of_the_agent_and_a_certificate_log_in(own_server: sshd.Server, host: Host) -> None:
    if shutil.which("ssh-agent") is None:
        pytest.skip("no ssh-agent here: install openssh-client")
    folder, key = own_server.folder, own_server.folder / "key"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(folder / "agent")], stdout=subprocess.DEVNULL)
    try:
        await eventually((folder / "agent").exists)
        environment = {**os.environ, "SSH_AUTH_SOCK": str(folder / "agent")}
        subprocess.run(["ssh-add", "-q", str(key)], env=environment, check=True, capture_output=True)
        subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-P", "", "-f", str(key)], check=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSH_AUTH_SOCK", str(folder / "agent"))
            await reached(host)
            configured(own_server, "IdentityAgent none")
            assert (await refused(host)).failure.kind == "auth"
    finally:
        agent.terminate()
        agent.wait(10)
    authority, other = folder / "authority", folder / "other"
    for one in (authority, other):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(one)], check=True)
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", getpass.getuser(), f"{other}.pub"]
    subprocess.run(sign, check=True)
    public = Path(f"{authority}.pub").read_text()
    (folder / "authorized_keys").write_text(f"cert-authority {public}")
    await reached(by_fabric(host, key_file=str(other)))


async def test_the_configuration_is_read_with_include_and_match(
    own_server: sshd.Server, host: Host
) -> None:
    config = own_server.folder / "ssh_config"
    more = own_server.folder / "more"
    more.write_text(
        f"Match originalhost gpu99\n    HostName 127.0.0.1\n    Port {own_server.port}\n"
        f"    User {getpass.getuser()}\n    HostKeyAlias [127.0.0.1]:{own_server.port}\n"
    )
    config.write_text(f"Include {more}\n" + config.read_text())
    await reached(by_fabric(host, address="gpu99", port=None, user=None), host_keys="strict")


async def test_what_stands_in_the_way_is_unreachable_and_said(own_server: sshd.Server, host: Host) -> None:
    nothing = await refused(by_fabric(host, port=1))
    assert (nothing.failure.kind, nothing.failure.message) == ("unreachable", "gpu01: connection refused")
    unknown = await refused(by_fabric(host, address="no-such-host.invalid"))
    assert unknown.failure.kind == "unreachable"
    python = await refused(by_fabric(host, python="/nonexistent/python3"))
    assert python.failure.kind == "no_python"
    nobody = "it takes the connection and says nothing"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        configured(own_server, "ConnectTimeout 1")
        error = await refused(by_fabric(host, port=port), timeout=None)
        assert (error.failure.kind, error.failure.message) == ("unreachable", f"gpu01: {nobody}")
        asked: list[socket.socket] = [silent.accept()[0]]
        via = f"127.0.0.1:{port}"
        behind = by_fabric(host, via=via)
        failures = await asyncio.gather(*(refused(behind, timeout=0.5) for _ in range(3)))
        failures.append(await refused(behind, timeout=0.5))
        assert {one.failure.message for one in failures} == {f"jump host {via}: {nobody}"}
        silent.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                asked.append(silent.accept()[0])
        assert len(asked) == 2, "it is asked once for all behind it"
    for one in asked:
        one.close()
    jump = await refused(by_fabric(host, via="127.0.0.1:1"))
    assert "jump host 127.0.0.1:1" in jump.failure.message


async def test_a_jump_host_is_connected_to_once_for_all_behind_it(
    own_server: sshd.Server, host: Host
) -> None:
    user, port = getpass.getuser(), own_server.port
    config = own_server.folder / "ssh_config"
    plain, via = config.read_text(), f"{user}@127.0.0.1:{port}"
    jump = f"Host jump\n  HostName 127.0.0.1\n  User {user}\n  Port {port}\n"
    chain = f"{plain}{jump}Match originalhost 127.0.0.1\n  ProxyJump jump,jump\n"
    for text, behind, logins in ((plain, by_fabric(host, via=via), 4), (chain, host, 5)):
        config.write_text(text)
        before = _logins(own_server)
        sessions = await asyncio.gather(*(open_session(behind, PURPOSE) for _ in range(3)))
        assert _logins(own_server) - before == logins
        await asyncio.gather(*(session.close() for session in sessions))
        await eventually(lambda: sshd.connections_of(own_server) == [])


async def test_a_command_connects_where_the_configuration_says_so(
    own_server: sshd.Server, host: Host
) -> None:
    config = own_server.folder / "jump_config"
    config.write_text((own_server.folder / "ssh_config").read_text())
    there = f"ssh -q -F {config} -p {own_server.port} -W %h:%p 127.0.0.1"
    configured(own_server, f"ProxyCommand {there} 2>'{own_server.folder}/a file'")
    await reached(host, host_keys="strict")
    assert (own_server.folder / "a file").exists(), "a shell reads it"
    assert _logins(own_server) == 2
    # So is the first jump host reached, and what goes by itself goes from the address that is said.
    place = f"Host jump\n  HostName 127.0.0.1\n  Port {own_server.port}\n"
    jump = f"{place}  ProxyCommand {there} 2>'{own_server.folder}/another'\n"
    (own_server.folder / "ssh_config").write_text(jump + config.read_text() + "    BindAddress 127.0.0.7\n")
    await reached(by_fabric(host, via="jump"))
    assert (own_server.folder / "another").exists()
    await reached(host)
    assert "from 127.0.0.7 port" in (own_server.folder / "sshd.log").read_text()


async def test_a_crowd_that_the_server_drops_gets_in_all_the_same(tmp_path: Path) -> None:
    if (reason := sshd.why_not()) is not None:
        pytest.skip(reason)
    with sshd.server(tmp_path, more="MaxStartups 2:50:6") as crowded:
        host = by_fabric(crowded.host(getpass.getuser()))
        sessions = await asyncio.gather(*(open_session(host, PURPOSE) for _ in range(10)))
        await asyncio.gather(*(session.close() for session in sessions))


async def test_a_connection_that_is_cut_comes_back(own_server: sshd.Server, host: Host) -> None:
    session: Session = await open_session(host, PURPOSE)
    reading = asyncio.create_task(session.read("s", [read("echo", value=1)]))
    for pid in sshd.connections_of(own_server):
        kill(pid)
    await reading
    assert _logins(own_server) == 2
    await session.close()


async def test_sudo_is_told_its_password(
    as_root: None, server: sshd.Server, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("sudo") is None:
        pytest.skip("no sudo here")
    name = f"ff{uuid.uuid4().hex[:6]}"
    with sshd.account(name, "/bin/sh", shared, "correct horse"), sshd.sudo_rule(name, "ALL"):
        host = by_fabric(server.host(name, become=True))
        monkeypatch.delenv("FLEETFIX_BECOME_PASSWORD", raising=False)
        assert (await refused(host)).failure.kind == "sudo"
        monkeypatch.setenv("FLEETFIX_BECOME_PASSWORD", "correct horse")
        from fleetfix import conversation

        monkeypatch.setattr(conversation, "_passwords", {})
        session = await open_session(host, PURPOSE)
        assert session.info.uid == 0
        await session.close()


def _logins(server: sshd.Server) -> int:
    return (server.folder / "sshd.log").read_text().count("Accepted publickey")
