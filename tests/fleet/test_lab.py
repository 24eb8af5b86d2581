"""The lab keeps its promises: hosts of their own, a speed that tells the truth, faults that heal."""

from __future__ import annotations

import asyncio
import csv
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from fleetfix.errors import LabError
from fleetfix.inventory import Inventory
from fleetfix.lab import FAULTS, Lab, faults, namespaces, stock
from fleetfix.lab.record import boot_id
from fleetfix.lab.template import FIRST_STEP, LOG, Template, find_python, training
from fleetfix.lab.witness import JOB_WRITES, starts, steps

pytestmark = pytest.mark.fleet

VENV = "/opt/train/venv"


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A folder that an ordinary user may use too, outside of anything a test would change."""
    try:
        namespaces.check()
    except LabError as error:
        pytest.skip(f"{error}; {error.hint}")
    folder = Path(tempfile.mkdtemp(prefix="fleetfix-lab-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def lab(root: Path) -> Iterator[Lab]:
    """gpu01 and gpu02 are contaminated, gpu03 is healthy."""
    lab = Lab(root / "lab")
    lab.up(["gpu01", "gpu02", "gpu03"], contaminated=["gpu01", "gpu02"])
    yield lab
    lab.down()


@pytest.fixture
def fresh(root: Path) -> Iterator[Callable[..., Lab]]:
    """Labs for one test, which it may ruin."""
    made: list[Lab] = []

    def up(*names: str, **options: object) -> Lab:
        lab = Lab(root / f"fresh{len(made)}")
        made.append(lab)
        lab.up(names or ["n1"], **options)  # type: ignore[arg-type]
        return lab

    yield up
    for lab in made:
        lab.down()


def eventually(claim: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until a claim is true; fails with what it said last."""
    until = time.monotonic() + seconds
    while not (last := claim()):
        assert time.monotonic() < until, f"still {last!r} after {seconds} s"
        time.sleep(0.05)


async def settled(claim: Callable[[], object]) -> None:
    """`eventually`, while connections go on."""
    await asyncio.to_thread(eventually, claim)


def steps_since_start(lab: Lab, name: str) -> int:
    return len(steps(lab.init(name)))


def trains_at(lab: Lab, name: str, speed: float) -> None:
    """The job has left its warm-up and its median is within 1 % of `speed`."""
    eventually(lambda: steps_since_start(lab, name) >= 32)
    measured = lab.tok_s(name)
    assert measured == pytest.approx(speed, rel=0.01)


async def connect(lab: Lab, name: str, **options: Any) -> asyncssh.SSHClientConnection:
    config = [str(lab.ssh_config)]
    return await asyncssh.connect(name, config=config, agent_path=None, **options)


async def hostname(lab: Lab, name: str) -> str:
    """What a host says over SSH that it is called."""
    async with await connect(lab, name) as connection:
        done = await connection.run("hostname")
    return str(done.stdout).strip()


# -- hosts of their own ------------------------------------------------------------------------------


def test_each_host_has_its_own_name_processes_and_files(lab: Lab) -> None:
    for name in ("gpu01", "gpu02"):
        lab.run(name, f"echo {name} >/tmp/mine; echo {name} >/root/mine; echo {name} >/var/lib/mine")
    for name in ("gpu01", "gpu02"):
        seen = lab.run(name, "hostname; cat /tmp/mine /root/mine /var/lib/mine /etc/hostname")
        assert seen.stdout.split() == [name] * 5
    both = [
        lab.run(name, "cat /etc/machine-id /proc/sys/kernel/random/boot_id") for name in ("gpu01", "gpu02")
    ]
    assert len({word for one in both for word in one.stdout.split()}) == 4
    assert "1" in lab.run("gpu01", "ls /proc").stdout.split()
    assert lab.run("gpu01", "id -u").stdout == "0\n"


@pytest.mark.parametrize("path", ["/usr/x", "/x", "/etc/alternatives/x", "/proc/sys/vm/swappiness"])
def test_the_rest_of_the_machine_is_read_only(lab: Lab, path: str) -> None:
    done = lab.run("gpu01", f"echo 1 >{path}")
    assert done.returncode != 0
    assert "ermission denied" in done.stderr or "ead-only" in done.stderr or "nonexistent" in done.stderr


