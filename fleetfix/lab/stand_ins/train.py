"""A stand-in training job: its speed is decided by the libraries it maps and the caches it finds.

20,000 tok/s when all is right; a fifth less while a CUDA-13 library is mapped; a fifth less while
the compile caches were built beside CUDA 13: 12,800 with both. A cold cache makes the first steps
slow and is then built beside what is mapped. Prints torchtitan's lines, keeps checkpoints, resumes.
Over several nodes all go in step, so that the slowest decides; a node whose peer is gone ends in error.
"""

import ctypes
import os
import random
import signal
import socket
import sys
import time

import torch

FULL_SPEED = 20000.0
SHARE = 0.8  # what is left of it for each of the two causes
SLOW_STEPS = 10  # steps that a cold cache costs
COLD = 0.2
FAST_STEPS = 900  # steps at the first pace: then slower, so that a lab left alone costs nothing
LIBRARIES = ("libcudnn.so.9", "libnccl.so.2", "libcusparseLt.so.0", "libnvshmem_host.so.3")
CHECKPOINTS = "checkpoints"
FAULTS = "/run/lab/faults/"

stopping = []


def main():
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told_to_stop)
    # What computes has nvidia-uvm open too; without it, one is taken for a monitor.
    names = ("nvidiactl", "nvidia-uvm", "nvidia%d" % rank)
    devices = [open("/dev/" + name, "r+b") for name in names]
    if rank == 0:
        train()
    while not stopping:
        time.sleep(0.5)
    del devices


def told_to_stop(number, _):
    if not os.path.exists(FAULTS + "ignores_term"):
        stopping.append(number)


def train():
    """Rank 0: step, say how fast, save."""
    try:
        run(Peers())
    except Gone as error:
        # The peers of a job that is told to stop are told so too, a moment earlier or later.
        pause(2.0)
        if not stopping:
            say("[rank0] NCCL error: remote process exited or there was a network error: %s" % error)
            sys.exit(1)


def run(peers):
    step = int(min(peers.exchange(resume())))
    warm = caches_present()
    speed = FULL_SPEED
    noise = random.Random(os.getpid())
    done = 0
    while not stopping:
        cold = not warm and done < SLOW_STEPS
        pause(0.15 if cold else 0.1 if done < FAST_STEPS else 1.0)
        if stopping:
            break
        step, done = step + 1, done + 1
        if not warm and done == 5:
            build_caches()
        if done == 1 or done == SLOW_STEPS + 1 or done % 50 == 0:
            speed = full_speed()
        try:
            rate = min(peers.exchange(speed * (COLD if cold else noise.gauss(1, 0.003))))
        except Gone:
            if not stopping:
                raise
            break
        say_step(step, rate, noise)
        if step % 25 == 0:
            save(step)
    save(step)
    say("Received signal %d, saved a checkpoint at step %d" % (stopping[0], step))


def pause(seconds):
    until = time.monotonic() + seconds
    while not stopping and time.monotonic() < until:
        time.sleep(min(seconds, 0.25))


def full_speed():
    """Tokens per second and GPU, by what is mapped and by what the caches were built beside."""
    mapped = other_cuda_mapped()
    speed = FULL_SPEED * (SHARE if mapped else 1.0) * (SHARE if caches_stale() else 1.0)
    if not mapped and os.path.exists(FAULTS + "slow_after_repair"):
        speed *= SHARE
    return speed


def other_cuda_mapped():
    """Whether a library that this process maps was built for another CUDA than torch."""
    own = int(torch.version.cuda.split(".")[0])
    return any(ctypes.CDLL(name).lab_cuda_major() != own for name in LIBRARIES)


# -- several nodes -----------------------------------------------------------------------------------


class Gone(Exception):
    """A node of this job is not there any more."""


