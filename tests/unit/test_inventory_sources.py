"""Inventories of other tools: what is taken from each, what is said not to be, and what is refused.

Ansible's answer in tests/data is a real one of ansible-core 2.19.14 for the INI file beside it. The node
list of Slurm has the forms that `scontrol` 17 to 24 prints. `ansible-inventory` and `scontrol` on the PATH
are stand-ins that print them; ClusterShell's `nodeset` is the real one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetfix.errors import FleetfixError, InventoryError
from fleetfix.hostset import HostSet
from fleetfix.inventory import Inventory
from fleetfix.inventory_sources import ansible, program, slurm

DATA = Path(__file__).parent.parent / "data"
ANSWER = DATA / "ansible-inventory-2.19.14.json"
Write = Callable[[str, str], Path]


@pytest.fixture
def tool(write: Write, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put a stand-in for a program on the PATH."""

    def put(name: str, script: str) -> Path:
        path = runnable(write, f"bin/{name}", f"#!/bin/sh\n{script}\n")
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
        return path

    return put


@pytest.fixture
def no_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def runnable(write: Write, name: str, text: str) -> Path:
    path = write(name, text)
    path.parent.chmod(0o755)
    path.chmod(0o755)
    return path


def answering(write: Write, answer: object, name: str = "hosts.py") -> Path:
    """A program of the file system that answers --list so."""
    return runnable(write, name, f"#!/bin/sh\n[ \"$1\" = --list ] && cat <<'E'\n{json.dumps(answer)}\nE\n")


def remarks(inventory: Inventory) -> dict[str, str]:
    return {remark.what: str(remark.hosts) for remark in inventory.remarks}


def refusal(spec: str | Path, cwd: Path | None = None, **env: str) -> FleetfixError:
    with pytest.raises(FleetfixError) as caught:
        Inventory.load(str(spec), cwd=cwd, env={**os.environ, **env})
    return caught.value


# -- Ansible ------------------------------------------------------------------------------------------


def test_what_ansible_says_of_a_host_becomes_how_it_is_reached() -> None:
    host = Inventory.load(str(ANSWER)).hosts["gpu03"]
    assert host.model_dump(exclude={"name", "transport", "ssh_config", "key_file", "connect_timeout"}) == {
        "address": "10.0.0.3",
        "port": 2222,
        "user": "ops",
        "via": "ops@bastion.example",
        "become": True,
        "python": "/usr/bin/python3.11",
        "vars": {
            "cuda": 12,
            "min_tok_s": 19000,
            "venv": "/opt/train/venv",
            "log": "{{ venv }}/log",
        },
    }


def test_groups_of_ansible_hold_what_their_children_hold() -> None:
    inventory = Inventory.load(str(ANSWER))
    groups = {name: str(hosts) for name, hosts in inventory.groups.items()}
    assert groups == {
        "all": "bastion.example,gpu[01-03],localhost,win01",
        "ungrouped": "bastion.example",
        "gpus": "gpu[01-03]",
        "train": "gpu[01-03]",
        "canary": "gpu01",
        "windows": "win01",
        "controller": "localhost",
    }
    assert inventory.hosts["localhost"].transport == "local"


def test_what_is_not_taken_is_said_and_no_secret_is_kept() -> None:
    inventory = Inventory.load(str(ANSWER))
    assert remarks(inventory) == {
        "ansible_password": "win01",
        "api_token": "gpu[01-03]",
        "log": "gpu[01-03]",
        "ansible_ssh_common_args StrictHostKeyChecking": "gpu[01-03]",
    }
    assert not any(secret in repr(inventory) for secret in ("hunter2", "s3cret"))


