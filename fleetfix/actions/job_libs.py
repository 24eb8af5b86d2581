"""job_libs: the running job maps no library of the other CUDA, and none whose file is gone."""

from __future__ import annotations

from os.path import basename
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, StringConstraints

from fleetfix.action import Check, Probe, Verdict
from fleetfix.commands import Read, Value
from fleetfix.domain.cuda_libraries import cuda_major


def _major(value: object) -> object:
    return str(value).partition(".")[0] if isinstance(value, str | int | float) else value


class MappedLibrary(Value):
    """A CUDA library that the job has mapped; `built` is the CUDA version it names itself."""

    path: str
    built: str | None = None


class LibraryFacts(Value):
    """What the live job has mapped; `pid` is None where no job runs."""

    pid: int | None = None
    complete: bool = True
    loaded: int = 0
    deleted: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    cuda: tuple[MappedLibrary, ...] = ()


class JobLibs(Check[LibraryFacts]):
    """The running job works with the libraries of one CUDA, as they lie on disk now."""

    kind: ClassVar[str] = "job_libs"
    modules: ClassVar[tuple[str, ...]] = ("mapped",)

    of: Literal["job"] = "job"
    cuda: Annotated[str, BeforeValidator(_major), StringConstraints(pattern=r"^[0-9]+$")]
    """The CUDA major that the job is to work with."""

    def probe(self) -> Probe[LibraryFacts]:
        (reply,) = yield (Read(function="mapped.libraries", timeout=120.0),)
        value = dict(reply.answer())
        job = value.pop("job")
        return LibraryFacts(pid=job["pid"], **value) if job else LibraryFacts()

    def judge(self, facts: LibraryFacts) -> Verdict:
        if facts.pid is None:
            return Verdict(result="skipped", reason="no job runs here", final=True)
        wrong = self._wrong(facts)
        if wrong is not None:
            return Verdict(result="fail", reason=f"job {facts.pid} {wrong}", final=True)
        if not facts.complete:
            return Verdict(
                result="unknown", reason=f"what job {facts.pid} maps cannot be read: another user's"
            )
        if not facts.loaded:
            return Verdict(result="unknown", reason=f"job {facts.pid} has loaded no library yet")
        return Verdict(
            result="pass",
            reason=f"job {facts.pid} maps {len(facts.cuda)} CUDA libraries, none of another CUDA",
        )

    def _wrong(self, facts: LibraryFacts) -> str | None:
        """Say what is wrong; a file that is gone stays mapped until the job is started anew."""
        gone = facts.deleted + facts.replaced
        if gone:
            return f"still maps {len(gone)} libraries that are not on disk any more: {_names(gone)}"
        others = [
            library.path
            for library in facts.cuda
            if cuda_major(library.path, library.built) not in (None, int(self.cuda))
        ]
        return f"maps libraries of another CUDA than {self.cuda}: {_names(others)}" if others else None


def _names(paths: list[str] | tuple[str, ...]) -> str:
    names = sorted({basename(path.removesuffix(" (deleted)")) for path in paths})
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
