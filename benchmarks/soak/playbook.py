"""What every host is to go through in a round: three steps and a bell, each of which the host counts."""

from __future__ import annotations

STEPS = ("first", "second", "third")
BELL = "bell"
PLACE = "/opt/soak"

_STEP = """\
  - id: {id}
    shell:
      check: test -e {place}/{id}{unless}
      run: |
        mkdir -p {place}; echo begin {id} >> {place}/log
        sleep {seconds}
        touch {place}/{id}; echo end {id} >> {place}/log
      undo: mkdir -p {place}; rm -f {place}/{id}; echo undo {id} >> {place}/log
"""

_BELL = """\
  - id: bell
    when_changed: [first]
    shell:
      always: true
      run: echo ring bell >> {place}/log; sleep 0.2
      undo: echo undo bell >> {place}/log
"""

_HEAD = """\
name: soak
summary: Three marks and a bell, which the host counts.
policy: {canary: 1, batch: [20%, 60%], max_failures: 100%, max_unreachable: 100%}
steps:
"""


def playbook() -> str:
    """The playbook of a round; the last step never holds on a spoiled host, which has to go back."""
    spoiled = f" && ! test -e {PLACE}/spoiled"
    steps = [
        _STEP.format(id=id, place=PLACE, seconds=seconds, unless=spoiled if id == STEPS[-1] else "")
        for id, seconds in zip(STEPS, ("0.3", "1", "0.3"), strict=True)
    ]
    return _HEAD + steps[0] + _BELL.format(place=PLACE) + "".join(steps[1:])
