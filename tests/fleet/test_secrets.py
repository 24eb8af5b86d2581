"""On real hosts: no secret of a run, and none of a training job, stands where somebody could read it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleetfix.redaction import spellings
from tests.fleet import independent
from tests.fleet.conftest import Ran, Site

pytestmark = pytest.mark.fleet

Make = Callable[..., Site]

TOKEN = "okapi/+zebra 0123456789"

PLAYBOOK = """\
name: sign-in
secrets: [token]
policy: {canary: 1, max_failures: 0}
steps:
  - id: in
    evidence: full
    shell:
      check: test -e /tmp/signed-in
      run: |
        echo "signed in with $TOKEN"; printf %s "$TOKEN" | base64 >&2
        ps -eo args >/tmp/signed-in
        echo "$TOKEN" >>/var/log/train/train.log
      undo: echo "out with $TOKEN"; rm /tmp/signed-in
      env: {TOKEN: "${{ secrets.token }}"}
"""


@contextmanager
def process_lists() -> Iterator[set[bytes]]:
    """Every command line of this machine, the hosts' among them, that there is meanwhile."""
    seen: set[bytes] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.add(path.read_bytes())
                except OSError:
                    continue

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield seen
    finally:
        over.set()
        watching.join()


def files_with(folder: Path, needles: set[str]) -> list[Path]:
    """The files below a folder that hold any of these; a lab in it is not looked into."""
    wanted = [needle.encode() for needle in needles]
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "lab"]
        for path in (Path(place, name) for name in names):
            data = path.read_bytes() if path.is_file() else b""
            found += [path] if any(needle in data for needle in wanted) else []
    return found


def test_no_secret_of_a_run_or_of_a_job_can_be_read_anywhere(site: Make) -> None:
    lab = site("gpu01", contaminated=[])
    (line,) = (one for one in lab.job("gpu01").environ if one.startswith("WANDB_API_KEY="))
    secrets = spellings(TOKEN) | spellings(line.partition("=")[2])
    (lab.home / "sign-in.yaml").write_text(PLAYBOOK)
    (lab.home / "token").write_text(TOKEN)
    on = ("--hosts", "gpu01", "-i", lab.inventory)
    given = ("--secret", "token=file:token")
    root = independent.root(lab.pid("gpu01"))
    with (root / "var/log/train/train.log").open("a") as log:
        log.write(f"{TOKEN} was said here\n")
    ran: list[Ran] = []
    with process_lists() as seen:
        ran.append(lab.run("gpu01", *given, playbook="./sign-in.yaml"))
    assert ran[-1].outcomes == {"gpu01": "changed"}, ran[-1].told
    signed_in = ran[-1].run_id
    ran.append(lab.run("gpu01", playbook="stop-gpu-jobs"))
    assert ran[-1].outcomes == {"gpu01": "changed"}, ran[-1].told
    stopped = ran[-1].run_id
    ran += [lab("inspect", *on), lab("exec", *on, *given, "--", 'echo "$token"; env')]
    ran += [lab("show", stopped, "--json"), lab("show", signed_in, "gpu01")]
    ran.append(lab("report", signed_in, "-o", "report.html"))
    ran += [lab("rollback", stopped), lab("rollback", signed_in, *given), lab("runs", "--verify", *on)]
    assert [one.exit for one in ran[-3:]] == [0, 0, 0], [one.err + one.out for one in ran[-3:]]
    assert not [one for one in ran if any(needle in one.out + one.err for needle in secrets)]
    assert not [one for one in seen if any(needle.encode() in one for needle in secrets)]
    (lab.home / "token").unlink()
    assert files_with(lab.home, secrets) == []
    evidence = [path.read_text() for path in (lab.home / "state/evidence").rglob("*.txt")]
    assert any("***" in text for text in evidence), "the job's log had the secret in it"
    assert files_with(root / "var/lib/fleetfix", secrets) == []
    assert files_with(root / "run", secrets) == []
    for path in (root / "var/lib/fleetfix").rglob("*"):
        assert path.lstat().st_mode & 0o077 == 0, path
