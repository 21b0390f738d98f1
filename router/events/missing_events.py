"""Workers whose KV events should arrive and do not: none ever came, or they have stopped."""

from __future__ import annotations

import logging

from engines.description import EventSource
from indexer.cursor import View
from indexer.kv_indexer import KVIndexer
from indexer.types import WorkerRank
from publishers.logs import log_event
from publishers.plane import EventPlane
from router.workers.fleet import Fleet
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds that a worker must be up, with the event plane connected, before its events count as missing. Reports come
every second."""

_NAMED = 3
"""Ranks whose endpoints a message names at most; an engine may have hundreds, usually on consecutive ports."""


class MissingEvents:
    def __init__(self, fleet: Fleet, indexer: KVIndexer, plane: EventPlane, namespace: str | None) -> None:
        """`namespace`: of the events on the broker; None where the router reads the engines' sockets itself."""
        self._fleet = fleet
        self._indexer = indexer
        self._plane = plane
        self._namespace = namespace
        self._since: dict[str, float] = {}
        self._told: set[str] = set()
        self.problems: dict[str, str] = {}
        """By worker, a sentence for people."""

    def tick(self, now: float) -> None:
        """To be called about once a second. `now`: seconds on a steady clock."""
        up = {worker.id: self._unheard(worker) for worker in self._fleet.up}
        unheard = {name: ranks for name, ranks in up.items() if ranks and self._plane.connected}
        self._since = {name: self._since.get(name, now) for name in unheard}
        missed = [name for name, since in self._since.items() if now - since >= PATIENCE]
        self.problems = {name: self._problem(name, unheard[name]) for name in missed}
        for name in missed:
            if name not in self._told:
                log_event(logger, logging.WARNING, self.problems[name], worker=name)
        heard = {name for name, ranks in up.items() if not ranks}
        self._told = (self._told - heard).union(missed) & self._fleet.workers.keys()

    def forget(self, name: str) -> None:
        """It has left: another may come under its name before the next `tick`."""
        self._since.pop(name, None)
        self._told.discard(name)
        self.problems.pop(name, None)

    def _unheard(self, worker: Worker) -> list[WorkerRank]:
        """The worker's ranks that are followed, and from which nothing was ever received, or nothing more."""
        indexer = self._indexer
        watched = (rank for rank in worker.ranks if indexer.watches(rank) and not indexer.learns_anew(rank))
        return [rank for rank in watched if indexer.view(rank) in {View.BLIND, View.RECOVERING}]

    def _problem(self, name: str, unheard: list[WorkerRank]) -> str:
        ranks = [rank for rank in unheard if self._indexer.view(rank) is View.BLIND]
        numbers = ", ".join(str(rank.dp_rank) for rank in ranks or unheard)
        if not ranks and all(map(self._indexer.foreign, unheard)):
            return (
                f"The KV events of dp_rank {numbers} cannot be used, and what is sent there is assumed to be held: its "
                "publisher is of another version than this router; upgrade the older of the two (docs/publishers.md)."
            )
        if not ranks:
            return (
                f"The index of dp_rank {numbers} is out of date and does not recover: its publisher has fallen silent, "
                "does not answer, or is of another version than this router; check that it runs, is connected and has "
                "the same version, and what its log says (docs/publishers.md)."
            )
        if self._namespace is None:
            also, key = self._replays(name, ranks)
            return (
                f"No KV events of dp_rank {numbers} have arrived yet: nothing that speaks ZMQ answers at "
                f"{self._endpoints(name, ranks)}{also}; check that the router reaches it, or state the right endpoint "
                f"with --worker URL,events=tcp://HOST:PORT{key}."
            )
        if all(map(self._indexer.reported, ranks)):
            return f"Load reports of dp_rank {numbers} arrive, but no KV events: the log of its publisher says why."
        return (
            f"No KV events of dp_rank {numbers} have arrived yet: a publisher must run beside the engine, with "
            f"--worker-id {name} and --namespace {self._namespace}, on this router's broker (docs/publishers.md)."
        )

    def _endpoints(self, name: str, ranks: list[WorkerRank]) -> str:
        """What the operator states is the endpoint of rank 0; those of the other ranks follow from it."""
        if stated := self._fleet.workers[name].spec.events:
            return stated
        told = {each.dp_rank: each.endpoint for each in self._sources(name)}
        return ", ".join(told.get(rank.dp_rank, "its endpoint") for rank in ranks[:_NAMED])

    def _replays(self, name: str, ranks: list[WorkerRank]) -> tuple[str, str]:
        """Events wait for their replay: one that is not answered holds them up while the engine has nothing new."""
        told = {each.dp_rank: each.replay for each in self._sources(name)}
        each = [told.get(rank.dp_rank) for rank in ranks[:_NAMED]]
        there = self._fleet.workers[name].spec.replay or ", ".join(filter(None, each))
        return (f", or at {there} for their replay", ",replay=tcp://HOST:PORT") if there else ("", "")

    def _sources(self, name: str) -> tuple[EventSource, ...]:
        description = self._fleet.workers[name].description
        return description.event_sources if description else ()
