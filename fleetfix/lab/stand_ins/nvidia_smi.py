"""A stand-in nvidia-smi: two H200s by files in /dev, their holders by /proc, faults by request."""

import glob
import os
import signal
import sys
import time

DRIVER, CUDA, NAME, TOTAL = "590.48.01", "13.1", "NVIDIA H200", 143771
FAULTS = "/run/lab/faults/"
PERSISTENCE_OFF = "/run/lab/persistence_off_"
BUSY = 68518  # MiB that a holder has on its GPU


def main():
    if os.path.exists(FAULTS + "nvidia_smi_hangs"):
        hang()
    if os.path.exists(FAULTS + "driver_mismatch"):
        print("Failed to initialize NVML: Driver/library version mismatch")
        print("NVML library version: 590.48")
        return 18
    if os.path.exists(FAULTS + "driver_gone"):
        print(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
            "Make sure that the latest NVIDIA driver is installed and running.\n"
        )
        return 9
    return answer(sys.argv[1:])


def hang():
    """As on a dead GPU, though a SIGKILL ends this one."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(3600)


def answer(words):
    options = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not equals and name in ("-i", "--id", "--format", "-pm", "--persistence-mode") and rest:
            value = rest.pop(0)
        options[name] = value
    wanted = options.get("-i", options.get("--id"))
    gpus = [gpu for gpu in find_gpus() if wanted is None or chosen(gpu, wanted.split(","))]
    if not gpus:
        print("No devices were found")
        return 6
    for option in ("-pm", "--persistence-mode"):
        if option in options:
            return persist(options[option], gpus)
    if "-L" in options or "--list-gpus" in options:
        for gpu in gpus:
            print("GPU %d: %s (UUID: %s)" % (gpu["index"], NAME, gpu["uuid"]))
        return 0
    if "--help-query-gpu" in options:
        print('List of valid properties to query for the switch "--query-gpu=":\n')
        for field in GPU_FIELDS:
            print('"%s"\n    As nvidia-smi has it.\n' % field)
        return 0
    for option in ("--query-gpu", "--query-compute-apps"):
        if option in options:
            return query(option, options, gpus)
    if "-q" in options or "--query" in options:
        tell_all(gpus)
    elif "topo" in options:
        topology(gpus)
    else:
        table(gpus)
    return 0


def chosen(gpu, wanted):
    return str(gpu["index"]) in wanted or gpu["uuid"] in wanted or gpu["bus"] in wanted


def persist(wanted, gpus):
    """Switch the persistence mode of GPUs; it lasts until the host is restarted."""
    names = {"0": "Disabled", "DISABLED": "Disabled", "1": "Enabled", "ENABLED": "Enabled"}
    mode = names.get(wanted.upper())
    if mode is None:
        print("Invalid persistence mode: '%s'. Persistence mode can be 0/1." % wanted)
        return 2
    for gpu in gpus:
        if persistence(gpu) == mode:
            print("Persistence mode is already %s for GPU %s." % (mode, gpu["bus"]))
            continue
        mark = PERSISTENCE_OFF + str(gpu["index"])
        try:
            os.unlink(mark) if mode == "Enabled" else open(mark, "w").close()
        except PermissionError:
            print("Unable to set persistence mode for GPU %s: Insufficient Permissions" % gpu["bus"])
            print("Terminating early due to previous errors.")
            return 4
        print("%s persistence mode for GPU %s." % (mode, gpu["bus"]))
    print("All done.")
    return 0


# -- what is there -----------------------------------------------------------------------------------


def find_gpus():
    with open("/etc/machine-id") as file:
        machine = file.read().strip()
    gpus = []
    for path in sorted(glob.glob("/dev/nvidia[0-9]*")):
        index = int(path[len("/dev/nvidia") :])
        words = (machine[:8], machine[8:12], machine[12:16], machine[16:20], machine[20:30])
        uuid = "GPU-%s-%s-%s-%s-%s%02x" % (words + (index,))
        bus = "00000000:%02X:00.0" % (0x19 + 0x10 * index)
        gpus.append({"index": index, "uuid": uuid, "bus": bus, "holders": holders(path)})
    return gpus


def holders(path):
    """[(pid, name)] of the processes that have the device open."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and holds(name, path):
            found.append((int(name), command(name)))
    return sorted(found)


