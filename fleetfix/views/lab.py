"""The hosts of the lab, one a line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from fleetfix.views.amounts import rate


class LabHost(Protocol):
    """What is shown of a host."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def up(self) -> bool: ...
    @property
    def contaminated(self) -> bool: ...
    @property
    def faults(self) -> tuple[str, ...]: ...
    @property
    def job(self) -> bool: ...
    @property
    def tok_s(self) -> float | None: ...
    @property
    def spans(self) -> str: ...
    @property
    def shared(self) -> tuple[str, ...]: ...


def status_text(hosts: Iterable[LabHost]) -> str:
    """`gpu01  127.77.0.1:40022  up  contaminated  12.8K tok/s  faults: vanish`."""
    return "\n".join(_line(one) for one in hosts)


def _line(host: LabHost) -> str:
    words = [
        host.name,
        f"{host.address}:{host.port}",
        "up" if host.up else "DOWN",
        "contaminated" if host.contaminated else "no CUDA 13",
        _speed(host),
        *([f"job spans {host.spans}"] if host.spans else []),
        *([f"shares {', '.join(host.shared)}"] if host.shared else []),
    ]
    return "  ".join(words) + (f"  faults: {', '.join(host.faults)}" if host.faults else "")


def _speed(host: LabHost) -> str:
    if not host.job:
        return "no job"
    return f"{rate(host.tok_s)} tok/s" if host.tok_s is not None else "no tok/s yet"
