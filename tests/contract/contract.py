"""A host module for the contract suite: it is sent as a third-party action's module would be."""

import os
import subprocess
import time

from fleetfix.remote.api import Refusal, read, write

SCATTER = """
setsid sleep %(token)s &
(sleep %(token)s &)
(setsid sh -c 'sleep %(token)s & exec sleep %(token)s' &)
trap '' TERM
echo started
sh -c 'trap "" TERM; while :; do sleep %(token)s; done' &
while :; do sleep %(token)s; done
"""


@read
def echo(ctx, value=None):
    return value


@read
def who(ctx):
    return {
        "runner": os.getppid(),
        "me": os.getpid(),
        "uid": os.geteuid(),
        "state": ctx.state,
        "dry": ctx.dry,
    }


@read
def shell(ctx, script, stdin=""):
    return ctx.command(["sh", "-c", script], stdin=stdin.encode())


@read
def unhurried(ctx, script):
    """Wait for a command without a deadline of its own."""
    return subprocess.Popen(["sh", "-c", script]).wait()


@read
def nap(ctx, seconds):
    time.sleep(seconds)
    return time.time()


@read
def scatter(ctx, token):
    return ctx.command(["sh", "-c", SCATTER % {"token": token}])


@read
def scatter_and_return(ctx, token):
    subprocess.Popen(["sh", "-c", f"setsid sleep {token} & (sleep {token} &)"]).wait()
    return "left"


@read
def look(ctx, path):
    return os.stat(path).st_size


@read
def large(ctx, size):
    return "x" * size


@read
def noisy(ctx):
    print("this goes nowhere")
    os.write(1, b"\x00\x00\x00\x05hello")
    os.write(2, b"nor does this\n")
    return "quiet"


@read
def talk(ctx, lines):
    for number in range(lines):
        ctx.say(f"line {number}")
    return lines


@read
def broken(ctx):
    return {}["nothing"]


@read
def refusing(ctx):
    raise Refusal("blocked", "alice's job 123 uses it", "ask alice")


@read
def refuse_with(ctx, text):
    raise Refusal("blocked", "no: " + text, "try " + text)


@read
def raise_with(ctx, text):
    raise OSError(5, text, text)


@read
def say_it(ctx, text):
    ctx.say(text)


@read
def dying(ctx):
    os.kill(os.getpid(), 9)


@write
def append(ctx, path, text="x"):
    with open(path, "a") as file:
        file.write(text + "\n")
    return text


@write
def append_slowly(ctx, path, until, pid_file):
    with open(pid_file, "w") as file:
        file.write(str(os.getpid()))
    with open(path, "a") as file:
        file.write("x\n")
    while not os.path.exists(until):
        time.sleep(0.01)
    return "slowly"


@write
def scatter_writing(ctx, token):
    return ctx.command(["sh", "-c", SCATTER % {"token": token}])


@write
def stat(ctx, path):
    return ctx.command(["stat", path])


@write
def leave(ctx, token):
    """Start what is to stay: in a session of its own, without the change's lock."""
    subprocess.Popen(["setsid", "sleep", token], close_fds=True)
    return "left"


@write
def remember(ctx, key, value):
    ctx.remember(key, value)
    return value


@write
def recalled(ctx, key, path):
    with open(path, "a") as file:
        file.write(str(ctx.recall(key)) + "\n")
    return ctx.recall(key)


@write
def remove(ctx, path):
    try:
        os.unlink(path)
    except FileNotFoundError:
        return "not there"
    return "removed"


@write
def remembering(ctx, path):
    ctx.remember("made", path)


@write
def forgetting(ctx):
    return ctx.recall("made")


def _lacks(ctx, committed):
    made = ctx.recall("made")
    return None if os.path.exists(made) else f"{os.path.basename(made)} of step {ctx.step} is gone"


forgetting.lacks = _lacks


@write
def failing(ctx):
    raise Refusal("command", "it does not work")


@write
def exits(ctx, code):
    return ctx.command(["sh", "-c", f"echo out; exit {code}"])
