"""torch.backends.cudnn: asks the library that is really mapped."""

import ctypes


def version():
    """The version of the mapped cuDNN, such as 91002."""
    return ctypes.CDLL("libcudnn.so.9").cudnnGetVersion()


def is_available():
    return True
