"""The ssh configuration is read as OpenSSH reads it: `ssh -G` is asked where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import asyncssh
import pytest

from fleetfix.inventory import Host
from fleetfix.transports import ssh_config
from fleetfix.transports.jump_hosts import jump_hosts, jump_hosts_of, way_to
from fleetfix.transports.proxy_command import as_jump
from fleetfix.transports.ssh_config import Settings, resolve

WORDS = ("hostname", "port", "user", "proxyjump", "proxycommand", "connecttimeout", "hostkeyalias")
LISTS = ("identityfile", "userknownhostsfile")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of a hundred characters, with nothing of the machine's own beside it."""
    home = tmp_path / ("h" * 100)
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(ssh_config, "SYSTEM", tmp_path / "etc" / "ssh_config")
    return home / ".ssh"


CONFIGURATIONS = {
    "first value wins": "Host gpu*\n Port 2201\n User ml\nHost *\n Port 9\n User no\n ConnectTimeout 7\n",
    "equals signs and quotes": 'Host = gpu01\nHostName="10.0.0.1"  # said\nUser = "ml"\nport=2202\n',
    "negation": "Host gpu* !gpu01\n User a\nHost gpu01\n User b\n",
    "proxy jump": "Host gpu01\n ProxyJump ml@b1:2200,b2\n",
    "proxy jump none": "Host gpu01\n ProxyJump none\nHost *\n ProxyJump b1\n",
    "the first of two proxies": "Host gpu01\n ProxyCommand nc\nHost *\n ProxyJump b1\n",
    "match user after it was said": "Host gpu*\n User ml\nMatch user ml\n Port 2203\n",
    "match host sees the host name": "Host gpu01\n HostName 10.0.0.9\nMatch host 10.0.0.9\n User ml\n",
    "match original host": "Host gpu01\n HostName 10.0.0.9\nMatch originalhost gpu01\n User ml\n",
    "match all": "Match all\n User ml\n",
    "match exec": 'Match host gpu01 exec "test %n = gpu01"\n User yes\nMatch exec false\n Port 9',
    "match not": "Match !host gpu02\n User ml\nMatch !exec true\n Port 9\n",
    "match final": "Match final\n User late\nHost gpu01\n Port 2204\nMatch final host 10.*\n Port 9\n"
    "Host *\n HostName 10.0.0.1\n",
    "identity files add up, once each": "Host gpu01\n IdentityFile a\nMatch final\n Port 9\nHost *\n"
    " IdentityFile b\n IdentityFile a\n",
    "alias": "Host gpu01\n HostKeyAlias the-one\n",
    "several known hosts": "Host *\n UserKnownHostsFile ~/.ssh/a ~/.ssh/b\n",
    "a host behind an include": "Include inner\nHost *\n User outer\n Port 2207\n",
    "an include in a block that matches": "Host gpu01\n Include inner\n Port 2208\nHost *\n User outer\n",
    "an include in a block that does not": "Host gpu02\n Include inner\nHost *\n User outer\n",
    "includes in the order of names": "Include d/*\n",
}


