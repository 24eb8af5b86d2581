"""Known host keys: found by name, address and port; written down whole, whoever else writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import asyncssh
import pytest

from fleetfix.transports.known_hosts import look_up, write_down

KEY = asyncssh.generate_private_key("ssh-ed25519").convert_to_public()
OTHER = asyncssh.generate_private_key("ssh-ed25519").convert_to_public()


def text(key: asyncssh.SSHKey) -> str:
    return key.export_public_key("openssh").decode().strip()


WRITER = """
import asyncssh, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from fleetfix.transports.known_hosts import write_down
file, first, key = Path(sys.argv[1]), int(sys.argv[2]), asyncssh.import_public_key(sys.argv[3])
with ThreadPoolExecutor(16) as pool:
    names = [f"gpu{number:03}" for number in range(first, first + 100)]
    list(pool.map(lambda name: write_down(file, name, key, hashed=False), names))
"""


def test_two_processes_write_a_hundred_and_fifty_hosts_and_no_line_is_lost_torn_or_twice(
    tmp_path: Path,
) -> None:
    file = tmp_path / "ssh" / "known_hosts"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(file), str(first), text(KEY)])
        for first in (0, 50)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert sorted(file.read_text().splitlines()) == [f"gpu{n:03} {text(KEY)}" for n in range(150)]
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_line_that_cannot_be_read_counts_for_nothing_and_hides_no_other(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(
        f"@marker gpu01 {text(OTHER)}\ngpu01 nonsense\n|1|broken|x {text(OTHER)}\n\ngpu01\n"
        f"# gpu01 {text(OTHER)}\ngpu0? ssh-ed25519 AAAA\ngpu01,10.0.0.1 {text(KEY)}\n"
    )
    assert look_up([file, tmp_path / "none"], "gpu01", "", 22)[0] == [KEY]
    assert look_up([file], "elsewhere", "10.0.0.1", None)[0] == [KEY]
    assert look_up([file], "elsewhere", "", None)[0] == []


@pytest.mark.parametrize("revoked", ["@revoked *", "@revoked [gpu01]:2222", "@revoked gpu01"])
def test_a_revoked_key_is_revoked_at_every_port_it_is_said_for(tmp_path: Path, revoked: str) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"gpu01 {text(KEY)}\n{revoked} {text(KEY)}\n")
    assert KEY in look_up([file], "gpu01", "10.0.0.1", 2222)[2]


def test_keys_are_found_by_hashed_names_with_their_port(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    write_down(file, "[gpu01]:2222", KEY, hashed=True)
    write_down(file, "[gpu01]:2222", KEY, hashed=True)
    assert len(file.read_text().splitlines()) == 1
    assert look_up([file], "gpu01", "", 2222)[0] == [KEY]
    assert look_up([file], "gpu01", "", 22)[0] == []
