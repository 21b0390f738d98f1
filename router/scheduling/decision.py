"""What a policy reads (the situation) and answers (costs, a choice), and the decision that is made of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.types import SequenceHash, WorkerRank
from router.scheduling.candidates import Candidates, Costs, Figures, Seconds, Split

HeldWork: TypeAlias = dict[Candidates, Seconds]
"""Seconds of prefill of held requests, for each rank that they would go to; no entry where there is none."""


class QueueState(NamedTuple):
    """What the queue tells of the requests that it holds, for one choice."""

    ahead: Mapping[Candidates, Seconds] = {}
    """`Situation.held_seconds` of candidates for which requests are held."""
    requests: float = 0.0
    """`Situation.held_requests`."""
    leaves_out: bool = False
    """The choice is among the candidates that have room: there are others, which have none at the moment."""


NOTHING_HELD: Final = QueueState()


class Situation(Protocol):
    """All that a policy may read. Figures are computed when the first of them is read."""

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
        """Seconds until the first token must be there; infinite without an objective."""

    @property
    def requests(self) -> Figures:
        """Requests in flight."""

    @property
    def own_requests(self) -> Figures:
        """Requests in flight that this router sent."""

    @property
    def prefill_tokens(self) -> Figures:
        """Prompt tokens still to be computed, of requests that have no first token yet."""

    @property
    def active_tokens(self) -> Figures:
        """Tokens of all requests in flight, which each decode step reads."""

    @property
    def overlap_tokens(self) -> Figures:
        """Leading prompt tokens that each rank holds, in any tier."""

    def prefix_of(self, position: int) -> SequenceHash | None:
        """The name of the prompt's prefix that a candidate holds: the sequence hash of its last block. None where it
        holds nothing of the prompt."""

    @property
    def credit_tokens(self) -> Figures | Costs:
        """`overlap_tokens`, weighed by how cheaply each tier can be used."""

    @property
    def stored_tokens(self) -> Figures:
        """Leading prompt tokens that a rank could load from a shared store beyond its own; 0 for ranks that do not use
        it."""

    @property
    def lower_tokens(self) -> Figures:
        """How many of `overlap_tokens` are only in tiers below the GPU, from which the rank has to load them."""

    @property
    def memory_tokens(self) -> Figures:
        """Tokens of KV memory in use by requests in flight; shared blocks count once where the engine reports its
        usage."""

    @property
    def capacity_tokens(self) -> Figures:
        """Tokens of KV that fit each rank; `UNBOUNDED` where it does not say."""

    @property
    def queue_seconds(self) -> Seconds:
        """Until this request's prefill would begin, given what was sent to each rank before."""

    @property
    def late_seconds(self) -> Seconds:
        """How much of `queue_seconds` stands for a prefill that is late: it was expected to be done long ago."""

    @property
    def computed_seconds(self) -> Seconds:
        """Seconds of prefill sent to each rank within about the last minute, computed by now or not."""

    @property
    def held_seconds(self) -> Seconds:
        """Seconds of prefill of the requests held in the router for each rank, ahead of this one."""

    @property
    def held_requests(self) -> float:
        """Requests held in the router that could go to the same candidates, for each rank."""

    @property
    def prefill_seconds(self) -> Seconds:
        """Of this request's prefill, given what each rank holds and what it would load."""

    @property
    def work_seconds(self) -> Seconds:
        """`prefill_seconds` without the fixed cost of a step, which requests in one step share."""

    @property
    def load_seconds(self) -> Seconds:
        """Until a rank has loaded its part from a store and its own lower tiers, after the loads queued before. It
        computes other prompts meanwhile."""

    @property
    def own_load_seconds(self) -> Seconds:
        """Of this request's own load."""

    @property
    def whole_prefill_seconds(self) -> float:
        """Of this request's prefill with nothing cached, on a rank of average speed."""

    @property
    def step_seconds(self) -> Seconds:
        """Between two tokens of a stream, with this request added to those in flight."""

    @property
    def residence_seconds(self) -> float:
        """Mean time for which a request occupies memory."""

    @property
    def answer_tokens(self) -> float:
        """Mean tokens of an answer."""

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """The counted figures above as one array for compiled loops, in the rows that `figures` names."""

    @property
    def estimates(self) -> Seconds:
        """The estimated figures above likewise."""

    @property
    def busy(self) -> float:
        """Share of the candidates (0–1) that have a prefill to do."""

    @property
    def loading(self) -> float:
        """Share of the candidates (0–1) that are loading, from a store or from lower tiers."""


UNBOUNDED = 1 << 62
"""Tokens, or requests, of a limit that no engine has told."""


class Cost(NamedTuple):
    """The cost of each candidate, in any unit; lower is better. A tuple, which takes whatever third parties give."""

    values: Costs
    prompt: float
    """Cost of the whole prompt's prefill in that unit: the scale of the temperature."""
    open: npt.NDArray[np.bool_] | None = None
    """Which candidates are ready for the request; it is held while the chosen one is not. None: all are."""


class CostPolicy(Protocol):
    """What third parties implement (docs/policies.md)."""

    def cost(self, situation: Situation) -> Cost: ...


class Choice:
    """A policy's answer: the position of a candidate, the cost of each (None for policies without costs), the
    reason."""

    def __init__(self, position: int, costs: Costs | None, reason: str, hold: bool = False) -> None:
        self.position = position
        self.costs = costs
        self.reason = reason
        self.hold = hold
        """The candidate is the best one, but has enough to do: the request should wait in the router."""