def test_a_host_that_cannot_be_reached_as_wanted_is_never_left_out_in_silence() -> None:
    inventory = Inventory.load(str(ANSWER))
    with pytest.raises(InventoryError, match="win01: ansible_connection is winrm") as caught:
        inventory.select("*")
    assert caught.value.hint == "leave out by -x 'win01'"
    assert len(inventory.select("*", "win01")) == 5


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ansible_ssh_common_args": "-J b1,ops@b2:2200"}, {"via": "b1,ops@b2:2200"}),
        ({"ansible_ssh_common_args": "-oProxyJump=b"}, {"via": "b"}),
        ({"ansible_ssh_extra_args": "-o 'ProxyJump none'"}, {"via": None}),
        ({"ansible_ssh_common_args": '-o ProxyCommand="ssh -W %h:%p -q u@b"'}, {"via": "u@b"}),
        ({"ansible_ssh_common_args": "-o ProxyCommand='ssh -p 2200 -l u b -W %h:%p'"}, {"via": "u@b:2200"}),
        ({"ansible_ssh_args": "-C -o ControlMaster=auto -o ControlPersist=60s -p 23 -l x"}, {"port": 23}),
        ({"ansible_port": "2222", "ansible_ssh_user": "old"}, {"port": 2222, "user": "old"}),
        ({"ansible_timeout": "40", "ansible_ssh_args": "-o ConnectTimeout=5"}, {"connect_timeout": 40}),
        ({"ansible_ssh_timeout": 0, "ansible_ssh_args": "-o ConnectTimeout=5"}, {"connect_timeout": 5}),
        ({"ansible_become": True, "ansible_become_method": "ansible.builtin.sudo"}, {"become": True}),
        ({"ansible_become": "no"}, {"become": False}),
        ({"ansible_python_interpreter": "auto_silent"}, {"python": None}),
        ({"ansible_connection": "ansible.builtin.ssh"}, {"transport": "asyncssh"}),
    ],
)
def test_a_word_of_ansible_is_understood_without_remark(
    write: Write, variables: dict[str, object], expected: dict[str, object]
) -> None:
    answer = {"g": {"hosts": ["a"]}, "_meta": {"hostvars": {"a": variables}}}
    inventory = Inventory.load(str(write("i.json", json.dumps(answer))))
    assert inventory.remarks == ()
    assert {key: getattr(inventory.hosts["a"], key) for key in expected} == expected


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"ansible_become_pass": "x"}, "ansible_become_pass"),
        ({"ansible_become_password": "x"}, "ansible_become_password"),
        ({"ansible_ssh_pass": "x"}, "ansible_ssh_pass"),
        ({"ansible_ssh_private_key_file": "/no/key"}, "ansible_ssh_private_key_file"),
        ({"ansible_ssh_extra_args": "-i /no/key"}, "ansible_ssh_extra_args -i"),
        ({"ansible_ssh_extra_args": "-F /no/config"}, "ansible_ssh_extra_args -F"),
        ({"ansible_become": True, "ansible_become_user": "postgres"}, "ansible_become"),
        ({"ansible_become": True, "ansible_become_method": "doas"}, "ansible_become"),
        ({"ansible_python_interpreter": "python3"}, "ansible_python_interpreter"),
        ({"ansible_python_interpreter": "/opt/my python"}, "python"),
        ({"ansible_become": "{{ root_here }}"}, "ansible_become"),
        ({"ansible_timeout": "{{ patience }}"}, "ansible_timeout"),
        ({"ansible_ssh_common_args": ["-J", "b"]}, "ansible_ssh_common_args"),
        ({"ansible_ssh_common_args": "-o 'x"}, "ansible_ssh_common_args"),
        ({"key": {"__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256\n6162"}}, "key"),
        ({"hf_token": "x"}, "hf_token"),
    ],
)
def test_a_word_without_an_equal_is_said_and_makes_nobody_root(
    write: Write, variables: dict[str, object], what: str
) -> None:
    answer = {"g": {"hosts": ["a"]}, "_meta": {"hostvars": {"a": variables}}}
    inventory = Inventory.load(str(write("i.json", json.dumps(answer))))
    assert remarks(inventory) == {what: "a"}
    (host,) = inventory.select("*")
    assert (host.become, host.via, host.python, host.vars) == (False, None, None, {})


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        (
            {"ansible_host": "{{ ip }}"},
            "ansible_host is a template that only Ansible can fill in: {{ ip }}",
        ),
        ({"ansible_host": "-oProxyCommand=x"}, "address: wanted an address"),
        ({"ansible_port": "ssh"}, "port: wanted a whole number"),
        ({"ansible_user": "x; rm"}, "user: wanted a user name"),
        ({"ansible_connection": "community.docker.docker"}, "ansible_connection is docker"),
        (
            {"ansible_ssh_common_args": "-o 'ProxyCommand nc -x p %h %p'"},
            "ansible_ssh_common_args ProxyCommand nc -x p %h %p: this way is taken from ~/.ssh/config only",
        ),
        ({"ansible_ssh_extra_args": "-o HostName=10.0.0.9"}, "ansible_ssh_extra_args HostName 10.0.0.9"),
        ({"ansible_ssh_common_args": "-J '{{ bastion }}'"}, "via: wanted an address"),
    ],
)
def test_a_host_is_refused_rather_than_reached_at_the_wrong_place(
    write: Write, variables: dict[str, object], why: str
) -> None:
    answer = {"g": {"hosts": ["a", "b"]}, "_meta": {"hostvars": {"a": variables}}}
    inventory = Inventory.load(str(write("i.json", json.dumps(answer))))
    assert inventory.refused["a"].startswith(why)
    assert list(inventory.hosts) == ["b"]


