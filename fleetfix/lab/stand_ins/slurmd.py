"""A stand-in of Slurm on a node: `slurmd ORDER` starts `slurmstepd ORDER`, which runs one batch job.

One file under two names; ORDER is the path of a JSON file: script, cwd, env, log, uid. No controller is
behind them and they make no cgroup: that a process belongs to the job is told by its SLURM_JOB_ID alone.
"""

import json
import os
import signal
import subprocess
import sys


def main():
    here, name = os.path.split(sys.argv[0])
    if name == "slurmd":
        subprocess.Popen([os.path.join(here, "slurmstepd"), sys.argv[1]], start_new_session=True)
        stay()
    with open(sys.argv[1]) as file:
        order = json.load(file)
    sys.exit(batch(order).wait())


def stay():
    """Collect the steps that end, for as long as the node is up."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.pause()


def batch(order):
    """Start the script of a job as its user."""

    def become():
        if order["uid"]:
            os.setgroups([])
            os.setgid(order["uid"])
            os.setuid(order["uid"])

    with open(order["log"], "ab") as log:
        return subprocess.Popen(
            ["/bin/sh", order["script"]],
            cwd=order["cwd"],
            env=order["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=become,
            start_new_session=True,
        )


main()
