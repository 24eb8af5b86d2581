"""Runs as the journal would have them, told without an engine; views are read from these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fleetfix.action import Measurement
from fleetfix.errors import Failure
from fleetfix.events import (
    ChangeFinished,
    ChangeShown,
    ChangeStarted,
    ChangeUndone,
    Event,
    HostConnected,
    HostFinished,
    HostLost,
    HostPlanned,
    HostSaid,
    HostStarted,
    Record,
    RollbackFinished,
    RollbackStarted,
    RunFinished,
    RunHalted,
    RunInterrupted,
    RunStarted,
    StepFinished,
    StepPlanned,
    StepStarted,
    StepWaited,
    WaveStarted,
)
from fleetfix.hostset import HostSet
from fleetfix.policy import Policy, Share

RUN = "20300102-030405-purge-cu13-abcd"
BEGAN = 1_900_000_000.0
POLICY = Policy(canary=1, batch=(Share(None, 10), Share(None, 25)), max_failures=Share(2, None))

STEPS = (
    ("before", ""),
    ("stop", "stop the training that uses this environment"),
    ("idle", ""),
    ("wheels", "one CUDA in the environment, every file as its package says"),
    ("train", ""),
    ("speed", ""),
)


def records(events: Iterable[Event], *, run: str = RUN, every: float = 1.0) -> list[Record]:
    """Give events their places, `every` so many seconds."""
    return [
        Record(run=run, seq=seq, at=BEGAN + seq * every, event=event)
        for seq, event in enumerate(events, start=1)
    ]


def started(hosts: str, **fields: object) -> RunStarted:
    known: dict[str, object] = {
        "playbook": "purge-cu13",
        "source": "playbooks/purge-cu13.yaml",
        "digest": "3f9a2b" + "0" * 58,
        "inventory": "lab",
        "hosts": tuple(HostSet.parse(hosts)),
        "steps": STEPS,
        "policy": POLICY,
        "operator": "op",
        "controller": "desk",
        "version": "0.1.0",
    }
    return RunStarted.model_validate(known | fields)


def stop_change(pid: int, minutes: int = 12) -> ChangeShown:
    return ChangeShown(
        key="stop:torchrun",
        summary=f"stop job torchrun (pid {pid}): 8 GPUs",
        before="running",
        after="stopped",
        risk="compensable",
        checkpoint_ages=(minutes * 60.0,),
    )


WHEELS = ChangeShown(
    key="wheels:/opt/train/venv",
    parts=("repair:nvidia-nccl-cu12==2.26.2", "remove:nvidia-nccl-cu13==2.27.3"),
    summary="repair 86 files of 4 packages, remove 17 packages",
    before="torch 2.7\nnvidia-nccl-cu12 2.26.2: 1 file is another's\nnvidia-nccl-cu13 2.27.3",
    after="torch 2.7\nnvidia-nccl-cu12 2.26.2",
    risk="reversible",
    fetch_bytes=1_300_000_000,
)


def planned(host: str, pid: int, minutes: int = 12) -> Iterator[Event]:
    """A contaminated host, surveyed."""
    yield HostConnected(host=host, user="root", python="3.11.2")
    yield StepPlanned(host=host, step="before", pending=False, verdict="will be checked")
    yield StepPlanned(host=host, step="stop", pending=True, changes=(stop_change(pid, minutes),))
    yield StepPlanned(host=host, step="idle", pending=False, verdict="will be checked")
    yield StepPlanned(
        host=host, step="wheels", pending=True, changes=(WHEELS,), notes=("numpy is locally modified",)
    )
    yield StepPlanned(host=host, step="speed", pending=False, verdict="will be checked")
    yield HostPlanned(host=host, pending=True)


def healthy(host: str) -> Iterator[Event]:
    yield HostConnected(host=host, user="root", python="3.11.2")
    yield StepPlanned(host=host, step="stop", pending=False)
    yield StepPlanned(host=host, step="wheels", pending=False)
    yield HostPlanned(host=host, pending=False)


def unreachable(host: str, message: str) -> Iterator[Event]:
    failure = Failure(kind="unreachable", message=message)
    yield HostLost(host=host, failure=failure)
    yield HostFinished(host=host, outcome="unreachable", reason=message, failure=failure)


def measured(rate: float) -> Measurement:
    return Measurement(job="j1", rate=rate, scope="global", noise=0.01, steps=40)


def mended(host: str, pid: int, before: float = 12_800, after: float = 20_100) -> Iterator[Event]:
    """A host's turn that goes well."""
    yield StepFinished(
        host=host, step="before", result="ok", measured=measured(before), reason="12.8K tok/s"
    )
    yield from changed(host, "stop", stop_change(pid))
    yield StepStarted(host=host, step="idle")
    yield StepWaited(host=host, step="idle", reason="GPU 0 still holds 512 MiB")
    yield StepWaited(host=host, step="idle", reason="GPU 0 still holds 64 MiB")
    yield StepFinished(host=host, step="idle", result="ok", reason="8 GPUs are idle", seconds=4.0)
    yield from changed(host, "wheels", WHEELS)
    yield StepFinished(
        host=host,
        step="speed",
        result="ok",
        measured=measured(after),
        proven=True,
        reason="recovered",
        seconds=61.0,
    )
    yield HostFinished(host=host, outcome="changed", touched=True)