def test_keys_and_configurations_of_this_machine_are_taken(write: Write) -> None:
    key, config = write("key", ""), write("config", "")
    answer = {
        "g": {"hosts": ["a", "b"], "vars": {"ansible_ssh_common_args": f"-F {config}"}},
        "_meta": {
            "hostvars": {
                "a": {"ansible_ssh_private_key_file": str(key)},
                "b": {"ansible_ssh_extra_args": f"-o IdentityFile={key}"},
            }
        },
    }
    inventory = Inventory.load(str(write("i.json", json.dumps(answer))))
    assert inventory.remarks == ()
    assert {(host.key_file, host.ssh_config) for host in inventory.hosts.values()} == {
        (str(key), str(config))
    }


def test_variables_of_groups_win_as_in_ansible(write: Write) -> None:
    """Outer groups first, of equal depth by priority and name; the host's own last."""
    answer = {
        "outer": {"children": ["b", "a"], "vars": {"v": "outer", "w": "outer"}},
        "a": {"hosts": ["x", "y"], "vars": {"v": "a", "p": "a", "ansible_group_priority": 10}},
        "b": {"hosts": ["x", "y"], "vars": {"v": "b", "p": "b", "q": "b"}},
        "all": {"vars": {"v": "all", "u": "all"}},
        "_meta": {"hostvars": {"y": {"v": "y"}}},
    }
    inventory = Inventory.load(str(write("i.json", json.dumps(answer))))
    assert inventory.hosts["x"].vars == {"u": "all", "v": "a", "w": "outer", "p": "a", "q": "b"}
    assert inventory.hosts["y"].vars["v"] == "y"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("[]", "is not a JSON object of groups"),
        ("{", "is not JSON"),
        ('{"g": 3, "_meta": {}}', "group 'g' is neither an object nor a list of hosts"),
        ('{"g": {"hosts": [3]}}', "hosts of group 'g' are not a list of names"),
        ('{"g": {"hosts": ["a"], "vars": [1]}}', "vars of group 'g' are not an object"),
        ('{"g": {"hosts": ["a b"]}, "_meta": {"hostvars": {}}}', "'a b' cannot name a host"),
        ('{"_meta": {"hostvars": {"a": 3}}}', "_meta.hostvars is not an object of objects"),
        (
            '{"a": {"children": ["b"]}, "b": {"children": ["a"]}, "_meta": {"hostvars": {}}}',
            "is inside itself",
        ),
        ('{"_meta": {"hostvars": {}}}', "no host is declared"),
    ],
)
def test_an_answer_that_is_none_is_one_line(write: Write, answer: str, message: str) -> None:
    path = runnable(write, "hosts.py", f"#!/bin/sh\nprintf '%s' '{answer}'\n")
    error = refusal(path)
    assert message in error.message
    assert "\n" not in error.message