def holds(pid, path):
    try:
        for fd in os.listdir("/proc/%s/fd" % pid):
            try:
                if os.readlink("/proc/%s/fd/%s" % (pid, fd)) == path:
                    return True
            except OSError:
                continue
    except OSError:
        return False
    return False


def command(pid):
    try:
        with open("/proc/%s/cmdline" % pid, "rb") as file:
            return file.read().split(b"\0")[0].decode("utf-8", "replace") or "[Not Found]"
    except OSError:
        return "[Not Found]"


def persistence(gpu):
    return "Disabled" if os.path.exists(PERSISTENCE_OFF + str(gpu["index"])) else "Enabled"


def memory(gpu):
    # Left by `break --fault gpu_memory_stays`: memory that no process owns any more.
    stays = 31000 if os.path.exists(FAULTS + "gpu_memory_stays") else 0
    return max(BUSY * len(gpu["holders"]), stays)


# -- answers -----------------------------------------------------------------------------------------


def query(option, options, gpus):
    fields = [field.strip() for field in options[option].split(",")]
    form = options.get("--format", "").split(",")
    if "csv" not in form:
        print('"--format=" switch is missing. Please specify one.')
        return 2
    known = GPU_FIELDS if option == "--query-gpu" else APP_FIELDS
    for field in fields:
        if field not in known:
            print('Field "%s" is not a valid field to query.\n' % field)
            return 2
    if "noheader" not in form:
        print(", ".join(header(field, known, form) for field in fields))
    rows = gpus if option == "--query-gpu" else [(gpu, one) for gpu in gpus for one in gpu["holders"]]
    for row in rows:
        print(", ".join(cell(field, known, row, form) for field in fields))
    return 0


def header(field, known, form):
    unit = known[field][1]
    return field + (" [%s]" % unit if unit and "nounits" not in form else "")


def cell(field, known, row, form):
    value, unit = known[field]
    text = str(value(row))
    return text + (" " + unit if unit and "nounits" not in form and not text.startswith("[") else "")


def stamp(_):
    return time.strftime("%Y/%m/%d %H:%M:%S.000")


GPU_FIELDS = {
    "timestamp": (stamp, ""),
    "index": (lambda gpu: gpu["index"], ""),
    "uuid": (lambda gpu: gpu["uuid"], ""),
    "gpu_uuid": (lambda gpu: gpu["uuid"], ""),
    "name": (lambda gpu: NAME, ""),
    "gpu_name": (lambda gpu: NAME, ""),
    "pci.bus_id": (lambda gpu: gpu["bus"], ""),
    "gpu_bus_id": (lambda gpu: gpu["bus"], ""),
    "serial": (lambda gpu: "0000000000000", ""),
    "driver_version": (lambda gpu: DRIVER, ""),
    "count": (lambda gpu: len(glob.glob("/dev/nvidia[0-9]*")), ""),
    "memory.used": (memory, "MiB"),
    "memory.total": (lambda gpu: TOTAL, "MiB"),
    "memory.free": (lambda gpu: TOTAL - memory(gpu), "MiB"),
    "memory.reserved": (lambda gpu: 614, "MiB"),
    "utilization.gpu": (lambda gpu: 100 if gpu["holders"] else 0, "%"),
    "utilization.memory": (lambda gpu: 41 if gpu["holders"] else 0, "%"),
    "temperature.gpu": (lambda gpu: 52 if gpu["holders"] else 28, ""),
    "power.draw": (lambda gpu: "628.41" if gpu["holders"] else "77.12", "W"),
    "mig.mode.current": (lambda gpu: "Disabled", ""),
    "persistence_mode": (persistence, ""),
    "compute_mode": (lambda gpu: "Default", ""),
    "pstate": (lambda gpu: "P0", ""),
    "ecc.mode.current": (lambda gpu: "Enabled", ""),
    "ecc.errors.uncorrected.volatile.total": (lambda gpu: 0, ""),
    "remapped_rows.pending": (lambda gpu: "No", ""),
    "remapped_rows.failure": (lambda gpu: "No", ""),
    "clocks_event_reasons.hw_thermal_slowdown": (lambda gpu: "Not Active", ""),
}
APP_FIELDS = {
    "timestamp": (stamp, ""),
    "gpu_name": (lambda row: NAME, ""),
    "gpu_bus_id": (lambda row: row[0]["bus"], ""),
    "gpu_serial": (lambda row: "0000000000000", ""),
    "gpu_uuid": (lambda row: row[0]["uuid"], ""),
    "pid": (lambda row: row[1][0], ""),
    "process_name": (lambda row: row[1][1].replace(",", "?"), ""),
    "name": (lambda row: row[1][1].replace(",", "?"), ""),
    "used_gpu_memory": (lambda row: BUSY, "MiB"),
    "used_memory": (lambda row: BUSY, "MiB"),
}


