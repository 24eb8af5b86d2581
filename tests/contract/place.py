"""Where a contract suite runs: one host over one wire, and a folder that both ends see."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fleetfix.commands import Call, Change, Read
from fleetfix.inventory import Host
from fleetfix.session import Purpose, Session, Timers, Watch, open_session

MODULE = (Path(__file__).parent / "contract.py").read_text()


def read(function: str, timeout: float = 20.0, **args: Any) -> Read:
    """A read of the contract's host module."""
    return Read(function=f"contract.{function}", args=args, timeout=timeout)


def call(function: str, timeout: float = 20.0, **args: Any) -> Call:
    """A call of the contract's host module."""
    return Call(function=f"contract.{function}", args=args, timeout=timeout)


def change(
    *do: Call,
    undo: tuple[Call, ...] = (),
    commit: tuple[Call, ...] = (),
    key: str = "k",
    job: Literal["", "stops", "starts"] = "",
) -> Change:
    """A change made of these calls."""
    return Change(
        key=key, summary="change a file", do=do, undo=undo, commit=commit, risk="reversible", job=job
    )


@dataclass
class Place:
    """One host, as a suite uses it."""

    host: Host
    folder: Path
    """Seen by the host and the test, writable by both."""
    real: bool = True
    disable: Callable[[str], None] | None = None
    _opened: list[Session] = field(default_factory=list)

    @property
    def root(self) -> Path:
        """What the runner puts before the paths of its own records."""
        return self.folder / "root"

    @property
    def home(self) -> Path:
        """Where the runner's records are, once there are any."""
        return next(path for path in self.root.rglob("runs")).parent

    def path(self, name: str) -> str:
        """A file that changes write to."""
        return str(self.folder / name)

    def lines(self, name: str) -> list[str]:
        """What changes have written to it."""
        path = self.folder / name
        return path.read_text().split() if path.exists() else []

    async def open(
        self,
        run: str = "r1",
        *,
        dry: bool = False,
        timers: Timers | None = None,
        progress: Callable[[str, str], None] | None = None,
        reason: str = "two o'clock in the morning",
        watch: Watch | None = None,
        controller: str = "bastion",
        driver: str = "",
        take_over: bool = False,
    ) -> Session:
        """Open a session for a run; it is closed with the place."""
        purpose = Purpose(
            run=run,
            playbook="mend",
            dry=dry,
            operator="grace",
            controller=controller,
            reason=reason,
            driver=driver,
            take_over=take_over,
        )
        session = await open_session(
            self.host,
            purpose,
            connect_timeout=20.0,
            timers=timers or Timers(reconnect_within=20.0),
            modules={"contract": MODULE},
            root=str(self.root),
            progress=progress,
            watch=watch,
        )
        self._opened.append(session)
        return session

    async def close(self) -> None:
        """Close every session that was opened here."""
        for session in self._opened:
            await session.close()

    @asynccontextmanager
    async def slow_change(self, session: Session, id: str = "r1/s/1/0") -> AsyncIterator[SlowChange]:
        """A change that has begun and waits; it is let go at the end at the latest."""
        slow = SlowChange(self, uuid.uuid4().hex[:8])
        task = asyncio.create_task(session.change(id, "s", slow.change))
        slow.task = task
        try:
            await slow.begun()
            yield slow
        finally:
            slow.let_go()
            await asyncio.gather(task, return_exceptions=True)


@dataclass
class SlowChange:
    """A change that appends a line to `slow` and then waits for a file."""

    place: Place
    token: str
    task: asyncio.Task[Any] | None = None

    @property
    def change(self) -> Change:
        """The change itself."""
        return change(
            call(
                "append_slowly",
                path=self.place.path("slow"),
                until=self.place.path("go-" + self.token),
                pid_file=self.place.path("pid-" + self.token),
            ),
            undo=(call("remove", path=self.place.path("slow")),),
        )

    @property
    def pid(self) -> int:
        """The process that makes the change."""
        return int((self.place.folder / ("pid-" + self.token)).read_text())

    async def begun(self) -> None:
        """Wait until the change has written its line."""
        await eventually(lambda: bool(self.place.lines("slow")))
        await eventually(lambda: bool((self.place.folder / ("pid-" + self.token)).read_text()))

    def let_go(self) -> None:
        """Let it come to its end."""
        (self.place.folder / ("go-" + self.token)).touch()


async def eventually(true: Callable[[], bool], within: float = 15.0) -> None:
    """Wait until something holds; fail where it does not come to hold."""
    until = asyncio.get_running_loop().time() + within
    while not true():
        assert asyncio.get_running_loop().time() < until, "it did not come to hold"
        await asyncio.sleep(0.01)


def processes_with(token: str) -> list[int]:
    """The living processes that have this word in their command line."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if token.encode() in words and state not in "ZX":
                found.append(int(name))
    return found


def token() -> str:
    """A number of seconds that no other process sleeps."""
    return f"9{uuid.uuid4().int % 10**9:09d}.5"


def kill(pid: int) -> None:
    """End one process at once, as a crash would."""
    os.kill(pid, signal.SIGKILL)
