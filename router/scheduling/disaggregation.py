"""Whether a request is served by one worker or by two, and which one decodes: by predicted seconds, whatever the
policy.

A request goes whole to one worker if that is predicted to cost less: because its uncached part is short, or because
moving its KV takes longer than it saves. Otherwise the policy chooses the prefill rank. The decode rank is chosen here:
least of transfer, wait for memory, queue, and the steps of the coming tokens. What the decode rank already holds is not
moved again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from indexer.matches import Matches
from router.scheduling.auto import Auto
from router.scheduling.auto_costs import memory_waits
from router.scheduling.candidates import Split
from router.scheduling.decision import Onward
from router.scheduling.present import Present
from router.scheduling.received import Received
from router.scheduling.transfer import Transfers, prior_seconds

if TYPE_CHECKING:
    from router.scheduling.scheduler import Scheduler

HORIZON: Final = 64
"""Tokens of an answer whose decode steps count in the comparison: the answer's length is not known."""
STALL: Final = 0.5
"""Weight of a second for which a prefill stalls a stream of the same rank, compared with a second of waiting for a
first token. With 1, ranks that could compute prompts idle; with 0.1, streams stall for seconds (figures in
docs/disaggregation.md)."""
SPREAD: Final = 0.1
"""Up to this share of a transfer is added on the decode rank that received most lately (see `received`)."""


class Disaggregation:
    def __init__(self) -> None:
        self.transfers = Transfers()
        self.received = Received()
        self._whole, self._prefill = Auto(), Auto()

    def splits(self, scheduler: Scheduler, whole: Present, prefills: Present, split: Split) -> bool:
        """Whether the request is to be served in two parts."""
        if not len(whole.candidates):
            return True
        costs = self._prefill.cost(prefills).values
        position = int(costs.argmin())
        onward = self.onward(scheduler, split, position, prefills)
        parted = float(costs[position]) + onward.transfer + onward.memory + onward.queue + HORIZON * onward.step
        # A stream stalls while a prompt is computed beside it: this request's by later prompts, others by this prompt.
        steps = HORIZON * (1 + self._whole.delay(whole)) * whole.step_seconds
        stalls = STALL * whole.requests * whole.prefill_seconds
        return parted < float((self._whole.cost(whole).values + steps + stalls).min())

    def onward(self, scheduler: Scheduler, split: Split, position: int, prefills: Present) -> Onward:
        """The decode rank that is likely for a request that may be prefilled at `position`, before it is sent there."""
        prefill = float(prefills.prefill_seconds[position]) if split.pushes[position] else 0.0
        tokens, matches = prefills.prompt_tokens, prefills.matches
        return self.decode(scheduler, split, position, prefill, tokens, matches, prefills.now, prefills.adapter)

    def decode(
        self,
        scheduler: Scheduler,
        split: Split,
        position: int,
        hidden: float,
        prompt_tokens: int,
        matches: Matches | None,
        now: float,
        adapter: str | None = None,
    ) -> Onward:
        """The decode rank of least cost for a request that is prefilled at `position`. `hidden`: seconds of transfer
        that overlap with the prefill, see `prior_seconds`."""
        candidates, near = split.decodes[position], split.near[position]
        present = Present(scheduler, candidates, prompt_tokens, matches, now, adapter=adapter)
        new = prompt_tokens - present.overlap_tokens
        works = prior_seconds(new, hidden)
        transfers, steps = works * self.transfers.factors(near, now), present.step_seconds
        taken, capacity = present.memory_tokens, present.capacity_tokens
        memory = memory_waits(taken, new, prompt_tokens, capacity, present.residence_seconds)
        spread = SPREAD * self.received.shares(candidates, now)
        costs = (1 + spread) * transfers + memory + HORIZON * steps + present.queue_seconds
        best = int(costs.argmin())
        return Onward(
            candidates=candidates,
            position=best,
            transfer=float(transfers[best]),
            work=float(works[best]),
            near=bool(near[best]),
            memory=float(memory[best]),
            queue=float(present.queue_seconds[best]),
            step=float(steps[best]),
            open=bool(memory[best] == 0 or present.own_requests[best] == 0),
            overlap_tokens=int(present.overlap_tokens[best]),
            idle=not present.requests[best],
            adapter=adapter,
        )