def tell_all(gpus):
    """A part of what `nvidia-smi -q` says: enough to look the same at a glance."""
    print("\n==============NVSMI LOG==============\n")
    head = (("Timestamp", time.strftime("%a %b %e %H:%M:%S %Y")), ("Driver Version", DRIVER))
    for name, value in (*head, ("CUDA Version", CUDA), ("Attached GPUs", len(gpus))):
        print("%-50s: %s" % (name, value))
    for gpu in gpus:
        print("\nGPU %s" % gpu["bus"])
        rows = (
            ("Product Name", "gpu_name"),
            ("GPU UUID", "uuid"),
            ("Persistence Mode", "persistence_mode"),
        )
        rows += (("Performance State", "pstate"), ("MIG Mode", "mig.mode.current"), ("Used", "memory.used"))
        for name, field in rows:
            value, unit = GPU_FIELDS[field]
            print("    %-46s: %s" % (name, ("%s %s" % (value(gpu), unit)).strip()))
        for pid, name in gpu["holders"]:
            print("        %-42s: %d" % ("Process ID", pid))
            print("            %-38s: %s" % ("Name", name))


def topology(gpus):
    names = ["GPU%d" % gpu["index"] for gpu in gpus]
    print("\t" + "\t".join(names))
    for row in names:
        print("\t".join([row] + [" X " if row == column else "NV18" for column in names]))


RULE = "+" + "-" * 89 + "+"
THREE = "+".join(("", "-" * 41, "-" * 24, "-" * 22, ""))


def table(gpus):
    print(time.strftime("%a %b %e %H:%M:%S %Y"))
    print(RULE)
    print("| NVIDIA-SMI %-21s  Driver Version: %-14s CUDA Version: %-8s |" % (DRIVER, DRIVER, CUDA))
    print(THREE)
    print("| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |")
    print("| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |")
    print("|                                         |                        |               MIG M. |")
    print("|" + "+".join(("=" * 41, "=" * 24, "=" * 22)) + "|")
    for gpu in gpus:
        busy = bool(gpu["holders"])
        watts, heat, share = (628, 52, 100) if busy else (77, 28, 0)
        used = "%dMiB / %dMiB" % (memory(gpu), TOTAL)
        kept = "On" if persistence(gpu) == "Enabled" else "Off"
        row = (gpu["index"], NAME, kept, gpu["bus"])
        print("| %3d  %-27s   %3s  |   %s Off |                    0 |" % row)
        print(
            "| N/A  %3dC    P0  %13dW /  700W | %22s |   %4d%%      Default |" % (heat, watts, used, share)
        )
        print("|                                         |                        |             Disabled |")
        print(THREE)
    print()
    processes(gpus)


def processes(gpus):
    print(RULE)
    print("| %-87s |" % "Processes:")
    print(
        "| %-87s |"
        % " GPU   GI   CI              PID   Type   Process name                        GPU Memory"
    )
    print(
        "| %-87s |" % "       ID   ID                                                               Usage"
    )
    print("|" + "=" * 89 + "|")
    rows = [(gpu["index"], pid, name) for gpu in gpus for pid, name in gpu["holders"]]
    for index, pid, name in rows:
        shown = name if len(name) <= 34 else "..." + name[-31:]
        print("| %4d   N/A  N/A %15d      C   %-34s %8dMiB |" % (index, pid, shown, BUSY))
    if not rows:
        print("| %-87s |" % " No running processes found")
    print(RULE)


sys.exit(main())
