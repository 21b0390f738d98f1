"""What goes into a choice and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.types import RankSet, SequenceHash, WorkerRank

Figures: TypeAlias = npt.NDArray[np.integer[Any]]
"""One number for each candidate, in their order."""
Costs: TypeAlias = npt.NDArray[np.floating[Any]]
Seconds: TypeAlias = npt.NDArray[np.float64]


class Candidates(RankSet):
    """The ranks that could serve a request, in the order of their names, each with its block size in tokens.

    With `split` there are others that could serve it in two parts: then they may be none themselves, and still be true.
    """

    def __init__(
        self,
        ranks: Iterable[tuple[WorkerRank, int]],
        split: Split | None = None,
        without_store: Collection[WorkerRank] = (),
    ) -> None:
        """`without_store`: those that take nothing from a shared store."""
        pairs = list(ranks)
        super().__init__(rank for rank, _ in pairs)
        self.block_sizes: npt.NDArray[np.int64] = np.array([size for _, size in pairs], np.int64)
        self.stored = np.array([rank not in without_store for rank, _ in pairs], np.bool_)
        """Who takes from a shared store what it does not hold itself."""
        self.split = split
        self.whole: Candidates = self if split is None else Candidates(pairs, None, without_store)
        """Those that could serve it alone."""

    def __bool__(self) -> bool:
        return self.split is not None or len(self) > 0


class Split(NamedTuple):
    """Who could serve a request in two parts. All but `prefills` have one entry for each of these."""

    prefills: Candidates
    decodes: tuple[Candidates, ...]
    """Never empty; the same object for all that can hand over to the same ranks."""
    near: tuple[npt.NDArray[np.bool_], ...]
    """Which of those are on the prefill rank's own host."""
    pushes: tuple[bool, ...]
    """KV is written to the decode rank while it is computed: only a tail is left when the prefill is done."""
    connectors: frozenset[str] = frozenset()
    """How KV is moved between any of them."""


class Onward(NamedTuple):
    """A decode rank for one prefill rank; seconds."""

    candidates: Candidates
    position: int
    transfer: float
    work: float
    """Of the transfer, on hardware of factor 1."""
    near: bool
    memory: float
    """Until its KV fits."""
    queue: float
    """Until the rank has computed the prompts that it has before it: none gets a token meanwhile."""
    step: float
    open: bool
    """It has room now, or none of ours to wait for."""
    overlap_tokens: int
    idle: bool
    """Nothing is in flight there."""

    @property
    def rank(self) -> WorkerRank:
        return self.candidates.ranks[self.position]


class Situation(Protocol):
    """All that a policy may look at; each figure is worked out when it is first asked for."""

    @property
    def now(self) -> float:
        """Seconds on a steady clock."""

    @property
    def candidates(self) -> Candidates:
        """Never empty."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def limit(self) -> float:
        """Seconds to its first token that the request may take; infinite where it has no objective."""

    @property
    def requests(self) -> Figures:
        """In flight."""

    @property
    def own_requests(self) -> Figures:
        """Those of them that came through here."""

    @property
    def prefill_tokens(self) -> Figures:
        """Prompt tokens still to compute of requests without a first token."""

    @property
    def active_tokens(self) -> Figures:
        """Tokens of all requests in flight: what decoding reads at each step."""

    @property
    def overlap_tokens(self) -> Figures:
        """Leading prompt tokens held, in any tier."""

    def prefix_of(self, position: int) -> SequenceHash | None:
        """What the leading blocks that a candidate holds are called: the sequence hash of the last of them; None where
        it holds none."""

    @property
    def credit_tokens(self) -> Figures | Costs:
        """The same, weighed by how cheap each tier is to use."""

    @property
    def stored_tokens(self) -> Figures:
        """Leading prompt tokens that a shared store has beyond a rank's own; 0 for ranks that do not use it."""

    @property
    def memory_tokens(self) -> Figures:
        """KV that the requests in flight take up; what they share counts once where the engine reports it."""

    @property
    def capacity_tokens(self) -> Figures:
        """KV that fits each rank; `UNBOUNDED` where it does not say."""

    @property
    def queue_seconds(self) -> Seconds:
        """Until this request's prefill would begin, by what was sent to each rank already."""

    @property
    def computed_seconds(self) -> Seconds:
        """Prefill that each rank was given within the last minute or so, computed by now or not."""

    @property
    def held_seconds(self) -> Seconds:
        """Prefill of requests that wait in the router, ahead of this one, for each rank."""

    @property
    def prefill_seconds(self) -> Seconds:
        """Of this request, with what each rank holds of it and what it would load from a store."""

    @property
    def work_seconds(self) -> Seconds:
        """Of that, what others cannot share: without what a step takes at least."""

    @property
    def load_seconds(self) -> Seconds:
        """Until what a rank takes from a store is there, after its loads before. It computes others meanwhile."""

    @property
    def own_load_seconds(self) -> Seconds:
        """Of this request's load alone."""

    @property
    def whole_prefill_seconds(self) -> float:
        """The same with nothing held, on a rank that is neither faster nor slower than the fleet."""

    @property
    def step_seconds(self) -> Seconds:
        """Between two tokens of a stream, with this request beside those in flight."""

    @property
    def residence_seconds(self) -> float:
        """How long a mean request takes up memory."""

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """The same once more for compiled loops: all that counts, in the rows that `figures` names."""

    @property
    def estimates(self) -> Seconds:
        """And all that is estimated."""

    @property
    def busy(self) -> float:
        """The share of candidates, 0-1, that have a prefill to do."""

    @property
    def loading(self) -> float:
        """The share of candidates, 0-1, that load from a store."""