class Uniform(Protocol):
    """The randomness that policies may use (`random.Random` satisfies it)."""

    def random(self) -> float: ...


class Policy(Protocol):
    def choose(self, situation: Situation, random: Uniform) -> Choice: ...


class Prediction(NamedTuple):
    """Predicted seconds of one request on its rank."""

    queue: float
    """Behind requests that were sent to the rank before."""
    held: float
    """Behind requests that are held in the router."""
    prefill: float
    step: float
    idle: bool
    """Whether nothing is in flight there, nor on the rank that decodes."""
    load: float = 0.0
    """Of its KV from a store or a tier below the GPU, including the loads queued before."""
    transfer: float = 0.0
    """Of its KV to the decode rank, including what that rank has to do first; `step` is then the decode rank's."""

    @property
    def ttft(self) -> float:
        return self.queue + self.held + self.prefill + self.load + self.transfer + self.step

    @property
    def tbt(self) -> float:
        """Time between two tokens."""
        return self.step


class Onward(NamedTuple):
    """The decode rank chosen for one prefill rank, with predictions in seconds."""

    candidates: Candidates
    position: int
    transfer: float
    work: float
    """Seconds of the transfer by the prior, before the learned factor."""
    near: bool
    memory: float
    """Until the request's KV fits there."""
    queue: float
    """Until the rank has computed the prompts queued there, during which no stream of it gets a token."""
    step: float
    open: bool
    """Whether the request can be sent there: the rank has room for it now, or no request of this router whose end could
    be waited for."""
    overlap_tokens: int
    idle: bool
    """Whether nothing is in flight there."""
    adapter: str | None = None
    """The LoRA adapter that the request asks for."""

    @property
    def rank(self) -> WorkerRank:
        return self.candidates.ranks[self.position]


MUCH_LOADED: Final = 0.25
"""Ratio of the tokens that a prompt loads from lower tiers to those that it computes. Loading a token takes about a
tenth of the time of computing one. So up to this ratio the load is not booked, and the time to the first token is a
sample of how fast the rank computes; above it the load is booked, and the time is a sample of how fast the rank
loads."""


class Decision:
    """A choice with all that explains it. `overlap_tokens` is None where no overlap was looked up."""

    __slots__ = (
        "_costs",
        "_predict",
        "_predicted",
        "adapter",
        "best_overlap_tokens",
        "candidates",
        "disk_tokens",
        "hold",
        "lower_tokens",
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
        adapter: str | None = None,
    ) -> None:
        """`best_overlap_tokens`: the longest overlap of any candidate. `predict`: called at most once, when `predicted`
        is first read; by the figures of the moment of the choice, whenever that is. `split`: the rank only prefills;
        `Scheduler.select_decode` then chooses who decodes."""
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
        """Prompt tokens beyond the overlap that the rank will load from a store."""
        self.lower_tokens = 0
        """Prompt tokens of the overlap that the rank will load from a tier below the GPU ..."""
        self.disk_tokens = 0
        """... and how many of these from disk."""
        self.adapter = adapter
        """The LoRA adapter that the request asks for."""
        self.onward: Onward | None = None
        """The decode rank as of now; it is chosen anew once the prompt is computed."""

    def __repr__(self) -> str:
        return (
            f"<Decision for {self.rank}: {self.reason}, overlap {self.overlap_tokens} of {self.prompt_tokens} tokens>"
        )

    @property
    def predicted(self) -> Prediction | None:
        """None where no overlap was looked up, and if the decision was settled before this was read."""
        if self._predict is not None:
            self._predicted, self._predict = self._predict(), None
        return self._predicted

    def settle(self) -> None:
        """To be called once the request is sent and the decision is recorded. Drops what only explains it: some 150
        bytes for each candidate, which would otherwise be kept for as long as the request runs."""
        if self.split is not None:
            _ = self.predicted  # computed now, as `Scheduler.select_decode` may need it later
        self._predict = self._costs = None

    @property
    def costs(self) -> Mapping[WorkerRank, float]:
        """The cost of each candidate; {} for policies without costs, and once it is settled."""
        if self._costs is None:
            return {}
        return dict(zip(self.candidates.ranks, self._costs.tolist(), strict=False))

    def at(self, split: Split, position: int) -> Decision:
        """The same decision for a fleet that has changed: the chosen rank is now at `position` of `split`. Its costs
        were those of the former candidates, and are left out."""
        twin = Decision(
            split.prefills,
            Choice(position, None, self.reason, self.hold),
            self.prompt_tokens,
            self.overlap_tokens,
            self.best_overlap_tokens,
            self._predict,
            split,
            self.adapter,
        )
        twin._predicted, twin.onward = self._predicted, self.onward
        twin.stored_tokens, twin.lower_tokens = self.stored_tokens, self.lower_tokens
        twin.disk_tokens = self.disk_tokens
        return twin

    @property
    def loads(self) -> bool:
        """Whether loading takes a share of the time to the first token that counts."""
        return self.stored_tokens > 0 or self.lower_tokens > MUCH_LOADED * self.prefill_tokens

    @property
    def loaded_tokens(self) -> tuple[int, int, int]:
        """Prompt tokens that the rank will load: from a store, from disk and from CPU memory, as `Scheduler.loads`."""
        return self.stored_tokens, self.disk_tokens, self.lower_tokens - self.disk_tokens

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the chosen rank has to compute."""
        return max(0, self.prompt_tokens - (self.overlap_tokens or 0) - self.stored_tokens)

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that need new KV memory on the chosen rank."""
        return max(0, self.prompt_tokens - (self.overlap_tokens or 0) + self.lower_tokens)
