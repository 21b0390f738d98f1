"""The event plane inside one process: no broker, delivery is a function call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from publishers.plane import OnMessage, OnRequest, PlaneUnavailable, Unsubscribe

logger = logging.getLogger(__name__)

MOST_SUBJECTS = 10_000
"""Of which is remembered who takes them: workers come and go, and each has names of its own."""

TURN = 64 * 1024
"""Bytes of replies after which other work gets its turn: to take in a snapshot of a million blocks takes a third of a
second."""


class LocalPlane:
    """An `EventPlane` for publishers and a router in one event loop; nothing is ever lost or late."""

    def __init__(self) -> None:
        self.connected = False
        self.dropped = 0
        """Messages published before `start` or after `close`."""
        self._subscriptions: list[tuple[str, OnMessage]] = []
        self._takers: dict[str, tuple[OnMessage, ...]] = {}
        """Who gets what is published, by subject; forgotten when anybody comes or goes."""
        self._servers: dict[str, OnRequest] = {}

    async def start(self) -> None:
        self.connected = True

    def publish(self, subject: str, payload: bytes) -> None:
        if not self.connected:
            self.dropped += 1
            return
        takers = self._takers.get(subject)
        if takers is None:
            if len(self._takers) >= MOST_SUBJECTS:
                self._takers.clear()
            takers = self._takers[subject] = tuple(
                o for pattern, o in self._subscriptions if _matches(pattern, subject)
            )
        for on_message in takers:
            _deliver(on_message, subject, payload)

    async def subscribe(self, subject: str, on_message: OnMessage) -> Unsubscribe:
        entry = (subject, on_message)
        self._subscriptions.append(entry)
        self._takers.clear()

        async def unsubscribe() -> None:
            if entry in self._subscriptions:
                self._subscriptions.remove(entry)
                self._takers.clear()

        return unsubscribe

    async def request(self, subject: str, payload: bytes) -> AsyncIterator[bytes]:
        if not self.connected or subject not in self._servers:
            raise PlaneUnavailable(f"nobody serves {subject}")
        try:
            replies = list(self._servers[subject](payload))
        except Exception as error:
            logger.exception("A request on %s failed", subject)
            raise PlaneUnavailable(f"{subject} gave no answer") from error
        come = 0
        for reply in replies:
            yield reply
            come += len(reply)
            if come > TURN:
                come = 0
                await asyncio.sleep(0)

    async def serve(self, subject: str, on_request: OnRequest) -> Unsubscribe:
        self._servers[subject] = on_request

        async def unsubscribe() -> None:
            if self._servers.get(subject) is on_request:
                del self._servers[subject]

        return unsubscribe

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Nothing to do: this plane cannot lose its connection."""

    async def close(self) -> None:
        self.connected = False
        self._subscriptions.clear()
        self._takers.clear()
        self._servers.clear()


def _matches(pattern: str, subject: str) -> bool:
    return subject == pattern or (pattern.endswith(".>") and subject.startswith(pattern[:-1]))


def _deliver(on_message: OnMessage, subject: str, payload: bytes) -> None:
    # One subscriber's fault must not reach the publisher, as it would not over a network.
    try:
        on_message(payload)
    except Exception:
        logger.exception("A subscriber failed on a message of %s", subject)
