"""Counts what becomes of KV blocks, by worker and tier, as their events are applied and requests are sent.

A handful of additions for a batch of events or a request; ages are those of a sample (`indexer.sampling`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer.hashing import SequenceHashes
from indexer.kv_indexer import PromptHashes
from indexer.observer import Cause
from indexer.sampling import sample
from indexer.types import Tier, WorkerRank
from router.metrics.kv_ages import BlockAges
from router.metrics.tallies import counter_family, histogram_family
from router.model_config import block_bytes
from router.proxy.outcome import Outcome
from router.scheduling.booking import DecodeBooking
from router.scheduling.decision import Decision
from router.workers.worker import Worker

_FATES: Final = {
    "created": "Blocks stored that no rank held in that tier before.",
    "stored": "Blocks that a rank took in.",
    "reused": "Blocks of prompts that were there where these were sent, or in the store.",
    "migrated": "Blocks handed over to another worker, which decodes.",
    "evicted": "Blocks that a rank gave up.",
    "expired": "Blocks that are believed no longer, though no rank gave them up.",
}
_ANSWERS: Final = {
    "looked_up": "Blocks of prompts that were looked up.",
    "found": "Of these, leading ones that some rank held, or the store.",
}
_SOURCES = ("local", "store")
_TIERS = tuple(tier.name.lower() for tier in Tier)


class _Worker:
    """One worker's counts."""

    def __init__(self) -> None:
        self.created, self.stored, self.evicted, self.expired = ([0] * len(Tier) for _ in range(4))
        """By tier."""
        self.reused = [0, 0]
        """Of its own blocks, and of the store's."""
        self.migrated = 0

    def of(self, fate: str) -> Iterator[tuple[str, int]]:
        if fate == "reused":
            return zip(_SOURCES, self.reused, strict=True)
        if fate == "migrated":
            return iter([(_TIERS[Tier.GPU], self.migrated)])
        return zip(_TIERS, getattr(self, fate), strict=True)


