"""Moving a cache aside and back: exact, refused where unsafe, right after a kill at any point."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfix.remote import aside
from fleetfix.remote.api import Context, Refusal

UID = os.geteuid()
CLOSE = "os.closerange(3, 99)"  # Python keeps a descriptor of what it maps
root_only = pytest.mark.skipif(UID != 0, reason="needs root, to act as another user or to mount")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "tmp" / "torchinductor_alice", "old")


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return context(tmp_path)


def context(tmp_path: Path) -> Context:
    memory = tmp_path / "state" / "undo" / "1"
    return Context("RUN", "caches", str(tmp_path / "state"), state=str(tmp_path), memory=str(memory))


def make_cache(path: Path, text: str) -> Path:
    (path / "fxgraph" / "ab").mkdir(parents=True)
    (path / "fxgraph" / "ab" / "entry").write_text(text)
    (path / "kernel.py").write_text(text)
    (path / "latest").symlink_to("kernel.py")
    return path


def picture(folder: Path) -> dict[str, tuple[int, int, bytes | str | None]]:
    """Everything below a folder: mode, time of change, content."""
    found: dict[str, tuple[int, int, bytes | str | None]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content: bytes | str | None = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        when = 0 if path.is_dir() else status.st_mtime_ns
        found[str(path.relative_to(folder))] = (status.st_mode, when, content)
    return found


def test_a_moved_cache_is_gone_and_comes_back_as_it_was(cache: Path, ctx: Context) -> None:
    before = picture(cache.parent)
    moved = aside.move(ctx, str(cache), UID)
    assert not cache.exists()
    assert moved["moved"] == f"{cache}.fleetfix-trash.RUN"
    assert aside.put_back(ctx, str(cache), UID)["put_back"]
    assert picture(cache.parent) == before


def test_moving_twice_moves_once(cache: Path, ctx: Context) -> None:
    first = aside.move(ctx, str(cache), UID)
    make_cache(cache, "new")
    assert aside.move(ctx, str(cache), UID) == first
    assert (cache / "kernel.py").read_text() == "new"


def test_putting_back_removes_what_was_made_since(cache: Path, ctx: Context) -> None:
    before = picture(cache.parent)
    aside.move(ctx, str(cache), UID)
    make_cache(cache, "new")
    aside.put_back(ctx, str(cache), UID)
    aside.put_back(ctx, str(cache), UID)
    assert picture(cache.parent) == before


def test_putting_back_what_was_never_moved_does_nothing(cache: Path, ctx: Context) -> None:
    before = picture(cache.parent)
    assert not aside.put_back(ctx, str(cache), UID)["put_back"]
    assert picture(cache.parent) == before


def test_what_was_moved_and_is_gone_is_missed_and_what_is_back_or_dropped_is_not(
    cache: Path, ctx: Context
) -> None:
    lacks = aside.put_back.lacks  # type: ignore[attr-defined]
    assert lacks(ctx, False) is None
    moved = Path(aside.move(ctx, str(cache), UID)["moved"])
    assert lacks(ctx, False) is None
    moved.rename(cache)
    assert lacks(ctx, False) is None, "it is back already"
    shutil.rmtree(cache)
    assert f"{moved} is gone" in lacks(ctx, False)
    ctx.remember("dropped", True)
    assert lacks(ctx, True) is None


def test_a_cache_that_is_gone_already_is_no_error(tmp_path: Path, ctx: Context) -> None:
    assert aside.move(ctx, str(tmp_path / "none"), UID) == {"moved": None}
    assert aside.move(ctx, str(tmp_path / "no" / "parent"), UID) == {"moved": None}
    assert not aside.put_back(ctx, str(tmp_path / "none"), UID)["put_back"]


def test_putting_back_what_somebody_deleted_says_so(cache: Path, ctx: Context) -> None:
    moved = aside.move(ctx, str(cache), UID)["moved"]
    subprocess.run(["rm", "-r", moved], check=True)
    with pytest.raises(Refusal, match="is gone"):
        aside.put_back(ctx, str(cache), UID)


def test_undo_of_a_move_that_found_another_folder_in_its_place_does_nothing(
    cache: Path, ctx: Context
) -> None:
    assert killed_at(1, lambda ctx: aside.move(ctx, str(cache), UID), ctx)
    cache.rename(cache.parent / "taken away")
    make_cache(cache, "another")
    assert aside.move(ctx, str(cache), UID) == {"moved": None}
    before = picture(cache.parent)
    assert not aside.put_back(ctx, str(cache), UID)["put_back"]
    assert picture(cache.parent) == before


def test_what_was_dropped_after_a_good_run_is_not_missed_by_its_undo(cache: Path, ctx: Context) -> None:
    aside.move(ctx, str(cache), UID)
    aside.drop(ctx, str(cache), UID)
    make_cache(cache, "new")
    before = picture(cache.parent)
    assert "not put back" in aside.put_back(ctx, str(cache), UID)["note"]
    assert picture(cache.parent) == before


def test_dropping_leaves_nothing_and_touches_only_what_was_moved(cache: Path, ctx: Context) -> None:
    outside = cache.parent / "precious"
    outside.write_text("stay")
    (cache / "link").symlink_to(outside)
    (cache / "folder").symlink_to(make_cache(cache.parent / "another", "stay"))
    (cache / "closed").mkdir()
    (cache / "closed" / "x").write_text("x")
    (cache / "closed").chmod(0)
    aside.move(ctx, str(cache), UID)
    make_cache(cache, "new")
    assert aside.drop(ctx, str(cache), UID)["dropped"]
    assert not aside.drop(ctx, str(cache), UID)["dropped"]
    assert sorted(path.name for path in cache.parent.iterdir()) == [
        "another",
        "precious",
        "torchinductor_alice",
    ]
    assert (cache.parent / "another" / "kernel.py").read_text() == "stay"
    assert (cache / "kernel.py").read_text() == "new"


def test_dropping_keeps_the_priority_of_its_caller(cache: Path, ctx: Context) -> None:
    nice = os.nice(0)
    aside.move(ctx, str(cache), UID)
    aside.drop(ctx, str(cache), UID)
    assert os.nice(0) == nice


def test_a_trash_name_that_is_taken_is_left_alone(cache: Path, ctx: Context) -> None:
    taken = Path(f"{cache}.fleetfix-trash.RUN")
    make_cache(taken, "another's")
    moved = aside.move(ctx, str(cache), UID)
    assert moved["moved"] == f"{taken}.2"
    assert (taken / "kernel.py").read_text() == "another's"


def test_a_lock_file_is_moved_like_a_folder(cache: Path, ctx: Context) -> None:
    lock = cache / "lock"
    lock.touch()
    aside.move(ctx, str(lock), UID)
    assert not lock.exists()
    aside.put_back(ctx, str(lock), UID)
    assert lock.exists()


# -- what is refused ------------------------------------------------------------------------------------


def test_a_link_is_refused_and_its_target_untouched(cache: Path, ctx: Context) -> None:
    link = cache.parent / "torchinductor_bob"
    link.symlink_to(cache)
    before = picture(cache.parent)
    with pytest.raises(Refusal, match="neither a folder nor a file"):
        aside.move(ctx, str(link), UID)
    assert picture(cache.parent) == before


def test_a_link_on_the_way_is_refused(cache: Path, ctx: Context) -> None:
    (cache.parent.parent / "alias").symlink_to(cache.parent)
    with pytest.raises(Refusal, match="a link stands on the way"):
        aside.move(ctx, str(cache.parent.parent / "alias" / cache.name), UID)
    assert cache.exists()


@root_only
def test_a_mount_point_or_one_below_is_refused(cache: Path, ctx: Context) -> None:
    mount = cache / "fxgraph"
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mount], check=True)
    try:
        for path in (mount, cache):
            with pytest.raises(Refusal, match="is a mount point"):
                aside.move(ctx, str(path), UID)
    finally:
        subprocess.run(["umount", mount], check=True)


@root_only
def test_the_cache_of_another_user_is_refused(cache: Path, ctx: Context) -> None:
    os.chown(cache, 65534, 65534)
    with pytest.raises(Refusal, match="belongs to"):
        aside.move(ctx, str(cache), 0)


@root_only
def test_root_acts_as_the_owner_and_gains_nothing_more(tmp_path: Path, ctx: Context) -> None:
    folder = Path("/tmp") / f"fleetfix-test-{os.getpid()}"
    try:
        make_cache(folder / "torchinductor_nobody", "old")
        os.chown(folder / "torchinductor_nobody", 65534, 65534)
        # The folder above is root's: the owner may not rename in it, so root does not either.
        with pytest.raises(PermissionError):
            aside.move(ctx, str(folder / "torchinductor_nobody"), 65534)
        assert not aside.put_back(ctx, str(folder / "torchinductor_nobody"), 65534)["put_back"]
        os.chown(folder, 65534, 65534)
        assert aside.move(ctx, str(folder / "torchinductor_nobody"), 65534)["moved"]
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)


@pytest.fixture(params=["cwd", "open file", "map"])
def user_of(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], int]]:
    """Starts a process that uses a cache, and ends it after the test."""
    started: list[subprocess.Popen[bytes]] = []
    programs = {
        "cwd": "import os; os.chdir(p)",
        "open file": "f = open(p + '/kernel.py')",
        "map": "import mmap, os; m = mmap.mmap(os.open(p + '/kernel.py', 0), 0, prot=1); " + CLOSE,
    }

    def start(path: Path) -> int:
        program = f"import sys; p = sys.argv[1]; {programs[request.param]}; print(1, flush=True); input()"
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == b"1\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_cache_in_use_is_refused_naming_who_uses_it(
    cache: Path, ctx: Context, user_of: Callable[[Path], int]
) -> None:
    pid = user_of(cache)
    with pytest.raises(Refusal, match=rf"in use by .+ \(pid {pid}\)"):
        aside.move(ctx, str(cache), UID)
    assert cache.exists()


def test_putting_back_leaves_a_new_cache_that_is_in_use_beside_it(
    cache: Path, ctx: Context, user_of: Callable[[Path], int]
) -> None:
    aside.move(ctx, str(cache), UID)
    user_of(make_cache(cache, "new"))
    left = aside.put_back(ctx, str(cache), UID)["left"]
    assert (cache / "kernel.py").read_text() == "old"
    assert (Path(left) / "kernel.py").read_text() == "new"


# -- killed at any point --------------------------------------------------------------------------------


def killed_at(point: int, work: Callable[[Context], Any], ctx: Context) -> bool:
    """Run in a child that is killed when it passes that point. Says whether it got there."""
    pid = os.fork()
    if pid == 0:
        passed = 0

        def step() -> None:
            nonlocal passed
            if passed == point:
                os.kill(os.getpid(), signal.SIGKILL)
            passed += 1

        remember = ctx.remember

        def watched(key: str, value: object) -> None:
            step()
            remember(key, value)
            step()

        try:
            aside.watcher = step
            ctx.remember = watched
            work(ctx)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def test_undo_is_right_after_a_kill_at_any_point_of_do(tmp_path: Path) -> None:
    point = 0
    while True:
        place = tmp_path / str(point)
        cache = make_cache(place / "tmp" / "torch_extensions", "old")
        before, ctx = picture(cache.parent), context(place)
        killed = killed_at(point, lambda ctx, cache=cache: aside.move(ctx, str(cache), UID), ctx)
        aside.put_back(context(place), str(cache), UID)
        assert picture(cache.parent) == before, f"after a kill at point {point}"
        if not killed:
            break
        point += 1
    assert point >= 6


def test_do_ends_what_a_killed_do_began(tmp_path: Path) -> None:
    for point in range(6):
        place = tmp_path / str(point)
        cache = make_cache(place / "tmp" / "torch_extensions", "old")
        assert killed_at(point, lambda ctx, cache=cache: aside.move(ctx, str(cache), UID), context(place))
        moved = aside.move(context(place), str(cache), UID)["moved"]
        assert not cache.exists()
        assert (Path(moved) / "kernel.py").read_text() == "old"


def test_undo_that_is_killed_at_any_point_is_ended_by_the_next(tmp_path: Path) -> None:
    point = 0
    while True:
        place = tmp_path / str(point)
        cache = make_cache(place / "tmp" / "torch_extensions", "old")
        before = picture(cache.parent)
        aside.move(context(place), str(cache), UID)
        make_cache(cache, "new")
        undo = lambda ctx, cache=cache: aside.put_back(ctx, str(cache), UID)  # noqa: E731
        killed = killed_at(point, undo, context(place))
        undo(context(place))
        assert picture(cache.parent) == before, f"after a kill at point {point}"
        if not killed:
            break
        point += 1
    assert point >= 6


def test_a_drop_that_is_killed_goes_on_at_the_next(cache: Path, ctx: Context) -> None:
    aside.move(ctx, str(cache), UID)
    kept = ctx.recall("aside")
    assert killed_at(2, lambda _: aside._drop(kept), ctx)
    assert Path(kept["trash"]).exists()
    assert aside.drop(ctx, str(cache), UID)["dropped"]
    assert list(cache.parent.iterdir()) == []


def test_finding_who_uses_a_cache_is_quick(cache: Path) -> None:
    begun = time.monotonic()
    aside.users.of_paths([str(cache)])
    assert time.monotonic() - begun < 5