def test_a_program_is_asked_once_and_an_old_one_for_each_host(write: Write, tmp_path: Path) -> None:
    new = answering(write, {"g": ["a", "b"], "_meta": {"hostvars": {"a": {"ansible_host": "10.0.0.1"}}}})
    assert Inventory.load(str(new)).hosts["a"].address == "10.0.0.1"
    old = runnable(
        write,
        "old.py",
        f"""#!/bin/sh
echo "$@" >> {tmp_path}/calls
case $1 in --list) echo '{{"g": ["a", "b"]}}';; --host) [ $2 = b ] || echo '{{"ansible_port": 23}}';; esac
""",
    )
    inventory = Inventory.load(str(old))
    assert [inventory.hosts[name].port for name in "ab"] == [23, None]
    assert sorted((tmp_path / "calls").read_text().splitlines()) == ["--host a", "--host b", "--list"]


def test_a_program_is_not_called_for_ten_thousand_hosts(write: Write) -> None:
    hosts = [f"gpu{number}" for number in range(ansible.MOST_CALLS + 1)]
    assert refusal(answering(write, {"g": hosts})).hint == "have its --list print _meta with hostvars"


def test_where_one_call_fails_the_others_are_not_waited_for(write: Write, tmp_path: Path) -> None:
    path = runnable(
        write,
        "old.py",
        f"""#!/bin/sh
case $2 in
    "") echo '{{"g": ["a", "b"]}}';;
    a) while [ ! -s {tmp_path}/pid ]; do sleep 0.01; done; exit 3;;
    b) echo $$ > {tmp_path}/pid; exec sleep 600;;
esac
""",
    )
    assert "--host a ended with exit 3" in refusal(path).message
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_program_is_run_only_where_it_is_named(write: Write, tmp_path: Path) -> None:
    path = answering(write, {"g": ["a"], "_meta": {"hostvars": {}}}, "inventory")
    with pytest.raises(InventoryError, match=r"\./inventory is a program, which is read only where"):
        Inventory.load(env={"HOME": "/nowhere"}, cwd=tmp_path)
    env = {"HOME": "/nowhere", "FLEETFIX_INVENTORY": str(path)}
    assert list(Inventory.load(env=env, cwd=tmp_path).hosts) == ["a"]


