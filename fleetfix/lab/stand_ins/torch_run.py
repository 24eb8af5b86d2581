"""A stand-in torchrun: one worker a GPU, each in a session of its own; all end when one fails.

Over several nodes the launchers meet first, by TCP at the endpoint of node 0: one that waits for the
others in vain gives up, as torch's rendezvous does.
"""

import os
import signal
import socket
import subprocess
import sys
import time

import torch  # noqa: F401  the launcher maps the environment's libraries too, as torchrun does

JOIN = 30.0  # seconds that the launchers of a job wait for one another; torch waits for ten minutes
OPTIONS = {
    "--nproc-per-node": "1",
    "--nnodes": "1",
    "--node-rank": "0",
    "--rdzv-id": "none",
    "--rdzv-endpoint": "127.0.0.1:29500",
}


class Alone(Exception):
    """The other launchers did not come."""


def main():
    options, script = read(sys.argv[1:])
    if not script:
        sys.exit("torchrun: error: the following arguments are required: training_script")
    stopping = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: stopping.append(got))
    host, _, port = options["--rdzv-endpoint"].rpartition(":")
    job = {
        "count": int(options["--nproc-per-node"]),
        "nodes": int(options["--nnodes"]),
        "node": int(options["--node-rank"]),
        "id": options["--rdzv-id"],
        "host": host,
        "port": int(port),
    }
    if job["nodes"] > 1:
        try:
            job["port"] = meet(job, stopping)
        except Alone as error:
            sys.exit(128 + stopping[0] if stopping else "torch.distributed.DistNetworkError: %s" % error)
    workers = [start(rank, job, script) for rank in range(job["count"])]
    return wait(workers, stopping)


def read(words):
    """The options that are known, and the script with its arguments."""
    options, rest = dict(OPTIONS), list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            return options, [word, *rest]
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in options:
            options[name] = value if equals else rest.pop(0)
    return options, []


# -- several nodes -------------------------------------------------------------------------------------


def meet(job, stopping):
    """Wait for the launchers of all nodes; the port by which their workers talk."""
    until = time.monotonic() + JOIN
    return gather(job, stopping, until) if job["node"] == 0 else join(job, stopping, until)


def gather(job, stopping, until):
    """Node 0: let the others in, then tell them all the same port."""
    hello = b"%s\n" % job["id"].encode()
    with socket.create_server((job["host"], job["port"]), reuse_port=False) as server:
        server.settimeout(0.1)
        peers = []
        while len(peers) < job["nodes"] - 1:
            if stopping or time.monotonic() > until:
                raise Alone("%d of %d nodes came within %g s" % (len(peers) + 1, job["nodes"], JOIN))
            try:
                peer = server.accept()[0]
            except OSError:
                continue
            peer.settimeout(5.0)
            if line_of(peer) == hello:
                peers.append(peer)
        port = free_port(job["host"])
        for peer in peers:
            peer.sendall(b"%d\n" % port)
            peer.close()
    return port


def join(job, stopping, until):
    while not stopping and time.monotonic() < until:
        try:
            with socket.create_connection((job["host"], job["port"]), timeout=1.0) as peer:
                peer.sendall(b"%s\n" % job["id"].encode())
                peer.settimeout(max(until - time.monotonic(), 0.1))
                answer = line_of(peer)
            if answer:
                return int(answer)
        except OSError:
            pass
        time.sleep(0.1)
    raise Alone("nobody at %s:%d within %g s" % (job["host"], job["port"], JOIN))


def line_of(peer):
    """One line that a peer sends, or what came of it."""
    data = b""
    while not data.endswith(b"\n"):
        try:
            more = peer.recv(256)
        except OSError:
            break
        if not more:
            break
        data += more
    return data


def free_port(host):
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


# -- the workers -----------------------------------------------------------------------------------------


def start(rank, job, script):
    """Start one worker with the variables that a rank has."""
    own = {
        "RANK": job["node"] * job["count"] + rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": job["node"],
        "GROUP_WORLD_SIZE": job["nodes"],
        "WORLD_SIZE": job["nodes"] * job["count"],
        "LOCAL_WORLD_SIZE": job["count"],
        "MASTER_ADDR": job["host"],
        "MASTER_PORT": job["port"],
        "TORCHELASTIC_RUN_ID": job["id"],
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
