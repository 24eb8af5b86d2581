"""A stand-in for torch in the fleetfix lab: it loads the CUDA libraries as torch does, no more."""

from torch import version
from torch._C import *  # noqa: F403

from torch import backends, cuda  # isort: skip

__version__ = "2.9.1+cu128"
__all__ = ["__version__", "backends", "cuda", "version"]
