"""`playbooks`, `lint`, `explain`: what can be run, whether it is right, what its words mean."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetfix.cli import complete, options


def playbooks(json: options.Json = False) -> None:
    """List the playbooks that have a name: shipped ones, and yours."""
    from json import dumps

    from fleetfix.errors import FleetfixError
    from fleetfix.library import available
    from fleetfix.playbook import load
    from fleetfix.views.neutral import one_line

    for name, places in available().items():
        summary, wrong = "", ""
        try:
            summary = load(name).summary
        except FleetfixError as error:
            wrong = error.message.splitlines()[0]
        if json:
            files = [str(place) for place in places]
            print(dumps({"name": name, "summary": summary, "files": files, "error": wrong or None}))
        else:
            print(f"{name:<24} {one_line(summary) if not wrong else f'does not load: {one_line(wrong)}'}")


def lint(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="Playbooks.", autocompletion=complete.playbooks)
    ],
) -> int:
    """Say everything that is wrong with playbooks; nothing is connected to."""
    import os

    from fleetfix.playbook import lint as complaints_of
    from fleetfix.views.amounts import count
    from fleetfix.views.neutral import neutral

    found = 0
    for file in files:
        # `lint lamps` may be a shipped playbook; what is there under this name is meant as a file.
        complaints = complaints_of(os.path.join(os.curdir, file) if os.path.exists(file) else file)
        found += len(complaints)
        for complaint in complaints or (f"{file}: ok",):
            print(neutral(complaint))
    if found:
        from fleetfix.errors import PlaybookError

        raise PlaybookError(f"{count(found, 'complaint')} in {count(len(files), 'file')}")
    return 0


def explain(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="WORD",
            help="An action, a check or a key of a step; all without it.",
            autocompletion=complete.actions,
        ),
    ] = None,
) -> None:
    """Explain an action or check of the playbook language with its parameters, or a key of a step."""
    from fleetfix.actions import KINDS, named
    from fleetfix.errors import UsageError
    from fleetfix.spelling import hint_for
    from fleetfix.steps import CONTROLS
    from fleetfix.views.explain import action_text, actions_text, control_text

    if kind is None:
        print(actions_text([named(one) for one in KINDS]))
    elif kind in CONTROLS:
        print(control_text(kind))
    elif kind not in KINDS:
        raise UsageError(
            f"there is no action or check {kind!r}",
            hint=hint_for(kind, [*KINDS, *CONTROLS]) or f"there are: {', '.join(KINDS)}",
        )
    else:
        print(action_text(named(kind)))