def test_orphans_are_reaped(lab: Lab) -> None:
    lab.run("gpu01", "for i in 1 2 3; do (setsid sh -c 'exit 3' &) ; done")
    eventually(lambda: "Z" not in lab.run("gpu01", "cat /proc/[0-9]*/stat | cut -d' ' -f3").stdout.split())


def test_the_inventory_loads_and_names_every_host(lab: Lab) -> None:
    hosts = Inventory.load(str(lab.inventory_path)).select("@gpu")
    assert [host.name for host in hosts] == ["gpu01", "gpu02", "gpu03"]
    assert {host.address for host in hosts} == {"127.77.0.1", "127.77.0.2", "127.77.0.3"}
    assert all(host.vars["wheelhouse"] == "/opt/wheelhouse" for host in hosts)
    assert all(host.ssh_config == str(lab.ssh_config) for host in hosts)


# -- SSH ---------------------------------------------------------------------------------------------


async def test_ssh_carries_bytes_both_ways_and_the_exit_status(lab: Lab) -> None:
    data = bytes(range(256)) * 20000
    async with await connect(lab, "gpu01") as connection:
        done = await connection.run("cat; echo no >&2; exit 7", input=data, encoding=None)
    assert (done.stdout, done.stderr, done.exit_status) == (data, b"no\n", 7)


async def test_ssh_says_which_signal_ended_a_command(lab: Lab) -> None:
    async with await connect(lab, "gpu01") as connection:
        done = await connection.run("kill -TERM $$")
        assert done.exit_signal is not None
        assert done.exit_signal[0] == "TERM"


async def test_a_signal_reaches_the_command(lab: Lab) -> None:
    async with await connect(lab, "gpu01") as connection:
        process = await connection.create_process(
            "trap 'echo got; exit 5' INT; echo set; while :; do sleep 0.05; done"
        )
        assert await process.stdout.readline() == "set\n"
        process.send_signal("INT")
        done = await process.wait(timeout=10)
    assert (done.stdout, done.exit_status) == ("got\n", 5)


async def test_a_lost_client_ends_no_command(lab: Lab) -> None:
    connection = await connect(lab, "gpu01")
    process = await connection.create_process("cat >/dev/null; touch /tmp/eof; exec sleep 777")
    await settled(lambda: any(one.argv == ("cat",) for one in lab.processes("gpu01")))
    connection.abort()
    await settled(lambda: ("sleep", "777") in {one.argv for one in lab.processes("gpu01")})
    left = [one for one in lab.processes("gpu01") if one.argv == ("sleep", "777")]
    assert len(left) == 1
    os.kill(left[0].outer, 9)
    del process


async def test_a_login_has_a_terminal_of_the_host(lab: Lab) -> None:
    async with await connect(lab, "gpu01") as connection:
        done = await connection.run("tty; stty size", term_type="xterm", term_size=(90, 33))
    assert done.stdout is not None
    assert str(done.stdout).split() == ["/dev/pts/0", "33", "90"]


async def test_a_strange_key_is_refused(lab: Lab) -> None:
    key = asyncssh.generate_private_key("ssh-ed25519")
    with pytest.raises(asyncssh.PermissionDenied):
        await connect(lab, "gpu01", client_keys=[key], preferred_auth="publickey")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no OpenSSH client here")
