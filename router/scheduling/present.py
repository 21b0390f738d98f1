"""The situation at one moment, computed when any part of it is first read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from indexer.matches import Matches, Overlaps
from indexer.types import SequenceHash
from router.scheduling import figures
from router.scheduling.candidates import Candidates, Costs, Figures, Seconds
from router.scheduling.decision import NOTHING_HELD, QueueState
from router.scheduling.figures import Counts
from router.scheduling.kv_loads import KVLoads
from router.scheduling.latency import Prefill
from router.scheduling.overlap import LOWER_TIER_CREDIT, STORE_CREDIT

if TYPE_CHECKING:
    from router.scheduling.scheduler import Scheduler

_COUNTS: Final[Counts] = np.zeros((0, 0), np.int64)
_ESTIMATES: Final = np.zeros((0, 0))
"""Placeholders: nothing was computed yet."""


class Present:
    """Implements `decision.Situation`."""

    def __init__(
        self,
        scheduler: Scheduler,
        candidates: Candidates,
        prompt_tokens: int,
        matches: Matches | None,
        now: float,
        stored: int = 0,
        limit: float = math.inf,
        queue: QueueState = NOTHING_HELD,
        adapter: str | None = None,
    ) -> None:
        """`stored`: leading prompt tokens that are in a shared store. `limit`: see `Situation`. `adapter`: the LoRA
        adapter that is asked for."""
        self.candidates = candidates
        self.prompt_tokens = prompt_tokens
        self.now = now
        self.limit = limit
        self._scheduler = scheduler
        self.matches = matches
        self._stored = stored
        self._queue = queue
        self.adapter = adapter
        self._counts: Counts = _COUNTS
        self._estimates: Seconds = _ESTIMATES
        self._best = 0
        """The longest overlap of any candidate, in tokens."""
        self._busy = 0
        """How many candidates have a prefill to do."""

    @property
    def counts(self) -> Counts:
        self._need_counts()
        return self._counts

    @property
    def estimates(self) -> Seconds:
        self._need_estimates()
        return self._estimates

    def _need_counts(self) -> None:
        if self._counts is _COUNTS:
            self._compute()

    def _need_estimates(self) -> None:
        """Estimates read the backlog, which is kept from then on."""
        self._scheduler.backlog.wanted = True
        self._need_counts()

    def _compute(self) -> None:
        scheduler, candidates, matches, now = self._scheduler, self.candidates, self.matches, self.now
        if matches is None:
            blocks = cpu_blocks = gpu_blocks = np.zeros(len(candidates), np.int32)
        else:
            blocks, cpu_blocks, gpu_blocks = self._overlaps(matches)
        loads, own, load_places, limits = scheduler.book.columns(candidates, now)
        works, work_places = scheduler.backlog.columns(candidates, now)
        prefill_factors, step_factors, factor_places, prefill_shape, step_shape = scheduler.latency.columns(
            candidates, now
        )
        self._counts, self._estimates = figures.matrices(len(candidates))
        self._best, self._busy = figures.work_out(
            loads,
            own,
            load_places,
            limits,
            works,
            work_places,
            prefill_factors,
            step_factors,
            factor_places,
            prefill_shape,
            step_shape,
            blocks,
            cpu_blocks,
            gpu_blocks,
            candidates.block_sizes,
            candidates.uses_store,
            self.prompt_tokens,
            self._stored,
            LOWER_TIER_CREDIT,
            scheduler.latency.residence,
            now,
            self._counts,
            self._estimates,
        )
        if self._queue.leaves_out:  # those without room are worth waiting for
            self._estimates[figures.LATE] = 0.0
        ahead = self._queue.ahead.get(candidates)
        if ahead is not None:
            self._estimates[figures.AHEAD] = ahead
        if self.adapter is not None:
            waits = scheduler.book.adapters.waits(candidates, self.adapter, scheduler.latency.residence)
            np.maximum(self._estimates[figures.QUEUE], waits, out=self._estimates[figures.QUEUE])
        counts = self._counts
        if self._stored:
            self._estimate_loads(scheduler.store_loads, counts[figures.STORED])
        if gpu_blocks is not blocks:
            self._estimate_loads(scheduler.cpu_loads, counts[figures.LOWER] - counts[figures.DISK])
        if cpu_blocks is not blocks:
            self._estimate_loads(scheduler.disk_loads, counts[figures.DISK])

    def _overlaps(self, matches: Matches) -> tuple[Overlaps, Overlaps, Overlaps]:
        """Blocks in any tier, not on disk, and on the GPU. Blocks that a rank is still loading from the store are of no
        use to the next request, which would load them again; so predicted blocks do not count for ranks that are
        loading."""
        candidates, loading = self.candidates, self._scheduler.store_loads.tokens
        blocks, cpu_blocks = matches.blocks_of(candidates), matches.cpu_blocks_of(candidates)
        gpu_blocks = matches.gpu_blocks_of(candidates)
        if not (self._stored and loading):
            return blocks, cpu_blocks, gpu_blocks
        loads = np.array([rank in loading for rank in candidates.ranks])
        blocks = np.where(loads, matches.known_blocks_of(candidates), blocks)
        return blocks, np.minimum(blocks, cpu_blocks), np.minimum(blocks, gpu_blocks)

    def _estimate_loads(self, loads: KVLoads, tokens: Figures) -> None:
        own = loads.own_seconds(tokens, self.now)
        self._estimates[figures.OWN_LOAD] += own
        self._estimates[figures.LOAD] += own + loads.wait_seconds(self.candidates, self.now) * (tokens > 0)

    def _count(self, row: int) -> Figures:
        found: Figures = self.counts[row]
        return found

    def _estimate(self, row: int) -> Seconds:
        found: Seconds = self.estimates[row]
        return found

    @property
    def requests(self) -> Figures:
        """Modes that do not look at prompts read nothing else: the rest is not worked out for them."""
        if self.matches is None and self._counts is _COUNTS:
            return self._scheduler.book.loads(self.candidates, self.now).requests
        return self._count(figures.IN_FLIGHT)

    @property
    def own_requests(self) -> Figures:
        return self._count(figures.OWN)

    @property
    def prefill_tokens(self) -> Figures:
        return self._count(figures.TO_PREFILL)

    @property
    def active_tokens(self) -> Figures:
        return self._count(figures.TO_READ)

    @property
    def memory_tokens(self) -> Figures:
        return self._count(figures.MEMORY)

    @property
    def capacity_tokens(self) -> Figures:
        return self._count(figures.CAPACITY)

    @property
    def overlap_tokens(self) -> Figures:
        return self._count(figures.OVERLAP)

    def prefix_of(self, position: int) -> SequenceHash | None:
        found = self.matches.prefix_of(self.candidates.ranks[position]) if self.matches is not None else None
        return found.sequence_hash if found else None

    @property
    def best_overlap_tokens(self) -> int:
        """The longest overlap of any candidate."""
        self._need_counts()
        return self._best

    @property
    def stored_tokens(self) -> Figures:
        return self._count(figures.STORED)

    @property
    def lower_tokens(self) -> Figures:
        return self._count(figures.LOWER)

    @property
    def disk_tokens(self) -> Figures:
        """How many of `lower_tokens` are on disk only."""
        return self._count(figures.DISK)

    @property
    def credit_tokens(self) -> Costs:
        own = self._estimate(figures.CREDIT)
        if not self._stored:
            return own
        credit: Costs = own + STORE_CREDIT * self.stored_tokens
        return credit

    # -- in seconds

    @property
    def queue_seconds(self) -> Seconds:
        return self._estimate(figures.QUEUE)

    @property
    def late_seconds(self) -> Seconds:
        return self._estimate(figures.LATE)

    @property
    def computed_seconds(self) -> Seconds:
        return self._estimate(figures.COMPUTED)

    @property
    def held_seconds(self) -> Seconds:
        return self._estimate(figures.AHEAD)

    @property
    def held_requests(self) -> float:
        return self._queue.requests

    @property
    def prefill_seconds(self) -> Seconds:
        return self._estimate(figures.OWN_PREFILL)

    @property
    def work_seconds(self) -> Seconds:
        return self._estimate(figures.OWN_WORK)

    @property
    def load_seconds(self) -> Seconds:
        return self._estimate(figures.LOAD)

    @property
    def own_load_seconds(self) -> Seconds:
        return self._estimate(figures.OWN_LOAD)

    @property
    def step_seconds(self) -> Seconds:
        return self._estimate(figures.STEP)

    @property
    def loading(self) -> float:
        return max(loads.busy(self.candidates, self.now) for loads in self._scheduler.loads)

    @property
    def whole_prefill_seconds(self) -> float:
        return self._scheduler.latency.prefill_work(Prefill(self.prompt_tokens, self.prompt_tokens))

    @property
    def residence_seconds(self) -> float:
        return self._scheduler.latency.residence

    @property
    def answer_tokens(self) -> float:
        return self._scheduler.latency.answer_tokens

    @property
    def busy(self) -> float:
        self._need_estimates()
        return self._busy / len(self.candidates)
