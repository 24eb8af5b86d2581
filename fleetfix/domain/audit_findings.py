"""What an audit of an environment found, in lines an operator acts on."""

from __future__ import annotations

from collections.abc import Iterator

from fleetfix.domain.conditions import Condition
from fleetfix.domain.cure import Cure, cure, interrupted
from fleetfix.domain.wheels import CUDAS, Audit, Cuda, classify


def why_not_audited(audit: Audit) -> str | None:
    """Why nothing of an environment was looked at, or None where it was."""
    if audit.env is None:
        return f"{audit.none} ({audit.hint})" if audit.hint else audit.none or "no environment"
    return None if audit.env.kind == "venv" else cure(audit, "12").blocked


def audit_findings(audit: Audit, asked: str = "of-job") -> tuple[Condition, ...]:
    """All of an environment that is not as its packages say; `asked` is how it was named.

    The CUDA that stays is the one that its torch is built for.
    """
    if audit.env is None or why_not_audited(audit):
        return ()
    keep = kept_cuda(audit)
    # Whose it is decides what may be done, not what is found.
    found = cure(audit.model_copy(update={"rights": True}), keep or "12")
    damage = [*(_mixed(audit) if keep is None else _damage(found, keep, asked))]
    if audit.env.beside:
        # The playbook takes the environment of the job, and refuses another as long as there is one.
        # The same words on all hosts, so that they are told as one.
        help = "the job here uses another environment: purge-cu13 mends this one when no job runs"
        damage = [Condition(text=one.text, help=one.help or help) for one in damage]
    notes = found.findings if keep else [f"{one} is left over" for one in audit.leftovers]
    return tuple(
        one.model_copy(update={"text": f"{audit.env.path}: {one.text}"})
        for one in (*damage, *(Condition(text=note) for note in notes))
    )


def kept_cuda(audit: Audit) -> Cuda | None:
    """The CUDA that an environment is for; None where neither torch nor all of its packages say it."""
    said = (audit.torch.cuda or "").partition(".")[0] if audit.torch else ""
    found = _cudas(audit)
    for one in CUDAS:
        if said == one or (not said and found == {one}):
            return one
    return None


def _cudas(audit: Audit) -> set[Cuda]:
    return {found.cuda for dist in audit.dists if (found := classify(dist)) is not None}


def _mixed(audit: Audit) -> Iterator[Condition]:
    if len(_cudas(audit)) > 1:
        text = "packages of CUDA 12 and of CUDA 13, and no torch says which of them stays"
        yield Condition(text=text, playbook="purge-cu13", settings=("cuda=12",))


def _damage(found: Cure, keep: Cuda, asked: str) -> Iterator[Condition]:
    wrong = []
    if found.remove:
        wrong.append(f"{_count(len(found.remove), 'package')} of another CUDA beside CUDA {keep}")
    if found.repair:
        are = "is" if found.files == 1 else "are"
        of = _count(len(found.repair), "package")
        wrong.append(f"{_count(found.files, 'file')} of {of} {are} not as the RECORD says")
    if any(interrupted(dist) for dist in found.remove):
        wrong.append("a removal was interrupted")
    if found.blocked:
        yield Condition(text=", ".join(wrong) or found.blocked, help=found.blocked if wrong else "")
    elif wrong:
        settings = [f"venv={asked}"] if asked != "of-job" else []
        settings += [f"cuda={keep}"] if keep != "12" else []
        yield Condition(text=", ".join(wrong), playbook="purge-cu13", settings=tuple(settings))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
