"""The stand-in wheels of the lab: names, versions and paths as the real ones have them.

Names, versions and shared paths are those of torch 2.9.1 from PyPI (CUDA 12.8) and of what torch
2.11.0 (CUDA 13.0) leaves behind when `uv pip install torch==2.9.1` goes back.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources

from fleetfix.lab.elf import Answers, Function, Library, Stores, build, this_machine
from fleetfix.lab.wheel import Wheel

TORCH = "2.9.1"


@dataclass(frozen=True)
class _Cuda:
    """One NVIDIA wheel: `libs` (soname: functions) and `headers` below `nvidia/<folder>`."""

    name: str
    version: str
    folder: str
    libs: Mapping[str, Mapping[str, Function]] = field(default_factory=dict)
    headers: tuple[str, ...] = ()
    text: str = ""
    inits: bool = True
    """Whether it owns `nvidia/__init__.py` too, as eleven of the cu12 wheels do."""


def _plain(*sonames: str) -> dict[str, dict[str, Function]]:
    return {soname: {} for soname in sonames}


def _cudnn(version: int, cudart: int) -> dict[str, dict[str, Function]]:
    parts = ("adv", "cnn", "graph", "heuristic", "ops", "engines_precompiled", "engines_runtime_compiled")
    main: dict[str, Function] = {
        "cudnnGetVersion": Answers(version),
        "cudnnGetCudartVersion": Answers(cudart),
    }
    return {"libcudnn.so.9": main, **_plain(*(f"libcudnn_{part}.so.9" for part in parts))}


_CUDNN_HEADERS = ("cudnn.h", "cudnn_graph.h", "cudnn_ops.h", "cudnn_version.h")
_NVSHMEM_LIBS = ("nvshmem_bootstrap_uid.so.3", "nvshmem_transport_ibrc.so.3")

# The four that share every path with their CUDA-13 twin.
_SHARED_12 = (
    _Cuda("nvidia-cudnn-cu12", "9.10.2.21", "cudnn", _cudnn(91002, 12090), _CUDNN_HEADERS),
    _Cuda("nvidia-cusparselt-cu12", "0.7.1", "cusparselt",
          {"libcusparseLt.so.0": {"cusparseLtGetVersion": Stores((701,), first=1)}},
          ("cusparseLt.h",), inits=False),
    _Cuda("nvidia-nccl-cu12", "2.27.5", "nccl",
          {"libnccl.so.2": {"ncclGetVersion": Stores((22705,))}}, ("nccl.h",),
          "NCCL version 2.27.5+cuda12.9"),
    _Cuda("nvidia-nvshmem-cu12", "3.3.20", "nvshmem",
          {"libnvshmem_host.so.3": {"nvshmem_info_get_version": Stores((3, 3))}, **_plain(*_NVSHMEM_LIBS)},
          ("nvshmem.h", "nvshmemx.h"), inits=False),
)  # fmt: skip
_SHARED_13 = (
    _Cuda("nvidia-cudnn-cu13", "9.19.0.56", "cudnn", _cudnn(91900, 13010), _CUDNN_HEADERS),
    _Cuda("nvidia-cusparselt-cu13", "0.8.0", "cusparselt",
          {"libcusparseLt.so.0": {"cusparseLtGetVersion": Stores((800,), first=1)}},
          ("cusparseLt.h",), inits=False),
    _Cuda("nvidia-nccl-cu13", "2.28.9", "nccl",
          {"libnccl.so.2": {"ncclGetVersion": Stores((22809,))}}, ("nccl.h", "nccl_device.h"),
          "NCCL version 2.28.9+cuda13.0"),
    _Cuda("nvidia-nvshmem-cu13", "3.4.5", "nvshmem",
          {"libnvshmem_host.so.3": {"nvshmem_info_get_version": Stores((3, 4))}, **_plain(*_NVSHMEM_LIBS)},
          ("nvshmem.h", "nvshmemx.h"), inits=False),
)  # fmt: skip

# name without suffix: (cu12 version, CUDA-13 version, cu12 folder, sonames without their major)
_PLAIN = {
    "cublas": ("12.8.4.1", "13.1.0.3", "cublas", ("libcublas.so", "libcublasLt.so")),
    "cuda-cupti": ("12.8.90", "13.0.85", "cuda_cupti", ("libcupti.so",)),
    "cuda-nvrtc": ("12.8.93", "13.0.88", "cuda_nvrtc", ("libnvrtc.so",)),
    "cuda-runtime": ("12.8.90", "13.0.96", "cuda_runtime", ("libcudart.so",)),
    "cufft": ("11.3.3.83", "12.0.0.61", "cufft", ("libcufft.so",)),
    "cufile": ("1.13.1.3", "1.15.1.6", "cufile", ("libcufile.so",)),
    "curand": ("10.3.9.90", "10.4.0.35", "curand", ("libcurand.so",)),
    "cusolver": ("11.7.3.90", "12.0.4.66", "cusolver", ("libcusolver.so",)),
    "cusparse": ("12.5.8.93", "12.6.3.3", "cusparse", ("libcusparse.so",)),
    "nvjitlink": ("12.8.93", "13.0.88", "nvjitlink", ("libnvJitLink.so",)),
    "nvtx": ("12.8.90", "13.0.85", "nvtx", ("libnvtx3interop.so",)),
}
# Sonames whose number is not the CUDA major.
_MAJOR = {"libcufft.so": (11, 12), "libcufile.so": (0, 0), "libcurand.so": (10, 10),
          "libcusolver.so": (11, 12), "libnvtx3interop.so": (1, 1)}  # fmt: skip
_FUNCTIONS: dict[str, Function] = {
    "libcudart.so.12": Stores((12080,)),
    "libcudart.so.13": Stores((13000,)),
    "libnvrtc.so.12": Stores((12, 8)),
    "libnvrtc.so.13": Stores((13, 0)),
}
_FUNCTION_NAMES = {"libcudart.so": "cudaRuntimeGetVersion", "libnvrtc.so": "nvrtcVersion"}


def clean() -> tuple[Wheel, ...]:
    """What a sound cu128 environment holds, in order of installation."""
    return (*_general(), *_cu12(), _torch(), *_traps())


def foreign() -> tuple[Wheel, ...]:
    """What the way to CUDA 13 and back leaves behind: 18 distributions of CUDA 13."""
    return (*(_nvidia(one, 13) for one in (*_plain_13(), *_SHARED_13)), *_tools_13(), _sglang_kernel())


def shared_13() -> tuple[Wheel, ...]:
    """The four of them whose names say cu13, and whose files are those of their cu12 twins."""
    return tuple(_nvidia(one, 13) for one in _SHARED_13)


def extension(major: int) -> bytes:
    """A compiled torch extension, as the cache of torch_extensions holds it."""
    needed = (f"libcudart.so.{major}", "libc10.so", "libtorch_cuda.so")
    text = f"fused_adam, nvcc {major}"
    return build(Library("fused_adam.so", {"PyInit_fused_adam": Answers(0)}, needed, text=text, size=3000))


def driver(status: int) -> bytes:
    """A libcuda.so.1 whose cuInit returns `status`: 0, or 803 for a driver and library mismatch."""
    functions: dict[str, Function] = {
        "cuInit": Answers(status),
        "cuDriverGetVersion": Stores((13010,)),
        "cuDeviceGetCount": Stores((2,), status=status),
    }
    return build(Library("libcuda.so.1", functions, text="590.48.01", size=2500))


# -- wheels ------------------------------------------------------------------------------------------


def _platform() -> str:
    return f"manylinux_2_27_{this_machine()}"


def _cu12() -> Iterator[Wheel]:
    for name, (version, _, folder, sonames) in _PLAIN.items():
        libs = {soname: _functions(soname) for soname in _numbered(sonames, 0)}
        inits = name not in ("cufile",)
        yield _nvidia(
            _Cuda(f"nvidia-{name}-cu12", version, folder, libs, (f"{folder}.h",), inits=inits), 12
        )
    for one in _SHARED_12:
        yield _nvidia(one, 12)


def _plain_13() -> Iterator[_Cuda]:
    for name, (_, version, folder, sonames) in _PLAIN.items():
        libs = {soname: _functions(soname) for soname in _numbered(sonames, 1)}
        yield _Cuda(f"nvidia-{name}", version, "cu13", libs, (f"{folder}.h",), inits=False)


def _numbered(sonames: tuple[str, ...], generation: int) -> Iterator[str]:
    for soname in sonames:
        yield f"{soname}.{_MAJOR.get(soname, (12, 13))[generation]}"


def _functions(soname: str) -> dict[str, Function]:
    name = _FUNCTION_NAMES.get(soname.rpartition(".")[0])
    return {name: _FUNCTIONS[soname]} if name else {}


def _nvidia(one: _Cuda, major: int) -> Wheel:
    base = f"nvidia/{one.folder}"
    files: dict[str, bytes] = {"nvidia/__init__.py": b""} if one.inits else {}
    if one.folder != "cu13":
        files |= {f"{base}/__init__.py": b"", f"{base}/lib/__init__.py": b""}
    for header in one.headers:
        files[f"{base}/include/{header}"] = f"/* {one.name} {one.version} */\n".encode()
    for soname, functions in one.libs.items():
        files[f"{base}/lib/{soname}"] = _library(one, soname, functions, major)
    return Wheel(one.name, one.version, files, platform=_platform())


def _library(one: _Cuda, soname: str, functions: Mapping[str, Function], major: int) -> bytes:
    text = f"{one.text or one.name}\0{one.version} for CUDA {major}"
    size = 2048 + zlib.crc32(f"{one.name} {one.version} {soname}".encode()) % 4096
    every = {**functions, "lab_cuda_major": Answers(major)}
    return build(Library(soname, every, text=text, size=size))


def _tools_13() -> tuple[Wheel, ...]:
    members = " ".join(f"nvidia-{name}=={row[1]};" for name, row in _PLAIN.items())
    toolkit = tuple(
        f'nvidia-{name}=={row[1]} ; (platform_system == "Linux") and extra == "{row[2]}"'
        for name, row in _PLAIN.items()
    )
    bindings = {
        "cuda/bindings/__init__.py": f"# {members.count(';')} libraries\n".encode(),
        "cuda/bindings/driver.so": build(Library("driver.so", text="cuda-bindings 13.0.3", size=2200)),
    }
    return (
        Wheel("cuda-toolkit", "13.0.2", requires=toolkit),
        Wheel("cuda-bindings", "13.0.3", bindings, ("cuda-pathfinder~=1.1",), platform=_platform()),
    )


def _sglang_kernel() -> Wheel:
    """Built for CUDA 13, and only its ELF files say so."""
    needed = ("libcudart.so.13", "libnvrtc.so.13", "libcublasLt.so.13")
    files = {"sgl_kernel/__init__.py": b"from sgl_kernel import common_ops\n"}
    for name in ("common_ops", "flash_ops"):
        library = Library(f"{name}.abi3.so", {f"PyInit_{name}": Answers(0)}, needed, size=4000)
        files[f"sgl_kernel/{name}.abi3.so"] = build(library)
    return Wheel("sglang-kernel", "0.4.10", files, ("torch==2.14.1",), requested=True, platform=_platform())


def _traps() -> tuple[Wheel, ...]:
    """Sound, although 13 or cu13 is in sight: removing any of them would be a mistake."""
    bindings = {
        major: build(
            Library("_bindings.so", {"lab_cuda_major": Answers(major)}, (f"libcudart.so.{major}",))
        )
        for major in (12, 13)
    }
    nixl = tuple(
        Wheel(f"nixl-cu{major}", "0.9.0", {f"nixl_cu{major}/__init__.py": b"",
              f"nixl_cu{major}/_bindings.so": bindings[major]}, platform=_platform())
        for major in (12, 13)
    )  # fmt: skip
    return (
        Wheel("nvidia-ml-py", "13.580.65", {"pynvml.py": b'__version__ = "13.580.65"\n'}, requested=True),
        Wheel("nvidia-cudnn-frontend", "1.15.0", {"cudnn/__init__.py": b'__version__ = "1.15.0"\n'}),
        Wheel("cuda-pathfinder", "1.9.1", {"cuda/pathfinder/__init__.py": b'__version__ = "1.9.1"\n'}),
        *nixl,
        Wheel("nixl", "0.9.0", {"nixl/__init__.py": b""}, ("nixl-cu12", "nixl-cu13"), requested=True),
    )


def _general() -> Iterator[Wheel]:
    versions = {"filelock": "3.20.0", "fsspec": "2025.10.0", "networkx": "3.5", "numpy": "2.3.4",
                "setuptools": "80.9.0", "sympy": "1.14.0", "typing-extensions": "4.15.0"}  # fmt: skip
    for name, version in versions.items():
        module = name.replace("-", "_")
        path = f"{module}.py" if name == "typing-extensions" else f"{module}/__init__.py"
        files = {path: f'"""A stand-in of the fleetfix lab."""\n\n__version__ = "{version}"\n'.encode()}
        if name == "numpy":
            files["numpy/linalg.py"] = b"def norm(values):\n    return sum(v * v for v in values) ** 0.5\n"
        yield Wheel(name, version, files, requested=name == "numpy")
    libtriton = build(Library("libtriton.so", {"PyInit_libtriton": Answers(0)}, size=5000))
    triton = {"triton/__init__.py": b'__version__ = "3.5.1"\n', "triton/_C/libtriton.so": libtriton}
    yield Wheel("triton", "3.5.1", triton, platform=_platform())


def _torch() -> Wheel:
    files = {
        "torch/__init__.py": stand_in("torch_init.py"),
        "torch/version.py": _TORCH_VERSION,
        "torch/_C.py": stand_in("torch_c.py"),
        "torch/cuda/__init__.py": stand_in("torch_cuda.py"),
        "torch/backends/__init__.py": b"from torch.backends import cudnn as cudnn\n",
        "torch/backends/cudnn/__init__.py": stand_in("torch_cudnn.py"),
        "torch/distributed/__init__.py": b"",
        "torch/distributed/run.py": stand_in("torch_run.py"),
        **_torch_libraries(),
    }
    general = ("filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", "networkx>=2.5.1", "fsspec>=0.8.5")
    linux = 'platform_system == "Linux"'
    cuda = (*(f"nvidia-{name}-cu12=={row[0]}" for name, row in _PLAIN.items()),
            *(f"{one.name}=={one.version}" for one in _SHARED_12), "triton==3.5.1")  # fmt: skip
    requires = (*general, *(f"{one}; {linux}" for one in cuda))
    scripts = {"torchrun": "torch.distributed.run:main"}
    return Wheel("torch", TORCH, files, requires, scripts, requested=True, platform=_platform())


_TORCH_VERSION = b"""from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '2.9.1+cu128'
debug = False
cuda: Optional[str] = '12.8'
git_version = '0000000000000000000000000000000000000000'
hip: Optional[str] = None
rocm: Optional[str] = None
xpu: Optional[str] = None
"""


def _torch_libraries() -> dict[str, bytes]:
    folders = sorted({row[2] for row in _PLAIN.values()} | {one.folder for one in _SHARED_12})
    rpath = ":".join(["$ORIGIN", *(f"$ORIGIN/../../nvidia/{folder}/lib" for folder in folders)])
    shared = ("libcudnn.so.9", "libnccl.so.2", "libcusparseLt.so.0", "libnvshmem_host.so.3")
    needed = ("libc10.so", *shared, "libcublas.so.12", "libcudart.so.12", "libnvrtc.so.12")
    cuda = Library("libtorch_cuda.so", {"lab_cuda_major": Answers(12)}, needed, rpath, "torch 2.9.1", 9000)
    return {
        "torch/lib/libc10.so": build(Library("libc10.so", size=3000)),
        "torch/lib/libtorch_cuda.so": build(cuda),
    }


def stand_in(name: str) -> bytes:
    """The text of a file that is copied into hosts."""
    return resources.files("fleetfix.lab").joinpath("stand_ins", name).read_bytes()
