"""Select and reserve. Selecting books nothing, though policies may remember what they chose; reserving books the
decision. There is no `await` between the two."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from indexer.matches import Matches
from indexer.types import WorkerRank
from router.scheduling.backlog import Backlog
from router.scheduling.balance import least_cost
from router.scheduling.booking import Booking, DecodeBooking, PrefillBooking
from router.scheduling.candidates import Candidates, Split
from router.scheduling.decision import NOTHING_HELD, Choice, Decision, Onward, Policy, Prediction, QueueState, Uniform
from router.scheduling.disaggregation import Disaggregation
from router.scheduling.kv_loads import KVLoads
from router.scheduling.latency import LatencyModel
from router.scheduling.load import LoadBook
from router.scheduling.others import ALONE, Others
from router.scheduling.present import Present

_NAMED = "named by the request"


class Scheduler:
    def __init__(
        self,
        policy: Policy,
        book: LoadBook,
        random: Uniform,
        backlog: Backlog | None = None,
    ) -> None:
        self._policy = policy
        self._random = random
        self.book = book
        self.backlog = backlog or Backlog()
        self.latency = LatencyModel()
        self.disaggregation = Disaggregation()
        self.store_loads, self.disk_loads, self.cpu_loads = self.loads = KVLoads(), KVLoads(), KVLoads()
        """From a shared store, and from each rank's own disk and CPU memory: the slowest first, as a rule."""
        self.handing_over: Counter[WorkerRank] = Counter()
        """By prefill rank: prompts that it has computed and keeps for a decode rank that has not begun to answer."""
        self._unheard: list[tuple[float, int, Booking]] = []
        """Bookings whose first token will not be seen: a heap of (when the prefill should be done, number, booking),
        numbered because bookings have no order."""
        self._numbers = itertools.count()
        self.changed: Callable[[], None] = _nothing
        """Called when a prefill is done or a request has ended."""

    def select(
        self,
        candidates: Candidates,
        prompt_tokens: int,
        matches: Matches | None,
        now: float,
        pinned: bool = False,
        policy: Policy | None = None,
        stored: int = 0,
        limit: float = math.inf,
        queue: QueueState = NOTHING_HELD,
        adapter: str | None = None,
    ) -> Decision:
        """Choose among `candidates`, which must not be empty.

        `matches` None: no overlap was looked up. The candidates of a `pinned` request are all ranks of the worker that
        it named. `policy`: used instead of the scheduler's own. `stored`, `limit` and `adapter`: see `Present`.
        """
        self._settle(now)
        split = candidates.split
        present = Present(self, candidates.whole, prompt_tokens, matches, now, stored, limit, queue, adapter)
        if split:
            prefills = Present(self, split.prefills, prompt_tokens, matches, now, stored, limit, queue, adapter)
            if self.disaggregation.splits(self, present, prefills, split):
                return self._select_prefill(prefills, split, policy)
        policy = policy or self._policy
        choice = self._choose_rank(present, policy) if pinned else policy.choose(present, self._random)
        return _decision(present, choice, _predict)

    def _choose_rank(self, present: Present, policy: Policy) -> Choice:
        """Choose among the ranks of a worker that the request named. Each has a cache of its own, so the policy chooses
        if the prompt was looked up. Most workers have one rank: then nothing is worked out."""
        if len(present.candidates) == 1:
            return Choice(0, None, _NAMED)
        looked_up = present.matches is not None
        choice = policy.choose(present, self._random) if looked_up else least_cost(present.requests, self._random)
        return Choice(choice.position, choice.costs, _NAMED)

    def least_prefill(
        self, candidates: Candidates, prompt_tokens: int, matches: Matches, now: float, stored: int = 0
    ) -> float:
        """The least prefill seconds of any candidate, as if all were idle."""
        ranks = candidates.whole
        if candidates.split and not len(ranks):
            ranks = candidates.split.prefills
        return float(Present(self, ranks, prompt_tokens, matches, now, stored=stored).prefill_seconds.min())

    def _select_prefill(self, prefills: Present, split: Split, policy: Policy | None) -> Decision:
        choice = (policy or self._policy).choose(prefills, self._random)
        onward = self.disaggregation.onward(self, split, choice.position, prefills)
        if not onward.open:
            choice.hold = True
        decision = _decision(prefills, choice, partial(_predict_split, onward), split)
        decision.onward = onward
        return decision

    def select_decode(self, prefill: Decision, matches: Matches | None, now: float, prefilled: bool) -> Onward:
        """The decode rank for a request whose prefill rank is decided. `prefilled`: the prefill is done, so that no
        transfer overlaps with it. LookupError if the decision is not for two parts."""
        split, position = prefill.split, prefill.position
        if split is None:
            raise LookupError(prefill.rank)
        hidden = 0.0
        if split.pushes[position] and not prefilled and prefill.predicted:
            hidden = prefill.predicted.prefill
        tokens = prefill.prompt_tokens
        return self.disaggregation.decode(self, split, position, hidden, tokens, matches, now, prefill.adapter)

    def reserve_decode(
        self,
        source: WorkerRank,
        onward: Onward,
        prompt_tokens: int,
        now: float,
        streamed: bool,
        others: Others = ALONE,
    ) -> DecodeBooking:
        """Book what `select_decode` found; the caller must release it however the request ends. `source`: the prefill
        rank."""
        booking = DecodeBooking(self, source, onward, prompt_tokens, now, streamed, others)
        self.disaggregation.received.add(onward.rank, booking.moved_tokens, now)
        return booking

    def reserve(self, decision: Decision, now: float, streamed: bool = True, others: Others = ALONE) -> Booking:
        """Book the decision's prefill and active tokens; the caller must release it however the request ends.

        An answer that is not `streamed` shows no first token, and the first of several tells nothing of the other
        prompts: such a prefill counts as done when it was predicted to be. A worker that only prefills answers when it
        is done.
        """
        heard = (streamed and not others.tokens) or decision.split is not None  # the end of the prefill
        # Reading it has the backlog kept, as booking a load from a store needs: not every policy reads estimates.
        predicted = decision.predicted if decision.stored_tokens or not heard else None
        past = not heard and predicted is None
        booking = PrefillBooking(self, decision, now, heard, past_prefill=past, others=others)
        if predicted and not heard:
            further = self.latency.others_share(others.tokens, decision.prompt_tokens)
            due = now + predicted.ttft + self.latency.seconds_on(decision.rank, further)
            heappush(self._unheard, (due, next(self._numbers), booking))
        return booking

    def _settle(self, now: float) -> None:
        """Count unseen prefills as done whose predicted end has passed."""
        while self._unheard and self._unheard[0][0] <= now:
            due, _number, booking = heappop(self._unheard)
            booking.assume_first_token(due)

    def watch(self, rank: WorkerRank, block_size: int) -> None:
        """Keep books of `rank`, whose reports count blocks of `block_size` tokens."""
        self.book.watch(rank, block_size)
        self.backlog.watch(rank)
        for loads in self.loads:
            loads.watch(rank)
        self.disaggregation.received.watch(rank)
        self.latency.watch(rank)

    def in_flight(self, rank: WorkerRank) -> int:
        """Requests of this process that still need `rank`, including prompts that it keeps for a decode rank."""
        return self.book.booked(rank) + self.handing_over[rank]

    def forget(self, rank: WorkerRank) -> None:
        """Bookings in flight stay valid."""
        self.book.forget(rank)
        self.backlog.forget(rank)
        for loads in self.loads:
            loads.forget(rank)
        self.disaggregation.received.forget(rank)
        self.latency.forget(rank)


