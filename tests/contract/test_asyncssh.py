"""The contract over SSH, against a real OpenSSH server: as the user who runs it, under each shell.

As a user without rights it is kept over the other wire, in `test_fabric`.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from fleetfix.conversation import Password
from fleetfix.errors import HostError
from fleetfix.inventory import Host
from fleetfix.session import Purpose, open_session
from tests.contract import sshd
from tests.contract.command_contract import CommandContract, ran, sh
from tests.contract.place import Place, call, change, eventually, kill, processes_with, read, token
from tests.contract.secret_contract import SecretPromises
from tests.contract.session_contract import ONE, HostContract
from tests.contract.test_local import disable

PlaceOn = Callable[[Host], Place]

BASHRC = """
echo "Welcome to $(hostname), you have mail"
printf 'no newline at the end'
echo 'on stderr too' >&2
set -o noclobber
"""


@pytest.fixture
async def place(server: sshd.Server, shared: Path) -> AsyncIterator[Place]:
    here = Place(server.host(getpass.getuser()), shared)
    here.disable = lambda text: disable(here.root, text)
    yield here
    await here.close()


class TestSsh(HostContract):
    """Every promise, over SSH, as the user who runs the tests."""


@pytest.fixture
async def place_on(shared: Path) -> AsyncIterator[PlaceOn]:
    """Make places on hosts; their sessions are closed at the end, whatever happens."""
    made: list[Place] = []

    def make(host: Host) -> Place:
        made.append(Place(host, shared))
        return made[-1]

    yield make
    for one in made:
        await one.close()


class TestSshCommands(CommandContract):
    """What a command of the operator's is promised, over SSH."""


class TestSshSecrets(SecretPromises):
    """What is promised of secrets, over SSH."""


@pytest.mark.parametrize("shell", ["bash", "dash", "fish", "tcsh"])
async def test_any_login_shell_and_its_noise_will_do(
    as_root: None, server: sshd.Server, shared: Path, place_on: PlaceOn, shell: str
) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"no {shell} here")
    name = f"ff{shell}{uuid.uuid4().hex[:4]}"
    with sshd.account(name, path, shared) as home:
        for file in (".bashrc", ".bash_profile", ".profile"):
            (home / file).write_text(BASHRC)
        (home / ".cshrc").write_text("echo Welcome, you have mail\nset echo\n")
        (home / ".config/fish").mkdir(parents=True)
        (home / ".config/fish/config.fish").write_text("echo Welcome, you have mail\n")
        place = place_on(server.host(name))
        session = await place.open()
        assert session.info.user == name
        (answer,) = await session.read("s", [read("shell", script="echo it works")])
        assert answer.stdout == "it works\n"
        made = await session.change(ONE, "s", change(call("append", path=place.path("f"))))
        assert made.ok


# -- sudo ---------------------------------------------------------------------------------------------


@pytest.fixture
def password(monkeypatch: pytest.MonkeyPatch) -> str:
    if shutil.which("sudo") is None:
        pytest.skip("no sudo here")
    monkeypatch.delenv("FLEETFIX_BECOME_PASSWORD", raising=False)
    return "correct horse"


async def test_become_works_without_a_password(
    as_root: None, server: sshd.Server, shared: Path, place_on: PlaceOn, password: str
) -> None:
    name = f"ff{uuid.uuid4().hex[:6]}"
    with sshd.account(name, "/bin/sh", shared), sshd.sudo_rule(name, "NOPASSWD: ALL"):
        place = place_on(server.host(name, become=True))
        session = await place.open()
        assert (session.info.uid, session.info.user) == (0, "root")
        (answer,) = await session.read("s", [read("shell", script="id -u; env")])
        assert answer.stdout.startswith("0\n")
        assert "SUDO" not in answer.stdout


