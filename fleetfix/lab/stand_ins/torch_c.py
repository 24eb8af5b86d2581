"""What torch._C does here: the real loader resolves libtorch_cuda's libraries, or says what lacks."""

import ctypes
import os

_here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")

# Left by `fleetfix lab break --fault load_fails`: the libraries this torch was built for refuse it.
_REFUSED = "/run/lab/faults/load_fails"


def _load():
    try:
        library = ctypes.CDLL(os.path.join(_here, "libtorch_cuda.so"), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ImportError(str(error)) from None
    if os.path.exists(_REFUSED) and cudart_major() == 12:
        raise ImportError(
            "%s/libtorch_cuda.so: undefined symbol: cudnnBackendPopulateCudaGraph, version libcudnn.so.9"
            % _here
        )
    return library


def cudart_major():
    """The CUDA major that the mapped cuDNN was built for; the library itself says it."""
    return ctypes.CDLL("libcudnn.so.9").cudnnGetCudartVersion() // 1000


_library = _load()
_cuda_compiled = 12080
