"""Ansible's connection variables as settings of a host; what has no equal is said, and why."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping

from fleetfix.commands import Json
from fleetfix.inventory_sources.declared import Declared
from fleetfix.scalars import written

_SSH = frozenset({"ssh", "smart", "paramiko", "paramiko_ssh"})
_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f", "", "none"})
_NAMES: dict[str, str] = {
    "ansible_host": "address",
    "ansible_ssh_host": "address",
    "ansible_port": "port",
    "ansible_ssh_port": "port",
    "ansible_user": "user",
    "ansible_ssh_user": "user",
}
_PASSWORDS = re.compile(r"ansible_(?:\w+_)?pass(?:word|phrase)?")
_KEYS = ("ansible_ssh_private_key_file", "ansible_private_key_file")
_PATIENCE = ("ansible_ssh_timeout", "ansible_timeout")
_SSH_ARGS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
_READ = frozenset(
    {
        *_NAMES,
        *_KEYS,
        *_PATIENCE,
        *_SSH_ARGS,
        "ansible_connection",
        "ansible_python_interpreter",
        "ansible_become",
        "ansible_become_method",
        "ansible_become_user",
    }
)
_WITHOUT_MEANING = frozenset(
    {
        "ansible_group_priority",
        "ansible_pipelining",
        "ansible_ssh_pipelining",
        "ansible_remote_tmp",
        "ansible_shell_type",
        "ansible_ssh_retries",
        "ansible_scp_if_ssh",
        "ansible_ssh_transfer_method",
    }
)
"""How Ansible itself works over ssh; here nothing depends on it."""
_IN_SSH_CONFIG = "write it in ~/.ssh/config, which holds here too"
_NO_PASSWORD = "a password: keys and the agent log in, and sudo's comes by $FLEETFIX_BECOME_PASSWORD"
_MULTIPLEXING = frozenset(
    {"controlmaster", "controlpath", "controlpersist", "loglevel", "compression", "batchmode"}
)


class Words:
    """Translates the variables of one host after another."""

    def __init__(self, into: Declared) -> None:
        self.into = into

    def settings(self, host: str, said: Mapping[str, Json]) -> dict[str, Json]:
        """What these variables say of how a host is reached."""
        found: dict[str, Json] = {}
        for key in said:
            if key.startswith("ansible_") and key not in _READ | _WITHOUT_MEANING:
                self.into.remark(key, _NO_PASSWORD if _PASSWORDS.fullmatch(key) else _why_not(key), host)
        for key, ours in _NAMES.items():
            value = said.get(key)
            if value not in (None, "") and ours not in found:
                found[ours] = self._plain(host, key, value)
        self._key(host, said, found)
        self._connection(host, said, found)
        self._become(host, said, found)
        self._python(host, said, found)
        for key in _PATIENCE:
            self._patience(host, key, said.get(key), found)
        for key in _SSH_ARGS:
            for option, value in self._options(host, key, said.get(key)):
                self._option(host, f"{key} {option}", option.lower().lstrip("-"), value, found)
        return {key: value for key, value in found.items() if value is not None}

    def _plain(self, host: str, key: str, value: Json) -> Json:
        if isinstance(value, str) and "{{" in value:
            self.into.refuse(host, f"{key} is a template that only Ansible can fill in: {value}")
            return None
        return int(value) if isinstance(value, str) and key.endswith("port") and value.isdigit() else value

    def _key(self, host: str, said: Mapping[str, Json], found: dict[str, Json]) -> None:
        for key in _KEYS:
            self._file(host, key, written(said.get(key)) or "", "key_file", found)

    def _file(self, host: str, shown: str, text: str, ours: str, found: dict[str, Json]) -> None:
        """A file of this machine, as a setting; said where there is none."""
        path = os.path.abspath(os.path.expanduser(text))
        if text and os.path.isfile(path):
            found[ours] = path
        elif text:
            self.into.remark(shown, f"there is no file {text}", host)

    def _connection(self, host: str, said: Mapping[str, Json], found: dict[str, Json]) -> None:
        kind = (written(said.get("ansible_connection")) or "ssh").rpartition(".")[2]
        if kind == "local":
            found["transport"] = "local"
        elif kind not in _SSH:
            self.into.refuse(host, f"ansible_connection is {kind}: fleetfix reaches hosts by ssh")

    def _become(self, host: str, said: Mapping[str, Json], found: dict[str, Json]) -> None:
        wanted = (written(said.get("ansible_become")) or "").lower()
        if wanted not in _TRUE:
            if wanted not in _FALSE:
                self.into.remark("ansible_become", "neither yes nor no here: nobody becomes root", host)
            return
        method = (written(said.get("ansible_become_method")) or "sudo").rpartition(".")[2]
        user = written(said.get("ansible_become_user")) or "root"
        if method != "sudo":
            self.into.remark("ansible_become", f"by {method}: fleetfix becomes root by sudo only", host)
        elif user != "root":
            # Root in the place of somebody else would be more than was asked for.
            self.into.remark("ansible_become", f"to be {user}: fleetfix becomes root only", host)
        else:
            found["become"] = True

    def _python(self, host: str, said: Mapping[str, Json], found: dict[str, Json]) -> None:
        path = written(said.get("ansible_python_interpreter")) or "auto"
        if path.startswith("/"):
            found["python"] = path
        elif not path.startswith("auto"):
            self.into.remark("ansible_python_interpreter", "no absolute path", host)

    def _patience(self, host: str, shown: str, value: Json, found: dict[str, Json]) -> None:
        """How long the host may take to answer, in whole seconds as ssh and Ansible have them."""
        text = written(value) or ""
        if text.isdecimal() and int(text):
            found.setdefault("connect_timeout", int(text))
        elif text not in ("", "0", "none"):
            self.into.remark(shown, "no number of seconds", host)

    # -- options of ssh -----------------------------------------------------------------------

    def _options(self, host: str, key: str, value: Json) -> Iterator[tuple[str, str]]:
        """Each option of ssh with what it is given."""
        if value in (None, ""):
            return
        if not isinstance(value, str):
            self.into.remark(key, "no text", host)
            return
        try:
            words = shlex.split(value)
        except ValueError:
            self.into.remark(key, "its quotes do not match", host)
            return
        for option, given in _getopt(words):
            if option == "-o":
                name, _, rest = given.replace("=", " ", 1).strip().partition(" ")
                yield name, rest.strip()
            else:
                yield option, given

    def _option(self, host: str, shown: str, option: str, value: str, found: dict[str, Json]) -> None:
        if option in ("j", "proxyjump"):
            found["via"] = None if value.lower() == "none" else value
        elif option == "proxycommand" and (jump := _jump_of(value)):
            found["via"] = jump
        elif option in ("proxycommand", "hostname") and value.lower() != "none":
            # Without it another machine that has the same name or address here would be reached.
            self.into.refuse(host, f"{shown} {value}: this way is taken from ~/.ssh/config only")
        elif option in ("p", "port") and value.isdigit():
            found.setdefault("port", int(value))
        elif option in ("l", "user"):
            found.setdefault("user", value)
        elif option == "connecttimeout":
            self._patience(host, shown, value, found)
        elif option == "f":
            self._file(host, shown, value, "ssh_config", found)
        elif option in ("i", "identityfile"):
            self._file(host, shown, value, "key_file", found)
        elif option not in _MULTIPLEXING and option not in ("c", "q"):
            self.into.remark(shown, _IN_SSH_CONFIG, host)


def _why_not(key: str) -> str:
    return _IN_SSH_CONFIG if key.startswith("ansible_ssh_") else "it has no equal here"


_WITH_VALUE = "BbcDEeFIiJLlmOopQRSWw"
"""Options of ssh that are given something."""


def _getopt(words: list[str]) -> Iterator[tuple[str, str]]:
    """Options as ssh reads them: `-J x`, `-Jx`, `-qC`; a word by itself has an empty option."""
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("-") or word == "-":
            yield "", word
            continue
        for index, letter in enumerate(word[1:], 2):
            if letter in _WITH_VALUE:
                given = word[index:]
                if not given and place < len(words):
                    given = words[place]
                    place += 1
                yield f"-{letter}", given
                break
            yield f"-{letter}", ""


def _jump_of(command: str) -> str | None:
    """The jump host of `ssh -W %h:%p [-p PORT] [-l USER] [USER@]HOST`; None where more is said."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    if not words or os.path.basename(words[0]) != "ssh":
        return None
    host, user, port, through = "", "", "", False
    for option, given in _getopt(words[1:]):
        match option:
            case "":
                if host:
                    return None
                host = given
            case "-W":
                through = given == "%h:%p"
            case "-p":
                port = given
            case "-l":
                user = given
            case "-q" | "-C" | "-T" | "-A" | "-x":
                pass
            case _:
                return None
    if not through or not host:
        return None
    return (f"{user}@" if user and "@" not in host else "") + host + (f":{port}" if port else "")