class KVLifecycle(Collector):
    """Implements `indexer.observer.Observer`."""

    def __init__(self, clock: Callable[[], float], secret: int = 0) -> None:
        """`secret`: see `indexer.sampling.sample`."""
        self._clock = clock
        self._secret = secret
        self._workers: dict[str, _Worker] = {}
        self._looked_up, self._found = [0, 0], [0, 0]
        """At the workers, and in the store."""
        self._ages = BlockAges()
        self._block_bytes: dict[str, int] = {}
        """By worker, where it is known: there are no figures in bytes of others."""
        self.loading: Mapping[str, Mapping[WorkerRank, int]] = {}
        """Tokens that each rank loads now, by the name of the tier that it loads them from."""

    def _worker(self, worker_id: str) -> _Worker:
        found = self._workers.get(worker_id)
        if found is None:
            found = self._workers[worker_id] = _Worker()
        return found

    async def learn(self, worker: Worker, folders: Sequence[str] = ()) -> None:
        """The worker has been described. `folders`: `--model-folder`."""
        size, before = block_bytes(worker, folders), self._block_bytes.pop(worker.id, None)
        if size:
            self._block_bytes[worker.id] = size
        if before and size != before:  # what was counted are other blocks: a sum of both would be wrong, and might fall
            self._workers.pop(worker.id, None)

    def keep(self, workers: Collection[str]) -> None:
        """Drop the metrics of all workers but these: the others have left."""
        for kept in (self._workers, self._block_bytes):
            for worker_id in kept.keys() - set(workers):
                del kept[worker_id]
        self._ages.keep(workers)

    # -- Observer

    def stored(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes, created: int) -> None:
        worker = self._worker(rank.worker_id)
        worker.stored[tier] += len(hashes)
        worker.created[tier] += created
        if sampled := sample(hashes, self._secret):
            self._ages.stored(rank, tier, sampled, self._clock())

    def removed(self, rank: WorkerRank, tier: Tier, hashes: SequenceHashes) -> None:
        self._worker(rank.worker_id).evicted[tier] += len(hashes)
        if sampled := sample(hashes, self._secret):
            self._ages.removed(rank, tier, sampled, self._clock())

    def dropped(self, rank: WorkerRank, blocks: Mapping[Tier, int], cause: Cause) -> None:
        worker = self._worker(rank.worker_id)
        counts = worker.evicted if cause == "cleared" else worker.expired
        for tier, number in blocks.items():
            counts[tier] += number
        self._ages.emptied(rank, self._clock())

    # -- requests

    def routed(self, decision: Decision, block_size: int, prompt: PromptHashes | None, stored: int | None) -> None:
        """A request was sent. `stored`: leading tokens of it in the shared store; None: there is no such store."""
        overlap, best = decision.overlap_tokens, decision.best_overlap_tokens
        if overlap is None or best is None:
            return
        held, blocks = overlap // block_size, decision.prompt_tokens // block_size
        self._looked_up[0] += blocks
        self._found[0] += best // block_size
        reused = self._worker(decision.rank.worker_id).reused
        reused[0] += held
        if stored is not None:
            self._looked_up[1] += blocks
            self._found[1] += stored // block_size
            reused[1] += decision.stored_tokens // block_size
        chain = prompt.chains.get(block_size) if held and prompt else None
        if chain is not None and (sampled := sample(chain[:held], self._secret)):
            self._ages.reused(decision.rank, sampled, self._clock())

    def finished(self, outcome: Outcome) -> None:
        """A request has ended."""
        leg, begun = outcome.leg, outcome.first_byte is not None and not outcome.is_error
        if leg and begun and isinstance(leg.reservation, DecodeBooking):
            self._worker(leg.worker.id).migrated += leg.reservation.moved_tokens // leg.worker.block_size

    # -- prometheus_client's Collector

    def collect(self) -> Iterator[Metric]:
        for fate, text in _FATES.items():
            blocks, labels = list(self._blocks(fate)), ("worker", "tier")
            yield counter_family(f"router_kv_{fate}_blocks", text, labels, blocks)
            sizes = self._block_bytes
            in_bytes = [(who, count * sizes[who[0]]) for who, count in blocks if who[0] in sizes]
            yield counter_family(f"router_kv_{fate}_bytes", f"The same in bytes. {text}", labels, in_bytes)
        for (answer, text), counts in zip(_ANSWERS.items(), (self._looked_up, self._found), strict=True):
            tiers = [((source,), count) for source, count in zip(_SOURCES, counts, strict=True)]
            yield counter_family(f"router_kv_{answer}_blocks", text, ("tier",), tiers)
        yield from self._seconds()
        loading = GaugeMetricFamily(
            "router_kv_loading_tokens", "Tokens being loaded to GPUs.", labels=("worker", "dp_rank", "tier")
        )
        for tier, loads in self.loading.items():
            for rank, tokens in loads.items():
                loading.add_metric((rank.worker_id, str(rank.dp_rank), tier), tokens)
        yield loading

    def _blocks(self, fate: str) -> Iterable[tuple[tuple[str, ...], int]]:
        for worker_id, worker in self._workers.items():
            yield from (((worker_id, tier), count) for tier, count in worker.of(fate))

    def _seconds(self) -> Iterator[Metric]:
        lives = (((_TIERS[tier],), histogram) for tier, histogram in self._ages.lives.items())
        yield histogram_family("router_kv_life_seconds", "From stored to evicted.", ("tier",), lives)
        for name, text, histogram in (
            ("router_kv_first_reuse_seconds", "From stored to first reused.", self._ages.first_reuse),
            ("router_kv_replication_seconds", "From one rank's copy to the next one's.", self._ages.replication),
        ):
            yield histogram_family(name, text, (), [((), histogram)])
