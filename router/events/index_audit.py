"""Compares what the index said about each request's rank with what its engine reported, and acts on drift.

A difference need not be a fault: an event may have been on its way while the request was routed, and blocks may be
evicted before its prefill begins. So a request that differs is judged some seconds later, when the events that could
explain it have come. What they do not explain is drift.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from indexer.cursor import View
from indexer.hashing import SequenceHashes
from indexer.kv_indexer import KVIndexer, PromptHashes
from indexer.matches import Matches
from indexer.types import WorkerRank
from publishers.logs import log_event
from router.events.drift import Drift, Step
from router.metrics.registry import Metrics, Sample
from router.proxy.outcome import Outcome
from router.scheduling.decision import Decision

logger = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds until a request that differs is judged: what is lost on the way shows by the second load report, a second
each, and is replayed then."""
EVERY = 0.01
"""Least seconds between two requests that are compared: a hundred a second tell as much as all."""
_MOST_DIFFERENT = 4096
"""Most requests that wait to be judged; beyond that the oldest are dropped."""

_STEPS: dict[Step, str] = {
    "rebuild": "A rank's part of the index is rebuilt from what its publisher holds",
    "relearn": "That did not help: a rank's part of the index is forgotten, and learned from what comes",
}
_KNOWN = frozenset((View.EXACT, View.PARTIAL))


class Claim(NamedTuple):
    """What the index said when a request was sent."""

    rank: WorkerRank
    chain: SequenceHashes
    block_size: int
    prompt_tokens: int
    known: int
    """Tokens that the rank's events told of."""
    expected: int
    """With those that were predicted: requests before it may not have been computed yet."""
    exact: bool
    dropped: int
    """A position in what the rank has dropped."""


class DriftStatus(msgspec.Struct):
    """Of one rank, as shares of prompt tokens."""

    ratio: float
    bias: float
    """Above 0 the index believes in blocks that are gone, below it misses some."""
    alarm: bool


class _Different(NamedTuple):
    claim: Claim
    cached: int
    due: float


