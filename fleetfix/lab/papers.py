"""The files that a client needs of a lab: key, ssh_config, known_hosts, inventory."""

from __future__ import annotations

import json
import os

import asyncssh

from fleetfix.hostset import HostSet
from fleetfix.lab.record import HostPlan, LabPlan, Paths


def write_client_key(paths: Paths) -> str:
    """Make the key that opens every host of the lab, and return its public line."""
    key = asyncssh.generate_private_key("ssh-ed25519", comment="fleetfix-lab")
    with open(os.open(paths.client_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.export_private_key())
    public = key.export_public_key().decode()
    paths.client_key.with_suffix(".pub").write_text(public)
    return public


def write_host_key(paths: Paths, name: str, key: asyncssh.SSHKey) -> None:
    """Write the public key of a host, for known_hosts."""
    (paths.host(name) / "host_key.pub").write_bytes(key.export_public_key())


def write_all(paths: Paths, plan: LabPlan, port: int) -> None:
    """Write what clients read, when the port and the host keys are known."""
    paths.known_hosts.write_text("".join(_known(paths, host, port) for host in plan.hosts))
    paths.ssh_config.write_text(_ssh_config(paths, plan, port))
    paths.inventory.write_text(_inventory(plan, port))


def _known(paths: Paths, host: HostPlan, port: int) -> str:
    kind, key = (paths.host(host.name) / "host_key.pub").read_text().split()[:2]
    return f"[{host.address}]:{port},[{host.name}]:{port} {kind} {key}\n"


def _ssh_config(paths: Paths, plan: LabPlan, port: int) -> str:
    own = "".join(
        f"Host {host.name} {host.address}\n  HostName {host.address}\n" for host in plan.hosts
    )  # fmt: skip
    addresses = " ".join(f"{host.name} {host.address}" for host in plan.hosts)
    return f"""# Hosts of a fleetfix lab: ssh -F {paths.ssh_config} {plan.hosts[0].name}
{own}Host {addresses}
  Port {port}
  User root
  IdentityFile "{paths.client_key}"
  IdentitiesOnly yes
  IdentityAgent none
  ProxyJump none
  UserKnownHostsFile "{paths.known_hosts}"
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  LogLevel ERROR
"""


def _inventory(plan: LabPlan, port: int) -> str:
    names = HostSet(host.name for host in plan.hosts)
    lines = ["# Hosts of a fleetfix lab.", "ssh_config: ./ssh_config", "groups:", "  gpu:"]
    lines += [f"    hosts: {json.dumps(str(names))}", "hosts:"]
    for host in plan.hosts:
        lines += [f"  {host.name}:", f"    address: {json.dumps(host.address)}", f"    port: {port}"]
        lines += ["    user: root", f"    python: {plan.python}"]
    lines += ["vars:", *(f"  {name}: {json.dumps(value)}" for name, value in plan.vars.items())]
    return "\n".join(lines) + "\n"
