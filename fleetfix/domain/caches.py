"""Which compile caches exist, when one is stale, and when it may be moved out of the way.

A compile cache holds code that was built on this host against the libraries that were there then.
What each cache puts into its own key decides how it goes stale: TorchInductor keys by torch, its
sources and torch.version.cuda, but not by the nvidia wheels beside it; torch_extensions under
TORCH_EXTENSIONS_DIR, FlashInfer and tvm-ffi do not key by CUDA at all (flashinfer-ai/flashinfer#5145).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field

from fleetfix.commands import Folder, Value

Tool = Literal["compiler", "setuptools"]


class Cache(Value):
    """A kind of compile cache: where it is, and what it takes to fill it again.

    `moved_by` holds (variable, what is appended to its value), in the order the program looks.
    `default` speaks of {tmp} (as Python's tempfile finds it), {home}, {cache} (XDG_CACHE_HOME or
    ~/.cache), {user} (as getpass finds it) and {plain_user} (with `\\/:*?"<>|` made `_`).
    """

    name: str
    moved_by: tuple[tuple[str, str], ...]
    default: str
    known_as: tuple[str, ...]
    """What the end of its path may look like, as PurePath.match reads it; all else is refused."""
    needs: tuple[Tool, ...] = ("compiler",)
    self_keyed: bool = False
    """Its key holds all that it depends on: old entries are never used, so age alone says nothing."""
    apart: str = ""
    """A regex of folder names that keep the artefacts of one CUDA to themselves; its group is the major."""
    locks: bool = False
    """A `lock` file of a killed build makes every later start wait for ever (pytorch/pytorch#189245)."""


CACHES: tuple[Cache, ...] = (
    Cache(
        name="inductor",  # torch/_inductor/runtime/cache_dir_utils.py
        moved_by=(("TORCHINDUCTOR_CACHE_DIR", ""),),
        default="{tmp}/torchinductor_{plain_user}",
        known_as=("*inductor*",),
        needs=("compiler", "setuptools"),
    ),
    Cache(
        name="triton",  # triton/knobs.py; TRITON_CACHE_DIR wins over TRITON_HOME
        moved_by=(("TRITON_CACHE_DIR", ""), ("TRITON_HOME", "/.triton/cache")),
        default="{home}/.triton/cache",
        known_as=(".triton/cache", "*triton*"),
        needs=("compiler", "setuptools"),
    ),
    Cache(
        name="torch_extensions",  # torch/utils/cpp_extension.py; under the variable no py311_cu128 folder
        moved_by=(("TORCH_EXTENSIONS_DIR", ""),),
        default="{cache}/torch_extensions",
        known_as=("*torch_ext*", "*torch-ext*", "*extensions*"),
        needs=("compiler", "setuptools"),
        apart=r"^py\d+_cu(\d+)\d$",
        locks=True,
    ),
    Cache(
        name="flashinfer",  # flashinfer/jit/env.py
        moved_by=(("FLASHINFER_WORKSPACE_BASE", "/.cache/flashinfer"),),
        default="{home}/.cache/flashinfer",
        known_as=("flashinfer",),
    ),
    Cache(
        name="vllm",
        moved_by=(
            ("VLLM_CACHE_ROOT", "/torch_compile_cache"),
            ("XDG_CACHE_HOME", "/vllm/torch_compile_cache"),
        ),
        default="{home}/.cache/vllm/torch_compile_cache",
        known_as=("torch_compile_cache",),
    ),
    Cache(
        name="sglang-inductor",
        moved_by=(("SGLANG_CACHE_DIR", "/inductor"),),
        default="{home}/.cache/sglang/inductor",
        known_as=("inductor",),
        needs=("compiler", "setuptools"),
    ),
    Cache(
        name="sglang-triton",
        moved_by=(("SGLANG_CACHE_DIR", "/triton"),),
        default="{home}/.cache/sglang/triton",
        known_as=("triton",),
        needs=("compiler", "setuptools"),
    ),
    Cache(
        name="sglang-jit",
        moved_by=(("SGLANG_JIT_CACHE_DIR", ""), ("SGLANG_CACHE_DIR", "/jit")),
        default="{home}/.cache/sglang/jit",
        known_as=("sglang/jit", "*sglang*"),
    ),
    Cache(
        name="deep_gemm",
        moved_by=(("DG_JIT_CACHE_DIR", ""),),
        default="{home}/.deep_gemm",
        known_as=("*deep_gemm*", "*deepgemm*"),
    ),
    Cache(
        name="tvm-ffi",
        moved_by=(("TVM_FFI_CACHE_DIR", ""),),
        default="{home}/.cache/tvm-ffi",
        known_as=("*tvm-ffi*", "*tvm_ffi*"),
    ),
    Cache(
        name="tilelang",
        moved_by=(("TILELANG_CACHE_DIR", ""),),
        default="{home}/.tilelang/cache",
        known_as=(".tilelang/cache", "*tilelang*"),
    ),
    Cache(
        name="cute-dsl",  # its get_version() hashes nothing
        moved_by=(("CUTE_DSL_CACHE_DIR", ""),),
        default="{tmp}/{user}/cutlass_python_cache",
        known_as=("cutlass_python_cache", "*cute_dsl*"),
        needs=(),
    ),
    Cache(
        name="quack",
        moved_by=(("QUACK_CACHE_DIR", ""),),
        default="{tmp}/{user}/quack_cache",
        known_as=("*quack*",),
        needs=(),
    ),
    Cache(
        name="cupy",  # the NVRTC version is in the key
        moved_by=(("CUPY_CACHE_DIR", ""),),
        default="{home}/.cupy/kernel_cache",
        known_as=("kernel_cache", "*cupy*"),
        needs=(),
        self_keyed=True,
    ),
    Cache(
        name="cuda-driver",  # the driver's version is in the key
        moved_by=(("CUDA_CACHE_PATH", ""),),
        default="{home}/.nv/ComputeCache",
        known_as=("ComputeCache",),
        needs=(),
        self_keyed=True,
    ),
)

BY_NAME = {cache.name: cache for cache in CACHES}

ALSO = "also"
"""The name under which a path that the playbook gives itself is looked at."""

STANDS_ON: tuple[str, ...] = (
    "nvidia-*",
    "cuda-*",
    "torch",
    "triton",
    "pytorch-triton*",
    "flashinfer-*",
    "vllm",
    "sglang*",
    "sgl-*",
    "deep-gemm*",
    "apache-tvm-ffi*",
    "tilelang*",
    "*-cu1[0-9]*",
    "*-cuda1[0-9]*",
    "transformer-engine*",
    "cupy-*",
    "jax*",
)
"""Distributions that compiled code stands on, by normalised name. Another package's installation says
nothing about a cache: a healthy job is not stopped because somebody installed a progress bar."""

STANDS_NOT_ON: tuple[str, ...] = ("nvidia-ml-py", "nvidia-cudnn-frontend", "cuda-pathfinder")
"""Pure Python whose name looks like the others."""


class User(Value):
    """A process that has something of a cache open, mapped, or as its working folder."""

    pid: int
    name: str
    user: str
    of_job: bool = False


class Found(Value):
    """A cache that is on the host, measured. Times are seconds of the host's clock."""

    name: str
    path: str
    """As the variable or the default says."""
    real: str
    """With every link on the way resolved."""
    by: str
    """What says where it is: a variable, `default`, or `also`."""
    kind: Literal["folder", "link", "other"] = "folder"
    owner: int = 0
    owner_name: str = ""
    mount: str | None = None
    """A mount point at the path or below it."""
    folder: Folder | None = None
    """Where it lies."""
    movable: bool = True
    """Whether the job's user may rename it where it is."""
    files: int = 0
    bytes: int = 0
    newest: float | None = None
    oldest: float | None = None
    complete: bool = True
    """False where the walk ended at its limit."""
    objects: int = 0
    """Shared objects and object files: something was compiled here."""
    cuda: dict[str, int] = Field(default_factory=dict)
    """CUDA major -> how many shared objects looked at need libraries of it."""
    locks: tuple[str, ...] = ()
    """`lock` files of builds that nobody runs any more."""
    users: tuple[User, ...] = ()


class Toolchain(Value):
    """What a cold compile would find: the compiler's path, and setuptools in the environment."""

    compiler: str | None
    setuptools: bool
    """True also where nothing in the environment asks for it."""


class Whose(Value):
    """The user whose caches these are, and what must never be inside a cache."""

    uid: int
    name: str
    home: str
    environment: str | None = None


def staleness(
    found: Found, changed: float | None, cuda: str | None, *, foreseen: bool = False
) -> str | None:
    """Why a cache must not be used again, or None.

    `changed` is when the environment last changed (host time), `cuda` the major that stays.
    `foreseen` says that an earlier step of this run is about to change the environment.
    """
    if not found.files:
        return None
    other = {major: count for major, count in found.cuda.items() if cuda is not None and major != cuda}
    if other:
        major, count = max(other.items(), key=lambda item: item[1])
        return f"holds {count} shared object{'s' if count > 1 else ''} built for CUDA {major}"
    if found.name in BY_NAME and BY_NAME[found.name].self_keyed:
        return None
    if foreseen:
        return "built before the environment is repaired"
    if changed is not None and found.newest is not None and found.newest < changed:
        return "older than the environment's last change"
    return None


def refusal(found: Found, whose: Whose) -> str | None:
    """Why this cache may not be moved out of the way, in an operator's words, or None."""
    return _refused_by_path(found, whose) or _refused_by_nature(found, whose)


def _refused_by_path(found: Found, whose: Whose) -> str | None:
    path = PurePosixPath(found.real)
    where = f"{found.name} cache {found.path} (from {found.by})"
    if not path.is_absolute() or ".." in path.parts:
        return f"{where}: not an absolute path"
    if len(path.parts) < 3:
        return f"{where}: too near the root of the file system to be a cache"
    if within(whose.home, found.real):
        return f"{where}: this is, or holds, the home folder of {whose.name}"
    if whose.environment and within(whose.environment, found.real):
        return f"{where}: this is, or holds, the environment {whose.environment}"
    if found.name in BY_NAME and not any(path.match(pattern) for pattern in BY_NAME[found.name].known_as):
        return f"{where}: not a name that such a cache has; list it under `also` if it really is one"
    return None


def _refused_by_nature(found: Found, whose: Whose) -> str | None:
    where = f"{found.name} cache {found.real}"
    if found.kind == "link":
        return f"{where} is a symbolic link; list what it points to under `also`"
    if found.kind == "other":
        return f"{where} is not a folder"
    if found.mount is not None:
        return f"{where}: {found.mount} is a mount point"
    if found.owner != whose.uid:
        return f"{where} belongs to {found.owner_name}, not to {whose.name}"
    if not found.movable:
        return f"{where}: {whose.name} may not rename it there"
    return None


def in_use(found: Found, *, job_will_stop: bool) -> str | None:
    """Who uses the cache now and will go on doing so, or None."""
    users = [user for user in found.users if not (user.of_job and job_will_stop)]
    if not users:
        return None
    first = users[0]
    more = f" and {len(users) - 1} more" if len(users) > 1 else ""
    whose = "the job's" if first.of_job else f"{first.user}'s"
    return f"{found.name} cache {found.real} is in use by {whose} {first.name} (pid {first.pid}){more}"


def lacking(found: Found, toolchain: Toolchain) -> str | None:
    """What a cold compile would miss, where this cache shows that something was compiled, or None.

    Clearing a cache that cannot be filled again stops the training it was meant to heal: a cold
    Inductor in a bare environment dies with `No module named 'setuptools'`.
    """
    needs = BY_NAME[found.name].needs if found.name in BY_NAME else ("compiler",)
    if not found.objects:
        return None
    if "compiler" in needs and toolchain.compiler is None:
        return f"{found.name} cache {found.real} could not be filled again: no C++ compiler here"
    if "setuptools" in needs and not toolchain.setuptools:
        return (
            f"{found.name} cache {found.real} could not be filled again: no setuptools in the environment"
        )
    return None


def outermost(founds: Iterable[Found]) -> tuple[Found, ...]:
    """Those that are not inside another one, each path once: moving the outer moves the inner."""
    kept: list[Found] = []
    for found in sorted(founds, key=lambda one: (len(PurePosixPath(one.real).parts), one.real)):
        if not any(within(found.real, other.real) for other in kept):
            kept.append(found)
    return tuple(sorted(kept, key=lambda one: one.real))


def within(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or something below it, by their names."""
    return PurePosixPath(path).is_relative_to(PurePosixPath(folder))


def questions(names: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """The table as the host needs it, to resolve and measure; it decides nothing from it."""
    chosen = CACHES if names is None else [BY_NAME[name] for name in names]
    return [
        {
            "name": cache.name,
            "moved_by": [list(move) for move in cache.moved_by],
            "default": cache.default,
            "apart": cache.apart,
            "locks": cache.locks,
        }
        for cache in chosen
    ]


def spelled_size(count: int) -> str:
    """A number of bytes as people say it: `1.2 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