@pytest.mark.parametrize("text", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
async def test_it_is_understood_as_ssh_understands_it(folder: Path, text: str) -> None:
    ssh = shutil.which("ssh")
    if ssh is None:
        pytest.skip("no ssh here: install openssh-client")
    (folder / "inner").write_text("Host gpu02\n User never\nHost gpu01\n User inner\n")
    (folder / "d").mkdir()
    for name in ("b", "a", "c"):
        (folder / "d" / name).write_text(f"Host *\n User {name}\n")
    (folder / "config").write_text(text)
    # ssh takes the home from the accounts; the file is named to it, with its includes.
    named = folder / "named"
    named.write_text(text.replace("Include ", f"Include {folder}/").replace("~", str(folder.parent)))
    answer = subprocess.run(
        [ssh, "-G", "-F", str(named), "gpu01"], capture_output=True, text=True, check=True
    ).stdout
    said: dict[str, list[str]] = {}
    for line in answer.splitlines():
        word, _, value = line.partition(" ")
        said.setdefault(word, []).append(value)
    ours = await resolve("gpu01", None, None, None)
    words = [word for word in (*WORDS, *LISTS) if word in WORDS or word in text.lower()]
    assert {word: _ours(ours)[word] for word in words} == {word: _theirs(said)[word] for word in words}


def _ours(found: Settings) -> dict[str, object]:
    return {
        "hostname": found.host,
        "port": str(found.port),
        "user": found.user,
        "proxyjump": ",".join(found.jumps),
        "proxycommand": found.proxy_command,
        "connecttimeout": str(found.number("ConnectTimeout") or "none"),
        "hostkeyalias": found.text("HostKeyAlias"),
        "identityfile": [os.path.expanduser(one) for one in found.texts("IdentityFile")],
        "userknownhostsfile": [os.path.expanduser(one) for one in found.texts("UserKnownHostsFile")],
    }


def _theirs(said: dict[str, list[str]]) -> dict[str, object]:
    found: dict[str, object] = {word: said.get(word, [""])[0] for word in WORDS}
    found["identityfile"] = said.get("identityfile", [])
    found["userknownhostsfile"] = said.get("userknownhostsfile", [""])[0].split()
    return found


async def test_tokens_are_put_in_once_everything_is_known(folder: Path) -> None:
    (folder / "config").write_text(
        "Host gpu*\n IdentityFile ~/.ssh/%r_%h_%n\n ProxyJump %r@b-%n\n UserKnownHostsFile ~/k_%h_%p ~/1%%"
        "\n CertificateFile %d/c\nHost *\n HostName %h.example\n User ml\n Port 2200\n"
    )
    found = await resolve("gpu01", None, None, None)
    assert found.texts("IdentityFile") == ["~/.ssh/ml_gpu01.example_gpu01"]
    assert found.texts("UserKnownHostsFile") == ["~/k_gpu01.example_2200", "~/1%"]
    assert found.texts("CertificateFile") == [f"{folder.parent}/c"]
    assert found.jumps == ("ml@b-gpu01",)


async def test_what_the_inventory_says_comes_before_the_configuration(folder: Path) -> None:
    (folder / "config").write_text("Match user ml\n HostName 10.0.0.7\nHost *\n User other\n Port 9\n")
    found = await resolve("gpu01", 2222, "ml", None)
    assert (found.host, found.port, found.user) == ("10.0.0.7", 2222, "ml")


async def test_the_systems_file_comes_last_and_a_file_of_the_hosts_own_stands_for_it(folder: Path) -> None:
    ssh_config.SYSTEM.parent.mkdir()
    ssh_config.SYSTEM.write_text("Host *\n User system\n Port 9\n")
    (folder / "config").write_text("Host *\n User mine\n")
    own = folder / "own"
    own.write_text("Host *\n HostName 10.0.0.7\n")
    found = await resolve("gpu01", None, None, None)
    assert (found.user, found.port) == ("mine", 9)
    found = await resolve("gpu01", None, None, str(own))
    assert (found.host, found.user, found.port) == ("10.0.0.7", "mine", 22)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Host *\n BindInterface eth1\n", "BindInterface is not supported"),
        ("Host *\n ProxyUseFdpass yes\n", "ProxyUseFdpass is not supported"),
        ("Match localnetwork 10.0.0.0/8\n User ml\n", "line 1: Match localnetwork is not supported"),
        ("Match version 10.*\n User ml\n", "line 1: Match version is not supported"),
        ("Host *\n Port twenty\n", "line 2: Invalid Port integer value: twenty"),
        ('Host *\n User "ml\n', "line 2: the quotes do not match"),
        ("Include config\n", "Include goes deeper than 16 levels"),
        (
            "CanonicalizeHostname yes\nCanonicalDomains a b\nCanonicalizePermittedCNAMEs *:*\n",
            "CanonicalizePermittedCNAMEs is not supported",
        ),
    ],
)
async def test_what_is_not_supported_is_said(folder: Path, text: str, said: str) -> None:
    (folder / "config").write_text(text)

    async def nowhere(name: str) -> object:
        raise OSError(name)

    with pytest.raises(asyncssh.ConfigParseError, match=said):
        await resolve("gpu01", None, None, None, nowhere)


