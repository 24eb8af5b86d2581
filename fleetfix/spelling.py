"""What someone may have meant by a word that is not known."""

from __future__ import annotations

from collections.abc import Iterable


def near(word: str, known: Iterable[str]) -> str | None:
    """The known word most like this one, or None where none is near."""
    from difflib import get_close_matches

    names = list(known)
    if word in names:
        return None
    found = get_close_matches(word, names, n=1, cutoff=0.6)
    if found:
        return found[0]
    lowered = {name.lower(): name for name in names}
    return lowered.get(word.lower())


def hint_for(word: str, known: Iterable[str]) -> str:
    """`did you mean gpu02?`, or nothing."""
    found = near(word, known)
    return f"did you mean {found}?" if found else ""


def hint_for_file(name: str, beside: Iterable[str]) -> str:
    """The same for a file: that both end in .yaml makes no two names alike."""
    stems = {one.rpartition(".")[0] or one: one for one in beside}
    stem = name.rpartition(".")[0] or name
    found = stems.get(stem) if name not in stems.values() else None
    found = found or stems.get(near(stem, stems) or "")
    return f"did you mean {found}?" if found else ""