async def test_become_sends_the_password_where_sudo_asks(
    as_root: None,
    server: sshd.Server,
    shared: Path,
    place_on: PlaceOn,
    password: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLEETFIX_BECOME_PASSWORD", password)
    name = f"ff{uuid.uuid4().hex[:6]}"
    with sshd.account(name, "/bin/sh", shared, password), sshd.sudo_rule(name, "ALL"):
        place = place_on(server.host(name, become=True))
        session = await place.open()
        assert session.info.uid == 0
        (answer,) = await session.read("s", [read("echo", value=1)])
        assert answer.value == 1


async def test_a_missing_password_is_said(
    as_root: None, server: sshd.Server, shared: Path, place_on: PlaceOn, password: str
) -> None:
    name = f"ff{uuid.uuid4().hex[:6]}"
    with (
        sshd.account(name, "/bin/sh", shared, password),
        sshd.sudo_rule(name, "ALL"),
        pytest.raises(HostError) as refused,
    ):
        await place_on(server.host(name, become=True)).open()
    assert refused.value.failure.kind == "sudo"
    assert "FLEETFIX_BECOME_PASSWORD" in refused.value.failure.hint


async def test_a_wrong_password_is_tried_on_one_host_only(
    as_root: None,
    server: sshd.Server,
    shared: Path,
    place_on: PlaceOn,
    password: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLEETFIX_BECOME_PASSWORD", "battery staple")
    name = f"ff{uuid.uuid4().hex[:6]}"
    sent: list[str] = []
    use = Password.use

    async def counted(self: Password, host: str) -> str:
        text = await use(self, host)
        sent.append(host)
        return text

    monkeypatch.setattr(Password, "use", counted)
    with sshd.account(name, "/bin/sh", shared, password), sshd.sudo_rule(name, "ALL"):
        for host in ("gpu01", "gpu02", "gpu03"):
            with pytest.raises(HostError) as refused:
                await place_on(server.host(name, name=host, become=True)).open()
            assert refused.value.failure.kind == "sudo"
    assert sent == ["gpu01"]


async def test_a_user_whom_sudo_refuses_is_told(
    as_root: None,
    server: sshd.Server,
    shared: Path,
    place_on: PlaceOn,
    password: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLEETFIX_BECOME_PASSWORD", password)
    name = f"ff{uuid.uuid4().hex[:6]}"
    with sshd.account(name, "/bin/sh", shared, password), pytest.raises(HostError) as refused:
        await place_on(server.host(name, become=True)).open()
    assert refused.value.failure.kind == "sudo"


RIGHT, WRONG = "correct horse", "battery staple"
SUDO_SAYS = [
    # rule, defaults, password, what is said (nothing: it works)
    ("ALL", "lecture=always", RIGHT, ""),
    ("ALL", "timestamp_timeout=0", RIGHT, ""),
    ("ALL", 'passprompt="Kennwort: ",passprompt_override', RIGHT, ""),
    ("ALL", "passwd_tries=1", WRONG, "sudo refused the password"),
    ("NOPASSWD: ALL", "requiretty", None, "sudo wants a terminal"),
    ("/usr/bin/nvidia-smi", "!lecture", RIGHT, "other commands only"),
    ("NOPASSWD: /usr/bin/nvidia-smi", "!lecture", None, "sudo wants a password"),
]


async def test_sudo_as_people_have_set_it_up_works_or_is_told_for_what_it_refuses(
    as_root: None,
    server: sshd.Server,
    shared: Path,
    place_on: PlaceOn,
    password: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"ff{uuid.uuid4().hex[:6]}"
    with sshd.account(name, "/bin/sh", shared, RIGHT):
        for rule, defaults, given, said in SUDO_SAYS:
            monkeypatch.setattr(
                "fleetfix.conversation.password_of_run", lambda given=given: Password(given)
            )
            with sshd.sudo_rule(name, rule, defaults):
                error = await outcome(place_on(server.host(name, become=True)))
            if not said:
                assert error is None, (rule, defaults, error)
                continue
            assert error is not None, (rule, defaults)
            assert error.failure.kind == "sudo"
            assert said in error.failure.message
            assert error.failure.hint


async def outcome(place: Place) -> HostError | None:
    """Open a session as root; what stood in its way."""
    try:
        session = await place.open()
    except HostError as error:
        return error
    assert session.info.uid == 0
    return None


async def test_a_mebibyte_goes_both_ways_through_a_sudo_that_logs_it(
    as_root: None, server: sshd.Server, shared: Path, place_on: PlaceOn, password: str
) -> None:
    name, data = f"ff{uuid.uuid4().hex[:6]}", os.urandom(1 << 20)
    logs = f"use_pty,log_output,log_input,iolog_dir={shared}/io"
    with sshd.account(name, "/bin/sh", shared), sshd.sudo_rule(name, "NOPASSWD: ALL", logs):
        session = await place_on(server.host(name, become=True)).open()
        ended, heard = await ran(session, sh("cat"), feed=lambda offset, most: data[offset : offset + most])
    assert ended.exit == 0
    assert heard.out == data


async def test_a_shell_that_never_runs_a_command_and_a_python_that_never_begins_are_named(
    as_root: None, server: sshd.Server, shared: Path
) -> None:
    name = f"ff{uuid.uuid4().hex[:6]}"
    for file, text in (
        ("asks", 'printf "Which tenant? "; read x; exec sh "$@"'),
        ("hangs", "exec sleep 5"),
    ):
        (shared / file).write_text(f"#!/bin/sh\n{text}\n")
        (shared / file).chmod(0o755)
    with sshd.account(name, str(shared / "asks"), shared):
        host = server.host("root").model_copy(update={"python": str(shared / "hangs")})
        asking, hanging = await asyncio.gather(*(opened(one, 3.0) for one in (server.host(name), host)))
    assert asking.failure.kind == "unreachable"
    assert "has not run a command" in asking.failure.message
    assert "Which tenant?" in asking.failure.message
    assert hanging.failure.kind == "no_python"
    assert f"{shared}/hangs has not begun" in hanging.failure.message


async def test_an_ordinary_user_is_refused_where_root_has_the_lease(
    server: sshd.Server, place_on: PlaceOn, ordinary: str
) -> None:
    roots = place_on(server.host("root"))
    roots.root.mkdir()
    roots.root.chmod(0o777)
    users = place_on(server.host(ordinary))
    first = await roots.open("r1")
    await first.acquire()
    second = await users.open("r2")
    with pytest.raises(HostError) as refused:
        await second.acquire()
    assert refused.value.failure.kind == "lease_held"
    await first.end("ok", keep_claim=False, commit=False)
    await second.acquire()


# -- the way to a host ----------------------------------------------------------------------------------


async def opened(host: Host, timeout: float = 10.0, **more: object) -> HostError:
    purpose = Purpose(run="r1", playbook="p", dry=True, operator="o", controller="c")
    with pytest.raises(HostError) as refused:
        await open_session(host, purpose, connect_timeout=timeout, **more)  # type: ignore[arg-type]
    return refused.value


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[sshd.Server]:
    reason = sshd.why_not()
    if reason is not None:
        pytest.skip(reason)
    with sshd.server(tmp_path) as running:
        yield running


async def test_a_changed_host_key_is_told_with_its_fingerprint(own_server: sshd.Server) -> None:
    sshd.known(own_server.folder, own_server.port, own_server.folder / "key.pub")
    error = await opened(own_server.host(getpass.getuser()), host_keys="accept_new")
    assert error.failure.kind == "host_key"
    assert "SHA256:" in error.failure.message
    assert "ssh-keygen -R" in error.failure.hint


async def test_an_unknown_host_key_is_refused_where_nobody_watches(own_server: sshd.Server) -> None:
    (own_server.folder / "known_hosts").unlink()
    error = await opened(own_server.host(getpass.getuser()), host_keys="strict")
    assert error.failure.kind == "host_key"


async def test_an_unknown_host_key_is_written_down_where_it_is_accepted(own_server: sshd.Server) -> None:
    known = own_server.folder / "known_hosts"
    before = known.read_text()
    known.unlink()
    purpose = Purpose(run="r1", playbook="p", dry=True, operator="o", controller="c")
    host = own_server.host(getpass.getuser())
    session = await open_session(host, purpose, host_keys="accept_new")
    await session.close()
    assert known.read_text().split()[:3] == before.split()[:3]
    session = await open_session(host, purpose, host_keys="strict")
    await session.close()


async def test_the_users_configuration_decides_about_new_keys(own_server: sshd.Server) -> None:
    (own_server.folder / "known_hosts").unlink()
    with (own_server.folder / "ssh_config").open("a") as file:
        file.write("    StrictHostKeyChecking accept-new\n")
    purpose = Purpose(run="r1", playbook="p", dry=True, operator="o", controller="c")
    session = await open_session(own_server.host(getpass.getuser()), purpose)
    await session.close()
    assert (own_server.folder / "known_hosts").exists()


async def test_a_key_that_is_not_authorised_is_an_auth_failure(own_server: sshd.Server) -> None:
    (own_server.folder / "authorized_keys").write_text("")
    assert (await opened(own_server.host(getpass.getuser()))).failure.kind == "auth"


async def test_the_key_that_the_inventory_names_logs_in(own_server: sshd.Server) -> None:
    key, config = own_server.folder / "key", own_server.folder / "ssh_config"
    config.write_text(config.read_text().replace(f"IdentityFile {key}", "IdentityFile none"))
    host = own_server.host(getpass.getuser())
    assert (await opened(host)).failure.kind == "auth"
    purpose = Purpose(run="r1", playbook="p", dry=True, operator="o", controller="c")
    session = await open_session(host.model_copy(update={"key_file": str(key)}), purpose)
    await session.close()
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-P", "", "-f", str(key)], check=True)
    error = await opened(host.model_copy(update={"key_file": str(key)}))
    assert error.failure.kind == "auth"
    assert "passphrase: ssh-add" in error.failure.hint, "it is left to the agent, and there is none"


@pytest.mark.parametrize("missing", ["{folder}/none", "~/.ssh/none"])
async def test_a_key_that_ssh_would_pass_over_is_passed_over(own_server: sshd.Server, missing: str) -> None:
    config, key = own_server.folder / "ssh_config", own_server.folder / "key"
    line = f"IdentityFile {key}"
    named = f"IdentityFile {missing.format(folder=own_server.folder)}\n    {line}"
    config.write_text(config.read_text().replace(line, named))
    purpose = Purpose(run="r1", playbook="p", dry=True, operator="o", controller="c")
    session = await open_session(own_server.host(getpass.getuser()), purpose)
    await session.close()
    config.write_text(config.read_text().replace(line, ""))
    error = await opened(own_server.host(getpass.getuser()))
    assert error.failure.kind == "auth", "no key at all is a matter of keys, not of the way there"


async def test_a_host_where_nothing_listens_is_unreachable(own_server: sshd.Server) -> None:
    host = own_server.host(getpass.getuser()).model_copy(update={"port": 1})
    assert (await opened(host)).failure.kind == "unreachable"


async def test_a_name_that_is_unknown_is_unreachable(own_server: sshd.Server) -> None:
    host = own_server.host(getpass.getuser()).model_copy(update={"address": "no-such-host.invalid"})
    assert (await opened(host)).failure.kind == "unreachable"


async def test_no_python_is_said(own_server: sshd.Server) -> None:
    host = own_server.host(getpass.getuser()).model_copy(update={"python": "/nonexistent/python3"})
    error = await opened(host)
    assert error.failure.kind == "no_python"
    assert "python:" in error.failure.hint


async def test_a_jump_host_is_connected_to_once_for_all_behind_it(
    own_server: sshd.Server, place_on: PlaceOn
) -> None:
    user = getpass.getuser()
    host = own_server.host(user, via=f"{user}@127.0.0.1:{own_server.port}")
    places = [place_on(host) for _ in range(3)]
    before = _logins(own_server)
    for place in places:
        session = await place.open(dry=True)
        assert (await session.read("s", [read("echo", value=1)]))[0].value == 1
    assert _logins(own_server) - before == 4
    for place in places:
        await place.close()
    await eventually(lambda: sshd.connections_of(own_server) == [])


async def test_a_crowd_that_the_server_drops_gets_in_all_the_same(
    tmp_path: Path, place_on: PlaceOn
) -> None:
    reason = sshd.why_not()
    if reason is not None:
        pytest.skip(reason)
    with sshd.server(tmp_path, more="MaxStartups 2:50:6") as crowded:
        place = place_on(crowded.host(getpass.getuser()))
        sessions = await asyncio.gather(*(place.open(f"r{n}", dry=True) for n in range(12)))
        assert len(sessions) == 12


async def test_a_connection_that_is_cut_comes_back_and_no_change_is_lost_or_made_twice(
    own_server: sshd.Server, place_on: PlaceOn
) -> None:
    place = place_on(own_server.host(getpass.getuser()))
    session = await place.open()
    async with place.slow_change(session) as slow:
        reading = asyncio.create_task(session.read("s", [read("nap", seconds=0.3)]))
        await asyncio.sleep(0.1)
        for pid in sshd.connections_of(own_server):
            kill(pid)
        assert (await reading)[0].ok
        slow.let_go()
        assert slow.task is not None
        assert (await slow.task).value == "slowly"
    assert place.lines("slow") == ["x"]
    assert _logins(own_server) == 2


@pytest.mark.parametrize("way", ["deadline", "cancel"])
async def test_trees_below_sudo_end_too(
    as_root: None, server: sshd.Server, shared: Path, place_on: PlaceOn, password: str, way: str
) -> None:
    name = f"ff{uuid.uuid4().hex[:6]}"
    with sshd.account(name, "/bin/sh", shared), sshd.sudo_rule(name, "NOPASSWD: ALL"):
        place, word = place_on(server.host(name, become=True)), token()
        session = await place.open()
        timeout = 1.0 if way == "deadline" else 20.0
        changing = asyncio.create_task(
            session.change(ONE, "s", change(call("scatter_writing", timeout=timeout, token=word)))
        )
        await eventually(lambda: len(processes_with(word)) >= 5)
        if way == "cancel":
            assert await session.cancel() == ()
        assert not (await changing).ok
        assert processes_with(word) == []


async def test_a_command_runs_as_root_by_sudo_and_ends_with_its_tree(
    as_root: None, server: sshd.Server, shared: Path, place_on: PlaceOn, password: str
) -> None:
    name = f"ff{uuid.uuid4().hex[:6]}"
    with sshd.account(name, "/bin/sh", shared), sshd.sudo_rule(name, "NOPASSWD: ALL"):
        place, word = place_on(server.host(name, become=True)), token()
        session = await place.open()
        ended, heard = await ran(session, sh("id -u; pwd; echo $USER"))
        assert (ended.exit, heard.out.split()) == (0, [b"0", b"/root", b"root"])
        late, _ = await ran(session, sh(f"setsid sleep {word} & sleep {word}", timeout=0.3))
        assert late.failure is not None
        assert processes_with(word) == []


def _logins(server: sshd.Server) -> int:
    return (server.folder / "sshd.log").read_text().count("Accepted publickey")
