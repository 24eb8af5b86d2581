"""A stand-in training job: its speed is decided by the libraries it maps and the caches it finds.

20,000 tok/s when all is right; a fifth less while a CUDA-13 library is mapped; a fifth less while
the compile caches were built beside CUDA 13: 12,800 with both. A cold cache makes the first steps
slow and is then built beside what is mapped. Prints torchtitan's lines, keeps checkpoints, resumes.
"""

import ctypes
import os
import random
import signal
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
    step = resume()
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
        say_step(step, speed * (COLD if cold else noise.gauss(1, 0.003)), noise)
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
