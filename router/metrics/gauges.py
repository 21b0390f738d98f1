"""Gauges read from the router's state when /metrics is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import get_args

from engines.rank_load import RankLoad
from indexer.cursor import View
from indexer.kv_indexer import FATES, KVIndexer
from indexer.types import Tier, WorkerRank
from publishers.plane import EventPlane
from router.metrics.registry import Metrics, Sample
from router.scheduling import load
from router.scheduling.load import LoadBook
from router.workers.breaker import STATES
from router.workers.fleet import Fleet
from router.workers.worker import State, Worker


class Gauges:
    """Where the gauges are read from."""

    def __init__(
        self, fleet: Fleet, book: LoadBook, indexer: KVIndexer, plane: EventPlane, clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._book = book
        self._indexer = indexer
        self._plane = plane
        self._clock = clock

    def register(self, metrics: Metrics) -> None:
        rank = ("worker", "dp_rank")
        observe = metrics.observe
        observe("router_worker_up", "1 while the worker serves.", ("worker",), self._up)
        observe("router_worker_breaker", "1 for the state of its breaker.", ("worker", "state"), self._breakers)
        observe("router_worker_state", "1 for the worker's state.", ("worker", "state"), self._states)
        observe("router_index_view", "1 for how far the index knows a rank.", (*rank, "view"), self._views)
        observe("router_index_blocks", "Blocks indexed.", (*rank, "tier"), self._blocks)
        indexer, plane = self._indexer, self._plane
        text = "Memory that the index takes."
        observe("router_index_bytes", text, (), lambda: _alone(indexer.nbytes))
        text = "Blocks dropped for want of memory."
        observe("router_index_evicted_blocks_total", text, (), lambda: _alone(indexer.evicted))
        text = "Blocks not taken in for want of memory."
        observe("router_index_refused_blocks_total", text, (), lambda: _alone(indexer.refused))
        observe("router_index_batches_total", "Event batches received, by fate.", ("fate",), self._batches)
        text = "1 while the event plane is connected."
        observe("router_event_plane_connected", text, (), lambda: _alone(plane.connected))
        text = "Requests that a rank has in flight, foreign ones included."
        observe("router_load_requests", text, rank, lambda: self._loads(attrgetter("requests")))
        text = "Prompt tokens booked and not computed yet."
        observe("router_load_prefill_tokens", text, rank, lambda: self._loads(attrgetter("prefill_tokens")))
        text = "Tokens of all requests in flight."
        observe("router_load_active_tokens", text, rank, lambda: self._loads(attrgetter("active_tokens")))
        observe("router_load_age_seconds", "Age of a rank's latest load report.", rank, self._ages)
        observe("router_engine_load", "A rank's load as its engine reports it.", (*rank, "figure"), self._reported)

    def _breakers(self) -> Iterator[Sample]:
        for worker in self._workers():
            found = worker.breaker.state  # of one moment: exactly one is 1
            yield from (((worker.id, state), float(found == state)) for state in STATES)

    def _workers(self) -> list[Worker]:
        """Those of now: others may come and go while they are read."""
        return list(self._fleet.workers.values())

    def _ranks(self) -> Iterator[WorkerRank]:
        return (rank for worker in self._workers() for rank in worker.ranks)

    def _up(self) -> Iterator[Sample]:
        return (((worker.id,), float(worker.up)) for worker in self._workers())

    def _states(self) -> Iterator[Sample]:
        for worker in self._workers():
            found = worker.state
            yield from (((worker.id, state), float(found == state)) for state in get_args(State))

    def _views(self) -> Iterator[Sample]:
        for rank in self._ranks():
            found = self._indexer.view(rank)
            yield from (((*_labels(rank), view.value), float(found is view)) for view in View)

    def _blocks(self) -> Iterator[Sample]:
        for rank in self._ranks():
            for tier in Tier:
                yield (*_labels(rank), tier.name.lower()), float(self._indexer.index.blocks(rank, tier))

    def _batches(self) -> Iterator[Sample]:
        return (((fate,), float(self._indexer.counts[fate])) for fate in FATES)

    def _loads(self, figure: Callable[[load.Load], int]) -> Iterator[Sample]:
        return ((_labels(rank), float(figure(self._book.load(rank, self._clock())))) for rank in self._ranks())

    def _ages(self) -> Iterator[Sample]:
        return ((_labels(rank), found.age) for rank, found in self._metrics() if found.age is not None)

    def _metrics(self) -> Iterator[tuple[WorkerRank, load.Metrics]]:
        """Each as it is when it is read: reports come meanwhile."""
        found = ((rank, self._book.metrics(rank, self._clock())) for rank in self._ranks())
        return ((rank, metrics) for rank, metrics in found if metrics)

    def _reported(self) -> Iterator[Sample]:
        for rank, found in self._metrics():
            for figure in RankLoad.__struct_fields__ if found.report else ():
                value = getattr(found.report, figure)
                if value is not None:
                    yield (*_labels(rank), figure), float(value)


def _alone(value: float) -> Iterable[Sample]:
    """The one sample of a metric without labels."""
    return [((), float(value))]


def _labels(rank: WorkerRank) -> tuple[str, str]:
    return rank.worker_id, str(rank.dp_rank)