async def test_a_file_that_others_may_write_to_is_not_used(folder: Path) -> None:
    (folder / "config").write_text("Include inner\n")
    (folder / "inner").write_text("Host *\n ProxyCommand rm -rf /\n")
    (folder / "inner").chmod(0o666)
    with pytest.raises(asyncssh.ConfigParseError, match="inner is not used: others may write to it"):
        await resolve("gpu01", None, None, None)


async def test_short_names_are_made_canonical_and_read_again_by_their_full_names(folder: Path) -> None:
    (folder / "config").write_text(
        "CanonicalizeHostname yes\nCanonicalDomains near.example far.example\n"
        "Host *.far.example\n User far\nHost gpu01\n Port 2201\nMatch canonical\n HostKeyAlias %h\n"
    )
    asked: list[str] = []

    async def only_far(name: str) -> object:
        asked.append(name)
        if "far" not in name:
            raise OSError("no such name")
        return name

    found = await resolve("gpu01", None, None, None, only_far)
    assert asked == ["gpu01.near.example", "gpu01.far.example"]
    assert (found.host, found.user, found.port) == ("gpu01.far.example", "far", 2201)


# -- the way ------------------------------------------------------------------------------------------


async def test_each_jump_host_is_reached_as_its_own_configuration_says(folder: Path) -> None:
    (folder / "config").write_text(
        "Host c\n ProxyJump b\nHost b\n ProxyJump ml@a:2200\n Port 7\nHost a\n HostName 10.0.0.1\n"
        "Host *\n User op\n"
    )
    way = await way_to(Host(name="gpu01", address="gpu01", via="c,d"))
    shown = [(hop.host, hop.port, hop.user) for hop in way.hops]
    assert shown == [
        ("10.0.0.1", 2200, "ml"),
        ("b", 7, "op"),
        ("c", 22, "op"),
        ("d", 22, "op"),
        ("gpu01", 22, "op"),
    ]
    assert jump_hosts_of(Host(name="c", address="c")) == ("a", "10.0.0.1", "b")
    hosts = [Host(name=name, address=name) for name in ("b", "c", "d")]
    assert jump_hosts(hosts) == {"b": ("a", "10.0.0.1"), "c": ("a", "10.0.0.1", "b")}
    direct = await way_to(Host(name="c", address="c", via="none"))
    assert [hop.host for hop in direct.hops] == ["c"]


@pytest.mark.parametrize("text", ["Host *\n ProxyJump b\n", "Host *\n ProxyCommand ssh -W %h:%p b\n"])
async def test_a_way_that_leads_back_is_said(folder: Path, text: str) -> None:
    (folder / "config").write_text(text)
    with pytest.raises(
        asyncssh.ConfigParseError, match="leads back to b: give its Host block `ProxyJump none`"
    ):
        await way_to(Host(name="gpu01", address="gpu01"))


@pytest.mark.parametrize(
    ("command", "jump"),
    [
        ("ssh -W gpu01:22 bastion", "bastion"),
        ("exec /usr/bin/ssh -q -x -l ops -p 2200 bastion -W [gpu01]:22", "ops@bastion:2200"),
        ("ssh ops@bastion -W gpu01:22", "ops@bastion"),
        ("ssh -W elsewhere:22 bastion", None),
        ("ssh -i key -W gpu01:22 bastion", None),
        ("ssh bastion nc gpu01 22", None),
        ("nc gpu01 22", None),
    ],
)
def test_a_command_that_is_a_jump_host_is_taken_as_one(command: str, jump: str | None) -> None:
    assert as_jump(command, "gpu01", 22) == jump
