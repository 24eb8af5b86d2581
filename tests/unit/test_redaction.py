"""A secret is found by its value however it is spelled, and nothing else is touched."""

from __future__ import annotations

import base64
import html
import json
import shlex
import subprocess
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetfix.redaction import SHORTEST, Mask, needles_of
from fleetfix.remote.api import Ran
from fleetfix.remote.redaction import Secrets

TOKEN = "p4ss/w\"rd+ 'tricky' $é&<x>\\"
KEY = "\n".join(
    (
        "-----BEGIN PRIVATE KEY-----",
        *(f"MIIEvQIBADANBgkqhkiG9w0BAQ{n:03d}Kj/+" for n in range(8)),
        "-----END-----",
    )
)
BASH = ("bash", "-c", 'printf %q "$1"', "-")

SPELLED = {
    "raw": TOKEN,
    "json": json.dumps({"a": TOKEN}),
    "json, utf-8": json.dumps({"a": TOKEN}, ensure_ascii=False),
    "json in json": json.dumps({"log": json.dumps({"a": TOKEN})}),
    "json, slashes": json.dumps(TOKEN).replace("/", "\\/"),
    "python": repr([TOKEN]),
    "url": f"https://x/?q={quote(TOKEN)}",
    "url, all": quote(TOKEN, safe=""),
    "form": urlencode({"a": TOKEN}),
    "form, plus": quote_plus(TOKEN),
    "url, small": quote(TOKEN, safe="").replace("%2F", "%2f").replace("%C3%A9", "%c3%a9").lower(),
    "html": html.escape(TOKEN),
    "sh": shlex.quote(TOKEN),
    "sh -x": "+ echo '" + TOKEN.replace("'", "'\\''") + "'",
    "hex": TOKEN.encode().hex(),
    "HEX": TOKEN.encode().hex().upper(),
    **{f"base64 at {n}": base64.b64encode(b"a" * n + TOKEN.encode() + b"tail").decode() for n in range(4)},
    **{
        f"url-safe base64 at {n}": base64.urlsafe_b64encode(b"a" * n + TOKEN.encode()).decode()
        for n in range(3)
    },
}


@pytest.mark.parametrize("spelled", SPELLED.values(), ids=SPELLED.keys())
def test_a_value_is_masked_in_every_spelling(spelled: str) -> None:
    mask = Mask([TOKEN])
    text = f"before {spelled} after"
    told = mask(text)
    assert "***" in told
    assert told.startswith("before ")
    assert told.endswith(" after")
    for trace in ("p4ss", "tricky", "rd+", TOKEN.encode().hex()[4:12]):
        assert trace not in told
    # Beside the value only what belongs to its neighbours stays: base64 carries them in shared characters.
    assert len(told) < len(text) - len(spelled) + 30


def test_what_bash_quotes_is_masked() -> None:
    value = "pass word$(x)&y"
    quoted = subprocess.run([*BASH, value], capture_output=True, text=True, check=True).stdout
    assert value not in quoted
    assert Mask([value])(f"a {quoted} b") == "a *** b"


@pytest.mark.parametrize("columns", [64, 76])
def test_a_key_that_base64_wraps_is_masked_line_by_line(columns: int) -> None:
    whole = base64.b64encode(KEY.encode()).decode()
    lines = [whole[at : at + columns] for at in range(0, len(whole), columns)]
    told = Mask([KEY])("\n".join(lines)).split("\n")
    assert told == ["***"] * len(lines)


def test_each_line_of_a_key_is_masked_and_what_frames_it_is_not() -> None:
    lines = KEY.split("\n")
    told = Mask([KEY])("\n".join(f"  {line}" for line in lines)).split("\n")
    assert told == ["  -----BEGIN PRIVATE KEY-----", *["  ***"] * 8, "  -----END-----"]
    assert Mask([KEY])(f"<{KEY}>") == "<***>"


def test_a_longer_value_is_masked_whole_where_a_shorter_one_begins_it() -> None:
    mask = Mask(["secret-one", "secret-one-two", "two-three"])
    assert mask("a secret-one-two-three b secret-one c") == "a *** b *** c"


def test_a_word_that_is_too_short_is_not_looked_for() -> None:
    assert Mask(["a" * (SHORTEST - 1)]).needles == ()
    assert Mask([]).needles == ()
    assert needles_of(("pass", "")) == ()


def secrets(*values: str) -> Secrets:
    return Secrets({str(n): value for n, value in enumerate(values)}, list(needles_of(values)))


VALUES = st.text(alphabet="ab\n'\"é/+", min_size=SHORTEST, max_size=12)
TEXTS = st.lists(st.sampled_from(["a", "b", "\n", "é", "x", '"', "{}"]), max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(VALUES, min_size=1, max_size=3), TEXTS, st.lists(st.integers(0, 3), max_size=4), st.data())
def test_the_host_masks_as_the_controller_does_over_any_edges(
    values: list[str], words: list[str], places: list[int], data: st.DataObject
) -> None:
    for place in places:
        words.insert(min(place, len(words)), values[place % len(values)])
    text = "".join(words)
    mask, host = Mask(values), secrets(*values)
    told = mask(text)
    assert host.hide(text) == told
    assert not mask.finds(text) or "***" in told
    assert mask.finds(text) or told == text
    stream, raw = host.stream(), text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    out = b""
    longest = max(len(needle.encode()) for needle in mask.needles)
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        out += stream.take(raw[begin:end])
        assert len(stream.kept) < longest
    assert (out + stream.end()).decode() == told


def test_a_value_that_repeats_for_ever_is_masked_in_memory_that_does_not_grow() -> None:
    stream = secrets("aaaaaa").stream()
    out = b"".join(stream.take(b"a" * 1000) for _ in range(100))
    assert len(stream.kept) < 6
    assert out + stream.take(b"b") + stream.end() == b"***b"


def test_bytes_that_are_no_text_pass_as_they_are() -> None:
    data = bytes(range(256)) * 8
    stream = secrets("a secret", KEY).stream()
    assert stream.take(data) + stream.end() == data
    assert stream.take(b"\xffa secret\xfe") + stream.end() == b"\xff***\xfe"


def test_what_may_become_a_secret_waits_and_goes_on_where_it_does_not() -> None:
    stream = secrets("a secret").stream()
    assert stream.take(b"this is a sec") == b"this is "
    assert stream.take(b"tion") == b"a section"
    assert stream.take(b"a secre") == b""
    assert stream.end() == b"a secre"


def test_placeholders_are_made_whole_and_all_else_stays() -> None:
    host = secrets("value-of-0", "value-of-1")
    args = {
        "env": {"A": {"$secret": "0"}, "B": {"$secret": ["x ", "1", " y ", "0", ""]}},
        "n": [1, None, "$secret"],
    }
    assert host.resolve(args) == {
        "env": {"A": "value-of-0", "B": "x value-of-1 y value-of-0"},
        "n": [1, None, "$secret"],
    }
    ran = host.hidden(Ran(3, b"out value-of-0", b"\xff value-of-1", True))
    assert (ran.exit, ran.text, ran.errors, ran.cut) == (3, "out ***", "\\xff ***", True)