def changed(host: str, step: str, shown: ChangeShown) -> Iterator[Event]:
    change = f"{RUN}/{step}/1/1"
    yield StepStarted(host=host, step=step)
    yield ChangeStarted(host=host, step=step, change=change, shown=shown)
    yield ChangeFinished(host=host, step=step, change=change, ok=True, seconds=3.25)
    yield StepFinished(host=host, step=step, result="changed", seconds=3.5)


def undone(host: str, step: str, shown: ChangeShown, failure: Failure | None = None) -> ChangeUndone:
    return ChangeUndone(
        host=host,
        step=step,
        change=f"{RUN}/{step}/1/1",
        summary=shown.summary,
        ok=failure is None,
        failure=failure,
    )


def failed(host: str, pid: int, message: str, *, stderr: str = "") -> Iterator[Event]:
    """A host whose wheels step goes wrong, up to the rollback."""
    failure = Failure(kind="command", message=message)
    change = f"{RUN}/wheels/1/1"
    yield from changed(host, "stop", stop_change(pid))
    yield StepStarted(host=host, step="wheels")
    yield ChangeStarted(host=host, step="wheels", change=change, shown=WHEELS)
    yield ChangeFinished(
        host=host,
        step="wheels",
        change=change,
        ok=False,
        failure=failure,
        exit=1,
        stderr=stderr,
        seconds=2.0,
    )
    yield StepFinished(host=host, step="wheels", result="failed", failure=failure, reason=message)
    yield RollbackStarted(host=host, reason=message)


def rolled_back(host: str, pid: int, message: str) -> Iterator[Event]:
    yield from failed(host, pid, message)
    yield undone(host, "wheels", WHEELS)
    yield undone(host, "stop", stop_change(pid))
    yield RollbackFinished(host=host, result="rolled_back")
    failure = Failure(kind="command", message=message)
    yield HostFinished(
        host=host, outcome="rolled_back", reason=message, failure=failure, step="wheels", touched=True
    )


