"""Run what a playbook's author wrote: the check, the command itself, and its undo."""

import os
import pwd

from fleetfix.remote.api import Refusal, read, user_environment, user_name, write

LIMIT = 24 * 1024  # bytes of each stream kept, so that both fit into one reply


@read
def account(ctx, user):
    """Whether something can be run as that user here: {"uid"}; refused where not."""
    return {"uid": _uid_of(user)}


@read
def check(ctx, argv, env=None, stdin="", cwd="/", user=None):
    """Run the author's check. That it changes nothing is the author's word."""
    return _run(ctx, argv, env, stdin, cwd, user)


@write
def run(ctx, argv, env=None, stdin="", cwd="/", user=None):
    """Run the author's command, and remember for `undo` that it was begun."""
    ctx.remember("begun", True)
    return _run(ctx, argv, env, stdin, cwd, user)


@write
def undo(ctx, argv, env=None, stdin="", cwd="/", user=None):
    """Run the author's undo, where `run` was begun."""
    if not ctx.recall("begun", False):
        return {"undone": False}
    return _run(ctx, argv, env, stdin, cwd, user)


def _run(ctx, argv, env, stdin, cwd, user):
    uid = os.geteuid() if user is None else _uid_of(user)
    if not os.path.isdir(cwd):
        raise Refusal("command", "%s: no such folder" % cwd, "it is the command's `cwd`")
    environment = dict(user_environment(uid), **(env or {}))
    return ctx.command(argv, env=environment, cwd=cwd, stdin=stdin.encode(), limit=LIMIT, uid=uid)


def _uid_of(user):
    try:
        uid = pwd.getpwnam(user).pw_uid
    except KeyError:
        raise Refusal("blocked", "there is no user %s on this host" % user, "as_user names one") from None
    if os.geteuid() not in (0, uid):
        me = user_name(os.geteuid())
        raise Refusal("blocked", "%s may run nothing as %s here" % (me, user), "use become: true")
    return uid