UNBOUNDED = 1 << 62
"""Tokens."""


class Cost(NamedTuple):
    """What each candidate would cost, in any unit; lower is better."""

    values: Costs
    prompt: float
    """What a whole prompt's prefill costs in that unit: the scale on which temperature is meant."""
    open: npt.NDArray[np.bool_] | None = None
    """Which candidates a request may be sent to now; it is held while the one that it would take is not open."""


class CostPolicy(Protocol):
    """What third parties write: docs/policies.md."""

    def cost(self, situation: Situation) -> Cost: ...


class Choice(NamedTuple):
    """A policy's answer: which candidate, what each would have cost (None where nothing costs), why."""

    position: int
    costs: Costs | None
    reason: str
    hold: bool = False
    """Not yet: the candidate is the best, but has enough to do."""


class Uniform(Protocol):
    """The randomness that policies may use (`random.Random` satisfies it)."""

    def random(self) -> float: ...


class Policy(Protocol):
    def choose(self, situation: Situation, random: Uniform) -> Choice: ...


class Prediction(NamedTuple):
    """Of a request on its rank, in seconds from now."""

    queue: float
    """What was sent to the rank before it."""
    held: float
    """What waits in the router before it."""
    prefill: float
    step: float
    idle: bool
    """Nothing is in flight there, nor where it decodes."""
    load: float = 0.0
    """What comes of its KV from a store, and what the rank loads before that."""
    transfer: float = 0.0
    """Of its KV to another rank where that decodes, and what that has to do before; `step` is that one's."""

    @property
    def ttft(self) -> float:
        return self.queue + self.held + self.prefill + self.load + self.transfer + self.step

    @property
    def tbt(self) -> float:
        """Time between two tokens."""
        return self.step


class Decision:
    """A choice that explains itself. `overlap_tokens` None: no overlap was looked up."""

    __slots__ = (
        "_costs",
        "_predict",
        "_predicted",
        "best_overlap_tokens",
        "candidates",
        "hold",
        "onward",
        "overlap_tokens",
        "position",
        "prompt_tokens",
        "rank",
        "reason",
        "split",
        "stored_tokens",
    )

    def __init__(
        self,
        candidates: Candidates,
        choice: Choice,
        prompt_tokens: int,
        overlap_tokens: int | None,
        best_overlap_tokens: int | None,
        predict: Callable[[], Prediction] | None = None,
        split: Split | None = None,
    ) -> None:
        """`best_overlap_tokens`: the longest overlap that any candidate had. `predict`: asked at most once, and only if
        somebody wants to know before anything else is booked. `split`: the rank is to prefill, and another to decode,
        for which `Scheduler.select_decode` is asked."""
        self.candidates = candidates
        self._costs = choice.costs
        self.position = choice.position
        self.hold = choice.hold
        self._predict = predict
        self._predicted: Prediction | None = None
        self.rank = candidates.ranks[choice.position]
        self.reason = choice.reason
        self.prompt_tokens = prompt_tokens
        self.overlap_tokens = overlap_tokens
        self.best_overlap_tokens = best_overlap_tokens
        self.split = split
        self.stored_tokens = 0
        """Beyond the overlap, that the rank will load from a store."""
        self.onward: Onward | None = None
        """Where it would decode, had it been prefilled already."""

    def __repr__(self) -> str:
        return (
            f"<Decision for {self.rank}: {self.reason}, overlap {self.overlap_tokens} of {self.prompt_tokens} tokens>"
        )

    @property
    def predicted(self) -> Prediction | None:
        """None where nothing was looked up."""
        if self._predict is not None:
            self._predicted, self._predict = self._predict(), None
        return self._predicted

    @property
    def costs(self) -> Mapping[WorkerRank, float]:
        """What each candidate would have cost; {} where nothing costs."""
        costs = [] if self._costs is None else self._costs.tolist()
        return dict(zip(self.candidates.ranks, costs, strict=False))

    def at(self, split: Split, position: int) -> Decision:
        """The same, where the fleet has changed."""
        twin = Decision(
            split.prefills,
            Choice(position, self._costs, self.reason, self.hold),
            self.prompt_tokens,
            self.overlap_tokens,
            self.best_overlap_tokens,
            self._predict,
            split,
        )
        twin._predicted, twin.stored_tokens, twin.onward = self._predicted, self.stored_tokens, self.onward
        return twin

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the chosen rank has to compute."""
        return max(0, self.prompt_tokens - (self.overlap_tokens or 0) - self.stored_tokens)

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that take up memory of the chosen rank that was not taken before."""
        return max(0, self.prompt_tokens - (self.overlap_tokens or 0))
