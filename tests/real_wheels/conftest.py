"""The four real wheels, downloaded once for every test of this folder, and an environment's own caches."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.wheelhouse import PYTHON, UV, wheel

OURS = {"nvidia-nvshmem-cu12": "3.4.5", "nvidia-nccl-cu12": "2.27.5"}
OTHERS = {"nvidia-nvshmem-cu13": "3.4.5", "nvidia-nccl-cu13": "2.28.9"}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """{name: path} of the four wheels, and of a stand-in torch that requires two of them."""
    given = os.environ.get("FLEETFIX_REAL_WHEELS")
    folder = Path(given) if given else tmp_path_factory.mktemp("real")
    pins = [f"{name}=={version}" for name, version in {**OURS, **OTHERS}.items()]
    if not list(folder.glob("nvidia_nccl_cu13-*.whl")):
        argv = [PYTHON, "-m", "pip", "download", "-q", "--no-cache-dir", "--no-deps", "-d", str(folder)]
        subprocess.run([*argv, *pins], check=True)
    text = "cuda: Optional[str] = '12.8'\n"
    needs = [f"{name}=={version}" for name, version in OURS.items()]
    wheel(folder, "torch", "2.10.0", {"torch/__init__.py": "", "torch/version.py": text}, requires=needs)
    yield {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}
    if not given:
        for path in folder.glob("*.whl"):
            path.unlink()


@pytest.fixture
def cache_environ(tmp_path):
    """Caches of pip and uv that no other test fills."""
    cache = tmp_path / "cache"
    return {
        "UV_CACHE_DIR": str(cache / "uv"),
        "PIP_CACHE_DIR": str(cache / "pip"),
        "PATH": os.path.dirname(UV),
        "SSL_CERT_FILE": os.environ.get("SSL_CERT_FILE") or "/etc/ssl/certs/ca-certificates.crt",
    }