class IndexAudit:
    """`ask_anew` asks a rank's publisher for all that it holds. `has_store`: engines load blocks from a shared store,
    and report those as cached."""

    def __init__(self, indexer: KVIndexer, ask_anew: Callable[[WorkerRank], None], has_store: bool) -> None:
        self._indexer = indexer
        self._ask_anew = ask_anew
        self._has_store = has_store
        self._drifts: dict[WorkerRank, Drift] = {}
        self._different: deque[_Different] = deque(maxlen=_MOST_DIFFERENT)
        self._next = 0.0
        """When another request is compared."""
        self.alarms = 0
        """Raised since the start."""

    def register(self, metrics: Metrics) -> None:
        rank = ("worker", "dp_rank")
        text = "How far the index was off, as a share of prompt tokens."
        metrics.observe("router_index_drift_ratio", text, rank, self._ratios)
        text = "Times that the index was found to drift from what a rank holds."
        metrics.observe("router_index_drift_alarms_total", text, (), lambda: [((), float(self.alarms))])

    def claim(self, decision: Decision, matches: Matches, prompt: PromptHashes, now: float) -> Claim | None:
        """What the index says now, of the rank that is to compute the prompt; None where it knows nothing of it, or was
        asked a moment ago."""
        if now < self._next:
            return None
        self._next = now + EVERY
        rank, position = decision.rank, decision.position
        view = self._indexer.view(rank)
        size = int(decision.candidates.block_sizes[position])
        chain = prompt.chains.get(size)
        if view not in _KNOWN or decision.overlap_tokens is None or chain is None:
            return None
        known = min(size * int(matches.known_blocks_of(decision.candidates)[position]), decision.overlap_tokens)
        dropped = self._indexer.removals.position(rank)
        exact = view is View.EXACT
        return Claim(rank, chain, size, decision.prompt_tokens, known, decision.overlap_tokens, exact, dropped)

    def finished(self, claim: Claim, outcome: Outcome, now: float) -> None:
        """The request has ended. Compare the claim with what the engine reported, if it did."""
        parted = outcome.parted
        cached = parted.answer.cached_tokens if parted else outcome.cached_tokens
        if cached is None or outcome.prompt_tokens != claim.prompt_tokens or cached > claim.prompt_tokens:
            return  # the last: older SGLang (0.5.5) adds up what each of several answers found
        if claim.known - claim.block_size <= cached <= claim.expected + claim.block_size:
            self._judge(claim, 0, now)
        else:
            self._different.append(_Different(claim, cached, now + PATIENCE))

    def tick(self, now: float) -> None:
        """To be called every second or so."""
        while self._different and self._different[0].due <= now:
            claim, cached, _ = self._different.popleft()
            gap = self._gap(claim, cached)
            if gap is not None:
                self._judge(claim, gap, now)
        for rank, drift in list(self._drifts.items()):
            if not self._indexer.watches(rank):
                del self._drifts[rank]  # its engine has fewer ranks now, or publishes no more
                continue
            alarmed = drift.alarm
            drift.tick(now)
            self._tell(rank, drift, alarmed)

    def forget(self, worker_id: str) -> None:
        """It has left: another may come under its name before the next `tick`."""
        self._drifts = {rank: drift for rank, drift in self._drifts.items() if rank.worker_id != worker_id}
        others = (each for each in self._different if each.claim.rank.worker_id != worker_id)
        self._different = deque(others, maxlen=_MOST_DIFFERENT)

    def status(self, rank: WorkerRank) -> DriftStatus | None:
        """None while none of the rank's requests could be judged."""
        drift = self._drifts.get(rank)
        return DriftStatus(round(drift.ratio, 4), round(drift.bias, 4), drift.alarm) if drift else None

    def _judge(self, claim: Claim, gap: int, now: float) -> None:
        drift = self._drifts.get(claim.rank)
        if drift is None:
            drift = self._drifts[claim.rank] = Drift()
        alarmed = drift.alarm
        step = drift.judge(gap, claim.prompt_tokens, now)
        self._tell(claim.rank, drift, alarmed)
        if step:
            self._act(claim.rank, step)

    def _gap(self, claim: Claim, cached: int) -> int | None:
        """How far off the index was, 0 where its rank's events explain it; None where nobody can tell."""
        indexer, view = self._indexer, self._indexer.view(claim.rank)
        dropped = indexer.removals.since(claim.rank, claim.dropped)
        if view not in _KNOWN or dropped is None:
            return None
        if cached < claim.known:
            gone = claim.chain[cached // claim.block_size : claim.known // claim.block_size]
            return 0 if np.isin(gone, dropped).any() else claim.known - cached
        forgets = indexer.evicted or indexer.refused  # for want of memory of its own
        if self._has_store or forgets or not (claim.exact and view is View.EXACT):
            return None
        return self._missed(claim, cached, dropped)

    def _missed(self, claim: Claim, cached: int, dropped: SequenceHashes) -> int:
        """What the engine had and the index does not know of even now, as a gap below 0."""
        overlap = self._indexer.index.find_matches(claim.chain).get(claim.rank)
        blocks = overlap.blocks if overlap else 0
        known = max(blocks * claim.block_size, claim.expected)
        if cached <= known + claim.block_size or np.isin(claim.chain[blocks : blocks + 1], dropped).any():
            return 0
        return known - cached

    def _tell(self, rank: WorkerRank, drift: Drift, alarmed: bool) -> None:
        """Once when an alarm is raised, and once when it is over. `alarmed`: until now."""
        if drift.alarm == alarmed:
            return
        named = {"worker": rank.worker_id, "dp_rank": rank.dp_rank}
        if drift.alarm:
            self.alarms += 1
            ratio, bias = (round(figure, 3) for figure in drift.found)
            log_event(
                logger, logging.WARNING, "The index drifts from what a rank holds", **named, ratio=ratio, bias=bias
            )
        else:
            self._indexer.relearned(rank)
            log_event(logger, logging.INFO, "The index drifts no longer", **named)

    def _act(self, rank: WorkerRank, step: Step) -> None:
        log_event(logger, logging.INFO, _STEPS[step], worker=rank.worker_id, dp_rank=rank.dp_rank)
        if step == "rebuild":
            self._ask_anew(rank)
        else:
            self._indexer.relearn(rank)

    def _ratios(self) -> Iterator[Sample]:
        for rank, drift in list(self._drifts.items()):
            yield (rank.worker_id, str(rank.dp_rank)), drift.ratio
