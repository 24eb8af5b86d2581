"""What is said where many hosts were out of reach at once: it may be this machine that is."""

from __future__ import annotations

from fleetfix.views.amounts import count

AT_LEAST = 3
"""Fewer hosts than this say nothing about a network."""


def own_network(out_of_reach: int, hosts: int) -> str:
    """A line where at least half of the hosts, and some, were not reached or were lost; else nothing."""
    if out_of_reach < AT_LEAST or 2 * out_of_reach < hosts:
        return ""
    return (
        f"{out_of_reach} of {count(hosts, 'host')} out of reach: look at this machine's own network first"
    )
