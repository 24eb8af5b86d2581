"""What a session promises about secrets, whatever wire it runs over."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from fleetfix import secret_values
from fleetfix.commands import Call, Change, Execute, Read
from fleetfix.errors import HostError
from fleetfix.redaction import spellings
from fleetfix.session import Timers
from tests.contract.command_contract import ran
from tests.contract.place import Place, call, change, eventually, kill, processes_with, read, token
from tests.contract.session_contract import ONE, TWO, runner_of

TOKEN = "zebra's $tripe/+ 0123456789"
KEY = "-----BEGIN KEY-----\nquagga4Ue8xP1vTn2kR7\nokapi0sWd5yB3mZc6hLq\n-----END KEY-----"
SAYS = 'printf "%s\\n" "$TOKEN"; printf "%s" "$TOKEN" | base64; printf "%s" "$KEY" >&2'


def none_in(told: Any) -> bool:
    """Whether no spelling of a secret stands in an answer, or in its JSON."""
    texts = (str(told), json.dumps(told, default=str), json.dumps(told, default=str, ensure_ascii=False))
    return not any(
        needle in text for value in (TOKEN, KEY) for needle in spellings(value) for text in texts
    )


def files_with(folder: Path, *needles: str) -> list[Path]:
    """The files below a folder that hold any of these."""
    found = []
    for path in folder.rglob("*"):
        try:
            data = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:
            continue  # of a session that is ending
        if any(needle.encode() in data for needle in needles):
            found.append(path)
    return found


def shell(function: str, script: str, **args: Any) -> dict[str, Any]:
    env = {"TOKEN": {"$secret": "token"}, "KEY": {"$secret": "key"}}
    return {"function": f"shell.{function}", "args": {"argv": ["sh", "-c", script], "env": env, **args}}


class SecretPromises:
    """What every wire shows: it needs a host with processes."""

    @pytest.fixture
    def confided(self) -> None:
        secret_values.hold({"token": TOKEN, "key": KEY})

    async def test_a_call_has_its_secrets_and_no_answer_has_them(
        self, place: Place, confided: None
    ) -> None:
        session = await place.open()
        length = f'[ "${{#TOKEN}}" = {len(TOKEN)} ] || exit 9; '
        script = length + f'[ "$(cat)" = "Bearer $TOKEN!" ] || exit 8; {SAYS}; exit 3'
        stdin = {"$secret": ["Bearer ", "token", "!"]}
        (answer,) = await session.read("s", [Read(**shell("check", script, stdin=stdin))])
        assert answer.exit == 3
        assert answer.stdout == "***\n***\n"
        assert answer.stderr == "***"

    async def test_a_line_that_comes_back_knows_the_secrets_again(
        self, place: Place, confided: None
    ) -> None:
        session = await place.open(timers=Timers(reconnect_within=20.0))
        kill(await runner_of(session))
        (answer,) = await session.read("s", [Read(**shell("check", SAYS))])
        assert answer.stdout == "***\n***\n"

    async def test_a_command_has_its_secrets_and_shows_none_over_the_edges_of_its_pieces(
        self, place: Place, confided: None
    ) -> None:
        session = await place.open()
        pieces = ("""printf "zebra's" """, """printf ' $tripe/'""", "printf '+ 0123456789;'")
        begun = 'printf "%s" "$token" | head -c 9; printf "%s" "$key" >&2'
        script = "; sleep 0.1; ".join((*pieces, begun))
        command = Execute(argv=("sh", "-c", script), timeout=60.0, secrets=("token", "key"))
        ended, heard = await ran(session, command)
        assert ended.exit == 0
        assert bytes(heard.out) == b"***;zebra's $"
        assert none_in(heard.err.decode())


class SecretContract(SecretPromises):
    """All of it, where it is enough to look at one host."""

    async def test_every_spelling_is_masked_in_values_in_words_and_in_errors(
        self, place: Place, confided: None
    ) -> None:
        said: list[str] = []
        session = await place.open(progress=lambda step, text: said.append(text))
        told = [
            *(base64.b64encode(b"x" * n + TOKEN.encode() + b"y").decode() for n in range(3)),
            *(quote(TOKEN), quote(TOKEN, safe=""), shlex.quote(TOKEN), TOKEN.encode().hex(), repr(KEY)),
            *(
                json.dumps({"token": TOKEN}),
                f"postgres://u:{quote(TOKEN, safe='')}@db",
                KEY.splitlines()[1],
            ),
        ]
        value = {"list": told, "key " + TOKEN: {"deep": [TOKEN]}, "number": 4}
        (echoed, broken) = await session.read(
            "s", [read("echo", value=value), read("echo", valu={"$secret": "token"})]
        )
        assert none_in(echoed.value)
        assert echoed.value["key ***"] == {"deep": ["***"]}
        assert echoed.value["number"] == 4
        assert broken.failure is not None
        (refused, raised) = await session.read(
            "s",
            [read("refuse_with", text={"$secret": "token"}), read("raise_with", text={"$secret": "key"})],
        )
        assert refused.failure is not None
        assert raised.failure is not None
        assert refused.failure.message == "no: ***"
        assert refused.failure.hint == "try ***"
        assert none_in([broken.failure.message, raised.failure.message])
        await session.read("s", [read("say_it", text={"$secret": ["it is ", "token", ""]})])
        assert said == ["it is ***"]

    async def test_output_without_a_secret_is_as_it_was(self, place: Place, confided: None) -> None:
        session = await place.open()
        script = r"printf 'zebr\377zebra\0\n%s' quagga"
        (answer,) = await session.read("s", [Read(**shell("check", script))])
        assert answer.stdout == "zebr\\xffzebra\x00\nquagga"

    async def test_what_is_cut_out_of_a_long_output_leaves_no_half_of_a_secret(
        self, place: Place, confided: None
    ) -> None:
        session = await place.open()
        script = 'yes "$TOKEN" | head -n 12000 | tr -d "\n"'
        (answer,) = await session.read("s", [Read(**shell("check", script))])
        assert answer.cut
        assert re.sub(r"\n\[\.\.\. \d+ bytes cut \.\.\.\]\n|\*", "", answer.stdout) == ""

    async def test_nothing_on_the_host_keeps_a_secret_and_undo_asks_for_it_again(
        self, place: Place, confided: None
    ) -> None:
        one = Change(
            key="k",
            summary="use a secret",
            do=(Call(**shell("run", SAYS)),),
            undo=(Call(**shell("undo", SAYS)),),
            risk="compensable",
        )
        first = await place.open()
        assert (await first.change(ONE, "s", one)).ok
        assert [past.secrets for past in await first.past()] == [("key", "token")]
        await first.close()
        assert files_with(place.root, "$secret")
        secret_values.forget()
        without = await place.open()
        with pytest.raises(HostError) as refused:
            await without.undo(ONE)
        assert (refused.value.failure.kind, refused.value.failure.message.endswith("key, token")) == (
            "blocked",
            True,
        )
        assert [past.state for past in await without.past()] == ["done"]
        with pytest.raises(HostError) as refused:
            await without.change(TWO, "s", one)
        assert len(await without.past()) == 1
        await without.close()
        secret_values.hold({"token": TOKEN, "key": KEY})
        again = await place.open()
        assert (await again.undo(ONE)).ok
        assert files_with(place.folder, *(spellings(TOKEN) | spellings(KEY))) == []

    async def test_no_list_of_processes_shows_a_secret(self, place: Place, confided: None) -> None:
        session = await place.open()
        stop = token()
        reading = asyncio.ensure_future(session.read("s", [Read(**shell("check", f"sleep {stop}; true"))]))
        await eventually(lambda: bool(processes_with(stop)))
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        kill(processes_with(stop)[0])
        await reading
        assert not [line for line in lines if b"zebra" in line or b"quagga" in line]

    async def test_a_command_is_not_begun_without_the_secrets_that_it_wants(self, place: Place) -> None:
        session = await place.open()
        with pytest.raises(HostError) as refused:
            await ran(session, Execute(argv=("sh", "-c", "true"), secrets=("token",)))
        assert "token" in refused.value.failure.message

    async def test_a_placeholder_is_read_in_arguments_alone(self, place: Place, confided: None) -> None:
        session = await place.open()
        asked = [read("echo", value={"$secret": "token"}), read("echo", value={"$secret": "token", "n": 1})]
        (whole, other) = await session.read("s", asked)
        assert whole.value == "***"
        assert other.value == {"$secret": "token", "n": 1}
        done = await session.change(
            ONE, "s", change(call("append", path=place.path("f"), text="${{ secrets.token }}"))
        )
        assert done.value == "${{ secrets.token }}"
