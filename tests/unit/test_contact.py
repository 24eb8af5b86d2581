"""The first words between controller and runner, where nobody waits for them any more."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

from fleetfix import protocol
from fleetfix.conversation import Contact, Password, Receiver, Wire


async def never(command: str, receiver: Receiver) -> Wire:
    del command, receiver
    await asyncio.sleep(3600)
    raise AssertionError


async def give_up() -> None:
    """Begin a connection, lose patience, and then hear that it ended."""
    contact = Contact("gpu01", protocol.Start("ab", None, False), Password(None), print, print)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await contact.greet(never)
    contact.ended("the connection closed")


async def test_a_connection_that_was_given_up_ends_without_a_word() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    await give_up()
    await asyncio.sleep(0)  # until the loop has let go of it too
    gc.collect()
    assert told == []
