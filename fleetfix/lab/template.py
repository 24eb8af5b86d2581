"""The contents of lab hosts, made once a lab: environments, wheelhouse, caches, the training job."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fleetfix.lab import namespaces, stock
from fleetfix.lab.layout import Boot, make_etc
from fleetfix.lab.record import Span
from fleetfix.lab.wheel import Installer, Wheel

VENV = "/opt/train/venv"
LOG = "/var/log/train/train.log"
WHEELHOUSE = "/opt/wheelhouse"
FIRST_STEP = 48200
"""The step of the checkpoint that every host begins with: a job from step 0 has lost it."""

CONFIG = """[job]
dump_folder = "."

[training]
local_batch_size = 2
seq_len = 8192

[checkpoint]
folder = "checkpoints"
interval = 25
"""


@dataclass(frozen=True)
class Python:
    """The interpreter of the hosts: one that every user of this machine may run."""

    path: str
    version: tuple[int, int]
    prefix: str

    @property
    def hidden(self) -> tuple[str, ...]:
        """The folders that a host must be given again, because its own /root, /home… hide them."""
        own = ("/root/", "/home/", "/opt/", "/tmp/", "/var/")
        return (self.prefix,) if self.prefix.startswith(own) else ()


def find_python() -> Python:
    """Find it: the system's own, or the one under this program."""
    import sys

    given = "/usr/bin/python3"
    if not os.access(given, os.X_OK):
        given = os.path.join(sys.base_prefix, "bin", "python3")
    code = "import sys; print(sys.version_info[0], sys.version_info[1], sys.base_prefix)"
    done = subprocess.run([given, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    major, minor, prefix = done.stdout.split(maxsplit=2)
    return Python(given, (int(major), int(minor)), prefix.strip())


class Template:
    """The folder `template` of a lab. `contaminated` and `clean` environments are hard-linked from
    it into hosts, so that a tool that writes a file in place is seen on every host."""

    def __init__(self, folder: Path, python: Python, installer: Installer) -> None:
        self.folder = folder
        self.python = python
        self.installer = installer

    @property
    def etc(self) -> Path:
        return self.folder / "etc"

    @property
    def site(self) -> str:
        """site-packages, relative to the environment."""
        return f"lib/python{self.python.version[0]}.{self.python.version[1]}/site-packages"

    def make(self) -> None:
        """Make everything that hosts have in common."""
        clean, foreign = stock.clean(), stock.foreign()
        make_etc(self.etc)
        write_all(self.folder / "driver", [("nvidia/lib/libcuda.so.1", stock.driver(0))])
        index = index_libraries(self.folder)
        write_all(self.folder / "wheelhouse", ((one.file_name, one.archive()) for one in clean))
        self.environment(self.folder / "clean", clean)
        link_tree(self.folder / "clean", self.folder / "contaminated")
        self._install(self.folder / "contaminated", foreign, VENV)
        if index is not None:
            index.wait()

    def environment(self, venv: Path, wheels: Iterable[Wheel], known_as: str = VENV) -> None:
        """Make an environment at `venv` that its host knows by the path `known_as`."""
        make_venv(venv, self.python, self.installer)
        self._install(venv, wheels, known_as)
        for script in (venv / "bin").glob("torchrun"):
            script.chmod(0o755)
        # As after a first start: what the job imports is compiled, and no start changes the folder.
        compile_it = [
            self.python.path,
            "-I",
            "-S",
            "-m",
            "compileall",
            "-q",
            str(venv / self.site / "torch"),
        ]
        subprocess.run(compile_it, check=True)

    def _install(self, venv: Path, wheels: Iterable[Wheel], known_as: str) -> None:
        for wheel in wheels:
            files = wheel.installed(self.installer, f"{known_as}/bin/python")
            write_all(venv / self.site, files.items())

    def fill(self, disk: Path, *, contaminated: bool) -> None:
        """Put environment, wheelhouse and job on a host's disk; caches come last, see `fill_caches`."""
        train = disk / "opt/train"
        link_tree(self.folder / ("contaminated" if contaminated else "clean"), train / "venv")
        link_tree(self.folder / "wheelhouse", disk / "opt/wheelhouse")
        write_all(
            train,
            (
                ("train.py", stock.stand_in("train.py")),
                ("llama3-8b.toml", CONFIG.encode()),
                ("checkpoints/latest", f"{FIRST_STEP}\n".encode()),
                ("csrc/fused_adam.cu12.o", stock.extension(12)),
                ("csrc/fused_adam.cu13.o", stock.extension(13)),
            ),
        )
        link_tree(self.folder / "driver", disk / "opt")
        first = f"#!{self.python.path} -ISB\n".encode()
        write_all(
            disk / "sbin",
            [
                ("nvidia-smi", first + stock.stand_in("nvidia_smi.py")),
                ("g++", stock.stand_in("compiler.sh")),
            ],
        )
        for program in ("nvidia-smi", "g++"):
            (disk / "sbin" / program).chmod(0o755)

    def fill_caches(self, disk: Path, *, contaminated: bool) -> None:
        """Put the compile caches on a host's disk, newer than its environment, as a job leaves them.

        Call it when the environments of all hosts are linked: a link changes the ctime of a file.
        """
        major = 13 if contaminated else 12
        tag = "py{}{}_cu128".format(*self.python.version)
        beside = f"# compiled beside CUDA {major}\n".encode()
        inductor = disk / "tmp/torchinductor_root"
        write_all(
            inductor,
            (
                ("fxgraph/k7/fk7q2d5xgraph/entry", beside),
                ("aotautograd/a3nbsm4/entry", beside),
                ("wd/cwdo3pfy6kernel.py", beside),
            ),
        )
        extensions = disk / "root/.cache/torch_extensions" / tag
        ninja = b"rule cuda_compile\n  command = nvcc $in -o $out\n"
        write_all(
            extensions,
            (("fused_adam/build.ninja", ninja), ("fused_adam/fused_adam.so", stock.extension(major))),
        )


def training(gpus: int, span: Span | None = None, host: str = "") -> Boot:
    """The training job as it is started by hand: torchrun with a worker for each GPU.

    Where it spans hosts, as it is started on this one of them.
    """
    options = [f"--nproc-per-node={gpus}"]
    if span is not None and host in span.hosts:
        options += [f"--nnodes={len(span.hosts)}", f"--node-rank={span.hosts.index(host)}"]
        options += [f"--rdzv-id={span.id}", f"--rdzv-endpoint={span.hosts[0]}:{span.port}"]
    argv = (
        f"{VENV}/bin/python",
        f"{VENV}/bin/torchrun",
        *options,
        "train.py",
        "--config",
        "llama3-8b.toml",
    )
    return Boot(argv, "/opt/train", job_environment(), LOG)


def job_environment(user: str = "root", home: str = "/root", venv: str = VENV) -> dict[str, str]:
    """The environment that a training job is started with."""
    return {
        "PATH": f"{venv}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "LANG": "C.UTF-8",
        "VIRTUAL_ENV": venv,
        "NCCL_DEBUG": "WARN",
        "WANDB_API_KEY": "stand-in-secret-of-the-lab",
    }


def index_libraries(folder: Path) -> subprocess.Popen[bytes] | None:
    """Have the loader's cache of the hosts know /opt/nvidia/lib, where their libcuda.so.1 is.

    Runs ldconfig in namespaces of its own, where /opt is the driver's folder; it links nothing (-X).
    None where there is no ldconfig.
    """
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if ldconfig is None:
        return None
    conf = folder / "etc/ld.so.conf"
    conf.write_text("/opt/nvidia/lib\n" + (conf.read_text() if conf.exists() else ""))
    # Relative paths from here on: the lab's own folder may be below one of the two mounts.
    steps = 'mount --bind driver /opt && mount -t tmpfs tmpfs /var/cache && exec "$0" -X -i'
    argv = ["/bin/sh", "-c", steps + " -C etc/ld.so.cache -f etc/ld.so.conf", ldconfig]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        namespaces.unshare(argv),
        cwd=folder,
        stdin=quiet,
        stdout=quiet,
        stderr=quiet,
        env=namespaces.PRIVATE,
    )


def make_venv(venv: Path, python: Python, installer: Installer) -> None:
    """Lay out an empty virtual environment, as `uv venv` or `python -m venv --without-pip` does."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(python.path)
    for name in ("python3", "python{}.{}".format(*python.version)):
        (venv / "bin" / name).symlink_to("python")
    (venv / "lib64").symlink_to("lib")
    version = "{}.{}".format(*python.version)
    lines = [f"home = {os.path.dirname(python.path)}", "implementation = CPython"]
    lines += ["uv = 0.9.9"] if installer == "uv" else []
    lines += [f"version_info = {version}", "include-system-site-packages = false"]
    (venv / "pyvenv.cfg").write_text("\n".join(lines) + "\n")


def link_tree(source: Path, target: Path) -> None:
    """Make `target` a copy of `source` whose files are hard links."""
    for folder, names, files in os.walk(source):
        here = target / os.path.relpath(folder, source)
        here.mkdir(parents=True, exist_ok=True)
        for name in (*files, *names):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                os.symlink(os.readlink(path), here / name)
            elif name in files:
                os.link(path, here / name)


def write_all(folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write files below a folder, each anew."""
    made: set[Path] = set()
    for name, data in files:
        path = folder / name
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        # A second wheel with the same path replaces the file, as uv does: never written in place.
        path.unlink(missing_ok=True)
        path.write_bytes(data)


def drop(folder: Path) -> None:
    """Remove a folder of the lab with all that is in it."""

    def allow(function: object, path: str, error: object) -> None:
        os.chmod(os.path.dirname(path), 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            Path(path).unlink(missing_ok=True)

    shutil.rmtree(folder, onerror=allow)
