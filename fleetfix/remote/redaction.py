"""The secrets of a session: they make the arguments of a call whole, and are masked in what leaves it.

They are in memory alone, and sent only to a session that has some. `needles` are all spellings of their
values, as the controller knows them (`fleetfix/redaction.py`), the longest first.
"""

from fleetfix.remote.api import SECRET, Ran

MASK = "***"


class Secrets:
    """Values by name, and what is looked for."""

    def __init__(self, values, needles):
        self.values = values
        self.needles = needles

    # -- into a call ----------------------------------------------------------------------------

    def resolve(self, value):
        """A value with every placeholder replaced by its text."""
        if isinstance(value, dict):
            if len(value) == 1 and SECRET in value:
                return self._text(value[SECRET])
            return {key: self.resolve(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.resolve(item) for item in value]
        return value

    def _text(self, inside):
        if isinstance(inside, str):
            return self.values[inside]
        return "".join(self.values[part] if i % 2 else part for i, part in enumerate(inside))

    # -- out of it ------------------------------------------------------------------------------

    def hide(self, text):
        """A text with every value masked."""
        if not any(needle in text for needle in self.needles):
            return text
        found = _places(text, self.needles)
        parts, at = [], 0
        for begin, end in found:
            parts += [text[at:begin], MASK]
            at = end
        return "".join([*parts, text[at:]])

    def hidden(self, value):
        """A value with every text in it masked, keys too."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {self.hidden(key): self.hidden(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hidden(item) for item in value]
        if isinstance(value, Ran):
            out, err = (self.hide(text).encode() for text in (value.text, value.errors))
            return Ran(value.exit, out, err, value.cut)
        return value

    def stream(self):
        """What masks one stream of bytes as it comes."""
        return Stream([needle.encode() for needle in self.needles])


class Stream:
    """Masks bytes that come in pieces; holds back only what may be the beginning of a value."""

    def __init__(self, needles):
        self.needles = needles
        self.kept = b""
        self.covered = 0  # bytes at the beginning of what is kept that belong to a value already masked

    def take(self, data):
        """What may go on, of these bytes and of those that were kept."""
        data = self.kept + data
        edge = min([len(data)] + [len(data) - _begun(data, needle) for needle in self.needles])
        return self._until(data, edge)

    def end(self):
        """The rest, once nothing more comes."""
        return self._until(self.kept, len(self.kept))

    def _until(self, data, edge):
        found = _places(data, self.needles)
        parts, at, covered = [], min(self.covered, edge), max(self.covered - edge, 0)
        for begin, end in found:
            if begin >= edge:
                break
            if begin >= at:
                parts += [data[at:begin], MASK.encode()]
            at, covered = max(at, min(end, edge)), max(covered, end - edge)
        parts.append(data[at:edge])
        self.kept, self.covered = data[edge:], covered
        return b"".join(parts)


def _begun(data, needle):
    """How many bytes at the end of the data are the beginning of a needle, and not all of it."""
    tail = data[-(len(needle) - 1) :]
    head = needle[:4]
    at = tail.find(head)
    while at >= 0:
        if needle.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(head, at + 1)
    return next((size for size in (3, 2, 1) if tail.endswith(needle[:size])), 0)


def _places(data, needles):
    """Where any needle stands, as (begin, end), in order; what overlaps is one."""
    found = []
    for needle in needles:
        at = data.find(needle)
        while at >= 0:
            found.append((at, at + len(needle)))
            at = data.find(needle, at + 1)
    merged = []
    for begin, end in sorted(found):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
