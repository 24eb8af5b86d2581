"""Audit an environment when nobody else wants the machine: what it holds is read and hashed, never run."""

from fleetfix.remote import wheels
from fleetfix.remote.api import be_idle, read


@read
def environment(ctx, venv):
    """`wheels.audit` with the lowest priority for processor and disk; also of what no job uses."""
    be_idle()
    return wheels.audit(ctx, venv, to_look=True)
