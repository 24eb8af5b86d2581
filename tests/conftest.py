"""No test reads the files of whoever runs it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from fleetfix import secret_values

LONG = (
    "test_wheels_mend.py",
    "test_undo_law.py",
    "test_asyncssh.py",
    "test_fabric.py",
    "test_wheels_plan.py",
)
"""Files outside the lab's whose tests take a minute or more together."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz",
        type=int,
        metavar="N",
        help="Draw N new examples for each property, not the same few as ever.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Have properties drawn alike in every run, unless more are asked for.

    A shell has what it starts in the background ignore ^C, and all that starts from there too: a suite
    that runs so tests signals all the same."""
    number = config.getoption("fuzz")
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    settings.register_profile(
        "fleetfix",
        deadline=None,
        database=None,
        derandomize=number is None,
        max_examples=number or 100,
        suppress_health_check=slow,
    )
    settings.load_profile("fleetfix")
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests on a lab go first: they take longest, and wait more than they compute, so that whoever
    shares the machine with them has its processors meanwhile. Then the other long files: a worker that
    begins one of them last keeps all waiting."""

    def turn(item: pytest.Item) -> int:
        return 0 if "fleet" in item.path.parts else 1 if item.path.name in LONG else 2

    items.sort(key=turn)


@pytest.fixture(autouse=True)
def _a_home_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test an empty home: no inventory, journal, ssh key or agent of the user's."""
    home = tmp_path_factory.mktemp("home", numbered=True)
    monkeypatch.setenv("HOME", str(home))
    for name, folder in {
        "CONFIG": ".config",
        "STATE": ".local/state",
        "CACHE": ".cache",
        "DATA": ".local/share",
    }.items():
        monkeypatch.setenv(f"XDG_{name}_HOME", str(home / folder))
    for name in ("FLEETFIX_INVENTORY", "SSH_AUTH_SOCK", "CLUSTERSHELL_CFGDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_secrets_of_another_test() -> Iterator[None]:
    yield
    secret_values.forget()


@pytest.fixture
def write(tmp_path: Path):
    """Write a file below the test's folder, and return its path."""

    def write_file(name: str, text: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file
