"""Names to addresses, beside the event loop, and a connection to the first address that answers.

A name server that hangs keeps one thread of its own each: it holds up neither other hosts, nor the
journal, nor the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import socket
import threading
from collections.abc import Sequence
from typing import Any

Found = Sequence[tuple[int, int, int, str, Any]]

AGAIN = 3
"""How often a name is looked up while the name server says `try again`."""


async def look_up(name: str, port: int = 0, family: int = socket.AF_UNSPEC) -> Found:
    """The addresses of a name, as `getaddrinfo` orders them. Raises OSError."""
    if _is_address(name):
        return socket.getaddrinfo(name, port, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)
    for attempt in range(1, AGAIN + 1):
        try:
            return await _in_a_thread(name, port, family)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or attempt == AGAIN:
                raise
        await asyncio.sleep(random.uniform(0.2, 0.6) * attempt)
    raise AssertionError("unreachable")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


async def _in_a_thread(name: str, port: int, family: int) -> Found:
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Found] = loop.create_future()

    def settle(answer: Found | OSError | UnicodeError) -> None:
        if found.done():
            return
        if isinstance(answer, Exception):
            found.set_exception(answer)
        else:
            found.set_result(answer)

    def ask() -> None:
        answer: Found | OSError | UnicodeError
        try:
            answer = socket.getaddrinfo(name, port, family, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            answer = error
        with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(settle, answer)

    # A thread of the loop's own pool would be waited for at the end of the process.
    threading.Thread(target=ask, name=f"fleetfix-lookup-{name}", daemon=True).start()
    return await found


async def dial(found: Found, source: str | None, within: float) -> socket.socket:
    """Connect to the first of these addresses that answers. Raises OSError of the last that did not.

    Each but the last has its share of the time, `within` seconds.
    """
    loop = asyncio.get_running_loop()
    failure: OSError = OSError("the name has no address")
    for left, (family, kind, protocol, _, address) in zip(range(len(found), 0, -1), found, strict=True):
        made = socket.socket(family, kind, protocol)
        try:
            made.setblocking(False)
            if source is not None:
                made.bind((source, 0))
            async with asyncio.timeout(None if left == 1 else within / len(found)):
                await loop.sock_connect(made, address)
        except TimeoutError as error:
            made.close()
            failure = OSError(getattr(error, "errno", None) or 110, "Connection timed out")
        except OSError as error:
            made.close()
            failure = error
        except BaseException:
            made.close()
            raise
        else:
            return made
    raise failure
