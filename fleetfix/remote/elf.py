"""Read from an ELF file which shared libraries it needs, without any tool on the host.

A CUDA wheel whose name says nothing still says in DT_NEEDED which CUDA it was linked against:
sglang-kernel 0.4.10 needs libcudart.so.13 (sgl-project/sglang#20953 had the metadata wrong).
"""

import os
import re
import struct

from fleetfix.remote import plain

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB, DT_STRSZ = 0, 1, 5, 10
MOST = 1 << 20  # bytes of a dynamic section or string table that are read at most

# Libraries whose soname carries the CUDA major. libcufft.so.12 is CUDA 13, libcufft.so.11 CUDA 12,
# and so on: only those whose number is the CUDA major are looked at.
CUDA_SONAME = re.compile(r"^lib(?:cudart|nvrtc|nvrtc-builtins|cublas|cublasLt|nvJitLink)\.so\.(\d+)")


def needed(path):
    """The names in DT_NEEDED; [] for what is no ELF shared object, is broken, or cannot be read."""
    try:
        fd = plain.opened(path)
    except OSError:
        return []
    try:
        return _needed(fd)
    except (OSError, struct.error, ValueError, IndexError, OverflowError):
        return []
    finally:
        os.close(fd)


def cuda_majors(path):
    """The CUDA majors, as text, that the needed libraries of a file speak of."""
    found = (CUDA_SONAME.match(name) for name in needed(path))
    return sorted({match.group(1) for match in found if match})


def _needed(fd):
    head = os.pread(fd, 64, 0)
    if len(head) < 52 or head[:4] != b"\x7fELF" or head[4] not in (1, 2) or head[5] not in (1, 2):
        return []
    wide = head[4] == 2
    order = "<" if head[5] == 1 else ">"
    segments = _segments(fd, head, wide, order)
    dynamic = next((one for one in segments if one[0] == PT_DYNAMIC), None)
    if dynamic is None:
        return []
    tags = _tags(os.pread(fd, min(dynamic[3], MOST), dynamic[1]), wide, order)
    values = dict(tags)
    start = _offset(values.get(DT_STRTAB, -1), segments)
    if start is None:
        return []
    strings = os.pread(fd, min(values.get(DT_STRSZ, MOST), MOST), start)
    return [_text(strings, value) for tag, value in tags if tag == DT_NEEDED]


def _segments(fd, head, wide, order):
    """[(type, offset, address, size in the file)] of the program headers."""
    if wide:
        table, size, count = struct.unpack_from(order + "Q", head, 32)[0], *_sizes(head, order, 54)
        form, pick = order + "IIQQQQQQ", (0, 2, 3, 5)
    else:
        table, size, count = struct.unpack_from(order + "I", head, 28)[0], *_sizes(head, order, 42)
        form, pick = order + "IIIIIIII", (0, 1, 2, 4)
    if size < struct.calcsize(form) or count > 4096:
        return []
    data = os.pread(fd, size * count, table)
    rows = (struct.unpack_from(form, data, size * n) for n in range(count))
    return [tuple(row[n] for n in pick) for row in rows]


def _sizes(head, order, at):
    return struct.unpack_from(order + "HH", head, at)


def _tags(data, wide, order):
    form = order + ("QQ" if wide else "II")
    whole = len(data) - len(data) % struct.calcsize(form)
    found = []
    for tag, value in struct.iter_unpack(form, data[:whole]):
        if tag == DT_NULL:
            break
        found.append((tag, value))
    return found


def _offset(address, segments):
    for kind, offset, start, size in segments:
        if kind == PT_LOAD and start <= address < start + size:
            return address - start + offset
    return None


def _text(strings, at):
    return strings[at : strings.index(b"\0", at)].decode("utf-8", "backslashreplace")
