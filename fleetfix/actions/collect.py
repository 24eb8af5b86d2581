"""collect: what a host says of itself now is kept on the controller; the host stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fleetfix.action import Check, Exhibit, Probe, Verdict
from fleetfix.domain import evidence
from fleetfix.domain.evidence import Level

Exhibits = tuple[Exhibit, ...]


class Collect(Check[Exhibits]):
    """Keep here what a host says of itself: GPUs, kernel, processes, disks, packages, the job's log.

    Nothing on the host is changed, and secrets are masked there. What does not answer is said, and the
    rest is kept.
    """

    kind: ClassVar[str] = "collect"
    modules: ClassVar[tuple[str, ...]] = ("evidence",)
    surveyed: ClassVar[bool] = False

    what: Level = "full"
    """light: what is kept before an irreversible step. full: also PCI, network, the boot before."""

    def probe(self) -> Probe[Exhibits]:
        return (yield from evidence.probe(self.what))

    def judge(self, facts: Exhibits) -> Verdict:
        gone = evidence.missing(facts)
        kept = [one for one in facts if one.text]
        if not kept:
            why = gone[0] if gone else "the host shows nothing"
            return Verdict(result="fail", reason=f"nothing could be had: {why}")
        return Verdict(result="pass", reason=_said(kept, gone), final=True, exhibits=facts)


def _said(kept: Sequence[Exhibit], gone: Sequence[str]) -> str:
    size = sum(len(one.text.encode()) for one in kept)
    said = f"{len(kept)} files, {size / 1024:.0f} KiB"
    return f"{said}; not answered: {'; '.join(gone)}" if gone else said
