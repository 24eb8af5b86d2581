"""What docs/security.md says to set up works as it stands there: certificates, the account, its sudo."""

from __future__ import annotations

import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleetfix.errors import HostError
from fleetfix.inventory import Host
from fleetfix.session import Purpose, Session, open_session
from tests.contract import sshd

PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text()
LOOK = Purpose(run="r1", playbook="p", dry=True, operator="grace", controller="desk")


def blocks(language: str, word: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [text for text in found if word in text]


def shell(folder: Path, word: str, **instead: str) -> None:
    """Run what the page shows, in this folder; a key gets no passphrase: nobody is there to type one."""
    (text,) = blocks("sh", word)
    text = text.replace("ssh-keygen -t", "ssh-keygen -q -N '' -t").replace(
        "ssh-keygen -s", "ssh-keygen -q -s"
    )
    for old, new in instead.items():
        assert old in text
        text = text.replace(old, new)
    subprocess.run(["sh", "-eu", "-c", text], cwd=folder, check=True)


@contextmanager
def account(name: str, folder: Path) -> Iterator[None]:
    """The account that the page makes, by another name and with its home here."""
    try:
        shell(folder, "useradd", **{" fleetfix": f" {name}", "--create-home": f"-m -d {folder}/home"})
        yield
    finally:
        subprocess.run(["userdel", "-f", name], check=False, capture_output=True)


@pytest.fixture(scope="module")
def site(as_root: None) -> Iterator[tuple[Path, sshd.Server, str]]:
    """A host and an operator set up as the page says; the account has another name."""
    if (why := sshd.why_not()) is not None:
        pytest.skip(why)
    name = f"ff{uuid.uuid4().hex[:6]}"
    with sshd.folder_for_all() as folder, account(name, folder):
        shell(folder, "user_ca -C")
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "ssh_host_ed25519_key"],
            check=True,
        )
        shell(folder, "-h -I", **{"gpu01,gpu01.example": "127.0.0.1"})
        principals = folder / "principals"
        principals.mkdir()
        (principals / name).write_text(
            next(one for one in blocks("text", "gpu-operators") if "#" not in one)
        )
        (more,) = blocks("text", "TrustedUserCAKeys")
        more = more.replace("/etc/ssh/", f"{folder}/") + f"HostKey {folder}/ssh_host_ed25519_key\n"
        with sshd.server(folder, more) as server:
            (folder / "authorized_keys").unlink()
            (folder / "known_hosts").unlink()
            there = f"[127.0.0.1]:{server.port}"
            shell(folder, "@cert-authority", **{"gpu*,*.example": there})
            yield folder, server, name


def operator(folder: Path, port: int, principal: str = "gpu-operators", ca: str = "user_ca") -> Path:
    """A new key of an operator's, signed as the page says; gives the ssh configuration that names it."""
    own = folder / f"operator-{uuid.uuid4().hex[:6]}"
    own.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", own / "id_ed25519"], check=True)
    for file in folder.glob("*_ca*"):
        shutil.copy(file, own)
    shell(own, "-I grace", **{"gpu-operators": principal, "-s user_ca": f"-s {ca}"})
    config = own / "ssh_config"
    config.write_text(
        f"Host *\n IdentityFile {own}/id_ed25519\n IdentitiesOnly yes\n"
        f" UserKnownHostsFile {folder}/known_hosts\n GlobalKnownHostsFile none\n"
        " StrictHostKeyChecking yes\n"
    )
    return config


async def opened(server: sshd.Server, name: str, config: Path, *, become: bool) -> Session:
    ssh_config = str(config)
    host = Host(name="gpu01", address="127.0.0.1", port=server.port, user=name, ssh_config=ssh_config)
    host = host.model_copy(update={"become": become})
    return await open_session(host, LOOK, connect_timeout=20.0)


async def test_a_certificate_logs_in_and_sudo_needs_no_password(
    site: tuple[Path, sshd.Server, str],
) -> None:
    folder, server, name = site
    (rule,) = blocks("text", "NOPASSWD")
    path = Path(f"/etc/sudoers.d/{name}")
    path.write_text(re.sub(r"\bfleetfix\b(?= ALL|:| !)|(?<=Defaults:)fleetfix", name, rule))
    try:
        subprocess.run(["visudo", "-c", "-q", "-f", path], check=True)
        path.chmod(0o440)
        session = await opened(server, name, operator(folder, server.port), become=True)
        assert (session.info.uid, session.info.user) == (0, "root")
        await session.close()
    finally:
        path.unlink()


@pytest.mark.parametrize(("principal", "ca"), [("somebody", "user_ca"), ("gpu-operators", "host_ca")])
async def test_a_certificate_for_others_or_by_another_authority_does_not_log_in(
    site: tuple[Path, sshd.Server, str], principal: str, ca: str
) -> None:
    folder, server, name = site
    with pytest.raises(HostError) as refused:
        await opened(server, name, operator(folder, server.port, principal, ca), become=False)
    assert refused.value.failure.kind == "auth"


async def test_a_host_without_a_certificate_of_the_authority_is_not_believed(
    site: tuple[Path, sshd.Server, str],
) -> None:
    folder, server, name = site
    config = operator(folder, server.port)
    strange = config.parent / "known_hosts"
    key = (folder / "user_ca.pub").read_text()
    strange.write_text(f"@cert-authority [127.0.0.1]:{server.port} {key}")
    config.write_text(config.read_text().replace(f"{folder}/known_hosts", str(strange)))
    with pytest.raises(HostError) as refused:
        await opened(server, name, config, become=False)
    assert refused.value.failure.kind == "host_key"
