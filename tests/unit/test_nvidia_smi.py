"""What nvidia-smi prints, in the formats of real captures: rows, odd cells, errors, panels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfix.domain import nvidia_smi
from fleetfix.domain.nvidia_smi import App, Gpu, PanelRow, parse_apps, parse_gpus, parse_panel, trouble

MIB = 1 << 20
UUID = "GPU-1b2c3d4e-0000-1111-2222-333344445555"
HEADER = "index, uuid, memory.used [MiB], memory.total [MiB], mig.mode.current\n"
APPS = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n"
LONG = "timestamp, gpu_name, gpu_bus_id, gpu_serial, gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n"
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the "
    "latest NVIDIA driver is installed and running.\n"
)
LOST = (
    "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.{}Reboot the system to "
    "recover this GPU\n"
)
ODD = [
    "[N/A]",
    "N/A",
    "[Not Supported]",
    "[Insufficient Permissions]",
    "[Unknown Error]",
    "[Not Found]",
    "[Requested functionality has been deprecated]",
    "[GPU requires reset]",
]


def test_gpus_are_read_with_their_memory_in_bytes() -> None:
    text = HEADER + f"0, {UUID}, 0 MiB, 143771 MiB, Disabled\n1, {UUID}x, 55 MiB, 81559 MiB, Enabled\n"
    assert parse_gpus(text) == (
        Gpu(index=0, uuid=UUID, used=0, total=143771 * MIB, mig=False),
        Gpu(index=1, uuid=UUID + "x", used=55 * MIB, total=81559 * MIB, mig=True),
    )


@pytest.mark.parametrize("cell", ODD)
def test_an_odd_cell_is_unknown_and_never_zero(cell: str) -> None:
    gpus = parse_gpus(HEADER + f"0, {UUID}, {cell}, 46068 MiB, {cell}\n")
    assert gpus is not None
    assert (gpus[0].used, gpus[0].mig) == (None, None)
    apps = parse_apps(APPS + f"{UUID}, {cell}, {cell}, {cell}\n")
    assert apps is not None
    assert (apps[0].pid, apps[0].used) == (None, None)


@pytest.mark.parametrize(
    "text", ["", "\n", "No devices were found\n", "0, GPU-1, 5 MiB\n", HEADER, HEADER + "0, x\n"]
)
def test_what_is_no_table_of_gpus_is_none(text: str) -> None:
    assert parse_gpus(text) is None


@pytest.mark.parametrize("header", [APPS, LONG])
def test_a_header_alone_lists_nothing(header: str) -> None:
    assert parse_apps(header) == ()


def test_no_header_is_no_answer() -> None:
    assert parse_apps("") is None
    assert parse_apps("Failed to initialize NVML: Unknown Error\n") is None


def test_long_and_short_queries_are_read_by_their_header() -> None:
    row = f"{UUID}, 10291, /opt/x/python, 2566 MiB\n"
    app = App(uuid=UUID, pid=10291, name="/opt/x/python", used=2566 * MIB)
    assert parse_apps(APPS + row) == (app,)
    before = "2026/07/03 22:11:09.916, NVIDIA H200, 00000000:83:00.0, [N/A], "
    assert parse_apps(LONG + before + row) == (app,)


@given(
    st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=60),
    st.integers(1, 1 << 22),
)
def test_any_process_name_leaves_the_other_columns_right(name: str, pid: int) -> None:
    apps = parse_apps(APPS + f"{UUID}, {pid}, {name}, 7484 MiB\n")
    assert apps == (App(uuid=UUID, pid=pid, name=name.strip(), used=7484 * MIB),)


@given(st.text())
def test_nothing_breaks_a_parser(text: str) -> None:
    parse_gpus(text)
    parse_apps(HEADER + text)
    parse_panel(text)
    parse_panel("| Processes:" + text)
    trouble(0, text)


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (None, "", "hung"),
        (127, "nvidia-smi: not found\n", "absent"),
        (9, NO_DRIVER, "no_driver"),
        (
            18,
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.54\n",
            "mismatch",
        ),
        (1, "Failed to initialize NVML: Driver/library version mismatch\n", "mismatch"),
        (18, "", "mismatch"),
        (255, "Failed to initialize NVML: Unknown Error\n", "unknown"),
        (6, "No devices were found\n", "no_devices"),
        (0, "No devices were found\n", "no_devices"),
        (15, LOST.format("  "), "lost"),
        (15, LOST.format(" "), "lost"),
        (0, "Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error\n", "lost"),
        (0, "Unable to determine the device handle for GPU0000:17:00.0: Unknown Error\n", "lost"),
        (4, "", "permission"),
        (12, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n", "no_library"),
        (16, "", "reset"),
        (3, "", "unknown"),
        (-11, "", "unknown"),
    ],
)
def test_errors_are_told_by_exit_code_and_text(code: int | None, text: str, kind: str) -> None:
    found = trouble(code, text)
    assert found is not None
    assert found.kind == kind
    assert "\n" not in found.message


def test_a_good_answer_is_no_trouble() -> None:
    assert trouble(0, HEADER + f"0, {UUID}, 0 MiB, 143771 MiB, Disabled\n") is None


RULE = "+" + "-" * 89 + "+\n"
HEAD = (
    RULE
    + "| Processes:                                                                              |\n"
    + "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n"
    + "|        ID   ID                                                               Usage      |\n"
    + "|" + "=" * 89 + "|\n"
)  # fmt: skip


def panel(*rows: str) -> str:
    return "| NVIDIA-SMI 590.48.01    Driver Version: 590.48.01 |\n" + HEAD + "".join(rows) + RULE


def test_processes_of_the_panel_are_read() -> None:
    found = parse_panel(
        panel(
            "|    0   N/A  N/A           10291      C   /opt/tools/burn                        2566MiB |\n",
            "|    0    2    0            21198      C   ./burn --all                           7484MiB |\n",
            "|    1   N/A  N/A            1696      G   /usr/bin/gnome-shell                    176MiB |\n",
            "|    1   N/A  N/A            3001    M+C   python                                  176MiB |\n",
            "|    1   N/A  N/A            3002    C+G   ...s, 8 more                            N/A    |\n",
            "|    0      4321      C   python3                                     123MiB |\n",
        )
    )
    assert found is not None
    assert [(row.gpu, row.pid, row.kind) for row in found.rows] == [
        (0, 10291, "C"),
        (0, 21198, "C"),
        (1, 1696, "G"),
        (1, 3001, "M+C"),
        (1, 3002, "C+G"),
        (0, 4321, "C"),
    ]
    assert found.rows[1] == PanelRow(gpu=0, pid=21198, kind="C", name="./burn --all")
    assert not found.empty


def test_no_running_processes_is_not_an_empty_panel() -> None:
    none = "|  No running processes found                                                             |\n"
    assert parse_panel(panel(none)) == nvidia_smi.Panel(rows=(), empty=False)
    assert parse_panel(panel()) == nvidia_smi.Panel(rows=(), empty=True)


def test_a_text_without_a_panel_has_none() -> None:
    assert parse_panel("") is None
    assert parse_panel(HEADER) is None


GOOD = HEADER + f"0, {UUID}, 0 MiB, 143771 MiB, Disabled\n"


@pytest.mark.parametrize(
    ("code", "text", "found", "cuda", "words"),
    [
        (0, GOOD, True, 0, None),
        (0, GOOD, False, None, None),
        (0, GOOD, True, 803, "different versions (803)"),
        (0, GOOD, True, 802, "nvidia-fabricmanager"),
        (0, GOOD, True, 12345, "error (12345)"),
        (0, GOOD, True, None, "no answer"),
        (
            18,
            "Failed to initialize NVML: Driver/library version mismatch\n",
            False,
            None,
            "different versions",
        ),
        (None, "", False, None, "does not answer"),
        (0, "", False, None, "does not list a GPU"),
        (127, "", True, 0, "not there"),
    ],
)
def test_whether_something_new_could_start(
    code: int | None, text: str, found: bool, cuda: int | None, words: str | None
) -> None:
    why = nvidia_smi.why_nothing_can_start(code, text, found, cuda)
    assert why is None if words is None else words in (why or "")