def _nothing() -> None:
    pass


def _decision(
    present: Present, choice: Choice, predict: Callable[[Present, int], Prediction], split: Split | None = None
) -> Decision:
    tokens, adapter = present.prompt_tokens, present.adapter
    if present.matches is None:
        return Decision(present.candidates, choice, tokens, None, None, split=split, adapter=adapter)
    own, best = int(present.overlap_tokens[choice.position]), present.best_overlap_tokens
    predicted = partial(predict, present, choice.position)
    decision = Decision(present.candidates, choice, tokens, own, best, predicted, split, adapter)
    decision.stored_tokens = int(present.stored_tokens[choice.position])
    decision.lower_tokens = int(present.lower_tokens[choice.position])
    decision.disk_tokens = int(present.disk_tokens[choice.position])
    return decision


def _predict(present: Present, position: int) -> Prediction:
    return Prediction(
        queue=float(present.queue_seconds[position]),
        held=float(present.held_seconds[position]),
        prefill=float(present.prefill_seconds[position]),
        step=float(present.step_seconds[position]),
        idle=not present.requests[position],
        load=float(present.load_seconds[position]),
    )


def _predict_split(onward: Onward, prefills: Present, position: int) -> Prediction:
    prediction = _predict(prefills, position)
    behind = max(0.0, onward.queue - prediction.queue - prediction.prefill)  # what it still has to compute by then
    return prediction._replace(
        step=onward.step,
        transfer=onward.transfer + onward.memory + behind,
        idle=prediction.idle and onward.idle,
    )
