"""Which CUDA libraries the running job has mapped, and whether they are the files that are there now."""

import os
import re

from fleetfix.remote import ending, jobs, plain, procs
from fleetfix.remote.api import read

CUDA_LIBRARY = re.compile(
    r"/lib(cudart|cublas|cublasLt|nvrtc|nvrtc-builtins|nvJitLink|nvfatbin|cufft|cufftw|curand|cusolver|cusolverMg"
    r"|cusparse|cusparseLt|cudnn[A-Za-z_]*|nccl|nvshmem[A-Za-z_]*|cupti|nvjpeg|npp[a-z]+)\.so[0-9.]*$"
)
VERSION = re.compile(rb"NCCL version [0-9.]+\+cuda([0-9]+\.[0-9]+)")
CHUNK, OVERLAP = 8 << 20, 256
MOST = 40  # paths in a reply


@read
def libraries(ctx):
    """{"job": {pid, argv} | None, "complete", "loaded", "deleted", "replaced", "cuda"} of the live job.

    `deleted` and `replaced` are libraries whose file was removed or exchanged while the job has them.
    Of `cuda`: {path, built: the CUDA version that the file itself names, or None}. Nothing is run.
    """
    job = jobs.live_job(ctx)
    if job is None:
        return {"job": None}
    complete, paths = True, {}
    for pid, _ in ending.tree_of(job):
        try:
            paths.update(procs.mapped(pid))
        except PermissionError:
            complete = False
        except OSError:
            continue
    libraries = {path: where for path, where in paths.items() if ".so" in os.path.basename(path)}
    inside = [path for path in libraries if procs.ENVIRONMENT.match(procs.undeleted(path))]
    cuda = sorted(path for path in libraries if CUDA_LIBRARY.search(path))
    return {
        "job": {"pid": job["pid"], "argv": procs.shown_of(job["pid"])[:6]},
        "complete": complete,
        "loaded": len(inside),
        "deleted": sorted(path for path in inside if path.endswith(" (deleted)"))[:MOST],
        "replaced": sorted(path for path in inside if _replaced(path, *libraries[path]))[:MOST],
        "cuda": [{"path": path, "built": built(path)} for path in cuda[: 2 * MOST]],
    }


def _replaced(path, device, inode):
    """Whether another file has this path now: seen on network file systems, which mark nothing."""
    try:
        now = os.stat(path)
    except OSError:
        return False
    # Some file systems (btrfs, overlay) give another device here than in the maps: no evidence then.
    same_device = "%02x:%02x" % (os.major(now.st_dev), os.minor(now.st_dev)) == device
    return same_device and now.st_ino != inode


def built(path):
    """The CUDA version that a library names in its text, as `13.0`, or None.

    For libnccl neither its soname nor what it needs tells: the CUDA runtime is linked in.
    """
    if not os.path.basename(path).startswith("libnccl.so"):
        return None
    try:
        file = plain.file(path, follow=False)
    except OSError:
        return None
    with file:
        kept = b""
        while True:
            data = file.read(CHUNK)
            match = VERSION.search(kept + data)
            if match or not data:
                return match.group(1).decode() if match else None
            kept = data[-OVERLAP:]
