"""DT_NEEDED is read from real and broken ELF files, by no tool of the host."""

import shutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetfix.remote import elf
from tests.wheelhouse import shared_object


def test_needed_libraries_are_read(tmp_path):
    path = tmp_path / "x.so"
    path.write_bytes(shared_object("libcudart.so.13", "libcublasLt.so.13", "libc.so.6"))
    assert elf.needed(path) == ["libcudart.so.13", "libcublasLt.so.13", "libc.so.6"]
    assert elf.cuda_majors(path) == ["13"]


def test_numbers_that_are_not_cudas_do_not_count(tmp_path):
    path = tmp_path / "x.so"
    path.write_bytes(shared_object("libcufft.so.12", "libcudnn.so.9", "libstdc++.so.6"))
    assert elf.cuda_majors(path) == []


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_the_interpreter_itself_reads_as_readelf_says():
    said = subprocess.run(["readelf", "-d", sys.executable], capture_output=True, text=True).stdout
    names = [line.partition("[")[2].partition("]")[0] for line in said.splitlines() if "(NEEDED)" in line]
    assert names
    assert elf.needed(sys.executable) == names


@settings(max_examples=200)
@given(st.data())
def test_broken_files_need_nothing_and_break_nothing(data):
    import os
    import tempfile

    whole = bytearray(shared_object("libcudart.so.13"))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6)):
        whole[at] = data.draw(st.integers(0, 255))
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        assert isinstance(elf.needed(file.name), list)
    finally:
        os.unlink(file.name)


def test_a_pipe_is_not_waited_for(tmp_path):
    import os

    os.mkfifo(tmp_path / "x.so")
    assert elf.needed(tmp_path / "x.so") == []
