"""Say which CUDA an installed package is made for, from what a host tells of it.

A list of names is not enough: thirteen of seventeen CUDA-13 packages have no "cu13" in their name, and
some that have a 13 in sight belong to neither. Evidence is weighed in a fixed order.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from fleetfix.commands import Folder, Json, Value
from fleetfix.domain.requirements import Requirement, normal, requirement

Cuda = Literal["12", "13"]
CUDAS: tuple[Cuda, ...] = ("12", "13")

Proof = Literal["paths", "name", "version", "unsuffixed name", "requirements", "libraries"]
BY_NAME: frozenset[Proof] = frozenset({"paths", "name", "version", "unsuffixed name"})
"""Evidence that a list of names shows too. What only requirements or linked libraries show goes only
if the operator lists it: a kernel package may be somebody's own build."""

_UNSUFFIXED = """
cublas cuda-runtime cuda-nvrtc cuda-cupti cuda-nvcc cuda-cccl cuda-crt cuda-culibos cuda-nvdisasm
cuda-cuobjdump cuda-cuxxfilt cuda-opencl cuda-profiler-api cuda-sanitizer-api cuda-tileiras cudla cufft
cufile curand cusolver cusparse npp nvfatbin nvjitlink nvjpeg nvml-dev nvptxcompiler nvtx nvvm
"""
UNSUFFIXED_13 = frozenset(f"nvidia-{name}" for name in _UNSUFFIXED.split())
"""Since CUDA 13 these wheels have no suffix; their versions are not CUDA's (nvidia-cufft 12.0.0.61 is
CUDA 13)."""

VERSION_IS_CUDA = frozenset({"cuda-toolkit", "cuda-bindings", "cuda-python", "cuda-core-bindings"})
"""Packages whose major version is the CUDA major."""

NEUTRAL = frozenset(
    {
        "nvidia-ml-py",
        "nvidia-cudnn-frontend",
        "cuda-pathfinder",
        "cuda-core",
        "nixl",
        "flashinfer-python",
        "flashinfer-jit-cache",
        "bitsandbytes",
        "nvidia-cutlass-dsl",
        "nvidia-cutlass-dsl-libs-base",
    }
)
"""No contamination although a 12 or 13 is in sight: versions of their own, or made for both."""

SPLIT = re.compile(r"^nvidia-cutlass-dsl-libs-cu1[23]$")
"""Made for both since the layout was split; before, its files were those of -libs-base
(NVIDIA/cutlass#3170)."""

SUFFIX = re.compile(r"-cu(?:da)?(1[23])[0-9x]?(?:-|$)")
LOCAL = re.compile(r"\+(?:(?:.*[._-])?cu(?:da)?(1[23])(?:[0-9](?![0-9])|(?![0-9]))|(1[23])\.[0-9]+$)")


class Overwritten(Value):
    """Files of a package that hold other bytes, and who else claims them."""

    by: tuple[str, ...]
    files: int


class Dist(Value):
    """What is known of one installed package; paths are those of its dist-info folder."""

    info: str
    name: str
    version: str
    record: str | None = "?"
    """A digest of its RECORD; None where there is none."""
    paths: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    shares: dict[str, int] = Field(default_factory=dict)
    """Files that another package (by dist-info) claims too, with other bytes."""
    missing: int = 0
    missing_libraries: int = 0
    overwritten: tuple[Overwritten, ...] = ()
    altered: int = 0
    """Files changed since installation that no other package claims."""
    samples: tuple[str, ...] = ()
    requested: bool = False
    direct: bool = False
    installer: str = ""
    files: int = 0
    bytes: int = 0
    outside: int = 0
    borrowed: bool = False
    """Its RECORD was lost in an interrupted removal, and is taken from a cache."""

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def pin(self) -> str:
        return f"{normal(self.name)}=={self.version}"

    @property
    def needed_by_itself(self) -> tuple[Requirement, ...]:
        return tuple(found for found in map(requirement, self.requires) if found is not None)


class Torch(Value):
    """The torch of an environment; `cuda` is None for a build without, or where nothing says."""

    version: str
    cuda: str | None = None
    said: bool = True


class Place(Value):
    """The environment itself."""

    path: str
    python: str
    site: tuple[str, ...]
    uid: int
    user: str | None = None
    kind: str
    by: str | None = None
    beside: str | None = None
    """What jobs use instead of it, where it was given and none uses it: `job 4211 of alice uses /opt/a`."""
    used_by: tuple[str, ...] = ()
    """The live jobs that map it, e.g. `job 4211 of alice`."""
    others: tuple[str, ...] = ()
    """Processes that use it and are no part of a GPU job, e.g. `alice's python (pid 12)`."""
    folders: tuple[Folder, ...] = ()
    """Where it lies: its own folder, and what is mounted below it."""


class Audit(Value):
    """The facts that `wheels.audit` brings: the packages that matter, and the rest by number."""

    env: Place | None = None
    none: str | None = None
    hint: str = ""
    torch: Torch | None = None
    count: int = 0
    dists: tuple[Dist, ...] = ()
    leftovers: tuple[str, ...] = ()
    eggs: tuple[str, ...] = ()
    gathered: int = 0
    """How many packages are told as one, for the answer would have been too large."""
    rights: bool = True
    """Whether we may change what belongs to the environment's owner."""
    machine: str = "x86_64"
    python: str = "3.11"

    @classmethod
    def read(cls, value: Json) -> Audit:
        """Take the reply of `wheels.audit`."""
        return cls.model_validate(value)


class Evidence(Value):
    """Which CUDA a package is made for, and what shows it."""

    cuda: Cuda
    proof: Proof


# -- classifying ------------------------------------------------------------------------------------


def classify(dist: Dist) -> Evidence | None:
    """Say which CUDA a package is made for, by the strongest evidence there is; None for neither."""
    name = normal(dist.name)
    if name in NEUTRAL or (SPLIT.match(name) and not dist.shares):
        return None
    for proof, found in (
        ("paths", dist.paths),
        ("name", SUFFIX.findall(name)),
        ("version", _local(dist.version)),
        ("unsuffixed name", _unsuffixed(name, dist.version)),
        ("requirements", _required(dist)),
        ("libraries", dist.needs),
    ):
        cudas = [one for one in CUDAS if one in found]
        if len(cudas) == 1:
            return Evidence(cuda=cudas[0], proof=proof)
    return None


def _local(version: str) -> tuple[str, ...]:
    match = LOCAL.search(version)
    return (match[1] or match[2],) if match else ()


def _unsuffixed(name: str, version: str) -> tuple[str, ...]:
    if name in UNSUFFIXED_13:
        return ("13",)
    return (version.partition(".")[0],) if name in VERSION_IS_CUDA else ()


def _required(dist: Dist) -> frozenset[str]:
    """The CUDAs of what it requires without condition; an extra says what it could be, not is."""
    plain = (one for one in dist.needed_by_itself if "extra" not in one.marker)
    return frozenset(found for one in plain for found in SUFFIX.findall(one.name))
