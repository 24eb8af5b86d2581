"""The first source that reaches a host: makes `fleetfix.remote` importable from what was sent.

The controller appends a call of `begin` with the sources of the core. Nothing is read from or written
to a disk.
"""

import importlib.machinery
import signal
import sys
import types

PACKAGE = "fleetfix.remote"


class Sent:
    """Finds host modules among the sources that the controller has sent."""

    def __init__(self, sources):
        self.sources = sources

    def find_spec(self, name, path=None, target=None):
        package, _, module = name.rpartition(".")
        if package == PACKAGE and module in self.sources:
            return importlib.machinery.ModuleSpec(name, self, origin=self.place(module))
        return None

    @staticmethod
    def place(module):
        return "fleetfix/remote/%s.py" % module

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        name = module.__name__.rpartition(".")[2]
        module.__file__ = self.place(name)
        exec(compile(self.sources[name], self.place(name), "exec", dont_inherit=True), module.__dict__)


def begin(sources):
    signal.alarm(0)  # the bootstrap's: it waits for this source, and for so long only
    for name in ("fleetfix", PACKAGE):
        module = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
    sys.modules["fleetfix"].remote = sys.modules[PACKAGE]
    sys.modules[PACKAGE].sent_sources = sources  # no module can be called so by chance
    sys.meta_path.insert(0, Sent(sources))
    from fleetfix.remote import runner

    runner.main()
