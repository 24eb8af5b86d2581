"""What systemd says of a unit: which process is its main one."""

import subprocess

from fleetfix.remote import api

ANSWER = 5.0  # seconds; it answers within some milliseconds, or is stuck


def main_pid(unit):
    """The main process of a system unit; 0 where none runs, None where systemd does not say."""
    argv = ["systemctl", "show", "-p", "MainPID", unit]
    try:
        ran = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": api.PATH, "LC_ALL": "C"},
            timeout=ANSWER,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    name, _, value = ran.stdout.decode("utf-8", "replace").strip().partition("=")
    return int(value) if ran.returncode == 0 and name == "MainPID" and value.isdigit() else None
