"""What travels on the event plane: batches, snapshots, load reports and replay requests, in any order and form."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import msgspec

from indexer.cursor import MAX_EARLY_BATCHES
from indexer.events import (
    Cleared,
    Event,
    EventBatch,
    LoadReport,
    Removed,
    ReplayRequest,
    Stored,
    decode_batch,
    encode,
    pack_hashes,
)
from indexer.kv_indexer import KVIndexer
from indexer.types import Tier, WorkerRank
from publishers.local_plane import LocalPlane
from publishers.rank import Epochs, RankPublisher
from router.events.ingest import Ingest
from router.metrics.registry import Metrics
from router.scheduling.load import LoadBook
from tests.fuzz.target import DEEP_MSGPACK, MSGPACK, Target, place

_RANKS = [WorkerRank("w", 0), WorkerRank("w", 1)]
_MEMORY = 1 << 20
_metrics = Metrics()
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class _Router:
    """The router's end of the plane; it asks for no replays, since nobody would answer."""

    def __init__(self) -> None:
        self.index = KVIndexer(max_bytes=_MEMORY)
        self.book = LoadBook()
        for rank in _RANKS:
            self.index.watch(rank)
            self.book.watch(rank, 16)
        self.ingest = Ingest(LocalPlane(), "fleet", self.index, self.book, _metrics, lambda: 0.0)
        self.ingest._closed = True
        self.ingest._told = {"events", "load"}  # nothing is logged

    def check(self) -> None:
        assert self.index.nbytes <= _MEMORY
        for cursor in self.index._cursors.values():
            assert len(cursor._early) <= MAX_EARLY_BATCHES
        for rank in _RANKS:
            self.book.load(rank, 0.0)
            self.index.forget(rank)
            assert not any(self.index.index.blocks_by_tier(rank).values())


def _messages(data: bytes) -> Hashable:
    """A list of `[kind, message]`."""
    router, publisher = _Router(), RankPublisher(_RANKS[0], LocalPlane(), "fleet", Epochs(lambda: 1))
    told = []
    for kind, message in _listed(data):
        match kind:
            case 0:
                router.ingest._on_batch(message)
            case 1:
                router.ingest._on_report(message)
            case 2:
                assert len(publisher._answer(message)) <= 1
            case 3:
                router.index.on_replay_end(_RANKS[0])
            case _:
                router.index.on_reconnect()
        told.append((kind, router.index.view(_RANKS[0])))
    counts = tuple(sorted(router.index.counts))
    router.check()
    return counts, tuple(told[-3:])


def _listed(data: bytes) -> list[tuple[int, bytes]]:
    try:
        found = _decode(data)
    except (ValueError, RecursionError):
        return [(kind, data) for kind in range(5)]
    entries = (
        [entry for entry in found if isinstance(entry, list) and len(entry) > 1] if isinstance(found, list) else []
    )
    return [(kind if kind in range(5) else 0, _message(message)) for kind, message, *_ in entries[:50]]


def _message(value: Any) -> bytes:
    """Bytes are a message as it is."""
    try:
        return value if isinstance(value, bytes) else _encode(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return b""


def _frame(data: bytes) -> Hashable:
    """One message, as a batch that then comes again; a batch that is understood is written as it was read."""
    router = _Router()
    for kind in (router.ingest._on_batch, router.ingest._on_report, router.ingest._on_batch):
        kind(data)
    router.check()
    try:
        batch = decode_batch(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return place(error)
    assert decode_batch(encode(batch)) == batch
    return tuple(type(event).__name__ for event in batch.events[:3]), tuple(sorted(router.index.counts))


def _batches() -> list[EventBatch]:
    hashes = pack_hashes(list(range(1, 9)))
    events: list[list[Event]] = [
        [Stored(Tier.GPU, hashes)],
        [Stored(Tier.CPU, hashes), Removed(Tier.GPU, hashes[:16])],
        [Cleared(), Stored(Tier.DISK, hashes)],
        [Stored(Tier.GPU, hashes[:32], 2), Stored(Tier.GPU, b"", 1), Removed(Tier.GPU, hashes[:8], 2)],
        [],
    ]
    return [EventBatch("w", number % 2, 1, number // 2, each) for number, each in enumerate(events * 2)]


def _snapshot() -> list[EventBatch]:
    hashes = pack_hashes(list(range(100, 120)))
    return [EventBatch("w", 0, 1, 7, [Stored(Tier.GPU, hashes)], part, 3) for part in range(3)]


def _reports() -> list[LoadReport]:
    return [LoadReport("w", 0, 1, 7, True), LoadReport("w", 1, 2, -1, False, 3, 0.5, 0.25, 4, 8, 100, 1000)]


def _frames() -> list[bytes]:
    """The last ones have a field more, nested deeply."""
    frames = [encode(each) for each in (*_batches(), *_snapshot(), *_reports(), ReplayRequest("w", 0, 1, 2))]
    return [*frames, *(bytes([frame[0] + 1]) + frame[1:] + DEEP_MSGPACK[0] for frame in frames)]


def _sessions() -> list[bytes]:
    """Orders that make a cursor ask, hold back, restart and take a snapshot."""
    batches, reports = [(0, each) for each in _batches()], [(1, each) for each in _reports()]
    snapshot, ends = [(0, each) for each in _snapshot()], [(3, None), (4, None)]
    asks = [(2, ReplayRequest("w", 0, 1, 0))]
    orders: list[list[tuple[int, Any]]] = [
        batches,
        batches[::-1],
        [*batches[:2], *reports, *reports, *snapshot, ends[0]],
        [*reports, *batches[4:], ends[1], *snapshot[:2], *batches],
        [*asks, *snapshot, *ends],
    ]
    orders += [one + two for one, two in itertools.pairwise(orders)]
    deep = [[kind, frame] for kind in range(3) for frame in _frames()[-3:]]
    return [_encode(deep), *map(_encode, orders)]


_WORDS = (
    *DEEP_MSGPACK, b"\xa1s", b"\xa1r", b"\xa1c", b"\xa1w", b"\xc4\x08" + bytes(8), b"\xc4\x07" + bytes(7),
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xc0", b"\x90", b"\x91", b"\x95", b"\x98",
    b"\xcb\x7f\xf0" + bytes(6), b"\xff", b"\xcc\xff", b"\xc1",
)  # fmt: skip

TARGETS = (
    Target("event-plane", _messages, _sessions, _WORDS, MSGPACK, share=30),
    Target("event-plane-frame", _frame, _frames, _WORDS, MSGPACK, share=40),
)
