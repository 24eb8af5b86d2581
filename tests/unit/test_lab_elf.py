"""The shared objects of the lab load, answer, and need what they say they need."""

from __future__ import annotations

import csv
import ctypes
import io
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fleetfix.lab import stock
from fleetfix.lab.elf import Answers, Library, Stores, build
from fleetfix.lab.wheel import Wheel, hash_of


def made(folder: Path, library: Library) -> Path:
    path = folder / library.soname
    path.write_bytes(build(library))
    return path


def test_a_function_answers_its_number(tmp_path: Path) -> None:
    path = made(
        tmp_path, Library("libanswer.so.1", {"version": Answers(91002), "other": Answers(2**31 - 1)})
    )
    loaded = ctypes.CDLL(str(path))
    assert loaded.version() == 91002
    assert loaded.other() == 2**31 - 1


def test_a_function_stores_through_its_arguments(tmp_path: Path) -> None:
    functions = {"one": Stores((22705,)), "two": Stores((12, 8), first=1, status=3)}
    loaded = ctypes.CDLL(str(made(tmp_path, Library("libstore.so", functions))))
    first, second = ctypes.c_int(), ctypes.c_int()
    assert loaded.one(ctypes.byref(first)) == 0
    assert first.value == 22705
    assert loaded.two(None, ctypes.byref(first), ctypes.byref(second)) == 3
    assert (first.value, second.value) == (12, 8)


def test_a_needed_library_is_found_by_rpath(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    made(tmp_path / "deep", Library("libneeded_here.so.7"))
    path = made(
        tmp_path, Library("libneeds.so", {"it": Answers(1)}, ("libneeded_here.so.7",), "$ORIGIN/deep")
    )
    assert ctypes.CDLL(str(path)).it() == 1


def test_a_missing_library_fails_in_the_loaders_own_words(tmp_path: Path) -> None:
    path = made(tmp_path, Library("libneeds2.so", needed=("libcudnn.so.9",)))
    code = f"import ctypes; ctypes.CDLL({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = "OSError: libcudnn.so.9: cannot open shared object file: No such file or directory"
    assert done.stderr.strip().endswith(expected)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not here")
@pytest.mark.parametrize(("machine", "name"), [("x86_64", "X86-64"), ("aarch64", "AArch64")])
def test_readelf_finds_nothing_wrong(tmp_path: Path, machine: str, name: str) -> None:
    library = Library(
        "libboth.so.3", {"a": Answers(1), "b": Stores((1, 2))}, ("libc.so.6",), "$ORIGIN", "text"
    )
    path = tmp_path / "libboth.so.3"
    path.write_bytes(build(library, machine))  # type: ignore[arg-type]
    done = subprocess.run(["readelf", "-aW", path], capture_output=True, text=True)
    assert done.stderr == ""
    for expected in (name, "SONAME", "Library soname: [libboth.so.3]", "Shared library: [libc.so.6]"):
        assert expected in done.stdout


def test_text_and_size_are_in_the_file_and_equal_libraries_are_equal_bytes() -> None:
    library = Library("liba.so", {"f": Answers(1)}, text="NCCL version 2.28.9+cuda13.0", size=7000)
    assert b"NCCL version 2.28.9+cuda13.0\0" in build(library)
    assert len(build(library)) == 7000
    assert build(library) == build(library)


# -- wheels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_a_record_names_every_file_with_its_hash(installer: str) -> None:
    for wheel in (*stock.clean(), *stock.foreign()):
        files = wheel.installed(installer, "/opt/x/bin/python")  # type: ignore[arg-type]
        own = f"{wheel.dist_info}/RECORD"
        rows = {row[0]: row[1:] for row in csv.reader(files[own].decode().splitlines())}
        assert rows.pop(own) == ["", ""]
        others = {path: data for path, data in files.items() if path != own}
        assert rows == {path: [hash_of(data), str(len(data))] for path, data in others.items()}


def test_a_wheel_unpacks_to_what_is_installed() -> None:
    for wheel in stock.clean():
        installed = wheel.installed("uv", "/opt/x/bin/python")
        with zipfile.ZipFile(io.BytesIO(wheel.archive())) as bundle:
            for name in bundle.namelist():
                if not name.endswith("/RECORD"):
                    assert bundle.read(name) == installed[name]


def paths(wheel: Wheel) -> set[str]:
    return {path for path, data in wheel.files.items() if data}


def test_the_four_twins_share_paths_with_other_bytes() -> None:
    sound = {wheel.name: wheel for wheel in stock.clean()}
    for wheel in stock.shared_13():
        twin = sound[wheel.name.replace("-cu13", "-cu12")]
        assert paths(twin) <= paths(wheel)
        assert all(twin.files[path] != wheel.files[path] for path in paths(twin))


def test_no_other_foreign_wheel_shares_a_path_with_a_staying_one() -> None:
    sound = {path for wheel in stock.clean() for path in wheel.files}
    twins = {wheel.name for wheel in stock.shared_13()}
    others = [wheel for wheel in stock.foreign() if wheel.name not in twins]
    assert len(others) == 14
    assert not any(sound & set(wheel.files) for wheel in others)


def test_grep_cu13_finds_four_of_them() -> None:
    assert len([wheel for wheel in stock.foreign() if "cu13" in wheel.name]) == 4
