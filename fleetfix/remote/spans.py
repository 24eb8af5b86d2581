"""Whether a job runs on several hosts at once, and which of them this is.

What its ranks were started with counts; before they are there, the command line of the launcher. The
environments are read and reduced here: none of them leaves the host.
"""

from fleetfix.remote import procs

LENGTH = 80
# The options of torchrun, accelerate and deepspeed's launcher, and the variables that torchrun reads.
NODES = ("nnodes", "num-machines", "num-nodes")
NODE = ("node-rank", "machine-rank")
NAME = ("rdzv-id",)
AT = ("rdzv-endpoint",)
ADDRESS = ("master-addr", "main-process-ip")
PORT = ("master-port", "main-process-port")


def of_job(job):
    """Of a job over several hosts {"nodes", "node", "id", "at", "by"}, else None.

    `at` is where it meets, `host:port`; `by` is who started its ranks.
    """
    for pid in [*(pid for pid, _ in job["holders"]), job["pid"]]:
        environ = procs.environ_of(pid) or {}
        found = of_ranks(environ)
        if found is not None:
            return found if found["nodes"] > 1 else None
    found = of_launcher(procs.argv_of(job["pid"]), procs.environ_of(job["pid"]) or {})
    return found if found is not None and found["nodes"] > 1 else None


def of_ranks(environ):
    """What the variables of one rank say, also of a job on one host; None where they say nothing."""
    if "TORCHELASTIC_RUN_ID" in environ:
        nodes = _number(environ, "GROUP_WORLD_SIZE") or _share(environ, "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        node = _number(environ, "GROUP_RANK")
        return _span(nodes, node, environ["TORCHELASTIC_RUN_ID"], _meeting(environ), "torchrun")
    nodes = _share(environ, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if nodes:
        return _span(nodes, None, environ.get("PMIX_NAMESPACE", ""), _meeting(environ), "mpirun")
    if environ.get("SLURM_JOB_ID") and "SLURM_PROCID" in environ:
        nodes, node = _number(environ, "SLURM_NNODES"), _number(environ, "SLURM_NODEID")
        return _span(nodes, node, environ["SLURM_JOB_ID"], "", "Slurm")
    nodes = _share(environ, "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if nodes:
        return _span(nodes, None, "", _meeting(environ), "hand")
    return None


def of_launcher(argv, environ):
    """What the command line of a launcher says, or the variables that stand for its options; or None."""
    options = _options(argv)

    def said(names):
        for name in names:
            value = options.get(name, environ.get("PET_" + name.upper().replace("-", "_")))
            if value:
                return value
        return ""

    nodes = said(NODES).rpartition(":")[2]
    if not nodes.isdigit():
        return None
    at = said(AT) or ":".join(one for one in (said(ADDRESS), said(PORT)) if one)
    node = said(NODE)
    return _span(int(nodes), int(node) if node.isdigit() else None, said(NAME), at, "torchrun")


def _options(argv):
    """{name: value} of the long options before the script, `_` as `-`."""
    found, words = {}, list(argv[1:])
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name.startswith("--"):
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            found.setdefault(name[2:].replace("_", "-"), value)
    return found


def _number(environ, name):
    value = environ.get(name, "")
    return int(value) if value.isdigit() else None


def _share(environ, whole, part):
    """How many hosts share the ranks, or None where the variables do not say."""
    all_of_it, here = _number(environ, whole), _number(environ, part)
    return -(-all_of_it // here) if all_of_it and here else None


def _meeting(environ):
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    return ":".join(one for one in (address, port) if one)


def _span(nodes, node, name, at, by):
    if not nodes:
        return None
    name, at = procs.shown([name, at])
    return {"nodes": nodes, "node": node, "id": name[:LENGTH], "at": at[:LENGTH], "by": by}
