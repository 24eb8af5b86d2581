"""Ask the torch of an environment, as the environment's owner, what it really loads."""

import json

from fleetfix.remote import environments
from fleetfix.remote.api import read

ASK = r"""
import ctypes, json, re, sys
said = {"torch": None, "cuda": None, "error": None, "libraries": [], "cudnn": None, "nccl": None}
try:
    import torch
    said["torch"] = str(torch.__version__)
    said["cuda"] = getattr(torch.version, "cuda", None)
except BaseException as error:
    said["error"] = ("%s: %s" % (type(error).__name__, error))[:500]
paths = set()
for line in open("/proc/self/maps", "rb"):
    path = line.split(None, 5)[5:]
    if path:
        path = path[0].strip().decode("utf-8", "replace")
        if re.search(r"/lib(cudnn|nccl|nvshmem|cusparseLt|cudart|cublas|nvrtc|nvJitLink)[^/]*\.so", path):
            paths.add(path)
said["libraries"] = sorted(paths)[:60]
for path in sorted(paths):
    name = path.rpartition("/")[2]
    try:
        if name.startswith("libcudnn.so"):
            ask = ctypes.CDLL(path).cudnnGetCudartVersion
            ask.restype = ctypes.c_size_t
            said["cudnn"] = int(ask())
        if name.startswith("libnccl.so"):
            with open(path, "rb") as file:
                found = re.search(rb"NCCL version ([0-9.]+)\+cuda([0-9.]+)", file.read())
            if found:
                said["nccl"] = [found.group(1).decode(), found.group(2).decode()]
    except (OSError, AttributeError, MemoryError):
        pass
sys.stdout.write("\nFLEETFIX " + json.dumps(said) + "\n")
"""


@read
def torch(ctx, venv):
    """Import torch in a process of its own and say its CUDA, and that of the libraries it maps.

    Returns {"none": reason}, or {"path", "late": bool, "exit", "said": {...} | None, "errors": tail}.
    The process has a clean environment: LD_LIBRARY_PATH and PYTHONPATH of nobody.
    """
    where = environments.resolve(ctx, venv)
    if "none" in where:
        return {"none": where["none"], "hint": where.get("hint", "")}
    if where["kind"] != "venv":
        # Whose code this is was settled for virtual environments only.
        return {"none": "%s is no virtual environment" % where["path"], "hint": ""}
    argv = [where["python"], "-I", "-B", "-c", ASK]
    owner = {"uid": where["uid"], "gid": where["gid"]}
    ran = ctx.command(argv, cwd=where["path"], timeout=ctx.remaining() - 1.0, **owner)
    marked = [line for line in ran.text.splitlines() if line.startswith("FLEETFIX ")]
    try:
        said = json.loads(marked[-1][9:]) if marked else None
    except (ValueError, RecursionError):
        said = None
    return {
        "path": where["path"],
        "late": ran.exit is None,
        "exit": ran.exit,
        "said": said,
        "errors": ran.errors.strip()[-400:],
    }
