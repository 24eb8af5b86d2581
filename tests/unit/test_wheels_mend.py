"""Environments made by real pip and real uv, contaminated, mended byte by byte, and taken back."""

import io
import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fleetfix.actions.cuda_wheels import CudaWheels
from fleetfix.actions.wheel_parts import WheelParts
from fleetfix.domain.cure import cure
from fleetfix.domain.wheels import Audit
from fleetfix.remote import dists, environments, holds, jobs, mounts, parts, sources, tree, wheels
from fleetfix.remote.api import Refusal
from tests.wheelhouse import CLEAN, OTHER, PURGE, UV, Host, Venv, house, nccl, snapshot, wheel

pytestmark = pytest.mark.skipif(not os.path.exists(UV), reason="uv is not installed")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return house(tmp_path_factory.mktemp("house"))


@pytest.fixture
def caches(monkeypatch, tmp_path):
    """No job runs; the caches are the test's own; no index is asked."""
    cache = tmp_path / "cache"
    environ = {"UV_CACHE_DIR": str(cache / "uv"), "PIP_CACHE_DIR": str(cache / "pip")}
    monkeypatch.setattr(jobs, "job_environ", lambda ctx, step: (os.geteuid(), environ))
    monkeypatch.setattr(environments, "_in_use", lambda ctx: [])
    monkeypatch.setattr(sources.Sources, "index_has", lambda self, dist: False)
    return cache


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path / "state")


def made(tool, tmp_path, caches, files, order=(CLEAN, OTHER)):
    venv = Venv(tmp_path / "venv", tool, caches)
    for names in order:
        venv.install(*(files[name] for name in names))
    return venv


def actions(venv, files, purge=("sglang-kernel",)):
    house_at = str(files["torch"].parent)
    return (
        WheelParts(venv=str(venv.path), cuda="12", purge=purge, wheelhouse=house_at),
        CudaWheels(venv=str(venv.path), cuda="12", purge=purge),
    )


def mend(host, venv, files, **more):
    stage, cure = actions(venv, files, **more)
    host.apply(stage)
    return host.apply(cure)


@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize("order", [(CLEAN, OTHER), (OTHER, CLEAN)], ids=["cu13-last", "cu12-last"])
def test_contaminated_environment_is_mended_and_taken_back(tool, order, tmp_path, caches, files, host):
    venv = made(tool, tmp_path, caches, files, order)
    before = snapshot(venv.path, times=True)
    plan = mend(host, venv, files)

    assert venv.broken() == []
    assert not set(OTHER) & set(venv.installed())
    assert set(CLEAN) <= set(venv.installed())
    assert b"2.27.5+cuda12" in (venv.site / "nvidia/nccl/lib/libnccl.so.2").read_bytes()
    assert not (venv.site / "nvidia/cu13").exists()
    assert not (venv.site / "sgl_kernel").exists()
    assert not (venv.path / "bin/cublas-tool").exists()
    assert subprocess.run([venv.python, "-I", "-B", "-c", "import torch"]).returncode == 0
    assert host.plan(actions(venv, files)[0]).changes == ()
    assert host.plan(actions(venv, files)[1]).changes == ()

    host.undo(plan, "cuda_wheels")
    assert snapshot(venv.path, times=True) == before


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_survivors_of_a_cure_by_hand_are_repaired(tool, tmp_path, caches, files, host):
    venv = made(tool, tmp_path, caches, files)
    venv.uninstall(*OTHER)
    assert len(venv.broken()) == 8
    plan = mend(host, venv, files)
    (change,) = plan.changes
    assert change.summary == "repair 8 files of 2 packages"
    assert set(change.parts) == {"repair:nvidia-nccl-cu12==2.27.5", "repair:nvidia-nvshmem-cu12==3.4.5"}
    assert venv.broken() == []


