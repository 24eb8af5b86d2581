"""Audit every RECORD of an environment with the standard library alone: `audit_independent.py VENV`.

It shares no code with fleetfix, so that a mistake there is not made twice. Prints one line per file that
is not as its package says; exit 1 where there is one. A path that several packages claim must be right
for all of them.
"""

import base64
import csv
import hashlib
import os
import sys


def wrong(venv):
    """Yield (dist-info, path, what is wrong)."""
    for folder, names, _ in os.walk(os.path.join(venv, "lib")):
        for name in names:
            if name.endswith(".dist-info"):
                yield from wrong_in(folder, name)


def wrong_in(site, info):
    """Yield what is wrong with the files of one package."""
    record = os.path.join(site, info, "RECORD")
    if not os.path.exists(record):
        yield info, "RECORD", "missing"
        return
    with open(record, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    for path, digest, size in rows:
        if not digest:
            continue
        full = os.path.join(site, path)
        if not os.path.isfile(full):
            yield info, path, "missing"
        elif size and os.path.getsize(full) != int(size):
            yield info, path, "size"
        elif hashed(full) != digest:
            yield info, path, "hash"


def hashed(path):
    """The digest of a file as RECORD writes it."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            found.update(block)
    return "sha256=" + base64.urlsafe_b64encode(found.digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    complaints = list(wrong(sys.argv[1]))
    for complaint in complaints:
        print(*complaint)
    sys.exit(1 if complaints else 0)
