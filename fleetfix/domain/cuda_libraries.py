"""Tell for which CUDA a mapped library was built, by its path, its soname, or what it says itself."""

from __future__ import annotations

import re
from os.path import basename

# Libraries whose soname number is the CUDA major.
_NUMBERED = re.compile(
    r"^lib(?:cudart|cublas|cublasLt|nvrtc|nvrtc-builtins|nvJitLink|nvfatbin|cupti|nvjpeg|npp[a-z]+)\.so\.(\d+)"
)
# Libraries that count for themselves: (name, soname number) -> CUDA major. cuSPARSE (.so.12) and cuRAND
# (.so.10) have the same number in both; cuDNN, NCCL, cuSPARSELt and NVSHMEM say nothing by it at all.
_OWN_NUMBERS = {
    ("cufft", 11): 12,
    ("cufft", 12): 13,
    ("cufftw", 11): 12,
    ("cufftw", 12): 13,
    ("cusolver", 11): 12,
    ("cusolver", 12): 13,
    ("cusolverMg", 11): 12,
    ("cusolverMg", 12): 13,
}


def cuda_major(path: str, built: str | None = None) -> int | None:
    """The CUDA major that a library belongs to, or None where nothing tells.

    `built` is a version that the file names itself. The unsuffixed CUDA 13 wheels install below
    `nvidia/cu13/lib`.
    """
    path = path.removesuffix(" (deleted)")
    folder = re.search(r"/nvidia/cu(\d+)/", path)
    if folder:
        return int(folder[1])
    if built is not None:
        return int(built.partition(".")[0])
    numbered = _NUMBERED.match(basename(path))
    if numbered:
        return int(numbered[1])
    own = re.match(r"^lib(\w+)\.so\.(\d+)", basename(path))
    return _OWN_NUMBERS.get((own[1], int(own[2]))) if own else None
