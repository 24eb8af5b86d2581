"""Writes small real ELF64 shared objects: a soname, what it needs, functions that answer a number.

The stand-in CUDA libraries of the lab are made here, so that `dlopen`, `/proc/PID/maps`, `readelf`
and the loader's own error messages are the real thing. x86_64 and aarch64. No linker is needed.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Machine = Literal["x86_64", "aarch64"]

MACHINES: dict[str, tuple[Machine, int]] = {
    "x86_64": ("x86_64", 62),
    "amd64": ("x86_64", 62),
    "aarch64": ("aarch64", 183),
    "arm64": ("aarch64", 183),
}

# The largest page size of the two machines: a segment aligned to it loads under every kernel.
ALIGN = 0x10000
HEADER, PROGRAM_HEADER, SECTION_HEADER, SYMBOL = 64, 56, 64, 24

PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551
DT_NULL, DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB = 0, 1, 4, 5, 6
DT_STRSZ, DT_SYMENT, DT_SONAME, DT_RPATH = 10, 11, 14, 15


@dataclass(frozen=True)
class Answers:
    """A function `long name(...)` that returns a number."""

    value: int


@dataclass(frozen=True)
class Stores:
    """A function `int name(int *first, ...)` that stores numbers through its arguments, and returns
    `status`. `first` is the position of the first pointer, from 0."""

    values: tuple[int, ...]
    first: int = 0
    status: int = 0


Function = Answers | Stores


@dataclass(frozen=True)
class Library:
    """What a shared object is made of. `size` pads the file to at least that many bytes."""

    soname: str
    functions: Mapping[str, Function] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    rpath: str = ""
    text: str = ""
    size: int = 0


def this_machine() -> Machine:
    """The machine that this process runs on; a KeyError where no code is known for it."""
    return MACHINES[platform.machine().lower()][0]


def build(library: Library, machine: Machine | None = None) -> bytes:
    """Write the shared object. Equal arguments give equal bytes."""
    return _Image(library, machine or this_machine()).whole()


class _Strings:
    """A string table: each text once, found by its offset."""

    def __init__(self) -> None:
        self.data = bytearray(b"\0")
        self._at: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        if text not in self._at:
            self._at[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self._at[text]


class _Image:
    """Lays one library out: a read-execute segment with all tables and code, then `.dynamic`."""

    def __init__(self, library: Library, machine: Machine) -> None:
        self.library = library
        self.machine = machine
        self.strings = _Strings()
        self.names = list(library.functions)
        self.code = [_code(library.functions[name], machine) for name in self.names]

    def whole(self) -> bytes:
        dynamic = self._dynamic_entries({})
        tables = self._lay_out(len(dynamic))
        body = bytearray(self.end)
        for name, data in tables.items():
            body[self.at[name] : self.at[name] + len(data)] = data
        dynamic_at = self.at[".dynamic"]
        entries = self._dynamic_entries(self.at)
        body[dynamic_at : dynamic_at + len(entries)] = entries
        body[0:HEADER] = self._header()
        programs = self._program_headers(len(entries))
        body[HEADER : HEADER + len(programs)] = programs
        return bytes(body)

    def _lay_out(self, dynamic_size: int) -> dict[str, bytes]:
        names = _Strings()
        tables = {
            ".hash": self._hash(),
            ".dynsym": bytes(SYMBOL * (1 + len(self.names))),
            ".dynstr": bytes(self.strings.data),
            ".rodata": self._rodata(),
            ".text": b"".join(self.code),
        }
        self.at: dict[str, int] = {}
        self.length = {name: len(data) for name, data in tables.items()}
        offset = HEADER + 4 * PROGRAM_HEADER
        for name, data in tables.items():
            offset = _up(offset, 16)
            self.at[name] = offset
            offset += len(data)
        self.text_end = offset
        self.at[".dynamic"] = offset = _up(offset, 16)
        self.length[".dynamic"] = dynamic_size
        offset += dynamic_size
        tables[".dynsym"] = self._symbols()
        sections = [".hash", ".dynsym", ".dynstr", ".rodata", ".text", ".dynamic"]
        for name in (*sections, ".shstrtab"):
            names.add(name)
        self.at[".shstrtab"] = offset = _up(offset, 16)
        self.length[".shstrtab"] = len(names.data)
        tables[".shstrtab"] = bytes(names.data)
        self.at["sections"] = offset = _up(offset + len(names.data), 16)
        tables["sections"] = self._section_headers(sections, names)
        offset += len(tables["sections"])
        self.end = max(offset, self.library.size)
        return tables

    # -- tables -------------------------------------------------------------------------------------

    def _rodata(self) -> bytes:
        return self.library.text.encode() + b"\0"

    def _dynamic_entries(self, at: Mapping[str, int]) -> bytes:
        library, strings = self.library, self.strings
        entries = [(DT_NEEDED, strings.add(name)) for name in library.needed]
        entries.append((DT_SONAME, strings.add(library.soname)))
        if library.rpath:
            # RPATH and not RUNPATH, as torch has it: it wins over LD_LIBRARY_PATH.
            entries.append((DT_RPATH, strings.add(library.rpath)))
        for name in self.names:
            strings.add(name)
        entries += [
            (DT_HASH, at.get(".hash", 0)),
            (DT_STRTAB, at.get(".dynstr", 0)),
            (DT_SYMTAB, at.get(".dynsym", 0)),
            (DT_STRSZ, len(strings.data)),
            (DT_SYMENT, SYMBOL),
            (DT_NULL, 0),
        ]
        return b"".join(struct.pack("<qQ", tag, value) for tag, value in entries)

    def _hash(self) -> bytes:
        """One bucket: a chain through every symbol. The loader of every libc reads this form."""
        count = 1 + len(self.names)
        chain = [0, *(index + 1 if index + 1 < count else 0 for index in range(1, count))]
        first = 1 if self.names else 0
        return struct.pack(f"<{3 + count}I", 1, count, first, *chain)

    def _symbols(self) -> bytes:
        table = bytearray(SYMBOL)
        offset = self.at[".text"]
        for name, code in zip(self.names, self.code, strict=True):
            # Global function; the section index only has to be other than undefined.
            table += struct.pack("<IBBHQQ", self.strings.add(name), 0x12, 0, 5, offset, len(code))
            offset += len(code)
        return bytes(table)

    # -- headers ------------------------------------------------------------------------------------

    def _header(self) -> bytes:
        number = MACHINES[self.machine][1]
        ident = b"\x7fELF" + bytes([2, 1, 1, 0]) + bytes(8)
        return ident + struct.pack(
            "<HHIQQQIHHHHHH",
            3,  # a shared object
            number,
            1,
            0,
            HEADER,
            self.at["sections"],
            0,
            HEADER,
            PROGRAM_HEADER,
            4,
            SECTION_HEADER,
            8,
            7,
        )

    def _program_headers(self, dynamic_size: int) -> bytes:
        dynamic = self.at[".dynamic"]
        rows = (
            (PT_LOAD, 5, 0, 0, self.text_end, ALIGN),
            (PT_LOAD, 6, dynamic, ALIGN + dynamic, dynamic_size, ALIGN),
            (PT_DYNAMIC, 6, dynamic, ALIGN + dynamic, dynamic_size, 8),
            (PT_GNU_STACK, 6, 0, 0, 0, 16),
        )
        return b"".join(
            struct.pack("<IIQQQQQQ", kind, flags, offset, address, address, size, size, align)
            for kind, flags, offset, address, size, align in rows
        )

    def _section_headers(self, sections: list[str], names: _Strings) -> bytes:
        # name: (type, flags, link, info, entry size)
        kinds = {
            ".hash": (5, 2, 2, 0, 4),
            ".dynsym": (11, 2, 3, 1, SYMBOL),
            ".dynstr": (3, 2, 0, 0, 0),
            ".rodata": (1, 2, 0, 0, 0),
            ".text": (1, 6, 0, 0, 0),
            ".dynamic": (6, 3, 3, 0, 16),
            ".shstrtab": (3, 0, 0, 0, 0),
        }
        table = bytearray(SECTION_HEADER)
        for name in (*sections, ".shstrtab"):
            kind, flags, link, info, entry = kinds[name]
            address = self.at[name] + (ALIGN if name == ".dynamic" else 0)
            table += struct.pack(
                "<IIQQQQIIQQ",
                names.add(name),
                kind,
                flags,
                0 if name == ".shstrtab" else address,
                self.at[name],
                self.length[name],
                link,
                info,
                8 if name == ".dynamic" else 1,
                entry,
            )
        return bytes(table)


def _up(value: int, align: int) -> int:
    return (value + align - 1) // align * align


def _code(function: Function, machine: Machine) -> bytes:
    code = _CODE[machine](function)
    return code + bytes(_up(len(code), 16) - len(code))


def _x86_64(function: Function) -> bytes:
    if isinstance(function, Answers):
        return b"\xb8" + struct.pack("<I", function.value) + b"\xc3"
    # mov dword [rdi|rsi|rdx], value; mov eax, status; ret
    pointers = (0x07, 0x06, 0x02)
    stores = b"".join(
        bytes([0xC7, pointers[function.first + index]]) + struct.pack("<I", value)
        for index, value in enumerate(function.values)
    )
    return stores + b"\xb8" + struct.pack("<I", function.status) + b"\xc3"


def _aarch64(function: Function) -> bytes:
    if isinstance(function, Answers):
        return _load(0, function.value) + struct.pack("<I", 0xD65F03C0)
    words = b""
    for index, value in enumerate(function.values):
        pointer = function.first + index
        words += _load(9, value) + struct.pack("<I", 0xB9000000 | pointer << 5 | 9)  # str w9, [xN]
    return words + _load(0, function.status) + struct.pack("<I", 0xD65F03C0)


def _load(register: int, value: int) -> bytes:
    """movz wN, low; movk wN, high, lsl 16."""
    low, high = value & 0xFFFF, value >> 16 & 0xFFFF
    return struct.pack("<II", 0x52800000 | low << 5 | register, 0x72A00000 | high << 5 | register)


_CODE = {"x86_64": _x86_64, "aarch64": _aarch64}
