"""The runner's loop, in a process of its own: it takes over the signals of whoever runs it."""

from __future__ import annotations

import json
import subprocess
import sys

GIVES_UP = """
import json, os, time
from fleetfix.remote import calls, loop

class Nobody:
    source, sink = os.pipe()
    waiting = 0
    def flush(self): pass

# As where /proc tells nothing of a process: whoever asks for it waits in the kernel too.
calls.end_all_of = lambda pid, grace: time.sleep(60)
loop.ENDED_WITHIN = 0.1
here = loop.Loop(Nobody(), 60.0)
child = here.fork("read", "s", lambda tell: (tell({"call": "gpus.survey", "timeout": 0.1}), time.sleep(60)))
while not child.finished or any(one.kind == "kill" and one.status is None for one in here.children):
    here.turn()
os.kill(child.pid, 9)
print(json.dumps(child.result["failure"]))
"""


def test_what_hangs_while_it_ends_another_is_given_up_too() -> None:
    done = subprocess.run([sys.executable, "-c", GIVES_UP], capture_output=True, text=True, timeout=30)
    failure = json.loads(done.stdout)
    assert failure["kind"] == "hung"
    assert "gpus.survey was not done within 0.1 s" in failure["message"]
    assert "hangs too" in failure["message"]


LOOPS = """
import json, os, sys
from fleetfix.remote import api

api.be_subreaper()
context = api.Context("r", "s", "/", state=None, dry=True, deadline=None)
loop = "trap '' TERM; (setsid sh -c 'while :; do sleep 60; done' &) ; while :; do sleep 60; done"
ran = context.command(["sh", "-c", loop], timeout=0.2)
left = [api.name_of(pid) for pid, _ in api.descendants(os.getpid())]
api.end_below(os.getpid())
print(json.dumps([ran.exit, ran.stuck, left]))
"""


def test_a_loop_that_starts_what_is_ended_again_is_ended_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", LOOPS], capture_output=True, text=True, timeout=30)
    assert json.loads(done.stdout) == [None, [], []], done.stderr
