"""What nvidia-smi and the driver say: raw, with the exit code, for `domain/nvidia_smi.py` to read."""

import ctypes
import glob
import json
import os
import select
import signal
import time

from fleetfix.remote import capture, jobs, procs
from fleetfix.remote.api import read, user_name

GPUS = "--query-gpu=index,uuid,memory.used,memory.total,mig.mode.current"
APPS = "--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory"
ANSWER = 20.0  # seconds; 8 GPUs without persistence mode need about 10
TEXT = 12 * 1024
DRIVER = "libcuda.so.1"


@read
def start_possible(ctx):
    """Whether something new could start on the GPUs: {"smi": {exit, text}, "cuda": {found, code}}.

    `code` is what cuInit answers in a child (0 is success), None where it did not answer in time.
    """
    smi = _smi(ctx, [GPUS, "--format=csv"])
    return {"smi": smi, "cuda": _cuda_init(min(ANSWER, ctx.remaining()))}


@read
def survey(ctx, gpus="all"):
    """Who uses the GPUs, by nvidia-smi and by /proc: raw answers, and what is known of each pid.

    `gpus` is "all", "of-job" or a list of device numbers; `selected` is None for all of them.
    """
    answers = {"gpus": _smi(ctx, [GPUS, "--format=csv"])}
    late = answers["gpus"]["exit"] is None
    # A query that hangs waits in the kernel: the next would hang beside it.
    answers["apps"] = answers["gpus"] if late else _smi(ctx, [APPS, "--format=csv"])
    answers["table"] = answers["gpus"] if late else _smi(ctx, [])
    complete, here = procs.jobs_here()
    listed = _pids_in(answers["apps"]["text"])
    return dict(
        answers,
        complete=complete,
        selected=_selected(ctx, gpus, here),
        minors=minors(),
        jobs=[_shown(job) for job in here[:40]],
        listed={str(pid): who_is(pid) for pid in listed[:200]},
    )


def who_is(pid):
    """{"uid", "user", "argv", "allowed"} of a process, or None where there is none with this pid."""
    uid = procs.uid_of(pid)
    if uid is None:
        return None
    argv = procs.shown_of(pid)[:6] or [procs.comm_of(pid)]
    return {"uid": uid, "user": user_name(uid), "argv": argv, "allowed": procs.is_allowed(pid)}


def _shown(job):
    kept = {name: job[name] for name in ("pid", "user", "gpus")}
    return dict(kept, argv=procs.shown_of(job["pid"])[:6])


def _smi(ctx, options):
    ran = ctx.command(["nvidia-smi", *options], timeout=ANSWER, limit=TEXT)
    text = ran.text if ran.text.strip() else ran.errors
    return {"exit": ran.exit, "text": text, "cut": ran.cut}


def _pids_in(text):
    """The pids of a compute-apps answer: the second column, before the name that may hold commas."""
    columns = [line.split(", ", 2) for line in text.splitlines()[1:]]
    return sorted({int(one[1]) for one in columns if len(one) == 3 and one[1].strip().isdigit()})


def _selected(ctx, gpus, here):
    if gpus == "all":
        return None
    if gpus != "of-job":
        return sorted(gpus)
    stopped = [entry["gpus"] for _, found in capture.of_run(ctx) for entry in found["jobs"]]
    if not stopped:
        live = jobs.live_job(ctx)
        stopped = [live["gpus"]] if live else []
    return sorted({gpu for one in stopped for gpu in one}) or None


def minors():
    """{uuid: N of /dev/nvidiaN}: nvidia-smi's index is another number where GPUs were left out."""
    found = {}
    for path in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        try:
            with open(path) as file:
                pairs = [line.partition(":") for line in file]
        except OSError:
            continue
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        if fields.get("GPU UUID") and fields.get("Device Minor", "").isdigit():
            found[fields["GPU UUID"]] = int(fields["Device Minor"])
    return found


def _cuda_init(seconds):
    """{"found": whether there is a libcuda, "code": what cuInit(0) gave, None where it hangs or dies}."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(_call_cuda()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        answer = _answer(reader, seconds)
    finally:
        os.close(reader)
        # One that waits in the kernel cannot be ended: it is not waited for either.
        os.kill(child, signal.SIGKILL)
        _reap(child, 2.0)
    return answer or {"found": True, "code": None}


def _answer(reader, seconds):
    if not select.select([reader], [], [], seconds)[0]:
        return None
    data = os.read(reader, 4096)
    return json.loads(data) if data else None


def _reap(child, seconds):
    until = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < until:
        time.sleep(0.01)


def _call_cuda():
    try:
        library = ctypes.CDLL(DRIVER)
    except OSError:
        return {"found": False, "code": None}
    return {"found": True, "code": int(library.cuInit(0))}
