"""Where compile caches are, when one is stale, and what may not be moved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.domain import caches as domain
from fleetfix.domain.caches import Found, Toolchain, User, Whose
from fleetfix.lab import elf
from fleetfix.remote import caches
from fleetfix.remote.api import Context

UID = os.geteuid()
ALICE = Whose(uid=1000, name="alice", home="/home/alice", environment="/opt/train/venv")


def found(real: str = "/tmp/torchinductor_alice", name: str = "inductor", **fields: Any) -> Found:
    defaults = {
        "path": real,
        "by": "default",
        "owner": 1000,
        "owner_name": "alice",
        "files": 3,
        "newest": 100.0,
    }
    return Found.model_validate({"name": name, "real": real, **defaults, **fields})


# -- stale or not ---------------------------------------------------------------------------------------


OLDER = "older than the environment's last change"
OTHER = "holds 2 shared objects built for CUDA 13"


@pytest.mark.parametrize(
    ("cache", "changed", "cuda", "why"),
    [
        (found(newest=100.0), 101.0, None, OLDER),
        (found(newest=102.0), 101.0, None, None),
        (found(newest=100.0), None, None, None),
        (found(files=0, newest=None), 101.0, None, None),
        (
            found(newest=102.0, cuda={"13": 2, "12": 5}),
            101.0,
            "12",
            "holds 2 shared objects built for CUDA 13",
        ),
        (found(newest=102.0, cuda={"13": 2}), 101.0, None, None),
        (found(newest=102.0, cuda={"13": 2}), 101.0, "13", None),
        (found("/home/alice/.cupy/kernel_cache", "cupy", newest=100.0), 101.0, None, None),
        (
            found("/scratch/x", "also", newest=100.0),
            101.0,
            None,
            "older than the environment's last change",
        ),
    ],
)
def test_staleness(cache: Found, changed: float | None, cuda: str | None, why: str | None) -> None:
    assert domain.staleness(cache, changed, cuda) == why


def test_what_is_built_before_a_repair_that_is_planned_will_be_stale() -> None:
    assert domain.staleness(found(newest=200.0), 101.0, None, foreseen=True)
    assert domain.staleness(found(files=0, newest=None), 101.0, None, foreseen=True) is None


@given(st.floats(0, 1e10), st.floats(0, 1e10), st.floats(0, 1e9))
def test_a_later_change_never_makes_a_stale_cache_fresh(
    newest: float, changed: float, later: float
) -> None:
    cache = found(newest=newest)
    if domain.staleness(cache, changed, None):
        assert domain.staleness(cache, changed + later, None)


# -- guards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (found("relative/torchinductor_x"), "not an absolute path"),
        (found("/tmp/../torchinductor_x"), "not an absolute path"),
        (found("/torchinductor_alice"), "too near the root"),
        (found("/home/alice", "also"), "home folder"),
        (found("/home", "also"), "too near the root"),
        (found("/opt/train", "also"), "environment"),
        (found("/opt/train/venv", "also"), "environment"),
        (found("/home/alice/work", by="TORCHINDUCTOR_CACHE_DIR"), "not a name that such a cache has"),
        (found(kind="link"), "symbolic link"),
        (found(kind="other"), "not a folder"),
        (found(mount="/tmp/torchinductor_alice/x"), "mount point"),
        (found(owner=0, owner_name="root"), "belongs to root"),
        (found(movable=False), "may not rename"),
    ],
)
def test_guards_refuse(cache: Found, says: str) -> None:
    refused = domain.refusal(cache, ALICE)
    assert refused
    assert says in refused


@pytest.mark.parametrize(
    "cache",
    [
        found(),
        found("/scratch/run7/inductor"),
        found("/home/alice/.triton/cache", "triton"),
        found("/home/alice/.cache/torch_extensions", "torch_extensions"),
        found("/home/alice/.tilelang/cache", "tilelang"),
        found("/scratch/kernels", "also"),
    ],
)
def test_guards_let_real_caches_through(cache: Found) -> None:
    assert domain.refusal(cache, ALICE) is None


def test_every_default_place_passes_its_own_guard() -> None:
    places = {
        "tmp": "/tmp",
        "home": "/home/alice",
        "cache": "/home/alice/.cache",
        "user": "alice",
        "plain_user": "alice",
    }
    for cache in domain.CACHES:
        real = cache.default.format(**places)
        assert domain.refusal(found(real, cache.name), ALICE) is None, cache.name


@given(
    st.from_regex(r"(/[a-z.]{1,8}){0,4}", fullmatch=True),
    st.from_regex(r"(/[a-z]{1,8}){1,3}", fullmatch=True),
)
def test_no_home_and_nothing_above_it_is_ever_moved(real: str, home: str) -> None:
    whose = Whose(uid=1000, name="alice", home=home)
    if domain.within(home, real or "/"):
        assert domain.refusal(found(real or "/", "also"), whose)


def test_a_cache_in_use_by_the_job_is_free_once_the_job_stops() -> None:
    cache = found(users=(User(pid=7, name="python", user="alice", of_job=True),))
    assert domain.in_use(cache, job_will_stop=True) is None
    said = domain.in_use(cache, job_will_stop=False)
    assert said
    assert "the job's python (pid 7)" in said


def test_a_cache_in_use_by_somebody_else_is_named_with_them() -> None:
    users = (User(pid=9, name="python", user="bob"), User(pid=7, name="python", user="alice", of_job=True))
    said = domain.in_use(found(users=users), job_will_stop=True)
    assert said
    assert "in use by bob's python (pid 9)" in said


@pytest.mark.parametrize(
    ("toolchain", "says"),
    [
        (Toolchain(compiler=None, setuptools=True), "no C++ compiler"),
        (Toolchain(compiler="/usr/bin/g++", setuptools=False), "no setuptools"),
    ],
)
def test_a_cache_that_cannot_be_filled_again_is_said(toolchain: Toolchain, says: str) -> None:
    said = domain.lacking(found(objects=2), toolchain)
    assert said
    assert says in said
    assert domain.lacking(found(objects=0), toolchain) is None


def test_a_cache_inside_another_moves_with_it() -> None:
    outer, inner = found("/tmp/torchinductor_a"), found("/tmp/torchinductor_a/triton", "triton")
    twin = found("/tmp/torchinductor_ab")
    assert domain.outermost([inner, twin, outer, outer]) == (outer, twin)


# -- finding them on a host -----------------------------------------------------------------------------


class Host:
    """A home, a /tmp and an environment in a folder, and the job that says so by its variables."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.home, self.tmp = folder / "home", folder / "tmp"
        self.site = folder / "venv" / "lib" / "python3.11" / "site-packages"
        for each in (self.home, self.tmp, self.site):
            each.mkdir(parents=True)
        self.environ = {
            "HOME": str(self.home),
            "TMPDIR": str(self.tmp),
            "LOGNAME": "al:ice",
            "PATH": "/none",
        }
        self.live: dict[str, Any] | None = None
        self.environment: dict[str, Any] = {
            "path": str(folder / "venv"),
            "site": [str(self.site)],
            "uid": UID,
        }
        monkeypatch.setattr(caches.jobs, "current", lambda ctx: self.live)
        monkeypatch.setattr(caches.jobs, "job_environ", lambda ctx, step: (UID, self.environ))
        monkeypatch.setattr(caches.environments, "resolve", lambda ctx, venv: self.environment)

    def find(self, **args: Any) -> dict[str, Any]:
        ctx = Context("RUN", "caches", str(self.folder), dry=True)
        questions = {"caches": domain.questions(), "of": "stop", "stands_on": list(domain.STANDS_ON)}
        return caches.find(ctx, **{**questions, "stands_not_on": list(domain.STANDS_NOT_ON), **args})

    def found(self, **args: Any) -> dict[str, Found]:
        return {each["name"]: Found.model_validate(each) for each in self.find(**args)["found"]}

    def changed(self) -> float | None:
        moment = self.find()["environment"]["changed"]
        return None if moment is None else float(moment)

    def package(self, name: str, when: float, record: float | None = None) -> Path:
        info = self.site / f"{name}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "RECORD").write_text("")
        at(info / "RECORD", record or when)
        at(info, when)
        return info


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def artefact(path: Path, when: float = 1000.0, data: bytes = b"code") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    at(path, when)
    return path


