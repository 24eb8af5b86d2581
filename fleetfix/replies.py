"""A host's answers as values; what no runner of fleetfix answers is a failure of class `bug`.

A host may be anyone's. Its answers are looked through once, here, so that nothing behind this meets a wrong
type, a number without end, a time that no calendar has, a name that is a command, or text that is no text.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from fleetfix.commands import Call, Completed, Ended, Json
from fleetfix.errors import Failure, HostError
from fleetfix.session import HostInfo, Past, Waits, host_error

LONGEST = 4096
"""Characters of one text in an answer that are kept, but for what a command printed."""

Model = TypeVar("Model", bound=BaseModel)


def info(reply: Json) -> HostInfo:
    """What a host says of itself."""
    return _made(HostInfo, _plain(reply))


def completed(reply: Json) -> Completed:
    """The answer to a call; its `value` is left to the action that asked, which knows what it may be."""
    if isinstance(reply, dict):
        printed = {name: _spelt(reply[name]) for name in ("stdout", "stderr") if name in reply}
        known = {name: item for name, item in reply.items() if name not in ("value", *printed)}
        reply = {**_plain(known), **printed, "value": reply.get("value")}
    return _made(Completed, reply)


def ended(reply: Json) -> Ended:
    """How a command of the operator's ended."""
    return _made(Ended, _plain(reply))


def waits(reply: Json) -> Waits | None:
    """What a call on the host waits for."""
    return None if reply is None else _made(Waits, reply)


def past(items: list[Json]) -> tuple[Past, ...]:
    """The changes of a run on a host."""
    return tuple(_past(one) for one in items)


def _past(item: Json) -> Past:
    if isinstance(item, dict) and item.get("completed") is not None:
        item = {**item, "completed": completed(item["completed"])}
    return _made(Past, {name: one if name == "completed" else _plain(one) for name, one in item.items()})


def many(reply: Json, slots: int) -> tuple[Completed, ...]:
    """Answers to so many calls, none of them left out."""
    if not isinstance(reply, list) or len(reply) != slots or None in reply:
        raise _no_answer("calls are left out")
    return tuple(reply)


def texts(reply: Json) -> tuple[str, ...]:
    """Words, such as names of processes."""
    if not isinstance(reply, list):
        raise _no_answer("a list was wanted")
    return tuple(str(_plain(one)) for one in reply)


def modules(reply: Json) -> tuple[Call, ...]:
    """Names of host modules, each as a call that needs it."""
    try:
        return tuple(Call(function=f"{name}.{name}") for name in texts(reply))
    except ValidationError:
        raise _no_answer("no host module is called so") from None


def refusal(host: str, error: Json) -> HostError:
    """Why a host did not do what was asked."""
    said = _plain(error) if isinstance(error, dict) else {}
    return host_error(
        str(said.get("kind")), f"{host}: {said.get('message', 'it failed')}", str(said.get("hint", ""))
    )


def _made(model: type[Model], value: Json) -> Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(_spelt(str(one)) for one in first["loc"])
        raise _no_answer(f"{place}: {first['msg']}"[:300]) from None


def _no_answer(why: str) -> HostError:
    return HostError(Failure(kind="bug", message=f"the host answered with what is no answer: {why}"))


def _plain(value: Json) -> Json:
    """A value whose texts are all text, and of bounded length."""
    if isinstance(value, str):
        return _spelt(value if len(value) <= LONGEST else value[: LONGEST - 1] + "…")
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _spelt(text: Json) -> Json:
    """Halves of characters as `\\udc80`: JSON can hold them, names of files have them, and UTF-8 cannot."""
    if not isinstance(text, str) or text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()
