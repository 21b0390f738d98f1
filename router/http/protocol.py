"""The methods of `asyncio.Protocol`. A subclass of the original could not be compiled
(docs/adr/0008-compiled-modules.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast


class Protocol:
    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        raise NotImplementedError

    def eof_received(self) -> bool:
        """False: the transport closes itself."""
        return False

    def pause_writing(self) -> None:
        """The transport's buffer is full."""

    def resume_writing(self) -> None:
        """It has room again."""


def for_loop(make: Callable[[], Protocol]) -> Callable[[], Any]:
    """`make` with the type that event loops expect."""
    return cast("Callable[[], Any]", make)
