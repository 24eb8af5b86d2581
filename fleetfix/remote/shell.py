"""Run what a playbook's author wrote: the check, the command itself, and its undo."""

import os

from fleetfix.remote.api import Refusal, read, user_environment, write

LIMIT = 24 * 1024  # bytes of each stream kept, so that both fit into one reply


@read
def check(ctx, argv, env=None, stdin="", cwd="/"):
    """Run the author's check. That it changes nothing is the author's word."""
    return _run(ctx, argv, env, stdin, cwd)


@write
def run(ctx, argv, env=None, stdin="", cwd="/"):
    """Run the author's command, and remember for `undo` that it was begun."""
    ctx.remember("begun", True)
    return _run(ctx, argv, env, stdin, cwd)


@write
def undo(ctx, argv, env=None, stdin="", cwd="/"):
    """Run the author's undo, where `run` was begun."""
    if not ctx.recall("begun", False):
        return {"undone": False}
    return _run(ctx, argv, env, stdin, cwd)


def _run(ctx, argv, env, stdin, cwd):
    if not os.path.isdir(cwd):
        raise Refusal("command", "%s: no such folder" % cwd, "it is the command's `cwd`")
    environment = dict(user_environment(os.geteuid()), **(env or {}))
    return ctx.command(argv, env=environment, cwd=cwd, stdin=stdin.encode(), limit=LIMIT)
