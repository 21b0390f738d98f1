"""Holds a decode worker's usage back until the prefill worker has reported how much of the prompt it had cached.

Where both legs of a request are sent at once, the decode leg may end moments before the prefill leg has answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.http.upstream import Head, Receiver
from router.proxy.usage import CACHED

PATIENCE = 1.0
"""Seconds that the usage is held back at most. The prompt is computed by then, so only the prefill's answer can still
be on its way, and a client should not wait longer for a number."""


class LateUsage:
    """Implements `upstream.Receiver`: passes the answer on at once up to the first mention of cached tokens, and the
    rest when it is released."""

    def __init__(self, receiver: Receiver, settle: Callable[[], None]) -> None:
        """`settle` is called when the end of the answer is held while its connection may serve other requests."""
        self._receiver = receiver
        self._settle = settle
        self._told = False
        self._tail = b""
        self._held: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.ended = False
        """Whether all of the answer has come."""

    def release(self) -> None:
        """The prefill worker has answered, or will not."""
        self._told = True
        self._unwatch()
        while self._held:  # one may end it all, and drop the others
            self._held.pop(0)()

    def drop(self) -> None:
        """Discard what is held: the request is over."""
        self._held = []
        self._unwatch()

    # -- upstream.Receiver

    def on_head(self, head: Head, length: int | None) -> None:
        self._told = self._told or head.is_error
        self._receiver.on_head(head, length)

    def on_body(self, data: bytes, boundary: int) -> None:
        if self._told or not self._tells(data):
            self._receiver.on_body(data, boundary)
        else:
            self._hold(lambda: self._receiver.on_body(data, boundary))

    def on_chunks(self, chunks: int) -> None:
        self._receiver.on_chunks(chunks)

    def on_end(self) -> None:
        self.ended = True
        if self._told or not self._held:
            self._receiver.on_end()
        else:
            self._settle()
            self._hold(self._receiver.on_end)

    def on_broken(self, reason: str) -> None:
        self.release()
        self._receiver.on_broken(reason)

    # -- inside

    def _tells(self, data: bytes) -> bool:
        """Whether cached tokens are mentioned here or were before; the mention may be cut between two pieces."""
        latest = self._tail + data
        self._tail = latest[1 - len(CACHED) :]
        return CACHED in latest or bool(self._held)

    def _hold(self, passing: Callable[[], None]) -> None:
        if not self._held:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE, self.release)
        self._held.append(passing)

    def _unwatch(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
