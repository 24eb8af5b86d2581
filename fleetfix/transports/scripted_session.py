"""A session on a scripted host: the promises of `Session`, kept without a host."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from fleetfix.commands import Call, Change, Completed, Ended, Execute, Json, Read
from fleetfix.errors import Failure, FailureKind, HostError
from fleetfix.sealed import names_in
from fleetfix.session import (
    Claim,
    Feed,
    HostInfo,
    Opening,
    Past,
    Purpose,
    Take,
    at_work_elsewhere,
    held_by,
    unfinished_hint,
)

if TYPE_CHECKING:
    from fleetfix.transports.scripted import Entry, Loss, ScriptedHost

T = TypeVar("T")


class ScriptedSession:
    """One session; the log, the lease and the claims are the host's and outlast it."""

    def __init__(self, host: ScriptedHost, name: str, purpose: Purpose, opening: Opening) -> None:
        self._host = host
        self._name = name
        self._purpose = purpose
        self._progress = opening.progress
        self._watch = opening.watch
        self._epoch: int | None = None
        self._lost = False
        self._cut_at = 0.0
        self._lost_by: FailureKind = "unreachable"
        self._ending = False
        self._asked: set[asyncio.Task[Any]] = set()
        self._in_hand: set[asyncio.Task[Any]] = set()
        """Those of them that wait for what the host does now."""

    @property
    def info(self) -> HostInfo:
        host = self._host
        return HostInfo(
            python="3.11.0",
            uid=0,
            user="root",
            hostname=self._name,
            boot_id=f"boot-{host.boots}",
            machine_id=host.machine or f"machine-{self._name}",
            now=host.clock,
            home="/var/lib/fleetfix",
            disabled=host.disabled,
            claims=tuple(host.claims_told_to(self._purpose.run)),
            lease=host.current_lease,
        )

    async def read(self, step: str, reads: Sequence[Read]) -> tuple[Completed, ...]:
        asked = {one.model_dump_json(): one for one in reads}
        answers = await self._within(self._read_all(step, list(asked.values())))
        known = dict(zip(asked, answers, strict=True))
        return tuple(known[one.model_dump_json()] for one in reads)

    async def acquire(self) -> None:
        await self._within(self._acquire())

    async def await_lease(self, seconds: float) -> None:
        await self._within(self._await_lease(seconds))

    async def change(self, id: str, step: str, change: Change) -> Completed:
        return await self._within(self._change(id, step, change))

    async def undo(self, id: str) -> Completed:
        return await self._within(self._undo(id))

    async def waiting(self, id: str) -> None:
        del id  # no function of a scripted host waits for the controller

    async def tell(self, id: str, token: str, word: Json) -> None:
        del id, token, word

    async def past(self) -> tuple[Past, ...]:
        await self._whole_line()
        self._check_line()
        return tuple(_past(one) for one in self._host.changes_of(self._purpose.run))

    async def lacking(self) -> tuple[str, ...]:
        await self._whole_line()
        self._check_line()
        left = [one for one in self._host.changes_of(self._purpose.run) if one.state != "undone"]
        gone = self._host.gone
        return tuple(f"{one.change.summary}: {gone[one.step]}" for one in left if one.step in gone)

    async def note(self, name: str, value: Json) -> None:
        await self._whole_line()
        self._check_line()
        self._check_wet()
        self._own()
        self._host.notes[f"{self._purpose.run}/{name}"] = value

    async def recall(self, name: str) -> Json:
        await self._whole_line()
        self._check_line()
        return self._host.notes.get(f"{self._purpose.run}/{name}")

    async def end(self, outcome: str, *, keep_claim: bool, commit: bool, anchor: str = "") -> None:
        await self._within(self._end(outcome, keep_claim, commit, anchor))

    async def execute(self, command: Execute, take: Take, feed: Feed | None = None) -> Ended:
        return await self._within(self._run_command(command, take, feed))

    async def _run_command(self, command: Execute, take: Take, feed: Feed | None) -> Ended:
        host = self._host
        if self._purpose.dry:
            self._fail("blocked", "this session is a dry run: the host runs no command")
        self._check_enabled()
        if host.program is None:
            self._fail("bug", "no program for commands")
        host.commands.append(command)
        try:
            async with asyncio.timeout(command.timeout):
                return Ended(exit=await host.program(command, feed(0, 1 << 30) if feed else b"", take))
        except TimeoutError:
            why = "it ran past its deadline and was ended"
            return Ended(failure=Failure(kind="timed_out", message=why))
        except asyncio.CancelledError:
            if not self._ending:
                raise
            return Ended(failure=Failure(kind="cancelled", message="it was ended as asked"))

    async def commit(self) -> None:
        await self._within(self._commit())

    async def release(self) -> None:
        await self._within(self._release_all())

    async def cancel(self) -> tuple[str, ...]:
        self._check_line()
        self._ending = True
        asked = [task for task in self._asked if task not in self._in_hand]
        for task in asked:
            task.cancel()
        for entry in self._host.changes_of(self._purpose.run):
            if entry.running is not None:
                entry.ended = True
                entry.running.cancel()
                await asyncio.gather(entry.running, return_exceptions=True)
        await asyncio.gather(*asked, return_exceptions=True)
        self._ending = False
        return ()

    async def close(self) -> None:
        self._host.forget(self)
        self._lost = True
        self._release()

    def cut(self) -> None:
        """Lose the line, and try to come back: for as long as whoever watches has patience."""
        self._cut_at = asyncio.get_running_loop().time()
        if self._watch is not None:
            message = f"{self._name}: the connection was lost"
            self._watch.dropped(Failure(kind="unreachable", message=message))

    def splice(self) -> None:
        """Be back."""
        if self._watch is not None:
            away = asyncio.get_running_loop().time() - self._cut_at
            self._watch.returned(self.info, away, restarted=False)

    async def _whole_line(self) -> None:
        """Wait while the line is cut."""
        while not self._host.line.is_set():
            self._check_line()
            if self._watch is not None and self._watch.patience() == "none":
                self._fail("unreachable", f"{self._name}: the connection was lost")
            await asyncio.sleep(0.001)

    def lose(self, kind: FailureKind = "unreachable") -> None:
        """Break the connection: who waits for an answer gets this failure, what runs there runs on."""
        self._lost_by = kind
        self._host.forget(self)
        self._lost = True
        self._release()
        for task in list(self._asked):
            task.cancel()

    def _release(self) -> None:
        if self._host.lease is not None and self._host.lease.epoch == self._epoch:
            self._host.lease = None

    # -- asking -----------------------------------------------------------------------------------

    async def _within(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            await self._whole_line()
            self._check_line()
        except BaseException:
            work.close()
            raise
        task = asyncio.ensure_future(work)
        self._asked.add(task)
        try:
            answer = await task
            await self._whole_line()
            return answer
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if waiting is not None and waiting.cancelling():
                raise
            self._check_line()
            self._fail("cancelled", f"{self._name}: it was not begun")
        finally:
            self._asked.discard(task)

    async def _read_all(self, step: str, reads: Sequence[Read]) -> list[Completed]:
        answers = []
        for one in reads:
            try:
                answer = _cancelled() if self._ending else await self._host.execute("read", one, step)
            except asyncio.CancelledError:
                if not self._ending:
                    raise
                answer = _cancelled()
            answers.append(answer)
        return answers

    async def _await_lease(self, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            lease = self._host.current_lease
            if lease is None or lease.run == self._purpose.run:
                return
            await asyncio.sleep(0.001)

    async def _acquire(self) -> None:
        self._check_wet()
        self._check_enabled()
        self._own()

    def _own(self, *, beside_claims: bool = False) -> None:
        """Hold lease and claim, and be sure that no newer session does."""
        host, run = self._host, self._purpose.run
        if self._epoch is not None:
            if host.lease is None or host.lease.epoch != self._epoch:
                message = "a newer session has taken over on this host"
                self._fail("lease_held", message, "let that one finish")
            return
        if host.current_lease is not None and host.current_lease.run != run:
            raise HostError(held_by(host.current_lease))
        if (failure := at_work_elsewhere(self.info, self._purpose)) is not None:
            raise HostError(failure)
        for claim in host.claims.values():
            if claim.run != run and not beside_claims:
                raise _unfinished(claim)
        self._epoch = host.grant(self._purpose).epoch
        host.claim(self._purpose)

    # -- changes ----------------------------------------------------------------------------------

    async def _change(self, id: str, step: str, change: Change) -> Completed:
        self._check_wet()
        host = self._host
        host.changes_asked += 1
        self._lose_if(host.loss("before"))
        killed, after = host.loss("during"), host.loss("after")
        known = host.log.get(id)
        if known is not None:
            return await self._again(known, change)
        self._check_enabled()
        self._own()
        entry = host.begin(id, step, change)
        completed = await self._run(entry, self._do(entry, killed))
        self._lose_if(killed or after)
        return completed

    async def _again(self, entry: Entry, change: Change) -> Completed:
        if entry.change != change:
            self._fail("bug", f"the id {entry.id} was used for another change: nothing was done")
        await self._settled(entry)
        return entry.completed or Completed(exit=None, in_doubt=True)

    async def _settled(self, entry: Entry) -> None:
        if entry.running is not None:
            await asyncio.wait([entry.running])

    async def _run(self, entry: Entry, work: Coroutine[Any, Any, Completed]) -> Completed:
        """Have the host do it; where this session is lost, the host goes on."""
        entry.task = asyncio.ensure_future(work)
        asking = asyncio.current_task()
        assert asking is not None
        self._in_hand.add(asking)
        try:
            return await asyncio.shield(entry.task)
        finally:
            self._in_hand.discard(asking)

    async def _do(self, entry: Entry, killed: Loss | None) -> Completed:
        async with self._host.turn:
            todo = entry.change.do if killed is None else entry.change.do[: killed.calls]
            completed = await self._execute(entry, "do", todo)
        if killed is not None:
            entry.state = "in_doubt"
            return Completed(exit=None, in_doubt=True)
        entry.completed = completed
        entry.state = "done" if completed.ok else "failed"
        return completed

    async def _undo(self, id: str) -> Completed:
        self._check_wet()
        entry = self._host.log.get(id)
        if entry is None:
            self._fail("bug", f"nothing is recorded on this host under {id}")
        await self._settled(entry)
        if entry.state == "undone" and entry.undone is not None:
            return entry.undone
        if f"{self._purpose.run}/committed" in self._host.notes:
            message = f"run {self._purpose.run} was committed here: nothing is kept to undo it with"
            self._fail("blocked", message)
        self._own()
        return await self._run(entry, self._undoing(entry))

    async def _undoing(self, entry: Entry) -> Completed:
        async with self._host.turn:
            completed = await self._execute(entry, "undo", entry.change.undo)
        entry.undone = completed
        entry.state = "undone" if completed.ok else "undo_failed"
        return completed

    async def _execute(
        self, entry: Entry, way: Literal["do", "undo", "commit"], todo: Sequence[Call]
    ) -> Completed:
        """Run calls up to the first that fails."""
        completed = Completed()
        for call in todo:
            try:
                completed = await self._host.execute(way, call, entry.step, entry.id)
            except asyncio.CancelledError:
                if not entry.ended:
                    raise
                entry.ended = False
                return _cancelled()
            if not completed.ok:
                break
        return completed

    async def _end(self, outcome: str, keep_claim: bool, commit: bool, anchor: str) -> None:
        host, run = self._host, self._purpose.run
        self._check_wet()
        host.ended.append((run, outcome))
        if not host.has_been_written_to_by(run):
            return
        self._own()
        for entry in host.changes_of(run):
            if commit and entry.state == "done" and not entry.committed:
                await self._execute(entry, "commit", entry.change.commit)
                entry.committed = True
        host.anchors.append((run, anchor))
        if not keep_claim:
            host.unclaim(run)
        self._release()
        self._epoch = None

    async def _commit(self) -> None:
        host, run = self._host, self._purpose.run
        self._check_wet()
        if not host.has_been_written_to_by(run):
            return
        self._own()
        open_ = host.unsettled(run)
        if open_:
            message = f"run {run} is not done here: {'; '.join(open_)}"
            self._fail("unfinished", message, unfinished_hint(run))
        host.notes[f"{run}/committed"] = {**self._purpose.model_dump(exclude={"dry"}), "at": host.clock}
        for entry in host.changes_of(run):
            if entry.state == "done" and not entry.committed:
                await self._execute(entry, "commit", entry.change.commit)
                entry.committed = True
        host.ended.append((run, "committed"))
        host.unclaim(run)
        self._release()
        self._epoch = None

    async def _release_all(self) -> None:
        host, run = self._host, self._purpose.run
        self._check_wet()
        if not host.has_been_written_to_by(run):
            return
        self._own(beside_claims=True)
        host.ended.append((run, "released"))
        host.unclaim(run)
        self._release()
        self._epoch = None

    # -- what is refused ----------------------------------------------------------------------------

    def _fail(self, kind: FailureKind, message: str, hint: str = "") -> NoReturn:
        raise HostError(Failure(kind=kind, message=message, hint=hint))

    def _lose_if(self, loss: Loss | None) -> None:
        if loss is not None:
            if not loss.back:
                self._host.refuse("unreachable", "no route to host")
            self._host.forget(self)
            self._lost = True
            self._release()
            self._check_line()

    def _check_line(self) -> None:
        if self._lost:
            self._fail(self._lost_by, f"{self._name}: the connection was lost")

    def _check_wet(self) -> None:
        if self._purpose.dry:
            self._fail("blocked", "this session is a dry run: the host changes nothing")

    def _check_enabled(self) -> None:
        if self._host.disabled is not None:
            message = f"fleetfix is switched off on this host: {self._host.disabled}"
            self._fail("disabled", message, "remove /etc/fleetfix/DISABLED on that host")


def _past(entry: Entry) -> Past:
    return Past(
        id=entry.id,
        step=entry.step,
        summary=entry.change.summary,
        risk=entry.change.risk,
        key=entry.change.key,
        job=entry.change.job,
        state="begun" if entry.running is not None else entry.state,
        at=entry.at,
        completed=entry.completed,
        secrets=tuple(sorted({name for call in entry.change.undo for name in names_in(call.args)})),
    )


def _cancelled() -> Completed:
    return Completed(exit=None, failure=Failure(kind="cancelled", message="it was ended as asked"))


def _unfinished(claim: Claim) -> HostError:
    message = (
        f"run {claim.run} of {claim.operator} on {claim.controller} left work open here"
        f" since {claim.since}: {'; '.join(claim.open[:5])}"
    )
    return HostError(Failure(kind="unfinished", message=message, hint=unfinished_hint(claim.run)))