def test_openssh_logs_in_by_the_command_given(lab: Lab) -> None:
    done = subprocess.run(
        [*lab.ssh_command("gpu02"), "hostname; id -u; pwd"], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("gpu02\n0\n/root\n", "")


# -- the job and its speed ---------------------------------------------------------------------------


def test_speed_tells_contaminated_from_healthy(lab: Lab) -> None:
    trains_at(lab, "gpu01", 12800)
    trains_at(lab, "gpu03", 20000)


def test_the_job_is_as_torchrun_starts_it(lab: Lab) -> None:
    launcher = lab.job("gpu01")
    assert launcher is not None
    assert launcher.argv[:3] == (f"{VENV}/bin/python", f"{VENV}/bin/torchrun", "--nproc-per-node=2")
    workers = [one for one in lab.processes("gpu01") if one.parent == launcher.outer]
    assert [one.argv[:3] for one in workers] == [(f"{VENV}/bin/python", "-u", "train.py")] * 2
    for rank, worker in enumerate(workers):
        links = lab.run("gpu01", f"readlink /proc/{worker.pid}/fd/*").stdout.split()
        assert f"/dev/nvidia{rank}" in links
        maps = lab.run("gpu01", f"cat /proc/{worker.pid}/maps").stdout
        for library in ("torch/lib/libtorch_cuda.so", "nvidia/cudnn/lib/libcudnn.so.9"):
            assert f"site-packages/{library}" in maps
    assert len({os.getsid(one.outer) for one in (launcher, *workers)}) == 3


def mend_packages(lab: Lab, name: str) -> None:
    """What fleetfix must do, by other code: remove the foreign, put back what the twins name."""
    disk = lab.paths.disk(name)
    site = next((disk / "opt/train/venv/lib").glob("python*/site-packages"))
    for wheel in stock.foreign():
        for row in csv.reader((site / wheel.dist_info / "RECORD").read_text().splitlines()):
            (site / row[0]).unlink(missing_ok=True)
        (site / wheel.dist_info).rmdir()
    for packed in (disk / "opt/wheelhouse").glob("nvidia_*_cu12-*.whl"):
        with zipfile.ZipFile(packed) as bundle:
            for member in bundle.namelist():
                if not member.startswith(packed.name.rsplit("-", 3)[0]):
                    (site / member).parent.mkdir(parents=True, exist_ok=True)
                    (site / member).unlink(missing_ok=True)
                    (site / member).write_bytes(bundle.read(member))


def clear_caches(lab: Lab, name: str) -> None:
    shutil.rmtree(lab.paths.disk(name) / "tmp/torchinductor_root")
    shutil.rmtree(lab.paths.disk(name) / "root/.cache/torch_extensions")


def restarted(lab: Lab, name: str) -> None:
    """Heal the host of `no_job`, and wait until its job has logged that it started."""
    before = starts(lab.init(name))
    lab.heal(name)
    eventually(lambda: starts(lab.init(name)) > before)


def test_packages_and_caches_each_cost_a_fifth(fresh: Callable[..., Lab]) -> None:
    lab = fresh("n1", "n2", "n3")
    sound = Template(lab.paths.template, find_python(), "uv")
    for name in ("n1", "n2", "n3"):
        lab.break_host(name, "no_job")
        if name != "n2":
            mend_packages(lab, name)
        if name != "n1":
            clear_caches(lab, name)
            sound.fill_caches(lab.paths.disk(name), contaminated=False)
        restarted(lab, name)
    trains_at(lab, "n1", 16000)
    trains_at(lab, "n2", 16000)
    trains_at(lab, "n3", 20000)


def test_a_cold_cache_makes_the_first_steps_slow(fresh: Callable[..., Lab]) -> None:
    lab = fresh("n1", contaminated=[])
    lab.break_host("n1", "no_job")
    clear_caches(lab, "n1")
    restarted(lab, "n1")
    eventually(lambda: steps_since_start(lab, "n1") >= 20)
    rates = [rate for _, rate in steps(lab.init("n1"))]
    assert max(rates[:10]) < 5000
    assert min(rates[11:]) > 19500


def test_the_job_goes_on_from_its_checkpoint(fresh: Callable[..., Lab]) -> None:
    lab = fresh("n1")
    eventually(lambda: steps_since_start(lab, "n1") >= 5)
    lab.break_host("n1", "no_job")
    last = steps(lab.init("n1"))[-1][0]
    restarted(lab, "n1")
    eventually(lambda: steps_since_start(lab, "n1") >= 1)
    assert steps(lab.init("n1"))[0][0] == last + 1


def test_a_job_that_forgets_its_checkpoint_starts_at_zero(fresh: Callable[..., Lab]) -> None:
    lab = fresh("n1")
    lab.break_host("n1", "forgets_checkpoint")
    lab.break_host("n1", "no_job")
    lab.run("n1", f"cd /opt/train; setsid {' '.join(training(2).argv)} >>{LOG} 2>&1 </dev/null &")
    eventually(lambda: steps(lab.init("n1")) and steps(lab.init("n1"))[0][0] == 1)


def test_environments_are_linked_so_that_writing_in_place_is_seen(fresh: Callable[..., Lab]) -> None:
    lab = fresh("n1", "n2")
    file = "opt/train/venv/pyvenv.cfg"
    assert (lab.paths.disk("n1") / file).stat().st_ino == (lab.paths.disk("n2") / file).stat().st_ino


# -- nvidia-smi --------------------------------------------------------------------------------------


def test_nvidia_smi_names_the_holders(lab: Lab) -> None:
    eventually(
        lambda: "python" in lab.run("gpu03", "nvidia-smi --query-compute-apps=pid,name --format=csv").stdout
    )
    query = "nvidia-smi --query-compute-apps=pid,used_gpu_memory --format=csv,noheader,nounits"
    pids = {int(line.split(",")[0]) for line in lab.run("gpu03", query).stdout.splitlines()}
    holders = {one.pid for one in lab.processes("gpu03") if one.argv[1:2] == ("-u",)}
    assert pids == holders
    table = lab.run("gpu03", "nvidia-smi").stdout.splitlines()
    assert {len(line) for line in table[1:] if line} == {91}
    query = "nvidia-smi --query-gpu=index,memory.used,utilization.gpu,mig.mode.current --format=csv"
    assert lab.run("gpu03", query).stdout.splitlines() == [
        "index, memory.used [MiB], utilization.gpu [%], mig.mode.current",
        "0, 68518 MiB, 100 %, Disabled",
        "1, 68518 MiB, 100 %, Disabled",
    ]


def test_idle_gpus_hold_nothing(lab: Lab) -> None:
    lab.break_host("gpu02", "no_job")
    assert "No running processes found" in lab.run("gpu02", "nvidia-smi").stdout
    query = "nvidia-smi --query-gpu=memory.used --format=csv,noheader"
    assert lab.run("gpu02", query).stdout == "0 MiB\n0 MiB\n"
    lab.heal("gpu02")


# -- faults ------------------------------------------------------------------------------------------

SHOWS = {
    "full_disk": (
        "cp /etc/passwd /var/lib/x; code=$?; rm -f /var/lib/x; exit $code",
        1,
        "No space left on device",
    ),
    "read_only": ("cp /etc/passwd /var/lib/x; code=$?; exit $code", 1, "ead-only file system"),
    "no_repair_source": ("ls /opt/wheelhouse", 2, "No such file"),
    "local_patch": (f"grep -r 'by hand' {VENV}/lib/python3*/site-packages/numpy", 0, "patched by hand"),
    "load_fails": (f"{VENV}/bin/python -c 'import torch'", 1, "undefined symbol"),
    "nvidia_smi_hangs": ("timeout -k 0.1 0.3 nvidia-smi", 137, ""),
    "driver_mismatch": ("nvidia-smi", 18, "Driver/library version mismatch"),
    "driver_gone": ("nvidia-smi", 9, "couldn't communicate with the NVIDIA driver"),
    "stale_lock": ("ls /root/.cache/torch_extensions/*/fused_adam", 0, "lock"),
    "disabled": ("cat /etc/fleetfix/DISABLED", 0, "by the lab"),
    "slurm_node": ("cat /proc/[0-9]*/environ | tr '\\0' '\\n'; true", 0, "SLURM_JOB_ID=4711"),
    "kubelet": ("grep -qsx kubelet /proc/[0-9]*/comm", 0, ""),
    "container_job": ("grep -qsx containerd-shim /proc/[0-9]*/comm", 0, ""),
    "foreign_lease": ("cat /var/lib/fleetfix/lease.json", 0, '"operator": "bob"'),
    "unfinished_run": ("ls /run/other-work; cat /var/lib/fleetfix/claims/*", 0, '"operator": "bob"'),
}


@pytest.mark.parametrize("fault", SHOWS)
def test_a_fault_shows_and_heals_without_a_trace(lab: Lab, fault: str) -> None:
    eventually(lambda: lab.tok_s("gpu03") is not None)
    before = lab.files("gpu03", ignore=JOB_WRITES)
    lab.break_host("gpu03", fault)
    command, code, text = SHOWS[fault]
    done = lab.run("gpu03", command)
    assert (done.returncode, text in done.stdout + done.stderr) == (code, True)
    assert lab.status()[2].faults == (fault,)
    assert lab.heal("gpu03") == (fault,)
    assert lab.files("gpu03", ignore=JOB_WRITES) == before
    assert lab.status()[2].faults == ()


@pytest.mark.parametrize(
    ("fault", "option", "value", "said"),
    [
        ("respawning_job", "how", "foo", "by a loop or a watchdog"),
        ("slow", "seconds", "abc", "--set seconds=abc: wanted a number from 0 to 3600"),
        ("slow", "seconds", -1, "wanted a number"),
        ("foreign_job", "gpu", 0.5, "wanted a whole number"),
        ("foreign_job", "gpu", 2, "gpu03 has GPUs 0 to 1"),
        ("local_patch", "file", "../../../pyvenv.cfg", "is not in the environment"),
        ("no_job", "how", "x", "no_job has no option how"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_done(
    lab: Lab, fault: str, option: str, value: object, said: str
) -> None:
    job = lab.job("gpu03")
    with pytest.raises(LabError, match=re.escape(said)):
        lab.break_host("gpu03", fault, **{option: value})
    assert lab.job("gpu03") == job
    assert lab.status()[2].faults == ()


def test_the_status_is_of_now_and_not_of_how_the_host_was_made(fresh: Callable[..., Lab]) -> None:
    lab = fresh("n1")
    eventually(lambda: lab.tok_s("n1") is not None)
    (before,) = lab.status()
    assert (before.contaminated, before.job, before.tok_s is not None) == (True, True, True)
    lab.break_host("n1", "no_job")
    mend_packages(lab, "n1")
    (after,) = lab.status()
    assert (after.contaminated, after.job, after.tok_s) == (False, False, None)


def test_a_mismatched_driver_starts_nothing_new(lab: Lab) -> None:
    ask = f"{VENV}/bin/python -c 'import torch; print(torch.cuda.is_available())'"
    assert lab.run("gpu03", ask).stdout == "True\n"
    lab.break_host("gpu03", "driver_mismatch")
    assert lab.run("gpu03", ask).stdout == "False\n"
    lab.heal("gpu03")


def test_a_naive_purge_kills_torch_and_leaves_every_list_clean(lab: Lab) -> None:
    lab.break_host("gpu02", "naive_purge")
    done = lab.run("gpu02", f"{VENV}/bin/python -c 'import torch'")
    words = "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"
    assert done.stderr.strip().endswith(words)
    assert (
        "nvidia_cudnn_cu12-9.10.2.21.dist-info"
        in lab.run("gpu02", f"ls {VENV}/lib/python3*/site-packages").stdout
    )
    assert lab.run("gpu02", f"ls -d {VENV}/lib/python3*/site-packages/*_cu13-9*").stdout == ""
    assert lab.job("gpu02") is None
    lab.heal("gpu02")
    trains_at(lab, "gpu02", 12800)


def test_a_foreign_job_is_another_owner_and_another_environment(lab: Lab) -> None:
    lab.break_host("gpu03", "foreign_job")
    theirs = [one for one in lab.processes("gpu03") if one.argv[0].startswith("/home/alice/venv/")]
    assert len(theirs) == 1
    assert theirs[0].uid == (2001 if os.geteuid() == 0 else os.geteuid())
    eventually(
        lambda: "/dev/nvidia1" in lab.run("gpu03", f"readlink /proc/{theirs[0].pid}/fd/*").stdout.split()
    )
    lab.heal("gpu03")
    assert not [one for one in lab.processes("gpu03") if "alice" in one.argv[0]]
    assert lab.job("gpu03") is not None


def test_a_job_of_slurm_is_below_its_daemons_and_of_their_user(lab: Lab) -> None:
    lab.break_host("gpu03", "slurm_node")
    launcher = lab.job("gpu03")
    assert launcher is not None
    assert launcher.uid == (2001 if os.geteuid() == 0 else os.geteuid())
    by_pid = {one.outer: one for one in lab.processes("gpu03")}
    above = [by_pid[launcher.parent]]
    while above[-1].parent in by_pid:
        above.append(by_pid[above[-1].parent])
    names = [Path(f"/proc/{one.outer}/comm").read_text().strip() for one in above]
    assert names == ["sh", "slurmstepd", "slurmd"]
    eventually(lambda: steps_since_start(lab, "gpu03") >= 8)
    lab.heal("gpu03")
    assert lab.job("gpu03") is not None


def test_a_container_has_processes_files_and_an_environment_of_its_own(lab: Lab) -> None:
    lab.break_host("gpu03", "container_job")
    launcher = lab.job("gpu03")
    assert launcher is not None
    inside, host = Path(f"/proc/{launcher.outer}"), Path(f"/proc/{lab.init('gpu03')}")
    for space in ("pid", "mnt", "uts"):
        assert os.readlink(inside / "ns" / space) != os.readlink(host / "ns" / space)
    assert not os.path.samefile(inside / "root", host / "root")
    assert not os.path.samefile(inside / f"root{VENV}", host / f"root{VENV}")
    assert os.path.samefile(inside / "root/usr/bin", host / "root/usr/bin")
    assert lab.run("gpu03", f"cat /proc/{launcher.pid}/cmdline").stdout.startswith(VENV)
    eventually(lambda: steps_since_start(lab, "gpu03") >= 1)
    lab.heal("gpu03")
    assert lab.job("gpu03") is not None


def test_another_run_ends_with_the_lab(fresh: Callable[..., Lab]) -> None:
    lab = fresh("n1")
    lab.break_host("n1", "foreign_lease")
    (driver,) = faults.drivers(lab, "n1")
    assert driver.alive()
    lab.down()
    assert not driver.alive()


@pytest.mark.parametrize("how", ["loop", "watchdog"])
def test_a_respawning_job_comes_back(lab: Lab, how: str) -> None:
    lab.break_host("gpu02", "respawning_job", how=how)
    eventually(lambda: lab.job("gpu02") is not None)
    first = lab.job("gpu02")
    assert first is not None
    os.kill(first.outer, 15)
    eventually(lambda: lab.job("gpu02") not in (None, first))
    lab.heal("gpu02")
    lab.break_host("gpu02", "no_job")
    assert lab.job("gpu02") is None
    lab.heal("gpu02")


def test_a_job_that_ignores_term_needs_more(lab: Lab) -> None:
    eventually(lambda: steps_since_start(lab, "gpu01") >= 1)
    lab.break_host("gpu01", "ignores_term")
    worker = next(one for one in lab.processes("gpu01") if one.argv[1:2] == ("-u",))
    os.kill(worker.outer, 15)
    seen = steps_since_start(lab, "gpu01")
    eventually(lambda: steps_since_start(lab, "gpu01") > seen + 5)
    lab.heal("gpu01")


async def test_a_vanished_host_cuts_and_never_answers(lab: Lab) -> None:
    connection = await connect(lab, "gpu02")
    lab.break_host("gpu02", "vanish")
    await asyncio.wait_for(connection.wait_closed(), 10)
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.77.0.2", lab.record().port), timeout=0.5)
    assert await hostname(lab, "gpu01") == "gpu01"
    lab.heal("gpu02")
    assert await hostname(lab, "gpu02") == "gpu02"


async def test_a_frozen_host_falls_silent_and_thaws(lab: Lab) -> None:
    async with await connect(lab, "gpu02") as connection:
        process = await connection.create_process("cat")
        lab.break_host("gpu02", "freeze")
        process.stdin.write("word\n")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await process.stdout.readline()
        lab.heal("gpu02")
        process.stdin.write_eof()
        done = await process.wait(timeout=10)
    assert done.stdout == "word\n"


async def test_a_refusing_host_refuses_and_a_dropping_one_drops(lab: Lab) -> None:
    lab.break_host("gpu02", "refuse")
    with pytest.raises(ConnectionRefusedError):
        await connect(lab, "gpu02")
    lab.heal("gpu02")
    connection = await connect(lab, "gpu02")
    lab.break_host("gpu02", "drop")
    await asyncio.wait_for(connection.wait_closed(), 10)
    assert await hostname(lab, "gpu02") == "gpu02"
    lab.heal("gpu02")


async def test_a_changed_host_key_is_noticed(lab: Lab) -> None:
    lab.break_host("gpu02", "changed_host_key")
    with pytest.raises(asyncssh.HostKeyNotVerifiable):
        await connect(lab, "gpu02")
    lab.heal("gpu02")
    assert await hostname(lab, "gpu02") == "gpu02"


async def test_a_slow_wire_takes_its_time(lab: Lab) -> None:
    async with await connect(lab, "gpu02") as connection:
        lab.break_host("gpu02", "slow", seconds=0.3)
        start = time.monotonic()
        await connection.run("true")
        assert time.monotonic() - start >= 0.6
    lab.heal("gpu02")


def test_what_is_not_known_is_said_in_one_line(lab: Lab) -> None:
    for words, fault, options in (
        ("no fault is called vanihs", "vanihs", {}),
        ("slow has no option second", "slow", {"second": 1}),
    ):
        with pytest.raises(LabError, match=words) as caught:
            lab.break_host("gpu01", fault, **options)
        assert "\n" not in f"{caught.value}{caught.value.hint}"
        assert "did you mean" in caught.value.hint
    with pytest.raises(LabError, match="no host gpu09"):
        lab.break_host("gpu09", "vanish")
    assert FAULTS["slow"].options == {"seconds": 0.2}


# -- up and down -------------------------------------------------------------------------------------


def test_two_labs_are_up_at_once(lab: Lab, fresh: Callable[..., Lab]) -> None:
    other = fresh("gpu01")
    assert other.record().port != lab.record().port
    assert other.run("gpu01", "hostname").stdout == "gpu01\n"
    assert lab.run("gpu01", "ls /etc/machine-id").returncode == 0


def test_up_twice_is_refused_and_harms_nothing(lab: Lab) -> None:
    pid = lab.init("gpu01")
    with pytest.raises(LabError, match=r"is up already, with gpu\[01-03\]") as caught:
        lab.up(["gpu01"])
    assert caught.value.hint == "fleetfix lab down"
    assert lab.init("gpu01") == pid


def test_down_leaves_no_process_and_no_file(fresh: Callable[..., Lab]) -> None:
    lab = fresh("n1", "n2")
    record = lab.record()
    inside = [one.outer for name in ("n1", "n2") for one in lab.processes(name)]
    assert len(inside) >= 2
    assert str(lab.down()) == "n[1-2]"
    gone = [record.server.process, *(one.init.process for one in record.hosts)]
    assert not any(one.alive() for one in gone)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in inside))
    assert not lab.root.exists()
    assert not lab.down()


def test_hosts_outlive_their_server_and_down_still_ends_them(fresh: Callable[..., Lab]) -> None:
    lab = fresh("n1")
    server = lab.record().server.process
    server.kill()
    assert server.wait_gone(5)
    init = lab.record().host("n1").init.process
    assert init.alive()
    lab.down()
    assert not init.alive()


def test_a_lab_whose_folder_is_gone_ends_by_itself(root: Path) -> None:
    lab = Lab(root / "lost")
    lab.up(["n1"])
    found = lab.record()
    shutil.rmtree(lab.root)
    eventually(lambda: not found.alive())


def test_a_lab_of_an_earlier_boot_is_swept(root: Path, fresh: Callable[..., Lab]) -> None:
    lab = fresh("n1")
    keep = lab.record()
    text = lab.paths.record.read_text()
    lab.paths.record.write_text(text.replace(boot_id(), "an-earlier-boot"))
    with pytest.raises(LabError, match="restarted since"):
        lab.status()
    # Nothing of it is alive after a real restart: the pids in it may be anybody's, and are left alone.
    shutil.copytree(lab.paths.root, root / "stale", symlinks=True, ignore=shutil.ignore_patterns("*.sock"))
    stale = Lab(root / "stale")
    stale.up(["m1"])
    assert [one.name for one in stale.status()] == ["m1"]
    stale.down()
    assert keep.host("n1").init.process.alive()
    lab.paths.record.write_text(text)


def test_a_folder_that_no_lab_made_is_never_dropped(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    for act in (lambda: Lab(tmp_path).up(["n1"]), lambda: Lab(tmp_path).down()):
        with pytest.raises(LabError, match="not a lab's folder"):
            act()
    assert (tmp_path / "precious").read_text() == "data"


def test_where_namespaces_are_refused_one_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = ["/bin/sh", "-c", "echo unshare: unshare failed: Operation not permitted >&2; exit 1"]
    monkeypatch.setattr(namespaces, "unshare", lambda argv: refuse)
    with pytest.raises(LabError) as caught:
        Lab(tmp_path / "lab").up(["n1"])
    assert (
        str(caught.value) == "hosts cannot be made here: unshare: unshare failed: Operation not permitted"
    )
    assert "docker run" in caught.value.hint
    assert not (tmp_path / "lab").exists()


def test_a_reboot_keeps_the_disks_and_nothing_else(fresh: Callable[..., Lab]) -> None:
    lab = fresh("n1")
    before = lab.run("n1", "cat /proc/sys/kernel/random/boot_id").stdout
    lab.run("n1", "touch /var/lib/kept /opt/kept /run/lost /dev/shm/lost")
    lab.reboot("n1")
    assert lab.run("n1", "cat /proc/sys/kernel/random/boot_id").stdout != before
    assert lab.run("n1", "ls /var/lib/kept /opt/kept").returncode == 0
    assert lab.run("n1", "ls /run /dev/shm").stdout.count("lost") == 0
    assert lab.job("n1") is None


# -- hosts that have something in common ---------------------------------------------------------------


def test_a_job_over_two_hosts_lives_and_ends_as_one(fresh: Callable[..., Lab]) -> None:
    lab = fresh("gpu01", "gpu02", "gpu03", contaminated=["gpu02"], spanning=["gpu01", "gpu02"])
    for rank, host in enumerate(("gpu01", "gpu02")):
        eventually(lambda host=host: 12_000 < (lab.tok_s(host) or 0) < 14_000)  # type: ignore[misc]
        launcher = lab.job(host)
        assert launcher is not None
        assert {"--nnodes=2", f"--node-rank={rank}"} <= set(launcher.argv)
    eventually(lambda: (lab.tok_s("gpu03") or 0) > 19_000)
    lab.break_host("gpu02", "no_job")
    eventually(lambda: lab.job("gpu01") is None)
    assert b"NCCL error: remote process exited" in lab.read("gpu01", LOG)
    assert lab.job("gpu03") is not None
    assert [one.spans for one in lab.status()] == ["gpu[01-02]", "gpu[01-02]", ""]
    lab.heal("gpu02")
    for host in ("gpu01", "gpu02"):
        eventually(lambda host=host: steps_since_start(lab, host) > 2)  # type: ignore[misc]
    first = [min(step for step, _ in steps(lab.init(host))) for host in ("gpu01", "gpu02")]
    assert first[0] == first[1] > FIRST_STEP, "they go on together, from the checkpoint that both have"


def test_a_shared_folder_is_one_on_all_hosts_and_no_other_is(fresh: Callable[..., Lab]) -> None:
    lab = fresh("gpu01", "gpu02", shared=["/opt/train/venv", "/root/.cache"])
    done = lab.run("gpu01", "touch /opt/train/venv/new /root/.cache/new /opt/train/own")
    assert done.returncode == 0, done.stderr
    found = lab.run("gpu02", "ls /opt/train/venv/new /root/.cache/new /opt/train/own; touch /usr/new")
    assert found.stdout.split() == ["/opt/train/venv/new", "/root/.cache/new"]
    assert "/opt/train/own" in found.stderr
    assert "/usr/new" in found.stderr
    assert lab.run("gpu02", "grep -c /opt/train/venv /proc/self/mountinfo").stdout.strip() == "1"
    declared = Inventory.load(str(lab.inventory_path)).hosts["gpu01"].vars["shared_paths"]
    assert declared == ["/opt/train/venv", "/root/.cache"]
    assert [one.contaminated for one in lab.status()] == [True, True]


def test_what_cannot_be_spanned_or_shared_is_said_before_anything_is_made(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "lab")
    for more in ({"spanning": ["gpu09"]}, {"spanning": ["gpu01"]}, {"shared": ["/usr/share"]}):
        with pytest.raises(LabError):
            lab.up(["gpu01", "gpu02"], **more)  # type: ignore[arg-type]
        assert not lab.root.exists()
