"""Amounts as people read them: rates, sizes, times, counts."""

from __future__ import annotations

from datetime import datetime

from fleetfix.action import Measurement

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def rate(value: float) -> str:
    """`950`, `12.8K`, `1.24M`: three figures, as trainers print them."""
    for limit, divisor, letter in ((1e6, 1e6, "M"), (1e3, 1e3, "K")):
        if value >= limit * 0.9995:
            return f"{value / divisor:.{2 if value / divisor < 9.995 else 1}f}{letter}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def unit(measured: Measurement) -> str:
    return "tok/s" if measured.scope == "global" else "tok/s/GPU"


def size(count: int) -> str:
    """`512 B`, `1.2 GiB`."""
    value = float(count)
    if value < 1024:
        return f"{count} B"
    for name in _UNITS:
        value /= 1024
        if value < 1023.95 or name == _UNITS[-1]:
            break
    return f"{value:.1f} {name}"


def duration(seconds: float) -> str:
    """`0.3 s`, `42 s`, `4 min 12 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 // 60 else "")


def ago(seconds: float) -> str:
    """How long ago something was, roughly: `42 s`, `12 min`, `3 h 20 min`, `4 d`."""
    whole = round(max(seconds, 0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 48 * 3600:
        return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 // 60 else "")
    return f"{whole // 86400} d"


def count(number: int, noun: str) -> str:
    """`1 host`, `3 hosts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def when(at: float) -> str:
    """The local time of day, with its date: `2030-01-02 03:04:05`."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
