"""The words of a command line as people write them: bash breaks them at `@` and `:` before it asks.

`gpu01,@failed:la` comes as five words, and without a trace of where blanks stood. What is offered must then
be what follows the last break, which bash keeps on the line.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, MutableMapping

ASKED = "_fleetfix_complete".upper()
"""The variable by which the shell asks, as Typer names it after the program."""
_AGAIN = (",", "!", "&", "^")
"""What a pattern goes on behind: an `@` after it belongs to the same word, any other begins one."""


def complete(ask: Callable[[], int], environ: MutableMapping[str, str]) -> int:
    """Ask what could be typed next with whole words, and print of it what bash does not keep."""
    words, at = environ.get("COMP_WORDS", "").split("\n"), environ.get("COMP_CWORD", "")
    keep = ""
    if at.isdigit() and int(at) < len(words):
        mended, index, keep = joined(words, int(at))
        environ["COMP_WORDS"], environ["COMP_CWORD"] = "\n".join(mended), str(index)
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        code = ask()
    for line in answer.getvalue().splitlines():
        print(line.removeprefix(keep))
    return code


def joined(words: list[str], at: int) -> tuple[list[str], int, str]:
    """The words, which of them is being typed, and what of that one bash keeps.

    >>> joined(["fleetfix", "hosts", "gpu01,", "@", "tr"], 4)
    (['fleetfix', 'hosts', 'gpu01,@tr'], 2, 'gpu01,')
    """
    mended: list[str] = []
    index, keep, open_end = at, "", False
    for place, word in enumerate(words):
        goes_on = bool(mended) and (
            open_end or word == ":" or (word == "@" and mended[-1].endswith(_AGAIN))
        )
        before = mended.pop() if goes_on else ""
        mended.append(before + word)
        open_end = word in ("@", ":")
        if place == at:
            index = len(mended) - 1
            # With the cursor behind it a colon is kept too; an @ is replaced with what follows it.
            keep = (before + word if word == ":" else before.removesuffix("@")) if goes_on else ""
            break
    return mended, index, keep
