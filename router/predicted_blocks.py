"""The blocks that a request's prompt will leave where it is sent: they count as held there at once, and no more if the
prompt was not computed."""

from __future__ import annotations

from indexer.types import WorkerRank
from router.context import Prompt, RouterContext
from router.proxy.legs import Leg
from router.scheduling.booking import DecodeBooking
from router.workers.worker import Worker


class PredictedBlocks:
    """Of one request."""

    def __init__(self, context: RouterContext, uncached: bool) -> None:
        """`uncached`: as in `RoutingOptions`."""
        self._context = context
        self._uncached = uncached
        self._before: dict[WorkerRank, int] = {}
        """Tokens of an `uncached` prompt that ranks held before it was sent there: its decisions say 0."""

    def add(self, prompt: Prompt, rank: WorkerRank, worker: Worker) -> None:
        """`prompt` was sent to `rank` of `worker`, or its KV will be."""
        hashes = prompt.hashes
        if hashes and worker.keeps_prefixes:
            if self._uncached:
                self._before[rank] = self._held(prompt, rank, worker.block_size)
            self._context.predict(rank, hashes.chain(worker.block_size), prompt.guessed)

    def take_back(self, prompt: Prompt, leg: Leg) -> None:
        """The worker of `leg` has not computed `prompt`: only what it held before is there."""
        rank, held = leg.decision.rank, leg.decision.overlap_tokens
        if isinstance(leg.reservation, DecodeBooking):  # the decision is about the prefill worker
            rank, held = leg.reservation.onward.rank, leg.reservation.onward.overlap_tokens
        hashes, size, held = prompt.hashes, leg.worker.block_size, self._before.get(rank, held)
        if hashes and held is not None:
            self._context.retract(rank, hashes.chain(size)[-(-held // size) :], prompt.guessed)

    def _held(self, prompt: Prompt, rank: WorkerRank, block_size: int) -> int:
        """Leading tokens of `prompt` that `rank` holds, whether or not its engine will use them."""
        found = self._context.matches(prompt)
        prefix = None if found is None else found.prefix_of(rank)
        return prefix.blocks * block_size if prefix else 0