def test_plan_says_what_is_repaired_and_removed(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    stage, cure = actions(venv, files)
    brought = host.apply(stage)
    assert brought.changes[0].parts == (
        "stage:nvidia-nccl-cu12==2.27.5",
        "stage:nvidia-nvshmem-cu12==3.4.5",
    )
    (change,) = host.plan(cure).changes
    assert change.key == f"wheels:{venv.path}"
    assert change.summary == "repair 3 files of 2 packages, remove 4 packages"
    assert {part for part in change.parts if part.startswith("remove")} == {
        "remove:nvidia-nccl-cu13==2.28.9",
        "remove:nvidia-nvshmem-cu13==3.4.5",
        "remove:nvidia-cublas==13.1.0.3",
        "remove:sglang-kernel==0.4.10",
    }


def test_clean_environment_is_left_alone(tmp_path, caches, files, host):
    venv = Venv(tmp_path / "venv", "uv", caches)
    venv.install(*(files[name] for name in CLEAN))
    before = snapshot(venv.path, times=True)
    for action in actions(venv, files):
        plan = host.plan(action)
        assert (plan.changes, plan.blocked) == ((), None)
    assert snapshot(venv.path, times=True) == before


def test_probing_changes_nothing(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    before = snapshot(tmp_path, times=True)
    for action in actions(venv, files):
        probe = action.probe()
        reads = next(probe)
        try:
            while True:
                replies = []
                for read in reads:
                    function = getattr(
                        {"wheels": wheels, "parts": parts}[read.module], read.function.split(".")[1]
                    )
                    from fleetfix.commands import Completed

                    replies.append(Completed(value=function(host.context(dry=True), **read.args)))
                reads = probe.send(tuple(replies))
        except StopIteration:
            pass
    assert snapshot(tmp_path, times=True) == before


def test_without_a_source_nothing_is_planned(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    stage = WheelParts(venv=str(venv.path), cuda="12", purge=("sglang-kernel",))
    plan = host.plan(stage)
    assert plan.changes == ()
    assert "no source for nvidia-nccl-cu12 2.27.5" in plan.blocked


def test_cure_without_staged_parts_is_blocked(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    _, cure = actions(venv, files)
    plan = host.plan(cure)
    assert plan.changes == ()
    assert "not on this host" in plan.blocked
    stage = actions(venv, files)[0]
    foreseen = cure.foresee(host.probe(cure), {"parts": host.plan(stage).changes})
    assert foreseen.changes[0].parts


def test_the_uv_cache_serves_and_a_spoiled_file_in_it_does_not(tmp_path, caches, files, host):
    venv = made("uv", tmp_path, caches, files)
    stage = WheelParts(venv=str(venv.path), cuda="12", purge=("sglang-kernel",))
    assert [part.source for part in host.probe(stage).parts] == ["the uv cache"] * 2
    spoiled = (
        next(caches.glob("uv/archive-v0/*/nvidia_nccl_cu12*.dist-info")).parent
        / "nvidia/nccl/lib/libnccl.so.2"
    )
    data = spoiled.read_bytes()
    spoiled.write_bytes(bytes(len(data)))
    with pytest.raises(Refusal, match=r"no source for nvidia-nccl-cu12 2\.27\.5"):
        host.apply(stage)
    stage = actions(venv, files)[0]
    host.apply(stage)
    host.apply(actions(venv, files)[1])
    assert venv.broken() == []


def test_the_uv_cache_stays_as_it_was(tmp_path, caches, files, host):
    venv = made("uv", tmp_path, caches, files)
    before = snapshot(caches)
    plan = mend(host, venv, files)
    host.undo(plan, "cuda_wheels")
    assert snapshot(caches) == before


def test_the_pip_cache_serves(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    body = caches / "pip/http-v2/a/b/c/d/e"
    body.mkdir(parents=True)
    for number, name in enumerate(("nvidia-nccl-cu12", "nvidia-nvshmem-cu12")):
        shutil.copy(files[name], body / f"{number}.body")
        (body / f"{number}").write_bytes(b"not a wheel")
    stage = WheelParts(venv=str(venv.path), cuda="12", purge=("sglang-kernel",))
    assert [part.source for part in host.probe(stage).parts] == ["the pip cache"] * 2
    host.apply(stage)
    host.apply(actions(venv, files)[1])
    assert venv.broken() == []


def test_another_build_of_the_same_version_is_no_source(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    other = tmp_path / "other"
    other.mkdir()
    wheel(other, "nvidia-nccl-cu12", "2.27.5", nccl(12, "rebuilt"))
    plan = host.plan(
        WheelParts(venv=str(venv.path), cuda="12", purge=("sglang-kernel",), wheelhouse=str(other))
    )
    assert "no source for nvidia-nccl-cu12" in plan.blocked


def test_local_patch_survives_and_is_told(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    patched = venv.site / "torch/__init__.py"
    text = patched.read_text() + "# patched here\n"
    os.unlink(patched)
    patched.write_text(text)
    (venv.site / "plainlib/data.txt").write_text("mine\n")
    header = venv.site / "nvidia/nvshmem/include/nvshmem.h"  # both twins claim it, with equal bytes
    os.unlink(header)
    header.write_text("tuned here\n")
    plan = mend(host, venv, files)
    assert patched.read_text() == text
    assert (venv.site / "plainlib/data.txt").read_text() == "mine\n"
    assert header.read_text() == "tuned here\n"
    assert any("torch 2.9.1: 1 files locally modified" in note for note in plan.notes)


def test_files_that_others_own_too_stay(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    mend(host, venv, files)
    assert (venv.site / "nvidia/__init__.py").exists()
    assert (venv.site / "nvidia/nvshmem/include/nvshmem.h").exists()


def test_no_file_of_a_staying_package_is_ever_missing(tmp_path, caches, files, host, monkeypatch):
    venv = made("pip", tmp_path, caches, files)
    stage, cure = actions(venv, files)
    host.apply(stage)
    watched = [venv.site / path for name in CLEAN for path in zipped(files[name])]
    seen = []
    monkeypatch.setattr(tree, "watcher", lambda: seen.extend(path for path in watched if not path.exists()))
    host.apply(cure)
    assert seen == []


def zipped(path):
    with zipfile.ZipFile(path) as archive:
        return [name for name in archive.namelist() if ".dist-info/" not in name]


def test_byte_code_of_removed_modules_goes(tmp_path, caches, files, host):
    venv = made("uv", tmp_path, caches, files)
    subprocess.run([venv.python, "-I", "-c", "import sgl_kernel, nvidia.cu13.tool, plainlib"], check=True)
    assert list(venv.site.glob("sgl_kernel/__pycache__/*.pyc"))
    mend(host, venv, files)
    assert not (venv.site / "sgl_kernel").exists()
    assert list(venv.site.glob("plainlib/__pycache__/*.pyc"))


def test_a_link_on_the_way_is_refused(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    stage, cure = actions(venv, files)
    host.apply(stage)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(venv.site / "nvidia/nccl", elsewhere)
    os.symlink(elsewhere, venv.site / "nvidia/nccl")
    before = snapshot(elsewhere)
    with pytest.raises(Refusal, match="not a folder of its own"):
        host.apply(cure)
    assert snapshot(elsewhere) == before


def test_a_site_behind_lib64_is_the_same_site(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    if not (venv.path / "lib64").exists():
        os.symlink("lib", venv.path / "lib64")
    both = [str(venv.site), str(venv.site).replace("/lib/", "/lib64/")]
    found = dists.Environment(str(venv.path), both)
    assert len({dist.info for dist in found.dists}) == len(found.dists)
    mend(host, venv, files)
    assert venv.broken() == []


def test_a_package_installed_again_since_the_plan_is_a_stale_plan(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    stage, cure = actions(venv, files)
    host.apply(stage)
    (change,) = host.plan(cure).changes
    record = venv.site / "nvidia_cublas-13.1.0.3.dist-info/RECORD"
    record.write_text(record.read_text() + "nvidia/cu13/more.txt,,\n")
    with pytest.raises(Refusal, match="installed again") as refused:
        host.call(change.do[0], "cuda_wheels")
    assert refused.value.kind == "stale_plan"


def test_commit_keeps_the_hold_until_its_time(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    before = snapshot(venv.path, times=True)
    plan = mend(host, venv, files)
    host.commit(plan, "cuda_wheels")
    host.undo(plan, "cuda_wheels")
    assert snapshot(venv.path, times=True) == before


def test_settled_hold_is_gone_and_says_so(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    plan = mend(host, venv, files)
    wheels.settle(host.context("cuda_wheels"), keep=0)
    with pytest.raises(Refusal, match="committed"):
        host.undo(plan, "cuda_wheels")


def test_a_hold_of_which_something_is_gone_is_told_before_anything_is_undone(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    lacks = wheels.restore.lacks
    assert lacks(host.context("cuda_wheels"), False) is None, "nothing was done"
    plan = mend(host, venv, files)
    held = Path(host.context("cuda_wheels").recall("hold")["folder"])
    assert lacks(host.context("cuda_wheels"), True) is None
    (held / "0").unlink()
    assert "1 files of the hold" in lacks(host.context("cuda_wheels"), False)
    shutil.rmtree(held.parent)
    assert f"the hold {held} is gone" in lacks(host.context("cuda_wheels"), False)
    del plan


def test_undo_of_nothing_does_nothing(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    before = snapshot(venv.path, times=True)
    wheels.restore(host.context("cuda_wheels"))
    parts.unstage(host.context("wheel_parts"))
    assert snapshot(venv.path, times=True) == before


def test_unstaging_leaves_no_part(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    stage, _ = actions(venv, files)
    plan = host.apply(stage)
    assert os.path.isdir(parts.folder(host.context()))
    host.undo(plan, "wheel_parts")
    assert not os.path.exists(parts.folder(host.context()))
    assert host.plan(stage).changes


@pytest.mark.parametrize(("links", "stride"), [(True, 1), (False, 5)], ids=["hard-links", "no-hard-links"])
def test_undo_is_right_after_a_kill_at_any_point(links, stride, tmp_path, caches, files, host, monkeypatch):
    """`do` runs in a child that dies before its k-th change of the file system, for every k, or every
    fifth where only the way of keeping a file is another."""
    venv = made("pip", tmp_path, caches, files)
    shutil.rmtree(venv.site / "nvidia/nvshmem")  # some are missing, some are overwritten
    venv.install(files["nvidia-nvshmem-cu13"])
    subprocess.run([venv.python, "-I", "-c", "import sgl_kernel"], check=True)
    stage, cure = actions(venv, files)
    host.apply(stage)
    if not links:
        monkeypatch.setattr(tree.Tree, "link_to", _no_links)
    plan = host.plan(cure)
    before = snapshot(venv.path, times=True)
    killed = 0
    for stop in range(1, 400, stride):
        shutil.rmtree(os.path.join(host.home, "runs/r1/undo/cuda_wheels"), ignore_errors=True)
        ended = _die_at(host, plan, stop)
        killed += ended
        host.undo(plan, "cuda_wheels")
        assert snapshot(venv.path, times=True) == before, f"killed before change {stop}"
        host.undo(plan, "cuda_wheels")
        assert snapshot(venv.path, times=True) == before
        if not ended:
            break
    assert killed > 30 / stride
    assert not ended


def _no_links(self, path, fd, name):
    raise OSError(1, "no hard links here")


def _die_at(host, plan, stop):
    """Run `do` in a child that kills itself before change number `stop`; whether it came to that."""
    pid = os.fork()
    if pid == 0:
        left = [stop]

        def watcher():
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        tree.watcher = watcher
        try:
            host.call(plan.changes[0].do[0], "cuda_wheels")
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def test_a_repair_cut_short_anywhere_is_finished_by_the_same_call(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    before = snapshot(venv.path, times=True)
    stage, cure = actions(venv, files)
    host.apply(stage)
    plan = host.plan(cure)
    for stop in range(1, 400, 2):
        shutil.rmtree(os.path.join(host.home, "runs/r1/undo/cuda_wheels"), ignore_errors=True)
        ended = _die_at(host, plan, stop)
        host.call(plan.changes[0].do[0], "cuda_wheels")
        assert venv.broken() == []
        assert not set(OTHER) & set(venv.installed())
        host.undo(plan, "cuda_wheels")
        assert snapshot(venv.path, times=True) == before
        if not ended:
            break
    assert stop > 30


@pytest.fixture
def owner():
    """An ordinary user who can be acted for."""
    if os.geteuid() != 0:
        pytest.skip("needs root to act for another user")
    try:
        return pwd.getpwnam("nobody").pw_uid
    except KeyError:
        pytest.skip("no user nobody here")


@pytest.fixture
def anothers(owner, caches, files):
    """(environment, host): a contaminated environment of that user, where that user can enter."""
    base = Path("/var/tmp") / f"fleetfix-test-{os.getpid()}"
    base.mkdir(mode=0o755)
    try:
        venv = Venv(base / "venv", "pip", caches)
        venv.install(*(files[name] for name in CLEAN))
        venv.install(*(files[name] for name in OTHER))
        subprocess.run(["chown", "-Rh", str(owner), str(venv.path)], check=True)
        host = Host(base / "state")
        os.makedirs(host.home, 0o700)
        yield venv, host
    finally:
        shutil.rmtree(base)


def test_everything_is_made_as_the_owner(anothers, files, owner):
    """And nothing of it runs as root: its code would say so."""
    venv, host = anothers
    told = venv.path.parent / "told"
    told.touch()
    told.chmod(0o666)
    for name in ("canary.pth", "sitecustomize.py", "usercustomize.py"):
        (venv.site / name).write_text(f"import os; open({str(told)!r}, 'a').write('%d ' % os.geteuid())\n")
        os.chown(venv.site / name, owner, owner)
    before = snapshot(venv.path, times=True)
    plan = mend(host, venv, files)
    assert venv.broken() == []
    assert {os.lstat(path).st_uid for path in venv.path.rglob("*")} == {owner}
    host.undo(plan, "cuda_wheels")
    assert snapshot(venv.path, times=True) == before
    assert set(told.read_text().split()) <= {str(owner)}


RACER = """
import os, sys, time
inside, away, elsewhere = sys.argv[1:]
print("racing", flush=True)
while True:
    os.rename(inside, away)
    os.symlink(elsewhere, inside)
    time.sleep(0.0003)
    os.unlink(inside)
    os.rename(away, inside)
    time.sleep(0.0003)
"""


def test_a_repair_that_the_owner_races_with_links_leads_nowhere_else(anothers, files, owner):
    """Whatever becomes of the repair, root's own tree that the links lead to stays as it is."""
    venv, host = anothers
    roots = venv.path.parent / "roots"
    shutil.copytree(venv.site, roots, symlinks=True)
    before = snapshot(roots, times=True)
    plan = host.apply(actions(venv, files)[0])
    argv = ["/usr/bin/python3", "-c", RACER]
    inside = [str(venv.site / "nvidia"), str(venv.site / "away"), str(roots / "nvidia")]
    racer = subprocess.Popen([*argv, *inside], user=owner, stdout=subprocess.PIPE, cwd="/")
    refused = 0
    try:
        assert racer.stdout.readline() == b"racing\n"
        for _ in range(5):
            try:
                plan = host.plan(actions(venv, files)[1])
                for call in plan.changes[0].do:
                    host.call(call, "cuda_wheels")
                host.undo(plan, "cuda_wheels")
            except (Refusal, OSError, IndexError):
                refused += 1
            assert snapshot(roots, times=True) == before
    finally:
        racer.kill()
        racer.communicate()
    assert refused, "nobody raced"
    assert {os.lstat(path).st_uid for path in venv.path.rglob("*")} == {owner}


@pytest.mark.parametrize(
    ("part", "whose", "mode", "said"),
    [
        ("nvidia/nccl/lib", 0, 0o755, "nvidia/nccl/lib belongs to root"),
        ("nvidia/nccl/lib/libnccl.so.2", 0, 0o644, "nvidia/nccl/lib/libnccl.so.2 belongs to root"),
        ("nvidia/nccl/lib", None, 0o555, "its owner may not write in "),
    ],
)
def test_what_the_owner_cannot_change_blocks_before_anything_is_stopped(
    part, whose, mode, said, anothers, files, owner
):
    venv, host = anothers
    os.chown(venv.site / part, owner if whose is None else whose, -1)
    (venv.site / part).chmod(mode)
    for action in actions(venv, files):
        assert said in host.plan(action).blocked


def test_an_environment_that_cannot_be_written_blocks_also_where_things_only_go(
    tmp_path, caches, files, host, monkeypatch
):
    venv = Venv(tmp_path / "venv", "pip", caches)
    venv.install(*(files[name] for name in (*CLEAN, "nvidia-cublas")))
    assert host.plan(actions(venv, files)[1]).changes
    monkeypatch.setattr(os, "access", lambda path, mode, **_: not mode & os.W_OK)  # mounted read-only
    for action in actions(venv, files):
        assert host.plan(action).blocked == f"{venv.path} cannot be changed: nothing there can be written"


def test_a_change_says_on_which_file_systems_the_environment_lies(
    tmp_path, caches, files, host, monkeypatch
):
    venv = made("pip", tmp_path, caches, files)
    lib = str(venv.path / "lib")
    rows = [("/", "ext4", "/dev/sda1", "/"), (lib, "nfs4", "nas01:/export", "/lib")]
    monkeypatch.setattr(mounts, "rows", lambda: rows)
    for action in actions(venv, files):
        folders = host.plan(action).changes[0].folders
        assert [one.source for one in folders] == ["/dev/sda1", "nas01:/export"]
        assert folders[0].path == str(venv.path)
        assert folders[1].path.startswith(lib)
        host.apply(action)


def test_listed_names_go_though_somebody_asked_for_them(tmp_path, caches, files, host):
    venv = Venv(tmp_path / "venv", "pip", caches)
    venv.install(*(files[name] for name in CLEAN))
    venv.install(*(files[name] for name in OTHER), requested=True)
    stage, cure = actions(venv, files)
    blocked = host.plan(stage).blocked
    assert "nvidia-nccl-cu13 2.28.9 and nvidia-nccl-cu12 2.27.5 claim 2 files" in blocked
    assert "asked for it by name" in blocked or "a place of its own" in blocked
    stage, cure = actions(venv, files, purge=PURGE)
    host.apply(stage)
    host.apply(cure)
    assert venv.broken() == []


def test_a_removal_that_uv_did_not_finish_is_finished(tmp_path, caches, files, host):
    venv = made("uv", tmp_path, caches, files)
    info = venv.site / "nvidia_nccl_cu13-2.28.9.dist-info"
    os.unlink(info / "RECORD")
    os.unlink(venv.site / "nvidia/nccl/lib/libnccl.so.2")
    before = snapshot(venv.path, times=True)
    plan = mend(host, venv, files)
    assert "nvidia-nccl-cu13 2.28.9: its removal was interrupted and is finished" in plan.notes
    assert venv.broken() == []
    assert not info.exists()
    assert not (venv.site / "nvidia/nccl/include/nccl_device").exists()
    host.undo(plan, "cuda_wheels")
    assert snapshot(venv.path, times=True) == before


def test_a_removal_without_any_record_of_what_was_there_is_blocked(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    os.unlink(venv.site / "nvidia_nccl_cu13-2.28.9.dist-info/RECORD")
    assert "nvidia-nccl-cu13 2.28.9 has no RECORD" in host.plan(actions(venv, files)[0]).blocked


def test_a_removal_that_pip_did_not_finish_is_finished(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    os.rename(
        venv.site / "nvidia_nccl_cu13-2.28.9.dist-info", venv.site / "~vidia_nccl_cu13-2.28.9.dist-info"
    )
    os.rename(venv.site / "nvidia/nccl", venv.site / "nvidia/~ccl")
    (venv.site / "nvidia/~ccl/notes.txt").write_text("somebody's own\n")
    before = snapshot(venv.path, times=True)
    plan = mend(host, venv, files)
    assert venv.broken() == []
    assert sorted(path.name for path in venv.site.glob("nvidia/~ccl/**/*")) == ["notes.txt"]
    assert not list(venv.site.glob("~*"))
    host.undo(plan, "cuda_wheels")
    assert snapshot(venv.path, times=True) == before


def test_byte_code_compiled_after_the_repair_goes_with_its_undo(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    venv.uninstall(*OTHER)
    before = snapshot(venv.path, times=True)
    plan = mend(host, venv, files)
    subprocess.run([venv.python, "-I", "-c", "import nvidia.nccl"], check=True)
    assert list(venv.site.glob("nvidia/nccl/__pycache__/*.pyc"))
    host.undo(plan, "cuda_wheels")
    assert snapshot(venv.path, times=True) == before


def test_a_hold_folder_of_somebody_else_is_refused(tmp_path, caches, files, host):
    outer = tmp_path / "outer"
    outer.mkdir(mode=0o755)
    outer.chmod(0o755)
    with pytest.raises(Refusal, match="not ours"):
        holds.opened({"outer": str(outer), "folder": str(outer / "files"), "uid": os.geteuid()})


def test_a_large_environment_fits_into_one_reply(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    for number in range(250):
        info = venv.site / f"nvidia_thing{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: nvidia-thing{number}\nVersion: 1.0\n\n")
        (info / "RECORD").write_text(f"{info.name}/RECORD,,\n")
    assert len(json.dumps(wheels.audit(host.context(), str(venv.path)))) < 64 * 1024


def many(venv, count, metadata, record=""):
    for number in range(count):
        info = venv.site / f"a_rather_ordinary_package_{number}-1.0.dist-info"
        info.mkdir()
        name = f"a-rather-ordinary-package-{number}"
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n{metadata % {'n': number}}\n\n")
        (info / "RECORD").write_text(f"{info.name}/RECORD,,\n{record % {'n': number}}")


def test_many_packages_that_require_torch_are_told_as_one(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    many(venv, 700, "Requires-Dist: torch>=2\nRequires-Dist: nvidia-cublas; extra == 'x%(n)d'")
    venv.install(wheel(tmp_path, "spares", "1.0", {"spares.py": ""}, requires=["nvidia-cublas"]))
    assert len(json.dumps(wheels.audit(host.context(), str(venv.path)))) < 64 * 1024
    assert host.plan(actions(venv, files)[0]).blocked is None
    found = cure(Audit.read(wheels.audit(host.context(), str(venv.path))), "12", ("sglang-kernel",))
    assert {dist.name for dist in found.remove} == set(OTHER) - {"nvidia-cublas"}
    assert any(note.endswith("packages that do not speak of CUDA are told as one") for note in found.notes)


def test_an_audit_that_cannot_be_told_is_blocked_and_no_bug(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    lost = "lost/%(n)d.so,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n"
    many(venv, 700, "Requires-Dist: torch>=2", lost)
    with pytest.raises(Refusal, match="too many to decide about at once") as refused:
        wheels.audit(host.context(), str(venv.path))
    assert refused.value.kind == "blocked"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_a_wheelhouse_by_http_serves(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(files["torch"].parent)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        stage = WheelParts(venv=str(venv.path), cuda="12", purge=("sglang-kernel",), wheelhouse=url)
        assert [part.source for part in host.probe(stage).parts] == ["the wheelhouse"] * 2
        host.apply(stage)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    host.apply(actions(venv, files)[1])
    assert venv.broken() == []
    assert not list(Path("/var/tmp").glob("fleetfix-*/fetched.whl"))


def test_the_owner_cannot_lead_what_is_fetched_astray(tmp_path, monkeypatch, owner):
    precious = tmp_path / "precious"
    precious.write_text("root's own")
    places = sources.Sources(Host(tmp_path / "state").context(), {"uid": owner, "path": "/nonexistent"})
    seen = []

    def fetched(url, timeout):
        (folder,) = places.scratch
        seen.append((os.stat(folder).st_uid, stat.S_IMODE(os.stat(folder).st_mode)))
        os.symlink(precious, os.path.join(folder, "fetched.whl"))  # as the owner would, were it theirs
        return io.BytesIO(b"a wheel")

    monkeypatch.setattr(sources.urllib.request, "urlopen", fetched)
    assert places._download("http://wheels/x.whl", "x-1.dist-info") is None
    assert seen == [(0, 0o700)]
    assert precious.read_text() == "root's own"
    places.clear()


def test_a_wheelhouse_that_does_not_answer_is_no_source(tmp_path, caches, files, host):
    venv = made("pip", tmp_path, caches, files)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/wheels"
        stage = WheelParts(venv=str(venv.path), cuda="12", purge=("sglang-kernel",), wheelhouse=url)
        assert "no source for nvidia-nccl-cu12" in host.plan(stage).blocked