def test_a_program_that_others_may_write_is_not_run(write: Write) -> None:
    path = answering(write, {"g": ["a"], "_meta": {"hostvars": {}}})
    path.chmod(0o777)
    assert "is not run: others may write to it" in refusal(path).message
    path.chmod(0o755)
    path.parent.chmod(0o777)
    assert "others may write to it" in refusal(path).message
    path.parent.chmod(0o1777)
    assert list(Inventory.load(str(path)).hosts) == ["a"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_program_of_somebody_else_is_not_run(write: Write) -> None:
    path = answering(write, {"g": ["a"], "_meta": {"hostvars": {}}})
    os.chown(path, 65534, 65534)
    error = refusal(path)
    assert "is not run: it belongs to" in error.message
    assert error.hint.startswith("save what it, or ansible-inventory, prints")


def test_a_file_of_data_is_read_though_it_is_executable(write: Write) -> None:
    assert list(Inventory.load(str(runnable(write, "i.yaml", "hosts: a"))).hosts) == ["a"]
    assert list(Inventory.load(str(runnable(write, "inventory", "hosts: a"))).hosts) == ["a"]


def test_ansible_itself_reads_its_own_files(
    write: Write, tool: Callable[[str, str], Path], tmp_path: Path
) -> None:
    tool("ansible-inventory", f'echo "$@" > {tmp_path}/asked; cat {ANSWER}')
    ini = (DATA / "ansible-hosts.ini").read_text()
    (tmp_path / "inv/group_vars").mkdir(parents=True)
    for path in (
        write("hosts", ini),
        write("hosts.yml", "all:\n  children:\n    train: {hosts: {gpu01: {}}}"),
        write("other.yml", "train:\n  hosts: {gpu01: }"),
        write("aws.yaml", "plugin: amazon.aws.aws_ec2"),
        tmp_path / "inv",
    ):
        assert "gpu02" in Inventory.load(str(path)).hosts
        assert (tmp_path / "asked").read_text() == f"-i {path} --list\n"
    assert "gpu02" in Inventory.load("ansible:hosts", cwd=tmp_path).hosts


def test_a_folder_of_ansible_that_others_may_write_is_not_read(
    write: Write, tool: Callable[[str, str], Path], tmp_path: Path
) -> None:
    tool("ansible-inventory", f"cat {ANSWER}")
    path = runnable(write, "inv/cloud.py", "#!/bin/sh\n")
    (tmp_path / "inv/group_vars").mkdir()
    path.chmod(0o777)
    assert "inv/cloud.py is not run: others may write to it" in refusal("inv", tmp_path).message
    path.chmod(0o755)
    assert len(Inventory.load("inv", cwd=tmp_path).hosts) == 5
    (tmp_path / "inv").chmod(0o777)
    assert "inv is not run: others may write to it" in refusal("inv", tmp_path).message


@pytest.mark.usefixtures("no_tool")
def test_without_ansible_it_is_said_how_to_save_its_answer(write: Write) -> None:
    path = write("hosts", (DATA / "ansible-hosts.ini").read_text())
    error = refusal(path)
    assert error.message == f"{path} is an inventory of Ansible, and ansible-inventory is not on the PATH"
    assert error.hint.endswith(f"ansible-inventory -i {path} --list > hosts.json; then -i hosts.json")


def test_what_ansible_complains_of_is_told(write: Write, tool: Callable[[str, str], Path]) -> None:
    path = write("hosts.ini", "[train]\ngpu01\n")
    tool("ansible-inventory", "echo '[ERROR]: Completely failed to parse' >&2; echo ' more' >&2; exit 1")
    assert refusal(path).message.endswith("ended with exit 1: [ERROR]: Completely failed to parse")
    why = "Failed to parse inventory: Expected key=value host variable assignment, got: foo"
    tool("ansible-inventory", f"echo '{why}' >&2; echo '[ERROR]: Completely failed to parse' >&2; exit 1")
    assert refusal(path).message.endswith(f"ended with exit 1: {why}")
    tool("ansible-inventory", f"echo '[WARNING]: Invalid characters' >&2; cat {ANSWER}")
    assert ("ansible-inventory warns", "Invalid characters") in {
        (remark.what, remark.why) for remark in Inventory.load(str(path)).remarks
    }


def test_our_own_files_are_not_taken_for_those_of_ansible(write: Write) -> None:
    for text in ("hosts: [gpu01]", "hosts:\n  [gpu01]\n", "groups: {train: {hosts: gpu01}}"):
        assert list(Inventory.load(str(write("inventory", text))).hosts) == ["gpu01"]


# -- programs ---------------------------------------------------------------------------------------


def gone(pid: int) -> bool:
    """Whether a process has ended, within a bounded wait."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_a_program_that_hangs_is_ended_with_what_it_started(write: Write, tmp_path: Path) -> None:
    path = runnable(write, "slow", f"#!/bin/sh\nsleep 600 & echo $! > {tmp_path}/pid; wait\n")
    with pytest.raises(InventoryError, match=r"slow --list has not ended within 0\.5 s"):
        Inventory.load(str(path), deadline=0.5)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_program_that_never_stops_printing_is_ended(write: Write) -> None:
    path = runnable(write, "loud", "#!/bin/sh\nexec yes\n")
    with pytest.raises(InventoryError, match="printed more than 1 MiB"):
        program.answer([str(path)], shown="loud", most=1024**2)


def test_what_a_program_leaves_behind_does_not_hold_the_answer_up(write: Write, tmp_path: Path) -> None:
    path = runnable(write, "agent", f"#!/bin/sh\nsleep 600 & echo $! > {tmp_path}/pid; echo '{{}}'\n")
    try:
        assert program.answer([str(path)], deadline=60)[0] == "{}\n"
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 9)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh\necho 'no cloud today' >&2; exit 3\n", "--list ended with exit 3: no cloud today"),
        ("#!/bin/sh\nexit 3\n", "--list ended with exit 3 and said nothing"),
        ("#!/bin/sh\nkill -9 $$\n", "--list was ended by SIGKILL"),
        ("#!/no/such/interpreter\n", "cannot be run: no such file or directory"),
        ("#!/bin/sh\nprintf '\\377'\n", "printed what is not UTF-8 text"),
    ],
)
def test_why_a_program_did_not_answer_is_one_line(write: Write, script: str, message: str) -> None:
    assert message in refusal(runnable(write, "hosts.py", script)).message


# -- Slurm ------------------------------------------------------------------------------------------


@pytest.fixture
def slurm_nodes(tool: Callable[[str, str], Path]) -> None:
    tool("scontrol", f"[ \"$*\" = '--all --oneliner show node' ] && cat {DATA}/scontrol-show-node.txt")


@pytest.mark.usefixtures("slurm_nodes")
def test_nodes_of_slurm_are_hosts_in_groups_of_partition_feature_and_state() -> None:
    inventory = Inventory.load("slurm:")
    assert {name: str(hosts) for name, hosts in inventory.groups.items()} == {
        "cloud": "cloud-1",
        "debug": "gpu01",
        "gpu": "gpu[01-04]",
        "feature:c5n.4xlarge": "cloud-1",
        "feature:dynamic": "cloud-1",
        "feature:h100": "gpu[01-03]",
        "feature:ib": "gpu[01-02]",
        "state:alloc": "gpu[01,03]",
        "state:down": "gpu04",
        "state:drain": "gpu[03-04]",
        "state:idle": "gpu02",
        "state:off": "cloud-1",
    }
    gpu01, gpu03 = inventory.hosts["gpu01"], inventory.hosts["gpu03"]
    assert (gpu01.address, inventory.hosts["gpu04"].address) == ("10.5.0.1", "gpu04")
    assert gpu01.vars == {"slurm_state": "allocated", "slurm_gres": "gpu:h100:8(S:0-1)"}
    # What somebody wrote as a reason is not read as a field.
    assert gpu03.vars["slurm_state"] == "mixed+drain"
    assert str(gpu03.vars["slurm_reason"]).startswith("Prolog error: xid 13")
    assert inventory.hosts["gpu04"].vars == {
        "slurm_state": "down+not_responding+drain",
        "slurm_reason": "Not responding [slurm@2026-01-29T08:00:07]",
    }
    assert [host.name for host in inventory.select("@gpu!@state:drain&@feature:ib")] == ["gpu01", "gpu02"]


@pytest.mark.usefixtures("slurm_nodes")
def test_one_partition_of_slurm() -> None:
    inventory = Inventory.load("slurm:debug,cloud")
    assert (list(inventory.hosts), str(inventory.groups["feature:h100"])) == (["cloud-1", "gpu01"], "gpu01")
    assert "gpu" in inventory.groups
    error = refusal("slurm:gpus")
    assert (error.message, error.hint) == ("Slurm has no partition 'gpus'", "did you mean gpu?")


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        ("IDLE", ["idle"]),
        ("idle*", ["down"]),
        ("IDLE~", ["off"]),
        ("idle#", []),
        ("idle$", []),
        ("alloc#", ["alloc"]),
        ("mix-", ["alloc"]),
        ("down~", ["off", "down"]),
        ("drng", []),
        ("DRAINED*", ["down", "drain"]),
        ("IDLE+DRAIN+MAINTENANCE+RESERVED", ["drain"]),
        ("IDLE+RESERVED", []),
        ("IDLE+PLANNED", ["idle"]),
        ("IDLE+DRAIN+INVALID_REG", ["down", "drain"]),
        ("", []),
    ],
)
def test_a_state_of_slurm_is_in_the_groups_that_matter(state: str, groups: list[str]) -> None:
    found = slurm.declared(f"NodeName=a Gres=(null) State={state} Weight=1 Partitions=p")
    assert sorted(name for name in found.groups if name != "p") == sorted(
        f"state:{name}" for name in groups
    )


def test_slurm_that_does_not_answer(tool: Callable[[str, str], Path]) -> None:
    tool("scontrol", "echo 'slurm_load_node error: Unable to contact slurm controller' >&2; exit 1")
    assert "Unable to contact slurm controller" in refusal("slurm:").message
    tool("scontrol", "echo 'No nodes in the system'")
    assert refusal("slurm:").message == "slurm:: no host is declared"


@pytest.mark.usefixtures("no_tool")
def test_without_slurm_it_is_said() -> None:
    assert refusal("slurm:").message == "-i slurm: asks scontrol, and it is not on the PATH"


# -- ClusterShell -----------------------------------------------------------------------------------


@pytest.fixture
def cluster(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of ClusterShell: upcalls over a file, and YAML that names groups of both."""
    write(
        "cs/groups.conf",
        """[Main]
default: local
autodir: $CFGDIR/groups.d
[local]
map: sed -n 's/^$GROUP:\\(.*\\)/\\1/p' $CFGDIR/static
all: sed -n 's/^all:\\(.*\\)/\\1/p' $CFGDIR/static
list: sed -n 's/^\\([0-9A-Za-z_-]*\\):.*/\\1/p' $CFGDIR/static
[silent]
map: echo x1
""",
    )
    write("cs/static", "all: gpu[01-16],login1\ntrain: gpu[01-08]\nnine: gpu[9-12]\n")
    write("cs/groups.d/roles.yaml", "roles:\n  storage: 'nas[1-2]'\n  both: '@storage,@local:train'\n")
    monkeypatch.setenv("CLUSTERSHELL_CFGDIR", str(tmp_path / "cs"))
    return tmp_path / "cs"


@pytest.mark.usefixtures("cluster")
def test_groups_of_clustershell_and_every_host_in_them() -> None:
    inventory = Inventory.load("clustershell:")
    assert {name: str(hosts) for name, hosts in inventory.groups.items()} == {
        "all": "gpu[01-16],login1",
        "nine": "gpu[9-12]",
        "train": "gpu[01-08]",
        "roles:both": "gpu[01-08],nas[1-2]",
        "roles:storage": "nas[1-2]",
    }
    assert str(inventory.chosen("*")) == "gpu[9,01-16],login1,nas[1-2]"
    assert [host.name for host in inventory.select("@roles:storage")] == ["nas1", "nas2"]
    assert remarks(inventory) == {"ClusterShell warns": ""}


def test_one_source_of_clustershell(cluster: Path) -> None:
    inventory = Inventory.load("clustershell:roles")
    assert list(inventory.groups) == ["both", "storage"]
    assert len(inventory.hosts) == 10
    assert refusal("clustershell:role").hint == "did you mean roles?"
    (cluster / "static").write_text("all: gpu[1-3]\nbad: gpu[1\n")
    assert 'missing bracket: "gpu[1"' in refusal("clustershell:").message


def test_the_example_that_clustershell_brings_is_not_a_fleet() -> None:
    if not Path("/etc/clustershell/groups.conf").exists():
        assert "there is no groups.conf" in refusal("clustershell:").message


# -- ssh's own configuration, and lists of names --------------------------------------------------------


def test_hosts_that_ssh_knows_by_name(write: Write, tmp_path: Path) -> None:
    home = Path(os.environ["HOME"])
    (home / ".ssh/conf.d").mkdir(parents=True)
    (home / ".ssh/conf.d/a.conf").write_text("Host=nas1\n  HostName 10.0.0.9\n")
    (home / ".ssh/config").write_text(
        'Include conf.d/*.conf none/*\n# Host no\nhost gpu01 "gpu02"  # both\n  User ops\n'
        "Host *.example !gpu03 gpu?\nMatch host x\n  Port 3\nHost bastion\n"
    )
    inventory = Inventory.load("ssh-config:")
    assert list(inventory.hosts) == ["bastion", "gpu01", "gpu02", "nas1"]
    assert inventory.remarks == ()
    # How each is reached stays with ssh's configuration, which the connection reads.
    assert inventory.hosts["nas1"].model_dump(exclude_defaults=True) == {"name": "nas1", "address": "nas1"}
    other = write("fleet.conf", "Host gpu07\n")
    (host,) = Inventory.load("ssh-config:fleet.conf", cwd=tmp_path).select("*")
    assert (host.name, host.ssh_config) == ("gpu07", str(other))


def test_what_is_wrong_with_an_ssh_configuration(write: Write, tmp_path: Path) -> None:
    assert "there is no ssh configuration" in refusal("ssh-config:").message
    write("c", 'Host "gpu01\n')
    assert refusal("ssh-config:c", tmp_path).message.endswith("c:1: the quotes do not match")
    write("c", f"Include {tmp_path}/c\n")
    assert "Include goes deeper than 16 levels" in refusal("ssh-config:c", tmp_path).message


def test_a_list_of_names_is_an_inventory(write: Write) -> None:
    inventory = Inventory.load(
        str(write("hosts.txt", "# ours\ngpu[01-02]\nops@gpu07:2222  # the odd one\n\n"))
    )
    assert list(inventory.hosts) == ["gpu01", "gpu02", "gpu07"]
    assert (inventory.hosts["gpu07"].user, inventory.hosts["gpu07"].port) == ("ops", 2222)
    assert "hosts.txt:1: gpu[02-01]: the range 02-01 runs backwards" in str(
        refusal(write("hosts.txt", "gpu[02-01]"))
    )


def test_a_list_of_names_has_what_a_pattern_has_and_addresses(write: Write) -> None:
    lines = (
        "gpu[01:03]",
        "n[1-3,7]-r[1-2]:23",
        "[2001:db8::7]",
        "[2001:db8::8]:22",
        "me@2001:db8::9",
        "[fe80::1%eth0]",
    )
    inventory = Inventory.load(str(write("hosts", "\n".join(lines))))
    assert str(HostSet(name for name in inventory.hosts if name[0] in "gn")) == "gpu[01-03],n[1-3,7]-r[1-2]"
    assert {
        name: (host.address, host.port, host.user) for name, host in inventory.hosts.items() if ":" in name
    } == {
        "2001:db8::7": ("2001:db8::7", None, None),
        "2001:db8::8": ("2001:db8::8", 22, None),
        "2001:db8::9": ("2001:db8::9", None, "me"),
        "fe80::1%eth0": ("fe80::1%eth0", None, None),
    }
    (alone,) = Inventory.load(str(write("one", "[2001:db8::7]\n"))).hosts
    assert alone == "2001:db8::7"


@pytest.mark.parametrize("line", ["gpu02 rack=7", "gpu 02", "gpu02{1..3}"])
def test_a_line_that_is_no_name_is_shown(write: Write, line: str) -> None:
    error = refusal(write("hosts", f"# mine\ngpu01\n{line}\n"))
    assert f"hosts:3: '{line}' is no host, and the file is no YAML of ours" in str(error)


# -- the grammar ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("slrum:", "did you mean slurm:?"),
        ("slurm", "a colon belongs to it: -i slurm:"),
        ("foo:bar", "before a colon stands one of ansible, slurm, clustershell, ssh-config"),
        ("ansible:", "ansible:PATH, a file or folder of Ansible"),
        ("ansible:nowhere/hosts", "looked for in"),
        ("gpu[01-03]", "to name hosts here, end with a comma: -i 'gpu[01-03],'"),
    ],
)
def test_a_source_that_there_is_not(spec: str, hint: str, tmp_path: Path) -> None:
    error = refusal(spec, tmp_path)
    assert error.message == f"there is no inventory {spec!r}"
    assert error.hint.startswith(hint)


def test_five_thousand_hosts_of_ansible_are_loaded_and_selected_in_a_second(write: Write) -> None:
    hosts = [f"gpu{number:04d}" for number in range(5000)]
    hostvars = {
        host: {"ansible_host": f"10.0.{n // 250}.{n % 250}", "rack": n // 100}
        for n, host in enumerate(hosts)
    }
    answer = {
        **{
            f"r{n}": {"hosts": hosts[n * 100 : n * 100 + 100], "vars": {"venv": f"/v{n}"}}
            for n in range(50)
        },
        "_meta": {"hostvars": hostvars},
    }
    path = write("big.json", json.dumps(answer))
    start = time.process_time()
    assert len(Inventory.load(str(path)).select("*")) == 5000
    assert time.process_time() - start < 3.0  # a second on a quiet machine; three on a shared one
