"""The event loop of what serves: uvloop, with every lookup of a name in a thread of its own.

uvloop's own lookups share two threads, and closing the loop waits for all that are under way or in line. While a name
server does not answer, a few names would keep back every other lookup, even `create_server`, and SIGTERM would take
minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import threading
from functools import partial
from typing import Any, TypeAlias

import uvloop
from aiohappyeyeballs import start_connection

_NEXT_ADDRESS = 0.25
"""Seconds after which a name's next address is tried as well (RFC 8305), as aiohttp does for health checks: a path of
IPv6 that swallows packets would else take all the time there is."""

_Addresses: TypeAlias = list[tuple[Any, ...]]
"""As `socket.getaddrinfo` returns them."""


class EventLoop(uvloop.Loop):
    def __init__(self) -> None:
        super().__init__()
        self._lookups: dict[tuple[object, ...], asyncio.Future[_Addresses]] = {}
        """Those under way, by what is looked up."""

    async def getaddrinfo(self, host: Any, port: Any, **kind: int) -> Any:
        """Whoever asks for what is being looked up waits for that, so that there are no more threads than names."""
        asked = host, port, *(kind.get(name, 0) for name in ("family", "type", "proto", "flags"))
        if _is_address(host):  # nothing is asked for: even `sock_connect` comes here, for every connection
            return socket.getaddrinfo(*asked)
        found = self._lookups.get(asked)
        if found is None:
            found = self._lookups[asked] = self.create_future()
            found.add_done_callback(partial(self._forget, asked))
            self._begin(asked, found)
        return await asyncio.shield(found)

    def _begin(self, asked: tuple[Any, ...], found: asyncio.Future[_Addresses]) -> None:
        try:
            threading.Thread(target=self._look_up, args=(asked, found), daemon=True).start()  # nobody waits for it
        except RuntimeError:  # there may be no more threads
            found.set_exception(OSError(errno.ENOMEM, "no thread can be started to look a name up"))

    def _look_up(self, asked: tuple[Any, ...], found: asyncio.Future[_Addresses]) -> None:
        try:
            tell = partial(found.set_result, socket.getaddrinfo(*asked))
        except (OSError, ValueError) as error:  # ValueError: a name that none can be
            tell = partial(found.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self.call_soon_threadsafe(tell)

    def _forget(self, asked: tuple[object, ...], found: asyncio.Future[_Addresses]) -> None:
        del self._lookups[asked]
        found.exception()  # else it would be logged where nobody waits any more

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **others: Any) -> Any:
        if host is None or _is_address(host):
            return await super().create_connection(protocol_factory, host, port, **others)
        kind = {name: others.pop(name) for name in ("family", "proto", "flags") if name in others}
        if others.get("ssl") and others.get("server_hostname") is None:
            others["server_hostname"] = host
        found = await self.getaddrinfo(host, port, type=socket.SOCK_STREAM, **kind)
        if len(found) == 1:
            address = found[0][-1]
            return await super().create_connection(protocol_factory, address[0], address[1], **others)
        return await super().create_connection(protocol_factory, sock=await self._connect_to_any(found), **others)

    async def _connect_to_any(self, found: _Addresses) -> socket.socket:
        try:
            return await start_connection(found, happy_eyeballs_delay=_NEXT_ADDRESS, loop=self)
        except OSError as error:
            if error.errno is None:  # each address failed for a reason of its own
                raise
            raise OSError(error.errno, os.strerror(error.errno)) from None


def _is_address(host: Any) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