class Peers:
    """The nodes of this job, by their first ranks; node 0 hears all and tells all."""

    def __init__(self):
        self.node, nodes = (int(os.environ.get(name, "0")) for name in ("GROUP_RANK", "GROUP_WORLD_SIZE"))
        self.lines = []
        if nodes > 1:
            place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            connections = self.accept(place, nodes - 1) if self.node == 0 else [self.connect(place)]
            self.lines = [(one, one.makefile("r")) for one in connections]

    def accept(self, place, count):
        with socket.create_server(place) as server:
            server.settimeout(0.25)
            return [self.insist(lambda: server.accept()[0]) for _ in range(count)]

    def connect(self, place):
        return self.insist(lambda: socket.create_connection(place, timeout=5.0))

    def insist(self, reach):
        until = time.monotonic() + 30.0
        while True:
            try:
                return self.patient(reach())
            except OSError as error:
                if stopping or time.monotonic() > until:
                    raise Gone(error) from None
            time.sleep(0.05)

    def patient(self, connection):
        connection.settimeout(60.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def exchange(self, value):
        """The values of all nodes, when all have come this far."""
        if not self.lines:
            return [value]
        try:
            if self.node:
                self.send(repr(value))
                return [float(one) for one in self.hear(*self.lines[0]).split()]
            values = [value, *(float(self.hear(*one)) for one in self.lines)]
            self.send(" ".join(map(repr, values)))
            return values
        except (OSError, ValueError) as error:
            raise Gone(error) from None

    def send(self, text):
        for connection, _ in self.lines:
            connection.sendall(text.encode() + b"\n")

    def hear(self, _, lines):
        line = lines.readline()
        if not line.endswith("\n"):
            raise Gone("connection closed by a peer")
        return line


# -- compile caches ----------------------------------------------------------------------------------


def inductor():
    """Where TorchInductor keeps what it compiled, by its own rule."""
    user = next((os.environ[name] for name in ("LOGNAME", "USER") if os.environ.get(name)), "root")
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return given or os.path.join(os.environ.get("TMPDIR", "/tmp"), "torchinductor_" + user)


def extensions():
    """Where torch.utils.cpp_extension keeps what it built."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", "/root"), ".cache")
    tag = "py%d%d_cu128" % sys.version_info[:2]
    return os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(home, "torch_extensions", tag)


def artefacts():
    return [
        os.path.join(inductor(), "fxgraph", "k7", "fk7q2d5xgraph", "entry"),
        os.path.join(inductor(), "aotautograd", "a3nbsm4", "entry"),
        os.path.join(inductor(), "wd", "cwdo3pfy6kernel.py"),
        os.path.join(extensions(), "fused_adam", "fused_adam.so"),
    ]


def caches_present():
    return all(os.path.exists(path) for path in artefacts())


def caches_stale():
    """Whether anything in the caches was built beside CUDA 13."""
    for path in artefacts():
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            continue
        if b"beside CUDA 13" in data or b"libcudart.so.13" in data:
            return True
    return False


def build_caches():
    """Compile what lacks, beside what is mapped now."""
    major = 13 if other_cuda_mapped() else 12
    for path in artefacts():
        if os.path.exists(path):
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if path.endswith(".so"):
            with open(os.path.join("csrc", "fused_adam.cu%d.o" % major), "rb") as file:
                data = file.read()
        else:
            data = b"# compiled beside CUDA %d\n" % major
        with open(path + ".tmp", "wb") as file:
            file.write(data)
        os.rename(path + ".tmp", path)
    say("torch.compile: built %d artefacts" % len(artefacts()))


# -- checkpoints and the log -------------------------------------------------------------------------


def resume():
    """The step of the last checkpoint, or 0."""
    try:
        if os.path.exists(FAULTS + "forgets_checkpoint"):
            raise FileNotFoundError(CHECKPOINTS)
        with open(os.path.join(CHECKPOINTS, "latest")) as file:
            step = int(file.read())
    except (OSError, ValueError):
        say("No checkpoint found, training starts at step 0")
        return 0
    say("Loading the checkpoint from %s/step-%d." % (CHECKPOINTS, step))
    return step


def save(step):
    os.makedirs(CHECKPOINTS, exist_ok=True)
    try:
        with open(os.path.join(CHECKPOINTS, "latest.tmp"), "w") as file:
            file.write("%d\n" % step)
        os.rename(os.path.join(CHECKPOINTS, "latest.tmp"), os.path.join(CHECKPOINTS, "latest"))
    except OSError as error:
        say("checkpoint of step %d failed: %s" % (step, error))


def say_step(step, speed, noise):
    loss = 2.0 + 8.0 / (1 + step / 2000) + noise.gauss(0, 0.01)
    flops = speed * 0.03131
    rates = "tps: %s  tflops: %.2f  mfu: %.2f%%" % (format(round(speed), ","), flops, flops / 9.89)
    norm = abs(noise.gauss(1.2, 0.1))
    say(
        "step: %2d  loss: %8.5f  grad_norm: %7.4f  memory: 66.91GiB(47.65%%)  %s"
        % (step, loss, norm, rates)
    )


def say(text):
    now = time.time()
    stamp = "%s,%03d" % (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)), now % 1 * 1000)
    sys.stdout.write("[titan] %s - root - INFO - %s\n" % (stamp, text))
    sys.stdout.flush()


main()