def at(path: Path, when: float) -> None:
    os.utime(path, (when, when))


def needing(*sonames: str) -> bytes:
    return elf.build(elf.Library(soname="x.so", needed=sonames), "x86_64")


def test_defaults_follow_tmpdir_home_and_the_name_that_getpass_finds(host: Host) -> None:
    artefact(host.tmp / "torchinductor_al_ice" / "a.py")
    artefact(host.tmp / "al:ice" / "cutlass_python_cache" / "x")
    artefact(host.home / ".cache/torch_extensions/py311_cu128/adam/adam.o")
    artefact(host.home / ".triton/cache/k/x.cubin")
    by = {name: (each.by, each.real) for name, each in host.found().items()}
    assert by == {
        "inductor": ("default", str(host.tmp / "torchinductor_al_ice")),
        "cute-dsl": ("default", str(host.tmp / "al:ice/cutlass_python_cache")),
        "torch_extensions": ("default", str(host.home / ".cache/torch_extensions")),
        "triton": ("default", str(host.home / ".triton/cache")),
    }


def test_variables_move_a_cache_and_an_empty_one_does_not(host: Host) -> None:
    host.environ.update(
        TORCHINDUCTOR_CACHE_DIR="",
        TRITON_HOME=str(host.folder / "scratch"),
        XDG_CACHE_HOME=str(host.folder / "xdg"),
        TVM_FFI_CACHE_DIR="relative",
    )
    artefact(host.tmp / "torchinductor_al_ice" / "a.py")
    artefact(host.folder / "scratch/.triton/cache/x")
    artefact(host.folder / "xdg/torch_extensions/x")
    artefact(host.home / ".triton/cache/never")
    found = host.found()
    assert found["inductor"].by == "default"
    assert found["triton"].by == "TRITON_HOME"
    assert found["triton"].real == str(host.folder / "scratch/.triton/cache")
    assert found["torch_extensions"].real == str(host.folder / "xdg/torch_extensions")
    assert "tvm-ffi" not in found


