"""torch_loads: torch imports, and it and all it maps are of the CUDA that stays."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import Field

from fleetfix.action import Check, Probe, Verdict
from fleetfix.actions.wheel_parts import CudaMajor, Venv, audit_of, audit_read
from fleetfix.commands import Completed, Read, Seconds, Value
from fleetfix.domain.cure import unsound
from fleetfix.domain.wheels import Audit, Cuda

CUDA_LIBRARY = re.compile(r"/(lib(?:cudart|nvrtc|cublas|cublasLt|nvJitLink)\.so\.(1[23]))")
LOAD_SECONDS = 180.0


class Said(Value):
    """What the environment's own Python said about its torch."""

    torch: str | None = None
    cuda: str | None = None
    error: str | None = None
    libraries: tuple[str, ...] = ()
    cudnn: int | None = None
    """`cudnnGetCudartVersion`, e.g. 12090."""
    nccl: tuple[str, str] | None = None
    """Version of NCCL, and the CUDA it was built for, as its library says."""


class LoadFacts(Value):
    """How the import of torch ended, and the audit of the environment around it."""

    audit: Audit
    late: bool = False
    exit: int | None = 0
    said: Said | None = None
    errors: str = ""
    none: str | None = None
    failure: str | None = None


class TorchLoads(Check[LoadFacts]):
    """Import torch as the environment's owner, ask its libraries, and audit every touched file."""

    kind: ClassVar[str] = "torch_loads"
    modules: ClassVar[tuple[str, ...]] = ("loads", "wheels")

    venv: Venv
    cuda: CudaMajor
    import_timeout: Seconds = Field(default=LOAD_SECONDS, gt=1)

    def probe(self) -> Probe[LoadFacts]:
        """One question to torch, one to the files."""
        load = Read(function="loads.torch", args={"venv": self.venv}, timeout=self.import_timeout)
        said, audited = yield (load, audit_read(self.venv, ()))
        audit, failure = audit_of(audited)
        return _facts(audit, failure, said)

    def judge(self, facts: LoadFacts) -> Verdict:
        """Pass only where torch loads, every library speaks of this CUDA, and every file is right."""
        unknown = facts.none or facts.failure
        if unknown:
            return Verdict(result="unknown", reason=unknown)
        if (
            facts.audit.torch is None
            and facts.audit.env
            and (facts.said is None or facts.said.torch is None)
        ):
            return Verdict(result="skipped", reason=f"there is no torch in {facts.audit.env.path}")
        if facts.late:
            return Verdict(result="unknown", reason=f"import torch took over {self.import_timeout:g} s")
        wrong = _broken(facts) or _other_cuda(facts.said, self.cuda) or unsound(facts.audit, self.cuda)
        if wrong or facts.said is None:
            return Verdict(result="fail", reason=wrong or "torch did not load", final=True)
        return Verdict(
            result="pass", reason=f"torch {facts.said.torch} loads, all of it for CUDA {self.cuda}"
        )


def _facts(audit: Audit, failure: str | None, load: Completed) -> LoadFacts:
    late = load.failure is not None and load.failure.kind in ("timed_out", "hung")
    if late:
        return LoadFacts(audit=audit, failure=failure, late=True)
    if not load.ok or load.value is None:
        return LoadFacts(audit=audit, failure=failure or str(load.failure or "torch was not asked"))
    value = load.value
    if "none" in value:
        return LoadFacts(audit=audit, failure=failure, none=value["none"])
    said = None if value["said"] is None else Said.model_validate(value["said"])
    return LoadFacts(
        audit=audit,
        failure=failure,
        said=said,
        late=value["late"],
        exit=value["exit"],
        errors=value["errors"],
    )


def _broken(facts: LoadFacts) -> str | None:
    if facts.said is not None and facts.said.error is None:
        return None
    if facts.said is not None:
        return f"import torch fails: {facts.said.error}"
    last = facts.errors.splitlines()[-1] if facts.errors else ""
    how = f"signal {-facts.exit}" if facts.exit is not None and facts.exit < 0 else f"exit {facts.exit}"
    return f"import torch ended Python with {how}" + (f": {last}" if last else "")


def _other_cuda(said: Said | None, cuda: Cuda) -> str | None:
    """The first thing loaded that is not of this CUDA. Minor versions need not match."""
    if said is None:
        return None
    if said.cuda is None or said.cuda.partition(".")[0] != cuda:
        return f"torch {said.torch} is built for CUDA {said.cuda or 'none'}, not {cuda}"
    if said.cudnn is not None and str(said.cudnn // 1000) != cuda:
        return f"the cuDNN that torch loads is built for CUDA {said.cudnn // 1000} (cudart {said.cudnn})"
    if said.nccl is not None and said.nccl[1].partition(".")[0] != cuda:
        return f"the NCCL that torch loads is {said.nccl[0]}, built for CUDA {said.nccl[1]}"
    for path in said.libraries:
        found = CUDA_LIBRARY.search(path)
        if found and found[2] != cuda:
            return f"torch maps {found[1]} of CUDA {found[2]}: {path}"
    return None
