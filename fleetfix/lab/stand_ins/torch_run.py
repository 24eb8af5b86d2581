"""A stand-in torchrun: one worker a GPU, each in a session of its own; all end when one fails."""

import os
import signal
import subprocess
import sys
import time

import torch  # noqa: F401  the launcher maps the environment's libraries too, as torchrun does


def main():
    count, script, stopping = 1, [], []
    rest = sys.argv[1:]
    while rest:
        word = rest.pop(0)
        if word.startswith(("--nproc-per-node", "--nproc_per_node")):
            count = int(word.partition("=")[2] or rest.pop(0))
        elif not word.startswith("-"):
            script = [word, *rest]
            break
    if not script:
        sys.exit("torchrun: error: the following arguments are required: training_script")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: stopping.append(got))
    workers = [start(rank, count, script) for rank in range(count)]
    return wait(workers, stopping)


def start(rank, count, script):
    """Start one worker with the variables that a rank has."""
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "OMP_NUM_THREADS": 1,
    }
    environment = dict(os.environ, **{name: str(value) for name, value in own.items()})
    return subprocess.Popen([sys.executable, "-u", *script], env=environment, start_new_session=True)


def wait(workers, stopping):
    """Return the exit status: 0 when all ended well; at the first that did not, end the others."""
    while True:
        codes = [worker.poll() for worker in workers]
        if stopping:
            end(workers, stopping[0])
            return 128 + stopping[0]
        bad = [code for code in codes if code]
        if bad:
            sys.stderr.write("torch.distributed.elastic: a worker failed (exitcode: %d)\n" % bad[0])
            end(workers, signal.SIGTERM)
            return 1
        if None not in codes:
            return 0
        time.sleep(0.1)


def end(workers, number):
    """Pass the signal on, as torchrun does, and KILL what is left after 30 seconds."""
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(number)
    until = time.monotonic() + 30
    while time.monotonic() < until and any(worker.poll() is None for worker in workers):
        time.sleep(0.02)
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