def test_without_a_job_the_owners_defaults_say_where(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches.jobs, "job_environ", lambda ctx, step: None)
    answer = host.find()
    assert answer["whose"]["uid"] == UID
    assert answer["whose"]["by"].startswith("the defaults of")
    assert answer["job"] is None


def test_a_cache_is_measured_by_its_artefacts(host: Host) -> None:
    cache = host.tmp / "torchinductor_al_ice"
    artefact(cache / "a" / "old.py", 1000.0)
    artefact(cache / "b" / "new.so", 2000.0)
    artefact(cache / "locks" / "x.lock", 9000.0)
    artefact(cache / "empty", 9000.0, b"")
    (cache / "dangling").symlink_to("nowhere")
    found = host.found()["inductor"]
    assert (found.oldest, found.newest, found.objects, found.complete) == (1000.0, 2000.0, 1, True)
    assert found.files == 2


def test_a_walk_that_is_cut_short_says_so(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        artefact(host.tmp / "torchinductor_al_ice" / str(number) / "x")
    monkeypatch.setattr(caches, "ENTRIES", 5)
    found = host.found()["inductor"]
    assert not found.complete
    assert found.files < 20


def test_a_walk_that_is_cut_short_has_seen_what_is_newest(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = host.tmp / "torchinductor_al_ice"
    for number in range(20):
        folder = artefact(cache / f"{number:02}" / "x", 1000.0 + (500 if number == 13 else 0)).parent
        at(folder, 1000.0 + (500 if number == 13 else 0))
    monkeypatch.setattr(caches, "ENTRIES", 20)
    assert host.found()["inductor"].newest == 1500.0


def test_artefacts_of_the_other_cuda_are_seen_in_their_needs(host: Host) -> None:
    extensions = host.home / ".cache/torch_extensions"
    artefact(extensions / "py311_cu128/adam/adam.so", data=needing("libcudart.so.13", "libc.so.6"))
    artefact(extensions / "py311_cu128/lamb/lamb.so", data=needing("libcudart.so.12"))
    artefact(extensions / "py311_cu130/adam/adam.so", data=needing("libcudart.so.13"))
    artefact(extensions / "mine/adam.so", data=needing("libnvrtc.so.13", "libcublas.so.12"))
    # What is for CUDA 13 by its folder's name is right there; so is 12 in cu128.
    assert host.found()["torch_extensions"].cuda == {"13": 2, "12": 1}


def test_a_link_is_known_as_one_and_measured(host: Host) -> None:
    artefact(host.folder / "elsewhere" / "x", 1000.0)
    (host.tmp / "torchinductor_al_ice").symlink_to(host.folder / "elsewhere")
    found = host.found()["inductor"]
    assert (found.kind, found.files, found.newest) == ("link", 1, 1000.0)


def test_a_link_above_a_cache_is_resolved(host: Host) -> None:
    artefact(host.folder / "scratch" / "torch_extensions" / "x")
    (host.home / ".cache").symlink_to(host.folder / "scratch")
    found = host.found()["torch_extensions"]
    assert (found.kind, found.real) == ("folder", str(host.folder / "scratch/torch_extensions"))


def test_paths_of_the_playbook_are_looked_at_too(host: Host) -> None:
    artefact(host.folder / "kernels{}" / "x")
    assert host.found(also=[str(host.folder / "kernels{}")])["also"].files == 1


def test_a_folder_of_somebody_else_under_the_name_of_a_cache_is_known(host: Host) -> None:
    if UID != 0:
        pytest.skip("needs root, to give a folder away")
    cache = artefact(host.tmp / "torchinductor_al_ice" / "x").parent
    os.chown(cache, 65534, 65534)
    found = host.found()["inductor"]
    assert found.owner == 65534
    assert "belongs to" in (domain.refusal(found, Whose(uid=0, name="root", home="/root")) or "")


def test_a_mount_below_a_cache_is_seen(host: Host) -> None:
    if UID != 0:
        pytest.skip("needs root, to mount")
    mount = artefact(host.tmp / "torchinductor_al_ice" / "sub" / "x").parent
    subprocess.run(["mount", "--bind", host.home, mount], check=True)
    try:
        assert host.found()["inductor"].mount == str(mount)
    finally:
        subprocess.run(["umount", mount], check=True)
    assert host.found()["inductor"].mount is None


def test_who_uses_a_cache_is_told_apart_from_the_job(host: Host) -> None:
    cache = artefact(host.tmp / "torchinductor_al_ice" / "x").parent
    with subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"],
        cwd=cache,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as user:
        assert user.stdout
        user.stdout.readline()
        (other,) = host.found()["inductor"].users
        host.live = {"pid": user.pid}
        answer = host.find()
        (of_job,) = Found.model_validate(answer["found"][0]).users
        user.communicate(b"\n")
    assert (other.pid, other.of_job) == (user.pid, False)
    assert (of_job.pid, of_job.of_job) == (user.pid, True)
    assert answer["elsewhere"] is False
    assert host.found()["inductor"].users == ()


# -- dead locks -----------------------------------------------------------------------------------------


def lock_of(host: Host, *, built: bool = False) -> Path:
    folder = host.home / ".cache/torch_extensions/py311_cu128/adam"
    artefact(folder / "build.ninja")
    if built:
        artefact(folder / "adam.so")
    return artefact(folder / "lock", data=b"")


def torch_locks_by(host: Host, text: str) -> None:
    artefact(host.site / "torch/utils/file_baton.py", data=text.encode())


@pytest.mark.parametrize(
    ("style", "built", "dead"),
    [
        ("os.open(self.lock_file_path, os.O_CREAT | os.O_EXCL)", True, True),
        ("os.open(self.lock_file_path, os.O_CREAT | os.O_EXCL)", False, True),
        ("fcntl.flock(self.fd, fcntl.LOCK_EX)", False, False),
        ("", False, True),
        ("", True, False),
    ],
)
def test_a_lock_that_nobody_holds_is_dead_where_its_presence_locks(
    host: Host, style: str, built: bool, dead: bool
) -> None:
    lock = lock_of(host, built=built)
    torch_locks_by(host, style)
    assert host.found()["torch_extensions"].locks == ((str(lock),) if dead else ())


def test_a_lock_that_is_held_is_alive(host: Host) -> None:
    lock = lock_of(host)
    with lock.open() as file, subprocess.Popen(["sleep", "60"], stdin=file) as holder:
        assert host.found()["torch_extensions"].locks == ()
        holder.kill()


# -- when the environment changed -----------------------------------------------------------------------


def test_a_package_that_code_is_compiled_against_dates_the_environment(host: Host) -> None:
    host.package("torch-2.9.1", 1000.0)
    host.package("nvidia_nccl_cu12-2.27.5", 1000.0, record=3000.0)
    host.package("numpy-2.1.0", 5000.0)
    at(host.site, 5000.0)
    assert host.changed() == 3000.0


@pytest.mark.parametrize("name", ["rich-14.0", "nvidia_ml_py-13.580", "cuda_pathfinder-1.3"])
def test_another_package_that_comes_says_nothing(host: Host, name: str) -> None:
    host.package("torch-2.9.1", 1000.0)
    host.package(name, 5000.0)
    at(host.site, 5001.0)
    assert host.changed() == 1000.0


def test_a_removed_package_dates_the_environment_though_no_record_is_left(host: Host) -> None:
    host.package("torch-2.9.1", 1000.0)
    host.package("rich-14.0", 1000.0)
    at(host.site, 5000.0)
    assert host.changed() == 5000.0


def test_libraries_replaced_in_place_date_the_environment(host: Host) -> None:
    host.package("torch-2.9.1", 1000.0)
    library = artefact(host.site / "nvidia/nccl/lib/libnccl.so.2", 500.0)
    at(library.parent, 4000.0)
    at(host.site, 1000.0)
    assert host.changed() == 4000.0


def test_no_environment_has_no_date(host: Host) -> None:
    host.environment = {"none": "nothing here says which environment", "hint": ""}
    answer = host.find()
    assert answer["environment"] == {
        "path": None,
        "none": "nothing here says which environment",
        "changed": None,
    }


# -- the toolchain --------------------------------------------------------------------------------------


def test_the_compiler_is_the_one_that_the_jobs_path_finds(host: Host) -> None:
    assert host.find()["toolchain"]["compiler"] is None
    compiler = artefact(host.folder / "bin" / "g++")
    compiler.chmod(0o755)
    host.environ["PATH"] = f"/none:{compiler.parent}"
    assert host.find()["toolchain"]["compiler"] == str(compiler)


def test_setuptools_is_missed_only_where_something_asks_for_it(host: Host) -> None:
    assert host.find()["toolchain"]["setuptools"] is True
    artefact(host.site / "triton/runtime/build.py", data=b"import os\n    import setuptools\n")
    assert host.find()["toolchain"]["setuptools"] is False
    (host.site / "setuptools").mkdir()
    assert host.find()["toolchain"]["setuptools"] is True


def test_looking_changes_nothing(host: Host) -> None:
    artefact(host.tmp / "torchinductor_al_ice" / "x")
    lock_of(host)
    host.package("torch-2.9.1", 1000.0)

    def picture() -> dict[str, tuple[float, float]]:
        return {
            str(path): (path.lstat().st_mtime, path.lstat().st_ctime) for path in host.folder.rglob("*")
        }

    before = picture()
    host.find()
    assert picture() == before
