"""What the router counts, under /metrics. Every name here is explained in docs/metrics.md, which a test checks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from io import BytesIO
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, samples
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.metrics.exposition import PIECE, expose
from router.metrics.kv_lifecycle import KVLifecycle
from router.metrics.tallies import Tallies
from router.security.guard import Reason as Denied
from router.tokens.errors import Reason as Untokenized

Sample = tuple[tuple[str, ...], float]
"""Label values and the value."""


class Metrics:
    """One registry per router, so that several may live in one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, secret: int = 0) -> None:
        """`secret`: see `KVLifecycle`."""
        self.registry = CollectorRegistry(auto_describe=True)
        self.tallies = Tallies()
        self.registry.register(self.tallies)
        self.lifecycle = KVLifecycle(clock, secret)
        self.registry.register(self.lifecycle)
        ProcessCollector(registry=self.registry)
        self.untokenized = self._counter(
            "untokenized_requests",
            "Requests whose tokens could not be had, by reason.",
            reason=get_args(Untokenized),
        )
        self.engine_tokenized = Counter(
            "router_engine_tokenized_requests", "Requests tokenized by asking an engine.", registry=self.registry
        )
        self.ids_sent = Counter(
            "router_token_ids_sent_requests",
            "Requests whose prompt went to engines as token ids.",
            registry=self.registry,
        )
        self.tokenizer_mismatches = Counter(
            "router_tokenizer_mismatches",
            "Times the router's token ids differed from the engine's.",
            ["model"],
            registry=self.registry,
        )
        self.denied = self._counter(
            "denied_requests",
            "Requests turned away because of their API key or its limits, by reason.",
            reason=get_args(Denied),
        )
        self.replays = self._counter(
            "replays", "Replays asked of publishers, by outcome.", outcome=("answered", "unanswered")
        )
        self.undecodable = self._counter(
            "undecodable_messages", "Event plane messages that made no sense.", kind=("events", "load")
        )

    def _counter(self, name: str, text: str, **values: Collection[str]) -> Counter:
        """With one label, whose `values` all exist from the start: a rate needs a sample before the first event."""
        [(label, known)] = values.items()
        counter = Counter(f"router_{name}", text, [label], registry=self.registry)
        for value in known:
            counter.labels(value)
        return counter

    def deny(self, reason: str) -> None:
        self.denied.labels(reason).inc()

    def keep(self, workers: Collection[str]) -> None:
        """Drop the metrics of all workers but these: the others have left."""
        self.tallies.keep(workers)
        self.lifecycle.keep(workers)

    def observe(self, name: str, text: str, labels: tuple[str, ...], read: Callable[[], Iterable[Sample]]) -> None:
        """A gauge, or a counter if its name says so, read from the router's state whenever /metrics is asked for.
        `read`: the samples; others have their turn between them, and may change that state."""
        self.registry.register(_Reading(name, text, labels, read))

    async def page(self) -> bytes:
        """Lets other work run between pieces: with a thousand workers, the page takes a third of a second."""
        pieces = []
        for family in self.registry.collect():
            for piece in expose(family):
                pieces.append(piece.encode())
                await asyncio.sleep(0)
        return b"".join(pieces)


class _Reading(Collector):
    def __init__(self, name: str, text: str, labels: tuple[str, ...], read: Callable[[], Iterable[Sample]]) -> None:
        self._name, self._text, self._labels, self._read = name, text, labels, read
        self._family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily

    def describe(self) -> Iterator[Metric]:
        yield self._family(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        """The samples can be read once: they are made then, piece by piece."""
        family: Any = self._family(self._name, self._text, labels=self._labels)  # Any: `samples` is declared as a list
        family.samples = self._samples()
        yield family

    def _samples(self) -> Iterator[samples.Sample]:
        for values, value in self._read():
            yield samples.Sample(self._name, dict(zip(self._labels, values, strict=True)), value)


async def merge(pages: Mapping[int, bytes]) -> bytes:
    """The pages of several processes as one, each sample with a label that tells its process. Lets other work run
    meanwhile."""
    families: dict[bytes, bytearray] = {}
    for process, page in pages.items():
        family = bytearray()
        for number, line in enumerate(BytesIO(page)):  # neither it nor what is gathered is ever split or joined as one
            if not number % PIECE:
                await asyncio.sleep(0)
            if line.startswith(b"# HELP"):
                family = families.setdefault(line, bytearray())
            elif not line.startswith(b"#"):
                family += _labelled(line, process)
            elif not family:
                family += line  # its type
    joined = bytearray()
    for head in list(families):
        joined += head
        joined += families.pop(head)
        await asyncio.sleep(0)
    return bytes(joined)


def _labelled(sample: bytes, process: int) -> bytes:
    name, brace, rest = sample.partition(b"{")
    if brace:
        return b'%s{process="%d",%s' % (name, process, rest)
    name, _, value = sample.partition(b" ")
    return b'%s{process="%d"} %s' % (name, process, value)
