"""The event plane: the one small interface behind which in-process delivery and NATS are the same."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Protocol

from indexer.types import WorkerRank

OnMessage = Callable[[bytes], None]
"""Called on the event loop, in the publisher's order; must not block."""

OnRequest = Callable[[bytes], Iterable[bytes]]
"""Answers a request with any number of replies; all are made before anything else is published."""

Unsubscribe = Callable[[], Awaitable[None]]


class PlaneUnavailable(Exception):
    """The broker cannot be reached, or nobody answers."""


class EventPlane(Protocol):
    """Delivery is at most once; order is kept per (publisher, subject). Lost messages show as gaps in event ids."""

    @property
    def connected(self) -> bool: ...

    async def start(self) -> None:
        """Connect; keeps trying in the background when the broker is away, and never raises for that."""

    def publish(self, subject: str, payload: bytes) -> None:
        """Hand over for delivery. While disconnected the message may be dropped."""

    async def subscribe(self, subject: str, on_message: OnMessage) -> Unsubscribe:
        """`subject` may end in `.>`: everything below."""

    def request(self, subject: str, payload: bytes) -> AsyncIterator[bytes]:
        """The replies, in order, until the server's end mark; raises PlaneUnavailable when nobody answers in time."""

    async def serve(self, subject: str, on_request: OnRequest) -> Unsubscribe: ...

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Called whenever the connection is there again after having been lost."""

    async def close(self) -> None: ...


NAMESPACE, NAMESPACE_TAKES = r"[A-Za-z0-9_-]+", "letters, digits, '_' and '-'"
"""A namespace as a pattern and in words: no blanks, and nothing that NATS takes for a wildcard or more tokens."""


def is_namespace(text: str) -> bool:
    """Whether it can stand in subjects."""
    return re.fullmatch(NAMESPACE, text) is not None


WORKER_ID_TAKES = "the worker's name in the router: letters, digits, '_', '.', ':' and '-'"


def is_worker_id(text: str) -> bool:
    """Whether a worker may be called so in a router: by its name, or by the host (an IPv6 address in brackets) and port
    of its URL."""
    return re.fullmatch(r"[A-Za-z0-9_.:%\[\]-]+", text) is not None


def _token(worker_id: str) -> str:
    """A worker id as one subject token: NATS forbids dots, blanks and wildcards there."""
    return "".join(c if (c.isalnum() and c.isascii()) or c in "-_" else f"%{ord(c):x}" for c in worker_id)


def events_subject(namespace: str, rank: WorkerRank) -> str:
    return f"kv.{namespace}.events.{_token(rank.worker_id)}.{rank.dp_rank}"


def load_subject(namespace: str, rank: WorkerRank) -> str:
    return f"kv.{namespace}.load.{_token(rank.worker_id)}.{rank.dp_rank}"


def replay_subject(namespace: str, rank: WorkerRank) -> str:
    return f"kv.{namespace}.replay.{_token(rank.worker_id)}.{rank.dp_rank}"


def figures_subject(namespace: str, rank: WorkerRank) -> str:
    """On which an engine's front end sends its load, to the process that publishes its events and reports."""
    return f"kv.{namespace}.figures.{_token(rank.worker_id)}.{rank.dp_rank}"


def all_events(namespace: str) -> str:
    return f"kv.{namespace}.events.>"


def all_loads(namespace: str) -> str:
    return f"kv.{namespace}.load.>"