def all_outcomes() -> list[Record]:
    """A run in which nearly everything that can happen does."""
    lost = Failure(kind="unreachable", message="the connection was lost")
    bad = Failure(kind="command", message="wheels.repair: sha256 differs", hint="look at /opt/train/venv")
    full = Failure(kind="no_space", message="/opt is full")
    slow = Failure(kind="verify_failed", message="13.1K tok/s, 35 % below the baseline")
    blocked = "alice's job 123 uses the environment"
    events: list[Event] = [started("gpu[01-14]", reason="incident 7")]
    for number in (1, 2, 3, 6, 7, 8, 9, 12, 13, 14):
        events += planned(f"gpu{number:02}", 4000 + number, number)
    events += healthy("gpu10")
    events += unreachable("gpu04", "no answer from 10.0.0.4 port 22 within 15 s")
    events += unreachable("gpu05", "no answer from 10.0.0.5 port 22 within 15 s")
    events += [
        StepPlanned(host="gpu11", step="stop", pending=True, blocked=blocked),
        HostFinished(
            host="gpu11",
            outcome="blocked",
            reason=blocked,
            failure=Failure(kind="blocked", message=blocked),
            step="stop",
        ),
        HostFinished(host="gpu10", outcome="ok"),
        WaveStarted(name="canary", hosts=("gpu01",)),
        HostStarted(host="gpu01"),
        *mended("gpu01", 4001),
        WaveStarted(name="batch 1", hosts=tuple(HostSet.parse("gpu[02-03,06-09,12]"))),
        *(HostStarted(host=host) for host in HostSet.parse("gpu[02-03,06-09,12]")),
        *mended("gpu02", 4002, after=19_900),
        *rolled_back("gpu03", 4003, "wheels.repair: sha256 differs"),
        *failed("gpu06", 4006, bad.message, stderr="first\nsecond \x1b[31mred\x1b[0m\n"),
        undone("gpu06", "wheels", WHEELS, full),
        undone("gpu06", "stop", stop_change(4006)),
        RollbackFinished(host="gpu06", result="rollback_failed"),
        HostFinished(
            host="gpu06",
            outcome="rollback_failed",
            reason=f"{bad.message}; and going back failed: {full.message}",
            failure=bad,
            step="wheels",
            touched=True,
            job_stopped=True,
            open=("repair 86 files of 4 packages, remove 17 packages",),
        ),
        HostLost(host="gpu07", failure=lost),
        HostFinished(
            host="gpu07",
            outcome="rollback_pending",
            reason=lost.message,
            failure=lost,
            touched=True,
            job_stopped=True,
            open=("stop job torchrun",),
        ),
        StepFinished(host="gpu08", step="before", result="ok", measured=measured(12_700)),
        StepFinished(host="gpu08", step="speed", result="failed", failure=slow, measured=measured(13_100)),
        HostFinished(
            host="gpu08", outcome="unproven", reason=slow.message, failure=slow, step="speed", touched=True
        ),
        HostSaid(host="gpu09", step="wheels", text="fetching \x1b]0;owned\x07 and \u202egnp.exe"),
        HostFinished(
            host="gpu09", outcome="failed", failure=full, reason=full.message, step="wheels", touched=True
        ),
        RunHalted(reason="3 hosts failed, 2 may"),
        RunInterrupted(signal="SIGINT", times=1),
        HostFinished(
            host="gpu12",
            outcome="cancelled",
            failure=Failure(kind="cancelled", message="ended by the operator"),
            touched=True,
        ),
        HostFinished(host="gpu13", outcome="not_started", reason="3 hosts failed, 2 may"),
        HostFinished(host="gpu14", outcome="not_started", reason="3 hosts failed, 2 may"),
        RunFinished(exit=130),
    ]
    return records(events)


def thousand() -> list[Record]:
    """1,000 hosts, of which three fail."""
    hosts = "gpu[0001-1000]"
    events: list[Event] = [started(hosts)]
    names = tuple(HostSet.parse(hosts))
    for number, host in enumerate(names):
        events += planned(host, 1000 + number, number % 50 + 1)
    events.append(WaveStarted(name="canary", hosts=names[:1]))
    for number, host in enumerate(names):
        events.append(HostStarted(host=host))
        if number in (16, 299, 871):
            events += rolled_back(
                host, 1000 + number, f"{host}: disk /dev/sd{number % 3} failed on pid {number}"
            )
        else:
            events += mended(host, 1000 + number, 12_700 + number / 10, 19_800 + number / 3)
    events.append(RunFinished(exit=2))
    return records(events, every=0.05)
